"""One connection to a broker or name server, with many requests in flight, each with its own `opaque` number.

A thread of the connection reads the responses. Memory is bounded: the number of requests in flight is limited, and at
most one incomplete frame is buffered.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from txnbridge_rocketmq.client.errors import (
    Disconnected,
    ProtocolViolation,
    RemotingError,
    ResponseTimeout,
    Unreachable,
)
from txnbridge_rocketmq.client.protocol.frames import ANSWER, FrameDecoder, RemotingCommand, RpcRequest, encode
from txnbridge_rocketmq.client.signal_safe_locks import Slot, Slots
from txnbridge_rocketmq.client.transport import RemotingTransport, connect

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The maximum number of requests in flight on one connection; the next request waits. A broker is no faster with
# thousands of requests than with hundreds, and rejects requests that wait too long in its queue.
MOST_IN_FLIGHT = 1024
# How often the reading thread looks for expired calls. A call that no thread waits for may end that much late.
_EXPIRY_CHECK_SECONDS = 0.25
# Timeout of sending a response to the broker's own request. It has about a hundred bytes.
_RESPONSE_SECONDS = 1.0
# The fields of a signed request, for brokers that control access.
_ACCESS_KEY, _SECURITY_TOKEN, _SIGNATURE = "AccessKey", "SecurityToken", "Signature"


@dataclass(frozen=True)
class Credentials:
    """The name and keys of a broker's user. The secret key signs requests. It is never sent, logged or in errors."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    def sign(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """Return the fields of a request together with the user's name, token and signature."""
        named = {**fields, _ACCESS_KEY: self.access_key}
        if self.security_token is not None:
            named[_SECURITY_TOKEN] = self.security_token
        # The signed content is the values in the order of their names. Java orders names by UTF-16, which makes no
        # difference for the names in use.
        content = "".join(named[name] for name in sorted(named)).encode() + body
        digest = hmac.new(self.secret_key.encode(), content, hashlib.sha1).digest()
        return {**named, _SIGNATURE: base64.b64encode(digest).decode()}


@dataclass(frozen=True)
class ConnectionSettings:
    """The settings that all connections of a client share."""

    tls: ssl.SSLContext | None = None
    credentials: Credentials | None = None
    most_in_flight: int = MOST_IN_FLIGHT
    # A connection on which no byte arrived for this long while a response was due counts as dead. TCP alone needs a
    # quarter of an hour to find out. A live broker responds, or says that it is busy, well before.
    silence_seconds: float = 5.0

    def frame(self, request: RpcRequest[Any], opaque: int) -> bytes:
        """Return the signed request as a frame. Raise `ValueError` if it is too large."""
        fields = request.fields
        if self.credentials is not None:
            fields = self.credentials.sign(fields, request.body)
        return encode(RemotingCommand(request.code, opaque, fields=fields, body=request.body))


class Call(Generic[T]):
    """A request in flight, and later its response or error. Safe for use by several threads."""

    def __init__(
        self, connection: RemotingConnection, request: RpcRequest[T], opaque: int, until: float, slot: Slot
    ) -> None:
        self.slot = slot
        self.request = request
        self.opaque = opaque
        self.until = until
        self.sent_at = time.monotonic()
        self._connection = connection
        self._answer: RemotingCommand | RemotingError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Call[T]], None]] = []

    def result(self) -> T:
        """Wait for the response, until the call's deadline, and return the decoded response.

        Raise `ErrorResponse`, `ResponseTimeout`, `Disconnected` or `ProtocolViolation`.
        """
        if not self._ended.wait(max(0.0, self.until - time.monotonic())):
            self._connection.give_up(self)
            self._ended.wait()  # returns at once: the call has timed out, or its response is being set
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemotingError):
            raise answer
        return self.request.result(answer)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._ended.is_set()

    def when_done(self, callback: Callable[[Call[T]], None]) -> None:
        """Run a callback when the call ends, or now. The reading thread may run it, so it must not wait or send."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, answer: RemotingCommand | RemotingError) -> None:
        """Set the response or error, and run the callbacks. The connection calls this once."""
        with self._lock:
            self._answer = answer
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of %r failed", self.request)


