"""Lookup: finds the broker that serves a topic, through redirects and proxies, and counts a topic's partitions.

`ConnectionPool` has the connections of a client: one for each broker, proxy and connection key.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

from txnbridge_pulsar.client.deadline import ClientDeadline, retry
from txnbridge_pulsar.client.errors import (
    Closed,
    ProtocolError,
    PulsarError,
    RequestTimedOut,
    ServiceNotReady,
    server_error,
)
from txnbridge_pulsar.client.format.codec import Fields

from .address import Address, ServiceUrl, full_topic_name, service_url
from .connection import BrokerConnection, ConnectionOptions

_REDIRECT, _CONNECT = 0, 1
# The most redirects, as in the Java client: more of them are a loop.
MAX_REDIRECTS = 20
# Seconds for one broker's answer; after that another broker is asked.
_ATTEMPT_SECONDS = 10.0
_CONNECTION_KEY = ""


class ConnectionTarget(NamedTuple):
    """The address of a broker, or that of a proxy, which connects to the broker at `logical`."""

    address: Address
    logical: Address | None = None


class ConnectionPool:
    """Connections by target and connection key, opened at first use and after a loss. Different keys share none."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._connections: dict[tuple[ConnectionTarget, str], BrokerConnection] = {}
        # Locks exist only while they are used: every reader has a key of its own, and there may be millions.
        self._opening: WeakValueDictionary[tuple[ConnectionTarget, str], threading.Lock] = WeakValueDictionary()
        self._closed = False

    def get(self, target: ConnectionTarget, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """Return the open connection to a target, or try once to open it. Raise the errors of `BrokerConnection`."""
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
        connection = BrokerConnection.open(key[0].address, self._options, deadline, key[0].logical)
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


class Lookup:
    """Looks topics up. Any broker of the cluster answers; after a failure the service URL's next broker is asked."""

    def __init__(
        self, pool: ConnectionPool, service: ServiceUrl, listener: str | None, opening_attempt_seconds: float
    ) -> None:
        self._pool = pool
        self._service = service
        self._listener = listener
        self._opening_attempt_seconds = opening_attempt_seconds
        self._next_addresses = itertools.cycle(service.addresses)
        self._current = next(self._next_addresses)

    def connection(self, topic: str, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """Return a connection to the broker that serves a topic. The topic may move at any time: if this broker refuses
        the next request, the caller repeats the lookup and the request.
        """
        return self._pool.get(self._target(full_topic_name(topic), deadline), connection_key, deadline)

    def opening_attempt(self, deadline: ClientDeadline) -> ClientDeadline:
        """Return the deadline of one attempt to open a producer or consumer. Attempts are repeated until `deadline`."""
        return ClientDeadline(min(deadline.left, self._opening_attempt_seconds))

    def partitions(self, topic: str, deadline: ClientDeadline) -> int:
        asked = {"topic": full_topic_name(topic), "metadata_auto_creation_enabled": False}
        return int(self._ask_any_broker("partition_metadata", deadline, asked).get("partitions", 0))

    def topics(self, namespace: str, deadline: ClientDeadline) -> list[str]:
        asked = {"namespace": namespace, "mode": 0}
        return list(self._ask_any_broker("get_topics_of_namespace", deadline, asked).get("topics", []))

    def _ask_any_broker(self, name: str, deadline: ClientDeadline, asked: Fields) -> Fields:
        def attempt() -> Fields:
            left = _attempt_deadline(deadline)
            with self._next_on_failure():
                return self._pool.get(ConnectionTarget(self._current), _CONNECTION_KEY, left).ask(name, left, **asked)

        return retry(deadline, attempt)

    def _target(self, topic: str, deadline: ClientDeadline) -> ConnectionTarget:
        left = _attempt_deadline(deadline)
        with self._next_on_failure():
            return self._follow(topic, ConnectionTarget(self._current), left)

    def _follow(self, topic: str, target: ConnectionTarget, deadline: ClientDeadline) -> ConnectionTarget:
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            answer = self._pool.get(target, _CONNECTION_KEY, deadline).ask(
                "lookup", deadline, topic=topic, authoritative=authoritative, advertised_listener_name=self._listener
            )
            target = self._target_in_answer(answer)
            if answer.get("response") != _REDIRECT:
                return target
            authoritative = answer.get("authoritative", False)
        raise ServiceNotReady(6, f"the brokers redirect in circles for {topic}")

    def _target_in_answer(self, answer: dict[str, object]) -> ConnectionTarget:
        if answer.get("response") not in (_REDIRECT, _CONNECT):
            raise server_error(0, "the lookup failed")
        try:
            name = "broker_service_url_tls" if self._service.tls else "broker_service_url"
            (broker,) = service_url(str(answer.get(name, ""))).addresses
        except ValueError:
            raise ProtocolError("a lookup was answered without the address of a broker") from None
        if not answer.get("proxy_through_service_url") or broker in self._service.addresses:
            return ConnectionTarget(broker)
        return ConnectionTarget(self._current, broker)

    @contextmanager
    def _next_on_failure(self) -> Iterator[None]:
        """If the block fails, send the following lookups to the next broker in the service URL."""
        try:
            yield
        except PulsarError:
            self._current = next(self._next_addresses)
            raise


def _attempt_deadline(deadline: ClientDeadline) -> ClientDeadline:
    return ClientDeadline(min(deadline.left, _ATTEMPT_SECONDS))
