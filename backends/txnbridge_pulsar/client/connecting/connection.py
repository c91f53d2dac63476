"""One connection to one broker: requests and their answers, entries in both directions, and keepalive pings.

Each connection has one thread, which only reads and never blocks. The thread gives answers to the waiting callers, and
receipts and entries to the registered producers and consumers. When the connection ends, all waiting calls raise the
reason.
"""

from __future__ import annotations

import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from txnbridge_pulsar.client.deadline import ClientDeadline
from txnbridge_pulsar.client.errors import (
    BrokerConnectionLost,
    Closed,
    ConnectFailed,
    NotAuthenticated,
    ProtocolError,
    PulsarError,
    RequestTimedOut,
    server_error,
)
from txnbridge_pulsar.client.format.codec import COMMANDS, Fields
from txnbridge_pulsar.client.format.frames import (
    DEFAULT_MAX_MESSAGE,
    FRAME_ALLOWANCE,
    Frame,
    FrameReader,
    command,
    parse,
)

from .address import Address
from .authentication import NO_AUTHENTICATION, Authentication
from .transport import NotWritten, Transport, dial

_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())  # so that a program without logging settings does not print these lines

CLIENT_VERSION = "txnbridge"
# The newest version that brokers know: 17 answers acknowledgements, 19 lets clients connect to coordinators.
PROTOCOL_VERSION = 21
TRANSACTIONS_SINCE = 19
# A ping is sent after this time without data; the connection ends after the same time again. Brokers do the same.
KEEPALIVE_SECONDS = 30.0
# The most unanswered requests: if there are more, the broker has probably stopped answering.
MAX_IN_FLIGHT = 50_000
# Seconds for opening a connection: if it takes longer, a packet was lost, and the next attempt may succeed.
CONNECT_SECONDS = 10.0


class ProducerCallbacks(Protocol):
    """The methods of a producer that the connection's reading thread calls. They may not block."""

    def on_receipt(self, fields: Fields) -> None: ...

    def on_send_error(self, fields: Fields) -> None: ...

    def on_lost(self, reason: PulsarError) -> None: ...


class ConsumerCallbacks(NamedTuple):
    """The functions of a consumer that the connection's reading thread calls. They may not block."""

    on_message: Callable[[Fields, bytes], None]
    on_active: Callable[[bool], None]
    on_lost: Callable[[PulsarError], None]


def answer_to(name: str) -> str:
    if name == "producer":
        return "producer_success"
    answer = f"{name.removesuffix('_request')}_response"
    return answer if answer in COMMANDS else "success"


