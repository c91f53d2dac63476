"""The history of a run: a file of JSON lines for each process, which records each call and its result.

docs/conformance.md describes the lines, so that programs in other languages can write them. Each line is written by one
system call when its event happens, so the history of a killed process is complete up to its death. A call without an
end line has an unknown result.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

VERSION = 1

# Begins the value of a message that was read with another body, key, header or timestamp than the rest of the value
# was sent with.
CHANGED = "changed:"

Result = Literal["ok", "fail", "unknown"]
Key = tuple[str, int]  # a topic and the number of a partition
Position = tuple[int, ...]
Read = tuple[str, int, "Sequence[int] | None", "str | None"]  # topic, partition, position (None: unknown), value


class HistoryError(ValueError):
    """Raised for a file that is no history, or of an unknown version. The text names the file and the line."""


# --- recording --------------------------------------------------------------------------------------------------------


class Recorder:
    """Appends the history of one process to a file. Any thread may use it."""

    def __init__(self, path: str | Path, process: str, client: str) -> None:
        """Create the file. `process` is the process's name in the run, `client` the library that it uses."""
        self._file = open(path, "xb", buffering=0)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.write(history=VERSION, process=process, client=client, host=host(), pid=os.getpid(), **_now())

    def start(self, what: str, **fields: Any) -> RecordedCall:
        """Record that a call begins, and return an object that records what the call does and returns.

        `what` is the kind of the call, such as "transaction". Record the begin before the first request to the broker.
        """
        call = RecordedCall(self, next(self._numbers))
        self.write(start=call.number, what=what, **fields, **_now())
        return call

    def fault(self, kind: str, target: str, phase: Literal["begin", "end"]) -> None:
        """Record that a fault of this kind, such as a kill, begins or ends at its target, such as a process."""
        self.write(fault=kind, target=target, phase=phase, **_now())

    def write(self, **line: Any) -> None:
        with self._lock:
            if "mono" in line:
                line |= _now()  # a thread that was stopped here writes no older time behind those of other threads
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RecordedCall:
    """Records one call, such as a transaction: the messages that it sends, receives and acknowledges, and its end."""

    _recorder: Recorder
    number: int

    def note(self, **fields: Any) -> None:
        """Record fields that were not known when the call began, such as the id of the transaction."""
        self._recorder.write(note=self.number, **fields)

    def send(self, topic: str, partition: int, values: Sequence[str]) -> None:
        """Record values that the call is about to send to a partition, in their order."""
        self._recorder.write(send=self.number, to=[topic, partition], values=values)

    def stored(self, topic: str, partition: int, values: Sequence[str], positions: Iterable[Sequence[int]]) -> None:
        """Record the positions at which the broker stored these values."""
        self._recorder.write(stored=self.number, to=[topic, partition], values=values, positions=list(positions))

    def poll(self, messages: Iterable[Read], group: str | None = None) -> None:
        """Record messages that the call has received, in the order of receipt, and for which group."""
        self._recorder.write(poll=self.number, group=group, messages=list(messages))

    def assign(self, keys: Iterable[Key]) -> None:
        """Record the partitions that are assigned to the process's consumer from now on."""
        self._recorder.write(assign=self.number, keys=list(keys))

    def ack(self, group: str, values: Sequence[str]) -> None:
        """Record that the call is about to acknowledge the messages with these values for a group."""
        self._recorder.write(ack=self.number, group=group, values=values)

    def end(self, result: Result, **fields: Any) -> None:
        """Record that the call ended: "ok" if it took effect, "fail" if it certainly did not, otherwise "unknown"."""
        self._recorder.write(end=self.number, result=result, **fields, **_now())


def host() -> str:
    """Return the name of this host and, on Linux, the id of its boot, because each boot has a clock of its own."""
    name = socket.gethostname()
    with suppress(OSError):
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return name


def _now() -> dict[str, int]:
    return {"mono": time.monotonic_ns(), "wall": time.time_ns()}


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Operation:
    """One call of a history, from its start line to its end line.

    `start` and `end` are monotonic nanoseconds on `clock`: the process's host, or a part of the process's history if
    its clock went back. `end` is None without an end line.
    `order` is the index in `History.operations`. The operations of one process are in the order of their begins.
    """

    order: int
    clock: str
    process: int
    number: int
    what: str
    start: int
    end: int | None
    result: Result
    fields: dict[str, Any]

    @property
    def transaction(self) -> str | None:
        """The transaction's id, if the process knew it."""
        return self.fields.get("transaction")

    @property
    def outcome(self) -> str | None:
        """The outcome that the call returned: "committed", "aborted", "prepared" or "unknown"."""
        return self.fields.get("outcome")

    @property
    def is_span(self) -> bool:
        """Whether it is a transaction over several brokers, whose parts become visible one after another."""
        return self.fields.get("span") is True


@dataclass(frozen=True)
class RecordedProcess:
    """A process of a history, described by the first line of its file."""

    name: str
    client: str
    host: str
    pid: int
    file: str


