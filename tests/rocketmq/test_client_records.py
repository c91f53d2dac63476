"""Tests of stored messages: every flag and form that brokers write is decoded, and other bytes are refused."""

import contextlib
import gzip
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client.errors import CannotDecompress, ProtocolViolation
from txnbridge_rocketmq.client.protocol.codes import SystemFlag
from txnbridge_rocketmq.client.protocol.records import (
    OffsetId,
    decode_records,
    pack_properties,
    unpack_properties,
    unwrap,
)

from tests.rocketmq.kit import LONG_TOPIC, SHORT_TOPIC, pairs, stored

pytestmark = pytest.mark.offline

ZLIB, LZ4, ZSTD = 0x300, 0x100, 0x200
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20)


def test_a_record_is_read_field_by_field():
    data = stored(
        b"hello",
        "orders",
        pairs(UNIQ_KEY="AB12", KEYS="k1 k2", TAGS="new", own="x"),
        prepared_offset=99,
        stored_host=bytes([127, 0, 0, 1]) + struct.pack(">i", 30911),
    )
    (record,) = decode_records(data)
    assert (record.topic, record.queue, record.queue_offset) == ("orders", 3, 7)
    assert record.offset_id == OffsetId("127.0.0.1", 30911, 4711)
    assert (record.born_time, record.stored_time) == (1_700_000_000_001, 1_700_000_000_002)
    assert (record.unique_key, record.prepared_offset) == ("AB12", 99)
    assert (record.properties["KEYS"], record.properties["TAGS"]) == ("k1 k2", "new")
    assert record.properties["own"] == "x"
    assert record.payload() == b"hello"


@pytest.mark.parametrize(
    "flag", [SystemFlag.BORN_IPV6, SystemFlag.STORED_IPV6, SystemFlag.BORN_IPV6 | SystemFlag.STORED_IPV6]
)
@pytest.mark.parametrize("magic", [SHORT_TOPIC, LONG_TOPIC])
def test_addresses_and_topics_of_either_size_are_read(flag, magic):
    data = stored(
        b"hello",
        "t" * 127,
        pairs(TAGS="x"),
        system_flag=flag,
        magic=magic,
        born_host=bytes(20 if flag & SystemFlag.BORN_IPV6 else 8),
        stored_host=bytes(20 if flag & SystemFlag.STORED_IPV6 else 8),
    )
    (record,) = decode_records(data)
    assert (record.topic, record.body, record.properties) == ("t" * 127, b"hello", {"TAGS": "x"})


def test_records_that_follow_one_another_are_all_read_also_those_without_properties():
    records = decode_records(b"".join(stored(b"%d" % number, queue_offset=number) for number in range(5)))
    assert [record.queue_offset for record in records] == [0, 1, 2, 3, 4]
    assert [record.unique_key for record in records] == [None] * 5
    assert decode_records(b"") == []


def test_a_record_with_properties_that_are_no_text_is_shown():
    data = stored(b"hello", properties="own\x01x?\x02").replace(b"x?", b"x\xff")
    (record,) = decode_records(data)
    assert record.properties["own"].encode("utf-8", "surrogateescape") == b"x\xff"


@pytest.mark.parametrize("kind", [0, ZLIB])
@pytest.mark.parametrize("compress", [zlib.compress, gzip.compress])
def test_a_body_compressed_by_zlib_or_gzip_is_unpacked(kind, compress):
    (record,) = decode_records(stored(compress(b"hello" * 1000), system_flag=SystemFlag.COMPRESSED | kind))
    assert record.payload() == b"hello" * 1000


@pytest.mark.parametrize(("kind", "name"), [(LZ4, "LZ4"), (ZSTD, "ZSTD"), (0x700, "unknown kind 7")])
def test_a_body_compressed_otherwise_is_refused_by_name_and_kept(kind, name):
    (record,) = decode_records(stored(b"packed", system_flag=SystemFlag.COMPRESSED | kind))
    with pytest.raises(CannotDecompress, match=name):
        record.payload()
    assert record.body == b"packed"


def test_a_body_that_unpacks_to_more_than_wanted_is_refused():
    (record,) = decode_records(stored(zlib.compress(bytes(1 << 20)), system_flag=SystemFlag.COMPRESSED))
    assert len(record.payload(most=1 << 20)) == 1 << 20
    with pytest.raises(CannotDecompress, match="more than"):
        record.payload(most=(1 << 20) - 1)


@pytest.mark.parametrize("body", [b"", b"not compressed", zlib.compress(b"hello")[:-3]])
def test_a_body_that_is_not_what_it_says_is_refused(body):
    (record,) = decode_records(stored(body, system_flag=SystemFlag.COMPRESSED))
    with pytest.raises(CannotDecompress):
        record.payload()


@given(st.binary(max_size=100))
def test_a_batch_of_anything_is_read_or_refused(body):
    (record,) = decode_records(stored(body, system_flag=SystemFlag.INNER_BATCH | SystemFlag.NEEDS_UNWRAPPING))
    with contextlib.suppress(ProtocolViolation):
        list(unwrap(record))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage):
    if garbage:
        with pytest.raises(ProtocolViolation):
            decode_records(garbage)


@given(st.integers(1, 10_000))
def test_a_cut_off_record_is_refused(cut):
    data = stored(b"hello", properties=pairs(a="b"))
    with pytest.raises(ProtocolViolation):
        decode_records(data + data[: -(cut % (len(data) - 1) + 1)])


@given(st.data())
def test_a_record_with_any_byte_changed_is_read_or_refused(data):
    record = bytearray(stored(b"hello", properties=pairs(a="b")))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolViolation):
        decode_records(bytes(record))


@pytest.mark.parametrize("size", [-1, 0, 1, 4, 2**31 - 1])
def test_a_record_of_an_impossible_size_neither_loops_nor_allocates(size):
    with pytest.raises(ProtocolViolation):
        decode_records(struct.pack(">i", size) + bytes(100))


@given(st.dictionaries(names, names, max_size=6))
def test_properties_come_back_as_they_were(properties):
    assert unpack_properties(pack_properties(properties)) == properties


@given(st.text())
def test_any_text_is_read_as_properties(text):
    unpack_properties(text)


@pytest.mark.parametrize("properties", [{"": "x"}, {"x": ""}, {"a\x01": "x"}, {"a": "\x02"}, {"a": "\ud800"}], ids=repr)
def test_a_property_that_brokers_would_not_give_back_is_refused(properties):
    with pytest.raises(ValueError, match=r"propert|surrogates"):
        pack_properties(properties)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7F00000100002A9F000000000002B67C", OffsetId("127.0.0.1", 10911, 177788)),
        ("00000000000000000000000000000001000078BF0000000000000000", OffsetId("::1", 30911, 0)),
    ],
)
def test_an_offset_id_is_read_and_written(text, expected):
    assert OffsetId.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text", ["", "7F", "7F00000100002A9F000000000002B67", "x" * 32, "00" * 17, "00" * 28 + "0", " " * 32]
)
def test_a_malformed_offset_id_is_refused(text):
    with pytest.raises(ValueError, match=r"offset id|hexadecimal"):
        OffsetId.parse(text)
