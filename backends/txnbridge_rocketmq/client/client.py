"""A client of a cluster: finds brokers by name, keeps connections and heartbeats, takes the brokers' questions.

    with Client(["127.0.0.1:9876"]) as client:
        found = client.route("orders", timeout=5)
        place = found.writable[0]
        stored = client.call(place.broker, send(Message("orders", b"hello"), "shop", place.queue), timeout=5)

It repeats nothing by itself but questions to name servers: whether a request may be sent again, the caller knows.
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
from types import TracebackType
from typing import TypeVar

from txnbridge_rocketmq.client.codes import Answer, Code
from txnbridge_rocketmq.client.connection import Call, Connection, Settings
from txnbridge_rocketmq.client.errors import Refused, RemotingError, Unreachable
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.groups import Membership, heartbeat, unregister
from txnbridge_rocketmq.client.requests import Request
from txnbridge_rocketmq.client.routes import Route, masters, route
from txnbridge_rocketmq.client.security import Credentials
from txnbridge_rocketmq.client.sending import Check, check_of
from txnbridge_rocketmq.client.wire import split

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Brokers forget clients, and drop connections, after 120 s of silence.
HEARTBEAT_SECONDS = 30.0
# How soon a lost broker is looked for again. Until then its questions go to other members of the group, if there are.
_RECONNECT_SECONDS = 1.0
# For what the client does by itself: a broker that lives answers in milliseconds.
_OWN_SECONDS = 3.0
# How often is looked for brokers that are new, or that have moved; sooner where one does not answer.
_LIST_SECONDS = 5.0
# What runs in a callback when a client is closed, and does not end with its connections, is left alone after this.
_CLOSE_SECONDS = 5.0
# A goodbye is a courtesy: brokers notice by themselves, by the end of the connection.
_LEAVE_SECONDS = 1.0
# How old a route may be; Java's clients look as often.
_ROUTE_SECONDS = 30.0
# Questions that wait for the callback, beside those that it was given last. What does not fit is dropped: brokers ask
# again. They come with whole messages.
_MOST_QUESTIONS = 1000
_MOST_QUESTION_BYTES = 64 << 20


class Client:
    """Connections to the name servers and brokers of one cluster. Any thread may call.

    Every call ends within its `timeout` in seconds. `on_checks` is given what brokers have asked meanwhile about halves
    of this client's producer groups, `on_members` the name of a consumer group whose members have changed; both are
    called one at a time, on a thread of their own, and what they raise is logged.
    """

    def __init__(
        self,
        name_servers: Sequence[str],
        *,
        client_id: str | None = None,
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        on_checks: Callable[[Sequence[Check]], None] | None = None,
        on_members: Callable[[str], None] | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """Nothing is connected yet. Raises `ValueError` for an address that is none."""
        for address in name_servers:
            split(address)
        if not name_servers:
            raise ValueError("name at least one name server")
        self.client_id = client_id or f"{socket.gethostname()}@{os.getpid()}@{uuid.uuid4().hex[:8]}"
        self._name_servers = list(name_servers)
        self._settings = Settings(tls, credentials)
        self._on_checks, self._on_members = on_checks, on_members
        self._heartbeat_seconds = heartbeat_seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._masters: dict[str, str] = {}
        self._seen: set[str] = set()
        self._routes: dict[str, tuple[float, Route]] = {}
        self._membership = Membership()
        self._told: dict[str, tuple[Connection, float]] = {}
        self._list_again_at = 0.0
        self._questions = _Questions()
        self._threads: list[threading.Thread] = []

    # --- asking -------------------------------------------------------------------------------------------------------

    def call(self, broker: str, request: Request[T], timeout: float) -> T:
        """Send a request to the master of the brokers of this name and return what the answer says.

        Raises `Unreachable`, `ConnectionLost`, `TimedOut`, `Refused` and `ProtocolViolation`.
        """
        return self.submit(broker, request, timeout).result()

    def submit(self, broker: str, request: Request[T], timeout: float) -> Call[T]:
        """Send a request and go on; what is returned ends within that time. Raises what `call` does.

        Whatever this itself raises, the request was certainly not carried out.
        """
        until = time.monotonic() + timeout
        address = self._address(broker, until)
        try:
            connection = self._connection(address, until)
        except Unreachable:
            self._forget(broker, address)
            raise
        return connection.submit(request, until - time.monotonic())

    def call_address(self, address: str, request: Request[T], timeout: float) -> T:
        """As `call`, to a broker or name server of this address."""
        until = time.monotonic() + timeout
        return self._connection(address, until).call(request, until - time.monotonic())

    def ask_name_server(self, request: Request[T], timeout: float) -> T:
        """Ask the name servers in turn, until one answers. Only for what may be asked twice. Raises the last error."""
        until = time.monotonic() + timeout
        last: RemotingError | None = None
        for number, address in enumerate(list(self._name_servers)):
            left = until - time.monotonic()
            if last is not None and left <= 0:
                break
            try:
                # One that is silent leaves time for the others.
                return self.call_address(address, request, left / (len(self._name_servers) - number))
            except Refused:
                raise
            except RemotingError as error:
                last = error
                self._put_last(address)
        assert last is not None
        raise last

    def route(self, topic: str, timeout: float, fresh: bool = False) -> Route | None:
        """Where a topic is, None if the name server does not know it. Half a minute old at most, or asked for anew."""
        with self._lock:
            asked_at, known = self._routes.get(topic, (0.0, None))
        if known is not None and not fresh and time.monotonic() - asked_at < _ROUTE_SECONDS:
            return known
        found = self.ask_name_server(route(topic), timeout)
        with self._lock:
            if found is None:
                self._routes.pop(topic, None)
            else:
                self._routes[topic] = (time.monotonic(), found)
                self._masters.update(found.masters)
                self._seen.update(found.masters)
        return found

    def brokers(self, timeout: float) -> dict[str, str]:
        """The address of each broker's master by the broker's name, asked for anew."""
        found = self.ask_name_server(masters(), timeout)
        with self._lock:
            self._masters.update(found)
            self._seen.update(found)
        return found

    @property
    def seen_brokers(self) -> frozenset[str]:
        """The names of all brokers that the name server has ever named to this client, those that are away too."""
        with self._lock:
            return frozenset(self._seen)

    # --- being asked --------------------------------------------------------------------------------------------------

    def join(self, membership: Membership, timeout: float) -> None:
        """Be a member of these groups, and of no others, with every broker of the cluster, from now on.

        When it returns, every broker that could be reached knows. Others are told as soon as they can be, and so are
        those that restart, until `close`. Raises the last error if no broker could be told.
        """
        until = time.monotonic() + timeout
        with self._lock:
            before, self._membership = self._membership, membership
            if not self._threads:
                self._threads = [_start(self._look_after), _start(self._call_back)]
        self._leave(before.without(membership))
        names = self.brokers(timeout)
        failures = []
        for name in names:
            try:
                self._tell(name, until)
            except RemotingError as error:
                failures.append(error)
        if failures and len(failures) == len(names):
            raise failures[-1]

    @property
    def is_member(self) -> bool:
        """Whether a broker knows this client as a member of its groups now, and so can ask it."""
        with self._lock:
            return any(connection.is_open for connection, _ in self._told.values())

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Leave the groups and end all connections; calls that wait get `ConnectionLost`. Safe to repeat.

        A callback that still runs after that time is left to itself.
        """
        if self._closed.is_set():
            return
        until = time.monotonic() + timeout
        self._closed.set()
        self._leave(self._membership, timeout)
        self._questions.close()
        with self._lock:
            connections = list(self._connections.values())
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _address(self, broker: str, until: float) -> str:
        with self._lock:
            known = self._masters.get(broker)
        if known is not None:
            return known
        found = self.brokers(until - time.monotonic())
        if broker not in found:
            raise Unreachable(f"the name server knows no master of broker {broker}")
        return found[broker]

    def _forget(self, broker: str, address: str) -> None:
        """The next call asks anew where this broker is: another one may be master by then."""
        with self._lock:
            if self._masters.get(broker) == address:
                del self._masters[broker]

    def _connection(self, address: str, until: float) -> Connection:
        with self._lock:
            connection = self._connections.get(address)
            connecting = self._connecting.setdefault(address, threading.Lock())
        if connection is not None and connection.is_open:
            return connection
        # One attempt at a time: the others get its connection, or try next.
        if not connecting.acquire(timeout=max(0.0, until - time.monotonic())):
            raise Unreachable(f"{address}: no time was left")
        try:
            with self._lock:
                connection = self._connections.get(address)
            if connection is not None and connection.is_open:
                return connection
            return self._connect(address, until)
        finally:
            connecting.release()

    def _connect(self, address: str, until: float) -> Connection:
        if self._closed.is_set():
            raise Unreachable("this client is closed")
        connection = Connection(
            address, until - time.monotonic(), self._settings, self._take_question, on_end=self._lost
        )
        with self._lock:
            self._connections[address] = connection
        if self._closed.is_set():  # `close` may have looked before it was there
            connection.close()
        return connection

    def _lost(self, connection: Connection) -> None:
        with self._lock:
            if self._connections.get(connection.address) is connection:
                del self._connections[connection.address]

    def _put_last(self, address: str) -> None:
        with self._lock:
            self._name_servers.sort(key=lambda each: each == address)

    # --- membership ---------------------------------------------------------------------------------------------------

    def _tell(self, broker: str, until: float) -> None:
        """Send a heartbeat. Raises what `call` does."""
        address = self._address(broker, until)
        try:
            connection = self._connection(address, until)
            connection.call(heartbeat(self.client_id, self._membership), until - time.monotonic())
        except RemotingError:
            self._forget(broker, address)
            self._list_again_at = 0.0
            raise
        with self._lock:
            self._told[broker] = connection, time.monotonic()

    def _look_after(self) -> None:
        """Send heartbeats when it is time, and at once on a new connection, which the broker knows nothing of."""
        while not self._closed.wait(_RECONNECT_SECONDS):
            if self._membership.is_empty:
                continue
            for name in self._known():
                connection, told_at = self._told.get(name, (None, 0.0))
                is_told = connection is not None and connection.is_open
                if is_told and time.monotonic() - told_at < self._heartbeat_seconds:
                    continue
                try:
                    self._tell(name, time.monotonic() + _OWN_SECONDS)
                except RemotingError as error:
                    _log.debug("no heartbeat to broker %s: %s", name, error)

    def _known(self) -> list[str]:
        """The brokers' names. New ones, and those that moved, are looked for now and then."""
        if time.monotonic() >= self._list_again_at:
            self._list_again_at = time.monotonic() + _LIST_SECONDS
            try:
                return list(self.brokers(_OWN_SECONDS))
            except RemotingError as error:
                _log.debug("no name server answers: %s", error)
        with self._lock:
            return list(self._masters)

    def _leave(self, left: Membership, timeout: float = _LEAVE_SECONDS) -> None:
        """Tell the brokers, as far as they listen; the others find out by themselves."""
        until = time.monotonic() + min(timeout, _LEAVE_SECONDS)
        requests = [unregister(self.client_id, producer=group) for group in left.producers]
        requests += [unregister(self.client_id, consumer=group) for group in left.consumers]
        with self._lock:
            connections = [connection for connection, _ in self._told.values() if connection.is_open]
        calls = []
        for connection in connections:
            for request in requests:
                with suppress(RemotingError):
                    calls.append(connection.submit(request, until - time.monotonic()))
        for call in calls:
            with suppress(RemotingError):
                call.result()

    # --- questions ----------------------------------------------------------------------------------------------------

    def _take_question(self, connection: Connection, command: Command) -> None:
        if command.code in (Code.CHECK_TRANSACTION_STATE, Code.NOTIFY_CONSUMER_IDS_CHANGED):
            if not self._questions.put(command):
                _log.debug("%s asks more than is answered; it will ask again", connection.address)
        else:
            connection.answer(command, Answer.REQUEST_CODE_NOT_SUPPORTED, "this client does not do that")

    def _call_back(self) -> None:
        while commands := self._questions.take():
            checks: list[Check] = []
            for command in commands:
                with _logged():
                    if command.code == Code.CHECK_TRANSACTION_STATE:
                        checks.append(check_of(command))
                    elif self._on_members is not None:
                        self._on_members(command.fields["consumerGroup"])
            if checks and self._on_checks is not None:
                with _logged():
                    self._on_checks(checks)


class _Questions:
    """What brokers have asked and nobody has taken yet; bounded in number and in bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Command] = []
        self._bytes = 0
        self._closed = False

    def put(self, command: Command) -> bool:
        """Add one, unless there is no room."""
        with self._changed:
            if len(self._waiting) >= _MOST_QUESTIONS or self._bytes + len(command.body) > _MOST_QUESTION_BYTES:
                return False
            self._waiting.append(command)
            self._bytes += len(command.body)
            self._changed.notify()
            return True

    def take(self) -> list[Command]:
        """Wait for some; all of them, the oldest first, and none when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            taken, self._waiting, self._bytes = self._waiting, [], 0
            return [] if self._closed else taken

    def close(self) -> None:
        """End `take`, whatever still waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a question of the broker's was not answered")


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="rocketmq client", daemon=True)
    thread.start()
    return thread
