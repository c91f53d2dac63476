"""Tests of frames: brokers can read what is encoded, and no input makes the decoder wait, fail or grow."""

import contextlib
import json
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client.errors import ProtocolViolation
from txnbridge_rocketmq.client.protocol.frames import (
    LARGEST_ANSWER,
    LARGEST_FRAME,
    FrameDecoder,
    RemotingCommand,
    decode,
    encode,
)

from tests.conformance.test_frames import cut_up
from tests.rocketmq.kit import around, binary_frame, frame

pytestmark = pytest.mark.offline

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
fields = st.dictionaries(texts, texts, max_size=5)
codes, opaques, flags = st.integers(0, 32_767), st.integers(0, 2**31 - 1), st.integers(0, 3)
commands = st.builds(RemotingCommand, codes, opaques, flags, fields, texts, st.binary(max_size=100))


def fed(chunks: list[bytes]) -> list[RemotingCommand]:
    frames = FrameDecoder()
    return [command for chunk in chunks for command in frames.feed(chunk)]


def test_a_request_is_written_as_all_clients_write_it():
    data = encode(RemotingCommand(310, 7, fields={"b": "orders", "m": "false"}, body=b"hello"))
    length, word = struct.unpack_from(">ii", data)
    assert length == len(data) - 4
    assert word >> 24 == 0
    header = json.loads(data[8 : 8 + word])
    assert header.pop("extFields") == {"b": "orders", "m": "false"} and header.pop("serializeTypeCurrentRPC") == "JSON"
    assert header == {"code": 310, "language": "OTHER", "version": 485, "opaque": 7, "flag": 0}
    assert data[8 + word :] == b"hello"


HEADER = {"code": 0, "opaque": 1, "flag": 1, "extFields": {"a": None, "b": "x"}, "remark": None}


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (frame(0, 12, 1, {"a": "3"}, b"body", "no code"), RemotingCommand(0, 12, 1, {"a": "3"}, "no code", b"body")),
        (frame(17, 12, 1), RemotingCommand(17, 12, 1)),
        (around(json.dumps(HEADER).encode()), RemotingCommand(0, 1, 1, {"b": "x"})),
    ],
    ids=["of Java", "without fields and remark", "with a field without a value"],
)
def test_an_answer_is_read(data, command):
    assert fed([data]) == [command]
    assert command.is_answer and not command.wants_answer


@given(commands)
def test_a_command_in_the_binary_form_is_read_alike(command):
    data = binary_frame(command.code, command.opaque, command.flag, command.fields, command.body, command.remark)
    assert fed([data]) == [command]


@given(st.lists(commands, max_size=4), st.lists(st.integers(1, 60), max_size=20))
def test_commands_come_out_as_they_went_in_however_the_stream_is_cut(sent, sizes):
    stream = b"".join(map(encode, sent))
    assert fed(cut_up(stream, sizes)) == sent


def test_a_broker_asks_with_and_without_wanting_an_answer():
    asked, told = fed([frame(39, 1, 0), frame(40, 2, 2)])
    assert asked.wants_answer and not told.wants_answer
    assert not asked.is_answer and not told.is_answer


def test_a_request_larger_than_brokers_take_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="more than"):
        encode(RemotingCommand(310, body=bytes(LARGEST_FRAME)))


@given(st.binary(max_size=300), st.lists(st.integers(1, 60), max_size=10))
def test_garbage_is_refused_or_waited_for(garbage, sizes):
    with contextlib.suppress(ProtocolViolation):
        fed(cut_up(garbage, sizes))


@given(commands, st.data())
def test_a_frame_with_any_byte_changed_is_read_or_refused(command, data):
    stream = bytearray(encode(command))
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolViolation):
        fed([bytes(stream)])


@given(st.binary(max_size=200), st.sampled_from([0, 1, 2, 255]))
def test_any_header_of_any_kind_is_read_or_refused(header, kind):
    with contextlib.suppress(ProtocolViolation):
        decode(around(header, b"body", kind)[4:])


@given(commands, st.data())
def test_a_cut_off_header_of_either_kind_is_refused(command, data):
    binary = binary_frame(command.code, command.opaque, command.flag, command.fields, b"", command.remark)
    whole = data.draw(st.sampled_from([binary, encode(RemotingCommand(command.code, command.opaque))]))
    kind = whole[4]
    header = whole[8 : 8 + data.draw(st.integers(0, len(whole) - 9))]
    with pytest.raises(ProtocolViolation):
        decode(around(header, b"", kind)[4:])


FOREIGN = [int.from_bytes(begin, "big") for begin in (b"HTTP", b"\x15\x03\x01\x00", b"\x16\x03\x01\x00")]


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 3, LARGEST_ANSWER + 1, 2**31 - 1, *FOREIGN])
def test_a_length_that_no_frame_has_is_refused_at_once(length):
    with pytest.raises(ProtocolViolation, match="announced"):
        fed([struct.pack(">i", length)])


@pytest.mark.parametrize("size", [3, 0xFFFFFF])
def test_a_header_longer_than_its_frame_is_refused(size):
    with pytest.raises(ProtocolViolation, match="header"):
        fed([struct.pack(">ii", 6, size) + b"{}"])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"code":0,"opaque":1}',
        b'{"code":"0","opaque":1,"flag":1}',
        b'{"code":true,"opaque":1,"flag":1}',
        b'{"code":0,"opaque":1.5,"flag":1}',
        b'{"code":0,"opaque":1,"flag":1,"extFields":[1]}',
        b'{"code":0,"opaque":1,"flag":1,"extFields":"x"}',
        b'{"code":' + b"9" * 10_000 + b',"opaque":1,"flag":1}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=lambda header: repr(header[:40]),
)
def test_a_header_that_is_none_is_refused(header):
    with pytest.raises(ProtocolViolation):
        decode(around(header)[4:])


def test_a_giant_frame_costs_only_what_has_come():
    tracemalloc.start()
    try:
        assert fed([struct.pack(">ii", LARGEST_ANSWER, 2) + b"{}"]) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_many_frames_in_one_chunk_take_time_in_proportion():
    assert len(fed([(frame(0, 1, 1) * 20_000)])) == 20_000