class RemotingConnection:
    """An open connection, which is never reopened after it is lost or closed. The constructor may raise `Unreachable`.

    `on_request` receives the broker's own requests, such as check-backs. The reading thread calls it, so it must return
    at once.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        settings: ConnectionSettings | None = None,
        on_request: Callable[[RemotingConnection, RemotingCommand], None] | None = None,
        on_end: Callable[[RemotingConnection], None] | None = None,
    ) -> None:
        self.address = address
        self._settings = settings or ConnectionSettings()
        self._on_request = on_request
        self._on_end = on_end
        self._wire = RemotingTransport(connect(address, time.monotonic() + timeout, self._settings.tls))
        self._opaques = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Call[Any]] = {}
        self._slots = Slots(self._settings.most_in_flight)
        self._ended: RemotingError | None = None
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._read, name=f"rocketmq {address}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # this machine starts no more threads now
            self._wire.release()
            raise Unreachable(f"{address}: {error}") from error

    @property
    def is_open(self) -> bool:
        return self._ended is None

    def call(self, request: RpcRequest[T], timeout: float) -> T:
        """Send a request and return the decoded response. Raise a `RemotingError`, or `ValueError` if too large."""
        return self.submit(request, timeout).result()

    def submit(self, request: RpcRequest[T], timeout: float) -> Call[T]:
        """Send a request. The returned `Call` ends within `timeout` in any case.

        Wait while too many requests are in flight. Raise `Disconnected` or `ResponseTimeout` only if the request was
        certainly not carried out. Raise `ValueError` for a request that is too large.
        """
        until = time.monotonic() + timeout
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback must not send requests: its thread would have to read the response")
        if timeout <= 0:
            raise ResponseTimeout(f"{request.action}: no time was left")
        opaque = next(self._opaques) & 0x7FFFFFFF
        frame = self._settings.frame(request, opaque)
        slot = self._slots.take(timeout)
        if slot is None:
            raise ResponseTimeout(f"{request.action}: too many requests are in flight to {self.address}")
        call = Call(self, request, opaque, until, slot)
        with self._lock:
            if (ended := self._ended) is None:
                # Registered before the frame is sent, because the response may arrive before `send` returns
                self._waiting[opaque] = call
        if ended is not None:
            slot.free()
            raise Disconnected(f"{request.action}: {ended}")
        self._send(call, frame)
        return call

    def answer(self, request: RemotingCommand, code: int, remark: str = "") -> None:
        """Respond to a request of the broker. If the connection is lost, only log it."""
        if not request.wants_answer:
            return
        try:
            answer = RemotingCommand(code, request.opaque, ANSWER, remark=remark)
            self._wire.send(encode(answer), time.monotonic() + _RESPONSE_SECONDS)
        except (OSError, ResponseTimeout):
            _log.debug("a response to %s was not sent: the connection is lost", self.address)

    def close(self) -> None:
        """Close the connection; waiting calls raise `Disconnected`. Safe to repeat."""
        self._end(Disconnected(f"the connection to {self.address} was closed", may_have_had_effect=True))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, call: Call[Any], frame: bytes) -> None:
        try:
            self._wire.send(frame, call.until)
        except (OSError, ResponseTimeout) as error:
            with self._lock:
                withdrawn = self._waiting.pop(call.opaque, None)
            if withdrawn is not None:  # otherwise the reading thread has ended the call together with the connection
                call.slot.free()
            kind = ResponseTimeout if isinstance(error, ResponseTimeout) else Disconnected
            raise kind(f"{call.request.action}: not sent to {self.address}: {error}") from error

    def give_up(self, call: Call[Any]) -> None:
        """Fail a call whose deadline has passed with `ResponseTimeout`. Close the connection if the peer seems dead."""
        with self._lock:
            found = self._waiting.pop(call.opaque, None)
        if found is None:
            return
        waited = time.monotonic() - call.sent_at
        text = f"{call.request.action}: {self.address} did not answer within {waited:.3g} s"
        self._finish(call, ResponseTimeout(text, may_have_had_effect=True))
        if time.monotonic() - max(self._heard_at, call.sent_at) >= self._settings.silence_seconds:
            self._end(Disconnected(f"{self.address} no longer sends anything", may_have_had_effect=True))

    def _finish(self, call: Call[Any], answer: RemotingCommand | RemotingError) -> None:
        call.slot.free()
        call.end(answer)

    def _end(self, reason: RemotingError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
        self._wire.close()  # wakes the reading thread, which ends all waiting calls

    # --- the reading thread -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_until_end()
        except (OSError, RemotingError) as error:
            kind = ProtocolViolation if isinstance(error, ProtocolViolation) else Disconnected
            self._end(kind(f"{self.address}: {error}", may_have_had_effect=True))
        except BaseException:
            self._end(Disconnected(f"{self.address}: reading failed", may_have_had_effect=True))
            raise
        finally:
            self._end_all()

    def _read_until_end(self) -> None:
        frames = FrameDecoder()
        next_check = time.monotonic() + _EXPIRY_CHECK_SECONDS
        while self._ended is None:
            data = self._wire.receive(next_check)
            if data == b"":
                raise Disconnected("the connection was closed by the other side")
            if data:
                self._heard_at = time.monotonic()
                for command in frames.feed(data):
                    self._dispatch(command)
            if time.monotonic() >= next_check:
                self._give_up_expired()
                next_check = time.monotonic() + _EXPIRY_CHECK_SECONDS

    def _dispatch(self, command: RemotingCommand) -> None:
        if command.is_answer:
            with self._lock:
                call = self._waiting.pop(command.opaque, None)
            if call is not None:  # otherwise the call's deadline was past
                self._finish(call, command)
        elif self._on_request is not None:
            self._on_request(self, command)

    def _give_up_expired(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._waiting.values() if call.until <= now]
        for call in late:
            self.give_up(call)

    def _end_all(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
            reason = self._ended
        assert reason is not None
        for call in waiting:  # each gets a copy of the error, because an exception object has only one traceback
            self._finish(call, type(reason)(f"{call.request.action}: {reason}", may_have_had_effect=True))
        self._wire.release()
        if self._on_end is not None:
            self._on_end(self)
