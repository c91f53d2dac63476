"""The connections of a client: one for each broker, connection key and proxy, made and renewed on demand."""

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


# A broker that was cut off may never answer a request to open a topic that it has lost; by then another one serves it.
# A healthy broker loads a topic in less time, and continues when asked again.
_SECONDS_AN_OPENING = 15.0


class ConnectionTarget(NamedTuple):
    """The address that reaches a broker: its own, or that of a proxy, which is told the broker."""

    address: Address
    logical: Address | None = None


def retrying(deadline: ClientDeadline, attempt: Callable[[], T]) -> T:
    """Repeat a call that may safely be made twice until it succeeds, fails for good, or the deadline passes.

    At the deadline raise the last error; if it is only that time ran out, it names the last answer.
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
    """Return the deadline of one attempt to open something, well before a long deadline."""
    return ClientDeadline(min(deadline.left, _SECONDS_AN_OPENING))


class ConnectionPool:
    """Connections by target and key; different keys never share a connection."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._connections: dict[tuple[ConnectionTarget, str], BrokerConnection] = {}
        # Kept while in use: every reader has a key of its own, and there may be millions.
        self._opening: WeakValueDictionary[tuple[ConnectionTarget, str], threading.Lock] = WeakValueDictionary()
        self._closed = False

    def get(self, target: ConnectionTarget, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """Return the open connection, or make it in one attempt. Raise as `BrokerConnection.open`."""
        key = (target, connection_key)
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            connection = self._connections.get(key)
            if connection is not None and not connection.closed:
                return connection
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
            connection = self._connections.get(key)
        if connection is not None and not connection.closed:
            return connection  # another thread made it meanwhile
        target = key[0]
        connection = BrokerConnection.open(target.address, self._options, deadline, target.logical)
        with self._lock:
            if not self._closed:
                self._connections[key] = connection
                return connection
        connection.close()
        raise Closed("the client is closed")

    def hang_up(self, connection_key: str) -> None:
        """Close the connections of one key; it gets new ones if it is used again."""
        with self._lock:
            of_key = [key for key in self._connections if key[1] == connection_key]
            connections = [self._connections.pop(key) for key in of_key]
        for connection in connections:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
