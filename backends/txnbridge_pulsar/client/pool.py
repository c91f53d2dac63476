"""The connections of a client: one for each broker, lane and proxy, made when asked for and made again when lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from .address import Address
from .clock import ClientDeadline, pauses
from .connection import BrokerConnection, ConnectionOptions
from .errors import Closed, PulsarError, RequestTimedOut

T = TypeVar("T")


# A broker that was cut off for a while may never answer who opens a topic that it has lost; by then another serves it.
# A living one takes less to load a topic, and goes on with that when it is asked again.
_SECONDS_AN_OPENING = 15.0


class ConnectionTarget(NamedTuple):
    """Where to connect to reach a broker: itself, or a proxy that is told which broker is meant."""

    address: Address
    logical: Address | None = None


def retrying(deadline: ClientDeadline, attempt: Callable[[], T]) -> T:
    """Do what may be done twice until it succeeds, fails for good, or the deadline comes; then the last error.

    If that is no answer, because little time was left, it says what the last answer was.
    """
    answer: PulsarError | None = None
    for pause in pauses():
        try:
            return attempt()
        except RequestTimedOut as error:
            if deadline.left <= pause:
                if answer is None:
                    raise
                raise RequestTimedOut(f"{error}; before that: {answer}", error.may_have_had_effect) from error
        except PulsarError as error:
            if not error.retriable or deadline.left <= pause:
                raise
            answer = error
        time.sleep(pause)
    raise AssertionError("pauses never end")


def an_attempt(deadline: ClientDeadline) -> ClientDeadline:
    """When one attempt to open something is over, long before a long deadline."""
    return ClientDeadline(min(deadline.left, _SECONDS_AN_OPENING))


class ConnectionPool:
    """Connections by target and lane. A lane is any name: what is in different lanes never shares a connection."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._connections: dict[tuple[ConnectionTarget, str], BrokerConnection] = {}
        # Each as long as somebody uses it: every reader has a lane of its own, and there may be millions.
        self._opening: WeakValueDictionary[tuple[ConnectionTarget, str], threading.Lock] = WeakValueDictionary()
        self._closed = False

    def get(self, target: ConnectionTarget, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """The living connection there, made if there is none: one attempt. Raises what `Connection.open` does."""
        key = (target, connection_key)
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            found = self._connections.get(key)
            if found is not None and not found.closed:
                return found
            opening = self._opening.setdefault(key, threading.Lock())
        if not opening.acquire(timeout=deadline.left):
            raise RequestTimedOut(
                f"no connection to {target.address} in {deadline.seconds:g} s", may_have_had_effect=False
            )
        try:
            return self._open(key, deadline)
        finally:
            opening.release()

    def _open(self, key: tuple[ConnectionTarget, str], deadline: ClientDeadline) -> BrokerConnection:
        with self._lock:
            found = self._connections.get(key)
        if found is not None and not found.closed:
            return found  # while we waited, somebody else made it
        target = key[0]
        connection = BrokerConnection.open(target.address, self._options, deadline, target.logical)
        with self._lock:
            if not self._closed:
                self._connections[key] = connection
                return connection
        connection.close()
        raise Closed("the client is closed")

    def hang_up(self, connection_key: str) -> None:
        """Close the connections of one lane; it makes others if it is used again."""
        with self._lock:
            of_lane = [key for key in self._connections if key[1] == connection_key]
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
