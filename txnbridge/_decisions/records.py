"""The records of a decision log, and their format as bytes.

A record is one line of JSON that begins with `{"txnbridge":<version>`; in a body part, raw bytes follow the line.
docs/decisions.md explains each kind.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge.errors import InvalidOption

VERSION = 2
_MAGIC = b'{"txnbridge":'

# The only kind of ledger entry that the fold interprets: a prepared transaction no longer depends on its owner.
PREPARE = "prepare"

# Brokers accept messages of 1 MB by default; the difference to 1 MB is for the broker's own headers.
MAX_RECORD_BYTES = 900_000

# The depth at which Python's JSON parser fails depends on the depth of the call stack; this limit is far below it.
_DEEPEST = 64

IdPath = tuple[str | int, ...]
_Value = TypeVar("_Value")


class UnreadableRecord(ValueError):
    """Raised for bytes that are not a record which this version can read; the message says why."""


@dataclass(frozen=True)
class EvidenceBegin:
    """The record in the log after which all records about a transaction come, by its position and its nonce (`id`).

    By this record the process that began the transaction had announced itself.
    """

    at: Position
    id: str


@dataclass(frozen=True)
class OpeningRef:
    """Names the act (opening) by which a record's author became an id's owner; 0: it made the id up for itself."""

    id: IdPath
    name: str
    number: int

    @classmethod
    def of_made_up(cls, id: IdPath) -> OpeningRef:
        """Return the reference to the only owner of an id that a process made up for itself."""
        return cls(id, str(id[0]), 0)

    @property
    def made_up(self) -> bool:
        """True if the owner made the id up for itself, so that no other process opens the id."""
        return self.number == 0


@dataclass(frozen=True)
class StoredBody:
    """A body that is too large for one record: the positions of its body parts, and the hash of the whole body."""

    parts: tuple[Position, ...]
    digest: str


@dataclass(frozen=True)
class ClaimAcks:
    """The ranges of messages that a claim acknowledges, and the position up to which its author had read the log.

    Up to `read_up_to`, the log had no decision on the author's own transaction, and no other transaction had
    acknowledged in these groups and partitions since the author read the groups' positions.
    """

    read_up_to: Position
    ranges: tuple[AckRange, ...]


@dataclass(frozen=True)
class AckRange:
    """One acknowledged range of a partition: from the group's old position to its next position to read."""

    group: str
    partition: tuple[str, int]
    first: Position
    end: Position

    @property
    def place(self) -> GroupPartition:
        return self.group, self.partition


GroupPartition = tuple[str, tuple[str, int]]  # group, (topic, partition number)


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """The fields of every record: the log's id as its writer knows it (None: not known), and a unique nonce."""

    kind: ClassVar[str]
    log: str | None
    nonce: str

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind


@dataclass(frozen=True, kw_only=True)
class Birth(LogRecord, kind="birth"):
    """The first record of a log. `log` becomes the log's id; `at` is the time (ms since 1970)."""

    at: int


@dataclass(frozen=True, kw_only=True)
class Presence(LogRecord, kind="presence"):
    """Announces a process: only later records decide its next transactions. Needed until `until` (ms since 1970)."""

    until: int


@dataclass(frozen=True, kw_only=True)
class Opened(LogRecord, kind="opened"):
    """An owner has opened an id. `under.number` counts the id's openings; 0 is for an id that its process made up.

    `named` is True if the caller chose the name of this opening (`under.name`), and may repeat the opening by it.
    """

    under: OpeningRef
    named: bool
    host: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EntryRecord(LogRecord, kind="entry"):
    """A record by a backend about one of an owner's transactions (see `txnbridge.spi.Ledger.record`)."""

    under: OpeningRef
    about: str  # "prepare", "outcome", …
    transaction: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class PreparedAcks:
    """The acknowledgements of a prepared transaction, and the time until which it stays prepared (ms since 1970)."""

    begin: EvidenceBegin
    expires_at: int
    places: tuple[GroupPartition, ...]

    @classmethod
    def of(cls, record: EntryRecord) -> PreparedAcks | None:
        """Return the acknowledgements of a prepare record; None if it has none."""
        data = record.data
        try:
            if record.about != PREPARE or not data["acks"]:
                return None
            begin = EvidenceBegin(read_position(data["log"]["at"]), _text(data["log"]["id"]))
            places = tuple((_text(group), (_text(topic), _number(number))) for group, topic, number, *_ in data["acks"])
            return cls(begin, _number(data["expires_at"]), places)
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class Claimed(LogRecord, kind="claim"):
    """A claim: a process decides an id to COMMIT or ABORT.

    `begin` is given if a token carries the id, `by` if an owner claims under its opening: after a newer opening such a
    claim is void. The claim's data is in `body`, or in body parts (`stored`). Only a COMMIT of an id that a token
    carries has `acked`.
    """

    id: IdPath
    decision: Decision
    begin: EvidenceBegin | None
    by: OpeningRef | None
    acked: ClaimAcks | None = None
    body: Mapping[str, Any] | None
    stored: StoredBody | None

    def __post_init__(self) -> None:
        if self.acked is not None and (self.begin is None or self.decision is not Decision.COMMIT):
            raise ValueError("this claim cannot acknowledge anything")


