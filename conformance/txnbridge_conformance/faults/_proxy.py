"""A proxy between clients and a broker, by which a test makes the network fail."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from txnbridge.errors import InvalidOption, UsageError
from txnbridge_conformance.faults._protocols import (
    API_VERSIONS,
    Conversation,
    FrameSplitter,
    KafkaConversation,
    PulsarConversation,
    Request,
    RocketMQConversation,
    StreamPiece,
    with_versions,
)

if TYPE_CHECKING:  # the programs in this package start often, and need no brokers
    from txnbridge_conformance.brokers import Broker, Route

_HOST = "127.0.0.1"
_CHUNK = 64 * 1024
# The most chunks that wait in each direction of a connection. If so many wait, no more are read from the sender.
_MOST_WAITING = 1000
_END = None

# The protocols whose requests and answers can be held, by the schemes of the brokers' URLs.
_CONVERSATIONS: dict[str, type[Conversation]] = {
    "kafka": KafkaConversation,
    "pulsar": PulsarConversation,
    "rocketmq": RocketMQConversation,
}


class Hold:
    """One order of a test to the proxy: hold back requests or answers of one kind until `release` or `drop`.

    All later bytes on their connections are held back, too. If the client of a held request disconnects, the connection
    to the broker stays open, so that the request can still arrive at the broker.
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
        """Wait until the proxy holds a frame back; return the first held request, or that of the first held answer.

        Raise `AssertionError` if no frame was held within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._caught, timeout):
                raise AssertionError(f"nothing of the kind {self._kind} came within {timeout:g} s")
            return self._caught[0]

    def release(self) -> None:
        """Forward the held frames, and hold back no more."""
        with self._changed:
            self._over = True
        self.gate.set()

    def drop(self) -> None:
        """Discard the held frames, and hold back no more. Later frames on the same connections are forwarded."""
        self.dropped = True
        self.release()

    def answered(self, timeout: float = 30) -> None:
        """Wait until a frame is held and the broker has answered every held request, also of disconnected clients.

        Raise `AssertionError` if the answers take longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self.wait(timeout)
        with self._changed:
            caught = list(self._caught)
        for request in caught:
            if not request.answered.wait(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"{request} was not answered within {timeout:g} s")

    def catch(self, request: Request) -> bool:
        """Return whether to hold back a request (or its answer), and if so count it. The proxy asks for each frame."""
        with self._changed:
            if self._over or request.kind != self._kind or self._left == 0:
                return False
            self._left = None if self._left is None else self._left - 1
            self._caught.append(request)
            self._changed.notify_all()
            return True