@dataclass(frozen=True)
class Fault:
    """One event of a fault that the run injected: the fault's begin or its end."""

    kind: str
    target: str
    phase: str
    process: int
    mono: int
    clock: str  # as of `Operation`


@dataclass
class History:
    """The merged histories of all processes of a run."""

    processes: list[RecordedProcess] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    sends: list[tuple[int, Key, Sequence[str]]] = field(default_factory=list)  # operation's order, key, values
    stored: list[tuple[Key, Sequence[str], Sequence[Position]]] = field(default_factory=list)
    polls: list[tuple[int, str | None, Sequence[Read]]] = field(default_factory=list)  # with the group
    assigned: list[tuple[int, int, frozenset[Key]]] = field(default_factory=list)  # with the number of earlier polls
    acks: list[tuple[int, str, Sequence[str]]] = field(default_factory=list)  # with the group
    senders: dict[str, int] = field(default_factory=dict)  # by value: the order of the operation that sends it
    turned_back: set[str] = field(default_factory=set)  # hosts whose clock went back: it orders no two processes

    def add(self, lines: Iterable[bytes], name: str) -> None:
        """Add the lines of one process. Raise `HistoryError` for a line that is not of this format.

        A partial last line is ignored, because the process may have been killed while it wrote the line.
        """
        _Lines(self, name).read(lines)


def read_history(paths: Iterable[str | Path]) -> History:
    """Return the merged history in these files. Raise `HistoryError` if a file is not a history."""
    history = History()
    for path in _files(paths):
        with open(path, "rb") as file:
            history.add(file, str(path))
    if not history.processes:
        raise HistoryError("no history: give the files that a run has written, or their folder")
    return history


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] * path.is_file()  # a pipe is read only once
        if not found:
            raise HistoryError(f"{path}: no history; give the files that a run has written, or their folder")
        yield from found


_DECODER = json.JSONDecoder(parse_float=functools.cache(float))


