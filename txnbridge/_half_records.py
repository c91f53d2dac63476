"""Records of a half topic: half messages with their place in the protocol, and the resolvers' own records.

A half is stored as one record for each of its messages, in one transaction and one partition. Each record has the
message's value, key and headers, and one header more with JSON (`_HEADER`), which says everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from txnbridge._messages import Message, Position
from txnbridge.spi import HalfMessage, RawHeaders

_HEADER = "txnbridge-half"
_VERSION = 1


@dataclass(frozen=True)
class StoredHalf:
    """One copy of a half in a half topic. Times are milliseconds since 1970.

    A transaction may have several copies. The claim that commits it names the one that is published.
    """

    transaction: str
    copy: str  # random; a copy that is moved to another partition keeps its name
    log: Mapping[str, Any]  # the place in the decision log where the evidence about the transaction begins
    log_at: int  # the time at which `log` was written
    stored_at: int
    check_at: int
    deadline_at: int
    checks: int
    due_at: int  # the time at which a resolver looks at a copy in a delay partition
    messages: Sequence[HalfMessage]

    @property
    def bytes(self) -> int:
        return sum(len(message.value or b"") + len(message.key or b"") for message in self.messages)

    def records(self) -> Iterator[Record]:
        for number, message in enumerate(self.messages):
            fields = {
                "kind": "half",
                "transaction": self.transaction,
                "copy": self.copy,
                "log": dict(self.log),
                "log_at": self.log_at,
                "stored_at": self.stored_at,
                "check_at": self.check_at,
                "deadline_at": self.deadline_at,
                "checks": self.checks,
                "due_at": self.due_at,
                "number": number,
                "of": len(self.messages),
                "topic": message.topic,
                "partition": message.partition,
                "timestamp": message.timestamp,
            }
            yield Record(message.value, message.key, (*message.headers, _header(fields)))


class Record(NamedTuple):
    """The value, key and headers of a record that is about to be appended."""

    value: bytes | None
    key: bytes | None
    headers: RawHeaders


@dataclass(frozen=True)
class HalfPart:
    """One record of a half, as it was read: the message `number` of `of`. `half.messages` has only this message."""

    half: StoredHalf
    number: int
    of: int


@dataclass(frozen=True)
class Barrier:
    """A record by which a resolver notices that it has read everything that was stored before its assignment."""

    nonce: str

    def record(self) -> Record:
        return _control({"kind": "barrier", "nonce": self.nonce})


@dataclass(frozen=True)
class Handled:
    """A record that says up to which position, included, a resolver has acknowledged its partition.

    A resolver writes it in the transaction that acknowledges. So a group whose positions were lost, or set back, does
    not publish anything again.
    """

    up_to: Position

    def record(self) -> Record:
        return _control({"kind": "handled", "up_to": list(self.up_to)})


@dataclass(frozen=True)
class Resume:
    """An administrator's request to start the check-backs of a parked half again."""

    transaction: str

    def record(self) -> Record:
        return _control({"kind": "resume", "transaction": self.transaction})


def read_record(message: Message) -> HalfPart | Barrier | Handled | Resume | None:
    """Return what a record of a half topic says; None for a record that is not txnbridge's, or of a newer version."""
    headers, said = [], None
    for name, value in message.headers.raw:
        if name == _HEADER:
            said = value
        else:
            headers.append((name, value))
    if said is None:
        return None
    try:
        fields = json.loads(said)
        if not isinstance(fields, dict) or fields.get("v") != _VERSION:
            return None
        match fields["kind"]:
            case "half":
                return _half_part(message, headers, fields)
            case "barrier":
                return Barrier(_text(fields["nonce"]))
            case "handled":
                return Handled(tuple(_number(part) for part in fields["up_to"]))
            case "resume":
                return Resume(_text(fields["transaction"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _half_part(message: Message, headers: RawHeaders, fields: Mapping[str, Any]) -> HalfPart:
    number, of, log = _number(fields["number"]), _number(fields["of"]), fields["log"]
    if not 0 <= number < of or not isinstance(log, dict):
        raise ValueError("this is no part of a half")
    partition, timestamp = (None if fields[name] is None else _number(fields[name]) for name in _PLACE)
    content = HalfMessage(_text(fields["topic"]), message.value, message.key, headers, partition, timestamp)
    times = {name: _number(fields[name]) for name in _NUMBERS}
    half = StoredHalf(_text(fields["transaction"]), _text(fields["copy"]), log, messages=[content], **times)
    return HalfPart(half, number, of)


_PLACE = ("partition", "timestamp")
_NUMBERS = ("log_at", "stored_at", "check_at", "deadline_at", "checks", "due_at")


def _number(value: object) -> int:
    if type(value) is not int or abs(value) > 1 << 63:
        raise ValueError("not a number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return value


def _control(fields: Mapping[str, Any]) -> Record:
    return Record(b"", None, (_header(fields),))


def _header(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    return _HEADER, json.dumps({"v": _VERSION, **fields}, separators=(",", ":")).encode()