class Proxy:
    """Forwards bytes between clients and a broker, with the faults that a test sets. Use it as a context manager.

    Any thread may call. Faults apply to all connections, including later connections.
    """

    def __init__(
        self, routes: Sequence[Route], conversation: type[Conversation] | None = None, broker_url: str = "tcp:"
    ) -> None:
        """Listen on each route's port (0: any free port). Without `conversation` no frame can be held."""
        self._broker_url = broker_url
        self._routes = routes
        self._new_conversation = conversation
        self._lock = threading.Lock()
        self._holds: dict[str, list[Hold]] = {"requests": [], "answers": []}
        self._bytes_left: dict[str, int | None] = {"requests": None, "answers": None}
        self._connections: list[_Connection] = []
        self.closing = threading.Event()
        self.is_half_open = False
        self._delay = 0.0
        self._versions: dict[int, int | None] = {}
        self._listeners: list[socket.socket] = []
        try:
            for route in routes:
                self._listeners.append(socket.create_server((_HOST, route.listen)))
        except OSError as error:
            self._close_listeners()
            text = f"the proxy cannot listen on port {route.listen}: {error.strerror}; close another proxy"
            raise UsageError(text) from None
        self.ports = tuple(listener.getsockname()[1] for listener in self._listeners)
        self._threads = [
            _thread(self._accept, listener, route.upstream)
            for listener, route in zip(self._listeners, routes, strict=True)
        ]

    @property
    def url(self) -> str:
        """Return the broker's URL with this proxy's addresses."""
        url = urlsplit(self._broker_url)
        # The URL has the addresses that clients ask first (for RocketMQ the name server), which have the first routes.
        first = self.ports[: url.netloc.count(",") + 1] if url.netloc else self.ports
        return url._replace(netloc=",".join(f"{_HOST}:{port}" for port in first)).geturl()

    # --- faults -------------------------------------------------------------------------------------------------------

    def hold(
        self, *, requests: str | int | None = None, answers: str | int | None = None, count: int | None = 1
    ) -> Hold:
        """Hold back the next `count` requests of one kind, or answers to such requests; with None all of them.

        A kind is a name ("EndTxn", "END_TXN") or a number of the broker's protocol. Return the `Hold`, by which the
        test waits for them and releases them. Raise `InvalidOption` for another name, for both or neither direction, or
        if the proxy has no protocol.
        """
        if self._new_conversation is None:
            raise InvalidOption("this proxy knows no protocol, so it cannot hold requests or answers")
        if (requests is None) == (answers is None):
            raise InvalidOption("hold either requests=... or answers=...")
        direction, kind = ("answers", answers) if requests is None else ("requests", requests)
        hold = Hold(_number(kind, self._new_conversation.kinds), count)
        with self._lock:
            self._holds[direction].append(hold)
        return hold

    def release(self) -> None:
        """Release all holds: forward the held frames, and hold back no more."""
        with self._lock:
            holds = [*self._holds["requests"], *self._holds["answers"]]
            self._holds = {"requests": [], "answers": []}
        for hold in holds:
            hold.release()

    def cut(self) -> None:
        """Cut every connection now, but accept later ones. A held request can still arrive after `release`."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()

    def cut_after(self, *, requests: int | None = None, answers: int | None = None) -> None:
        """Forward this many more bytes, over all connections, then cut the connection of the last byte.

        The number is counted separately for requests and for answers. None ends the limit.
        """
        with self._lock:
            self._bytes_left = {"requests": requests, "answers": answers}

    def delay(self, seconds: float) -> None:
        """Delay all bytes that arrive from now on by `seconds`, in both directions. 0 ends the delay."""
        self._delay = seconds

    def half_open(self, on: bool = True) -> None:
        """Keep a side's connection open after the other side has disconnected, until `cut` or `close`."""
        self.is_half_open = on

    def limit_versions(self, highest: Mapping[str | int, int | None]) -> None:
        """Let a Kafka broker seem to support requests only up to these versions; None: not at all.

        Connections that are made later find so, as at another broker that speaks Kafka's protocol. Raise
        `InvalidOption` for another protocol.
        """
        if self._new_conversation is not KafkaConversation:
            raise InvalidOption("only Kafka's requests have versions")
        self._versions = {_number(kind, KafkaConversation.kinds): version for kind, version in highest.items()}

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut all connections, discard the held frames, and stop listening."""
        self.closing.set()
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
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in `accept`
            listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for its connections ------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, upstream: int) -> None:
        while not self.closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection((_HOST, upstream))
            except OSError:
                client.close()
                continue
            conversation = self._new_conversation() if self._new_conversation else None
            with self._lock:
                self._connections = [each for each in self._connections if not each.ended]
                self._connections.append(_Connection(self, client, broker, conversation))

    def forward_time(self) -> float:
        """Return the time at which to forward bytes that arrive now, as `delay` has set it."""
        return time.monotonic() + self._delay

    def rewritten_kinds(self, conversation: Conversation) -> Collection[int]:
        """Return the kinds of requests whose answers `rewrite` changes."""
        return [API_VERSIONS] if self._versions else conversation.rewritten_kinds

    def rewrite(self, request: Request, frame: bytes) -> bytes:
        """Return the frame of an answer with this proxy's addresses in JSON, or with the versions that were set."""
        if self._versions:
            return with_versions(frame, request.version, self._versions)
        for route, port in zip(self._routes, self.ports, strict=True):
            frame = frame.replace(f'"{_HOST}:{route.upstream}"'.encode(), f'"{_HOST}:{port}"'.encode())
        return struct.pack(">i", len(frame) - 4) + frame[4:]

    def catch_by_hold(self, direction: str, request: Request | None) -> Hold | None:
        """Return the `Hold` that holds back this request, or for the direction "answers" its answer; else None."""
        if request is None:
            return None
        with self._lock:
            return next((hold for hold in self._holds[direction] if hold.catch(request)), None)

    def take_allowance(self, direction: str, size: int) -> tuple[int, bool]:
        """Use up the allowance of `cut_after` for `size` bytes that go to the "broker" or to the "client".

        Return how many of them pass, and whether the connection is cut after them.
        """
        with self._lock:
            left = self._bytes_left[direction]
            if left is None:
                return size, False
            passed = min(size, left)
            cut = passed == left
            self._bytes_left[direction] = None if cut else left - passed
            return passed, cut


