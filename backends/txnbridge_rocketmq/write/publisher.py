"""The publisher: sends messages without a transaction, each stored once, in order within a partition."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from txnbridge import errors
from txnbridge.spi import Deadline, Publisher, RawHeaders
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import NotDurable, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.send_requests import SendResult, WireMessage, send
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.write.message_format import choose_queue, ordering_key, to_wire

# The producer group in the publisher's requests. It has no members, and no half messages.
GROUP = "txnbridge-publisher"
# Limits for messages that `send` has accepted and the broker has not stored yet. At a limit, `send` waits.
_MOST_MESSAGES, _MOST_BYTES = 1000, 64 << 20
# Timeout of one request. A live broker responds within milliseconds, or says within seconds that it is busy.
_RESPONSE_SECONDS = 10.0
# The time before a request is repeated to a broker that is down or busy.
_RETRY_PAUSE_SECONDS = 0.05
# A message without a response is looked up for this long after the broker's first answer that it has none: brokers
# index a message after they have stored it, and a request may wait in the broker before (waitTimeMillsInSendQueue).
_LOOK_UP_SECONDS = 5.0


@dataclass(eq=False)
class _QueueSender:
    """The messages of one queue that are not stored yet. Only one is in flight: brokers may reorder requests."""

    queue: Queue
    waiting: deque[WireMessage] = field(default_factory=deque)
    call: Call[SendResult] | None = None
    again_at: float = 0.0


class RocketMQPublisher(Publisher):
    """Publisher that sends from a thread for each broker. After a failure, it accepts and sends no more messages.

    RocketMQ stores a repeated message twice. Therefore a message without a response is looked up by its unique key. If
    the look-up does not find the message, the publisher fails, and does not send it again.
    """

    def __init__(self, cluster: RocketMQCluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._senders: dict[Queue, _QueueSender] = {}
        self._bytes = 0  # of the messages that are accepted and not stored yet
        self._round_robin = itertools.count(secrets.randbelow(1 << 16))
        self._failed: errors.DeliveryFailed | errors.AccessDenied | None = None
        self._closed = False
        self._threads: dict[str, threading.Thread] = {}  # by broker: one that is away holds up no other one

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
        self._check()
        queues = self._cluster.topics.require(topic, partition, deadline)
        most = self._cluster.brokers.config(queues[0].broker, deadline).message_bytes
        if len(value or b"") > most:
            raise errors.InvalidOption(f"a message to {topic} has {len(value or b'')} bytes; the broker takes {most}")
        message = to_wire(topic, value, key, headers, timestamp, unique_key=uuid.uuid4().hex.upper())
        key = ordering_key(message, key)
        number = choose_queue(key, len(queues), self._round_robin) if partition is None else partition
        self._take(message, queues[number], deadline)

    def _take(self, message: WireMessage, queue: Queue, deadline: Deadline) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or self._has_room(message), deadline.left()):
                raise errors.DeadlineExceeded(
                    f"the send buffer had no room for a message to {queue.topic} for {deadline.seconds:g} s"
                )
            self._check()
            if (broker := queue.broker) not in self._threads:
                thread = threading.Thread(target=self._run, args=(broker,), name="rocketmq publisher", daemon=True)
                thread.start()
                self._threads[broker] = thread
            self._changed.notify_all()  # first: an exception of a signal handler may come behind each call
            self._senders.setdefault(queue, _QueueSender(queue)).waiting.append(message)
            self._bytes += len(message.body)

    @property
    def _messages(self) -> int:
        """The number of messages that are accepted and not stored yet, also by a `send` that was interrupted."""
        return sum(len(sender.waiting) for sender in self._senders.values())

    @property
    def _ended(self) -> bool:
        return self._closed or self._failed is not None

    def _has_room(self, message: WireMessage) -> bool:
        if self._messages == 0:
            return True
        return self._messages < _MOST_MESSAGES and self._bytes + len(message.body) <= _MOST_BYTES

    def _check(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed.__cause__
        if self._closed:
            raise errors.InvalidState("this publisher is closed")

    def flush(self, deadline: Deadline) -> None:
        """Wait until all accepted messages are stored. Raise `DeadlineExceeded` at the deadline; sending continues."""
        with self._changed:
            self._settle(deadline)

    def _settle(self, deadline: Deadline) -> None:
        if not self._changed.wait_for(lambda: self._ended or self._messages == 0, deadline.left()):
            raise errors.DeadlineExceeded(
                f"{self._messages} messages were not stored within {deadline.seconds:g} s; they may yet be"
            )
        self._check()

    def close(self, deadline: Deadline) -> None:
        """Flush and close the publisher. Raise the errors of `flush`. Drop messages not stored by the deadline."""
        with self._changed:
            if self._closed:
                return
            try:
                self._settle(deadline)
            finally:
                self._closed = True
                self._changed.notify_all()

    # --- sending, on the publisher's own threads ----------------------------------------------------------------------

    def _run(self, broker: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._due(broker), self._next_due(broker))
                # A thread is another one if a signal handler raised an exception while `_take` started it.
                if self._ended or self._threads.get(broker) is not threading.current_thread():
                    return
                due = self._due(broker)
            for sender in due:
                try:
                    self._advance(sender)
                except BaseException as error:  # also an unexpected one: no other thread sends what waits
                    self._fail(error)
                    return

    def _due(self, broker: str) -> list[_QueueSender]:
        """Return the senders whose request has ended, or that can send a message now."""
        now = time.monotonic()
        return [
            sender
            for sender in self._senders_to(broker)
            if (sender.call.done() if sender.call is not None else sender.waiting and sender.again_at <= now)
        ]

    def _senders_to(self, broker: str) -> list[_QueueSender]:
        return [sender for sender in self._senders.values() if sender.queue.broker == broker]

    def _next_due(self, broker: str) -> float | None:
        """Return the seconds until the next paused sender may send again; None if none is paused."""
        waits = [sender.again_at for sender in self._senders_to(broker) if sender.call is None and sender.waiting]
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def _advance(self, sender: _QueueSender) -> None:
        try:
            if sender.call is None:
                request = send(sender.waiting[0], GROUP, sender.queue.queue)
                sender.call = self._cluster.client.submit(sender.queue.broker, request, _RESPONSE_SECONDS)
                sender.call.when_done(self._wake)
                return
            call, sender.call = sender.call, None
            call.result()
        except RemotingError as error:
            if not self._was_stored_despite(sender, error):
                sender.again_at = time.monotonic() + _RETRY_PAUSE_SECONDS
                return
        self._stored(sender)

    def _wake(self, call: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stored(self, sender: _QueueSender) -> None:
        with self._changed:
            self._bytes -= len(sender.waiting.popleft().body)
            self._changed.notify_all()

    def _was_stored_despite(self, sender: _QueueSender, error: RemotingError) -> bool:
        """Return whether the broker stored the first waiting message although its request failed with `error`.

        If the result is False, it is safe to send the message again. Raise `_PublishFailure` if the broker may have
        stored the message, or if sending it again cannot succeed.
        """
        if isinstance(error, NotDurable):
            raise _PublishFailure(error, "a message is stored, but not flushed or replicated as required")
        if error.may_have_had_effect:
            self._require_stored(sender, error)
            return True
        # The broker is down, starting, or busy, which is no reason to fail.
        if type(translate(error, "")) in (errors.BrokerUnavailable, errors.DeadlineExceeded):
            return False
        raise _PublishFailure(error, "a message was refused")

    def _require_stored(self, sender: _QueueSender, error: RemotingError) -> None:
        """Look up the first waiting message. Raise `_PublishFailure` if the look-up does not find the message."""
        request = read_requests.by_unique_key(sender.queue.topic, sender.waiting[0].unique_key or "")
        until: float | None = None
        while not self._ended and (until is None or time.monotonic() < until):
            try:
                if self._cluster.client.call(sender.queue.broker, request, _RESPONSE_SECONDS):
                    return
                until = until or time.monotonic() + _LOOK_UP_SECONDS
            except RemotingError as refused:
                if isinstance(translate(refused, ""), errors.AccessDenied):
                    raise _PublishFailure(
                        refused, "the broker did not respond for a message, and this user may not look it up"
                    ) from error
                # Otherwise the broker is down, and the look-up is repeated.
            time.sleep(_RETRY_PAUSE_SECONDS)
        raise _PublishFailure(
            error, "the broker did not respond for a message, and a look-up did not find it; it may be stored later"
        )

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, _PublishFailure) else _PublishFailure(error, "a message may not be stored")
        kind: type[errors.DeliveryFailed | errors.AccessDenied] = errors.DeliveryFailed
        if isinstance(failure.cause, RemotingError) and isinstance(translate(failure.cause, ""), errors.AccessDenied):
            kind = errors.AccessDenied
        with self._changed:
            if self._failed is None:  # otherwise the thread of another broker has met an error before
                self._failed = kind(f"{failure}; no later message in its partition is stored: {failure.cause}")
                self._failed.__cause__ = failure.cause
            self._changed.notify_all()


class _PublishFailure(Exception):
    """Raised if a message is not stored, or may not be, so that the publisher stops. `cause` is the error behind it."""

    def __init__(self, cause: BaseException, action: str) -> None:
        super().__init__(action)
        self.cause = cause
