"""One connection to a broker or name server: many requests in flight, each with its own time, told apart by `opaque`.

A thread of its own reads. Memory is bounded: so many requests may be in flight, and of what is not yet whole at most
one frame is kept.
"""

from __future__ import annotations

import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from txnbridge_rocketmq.client.errors import ConnectionLost, ProtocolViolation, RemotingError, TimedOut
from txnbridge_rocketmq.client.frames import ANSWER, Command, Frames, encode
from txnbridge_rocketmq.client.requests import Request
from txnbridge_rocketmq.client.security import Credentials
from txnbridge_rocketmq.client.wire import connect

T = TypeVar("T")

_log = logging.getLogger(__name__)

# How many requests may wait for answers on one connection; the next one waits its turn. A broker is no faster with
# thousands than with some hundreds, and throws away what waits too long.
MOST_IN_FLIGHT = 1024
# How late a call that nobody waits for learns that its time is over.
_LOOK_SECONDS = 0.25
# A connection on which nothing at all came for that long, while an answer was due, is as good as dead: TCP itself
# needs a quarter of an hour to find out. Brokers answer or say that they are busy well before.
_SILENCE_SECONDS = 5.0
# An answer to a question of the broker's is a hundred bytes; where those don't go out, nothing does.
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class Settings:
    """What connections have in common."""

    tls: ssl.SSLContext | None = None
    credentials: Credentials | None = None
    most_in_flight: int = MOST_IN_FLIGHT