class _Lines:
    """Reads the lines of one process into a history."""

    def __init__(self, history: History, name: str) -> None:
        self._history = history
        self._name = name
        self._process = len(history.processes)
        self._open: dict[int, Operation] = {}
        # Equal ones are one object, because a history has millions of them.
        self._keys: dict[Key, Key] = {}
        self._positions: dict[Position, Position] = {}
        self._clock = ""
        self._latest = -(2**63)  # the latest time of a line

    def read(self, lines: Iterable[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode().strip()
                fields, end = _DECODER.raw_decode(text)
                if end < len(text):
                    raise ValueError("one line holds one object")
                if b"\\u" in line:
                    json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair cannot be shown
                self._take(fields)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise HistoryError(f"{self._name}, line {number}: {_reason(error)}") from error

    def _take(self, line: Any) -> None:
        if type(line) is not dict or not line:
            raise ValueError("a line is an object with fields")
        kind = next(iter(line))
        if kind not in _TAKERS:
            raise ValueError(f"a line begins with one of {', '.join(_TAKERS)}, not {kind!r}")
        if (kind == "history") is (self._process < len(self._history.processes)):
            raise ValueError("the first line, and no other, is that of the process, with its `history` version")
        _TAKERS[kind](self, line)

    def _head(self, line: dict[str, Any]) -> None:
        if _number(line["history"]) != VERSION:
            raise ValueError(f"this is format {line['history']}; this version of txnbridge reads format {VERSION}")
        process, client, self._clock = (_text(line[name]) for name in ("process", "client", "host"))
        head = RecordedProcess(process, client, self._clock, _number(line["pid"]), self._name)
        self._history.processes.append(head)

    def _time(self, line: dict[str, Any]) -> int:
        """Return the time of a line. If it is far before an earlier line's, the clock went back: begin a new clock."""
        time = _number(line.pop("mono"))
        if time < self._latest - _BACK:
            self._history.turned_back.add(self._history.processes[self._process].host)
            self._clock, self._latest = f"{self._name} after {self._latest} and {time}", time
            for operation in self._open.values():
                operation.clock = f"{self._clock} in {operation.number}"
        self._latest = max(self._latest, time)
        return time

    def _start(self, line: dict[str, Any]) -> None:
        number, what, start = _number(line.pop("start")), _text(line.pop("what")), self._time(line)
        for name in _NEEDED.get(what, ()):
            if name not in line:
                raise ValueError(f"the call {what!r} needs the field {name!r}")
        if number in self._open:
            raise ValueError(f"call {number} begins, and has not ended since it began before")
        order = len(self._history.operations)
        operation = Operation(order, self._clock, self._process, number, what, start, None, "unknown", _fields(line))
        self._history.operations.append(operation)
        self._open[number] = operation

    def _note(self, line: dict[str, Any]) -> None:
        self._open[_number(line.pop("note"))].fields.update(_fields(line))

    def _send(self, line: dict[str, Any]) -> None:
        order, values = self._open[_number(line["send"])].order, _texts(line["values"])
        for value in values:
            if (first := self._history.senders.setdefault(value, order)) != order:
                calls = " and ".join(map(self._call, (first, order)))
                raise ValueError(f"{calls} send the value {value!r}; each value of a history is unique")
        self._history.sends.append((order, self._key(line["to"]), values))

    def _call(self, order: int) -> str:
        operation = self._history.operations[order]
        return f"call {operation.number} of {self._history.processes[operation.process].name}"

    def _stored(self, line: dict[str, Any]) -> None:
        _number(line["stored"])
        values, positions = _texts(line["values"]), [*map(self._position, _list("positions", line["positions"]))]
        if len(values) != len(positions):
            raise ValueError("each stored value has one position")
        self._history.stored.append((self._key(line["to"]), values, positions))

    def _poll(self, line: dict[str, Any]) -> None:
        group = None if line["group"] is None else _text(line["group"])
        order, messages = self._open[_number(line["poll"])].order, _list("messages", line["messages"])
        for at, message in enumerate(messages):  # in place: a read of a whole topic is one line
            messages[at] = self._read(message)
        self._history.polls.append((order, group, messages))

    def _read(self, message: Sequence[Any]) -> Read:
        topic, partition, position, value = message
        topic, partition = self._key((topic, partition))
        place = None if position is None else self._position(position)
        return topic, partition, place, None if value is None else sys.intern(_text(value))

    def _position(self, value: Any) -> Position:
        position = _position(value)
        return self._positions.setdefault(position, position)

    def _key(self, value: Sequence[Any]) -> Key:
        topic, partition = value
        key = _text(topic), _number(partition)
        return self._keys.setdefault(key, key)

    def _assign(self, line: dict[str, Any]) -> None:
        keys = frozenset(map(self._key, _list("keys", line["keys"])))
        self._history.assigned.append((self._open[_number(line["assign"])].order, len(self._history.polls), keys))

    def _ack(self, line: dict[str, Any]) -> None:
        values = [value.removeprefix(CHANGED) for value in _texts(line["values"])]
        self._history.acks.append((self._open[_number(line["ack"])].order, _text(line["group"]), values))

    def _end(self, line: dict[str, Any]) -> None:
        operation = self._open.pop(_number(line.pop("end")))
        operation.result, operation.end = line.pop("result"), self._time(line)
        if operation.clock != self._clock:
            operation.end = operation.start  # nobody knows how long it took
        if operation.result not in ("ok", "fail", "unknown"):
            raise ValueError(f"a result is ok, fail or unknown, not {operation.result!r}")
        operation.fields.update(_fields(line))

    def _fault(self, line: dict[str, Any]) -> None:
        kind, target, phase = (_text(line[name]) for name in ("fault", "target", "phase"))
        if phase not in ("begin", "end"):
            raise ValueError(f"a fault's phase is begin or end, not {phase!r}")
        self._history.faults.append(Fault(kind, target, phase, self._process, self._time(line), self._clock))


_KINDS = ("start", "note", "send", "stored", "poll", "assign", "ack", "end", "fault")
_TAKERS = {"history": _Lines._head, **{kind: getattr(_Lines, f"_{kind}") for kind in _KINDS}}

# A clock that is read so much earlier than in the line before, in nanoseconds, went back: threads may write their lines
# in another order than they read the clock, but not by seconds.
_BACK = 5 * 10**9

# The fields without which a call says nothing.
_NEEDED = {
    "read": ("topics",),
    "check": ("transaction", "values"),
    "drained": ("group", "topics"),
    "declares": ("absent",),
}


def _fields(line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that the format does not name. Raise `ValueError` for a wrong type.

    Only the types of fields that a check reads are verified.
    """
    fields = {}
    for name, value in line.items():
        if verify := _TYPES.get(name):
            verify(value)
        if name != "wall":
            fields[sys.intern(name)] = value
    if fields.get("session") is not None and fields.get("owner") is None:
        raise ValueError("a session needs the transactional id of its owner")
    return fields


def _texts(values: Any) -> list[str]:
    found = _list("values", values)
    for at, value in enumerate(found):
        found[at] = sys.intern(_text(value))
    return found


def _list(name: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{name} are a list, not {value!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"text was expected, not {value!r}")
    return value


def _outcome(value: Any) -> None:
    if value not in (None, "committed", "aborted", "prepared", "unknown"):
        raise ValueError(f"an outcome is committed, aborted, prepared or unknown, not {value!r}")


def _seconds(value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise ValueError(f"a number of seconds was expected, not {value!r}")


def _position(value: Any) -> Position:
    return tuple(map(_number, _list("the numbers of a position", value)))


def _number(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"a whole number of 64 bits was expected, not {value!r}")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    return f"{error.args[0]!r} is missing, or its call has no start line" if isinstance(error, KeyError) else str(error)


_TYPES: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(
        ("transaction", "error", "group", "session", "owner", "sharing", "wish"),
        lambda value: value is None or _text(value),
    ),
    **dict.fromkeys(("topics", "absent", "values", "settings", "workloads"), _texts),
    **dict.fromkeys(("deadline", "hold"), _seconds),
    **dict.fromkeys(("begun", "ending", "thread"), _number),
    "outcome": _outcome,
    "about": lambda value: _texts([*(value | {}), *(value | {}).values()]),  # TypeError unless it is an object
}
