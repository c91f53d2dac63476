"""Events: every step of every transaction, for listeners.

Metrics, tracing, logging, the event recorder and the crash tests are listeners: plug-ins with a `txnbridge_event` hook.
A bridge looks up the listeners when it is opened, and makes only the events that a listener wants.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Phase = Literal["before", "after", "failed"]

_log = logging.getLogger("txnbridge")


@dataclass(frozen=True)
class Event:
    """An event: the begin or end of one step of a bridge.

    The steps of a backend, such as its requests, are events `step:<name>`.
    In the phase "before" no request of the step was sent yet, so that a listener can kill or delay the program there.
    `data` contains sizes, names and positions, never bodies or keys of messages.
    """

    name: str
    phase: Phase
    mono_ns: int
    wall_ns: int
    bridge: str
    transaction: str | None
    data: Mapping[str, Any]


Listener = Callable[[Event], object]


class Emitter:
    """Calls the listeners of one bridge.

    `listeners` get every event; those in `filtered` only events of the names with which they are given.
    """

    __slots__ = ("_bridge", "_filtered", "_listeners")

    def __init__(
        self, bridge: str, listeners: Sequence[Listener], filtered: Sequence[tuple[Listener, Collection[str]]] = ()
    ) -> None:
        self._bridge = bridge
        self._listeners = tuple(listeners)
        self._filtered: dict[str, tuple[Listener, ...]] = {}  # for some names, all listeners that get this event
        for listener, names in filtered:
            for name in names:
                self._filtered[name] = (*self._wanted_by(name), listener)

    def _wanted_by(self, name: str) -> tuple[Listener, ...]:
        return self._filtered.get(name, self._listeners)

    def wants(self, name: str) -> bool:
        """Return whether a listener gets events of this name; otherwise the caller need not make such events."""
        return bool(self._wanted_by(name))

    def emit(self, name: str, phase: Phase, transaction: str | None = None, **data: Any) -> None:
        """Call the listeners with a new event; log a listener's exception instead of raising it."""
        listeners = self._wanted_by(name)
        if not listeners:
            return
        event = Event(name, phase, time.monotonic_ns(), time.time_ns(), self._bridge, transaction, data)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener failed on %s/%s", name, phase)

    @contextmanager
    def step(self, name: str, transaction: str | None = None, **data: Any) -> Iterator[dict[str, Any]]:
        """Emit the event "before" the block, and "after" or "failed" at its end.

        The block adds data to the yielded dict; the event "after" contains them.
        """
        found: dict[str, Any] = {}
        if not self.wants(name):
            yield found
            return
        self.emit(name, "before", transaction, **data)
        try:
            yield found
        except BaseException as error:
            self.emit(name, "failed", transaction, **data, error=type(error).__name__)
            raise
        self.emit(name, "after", transaction, **{**data, **found})


class EventLogger:
    """A listener that logs each event: failures as warnings, other events at debug level."""

    def __init__(self, logger: logging.Logger = _log) -> None:
        self._logger = logger

    def __call__(self, event: Event) -> None:
        level = logging.WARNING if event.phase == "failed" else logging.DEBUG
        self._logger.log(level, "%s %s %s %s", event.name, event.phase, event.transaction or "-", dict(event.data))


class JsonLinesRecorder:
    """A listener that appends each event to a file, as one JSON object per line (format version 1).

    Each line is written by one system call, so that a killed process leaves no partial line.
    """

    VERSION = 1

    def __init__(self, path: str | Path) -> None:
        # Unbuffered and in append mode: one write(2) for each line, so several processes may share the file.
        # No lock: a thread that is not in a forked child, which has this listener too, might hold it there for ever.
        self._file = open(path, "ab", buffering=0)

    def __call__(self, event: Event) -> None:
        line = json.dumps({"v": self.VERSION, **asdict(event)}, separators=(",", ":"), default=str)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()