class _Connection:
    """A client's connection to the proxy, together with the connection to the broker that the proxy opened for it."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, broker: socket.socket, conversation: Conversation | None
    ) -> None:
        self._client, self._broker = client, broker
        # The holds of its requests: with one, the connection to the broker stays open if the client disconnects.
        self.holds: list[Hold] = []
        for side in (client, broker):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parse = (conversation.request, conversation.answer) if conversation else (None, None)
        sizes = (conversation.request_head, conversation.answer_head) if conversation else (None, None)
        self._open_directions = 2
        self._lock = threading.Lock()
        rewritten = proxy.rewritten_kinds(conversation) if conversation else ()
        requests = _Direction(self, proxy, "requests", client, broker, parse[0], sizes[0])
        answers = _Direction(self, proxy, "answers", broker, client, parse[1], sizes[1], rewritten)
        self._threads = [*requests.start(), *answers.start()]

    @property
    def ended(self) -> bool:
        return not self._open_directions

    def cut(self) -> None:
        _shut(self._client)
        if all(hold.gate.is_set() for hold in self.holds):
            _shut(self._broker)

    def close(self) -> None:
        _shut(self._client)
        _shut(self._broker)
        for thread in self._threads:
            thread.join()

    def direction_ended(self) -> None:
        with self._lock:
            self._open_directions -= 1
            if self._open_directions:
                return
        self._client.close()
        self._broker.close()


@dataclass(eq=False, repr=False)
class _Direction:
    """One direction of a connection. One thread reads frames and finds their holds; another waits and sends."""

    _connection: _Connection
    _proxy: Proxy
    _name: str
    _source: socket.socket
    _target: socket.socket
    _parse: Callable[[bytes], Request | None] | None
    _head_size: int | None
    _rewritten_kinds: Collection[int] = ()

    def __post_init__(self) -> None:
        self._splitter = FrameSplitter(self._head_size)
        self._hold: Hold | None = None  # the hold of the current frame
        self._request: Request | None = None  # of the current frame
        self._rewritten: bytes | None = None  # the bytes so far of an answer that is changed
        self._waiting: queue.Queue[tuple[float, bytes, Hold | None] | None] = queue.Queue(_MOST_WAITING)

    def start(self) -> list[threading.Thread]:
        return [_thread(self._read), _thread(self._write)]

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._source.recv(_CHUNK):
                self._put(self._splitter.feed(data) if self._parse else [StreamPiece(data)])
        self._put(self._splitter.flush())
        if self._rewritten:
            self._forward(self._rewritten)
        self._waiting.put(_END)

    def _put(self, pieces: Iterable[StreamPiece]) -> None:
        for data, head in pieces:
            if head is not None and self._parse is not None:
                self._request = request = self._parse(head)
                self._hold = self._proxy.catch_by_hold(self._name, request)
                if self._hold and self._name == "requests":
                    self._connection.holds.append(self._hold)
                self._rewritten = b"" if request and request.kind in self._rewritten_kinds else None
            if self._rewritten is None:
                self._forward(data)
                continue
            self._rewritten += data
            if self._request and not self._splitter.is_inside:
                answer, self._rewritten = self._rewritten, None
                self._forward(self._proxy.rewrite(self._request, answer))

    def _forward(self, data: bytes) -> None:
        self._waiting.put((self._proxy.forward_time(), data, self._hold))

    def _write(self) -> None:
        broken = False
        while (item := self._waiting.get()) is not _END:
            forward_time, data, hold = item
            self._proxy.closing.wait(max(0.0, forward_time - time.monotonic()))
            if hold:
                hold.gate.wait()
            if broken or (hold and hold.dropped) or self._proxy.closing.is_set():
                continue  # empty the queue without sending, so that the reading thread does not block
            try:
                self._send(data)
            except OSError:
                broken = True
        self._forward_end()
        self._connection.direction_ended()

    def _send(self, data: bytes) -> None:
        passed, cut = self._proxy.take_allowance(self._name, len(data))
        self._target.sendall(data[:passed])
        if cut:
            self._connection.cut()

    def _forward_end(self) -> None:
        if not (self._proxy.is_half_open or (self._name == "requests" and self._connection.holds)):
            with suppress(OSError):
                self._target.shutdown(socket.SHUT_WR)


def _number(kind: str | int | None, kinds: Mapping[str, int]) -> int:
    if isinstance(kind, int):
        return kind
    if kind is None or kind not in kinds:
        raise InvalidOption(f"{kind!r} is not a kind of request; known: {', '.join(kinds)}, or a number")
    return kinds[kind]


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="txnbridge-proxy", daemon=True)
    thread.start()
    return thread


def _shut(side: socket.socket) -> None:
    with suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


def proxy(broker: Broker) -> Proxy:
    """Return a proxy between clients and a broker of `txnbridge_conformance.brokers`. Use it as a context manager.

    Clients that connect to the proxy's `url` use the proxy for every node, because the broker returns the proxy's
    addresses. A broker has one proxy at a time. Raise `UsageError` if the broker has a proxy already.
    """
    return Proxy(broker.routes, _CONVERSATIONS.get(urlsplit(broker.url).scheme), broker.url)
