"""Bytes and fields: the protocol's own examples, protobuf as the judge, and garbage."""

import importlib
import pickle
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_pulsar.client import errors
from txnbridge_pulsar.client.format.codec import TYPES, Field, Malformed, decode, encode, read_varint, varint
from txnbridge_pulsar.client.format.frames import command, parse, send_command
from txnbridge_pulsar.client.format.ids import MessageId, TxnId, individual_ack_fields

pytestmark = pytest.mark.offline

TOPIC = "persistent://a/b/c"
TXN = TxnId(0, 0).fields
ACKED = individual_ack_fields([MessageId(7, 8, -1, 0, 3)])

# Two independent encoders agree on these.
EXAMPLES = [
    ("ping", {}, "00000009 00000005 08129201 00"),
    ("pong", {}, "00000009 00000005 08139a01 00"),
    (
        "connect",
        {"client_version": "x", "protocol_version": 21, "auth_method_name": "none"},
        "00000013 0000000f 0802120b 0a0178 2015 2a046e6f6e65",
    ),
    (
        "lookup",
        {"topic": TOPIC, "request_id": 6, "authoritative": False},
        "00000021 0000001d 0817ba0118 0a12 70657273697374656e743a2f2f612f622f63 1006 1800",
    ),
    ("tc_client_connect_request", {"request_id": 1, "tc_id": 0}, "0000000d 00000009 083ef203 0408011000"),
    (
        "new_txn",
        {"request_id": 2, "txn_ttl_seconds": 30000, "tc_id": 0},
        "00000011 0000000d 08329203 08080210b0ea011800",
    ),
    (
        "add_partition_to_txn",
        {"request_id": 3, **TXN, "partitions": [TOPIC]},
        "00000023 0000001f 0834a2031a 08031000 1800 2212 70657273697374656e743a2f2f612f622f63",
    ),
    (
        "add_subscription_to_txn",
        {"request_id": 5, **TXN, "subscription": [{"topic": TOPIC, "subscription": "s"}]},
        "00000028 00000024 0836b2031f 08051000 1800 2217 0a12 70657273697374656e743a2f2f612f622f63 120173",
    ),
    ("end_txn", {"request_id": 4, **TXN, "txn_action": 0}, "00000011 0000000d 0838c203 0808041000180020 00"),
    (
        "ack",
        {"consumer_id": 0, "ack_type": 0, "message_id": ACKED, **TXN, "request_id": 9},
        "0000001c 00000018 080a5214 08001000 1a08 0807 1008 2806 3003 3000 3800 4009",
    ),
]


