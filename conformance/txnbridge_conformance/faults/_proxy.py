"""A proxy between clients and a broker that makes the network fail where a test wants it to."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from txnbridge.errors import InvalidOption, UsageError
from txnbridge_conformance.faults._frames import Conversation, Piece, Request, Splitter
from txnbridge_conformance.faults._kafka import KafkaConversation
from txnbridge_conformance.faults._pulsar import PulsarConversation
from txnbridge_conformance.faults._rocketmq import RocketMQConversation

if TYPE_CHECKING:  # the programs in this package start often, and need no brokers
    from txnbridge_conformance.brokers import Broker, Route

_HOST = "127.0.0.1"
_CHUNK = 64 * 1024
# What waits on its way is bounded, then the sender waits too: at most this many chunks in each direction.
_MOST_WAITING = 1000
_END = None

# The protocols in which something can be picked, by the schemes of the brokers' URLs.
_CONVERSATIONS: dict[str, type[Conversation]] = {
    "kafka": KafkaConversation,
    "pulsar": PulsarConversation,
    "rocketmq": RocketMQConversation,
}


class Hold:
    """Requests or answers of one kind that do not arrive before `release`, nor does what follows on their connection.

    Their connection to the broker stays open when the client hangs up, so that what was sent can still arrive.
    """

    def __init__(self, kind: int, count: int | None) -> None:
        self._kind = kind
        self._left = count
        self._over = False
        self.gate = threading.Event()
        self._changed = threading.Condition()
        self._caught: list[Request] = []
        self.dropped = False

    def wait(self, timeout: float = 30) -> Request:
        """Wait until something is held, and return the first of it (of an answer, its request).

        Raises `AssertionError` if nothing came within that time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._caught, timeout):
                raise AssertionError(f"nothing of the kind {self._kind} came within {timeout:g} s")
            return self._caught[0]

    def release(self) -> None:
        """Let go what is held, and hold no more."""
        with self._changed:
            self._over = True
        self.gate.set()

    def drop(self) -> None:
        """Lose what is held, and hold no more: it never arrives, and its connections are as good as dead."""
        self.dropped = True
        self.release()

    def answered(self, timeout: float = 30) -> None:
        """Wait until something is held, and until the broker has answered all of it, also if the client is gone.

        Raises `AssertionError` if that took longer.
        """
        deadline = time.monotonic() + timeout
        self.wait(timeout)
        with self._changed:
            caught = list(self._caught)
        for request in caught:
            if not request.answered.wait(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"{request} was not answered within {timeout:g} s")

    def catch(self, request: Request) -> bool:
        """Whether this one is held; for the proxy."""
        with self._changed:
            if self._over or request.kind != self._kind or self._left == 0:
                return False
            self._left = None if self._left is None else self._left - 1
            self._caught.append(request)
            self._changed.notify_all()
            return True


