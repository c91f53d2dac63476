"""Codecs: objects become bytes and come back, or say that they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from txnbridge import AccessDenied, BrokerUnavailable, InvalidOption, Poison, Topic, codecs
from txnbridge.spi import NO_HEADERS, Message


@dataclass
class Order:
    id: int
    note: str = ""


class Measured(BaseModel, ser_json_inf_nan="strings"):
    value: float
    unit: str | None = None


def through(topic: Topic, value: Any, key: Any = None) -> Message:
    data, key_data = topic.encode_value(value), topic.encode_key(key)
    return topic.decode(Message(topic.name, 0, (0,), key_data, data, NO_HEADERS, 0, 1, None))


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (codecs.bytes, b"\x00\xff"),
        (codecs.str, "früh"),
        (codecs.json, {"a": [1, None, "x"]}),
        (codecs.dataclass_json(Order), Order(1, "x")),
        (codecs.dataclass_json(dict[str, list[Order]]), {"a": [Order(1)]}),
        (codecs.pydantic(Order), Order(2)),
        (codecs.pydantic(list[int]), [1, 2]),
        (codecs.pydantic(dict[str, float | None]), {"a": None, "null": 1.5}),
        (codecs.pydantic(list[Measured]), [Measured(value=float("inf"))]),
    ],
)
def test_an_encoded_value_comes_back(codec: codecs.Codec, value: Any) -> None:
    assert through(Topic("t", codec), value).value == value


def test_json_may_begin_with_the_mark_of_utf8() -> None:
    assert codecs.json.decode(b"\xef\xbb\xbf1", codecs.CodecContext("t", "value")) == 1


def test_keys_have_a_codec_of_their_own() -> None:
    assert through(Topic("t", codecs.json, key=codecs.json), 1, {"k": 1}).key == {"k": 1}
    assert through(Topic("t", codecs.json), 1, "text").key == b"text"


def test_a_tombstone_passes_every_codec() -> None:
    assert through(Topic("t", codecs.json, key=codecs.str), None).value is None


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (codecs.bytes, "text"),
        (codecs.str, b"bytes"),
        (codecs.json, float("nan")),
        (codecs.json, object()),
        (codecs.dataclass_json(Order), {"id": 1}),
        (codecs.dataclass_json(Order), Order(float("nan"))),  # type: ignore[arg-type]
        (codecs.dataclass_json(list[Order]), Order(1)),
        (codecs.pydantic(list[float]), [float("nan")]),
        (codecs.pydantic(Measured), Order(1)),
    ],
)
def test_a_value_that_cannot_be_encoded_is_refused_before_it_is_sent(codec: codecs.Codec, value: Any) -> None:
    with pytest.raises(InvalidOption, match="orders"):
        Topic("orders", codec).encode_value(value)


@pytest.mark.parametrize(
    ("raised", "told"), [(AccessDenied, AccessDenied), (InvalidOption, InvalidOption), (MemoryError, BrokerUnavailable)]
)
def test_a_codecs_error_of_ours_stays_and_memory_that_is_short_does_not_blame_the_message(raised, told):
    topic = Topic(
        "t", Mock(**{"encode.side_effect": raised("reason")}), Mock(**{"encode.side_effect": raised("reason")})
    )
    for encode in (topic.encode_value, topic.encode_key):
        with pytest.raises(told, match="reason" if raised is told else "t raised MemoryError"):
            encode(1)


@given(st.binary())
@pytest.mark.parametrize("codec", [codecs.str, codecs.json, codecs.dataclass_json(Order), codecs.pydantic(Order)])
def test_bytes_that_cannot_be_decoded_are_poison_and_keep_the_raw_message(codec: codecs.Codec, data: bytes) -> None:
    raw = Message("t", 0, (3,), None, data, NO_HEADERS, 0, 1, None)
    kept: Any = raw
    try:
        Topic("t", codec).decode(raw)
    except Poison as poison:
        kept = poison.message
    assert kept is raw


FLOATS = codecs.pydantic(float)
UNSENDABLE = [b"NaN", b"-1e400", b"9" * 400 + b".5", b"9" * 300 + b"e99", b'"\\ud800"', b'"\xed\xa0\x80"']
UNSENDABLE += ["NaN".encode("utf-16")]
TEXTS = [b'"NaN"', b'" -inf"', b'"1e999"', b'"1e9_99"', b'"\\u0069nf"']  # which pydantic takes for numbers
TEXTS += [b'"\\ti_nf"', b'"\xc2\xa0INF\\n"', b'"\\u3000-infinity\xe2\x80\x83"', b'"%b"' % (b"1_" * 400)[:-1]]


@pytest.mark.parametrize(("codec", "data"), [*product([codecs.json, FLOATS], UNSENDABLE), *product([FLOATS], TEXTS)])
def test_json_that_could_not_be_sent_on_is_poison(codec: codecs.Codec, data: bytes) -> None:
    with pytest.raises(Poison):
        Topic("t", codec).decode(Message("t", 0, (3,), None, data, NO_HEADERS, 0, 1, None))


def test_the_reason_of_poison_holds_nothing_of_the_body() -> None:
    raw = Message("t", 0, (3,), None, b'{"id": "secret-body"}', NO_HEADERS, 0, 1, None)
    with pytest.raises(Poison) as caught:
        Topic("t", codecs.pydantic(Order)).decode(raw)
    assert "secret-body" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "x" * 250, None])
def test_a_topic_needs_a_proper_name(name: Any) -> None:
    with pytest.raises(InvalidOption):
        Topic(name)


@pytest.mark.parametrize(
    "declared",
    [{"partitions": 0}, {"partitions": "6"}, {"retention_seconds": 0}, {"retention_seconds": "1 day"}],
    ids=str,
)
def test_a_topic_cannot_be_declared_with_what_no_broker_could_make(declared: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(declared))):
        Topic("t", **declared)
