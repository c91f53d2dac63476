"""The connections of a client: one for each broker, proxy and connection key, opened at first use and after a loss."""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakValueDictionary

from txnbridge_pulsar.client.deadline import ClientDeadline
from txnbridge_pulsar.client.errors import Closed, RequestTimedOut

from .address import Address
from .connection import BrokerConnection, ConnectionOptions


class ConnectionTarget(NamedTuple):
    """The address of a broker, or that of a proxy, which connects to the broker at `logical`."""

    address: Address
    logical: Address | None = None


class ConnectionPool:
    """Open connections by target and connection key. Callers with different keys never share a connection."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._connections: dict[tuple[ConnectionTarget, str], BrokerConnection] = {}
        # Locks exist only while they are used: every reader has a key of its own, and there may be millions.
        self._opening: WeakValueDictionary[tuple[ConnectionTarget, str], threading.Lock] = WeakValueDictionary()
        self._closed = False

    def get(self, target: ConnectionTarget, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """Return the open connection to a target; if there is none, make one attempt to open it. Raise the errors of
        `BrokerConnection.open`.
        """
        key = (target, connection_key)
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            connection = self._connections.get(key)
            if connection is not None and not connection.closed:
                return connection
            opening = self._opening.setdefault(key, threading.Lock())
        with deadline.locking(opening) as is_held:
            if is_held:
                return self._open(key, deadline)
        raise RequestTimedOut(f"no connection to {target.address} in {deadline.seconds:g} s", may_have_had_effect=False)

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
        """Close all connections with one key. A later `get` with this key opens a new connection."""
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
