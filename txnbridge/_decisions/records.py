"""The records of a decision log, and how they are written as bytes.

A record is one line of JSON that begins with `{"txnbridge":<version>`; a part carries raw bytes behind the line.
docs/decisions.md explains each kind.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from txnbridge._messages import Position
from txnbridge._token import Decision
from txnbridge.errors import InvalidOption

VERSION = 2
_READABLE = (1, VERSION)
_MAGIC = b'{"txnbridge":'

# Brokers take messages of 1 MB by default; the rest is for their own headers.
MAX_RECORD_BYTES = 900_000
# A part's line of JSON and a margin: a part of this many bytes is always within the limit.
PART_BYTES = MAX_RECORD_BYTES - 1_000

# Python's parser gives up at a depth that depends on how deep its caller is; this is far from it.
_DEEPEST = 64

Path = tuple[str | int, ...]


class Unreadable(ValueError):
    """These bytes are no record that this version can read; the message says why."""


@dataclass(frozen=True)
class Begin:
    """Where the evidence about a transaction begins: the position of a presence record, and that record's id."""

    at: Position
    id: str


@dataclass(frozen=True)
class Under:
    """The opening under which an owner appends something. Number 0 is that of an id that a process made up."""

    id: Path
    name: str
    number: int

    @classmethod
    def of_made_up(cls, id: Path) -> Under:
        """Return the opening of an id that a process made up for itself: every opening of it is this one."""
        return cls(id, str(id[0]), 0)

    @property
    def made_up(self) -> bool:
        """Whether the owner made the id up for itself, so that no other process opens it."""
        return self.number == 0


@dataclass(frozen=True)
class Stored:
    """A body too large for one record: where its parts stand, and the hash of all of them together."""

    parts: tuple[Position, ...]
    digest: str


@dataclass(frozen=True)
class Acked:
    """What a claim acknowledges. `read_up_to` is a position in the log.

    No claim of anybody else on these groups and partitions stood in front of it behind the claims on which its author
    built, and none on its own transaction.
    """

    read_up_to: Position
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Range:
    """One acknowledged range: from the position where its author stood to the next one to read."""

    group: str
    partition: tuple[str, int]
    first: Position
    end: Position

    @property
    def place(self) -> Place:
        return self.group, self.partition


Place = tuple[str, tuple[str, int]]  # a group and a partition


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record has: the id of the log that its writer believes in (None: it does not know), and a nonce."""

    kind: ClassVar[str]
    log: str | None
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Birth(Record):
    """The log's first record; `log` is the id that it gives to the log, `at` the time (ms since 1970)."""

    kind: ClassVar[str] = "birth"
    at: int


@dataclass(frozen=True, kw_only=True)
class Presence(Record):
    """A process was here; `nonce` is the presence's id. Nobody needs it after `until` (ms since 1970)."""

    kind: ClassVar[str] = "presence"
    until: int


@dataclass(frozen=True, kw_only=True)
class Opened(Record):
    """An id was opened, for the `under.number`-th time; with number 0, by the process that made the id up.

    `named`: the caller gave the name, and may give it again.
    """

    kind: ClassVar[str] = "opened"
    under: Under
    named: bool
    host: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry(Record):
    """A ledger's record about a transaction of an owner."""

    kind: ClassVar[str] = "entry"
    under: Under
    about: str  # "prepare", "outcome", …
    transaction: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claimed(Record):
    """A claim on an id: with `begin` on one that a token carries, with `by` as the id's owner. Data or parts.

    Only a COMMIT of an id that a token carries acknowledges anything.
    """

    kind: ClassVar[str] = "claim"
    id: Path
    decision: Decision
    begin: Begin | None
    by: Under | None
    acked: Acked | None = None  # version 1 had none
    body: Mapping[str, Any] | None
    stored: Stored | None

    def __post_init__(self) -> None:
        if self.acked is not None and (self.begin is None or self.decision is not Decision.COMMIT):
            raise ValueError("this claim cannot acknowledge anything")


@dataclass(frozen=True, kw_only=True)
class Done(Record):
    """Every id that continues `id` with a number up to `up_to` is finished."""

    kind: ClassVar[str] = "done"
    id: Path
    up_to: int


@dataclass(frozen=True, kw_only=True)
class Part(Record):
    """A piece of a body that was too large for one record."""

    kind: ClassVar[str] = "part"
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class Snapshot(Record):
    """All that counts for ever of the records up to and including the one at `covers`, whose hash is `digest`.

    `born` is where the log's birth record was, so that a late copy of it is not taken for the beginning.
    """

    kind: ClassVar[str] = "snapshot"
    born: Position
    covers: Position
    digest: str
    at: int
    body: Mapping[str, Any] | None
    stored: Stored | None


@dataclass(frozen=True, kw_only=True)
class Renewed(Record):
    """An operator began the log anew behind the record at `covers`, knowingly: nothing in front of this counts.

    It does so only right behind that record, whose hash is `digest`. `log` is the id that it gives to the log, `at` the
    time (ms since 1970), `host` where the operator was.
    """

    kind: ClassVar[str] = "renewed"
    covers: Position
    digest: str
    at: int
    host: str


def digest(raw: bytes) -> str:
    """The hash by which a record or a body is recognised."""
    return hashlib.sha256(raw).hexdigest()[:32]


# --- writing ------------------------------------------------------------------------------------------------------


