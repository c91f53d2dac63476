"""Tests of the encoding of our messages, and of the decoding of other clients' messages."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client.protocol.records import decode_records, unpack_properties
from txnbridge_rocketmq.client.protocol.send_requests import send
from txnbridge_rocketmq.write.message_format import OWN, RESERVED, from_wire, ordering_key, partition_of, to_wire

from tests.rocketmq.kit import java_hash, pairs, stored
from txnbridge.errors import InvalidOption

GROUP = "__SHARDINGKEY"  # RocketMQ's name of the message group

pytestmark = pytest.mark.offline


def sent(value=b"hello", key=None, headers=(), timestamp=None, **more):
    """Return the properties and the body that a broker gets, as text and bytes."""
    request = send(to_wire("orders", value, key, headers, timestamp, **more), "group", 0)
    return request.fields["i"], request.body


def arrived(properties, body):
    (record,) = decode_records(stored(body, properties=properties))
    return from_wire(record, "orders", 5)


def there_and_back(**message):
    return arrived(*sent(**message))


_NAMES = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in RESERVED and not name.startswith(OWN) and name not in ("TAGS", GROUP))
_FEW_NAMES = st.sampled_from(["a", "b", "txnbridge-b64.a", "txnbridge-b64.txnbridge-b64.a", "2.a", "ü"])
_VALUES = st.one_of(st.binary(max_size=20), st.text(max_size=20).map(lambda one: one.encode("utf-8", "surrogatepass")))


@given(
    value=st.none() | st.binary(max_size=50),
    key=st.none() | st.binary(max_size=50) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")),
    headers=st.lists(st.tuples(_NAMES | _FEW_NAMES, _VALUES), max_size=8),
    timestamp=st.none() | st.integers(0, 1 << 50),
)
def test_a_message_comes_back_as_it_was_sent(value, key, headers, timestamp):
    message = there_and_back(value=value, key=key, headers=headers, timestamp=timestamp)
    assert (message.value, message.key) == (value, key)
    assert message.headers.raw == tuple(headers)
    assert message.timestamp == (1_700_000_000_002 if timestamp is None else timestamp)
    assert (message.topic, message.partition, message.position) == ("orders", 5, (7,))


@given(st.lists(st.tuples(_FEW_NAMES, _VALUES), max_size=8), st.randoms(use_true_random=False))
def test_headers_come_back_in_their_order_whatever_the_broker_makes_of_the_properties(headers, random):
    text, body = sent(headers=headers)
    properties = list(unpack_properties(text).items())
    random.shuffle(properties)
    shuffled = "".join(f"{name}\x01{value}\x02" for name, value in properties)
    assert arrived(shuffled, body).headers.raw == tuple(headers)


def test_a_tag_is_rocketmqs_own():
    text, _ = sent(headers=[("TAGS", b"new"), ("kind", b"order")])
    assert unpack_properties(text)["TAGS"] == "new"
    assert dict(there_and_back(headers=[("TAGS", b"new"), ("kind", b"a")]).headers) == {"TAGS": "new", "kind": "a"}


def test_a_property_of_the_bridge_itself_is_no_header():
    message = there_and_back(headers=[("kind", b"order")], own={f"{OWN}txn": "billing/1"}, unique_key="AB12")
    assert message.headers.raw == (("kind", b"order"),)


GOLDEN = [
    (
        {"value": None, "key": b"\xff\x00", "headers": [("a", b"1"), ("b", b"\xff"), ("a", b"")], "timestamp": 1234},
        {
            "txnbridge.value": "none",
            "txnbridge.key": "/wA=",
            "txnbridge.timestamp": "1234",
            "a": "1",
            "txnbridge-b64.b": "/w==",
            "txnbridge-b64.txnbridge.2.a": "=",
            "txnbridge.headers": '["a","b","a"]',
            "WAIT": "true",
            "UNIQ_KEY": "AB12",
        },
        b"\x00",
    ),
    (
        {"value": b"", "key": b"order-42", "headers": [("kind", b"new")]},
        {"txnbridge.value": "empty", "KEYS": "order-42", "kind": "new", "WAIT": "true", "UNIQ_KEY": "AB12"},
        b"\x00",
    ),
    (
        {"value": b"{}", "key": b"two words"},
        {"txnbridge.key": "dHdvIHdvcmRz", "WAIT": "true", "UNIQ_KEY": "AB12"},
        b"{}",
    ),
]


@pytest.mark.parametrize(("message", "properties", "body"), GOLDEN, ids=["all at once", "empty", "plain"])
def test_messages_are_written_as_ever_and_read_as_ever(message, properties, body):
    text, found = sent(**message, unique_key="AB12")
    assert (unpack_properties(text), found) == (properties, body)
    read = arrived(pairs(**properties), body)
    assert (read.value, read.key) == (message["value"], message["key"])
    assert read.headers.raw == tuple(message.get("headers", ()))


@pytest.mark.parametrize(
    "name", ["KEYS", "DELAY", "TIMER_DELIVER_MS", "UNIQ_KEY", "txnbridge.value", "a\x01b", "\udcff"]
)
def test_a_header_that_means_something_to_rocketmq_or_to_us_is_refused_by_name(name):
    with pytest.raises(InvalidOption) as raised:
        sent(headers=[(name, b"1")])
    assert repr(name) in str(raised.value)


def test_the_message_group_of_fifo_topics_is_a_header_and_chooses_the_partition_of_a_message_without_a_key():
    headers = [(GROUP, "käse 7".encode()), ("own", b"1")]
    text, _ = sent(headers=headers)
    assert unpack_properties(text)[GROUP] == "käse 7"
    assert there_and_back(headers=headers).headers.raw == tuple(headers)
    assert arrived(pairs(**{GROUP: "theirs"}), b"x").headers[GROUP] == "theirs"
    message = to_wire("orders", b"x", None, headers, None)
    assert (ordering_key(message, None), ordering_key(message, b"key")) == ("käse 7".encode(), b"key")


@pytest.mark.parametrize("value", [b"", b" ", b"a\x01b", b"a\x02b", b"\xff", b"a|b"])
@pytest.mark.parametrize(("name", "match"), [(GROUP, "message group"), ("TAGS", "TAGS")])
def test_a_message_group_or_a_tag_that_subscriptions_could_not_name_is_refused(name, match, value):
    with pytest.raises(InvalidOption, match=match) if name == "TAGS" or value != b"a|b" else nullcontext():
        sent(headers=[(name, value)])


@pytest.mark.parametrize("name", ["note", "TAGS"])
def test_headers_that_brokers_have_no_room_for_are_refused_without_showing_them(name):
    # The broker stores up to 32,767 bytes, and adds some to the half at each check-back.
    with pytest.raises(InvalidOption, match="at most 30000") as raised:
        sent(headers=[(name, b"secret" * 5400)])
    assert "secret" not in str(raised.value)
    sent(headers=[(name, b"x" * 29_900)])


def test_a_message_of_another_client_has_its_properties_as_headers_and_its_keys_as_key():
    text = pairs(
        KEYS="k1 k2", TAGS="new", UNIQ_KEY="AB", WAIT="true", CLUSTER="c", TRAN_MSG="true", PGROUP="g", own="ä"
    )
    message = arrived(text, b"body")
    assert (message.key, message.value) == (b"k1 k2", b"body")
    assert dict(message.headers) == {"TAGS": "new", "own": "ä"}
    assert message.timestamp == 1_700_000_000_002


@pytest.mark.parametrize("odd", ["not base64!", "=", "[1]", "null", "{", "-1", "x", "[" * 20_000, "9" * 5_000])
def test_odd_properties_of_our_names_are_no_reason_to_fail(odd):
    for name in (*map("txnbridge.".__add__, ("key", "timestamp", "headers", "7.b", "")), "txnbridge-b64.a"):
        message = arrived(pairs(**{name: odd, "kind": "new"}), b"body")
        assert message.value == b"body"
        assert message.headers["kind"] == "new"


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=5))
def test_a_message_is_read_whatever_its_properties_are(properties):
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    assert arrived(text.encode("utf-8", "replace").decode(), b"body").topic == "orders"


# The hash of the last key is Java's smallest int.
@pytest.mark.parametrize("key", ["", "a", "order-42", "\U0001d11eü", "polygenelubricants"])
def test_a_keys_partition_is_the_one_that_java_picks_by_hash(key):
    for count in (1, 3, 8, 10):
        # Math.abs(key.hashCode() % count), where the remainder has the sign of the hash.
        assert partition_of(key.encode(), count) == abs(java_hash(key)) % count


def test_the_hash_is_javas():
    assert [java_hash(text) for text in ("", "hello", "polygenelubricants")] == [0, 99162322, -(2**31)]


@given(st.binary(max_size=30), st.integers(1, 64))
def test_any_key_has_a_partition(key, count):
    assert 0 <= partition_of(key, count) < count