@dataclass(frozen=True, kw_only=True)
class Done(LogRecord, kind="done"):
    """A done mark: every id that consists of `id` and a number up to `up_to` is finished."""

    id: IdPath
    up_to: int


@dataclass(frozen=True, kw_only=True)
class BodyPart(LogRecord, kind="part"):
    """A part of a body that is too large for one record."""

    payload: bytes


@dataclass(frozen=True, kw_only=True)
class Snapshot(LogRecord, kind="snapshot"):
    """Replaces all records up to and including the covered record: its position is `covers`, its hash `digest`.

    `born` is the position of the log's birth record, so that a late copy of the birth record is recognised.
    """

    born: Position
    covers: Position
    digest: str
    at: int
    body: Mapping[str, Any] | None
    stored: StoredBody | None


@dataclass(frozen=True, kw_only=True)
class Renewed(LogRecord, kind="renewed"):
    """An operator renewed the log: no record before this one counts.

    A renewal counts only directly after the record with position `covers` and hash `digest`, the last one that the
    operator's process had read. `log` becomes the log's id; `at` is the time (ms since 1970), `host` the operator's
    host.
    """

    covers: Position
    digest: str
    at: int
    host: str


def digest(raw: bytes) -> str:
    """Return the hash by which snapshots and claims refer to a record or a body."""
    return hashlib.sha256(raw).hexdigest()[:32]


# --- writing ------------------------------------------------------------------------------------------------------


def encode(record: LogRecord) -> bytes:
    """Return a record as bytes. Raise `InvalidOption` if `decode` cannot read them back, or if they are too large."""
    values = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    payload = values.pop("payload", None)
    raw = dump_json({"txnbridge": VERSION, "kind": record.kind, **values})
    if payload is not None:
        raw += b"\n" + payload
    if len(raw) > MAX_RECORD_BYTES:
        text = f"this {record.kind!r} record of a decision log takes {len(raw)} bytes, more than {MAX_RECORD_BYTES}:"
        raise InvalidOption(text + " shorten its data")
    try:
        decode(raw)  # a record that cannot be read back would stop every process that reads the log
    except UnreadableRecord as error:
        raise InvalidOption(f"this cannot go into a decision log: {error}") from None
    return raw


def check_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a caller's data as JSON. Raise `InvalidOption` unless every Python version can read it back."""
    if not isinstance(data, Mapping):
        raise InvalidOption(f"the data of a decision is a mapping, not {type(data).__name__}")
    if _is_deeper(data, _DEEPEST):
        raise InvalidOption(f"the data of a decision is nested at most {_DEEPEST} deep")
    return dict(data)


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(inner, levels - 1) for inner in value)


def dump_json(value: Any) -> bytes:
    """Return compact JSON in ASCII. Raise `InvalidOption` for values that JSON cannot hold."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"the data in a decision log must be JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Return a field's value in a form that JSON can hold."""
    if isinstance(value, Decision):
        return value.value
    if isinstance(value, ClaimAcks):
        ranges = [[r.group, *r.partition, r.first, r.end] for r in value.ranges]
        return {"read_up_to": value.read_up_to, "ranges": ranges}
    if isinstance(value, EvidenceBegin | OpeningRef | StoredBody):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


# --- reading ------------------------------------------------------------------------------------------------------


def decode(raw: bytes) -> LogRecord:
    """Return the record in these bytes. Raise `UnreadableRecord`, and no other error, if they are not a record."""
    line, newline, payload = raw.partition(b"\n")
    values = _read_line(line)
    kind = _KINDS.get(str(values.pop("kind", "")))
    if kind is None:
        raise UnreadableRecord("its kind is unknown")
    if (kind is BodyPart) != bool(newline):
        raise UnreadableRecord("only a body part has bytes after its line")
    if kind is BodyPart:
        values["payload"] = payload
    if values.keys() != {field.name for field in fields(kind)}:
        raise UnreadableRecord(f"a {kind.kind!r} record has other fields")
    try:
        return kind(**{name: _FIELDS[name](value) for name, value in values.items()})
    except (ValueError, TypeError):
        raise UnreadableRecord(f"a field of this {kind.kind!r} record is of the wrong kind") from None