def encode(record: Record) -> bytes:
    """The record as bytes. Raises `InvalidOption` for what no reader could read, or is too large for one record."""
    values = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    payload = values.pop("payload", None)
    raw = dump_json({"txnbridge": VERSION, "kind": record.kind, **values})
    if payload is not None:
        raw += b"\n" + payload
    if len(raw) > MAX_RECORD_BYTES:
        raise InvalidOption(
            f"this {record.kind!r} record of a decision log takes {len(raw)} bytes, more than {MAX_RECORD_BYTES}:"
            " shorten its data"
        )
    try:
        decode(raw)  # a record that nobody can read would stop all readers there
    except Unreadable as error:
        raise InvalidOption(f"this cannot go into a decision log: {error}") from None
    return raw


def check_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller wants to go with a record, if every reader can read it. Raises `InvalidOption`."""
    if not isinstance(data, Mapping):
        raise InvalidOption(f"what goes with a decision is a mapping, not {type(data).__name__}")
    if _is_deeper(data, _DEEPEST):
        raise InvalidOption(f"what goes with a decision is nested at most {_DEEPEST} deep")
    return dict(data)


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(inner, levels - 1) for inner in value)


def dump_json(value: Any) -> bytes:
    """Compact JSON in ASCII. Raises `InvalidOption` for what JSON cannot hold."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"what goes into a decision log must be JSON: {error}") from None


def _plain(value: Any) -> Any:
    """A field's value as JSON."""
    if isinstance(value, Decision):
        return value.value
    if isinstance(value, Acked):
        ranges = [[r.group, *r.partition, r.first, r.end] for r in value.ranges]
        return {"read_up_to": value.read_up_to, "ranges": ranges}
    if isinstance(value, Begin | Under | Stored):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


# --- reading ------------------------------------------------------------------------------------------------------


def decode(raw: bytes) -> Record:
    """Read a record back. Raises `Unreadable` for whatever is none, and never anything else."""
    line, newline, payload = raw.partition(b"\n")
    version, values = _read_line(line)
    kind = _KINDS.get(str(values.pop("kind", "")))
    if kind is None:
        raise Unreadable("its kind is unknown")
    if (kind is Part) != bool(newline):
        raise Unreadable("a part, and nothing else, has bytes behind its line")
    if kind is Part:
        values["payload"] = payload
    names = {field.name for field in fields(kind)} - ({"acked"} if version == 1 else set())
    if values.keys() != names:
        raise Unreadable(f"a {kind.kind!r} record has other fields")
    try:
        return kind(**{name: _FIELDS[name](value) for name, value in values.items()})
    except (ValueError, TypeError):
        raise Unreadable(f"a field of this {kind.kind!r} record is of the wrong kind") from None


def load_json(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for whatever is none."""
    try:
        value = json.loads(raw, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _read_line(line: bytes) -> tuple[int, dict[str, Any]]:
    if not line.startswith(_MAGIC):
        raise Unreadable("it was not written by txnbridge")
    try:
        values = load_json(line)
    except ValueError:
        raise Unreadable("it is damaged") from None
    version = values.pop("txnbridge", None)
    if type(version) is not int or version not in _READABLE:
        raise Unreadable(f"its format is {version!r:.20}, this version of txnbridge reads up to {VERSION}: upgrade it")
    return version, values


def _finite(text: str) -> float:
    # A reader may have to write a number again, and JSON has no infinity.
    if not math.isfinite(value := float(text)):
        raise ValueError("not a finite number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _decision(value: Any) -> Decision:
    if (decision := Decision(value)) is Decision.UNDECIDED:
        raise ValueError
    return decision


def read_position(value: Any) -> Position:
    """A position from JSON. Raises ValueError or TypeError."""
    if not isinstance(value, list | tuple) or not value:
        raise TypeError("a position is a list of numbers")
    return tuple(_number(part) for part in value)


def read_path(value: Any) -> Path:
    """An id from JSON. Raises ValueError or TypeError."""
    if not isinstance(value, list | tuple) or not value:
        raise TypeError("an id is a list of text and numbers")
    return tuple(part if isinstance(part, str) else _number(part) for part in value)


def read_begin(value: Any) -> Begin:
    """A begin from JSON. Raises ValueError or TypeError."""
    at, id = _exactly(value, "at", "id")
    return Begin(read_position(at), _text(id))


def read_under(value: Any) -> Under:
    """An opening's id, name and number from JSON. Raises ValueError or TypeError."""
    id, name, number = _exactly(value, "id", "name", "number")
    return Under(read_path(id), _text(name), _number(number))


def _stored(value: Any) -> Stored:
    parts, hashed = _exactly(value, "parts", "digest")
    if not isinstance(parts, list):
        raise TypeError
    return Stored(tuple(read_position(part) for part in parts), _text(hashed))


def _acked(value: Any) -> Acked:
    read_up_to, ranges = _exactly(value, "read_up_to", "ranges")
    if not isinstance(ranges, list) or not ranges:
        raise TypeError
    return Acked(read_position(read_up_to), tuple(_range(each) for each in ranges))


def _range(value: Any) -> Range:
    group, topic, number, first, end = value
    return Range(_text(group), (_text(topic), _number(number)), read_position(first), read_position(end))


def _exactly(value: Any, *names: str) -> list[Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise TypeError
    return [value[name] for name in names]


_Value = TypeVar("_Value")


def _optional(read: Callable[[Any], _Value]) -> Callable[[Any], _Value | None]:
    return lambda value: None if value is None else read(value)


_KINDS = {kind.kind: kind for kind in (Birth, Presence, Opened, Entry, Claimed, Done, Part, Snapshot, Renewed)}
# A field's name means the same in every kind of record.
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
