"""The connections of a client: one for each broker, lane and proxy, made when asked for and made again when lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from .address import Address
from .clock import Deadline, pauses
from .connection import Connection, ConnectionOptions
from .errors import Closed, PulsarError, TimedOut

T = TypeVar("T")


# A broker that was cut off for a while may never answer who opens a topic that it has lost; by then another serves it.
# A living one takes less to load a topic, and goes on with that when it is asked again.
_SECONDS_AN_OPENING = 15.0


class Target(NamedTuple):
    """Where to connect to reach a broker: itself, or a proxy that is told which broker is meant."""

    address: Address
    logical: Address | None = None


def retrying(deadline: Deadline, attempt: Callable[[], T]) -> T:
    """Do what may be done twice until it succeeds, fails for good, or the deadline comes; then the last error.

    If that is no answer, because little time was left, it says what the last answer was.
    """
    answer: PulsarError | None = None
    for pause in pauses():
        try:
            return attempt()
        except TimedOut as error:
            if deadline.left <= pause:
                if answer is None:
                    raise
                raise TimedOut(f"{error}; before that: {answer}", error.may_have_had_effect) from error
        except PulsarError as error:
            if not error.retriable or deadline.left <= pause:
                raise
            answer = error
        time.sleep(pause)
    raise AssertionError("pauses never end")


def an_attempt(deadline: Deadline) -> Deadline:
    """When one attempt to open something is over, long before a long deadline."""
    return Deadline(min(deadline.left, _SECONDS_AN_OPENING))


class Pool:
    """Connections by target and lane. A lane is any name: what is in different lanes never shares a connection."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._connections: dict[tuple[Target, str], Connection] = {}
        # Each as long as somebody uses it: every reader has a lane of its own, and there may be millions.
        self._opening: WeakValueDictionary[tuple[Target, str], threading.Lock] = WeakValueDictionary()
        self._closed = False

    def get(self, target: Target, lane: str, deadline: Deadline) -> Connection:
        """The living connection there, made if there is none: one attempt. Raises what `Connection.open` does."""
        key = (target, lane)
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            found = self._connections.get(key)
            if found is not None and not found.closed:
                return found
            opening = self._opening.setdefault(key, threading.Lock())
        if not opening.acquire(timeout=deadline.left):
            raise TimedOut(f"no connection to {target.address} in {deadline.seconds:g} s", may_have_had_effect=False)
        try:
            return self._open(key, deadline)
        finally:
            opening.release()

    def _open(self, key: tuple[Target, str], deadline: Deadline) -> Connection:
        with self._lock:
            found = self._connections.get(key)
        if found is not None and not found.closed:
            return found  # while we waited, somebody else made it
        target = key[0]
        connection = Connection.open(target.address, self._options, deadline, target.logical)
        with self._lock:
            if not self._closed:
                self._connections[key] = connection
                return connection
        connection.close()
        raise Closed("the client is closed")

    def hang_up(self, lane: str) -> None:
        """Close the connections of one lane; it makes others if it is used again."""
        with self._lock:
            of_lane = [key for key in self._connections if key[1] == lane]
            connections = [self._connections.pop(key) for key in of_lane]
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Hang up everywhere."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
