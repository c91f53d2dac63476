"""A client of one cluster: sends requests to brokers by name, sends heartbeats, and receives check-backs.

The client repeats no request to a broker, because only the caller knows whether that is safe.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from txnbridge_rocketmq.client.connection import Call, ConnectionSettings, Credentials, RemotingConnection
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError, Unreachable
from txnbridge_rocketmq.client.groups import Membership, heartbeat, unregister
from txnbridge_rocketmq.client.pool import BlockingPool, Exchange
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack, check_back_of
from txnbridge_rocketmq.client.routes import TopicRoute, masters, route
from txnbridge_rocketmq.client.signal_safe_locks import Slots
from txnbridge_rocketmq.client.transport import split

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Brokers forget a client, and drop its connection, after 120 s without a heartbeat.
HEARTBEAT_SECONDS = 30.0
# Time until a lost broker is reconnected. Until then the broker sends its check-backs to other members of the group.
_RECONNECT_SECONDS = 1.0
# Timeout of requests that the client sends by itself. A live broker answers in milliseconds.
_HEARTBEAT_TIMEOUT_SECONDS = 3.0
# How often the client asks name servers for new and moved brokers; sooner if a broker does not answer.
_BROKER_LIST_SECONDS = 5.0
# How long `close` waits for a callback that is still running.
_CLOSE_SECONDS = 5.0
# Seconds for unregistering. Brokers also notice the end of the connection.
_LEAVE_SECONDS = 1.0
# How long a name server is asked for what another one does not know. Mostly there is no such topic.
_SECOND_OPINION_SECONDS = 1.0
# The maximum age of a cached route, as in the Java client.
_ROUTE_SECONDS = 30.0
# The response codes of a name server that cannot look now.
_BUSY = (ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_BUSY)


class RemotingClient:
    """Connections to the name servers and brokers of one cluster. Safe for use by several threads.

    Every call ends within its `timeout` in seconds. `on_checks` receives the check-backs for this client's producer
    groups. `on_members` receives the name of a consumer group when its members change. One thread of the client runs
    both callbacks, one after another, and logs their exceptions.
    """

    def __init__(
        self,
        name_servers: Sequence[str],
        *,
        client_id: str | None = None,
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        on_checks: Callable[[Sequence[CheckBack]], None] | None = None,
        on_members: Callable[[str], None] | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """Create a client that is not connected yet. Raise `ValueError` for a malformed address."""
        for address in name_servers:
            split(address)
        if not name_servers:
            raise ValueError("give at least one name server")
        self.client_id = client_id or f"{socket.gethostname()}@{os.getpid()}@{uuid.uuid4().hex[:8]}"
        self._name_servers = list(name_servers)
        self._settings = ConnectionSettings(tls, credentials)
        self._on_checks, self._on_members = on_checks, on_members
        self._heartbeat_seconds = heartbeat_seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: dict[str, RemotingConnection] = {}
        self._connecting: dict[str, Slots] = {}
        self._pools: dict[str, BlockingPool] = {}
        self._masters: dict[str, str] = {}
        self._seen: set[str] = set()
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        self._membership = Membership()
        self._heartbeats: dict[str, tuple[RemotingConnection, float]] = {}
        self._list_again_at = 0.0
        self._notifications = _NotificationQueue()
        self._threads: list[threading.Thread] = []

    # --- requests -----------------------------------------------------------------------------------------------------

    def call(self, broker: str, request: RpcRequest[T], timeout: float) -> T:
        """Send a request to the master broker of this name and return the decoded response.

        Raise `Unreachable`, `Disconnected`, `ResponseTimeout`, `ErrorResponse` or `ProtocolViolation`.
        """
        (result,) = self.call_all([(broker, request)], timeout)
        if isinstance(result, RemotingError):
            raise result
        return result

    def call_all(self, asked: Sequence[tuple[str, RpcRequest[T]]], timeout: float) -> list[T | RemotingError]:
        """Send several requests at once, each to the broker named with it. Return each one's decoded response or error.

        The calling thread reads the responses itself, so this takes less processor time than `submit`.
        """
        until = time.monotonic() + timeout
        found: list[T | RemotingError] = [Unreachable("not sent")] * len(asked)
        exchanges: list[tuple[list[int], Exchange]] = []
        try:
            # In one order, so that threads that hold connections to some brokers do not wait for each other's.
            for broker in sorted({broker for broker, _ in asked}):
                places = [place for place, (name, _) in enumerate(asked) if name == broker]
                try:
                    exchanges.append((places, self._begin(broker, [asked[place][1] for place in places], until)))
                except RemotingError as error:
                    for place in places:
                        found[place] = error
            while exchanges:
                places, exchange = exchanges.pop()
                for place, result in zip(places, exchange.results(), strict=True):
                    found[place] = result
        finally:
            for _, exchange in exchanges:
                exchange.abandon()
        return found

    def _begin(self, broker: str, requests: Sequence[RpcRequest[Any]], until: float) -> Exchange:
        address = self._address(broker, until)
        try:
            return self._pool(address).begin(requests, until)
        except Unreachable:
            self._forget(broker, address)
            raise

    def submit(self, broker: str, request: RpcRequest[T], timeout: float) -> Call[T]:
        """Send a request without waiting for the response. The returned `Call` ends within `timeout`.

        If this method itself raises an error, one of those of `call`, the broker has not carried out the request.
        """
        until = time.monotonic() + timeout
        address = self._address(broker, until)
        try:
            connection = self._connection(address, until)
        except Unreachable:
            self._forget(broker, address)
            raise
        return connection.submit(request, until - time.monotonic())

    def call_address(self, address: str, request: RpcRequest[T], timeout: float) -> T:
        """Send a request to the broker or name server at this address, and return the decoded response."""
        (result,) = self._pool(address).begin([request], time.monotonic() + timeout).results()
        if isinstance(result, RemotingError):
            raise result
        return cast(T, result)

    def ask_name_server(self, request: RpcRequest[T], timeout: float) -> T:
        """Send an idempotent request to one name server after the other, and return the first result that is not empty.

        A name server that has just started knows nothing before the brokers register there, in half a minute.
        """
        until = time.monotonic() + timeout
        last: RemotingError | None = None
        empty: list[T] = []
        for number, address in enumerate(list(self._name_servers)):
            left = until - time.monotonic()
            if (last is not None or empty) and left <= 0:
                break
            try:
                # Divide the time, so that a silent name server leaves time for the others.
                share = left / (len(self._name_servers) - number)
                result = self.call_address(address, request, min(share, _SECOND_OPINION_SECONDS) if empty else share)
                if result:
                    return result
                empty.append(result)
            except RemotingError as error:
                # A name server that has just started (needWaitForService), or is overloaded, leaves it to the others.
                if isinstance(error, ErrorResponse) and error.code not in _BUSY and not empty:
                    raise
                last = error
                with self._lock:
                    self._name_servers.sort(key=lambda each: each == address)  # it is asked last from now on
        if last is None or empty:
            return empty[0]
        raise last

    def route(self, topic: str, timeout: float, fresh: bool = False) -> TopicRoute | None:
        """Return the route of a topic, up to 30 s old unless `fresh`; None if the name server has none."""
        with self._lock:
            asked_at, known = self._routes.get(topic, (0.0, None))
        if known is not None and not fresh and time.monotonic() - asked_at < _ROUTE_SECONDS:
            return known
        topic_route = self.ask_name_server(route(topic), timeout)
        with self._lock:
            if topic_route is None:
                self._routes.pop(topic, None)
            else:
                self._routes[topic] = (time.monotonic(), topic_route)
                self._masters.update(topic_route.masters)
                self._seen.update(topic_route.masters)
        return topic_route

    def brokers(self, timeout: float) -> dict[str, str]:
        """Ask the name server for the address of each master broker. Return the addresses by broker name."""
        addresses = self.ask_name_server(masters(), timeout)
        with self._lock:
            self._masters.update(addresses)
            self._seen.update(addresses)
        return addresses

    @property
    def seen_brokers(self) -> frozenset[str]:
        """The names of all brokers that name servers ever listed to this client, including brokers that are down."""
        with self._lock:
            return frozenset(self._seen)

    # --- groups -------------------------------------------------------------------------------------------------------

    def join(self, membership: Membership, timeout: float) -> None:
        """Register the groups of `membership` with every broker, and unregister other groups of earlier calls.

        Until `close`, heartbeats register these groups also with brokers that are unreachable now, or restarted later.
        Raise the last error if no broker is reachable.
        """
        until = time.monotonic() + timeout
        with self._lock:
            before, self._membership = self._membership, membership
            for target in (self._send_heartbeats, self._call_back)[len(self._threads) :]:
                self._threads.append(_start(target))
        self._leave(before.without(membership))
        names = self.brokers(timeout)
        failures = []
        for name in names:
            try:
                self._send_heartbeat(name, min(until, time.monotonic() + _HEARTBEAT_TIMEOUT_SECONDS))
            except RemotingError as error:
                failures.append(error)
        if failures and len(failures) == len(names):
            raise failures[-1]

    @property
    def is_member(self) -> bool:
        """Whether this client is registered with any broker, so that check-backs can arrive."""
        with self._lock:
            return any(connection.is_open for connection, _ in self._heartbeats.values())

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Leave the groups, close all connections, and wait for a running callback. Open calls raise `Disconnected`."""
        if self._closed.is_set():
            return
        until = time.monotonic() + timeout
        self._closed.set()
        self._leave(self._membership, timeout)
        self._notifications.close()
        with self._lock:
            connections, pools = list(self._connections.values()), list(self._pools.values())
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for pool in pools:
            pool.close()
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> RemotingClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _address(self, broker: str, until: float) -> str:
        if (known := self._masters.get(broker)) is not None:
            return known
        addresses = self.brokers(until - time.monotonic())
        if broker not in addresses:
            raise Unreachable(f"the name server knows no master of broker {broker}")
        return addresses[broker]

    def _forget(self, broker: str, address: str) -> None:
        """Drop the cached address of a broker's master, because another machine may have become the master."""
        with self._lock:
            if self._masters.get(broker) == address:
                del self._masters[broker]

    def _pool(self, address: str) -> BlockingPool:
        if (pool := self._pools.get(address)) is None:
            with self._lock:
                if self._closed.is_set():
                    raise Unreachable("this client is closed")
                pool = self._pools.setdefault(address, BlockingPool(address, self._settings))
        return pool

    def _connection(self, address: str, until: float) -> RemotingConnection:
        with self._lock:
            connection = self._connections.get(address)
            connecting = self._connecting.setdefault(address, Slots(1))
        if connection is not None and connection.is_open:
            return connection
        # Only one thread connects to an address at a time. The others then use its connection, or try themselves.
        slot = connecting.take(until - time.monotonic())
        if slot is None:
            raise Unreachable(f"{address}: no time was left")
        with slot:
            with self._lock:
                connection = self._connections.get(address)
            if connection is not None and connection.is_open:
                return connection
            if self._closed.is_set():
                raise Unreachable("this client is closed")
            connection = RemotingConnection(
                address, until - time.monotonic(), self._settings, self._take_notification, on_end=self._lost
            )
            with self._lock:
                self._connections[address] = connection
            if self._closed.is_set():  # `close` may have listed the connections before this one was added
                connection.close()
            return connection

    def _lost(self, connection: RemotingConnection) -> None:
        with self._lock:
            if self._connections.get(connection.address) is connection:
                del self._connections[connection.address]

    # --- membership ---------------------------------------------------------------------------------------------------

    def _send_heartbeat(self, broker: str, until: float) -> None:
        """Send a heartbeat, which registers the membership. Raise a `RemotingError` if that fails."""
        address = self._address(broker, until)
        try:
            connection = self._connection(address, until)
            connection.call(heartbeat(self.client_id, self._membership), until - time.monotonic())
        except RemotingError:
            self._forget(broker, address)
            self._list_again_at = 0.0
            raise
        with self._lock:
            self._heartbeats[broker] = connection, time.monotonic()

    def _send_heartbeats(self) -> None:
        """Send heartbeats, on a thread of their own: when they are due, and at once after a connection was lost.

        The thread also closes connections that are not used any more.
        """
        while not self._closed.wait(_RECONNECT_SECONDS):
            for pool in list(self._pools.values()):
                pool.close_unused()
            if self._membership.is_empty:
                continue
            for name in self._known_brokers():
                connection, sent_at = self._heartbeats.get(name, (None, 0.0))
                is_known = connection is not None and connection.is_open
                if is_known and time.monotonic() - sent_at < self._heartbeat_seconds:
                    continue
                try:
                    self._send_heartbeat(name, time.monotonic() + _HEARTBEAT_TIMEOUT_SECONDS)
                except RemotingError as error:
                    _log.debug("no heartbeat to broker %s: %s", name, error)

    def _known_brokers(self) -> list[str]:
        """Return the names of the brokers to send heartbeats to. Ask a name server for them from time to time."""
        if time.monotonic() >= self._list_again_at:
            self._list_again_at = time.monotonic() + _BROKER_LIST_SECONDS
            try:
                return list(self.brokers(_HEARTBEAT_TIMEOUT_SECONDS))
            except RemotingError as error:
                _log.debug("no name server answers: %s", error)
        with self._lock:
            return list(self._masters)

    def _leave(self, left: Membership, timeout: float = _LEAVE_SECONDS) -> None:
        """Unregister groups from the connected brokers. Other brokers dropped this client when its connection ended."""
        until = time.monotonic() + min(timeout, _LEAVE_SECONDS)
        requests = [unregister(self.client_id, producer=group) for group in left.producers]
        requests += [unregister(self.client_id, consumer=group) for group in left.consumers]
        with self._lock:
            connections = [connection for connection, _ in self._heartbeats.values() if connection.is_open]
        calls = []
        for connection in connections:
            for request in requests:
                with suppress(RemotingError):
                    calls.append(connection.submit(request, until - time.monotonic()))
        for call in calls:
            with suppress(RemotingError):
                call.result()

    # --- notifications ------------------------------------------------------------------------------------------------

    def _take_notification(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        if command.code in (RequestCode.CHECK_TRANSACTION_STATE, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED):
            if not self._notifications.put(command):
                _log.debug("dropped a notification of %s, which will send it again", connection.address)
        else:
            connection.answer(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not supported by this client")

    def _call_back(self) -> None:
        while commands := self._notifications.take():
            checks: list[CheckBack] = []
            for command in commands:
                with _log_exceptions():
                    if command.code == RequestCode.CHECK_TRANSACTION_STATE:
                        checks.append(check_back_of(command))
                    elif self._on_members is not None:
                        self._on_members(command.fields["consumerGroup"])
            if checks and self._on_checks is not None:
                with _log_exceptions():
                    self._on_checks(checks)


class _NotificationQueue:
    """Requests of brokers, such as check-backs, that wait for the callback thread, limited in number and bytes."""

    # Notifications beyond the limits are dropped, and sent again. Check-backs carry whole messages: hence the bytes.
    def __init__(self, most: int = 1000, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._changed = threading.Condition()
        self._waiting: list[RemotingCommand] = []
        self._bytes = 0
        self._closed = False

    def put(self, command: RemotingCommand) -> bool:
        """Add a notification. Return False if there is no room."""
        with self._changed:
            if len(self._waiting) >= self._most or self._bytes + len(command.body) > self._most_bytes:
                return False
            self._waiting.append(command)
            self._bytes += len(command.body)
            self._changed.notify()
            return True

    def take(self) -> list[RemotingCommand]:
        """Wait for notifications and return all of them, the oldest first. Return [] once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            taken, self._waiting, self._bytes = self._waiting, [], 0
            return [] if self._closed else taken

    def close(self) -> None:
        """Close the queue, drop its notifications, and wake `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@contextmanager
def _log_exceptions() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("the callback for a broker's notification failed")


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="rocketmq client", daemon=True)
    thread.start()
    return thread
