"""How dead letters go back to where they came from."""

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

# Of one transaction of a redrive: enough to make its commit cheap, well below every broker's limit.
_BATCH = 500
# Between two looks whether all is read; nobody who waits for a redrive notices it.
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class DeadLetter:
    """What a dead letter's headers say: where the message was, which group could not process it, and why."""

    topic: str
    partition: int
    position: Position
    timestamp: int
    group: str
    attempts: int
    reason: str

    @classmethod
    def of(cls, message: Message) -> DeadLetter | None:
        """None for a message without (readable) headers of ours: nobody knows where it belongs."""
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
    """What a redrive did: how many it sent back, left because of their reason, and could not place."""

    sent: int = 0
    left: int = 0
    foreign: int = 0


class Redrive:
    """Sends the dead letters of a topic back to where they came from, exactly once.

    Key, value and timestamp are those of the original, and so are the headers, without ours. Each leaves together with
    the acknowledgement of its dead letter, in a group of its own, so a redrive may be killed and run again: it goes on
    where it stopped. It takes what is there when it begins, at most `limit`, and of these only what has `reason` in its
    reason. What it leaves is there for another redrive: as it is, or, on a broker that only knows positions, sent again
    behind the others.
    """

    def __init__(self, bridge: Bridge, topic: str, *, reason: str | None = None, limit: int | None = None) -> None:
        self._bridge = bridge
        self._topic = topic
        self._reason = reason
        self._limit = limit
        self._in_place = bool(bridge.capabilities[Capability.INDIVIDUAL_ACK])

    def preview(self) -> Iterator[tuple[Message, DeadLetter]]:
        """What `run` would send back now. Changes nothing."""
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
        """Do it; `progress` is told how many more were sent.

        Raises what a transaction raises, and `NotFound` if an original topic is gone: choose by `reason` then.
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
        """One transaction; returns what is done after it."""
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
        # With a key it goes where the key's messages go today, also if the topic has grown since.
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
        """The dead letters that are there now and that no redrive has sent back, up to today's end."""
        ends = self._ends()
        with self._bridge.consumer(self._topic, f"txnbridge-redrive-{self._topic}") as consumer:
            while not _is_through(consumer, ends):
                batch = consumer.poll(_BATCH, _POLL_SECONDS)
                # Behind the ends lies what came since: new dead letters, among them perhaps those just sent back.
                if before_end := [m for m in batch if m.position < ends.get((m.topic, m.partition), ())]:
                    yield before_end

    def _ends(self) -> dict[Partition, Position]:
        with self._bridge.consumer(self._topic, start="latest") as tail:
            tail.poll(1, timeout=0)  # so that it has its partitions
            return tail.positions()


def _is_through(consumer: Consumer, ends: Mapping[Partition, Position]) -> bool:
    """Whether it has partitions, and none of them has anything left before its end."""
    positions = consumer.positions()
    if not positions:
        return False  # another redrive holds them; its end is waited for
    return all(at >= ends.get(p, ()) for p, at in positions.items()) or not any(consumer.lag().values())