@pytest.mark.parametrize(("name", "fields", "expected"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_a_command_has_the_bytes_that_other_encoders_give_it_and_is_read_as_it_was_written(name, fields, expected):
    assert command(name, **fields) == bytes.fromhex(expected)
    frame = parse(bytes.fromhex(expected)[4:])
    assert (frame.name, frame.tail) == (name, b"")
    assert {**frame.fields, "message_id": ()} == {**fields, "message_id": ()}


def test_a_send_has_the_bytes_that_other_encoders_give_it():
    metadata = encode("MessageMetadata", {"producer_name": "p", "sequence_id": 0, "publish_time": 1, **TXN})
    fields = {"producer_id": 0, "sequence_id": 0, "num_messages": 1, **TXN}
    assert send_command(fields, metadata, b"hi") == bytes.fromhex(
        "0000002b 0000000e 0806320a 08001000 18012000 2800 0e01 bdb884d0 0000000d 0a0170 1000 1801 b00100 b80100 6869"
    )


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_a_number_is_read_as_it_was_written(number):
    data = varint(number)
    assert read_varint(data + b"\xff", 0) == (number & 0xFFFFFFFFFFFFFFFF, len(data))


def test_a_number_of_more_than_ten_bytes_is_refused():
    with pytest.raises(Malformed):
        read_varint(b"\xff" * 10 + b"\x01", 0)


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "uint64": st.integers(0, (1 << 64) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "uint32": st.integers(0, (1 << 32) - 1),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "bytes": st.binary(),
}


def value_of(field: Field, depth: int) -> st.SearchStrategy[Any]:
    one = SCALARS[field.type] if field.type in SCALARS else fields_of(field.type, depth + 1)
    return st.lists(one, min_size=1, max_size=3) if field.label == "repeated" else one


@cache
def fields_of(name: str, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Any fields that a message of this type may have; an own message id in a message id only so often."""
    fields = [field for field in TYPES[name].fields if depth < 2 or field.label == "required" or field.type in SCALARS]
    required = {field.name: value_of(field, depth) for field in fields if field.label == "required"}
    others = {field.name: value_of(field, depth) for field in fields if field.label != "required"}
    return st.fixed_dictionaries(required, optional=others)


ANY_MESSAGE = st.sampled_from(sorted(TYPES)).flatmap(lambda name: st.tuples(st.just(name), fields_of(name)))


@pytest.fixture(scope="module")
def judge() -> Any:
    """Google's own library with the same schema: `judge(name)` is the class of a message."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    message_class = importlib.import_module("google.protobuf.message_factory").GetMessageClass
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="pulsar.proto", package="pulsar", syntax="proto2")
    for type in TYPES.values():
        message = file.message_type.add(name=type.name)
        for field in type.fields:
            added = message.field.add(name=field.name, number=field.number)
            added.label = getattr(kinds, f"LABEL_{field.label.upper()}")
            if field.type in SCALARS:
                added.type = getattr(kinds, f"TYPE_{field.type.upper()}")
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".pulsar.{field.type}"
    pool.Add(file)
    return lambda name: message_class(pool.FindMessageTypeByName(f"pulsar.{name}"))


def fill(message: Any, fields: dict[str, Any]) -> Any:
    for name, value in fields.items():
        if isinstance(value, dict):
            getattr(message, name).SetInParent()
            fill(getattr(message, name), value)
        elif isinstance(value, list) and isinstance(value[0], dict):
            for item in value:
                fill(getattr(message, name).add(), item)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


@given(message=ANY_MESSAGE)
def test_protobuf_and_our_codec_read_the_commands_that_the_other_one_writes(judge, message):
    name, fields = message
    theirs = fill(judge(name)(), fields)
    assert judge(name).FromString(encode(name, fields)) == theirs
    assert decode(name, theirs.SerializeToString()) == fields


@given(message=ANY_MESSAGE, more=ANY_MESSAGE)
def test_fields_that_we_do_not_know_are_skipped(judge, message, more):
    name, fields = message
    # The bytes of another message under numbers that the schema has nowhere.
    unknown = b"".join(varint(number << 3 | 2) + varint(len(data)) + data for number, data in [(900, encode(*more))])
    unknown += varint(901 << 3) + varint(7) + varint(902 << 3 | 1) + bytes(8) + varint(903 << 3 | 5) + bytes(4)
    assert decode(name, unknown + encode(name, fields) + unknown) == fields


def test_repeated_numbers_may_come_packed():
    words = [1, -1, 1 << 40]
    packed = b"".join(map(varint, words))
    data = encode("MessageIdData", {"ledger_id": 1, "entry_id": 2}) + varint(5 << 3 | 2) + varint(len(packed)) + packed
    assert decode("MessageIdData", data)["ack_set"] == words


@given(st.sampled_from(sorted(TYPES)), st.binary(max_size=300))
def test_garbage_is_read_or_refused(name, data):
    with suppress(Malformed):
        decode(name, data)


@given(ANY_MESSAGE, st.data())
def test_a_damaged_message_is_read_or_refused(message, data):
    encoded = bytearray(encode(*message))
    if encoded:
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] ^= data.draw(st.integers(1, 255))
        del encoded[data.draw(st.integers(0, len(encoded))) :]
    with suppress(Malformed):
        decode(message[0], bytes(encoded))


@given(ANY_MESSAGE)
def test_a_message_without_its_required_fields_is_refused(message):
    name, fields = message
    for required in TYPES[name].required:
        with pytest.raises(Malformed, match=required):
            decode(name, encode(name, {key: value for key, value in fields.items() if key != required}))


def test_a_message_nested_without_end_is_refused():
    data = b""
    for _ in range(5000):
        data = b"\x08\x01\x10\x01\x3a" + varint(len(data)) + data
    with pytest.raises(Malformed, match="deep"):
        decode("MessageIdData", data)


def test_text_that_is_not_utf8_is_made_readable():
    assert decode("KeyValue", b"\x0a\x01k\x12\x02\xffv") == {"key": "k", "value": "\N{REPLACEMENT CHARACTER}v"}


@pytest.mark.parametrize("code", [*range(26), 999])
def test_an_error_of_the_broker_has_its_code_and_text_and_survives_pickling(code):
    error = errors.server_error(code, "the text")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, again.text, str(again)) == (type(error), code, "the text", str(error))
    assert "the text" in str(error)
    assert not error.may_have_had_effect


@pytest.mark.parametrize("effect", [True, False])
def test_a_lost_connection_says_whether_it_may_have_had_an_effect_also_after_pickling(effect):
    for kind in (errors.BrokerConnectionLost, errors.RequestTimedOut):
        again = pickle.loads(pickle.dumps(kind("gone", effect)))
        assert (type(again), str(again), again.may_have_had_effect) == (kind, "gone", effect)


@pytest.mark.parametrize(
    ("text", "state"),
    [("Expect Txn `(0,1)` to be in OPEN status but it is in COMMITTING status", "COMMITTING"), ("something else", "")],
)
def test_the_state_of_a_transaction_is_read_from_the_brokers_text(text, state):
    error = errors.server_error(21, text)
    assert isinstance(error, errors.InvalidTransactionStatus)
    assert error.state == state