class Response:
    """A request's answer, which may still be under way. The caller does other work until it calls `result`."""

    def __init__(self, forget: Callable[[], None], what: str, kind: str) -> None:
        self.kind = kind  # the command that answers, unless it is an error
        self._future: Future[Fields] = Future()
        self._forget = forget
        self._what = what

    def result(self, timeout: float) -> Fields:
        """Wait for and return the answer's fields. Raise the broker's `ServerError`, or `BrokerConnectionLost`."""
        try:
            return self._future.result(timeout)
        except FutureTimeout:
            self._forget()
            raise RequestTimedOut(f"no answer to {self._what} in {timeout:g} s") from None

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` when the answer has arrived: on the reading thread, so `call` may not block."""
        self._future.add_done_callback(lambda _: call())

    def resolve(self, outcome: Fields | PulsarError) -> None:
        """Set the answer's fields, or the error, for which the caller waits. Only the first call has an effect."""
        with suppress(InvalidStateError):
            if isinstance(outcome, PulsarError):
                self._future.set_exception(outcome)
            else:
                self._future.set_result(outcome)


@dataclass(frozen=True)
class ConnectionOptions:
    """The options of all connections of a client. With a `tls` context connections are encrypted."""

    authentication: Authentication = NO_AUTHENTICATION
    tls: ssl.SSLContext | None = None
    keepalive_seconds: float = KEEPALIVE_SECONDS


class BrokerConnection:
    """An open connection to a broker, made by `open`. Thread-safe."""

    def __init__(
        self, transport: Transport, address: Address, logical: Address | None, options: ConnectionOptions
    ) -> None:
        self.address = address
        self.max_message_size = DEFAULT_MAX_MESSAGE
        self.protocol_version = 0
        self.server_version = ""
        self._logical = logical
        self._options = options
        self._transport = transport
        self._lock = threading.Lock()
        self._request_ids = itertools.count(1)
        self._requests: dict[int, Response] = {}
        self._sides: dict[tuple[str, int], Any] = {}  # the producers and consumers, by kind and id
        self._connected = Response(lambda: None, "the greeting", "connected")
        self._reason: PulsarError | None = None
        self._frames = FrameReader()
        self._last_received_at = time.monotonic()
        self._pinged = False
        self._reader = threading.Thread(target=self._read, name=f"pulsar {address}", daemon=True)

    # ------------------------------------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, address: Address, options: ConnectionOptions, deadline: ClientDeadline, logical: Address | None = None
    ) -> BrokerConnection:
        """Connect, and wait for the broker's answer to CONNECT. If a proxy listens at `address`, `logical` names the
        broker that the proxy connects to.

        Raise `ConnectFailed` if no connection was made, or the broker's refusal, usually `NotAuthenticated`.
        """
        deadline = ClientDeadline(min(deadline.left, CONNECT_SECONDS))
        sock = None
        try:
            sock = dial(address, options.tls, deadline)
            connection = cls(Transport(sock), address, logical, options)
            connection._reader.start()
        except (OSError, ValueError, RuntimeError) as error:  # the last if this machine starts no more threads now
            if sock is not None:
                sock.close()
            raise ConnectFailed(f"{address} cannot be reached: {error}") from error
        try:
            connection._send_connect(deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _send_connect(self, deadline: ClientDeadline) -> None:
        authentication = self._options.authentication
        try:
            credentials = authentication.data()
        except Exception as error:  # any exception of the user's function, whose text may have a secret
            raise NotAuthenticated(3, f"the credentials could not be read: {type(error).__name__}") from None
        hello = command(
            "connect",
            client_version=CLIENT_VERSION,
            auth_data=credentials or None,
            protocol_version=PROTOCOL_VERSION,
            auth_method_name=authentication.method,
            proxy_to_broker_url=None if self._logical is None else str(self._logical),
            feature_flags={"supports_auth_refresh": True},
        )
        try:
            self._write(hello, deadline)
            answer = self._connected.result(deadline.left)
        except BrokerConnectionLost as error:
            raise ConnectFailed(f"{self.address} did not accept the connection: {error}") from error
        self.server_version = answer["server_version"]
        self.protocol_version = answer.get("protocol_version", 0)

    # ------------------------------------------------------------------------------------------ requests

    @property
    def closed(self) -> bool:
        return self._reason is not None

    def request(self, name: str, deadline: ClientDeadline, **fields: Any) -> Response:
        """Send a request without waiting for its answer. Raise `BrokerConnectionLost` if the connection has ended,
        `RequestTimedOut` if the request cannot be written by the deadline.
        """
        with self._lock:
            self._check_open()
            if len(self._requests) >= MAX_IN_FLIGHT:
                why = "too many requests wait for an answer on one connection"
                raise RequestTimedOut(why, may_have_had_effect=False)
            id = next(self._request_ids)
            what = f"{name} from {self.address}"
            response = self._requests[id] = Response(lambda: self._forget(id), what, answer_to(name))
        try:
            self._write(command(name, request_id=id, **fields), deadline)
        except BaseException:
            self._forget(id)
            raise
        return response

    def ask(self, name: str, deadline: ClientDeadline, **fields: Any) -> Fields:
        """Send a request, wait for the answer and return its fields. Raise the errors of `Response.result`."""
        return self.request(name, deadline, **fields).result(deadline.left)

    def _forget(self, id: int) -> None:
        with self._lock:
            self._requests.pop(id, None)

    def write(self, frame: bytes, deadline: ClientDeadline) -> None:
        """Write a frame without a request id. Raise `BrokerConnectionLost`, or `RequestTimedOut` at the deadline."""
        with self._lock:
            self._check_open()
        self._write(frame, deadline)

    def post(self, frame: bytes) -> None:
        """Write a small frame without waiting or raising: at once, or as soon as the socket accepts more bytes."""
        with suppress(OSError):
            self._transport.post(frame)

    def _write(self, frame: bytes, deadline: ClientDeadline) -> None:
        try:
            self._transport.write(frame, deadline)
        except NotWritten as error:
            if self._reason is not None:
                raise self._lost(error.started) from self._reason
            text = f"{self.address} accepted no more data in {deadline.seconds:g} s"
            raise RequestTimedOut(text, may_have_had_effect=error.started) from None
        except OSError as error:
            self._transport.interrupt()
            raise BrokerConnectionLost(f"the connection to {self.address} broke: {error}") from error

    def _check_open(self) -> None:
        if self._reason is not None:
            raise self._lost(False) from self._reason

    def _lost(self, may_have_had_effect: bool) -> BrokerConnectionLost:
        return BrokerConnectionLost(f"the connection to {self.address} is closed: {self._reason}", may_have_had_effect)

    # ------------------------------------------------------------------------------------------ producers and consumers

    def add(self, kind: str, id: int, side: ProducerCallbacks | ConsumerCallbacks) -> None:
        """Register a "producer" or "consumer", whose `on_…` methods the reading thread then calls: they may not block.

        Raise `BrokerConnectionLost` if the connection has ended.
        """
        with self._lock:
            self._check_open()
            self._sides[kind, id] = side

    def remove(self, kind: str, id: int) -> Any:
        """Remove and return a "producer" or "consumer"; None if the connection has none with this id."""
        with self._lock:
            return self._sides.pop((kind, id), None)

    # ------------------------------------------------------------------------------------------ reading

    def _read(self) -> None:
        try:
            while True:
                with self._frames.space() as space:
                    received = self._transport.read_into(space, self._silence_left())
                if received is None:
                    self._keep_alive()
                    continue
                self._last_received_at = time.monotonic()
                self._pinged = False
                for data in self._frames.frames(received):
                    self._handle(parse(data))
        except PulsarError as error:
            self._end(error)
        except OSError as error:
            self._end(BrokerConnectionLost(str(error)))
        except Exception as error:  # after a handler's error other callers must not wait for ever
            _log.exception("a frame from %s could not be handled", self.address)
            self._end(ProtocolError(f"a frame could not be handled: {type(error).__name__}"))

    def _silence_left(self) -> float:
        allowed = self._options.keepalive_seconds * (2 if self._pinged else 1)
        return max(0.0, self._last_received_at + allowed - time.monotonic())

    def _keep_alive(self) -> None:
        if self._silence_left() > 0:
            return
        if self._pinged:
            raise BrokerConnectionLost(
                f"nothing was received for {2 * self._options.keepalive_seconds:g} s, not even an answer to a ping"
            )
        self._pinged = True
        self._transport.post(command("ping"))

    def _handle(self, frame: Frame) -> None:
        handler = _HANDLERS.get(frame.name)
        if handler is not None:
            handler(self, frame)
        elif "request_id" in frame.fields:
            self._answer(frame.name, frame.fields)
        else:
            _log.debug("%s sent an unexpected command: %s", self.address, frame.name or "unknown")

    def _answer(self, name: str, fields: Fields) -> None:
        if name == "producer_success" and not fields.get("producer_ready", True):
            return  # the producer waits for exclusive access; a second answer with the same id grants it
        with self._lock:
            response = self._requests.pop(fields["request_id"], None)
        if response is None and name == "error":
            response = self._connected  # no longer needed once it is answered
        if response is not None:
            response.resolve(_outcome(name, fields, response.kind))

    def _on_connected(self, frame: Frame) -> None:
        largest = frame.fields.get("max_message_size", 0)
        if largest > 0:
            self.max_message_size = largest
            self._frames.limit = largest + FRAME_ALLOWANCE
        self._connected.resolve(frame.fields)

    def _on_auth_challenge(self, frame: Frame) -> None:
        # Answer on another thread, because fetching credentials may take a while.
        threading.Thread(target=self._refresh, name="pulsar credentials", daemon=True).start()

    def _refresh(self) -> None:
        authentication = self._options.authentication
        try:
            data = authentication.data()
        except Exception as error:  # any exception of the user's function; without an answer the broker hangs up
            _log.warning("new credentials could not be fetched: %s", type(error).__name__)
            return
        response = {"auth_method_name": authentication.method, "auth_data": data}
        ours = {"client_version": CLIENT_VERSION, "protocol_version": PROTOCOL_VERSION}
        self.post(command("auth_response", response=response, **ours))

    def _tell(self, kind: str, frame: Frame, tell: Callable[[Any], None]) -> None:
        side = self._sides.get((kind, frame.fields[f"{kind}_id"]))
        if side is not None:
            tell(side)

    def _lose(self, kind: str, id: int) -> None:
        if (side := self.remove(kind, id)) is not None:
            side.on_lost(BrokerConnectionLost("closed by the broker; the topic may have moved"))

    # ------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Close the connection, so that waiting calls raise `BrokerConnectionLost`. Wait briefly for its thread."""
        with self._lock:
            self._reason = self._reason or Closed("this process closed it")
        self._transport.interrupt()
        if threading.current_thread() is not self._reader:
            self._reader.join(1.0)

    def _end(self, reason: PulsarError) -> None:
        with self._lock:
            self._reason = reason = self._reason or reason
            requests, self._requests = [*self._requests.values(), self._connected], {}
            sides, self._sides = list(self._sides.values()), {}
        self._transport.close()
        lost = self._lost(may_have_had_effect=True)
        lost.__cause__ = reason
        for response in requests:
            response.resolve(lost)
        for side in sides:
            side.on_lost(lost)


_HANDLERS: dict[str, Callable[[BrokerConnection, Frame], None]] = {
    "connected": BrokerConnection._on_connected,
    "ping": lambda connection, _: connection._transport.post(command("pong")),
    "pong": lambda *_: None,
    "auth_challenge": BrokerConnection._on_auth_challenge,
    "send_receipt": lambda each, frame: each._tell("producer", frame, lambda side: side.on_receipt(frame.fields)),
    "send_error": lambda each, frame: each._tell("producer", frame, lambda side: side.on_send_error(frame.fields)),
    "message": lambda each, frame: each._tell("consumer", frame, lambda side: side.on_message(*frame[1:])),
    "active_consumer_change": lambda each, frame: each._tell(
        "consumer", frame, lambda side: side.on_active(frame.fields.get("is_active", False))
    ),
    "close_producer": lambda each, frame: each._lose("producer", frame.fields["producer_id"]),
    "close_consumer": lambda each, frame: each._lose("consumer", frame.fields["consumer_id"]),
    "topic_migrated": lambda each, frame: each._lose(
        "consumer" if frame.fields["resource_type"] else "producer", frame.fields["resource_id"]
    ),
}


def _outcome(name: str, fields: Fields, expected: str) -> Fields | PulsarError:
    if "error" in fields:  # the code of an unknown error is 0
        return server_error(fields["error"], fields.get("message", ""))
    return fields if name == expected else ProtocolError(f"the broker answered {name} where {expected} was due")
