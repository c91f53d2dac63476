"""The half messages of one transaction, from the first message until the broker has confirmed all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeliveryFailed, InvalidOption, InvalidToken, StorageFailed
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import NotDurable, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.client.sending import HalfHandle, SendResult, WireMessage, half_handle, send_half
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings.broker_config import BrokerConfig

# Messages are buffered up to these limits, or until the transaction ends: the broker sends check-backs for halves that
# are older than some seconds, and copies each of these halves.
_HELD_MESSAGES, _HELD_BYTES = 256, 1 << 20
# The time before a request is repeated to a broker that is down or busy.
_PAUSE = 0.05
_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class TopicPart:
    """The messages of a transaction in one topic: those with the numbers below `count`."""

    topic: str
    broker: str
    count: int


def parts_as_json(parts: Sequence[TopicPart]) -> dict[str, Any]:
    """Return parts and current time for a decision log record. Parts and transaction id identify the halves."""
    halves = [[part.topic, part.broker, part.count] for part in parts]
    return {"halves": halves, "at": int(time.time() * 1000)}


def parts_from_json(data: Mapping[str, Any]) -> list[TopicPart]:
    """Return the parts in a record of the decision log. Raise `InvalidToken` if the record has no valid parts."""
    try:
        return [TopicPart(str(topic), str(broker), int(count)) for topic, broker, count in data["halves"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidToken("the decision log does not say which messages this transaction has") from error


def seconds_since(data: Mapping[str, Any]) -> float:
    """Return a record's age in seconds by its writer's clock; a very large number if the record has no time."""
    at = data.get("at")
    return time.time() - (at / 1000 if isinstance(at, int) else 0)


@dataclass
class _HalfInFlight:
    """One half that is sent. Its request is repeated only if it was certainly not carried out."""

    topic: str
    queue: Queue
    request: RpcRequest[SendResult]
    call: Call[SendResult] | None = None
    stored: HalfHandle | None = None


def immunity(settings: BrokerConfig) -> int:
    """Return the immunity time of a half in seconds: during this time the owner may end the half without a look-up."""
    return max(1, math.ceil(settings.transaction_timeout))


@dataclass
class HalfTarget:
    """A topic that a transaction writes to: its queues, its broker's settings, and the number of messages so far."""

    queues: Sequence[Queue]
    settings: BrokerConfig
    count: int = 0


@dataclass
class HalfBatch:
    """The halves of one transaction: buffered, sent and confirmed. For use by one thread at a time."""

    client: RemotingClient
    group: str
    targets: dict[str, HalfTarget] = field(default_factory=dict)
    _held: list[_HalfInFlight] = field(default_factory=list)
    _held_bytes: int = 0
    _sent: list[_HalfInFlight] = field(default_factory=list)

    @property
    def parts(self) -> list[TopicPart]:
        return [
            TopicPart(topic, target.queues[0].broker, target.count)
            for topic, target in self.targets.items()
            if target.count
        ]

    def take(self, target: HalfTarget, queue: Queue, message: WireMessage, deadline: Deadline) -> None:
        """Buffer one message, and send the buffer if it is full. Raise `InvalidOption` if the message is too large."""
        if len(message.body) > target.settings.message_bytes:
            raise InvalidOption(
                f"a message to {message.topic} has {len(message.body)} bytes; the broker takes"
                f" {target.settings.message_bytes}"
            )
        self._held.append(
            _HalfInFlight(message.topic, queue, send_half(message, self.group, queue.queue, immunity(target.settings)))
        )
        self._held_bytes += len(message.body)
        target.count += 1
        if len(self._held) >= _HELD_MESSAGES or self._held_bytes >= _HELD_BYTES:
            self._send_held(deadline)

    def _send_held(self, deadline: Deadline) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        self._sent += held
        for sent in held:
            self._submit(sent, deadline)

    def _submit(self, sent: _HalfInFlight, deadline: Deadline) -> None:
        try:
            sent.call = self.client.submit(sent.queue.broker, sent.request, deadline.left())
        except RemotingError as error:
            self._check(error, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Return when the broker has stored every message. After `DeliveryFailed` or `AccessDenied` the transaction can
        only be aborted.
        """
        self._send_held(deadline)
        for sent in self._sent:
            while sent.stored is None:
                if sent.call is None:
                    time.sleep(_PAUSE)
                    self._submit(sent, deadline)
                else:
                    self._settle(sent, sent.call, deadline)

    def _settle(self, sent: _HalfInFlight, call: Call[SendResult], deadline: Deadline) -> None:
        try:
            sent.stored = half_handle(sent.topic, self.group, call.result())
        except RemotingError as error:
            self._check(error, deadline)
            sent.call = None

    def _check(self, error: RemotingError, deadline: Deadline) -> None:
        """Return if the same request may be sent again. Raise `DeliveryFailed` or `AccessDenied` otherwise."""
        if isinstance(error, NotDurable):
            raise DeliveryFailed(f"a message is stored, but not as safely as the broker is set to: {error}") from error
        if error.may_have_had_effect:
            # The half may be stored. Sent again, it might be stored twice, and only one copy would be ended (hazard
            # H65).
            raise DeliveryFailed(f"no answer came for a message: {error}") from error
        ours = translate(error, "sending a message")
        if isinstance(ours, AccessDenied):
            raise ours from error
        if not isinstance(ours, BrokerUnavailable) or isinstance(ours, StorageFailed) or deadline.left() <= _PAUSE:
            raise DeliveryFailed(str(ours)) from error

    def stored(self, patience: Deadline) -> dict[Queue, list[HalfHandle]]:
        """Return the confirmed halves by queue, in order. Wait for responses until `patience` expires."""
        handles: dict[Queue, list[HalfHandle]] = {}
        for sent in self._sent:
            if sent.stored is None and sent.call is not None:
                sent.stored = self._response(sent, sent.call, patience)
            if sent.stored is not None:
                handles.setdefault(sent.queue, []).append(sent.stored)
        return handles

    def _response(self, sent: _HalfInFlight, call: Call[SendResult], patience: Deadline) -> HalfHandle | None:
        while not call.done() and not patience.expired:
            time.sleep(_LOOK_SECONDS)
        try:
            return half_handle(sent.topic, self.group, call.result()) if call.done() else None
        except RemotingError:
            return None
