"""Sends the messages of one transaction as half messages: buffers them, and waits for the broker's confirmations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeliveryFailed, InvalidOption, InvalidToken, StorageFailed
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Disconnected, NotDurable, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.send_requests import (
    HalfAddress,
    SendResult,
    WireMessage,
    born_now,
    half_address,
    send_half,
)
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings.broker_config import BrokerConfig

# Messages are buffered up to these limits, or until the transaction ends. Halves that are sent early would get
# check-backs after some seconds, and the broker would write each of them again.
_MOST_BUFFERED, _MOST_BUFFERED_BYTES = 256, 1 << 20
# The time before a request is repeated to a broker that is down or busy.
_RETRY_PAUSE = 0.05
# How long before its deadline the immunity time of a half ends that is committed without a decision in the log. Before
# the deadline no other process aborts it, so a broker may publish it that much later than it has checked the immunity
# time (hazards H100, H102).
DIRECT_SLACK_SECONDS = 10.0


@dataclass(frozen=True)
class HalfCount:
    """The number of halves that a transaction has in one topic, on one broker. They are numbered from 0."""

    topic: str
    broker: str
    count: int


def halves_as_json(topics: Sequence[HalfCount]) -> dict[str, Any]:
    """Return the content of a decision log record: the halves by topic, and the current time."""
    return {"halves": [[each.topic, each.broker, each.count] for each in topics], "at": int(time.time() * 1000)}


def halves_from_json(data: Mapping[str, Any]) -> list[HalfCount]:
    """Decode the halves by topic in a decision log record. Raise `InvalidToken` if there are none."""
    try:
        return [HalfCount(str(topic), str(broker), int(count)) for topic, broker, count in data["halves"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidToken("the record in the decision log does not name this transaction's messages") from error


def seconds_since(data: Mapping[str, Any]) -> float:
    """Return a decision log record's age in seconds, by its writer's clock; very large for a record without a time."""
    at = data.get("at")
    return time.time() - (at / 1000 if isinstance(at, int) else 0)


_INTERRUPTED = Disconnected("the request was interrupted", may_have_had_effect=True)


@dataclass
class _HalfInFlight:
    """A half that is being sent. Its request is repeated only if the broker certainly did not store the half."""

    queue: Queue
    request: RpcRequest[SendResult]
    series: int
    result: SendResult | RemotingError = _INTERRUPTED


def immunity(settings: BrokerConfig) -> int:
    """Return the immunity time of a half in seconds: until then no check-back comes, and only the owner ends it."""
    return max(1, math.ceil(settings.transaction_timeout))


@dataclass
class WrittenTopic:
    """A topic to which a transaction writes: its queues, its broker's settings, and the number of halves so far."""

    queues: Sequence[Queue]
    settings: BrokerConfig
    count: int = 0


@dataclass
class HalfBuffer:
    """The halves (half messages) of one transaction: buffered, sent and confirmed. For use by one thread at a time.

    Only halves of one series keep their order; each call of `RocketMQWriter.separate` begins the next series.
    """

    client: RemotingClient
    group: str
    written: dict[str, WrittenTopic] = field(default_factory=dict)
    series: int = 0
    _held: list[_HalfInFlight] = field(default_factory=list)
    _held_bytes: int = 0
    _first_sent: float = math.inf  # by `time.monotonic()`
    _sent: list[_HalfInFlight] = field(default_factory=list)

    @property
    def topics(self) -> list[HalfCount]:
        return [HalfCount(name, each.queues[0].broker, each.count) for name, each in self.written.items() if each.count]

    @property
    def age(self) -> float:
        """The seconds since the first half was sent; negative if none was."""
        return time.monotonic() - self._first_sent

    def take(self, written: WrittenTopic, queue: Queue, message: WireMessage, deadline: Deadline) -> None:
        """Buffer a message as the next half of its topic, whose halves `written` counts; send a full buffer.

        Raise `InvalidOption` if the message is too large for the topic's broker.
        """
        if len(message.body) > (most := written.settings.message_bytes):
            raise InvalidOption(f"a message to {message.topic} has {len(message.body)} bytes; the broker takes {most}")
        request = send_half(message, self.group, queue.queue, immunity(written.settings))
        self._held.append(_HalfInFlight(queue, request, self.series))
        self._held_bytes += len(message.body)
        written.count += 1
        if len(self._held) >= _MOST_BUFFERED or self._held_bytes >= _MOST_BUFFERED_BYTES:
            self._send_held(deadline)

    def _send_held(self, deadline: Deadline) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        self._sent += held
        if held:
            self._first_sent = min(self._first_sent, time.monotonic())
        for half in held:  # the message may be much older, and brokers count the immunity time from the birth
            half.request = born_now(half.request)
        self._store(held, deadline)

    def _store(self, halves: Sequence[_HalfInFlight], deadline: Deadline) -> None:
        results = self.client.call_all([(half.queue.broker, half.request) for half in halves], deadline.left())
        for half, result in zip(halves, results, strict=True):
            half.result = result
            if isinstance(result, SendResult):
                del half.request  # with the message, which may be large

    def flush(self, deadline: Deadline) -> None:
        """Store every half. The caller aborts the transaction on `DeliveryFailed` or `AccessDenied`."""
        self._send_held(deadline)
        for half in self._sent:
            while isinstance(half.result, RemotingError):
                self._check(half.result, deadline)
                time.sleep(_RETRY_PAUSE)
                self._store([half], deadline)

    def _check(self, error: RemotingError, deadline: Deadline) -> None:
        """Raise `DeliveryFailed` or `AccessDenied` for a failed request, unless it is safe to send the half again."""
        if isinstance(error, NotDurable):
            raise DeliveryFailed(f"a message is stored, but not flushed or replicated as required: {error}") from error
        if error.may_have_had_effect:
            # The half may be stored. Sent again, it could be stored twice, and only one would be ended (hazard H65).
            raise DeliveryFailed(f"the broker did not respond for a message: {error}") from error
        ours = translate(error, "sending a message")
        if isinstance(ours, AccessDenied):
            raise ours from error
        passing = isinstance(ours, BrokerUnavailable) and not isinstance(ours, StorageFailed)
        if not passing or deadline.left() <= _RETRY_PAUSE:
            raise DeliveryFailed(str(ours)) from error

    def stored(self) -> list[tuple[Queue, Sequence[HalfAddress]]]:
        """Return the addresses of the stored halves, in a list for each queue and series.

        The halves of a list keep their order. Each call of `RocketMQWriter.separate` begins the next series.
        """
        addresses: dict[tuple[Queue, int], list[HalfAddress]] = {}
        for half in self._sent:
            if isinstance(half.result, SendResult):
                address = half_address(half.queue.topic, self.group, half.result)
                addresses.setdefault((half.queue, half.series), []).append(address)
        return [(queue, halves) for (queue, _), halves in addresses.items()]