def load_json(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in these bytes. Raise ValueError if they are not a JSON object."""
    try:
        value = json.loads(raw, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _read_line(line: bytes) -> dict[str, Any]:
    if not line.startswith(_MAGIC):
        raise UnreadableRecord("it was not written by txnbridge")
    try:
        values = load_json(line)
    except ValueError:
        raise UnreadableRecord("it is damaged") from None
    version = values.pop("txnbridge", None)
    if type(version) is not int or version != VERSION:
        raise UnreadableRecord(
            f"its format is {version!r:.20}, this version of txnbridge reads up to {VERSION}: upgrade it"
        )
    return values


def _finite(text: str) -> float:
    # A process may have to write a number that it has read (in a snapshot), and JSON has no infinity.
    if not math.isfinite(value := float(text)):
        raise ValueError("not a finite number")
    return value


def _only(kind: type[_Value]) -> Callable[[Any], _Value]:
    """Return a function that returns a value of this type, and raises TypeError for any other value."""

    def read(value: Any) -> _Value:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return read


_text, _flag, _bytes, _object = _only(str), _only(bool), _only(bytes), _only(dict)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _decision(value: Any) -> Decision:
    if (decision := Decision(value)) is Decision.UNDECIDED:
        raise ValueError
    return decision


def read_position(value: Any) -> Position:
    """Return a position in a log from its JSON value. Raise ValueError or TypeError if the value is not one."""
    if not isinstance(value, list | tuple) or not value:
        raise TypeError("a position is a list of numbers")
    return tuple(_number(part) for part in value)


def read_path(value: Any) -> IdPath:
    """Return an id from its JSON value. Raise ValueError or TypeError if the value is not an id."""
    if not isinstance(value, list | tuple) or not value:
        raise TypeError("an id is a list of text and numbers")
    return tuple(part if isinstance(part, str) else _number(part) for part in value)


def read_begin(value: Any) -> EvidenceBegin:
    """Return an `EvidenceBegin` from its JSON value. Raise ValueError or TypeError if the value is not one."""
    at, id = _exactly(value, "at", "id")
    return EvidenceBegin(read_position(at), _text(id))


def read_under(value: Any) -> OpeningRef:
    """Return an `OpeningRef` from its JSON value. Raise ValueError or TypeError if the value is not one."""
    id, name, number = _exactly(value, "id", "name", "number")
    return OpeningRef(read_path(id), _text(name), _number(number))


def _stored(value: Any) -> StoredBody:
    parts, hashed = _exactly(value, "parts", "digest")
    if not isinstance(parts, list):
        raise TypeError
    return StoredBody(tuple(read_position(part) for part in parts), _text(hashed))


def _acked(value: Any) -> ClaimAcks:
    read_up_to, ranges = _exactly(value, "read_up_to", "ranges")
    if not isinstance(ranges, list) or not ranges:
        raise TypeError
    return ClaimAcks(read_position(read_up_to), tuple(_range(each) for each in ranges))


def _range(value: Any) -> AckRange:
    group, topic, number, first, end = value
    return AckRange(_text(group), (_text(topic), _number(number)), read_position(first), read_position(end))


def _exactly(value: Any, *names: str) -> list[Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise TypeError
    return [value[name] for name in names]


def _optional(read: Callable[[Any], _Value]) -> Callable[[Any], _Value | None]:
    return lambda value: None if value is None else read(value)


_KINDS = {
    kind.kind: kind for kind in (Birth, Presence, Opened, EntryRecord, Claimed, Done, BodyPart, Snapshot, Renewed)
}
# How each field is read from JSON, by name: a field of one name means the same in every kind of record.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "log": _optional(_text),
    "nonce": _text,
    "until": _number,
    "under": read_under,
    "named": _flag,
    "host": _text,
    "data": _object,
    "about": _text,
    "transaction": _text,
    "id": read_path,
    "decision": _decision,
    "begin": _optional(read_begin),
    "by": _optional(read_under),
    "acked": _optional(_acked),
    "body": _optional(_object),
    "stored": _optional(_stored),
    "up_to": _number,
    "payload": _bytes,
    "born": read_position,
    "covers": read_position,
    "digest": _text,
    "at": _number,
}
