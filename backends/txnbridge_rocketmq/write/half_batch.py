"""The halves of one transaction, from the first message to the broker's word that it has all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeliveryFailed,
    InvalidOption,
    InvalidToken,
    StorageFailed,
)
from txnbridge.spi import Deadline
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Call, Half, Queue, Stored, half_of, send_half
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings.broker_config import BrokerSettings

# Messages are held back until there are so many, or until the transaction ends: broker look at halves that are older
# than some seconds, and write each of them again.
_HELD_MESSAGES, _HELD_BYTES = 256, 1 << 20
# A broker that is away, or busy, is asked again so soon.
_PAUSE = 0.05
_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Part:
    """The messages of a transaction in one topic: those with the numbers below `count`."""

    topic: str
    broker: str
    count: int


def parts_as_json(parts: Sequence[Part]) -> dict[str, Any]:
    """As it stands in the decision log, and since when. So the transaction's id is enough to find its halves."""
    halves = [[part.topic, part.broker, part.count] for part in parts]
    return {"halves": halves, "at": int(time.time() * 1000)}


def parts_from_json(data: Mapping[str, Any]) -> list[Part]:
    """Read back. Raises `InvalidToken`."""
    try:
        return [Part(str(topic), str(broker), int(count)) for topic, broker, count in data["halves"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidToken("the decision log does not say which messages this transaction has") from error


def seconds_since(data: Mapping[str, Any]) -> float:
    """How long ago that was written, by its writer's clock; long, where it does not say."""
    at = data.get("at")
    return time.time() - (at / 1000 if isinstance(at, int) else 0)


@dataclass
class _Sent:
    """One half: the request is sent again only if it was certainly not carried out."""

    topic: str
    queue: Queue
    request: remoting.Request[Stored]
    call: Call[Stored] | None = None
    stored: Half | None = None


def immunity(settings: BrokerSettings) -> int:
    """For so many seconds after its birth a half is its owner's alone; a later end has to look first."""
    return max(1, math.ceil(settings.transaction_timeout))


@dataclass
class Target:
    """What a transaction knows of a topic that it sends to."""

    queues: Sequence[Queue]
    settings: BrokerSettings
    count: int = 0


@dataclass
class Halves:
    """Takes messages and sends them as halves. One thread at a time."""

    client: remoting.Client
    group: str
    targets: dict[str, Target] = field(default_factory=dict)
    _held: list[_Sent] = field(default_factory=list)
    _held_bytes: int = 0
    _sent: list[_Sent] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """What was taken so far."""
        return [
            Part(topic, target.queues[0].broker, target.count) for topic, target in self.targets.items() if target.count
        ]

    def take(self, target: Target, queue: Queue, message: remoting.Message, deadline: Deadline) -> None:
        """Take one message. Raises `InvalidOption`, with nothing taken, and what `_ship` raises."""
        if len(message.body) > target.settings.message_bytes:
            raise InvalidOption(
                f"a message to {message.topic} has {len(message.body)} bytes; the broker takes"
                f" {target.settings.message_bytes}"
            )
        self._held.append(
            _Sent(message.topic, queue, send_half(message, self.group, queue.queue, immunity(target.settings)))
        )
        self._held_bytes += len(message.body)
        target.count += 1
        if len(self._held) >= _HELD_MESSAGES or self._held_bytes >= _HELD_BYTES:
            self._ship(deadline)

    def _ship(self, deadline: Deadline) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        self._sent += held
        for sent in held:
            self._submit(sent, deadline)

    def _submit(self, sent: _Sent, deadline: Deadline) -> None:
        try:
            sent.call = self.client.submit(sent.queue.broker, sent.request, deadline.left())
        except remoting.RemotingError as error:
            self._check(error, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Return when each message is plainly stored. Raises `DeliveryFailed`, `AccessDenied`: it can only abort."""
        self._ship(deadline)
        for sent in self._sent:
            while sent.stored is None:
                if sent.call is None:
                    time.sleep(_PAUSE)
                    self._submit(sent, deadline)
                else:
                    self._settle(sent, sent.call, deadline)

    def _settle(self, sent: _Sent, call: Call[Stored], deadline: Deadline) -> None:
        try:
            sent.stored = half_of(sent.topic, self.group, call.result())
        except remoting.RemotingError as error:
            self._check(error, deadline)
            sent.call = None

    def _check(self, error: remoting.RemotingError, deadline: Deadline) -> None:
        """Return if the same request may be sent again."""
        if isinstance(error, remoting.NotDurable):
            raise DeliveryFailed(f"a message is stored, but not as safely as the broker is set to: {error}") from error
        if error.may_have_had_effect:
            # It may be stored or not. One that is sent again might then be there twice, of which only one is ended.
            raise DeliveryFailed(f"no answer came for a message: {error}") from error
        ours = translate(error, "sending a message")
        if isinstance(ours, AccessDenied):
            raise ours from error
        if not isinstance(ours, BrokerUnavailable) or isinstance(ours, StorageFailed) or deadline.left() <= _PAUSE:
            raise DeliveryFailed(str(ours)) from error

    def stored(self, patience: Deadline) -> dict[Queue, list[Half]]:
        """Those of which the broker has said that it has them, by queue, in their order; it waits for answers."""
        found: dict[Queue, list[Half]] = {}
        for sent in self._sent:
            if sent.stored is None and sent.call is not None:
                sent.stored = self._heard(sent, sent.call, patience)
            if sent.stored is not None:
                found.setdefault(sent.queue, []).append(sent.stored)
        return found

    def _heard(self, sent: _Sent, call: Call[Stored], patience: Deadline) -> Half | None:
        while not call.done() and not patience.expired:
            time.sleep(_LOOK_SECONDS)
        try:
            return half_of(sent.topic, self.group, call.result()) if call.done() else None
        except remoting.RemotingError:
            return None