class Proxy:
    """Passes on what clients and a broker say, until told otherwise. Use it as a context manager.

    Any thread may call. What it is told holds for all connections, those that come later too.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        conversation: type[Conversation] | None = None,
        broker_url: str = "tcp:",
    ) -> None:
        """Listen on each route's port (0: any free one). Without `conversation` nothing can be held."""
        self._broker_url = broker_url
        self._routes = routes
        self._new_conversation = conversation
        self._lock = threading.Lock()
        self._holds: dict[str, list[Hold]] = {"requests": [], "answers": []}
        self._bytes_left: dict[str, int | None] = {"requests": None, "answers": None}
        self._connections: list[_Connection] = []
        self._closing = threading.Event()
        self._half_open = False
        self._delay = 0.0
        self._listeners: list[socket.socket] = []
        try:
            for route in routes:
                self._listeners.append(_listen(route.listen))
        except BaseException:
            self._close_listeners()
            raise
        self.ports = tuple(listener.getsockname()[1] for listener in self._listeners)
        self._threads = [
            _thread(self._accept, listener, route.upstream)
            for listener, route in zip(self._listeners, routes, strict=True)
        ]

    @property
    def url(self) -> str:
        """The URL of the broker, by way of this proxy."""
        url = urlsplit(self._broker_url)
        # The URL names those that are asked first, of RocketMQ the name server alone; these have the first routes.
        first = self.ports[: url.netloc.count(",") + 1] if url.netloc else self.ports
        return url._replace(netloc=",".join(f"{_HOST}:{port}" for port in first)).geturl()

    # --- faults -------------------------------------------------------------------------------------------------------

    def hold(
        self, *, requests: str | int | None = None, answers: str | int | None = None, count: int | None = 1
    ) -> Hold:
        """Hold the next `count` requests, or answers to requests, of one kind; None: all that come.

        A kind is a name ("EndTxn", "END_TXN") or a number of the broker's protocol. Raises `InvalidOption`.
        """
        if self._new_conversation is None:
            raise InvalidOption("this proxy does not know the protocol that it passes on, so it cannot pick anything")
        if (requests is None) == (answers is None):
            raise InvalidOption("hold either requests=... or answers=...")
        way, kind = ("answers", answers) if requests is None else ("requests", requests)
        hold = Hold(_number(kind, self._new_conversation.kinds), count)
        with self._lock:
            self._holds[way].append(hold)
        return hold

    def release(self) -> None:
        """Let everything go that is held, and hold no more."""
        with self._lock:
            holds = [*self._holds["requests"], *self._holds["answers"]]
            self._holds = {"requests": [], "answers": []}
        for hold in holds:
            hold.release()

    def cut(self) -> None:
        """Cut every connection now; later ones are served. A request that is held can still arrive after `release`."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()

    def cut_after(self, *, requests: int | None = None, answers: int | None = None) -> None:
        """After so many more bytes of requests or answers, over all connections, cut the one that carries the last."""
        with self._lock:
            self._bytes_left = {"requests": requests, "answers": answers}

    def delay(self, seconds: float) -> None:
        """From now on everything takes so much longer, in both directions. 0 undoes it."""
        self._delay = seconds

    def half_open(self, on: bool = True) -> None:
        """From now on one side does not hear that the other one hung up, until `cut` or the end of this proxy."""
        self._half_open = on

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut everything, lose what is held, and stop listening."""
        self._closing.set()
        self._close_listeners()
        with self._lock:
            holds = [*self._holds["requests"], *self._holds["answers"]]
        for hold in holds:
            hold.drop()
        for thread in self._threads:
            thread.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`
            listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for its connections ------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, upstream: int) -> None:
        while not self._closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection((_HOST, upstream))
            except OSError:
                client.close()
                continue
            self._serve(client, broker)

    def _serve(self, client: socket.socket, broker: socket.socket) -> None:
        conversation = self._new_conversation() if self._new_conversation else None
        with self._lock:
            self._connections = [each for each in self._connections if not each.ended]
            self._connections.append(_Connection(self, client, broker, conversation))

    @property
    def closing(self) -> threading.Event:
        return self._closing

    @property
    def is_half_open(self) -> bool:
        return self._half_open

    def due(self) -> float:
        """When something that comes now goes on."""
        return time.monotonic() + self._delay

    def with_own_addresses(self, frame: bytes) -> bytes:
        """An answer in JSON in which this proxy's addresses stand for the brokers'."""
        for route, port in zip(self._routes, self.ports, strict=True):
            frame = frame.replace(f'"{_HOST}:{route.upstream}"'.encode(), f'"{_HOST}:{port}"'.encode())
        return struct.pack(">i", len(frame) - 4) + frame[4:]

    def holder(self, way: str, request: Request | None) -> Hold | None:
        """Who holds this request, or the answer to it."""
        if request is None:
            return None
        with self._lock:
            return next((hold for hold in self._holds[way] if hold.catch(request)), None)

    def allowed(self, way: str, size: int) -> tuple[int, bool]:
        """How many of so many bytes pass, and whether the connection is cut then."""
        with self._lock:
            left = self._bytes_left[way]
            if left is None:
                return size, False
            passed = min(size, left)
            cut = passed == left
            self._bytes_left[way] = None if cut else left - passed
            return passed, cut


class _Connection:
    """One client's connection, and the one to the broker that goes with it."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, broker: socket.socket, conversation: Conversation | None
    ) -> None:
        self._client, self._broker = client, broker
        self._holds: list[Hold] = []  # those of requests
        for side in (client, broker):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parse = (conversation.request, conversation.answer) if conversation else (None, None)
        sizes = (conversation.request_head, conversation.answer_head) if conversation else (None, None)
        self._open_ways = 2
        self._lock = threading.Lock()
        tells = conversation.tells_addresses if conversation else ()
        requests = _Way(self, proxy, "requests", client, broker, parse[0], sizes[0])
        answers = _Way(self, proxy, "answers", broker, client, parse[1], sizes[1], tells)
        self._threads = [*requests.start(), *answers.start()]

    @property
    def ended(self) -> bool:
        return not self._open_ways

    def holds(self, hold: Hold) -> None:
        """A request of this connection is held."""
        self._holds.append(hold)

    def keeps_broker(self) -> bool:
        """Whether the broker must not hear that the client hung up: something was held that it is still to hear."""
        return bool(self._holds)

    def cut(self) -> None:
        _shut(self._client)
        if all(hold.gate.is_set() for hold in self._holds):
            _shut(self._broker)

    def close(self) -> None:
        _shut(self._client)
        _shut(self._broker)
        for thread in self._threads:
            thread.join()

    def way_ended(self) -> None:
        with self._lock:
            self._open_ways -= 1
            if self._open_ways:
                return
        self._client.close()
        self._broker.close()


class _Way:
    """One direction of a connection: one thread reads and judges, the other one waits where it must and sends."""

    def __init__(
        self,
        connection: _Connection,
        proxy: Proxy,
        name: str,
        source: socket.socket,
        target: socket.socket,
        parse: Callable[[bytes], Request | None] | None,
        head_size: int | None,
        tells_addresses: Collection[int] = (),
    ) -> None:
        self._connection, self._proxy, self._name = connection, proxy, name
        self._source, self._target = source, target
        self._parse, self._splitter = parse, Splitter(head_size)
        self._tells_addresses = tells_addresses
        self._hold: Hold | None = None  # of the present frame
        self._told: bytes | None = None  # of a frame that holds addresses, as far as it has come
        self._waiting: queue.Queue[tuple[float, bytes, Hold | None] | None] = queue.Queue(_MOST_WAITING)

    def start(self) -> list[threading.Thread]:
        return [_thread(self._read), _thread(self._write)]

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._source.recv(_CHUNK):
                self._put(self._splitter.feed(data) if self._parse else [Piece(data)])
        self._put(self._splitter.flush())
        if self._told:
            self._pass_on(self._told)
        self._waiting.put(_END)

    def _put(self, pieces: Iterable[Piece]) -> None:
        for data, head in pieces:
            if head is not None and self._parse is not None:
                request = self._parse(head)
                self._hold = self._proxy.holder(self._name, request)
                if self._hold and self._name == "requests":
                    self._connection.holds(self._hold)
                self._told = b"" if request and request.kind in self._tells_addresses else None
            if self._told is None:
                self._pass_on(data)
                continue
            self._told += data
            if not self._splitter.is_inside:
                told, self._told = self._told, None
                self._pass_on(self._proxy.with_own_addresses(told))

    def _pass_on(self, data: bytes) -> None:
        self._waiting.put((self._proxy.due(), data, self._hold))

    def _write(self) -> None:
        broken = False
        while (item := self._waiting.get()) is not _END:
            due, data, hold = item
            self._proxy.closing.wait(max(0.0, due - time.monotonic()))
            if hold:
                hold.gate.wait()
            if broken or (hold and hold.dropped) or self._proxy.closing.is_set():
                continue  # read on, so that the reader does not wait for ever
            try:
                self._send(data)
            except OSError:
                broken = True
        self._pass_on_the_end()
        self._connection.way_ended()

    def _send(self, data: bytes) -> None:
        passed, cut = self._proxy.allowed(self._name, len(data))
        self._target.sendall(data[:passed])
        if cut:
            self._connection.cut()

    def _pass_on_the_end(self) -> None:
        kept = self._name == "requests" and self._connection.keeps_broker()
        if not kept and not self._proxy.is_half_open:
            with suppress(OSError):
                self._target.shutdown(socket.SHUT_WR)


def _number(kind: str | int | None, kinds: Mapping[str, int]) -> int:
    if isinstance(kind, int):
        return kind
    if kind is None or kind not in kinds:
        raise InvalidOption(f"{kind!r} is no kind of request; known: {', '.join(kinds)}, or a number")
    return kinds[kind]


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="txnbridge-proxy", daemon=True)
    thread.start()
    return thread


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise UsageError(f"the proxy cannot listen on port {port}: {error.strerror}; is another one open?") from None


def _shut(side: socket.socket) -> None:
    with suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


def proxy(broker: Broker) -> Proxy:
    """Stand between clients and a broker that `txnbridge_conformance.brokers` started. Use it as a context manager.

    Clients that connect to its `url` stay with it, since the broker tells them the proxy's address, for every node.
    One proxy at a time stands before a broker. Raises `UsageError`.
    """
    return Proxy(broker.routes, _CONVERSATIONS.get(urlsplit(broker.url).scheme), broker.url)
