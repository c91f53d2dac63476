"""Messages and headers as values."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.reading_kit import rows
from txnbridge import Batch, Headers, InvalidOption, Message
from txnbridge._base.messages import columns_of
from txnbridge.spi import NO_HEADERS, encode_headers, encode_item

names = st.text(min_size=1)
raw_pairs = st.lists(st.tuples(names, st.binary()))


def message(**changes: object) -> Message:
    fields = {
        "topic": "t",
        "partition": 0,
        "position": (4,),
        "key": b"k",
        "value": b"secret",
        "headers": NO_HEADERS,
        "timestamp": 7,
        "deliveries": 1,
        "source": None,
    }
    return Message(**{**fields, **changes})  # type: ignore[arg-type]


@given(raw_pairs)
def test_headers_of_any_bytes_survive_the_round_trip_as_text(pairs: list[tuple[str, bytes]]) -> None:
    headers = Headers(pairs)
    assert encode_headers(headers.items_all()) == tuple(pairs)
    assert encode_headers(headers) == tuple(pairs)
    assert encode_headers(Headers(headers.items_all())) == tuple(pairs)  # type: ignore[arg-type]  # of text


def test_a_repeated_header_is_read_last_or_all() -> None:
    headers = Headers([("a", b"1"), ("b", b"2"), ("a", b"3")])
    assert headers["a"] == "3"
    assert headers.all("a") == ["1", "3"]
    assert list(headers) == ["a", "b"] and len(headers) == 2
    with pytest.raises(KeyError):
        headers["c"]


def test_headers_compare_with_a_mapping_by_their_last_values() -> None:
    assert Headers([("a", b"1")]) == {"a": "1"}
    assert Headers([("a", b"1")]) != Headers([("a", b"1"), ("a", b"1")])


@pytest.mark.parametrize("bad", [{"a": 1}, {1: "x"}, {None: "x"}, Headers({"a": "b"})])  # type: ignore[dict-item]
def test_headers_of_another_kind_are_refused(bad: object) -> None:
    with pytest.raises(InvalidOption):
        encode_headers(bad)  # type: ignore[arg-type]


def test_a_message_is_equal_by_value_and_not_by_who_delivered_it() -> None:
    assert message(source=1) == message(source=2)
    assert hash(message(source=1)) == hash(message(source=2))
    assert message() != message(value=b"other")
    assert message() != tuple(message())


def test_a_message_is_immutable_and_takes_no_new_attributes() -> None:
    with pytest.raises(AttributeError):
        message().value = b"x"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        message().other = 1  # type: ignore[attr-defined]


def test_a_message_survives_pickling_without_its_source() -> None:
    copy = pickle.loads(pickle.dumps(message(source=object())))
    assert copy == message() and copy.source is None


def test_a_repr_shows_neither_body_nor_key_nor_header() -> None:
    text = repr(message(key=b"private")) + repr(Headers([("h", b"hidden")])) + repr(Batch([message()]))
    assert "secret" not in text and "private" not in text and "hidden" not in text


def test_a_batch_slices_to_a_batch() -> None:
    batch = Batch([message(position=(i,)) for i in range(5)])
    assert [m.position for m in batch[1:3]] == [(1,), (2,)]
    assert isinstance(batch[1:3], Batch) and batch[0].position == (0,)
    assert not Batch()


@given(st.binary(), st.text() | st.binary() | st.none())
def test_an_item_of_many_is_a_value_a_pair_or_a_triple(value: bytes, key: str | bytes | None) -> None:
    encoded_key = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    assert encode_item(bytearray(value)) == (value, None, None)
    assert encode_item((value, encoded_key)) == (value, encoded_key, None)
    assert encode_item((None, encoded_key, {"a": "b"})) == (None, encoded_key, (("a", b"b"),))


@pytest.mark.parametrize("bad", ["text", 1, (b"v", 2), (b"v",), (b"v", b"k", None, None), (b"v", b"k", {"a": 1})])
def test_an_item_of_another_kind_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOption):
        encode_item(bad)


positions = st.one_of(
    st.lists(st.tuples(st.integers(0, 9)), unique=True), st.lists(st.tuples(*[st.integers(0, 3)] * 3), unique=True)
)


@given(positions, st.data())
def test_columns_have_the_messages_before_a_position(found: list[Any], data: st.DataObject) -> None:
    messages = [message(position=at, value=bytes(at)) for at in sorted(found)]
    end = data.draw(st.sampled_from([*found, (5,), (2, 0, 0)]) if found else st.just((5,)))
    kept = [each for columns in columns_of(messages) for each in rows(columns.before(end))]
    assert kept == [each for each in messages if each.position < end]
