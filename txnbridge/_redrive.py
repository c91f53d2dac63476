"""Redrive: sends dead letters back to the topics from which they came."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from txnbridge._consumer import Consumer
from txnbridge._deadletters import PREFIX, without_ours
from txnbridge._messages import Message, Position
from txnbridge.capabilities import Capability
from txnbridge.spi import Partition

if TYPE_CHECKING:
    from txnbridge._bridge import Bridge
    from txnbridge._transaction import Transaction

# The dead letters of one transaction: enough to make its commit cheap, well below every broker's limit.
_BATCH = 500
# The time of one poll for more dead letters; a redrive takes that long to notice that all are read.
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class DeadLetter:
    """The headers of a dead letter: where the message was, which group could not process it, and why."""

    topic: str
    partition: int
    position: Position
    timestamp: int
    group: str
    attempts: int
    reason: str

    @classmethod
    def of(cls, message: Message) -> DeadLetter | None:
        """Read a message's headers; return None without readable headers of ours: then its origin is unknown."""
        ours = {name: message.headers.get(PREFIX + name, "") for name in (field.name for field in fields(cls))}
        try:
            return cls(
                topic=ours["topic"],
                partition=int(ours["partition"]),
                position=tuple(int(part) for part in json.loads(ours["position"])),
                timestamp=int(ours["timestamp"]),
                group=ours["group"],
                attempts=int(ours["attempts"]),
                reason=ours["reason"],
            )
        except (ValueError, TypeError):
            return None


class Redriven(NamedTuple):
    """The result of a redrive: the dead letters sent back, left because of their reason, and without an origin."""

    sent: int = 0
    left: int = 0
    foreign: int = 0


class Redrive:
    """Sends the dead letters of a topic back to the topics from which they came, exactly once.

    Key, value, timestamp and headers are those of the original message. Each message is sent in the transaction that
    acknowledges its dead letter, in a group for redrives, so a redrive may be killed and run again: it goes on where it
    stopped. It takes the dead letters that are there when it begins, at most `limit`, and only those with `reason` in
    their reason. The others stay for another redrive: unchanged, or, on a broker that only knows positions, sent again
    behind the rest.
    """

    def __init__(self, bridge: Bridge, topic: str, *, reason: str | None = None, limit: int | None = None) -> None:
        self._bridge = bridge
        self._topic = topic
        self._reason = reason
        self._limit = limit
        self._in_place = bool(bridge.capabilities[Capability.INDIVIDUAL_ACK])

    def preview(self) -> Iterator[tuple[Message, DeadLetter]]:
        """Yield the dead letters that `run` would send back now. Changes nothing."""
        found = 0
        for batch in self._batches():
            for message in batch:
                letter = DeadLetter.of(message)
                if letter is not None and self._chooses(letter):
                    yield message, letter
                    found += 1
                    if found == self._limit:
                        return

    def run(self, progress: Callable[[int], object] = lambda sent: None) -> Redriven:
        """Send the dead letters back; `progress` gets the number of those that each transaction has sent.

        Raise as a transaction does, and `NotFound` if an original topic is gone: choose by `reason` then.
        """
        done = Redriven()
        for batch in self._batches():
            before = done.sent
            done = self._send_back(batch, done)
            progress(done.sent - before)
            if done.sent == self._limit:
                break
        return done

    def _chooses(self, letter: DeadLetter) -> bool:
        return self._reason is None or self._reason in letter.reason

    def _send_back(self, batch: list[Message], done: Redriven) -> Redriven:
        """Run one transaction; return the result so far."""
        chosen: list[tuple[Message, DeadLetter]] = []
        others: list[Message] = []
        foreign = 0
        for message in batch:
            if done.sent + len(chosen) == self._limit:
                break
            letter = DeadLetter.of(message)
            if letter is not None and self._chooses(letter):
                chosen.append((message, letter))
            else:
                others.append(message)
                foreign += letter is None
        moved = [] if self._in_place else others
        if chosen or moved:
            with self._bridge.transaction() as txn:
                for message, letter in chosen:
                    self._send_original(txn, message, letter)
                for message in moved:
                    txn.send(self._topic, message.value, key=message.key, headers=message.headers)
                txn.ack(sorted([*(m for m, _ in chosen), *moved], key=lambda m: m.position))
        return Redriven(done.sent + len(chosen), done.left + len(others) - foreign, done.foreign + foreign)

    def _send_original(self, txn: Transaction, message: Message, letter: DeadLetter) -> None:
        can = self._bridge.capabilities
        # A message with a key goes to the key's partition of today, also if the topic has grown since.
        by_number = message.key is None and can[Capability.CHOOSE_PARTITION]
        txn.send(
            letter.topic,
            message.value,
            key=message.key,
            headers=without_ours(message.headers) or None,
            partition=letter.partition if by_number else None,
            timestamp=letter.timestamp if can[Capability.TIMESTAMPS] else None,
        )

    def _batches(self) -> Iterator[list[Message]]:
        """Yield the dead letters that no redrive has sent back, up to the topic's present end."""
        ends = self._ends()
        with self._bridge.consumer(self._topic, f"txnbridge-redrive-{self._topic}") as consumer:
            while not _is_through(consumer, ends):
                batch = consumer.poll(_BATCH, _POLL_SECONDS)
                # Behind the ends are new dead letters; some of them may have been sent back just now.
                if before_end := [m for m in batch if m.position < ends.get((m.topic, m.partition), ())]:
                    yield before_end

    def _ends(self) -> dict[Partition, Position]:
        with self._bridge.consumer(self._topic, start="latest") as tail:
            tail.poll(1, timeout=0)  # assigns its partitions
            return tail.positions()


def _is_through(consumer: Consumer, ends: Mapping[Partition, Position]) -> bool:
    """Return whether a consumer has partitions, and has read each of them up to its end."""
    positions = consumer.positions()
    if not positions:
        return False  # another redrive holds them: wait for its end
    return all(at >= ends.get(p, ()) for p, at in positions.items()) or not any(consumer.lag().values())