class Call(Generic[T]):
    """A request that was sent, and what becomes of it. Any thread may call."""

    def __init__(self, connection: Connection, request: Request[T], opaque: int, until: float) -> None:
        self.request = request
        self.opaque = opaque
        self.until = until
        self.sent_at = time.monotonic()
        self._connection = connection
        self._answer: Command | RemotingError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Call[T]], None]] = []

    def result(self) -> T:
        """Wait for the answer, until the call's time is over, and return what it says.

        Raises `Refused`, `TimedOut`, `ConnectionLost` and `ProtocolViolation`.
        """
        if not self._ended.wait(max(0.0, self.until - time.monotonic())):
            self._connection.give_up(self)
            self._ended.wait()  # given up, or answered in that moment
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemotingError):
            raise answer
        return self.request.result(answer)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._ended.is_set()

    def when_done(self, callback: Callable[[Call[T]], None]) -> None:
        """Call back once it is done, or now if it is. The thread may be the connection's own: don't wait or submit."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, answer: Command | RemotingError) -> None:
        """Once, by the connection."""
        with self._lock:
            self._answer = answer
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of %r failed", self.request)


class Connection:
    """One connection, open from the start until it is lost or closed; then another one has to be made.

    `on_request` is given what the broker asks and returns at once; it runs on the connection's own thread.
    Raises `Unreachable`.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        settings: Settings | None = None,
        on_request: Callable[[Connection, Command], None] | None = None,
        on_end: Callable[[Connection], None] | None = None,
    ) -> None:
        self.address = address
        self._settings = settings or Settings()
        self._on_request = on_request
        self._on_end = on_end
        self._wire = connect(address, time.monotonic() + timeout, self._settings.tls)
        self._opaques = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Call[Any]] = {}
        self._slots = threading.Semaphore(self._settings.most_in_flight)
        self._ended: RemotingError | None = None
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._read, name=f"rocketmq {address}", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._ended is None

    def call(self, request: Request[T], timeout: float) -> T:
        """Send a request and return what the answer says. Raises what `submit` and `Call.result` raise."""
        return self.submit(request, timeout).result()

    def submit(self, request: Request[T], timeout: float) -> Call[T]:
        """Send a request; its `Call` ends within that time, whatever happens.

        It waits while too many are in flight. Raises `ConnectionLost` and `TimedOut`, both only if the request was
        certainly not carried out, and `ValueError` for one that is too large.
        """
        until = time.monotonic() + timeout
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback may not send: its thread is the one that reads the answers")
        if timeout <= 0:
            raise TimedOut(f"{request.what}: no time was left")
        opaque = next(self._opaques) & 0x7FFFFFFF
        frame = self._frame(request, opaque)
        if not self._slots.acquire(timeout=timeout):
            raise TimedOut(f"{request.what}: too many requests are in flight to {self.address}")
        call = Call(self, request, opaque, until)
        with self._lock:
            ended = self._ended
            if ended is None:
                self._waiting[opaque] = call  # before it is sent: the answer may be here first
        if ended is not None:
            self._slots.release()
            raise ConnectionLost(f"{request.what}: {ended}")
        self._send(call, frame)
        return call

    def answer(self, request: Command, code: int, remark: str = "") -> None:
        """Answer something that the broker asked. A connection that is gone is no error: nobody waits any more."""
        if not request.wants_answer:
            return
        try:
            answer = Command(code, request.opaque, ANSWER, remark=remark)
            self._wire.send(encode(answer), time.monotonic() + _ANSWER_SECONDS)
        except (OSError, TimedOut):
            _log.debug("an answer to %s was lost with its connection", self.address)

    def close(self) -> None:
        """End the connection; calls that wait get `ConnectionLost`. Safe to repeat."""
        self._end(ConnectionLost(f"the connection to {self.address} was closed", may_have_had_effect=True))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- calls --------------------------------------------------------------------------------------------------------

    def _frame(self, request: Request[Any], opaque: int) -> bytes:
        fields = request.fields
        if self._settings.credentials is not None:
            fields = self._settings.credentials.sign(fields, request.body)
        return encode(Command(request.code, opaque, fields=fields, body=request.body))

    def _send(self, call: Call[Any], frame: bytes) -> None:
        try:
            self._wire.send(frame, call.until)
        except (OSError, TimedOut) as error:
            with self._lock:
                withdrawn = self._waiting.pop(call.opaque, None)
            if withdrawn is not None:  # else the thread that reads has ended it, with the connection
                self._slots.release()
            kind = TimedOut if isinstance(error, TimedOut) else ConnectionLost
            raise kind(f"{call.request.what}: not sent to {self.address}: {error}") from error

    def give_up(self, call: Call[Any]) -> None:
        """End a call whose time is over, unless it has just ended."""
        with self._lock:
            found = self._waiting.pop(call.opaque, None)
        if found is None:
            return
        waited = time.monotonic() - call.sent_at
        text = f"{call.request.what}: {self.address} did not answer within {waited:.3g} s"
        self._finish(call, TimedOut(text, may_have_had_effect=True))
        if time.monotonic() - max(self._heard_at, call.sent_at) >= _SILENCE_SECONDS:
            self._end(ConnectionLost(f"{self.address} has fallen silent", may_have_had_effect=True))

    def _finish(self, call: Call[Any], answer: Command | RemotingError) -> None:
        self._slots.release()
        call.end(answer)

    def _end(self, reason: RemotingError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
        self._wire.close()  # wakes the thread that reads, which tells those that wait

    # --- the thread that reads ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_on()
        except (OSError, RemotingError) as error:
            kind = ProtocolViolation if isinstance(error, ProtocolViolation) else ConnectionLost
            self._end(kind(f"{self.address}: {error}", may_have_had_effect=True))
        except BaseException:
            self._end(ConnectionLost(f"{self.address}: reading failed", may_have_had_effect=True))
            raise
        finally:
            self._tell_all()

    def _read_on(self) -> None:
        frames = Frames()
        next_look = time.monotonic() + _LOOK_SECONDS
        while self._ended is None:
            data = self._wire.receive(next_look)
            if data == b"":
                raise ConnectionLost("the connection was closed by the other side")
            if data:
                self._heard_at = time.monotonic()
                for command in frames.feed(data):
                    self._take(command)
            if time.monotonic() >= next_look:
                self._give_up_late_ones()
                next_look = time.monotonic() + _LOOK_SECONDS

    def _take(self, command: Command) -> None:
        if command.is_answer:
            with self._lock:
                call = self._waiting.pop(command.opaque, None)
            if call is not None:  # else its time was over
                self._finish(call, command)
        elif self._on_request is not None:
            self._on_request(self, command)

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._waiting.values() if call.until <= now]
        for call in late:
            self.give_up(call)

    def _tell_all(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
            reason = self._ended
        assert reason is not None
        for call in waiting:
            self._finish(call, _copy(reason, call.request.what))
        self._wire.release()
        if self._on_end is not None:
            self._on_end(self)


def _copy(reason: RemotingError, what: str) -> RemotingError:
    """One error for each call: a traceback belongs to who raises it."""
    return type(reason)(f"{what}: {reason}", may_have_had_effect=True)
