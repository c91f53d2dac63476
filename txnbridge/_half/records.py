"""The records of a lane's topic: half messages with the data of their check-backs, and their ends.

A half is stored as one record for each of its messages, in one transaction. Each record has the message's value, key
and headers, and one header more with JSON (`_HEADER`), which says everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from txnbridge._base.messages import Message
from txnbridge._base.token import Outcome
from txnbridge.errors import NotSupported
from txnbridge.spi import Half, HalfMessage, RawHeaders

_HEADER = "txnbridge-half"
_MOST_KEYS = 1_000  # of a half, that a record of it names
_VERSION = 2


class Record(NamedTuple):
    """The value, key and headers of a record that is about to be sent."""

    value: bytes | None
    key: bytes | None
    headers: RawHeaders


@dataclass(frozen=True)
class HalfPart:
    """A half message as a record in a topic of half messages: `number` of `of` in its transaction. Times are in ms."""

    transaction: str
    number: int
    of: int
    check_at: int
    deadline_at: int
    checks: int
    message: HalfMessage


@dataclass(frozen=True)
class HalfDone:
    """The record that half messages are published or dropped. The transaction that publishes them also stores it."""

    transaction: str
    outcome: Outcome

    def record(self) -> Record:
        return _control(kind="done", transaction=self.transaction, outcome=self.outcome.value)


class Refusal(NamedTuple):
    """A committed half (a transaction's messages) that its topics refuse, or that waits behind one with equal keys."""

    since: int  # milliseconds since 1970
    keys: frozenset[str]  # of its messages, as `places_of` returns them
    behind: str = ""  # the half that it waits for; empty if it is refused itself


@dataclass(frozen=True)
class HalfParked:
    """The record that check-backs about a transaction have stopped for a reason; without a reason they begin again."""

    transaction: str
    reason: str
    refusal: Refusal | None = None

    def record(self) -> Record:
        fields = {} if self.refusal is None else {**self.refusal._asdict(), "keys": sorted(self.refusal.keys)}
        return _control(kind="parked", transaction=self.transaction, reason=self.reason, **fields)


@dataclass(frozen=True)
class Beat:
    """A heartbeat of the process that writes to a topic of half messages: its next record comes within `seconds`.

    When it has read its own heartbeat, the process has also read everything that was stored before.
    """

    nonce: str
    seconds: float

    def record(self) -> Record:
        return _control(kind="beat", nonce=self.nonce, seconds=self.seconds)


def half_records(half: Half) -> list[Record]:
    """Return the records that store a half (a transaction's half messages), one for each message, in order."""
    times, of = [half.check_at, half.deadline_at, half.checks], len(half.messages)
    records, begins = list[Record](), dict[tuple[Any, ...], bytes]()
    for number, (topic, value, key, headers, *place) in enumerate(half.messages):
        if (to := (topic, *place)) not in begins:  # many messages have the same topic
            _, header = _header(kind="half", transaction=half.transaction, times=times, to=to)
            begins[to] = header[:-1] + b',"part":['
        records.append(Record(value, key, (*headers, (_HEADER, begins[to] + b"%d,%d]}" % (number, of)))))
    return records


def read_record(message: Message) -> HalfPart | HalfDone | HalfParked | Beat | None:
    """Return the content of a record of half messages; None for a record that is not txnbridge's, or is damaged.

    Raise `NotSupported` for a record of a newer version, behind which nothing may be concluded.
    """
    headers, said = [], None
    for name, value in message.headers.raw:
        if name == _HEADER:
            said = value
        else:
            headers.append((name, value))
    try:
        fields = json.loads(said or b"")
        version = _number(fields["v"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if version > _VERSION:
        raise NotSupported(f"{message.topic!r} has records of a newer version of txnbridge: install that version here")
    try:
        match fields["kind"]:
            case "half":
                return _half_part(message, headers, fields)
            case "done":
                return HalfDone(_text(fields["transaction"]), Outcome(fields["outcome"]))
            case "parked":
                return HalfParked(_text(fields["transaction"]), str(fields["reason"]), _refusal(fields))
            case "beat":
                return Beat(_text(fields["nonce"]), float(fields["seconds"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    return None


def places_of(messages: Sequence[HalfMessage]) -> frozenset[str]:
    """Return a short name for each topic and key of these messages; only of the topics if there are many keys."""
    places = {(message.topic, message.key) for message in messages if message.key is not None}
    return topics_of(messages) if len(places) > _MOST_KEYS else frozenset(map(_place, places))


def topics_of(messages: Sequence[HalfMessage]) -> frozenset[str]:
    return frozenset(_place((message.topic, None)) for message in messages if message.key is not None)


def _place(place: tuple[str, bytes | None]) -> str:
    return sha256(repr(place).encode()).hexdigest()[:16]


def _refusal(fields: Mapping[str, Any]) -> Refusal | None:
    if "keys" not in fields:
        return None
    return Refusal(_number(fields["since"]), frozenset(map(_text, fields["keys"])), str(fields["behind"]))


def _half_part(message: Message, headers: RawHeaders, fields: Mapping[str, Any]) -> HalfPart:
    number, of = map(_number, fields["part"])
    check_at, deadline_at, checks = map(_number, fields["times"])
    topic, partition, timestamp = fields["to"]
    partition, timestamp = (None if place is None else _number(place) for place in (partition, timestamp))
    if not 0 <= number < of:
        raise ValueError("this is no part of a half")
    content = HalfMessage(_text(topic), message.value, message.key, headers, partition, timestamp)
    return HalfPart(_text(fields["transaction"]), number, of, check_at, deadline_at, checks, content)


def _number(value: object) -> int:
    if type(value) is not int or abs(value) > 1 << 63:
        raise ValueError("not a number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return value


def _control(**fields: Any) -> Record:
    return Record(b"-", None, (_header(**fields),))  # group commit shares no transaction of an empty value


def _header(**fields: Any) -> tuple[str, bytes]:
    return _HEADER, json.dumps({"v": _VERSION, **fields}, separators=(",", ":")).encode()
