"""Sends without a transaction: each message once, and each partition's in order."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    DeliveryFailed,
    InvalidOption,
    InvalidState,
    NotSupported,
)
from txnbridge.spi import Deadline, Publisher, RawHeaders
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Queue, reading, send
from txnbridge_rocketmq.cluster import Cluster
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.write.message_format import partition_of, to_wire

# Brokers want a name in every request; nobody is asked about what this group sends.
GROUP = "txnbridge-publisher"
# What is taken and not yet stored; the next message waits.
_MOST_MESSAGES, _MOST_BYTES = 1000, 64 << 20
# A broker that lives answers within milliseconds, or says within some seconds that it is busy.
_ANSWER_SECONDS = 10.0
# A broker that is away, or busy, is asked again so soon.
_PAUSE = 0.05
# How long a message whose answer was lost is looked for, once the broker says that it is not there: what brokers store
# they index a moment later, and a request may have waited before it was carried out (waitTimeMillsInSendQueue).
_LOOK_SECONDS = 5.0


@dataclass(eq=False)
class _Line:
    """One queue's messages: they go out one after another, because requests may overtake each other."""

    queue: Queue
    waiting: deque[remoting.Message] = field(default_factory=deque)
    call: remoting.Call[remoting.Stored] | None = None
    again_at: float = 0.0


class RocketMQPublisher(Publisher):
    """Sends from a thread of its own. After a failure nothing more is taken, and nothing more is sent.

    RocketMQ keeps whatever comes twice. So what has no answer is looked for by its own id, and where it is not found,
    the publisher fails rather than send it again.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._lines: dict[Queue, _Line] = {}
        self._messages = self._bytes = 0  # taken and not yet stored
        self._turns = itertools.count(secrets.randbelow(1 << 16))
        self._failed: DeliveryFailed | AccessDenied | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- taking -------------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> None:
        if sequence is not None:
            raise _no_sequences()
        self._check()
        queues = self._cluster.topics.require(topic, partition, deadline)
        most = self._cluster.brokers.known(queues[0].broker, deadline).message_bytes
        if len(value or b"") > most:
            raise InvalidOption(f"a message to {topic} has {len(value or b'')} bytes; the broker takes {most}")
        message = to_wire(topic, value, key, headers, timestamp, unique_key=uuid.uuid4().hex.upper())
        number = self._chosen(key, len(queues)) if partition is None else partition
        self._take(message, queues[number], deadline)

    def _chosen(self, key: bytes | None, count: int) -> int:
        return next(self._turns) % count if key is None else partition_of(key, count)

    def _take(self, message: remoting.Message, queue: Queue, deadline: Deadline) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or self._has_room(message), deadline.left()):
                raise DeadlineExceeded(f"there was no room for a message to {queue.topic} for {deadline.seconds:g} s")
            self._check()
            self._lines.setdefault(queue, _Line(queue)).waiting.append(message)
            self._messages += 1
            self._bytes += len(message.body)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rocketmq publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def _ended(self) -> bool:
        return self._closed or self._failed is not None

    def _has_room(self, message: remoting.Message) -> bool:
        if self._messages == 0:
            return True
        return self._messages < _MOST_MESSAGES and self._bytes + len(message.body) <= _MOST_BYTES

    def _check(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed.__cause__
        if self._closed:
            raise InvalidState("this publisher is closed")

    # --- what became of it --------------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        """As the contract says. What is not stored by the deadline is tried further."""
        with self._changed:
            self._check()
            self._settle(deadline)

    def _settle(self, deadline: Deadline) -> None:
        if not self._changed.wait_for(lambda: self._ended or self._messages == 0, deadline.left()):
            raise DeadlineExceeded(
                f"{self._messages} messages were not stored within {deadline.seconds:g} s; they may yet be"
            )
        self._check()

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        raise _no_sequences()

    def close(self, deadline: Deadline) -> None:
        """As the contract says. Raises what `flush` raises; what is not stored then is given up."""
        with self._changed:
            if self._closed:
                return
            try:
                self._check()
                self._settle(deadline)
            finally:
                self._closed = True
                self._changed.notify_all()

    # --- sending, on the publisher's own thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._due(), self._next_due())
                if self._ended:
                    return
                due = self._due()
            for line in due:
                try:
                    self._look_after(line)
                except _Failure as failure:
                    self._fail(failure)
                    return

    def _due(self) -> list[_Line]:
        """The lines in which something can be done."""
        now = time.monotonic()
        return [
            line
            for line in self._lines.values()
            if (line.call.done() if line.call is not None else line.waiting and line.again_at <= now)
        ]

    def _next_due(self) -> float | None:
        """Seconds until a line may be tried again; None if none waits for that."""
        waits = [line.again_at for line in self._lines.values() if line.call is None and line.waiting]
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def _look_after(self, line: _Line) -> None:
        try:
            if line.call is None:
                request = send(line.waiting[0], GROUP, line.queue.queue)
                line.call = self._cluster.client.submit(line.queue.broker, request, _ANSWER_SECONDS)
                line.call.when_done(self._wake)
                return
            call, line.call = line.call, None
            call.result()
        except remoting.RemotingError as error:
            if not self._is_stored_all_the_same(line, error):
                line.again_at = time.monotonic() + _PAUSE
                return
        self._stored(line)

    def _wake(self, call: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stored(self, line: _Line) -> None:
        with self._changed:
            message = line.waiting.popleft()
            self._messages -= 1
            self._bytes -= len(message.body)
            self._changed.notify_all()

    def _is_stored_all_the_same(self, line: _Line, error: remoting.RemotingError) -> bool:
        """Whether a message is there although its sending failed; if not, it may be sent again. Raises `_Failure`."""
        if isinstance(error, remoting.NotDurable):
            raise _Failure(error, "a message is stored, but not as safely as the broker is set to")
        if error.may_have_had_effect:
            self._find(line, error)
            return True
        # Not certainly worth a failure: the broker is away, starting, or busy.
        if type(translate(error, "")) in (BrokerUnavailable, DeadlineExceeded):
            return False
        raise _Failure(error, "a message was refused")

    def _find(self, line: _Line, error: remoting.RemotingError) -> None:
        """Return if the message is there. Raises `_Failure` if it is not."""
        message = line.waiting[0]
        assert message.unique_key is not None
        request = reading.by_unique_key(line.queue.topic, message.unique_key)
        until: float | None = None
        while until is None or time.monotonic() < until:
            if self._closed:
                break
            try:
                if self._cluster.client.call(line.queue.broker, request, _ANSWER_SECONDS):
                    return
                until = until or time.monotonic() + _LOOK_SECONDS
            except remoting.RemotingError as refused:
                if isinstance(translate(refused, ""), AccessDenied):
                    raise _Failure(refused, "no answer came for a message, and it may not be looked for") from error
                # Else nobody knows until the broker is back.
            time.sleep(_PAUSE)
        raise _Failure(error, "no answer came for a message, and it was not found, though it may yet come")

    def _fail(self, failure: _Failure) -> None:
        kind = AccessDenied if isinstance(translate(failure.cause, ""), AccessDenied) else DeliveryFailed
        with self._changed:
            self._failed = kind(f"{failure}; nothing after it in its partition is stored: {failure.cause}")
            self._failed.__cause__ = failure.cause
            self._changed.notify_all()


class _Failure(Exception):
    """What ends a publisher; `cause` is the client's own error."""

    def __init__(self, cause: remoting.RemotingError, what: str) -> None:
        super().__init__(what)
        self.cause = cause


def _no_sequences() -> NotSupported:
    return NotSupported("the broker keeps no sequences of those who send; leave out sequence=")
