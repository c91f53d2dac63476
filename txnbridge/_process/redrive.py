"""`Redrive`: sends dead letters back to the topics that the messages came from, to be processed once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from txnbridge._base.messages import Headers, Message, Position
from txnbridge._process import retries as _retries
from txnbridge._process.dead_letters import PREFIX
from txnbridge._process.origin import Origin, origin_headers, without_prefix
from txnbridge._process.retry_overview import shortest_retry_topic
from txnbridge._read.consumer import Consumer
from txnbridge.capabilities import Capability
from txnbridge.errors import InvalidOption, NotFound, Poison
from txnbridge.spi import Partition

if TYPE_CHECKING:
    from txnbridge._bridge import Bridge
    from txnbridge._write.transaction import Transaction

# The number of dead letters per transaction: enough to make the commits cheap, below every broker's limit.
_BATCH = 500
# The timeout of one poll for more dead letters. A redrive takes this long to find that it has read all of them.
_POLL_SECONDS = 0.25


class DeadLetter(Origin):
    """The contents of a dead letter's headers: the original position, the group that failed, and the reason."""

    @classmethod
    def of(cls, message: Message) -> DeadLetter | None:
        """Return the contents of a dead letter's headers; None for a message without valid headers of txnbridge."""
        return cls.read(message.headers, PREFIX)


class Redriven(NamedTuple):
    """Counts of dead letters: sent back; left for reason or group; left without valid headers; left without a topic."""

    sent: int = 0
    left: int = 0
    foreign: int = 0
    gone: int = 0


@dataclass(eq=False, repr=False)
class Redrive:
    """Sends the dead letters of a topic back to their original topics, exactly once.

    Key, value, timestamp and headers are those of the original message. Each message is sent in the transaction that
    acknowledges its dead letter, in a group for redrives, so a redrive that was killed and is run again continues where
    it stopped. It sends dead letters that exist when it begins, at most `limit`, and only those whose reason contains
    `reason`. The others stay for another redrive: unchanged, or, on a broker that only knows positions, sent to the
    topic's end again.

    With `group` it sends only the dead letters of this group, and to the group's retry topic with the shortest delay,
    due at once: no other group reads them again. Raise `NotFound` if the group has no retry topic.
    """

    bridge: Bridge
    topic: str
    _: KW_ONLY
    reason: str | None = None
    limit: int | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        self.retry_topic = None if self.group is None else shortest_retry_topic(self.bridge, self.group)
        self._partitions: dict[str, int] = {}  # of the original topics; 0 for a topic that no longer exists
        self._in_place = bool(self.bridge.capabilities[Capability.INDIVIDUAL_ACK])

    def preview(self) -> Iterator[tuple[Message, DeadLetter]]:
        """Yield the dead letters that `run` would send back now, without sending or acknowledging any."""
        found = 0
        for batch in self._batches():
            for message in batch:
                letter = DeadLetter.of(message)
                if letter is not None and self._chooses(letter):
                    yield message, letter
                    found += 1
                    if found == self.limit:
                        return

    def run(self, progress: Callable[[int], object] = lambda sent: None) -> Redriven:
        """Send the dead letters back; call `progress` with the number of messages sent by each transaction.

        Raise the errors of a transaction. A dead letter whose original topic no longer exists stays.
        """
        done = Redriven()
        for batch in self._batches():
            before = done.sent
            done = self._send_back(batch, done)
            progress(done.sent - before)
            if done.sent == self.limit:
                break
        return done

    def _chooses(self, letter: DeadLetter) -> bool:
        return self.group in (None, letter.group) and (self.reason is None or self.reason in letter.reason)

    def _send_back(self, batch: list[Message], done: Redriven) -> Redriven:
        """Send a batch's dead letters back in one transaction; return the counts in `done`, increased by this batch."""
        chosen, others = list[tuple[Message, DeadLetter]](), list[Message]()
        foreign = gone = 0
        for message in batch:
            if done.sent + len(chosen) == self.limit:
                break
            letter = DeadLetter.of(message)
            if letter is not None and self._chooses(letter):
                if self.retry_topic is not None or self._partitions_of(letter.topic):
                    chosen.append((message, letter))
                    continue
                gone += 1
            others.append(message)
            foreign += letter is None
        moved = [] if self._in_place else others
        if chosen or moved:
            with self.bridge.transaction(group_commit=False) as txn:
                for message, letter in chosen:
                    if self.retry_topic is None:
                        self._send_original(txn, message, letter)
                    else:
                        _send_to_retry(txn, self.retry_topic, message, letter)
                for message in moved:
                    txn.send(self.topic, message.value, key=message.key, headers=message.headers)
                txn.ack(sorted([*(m for m, _ in chosen), *moved], key=lambda m: m.position))
        left = len(others) - foreign - gone
        return Redriven(done.sent + len(chosen), done.left + left, done.foreign + foreign, done.gone + gone)

    def _partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if it does not exist."""
        if topic not in self._partitions:
            try:
                self._partitions[topic] = len(self.bridge.admin.bounds(topic))
            except (NotFound, InvalidOption):  # there is none, or the header names what no topic can be called
                self._partitions[topic] = 0
        return self._partitions[topic]

    def _send_original(self, txn: Transaction, message: Message, letter: DeadLetter) -> None:
        can = self.bridge.capabilities
        # A message with a key goes to the partition that the key has now, which differs if partitions were added.
        there = 0 <= letter.partition < self._partitions_of(letter.topic)
        has_time = 0 < letter.timestamp < 1 << 63  # on Kafka a message may have none (-1), or 0, which it refuses
        by_number = message.key is None and there and can[Capability.CHOOSE_PARTITION]
        txn.send(
            letter.topic,
            message.value,
            key=message.key,
            headers=without_prefix(message.headers, PREFIX) or None,
            partition=letter.partition if by_number else None,
            timestamp=letter.timestamp if has_time and can[Capability.TIMESTAMPS] else None,
        )

    def _batches(self) -> Iterator[list[Message]]:
        """Yield batches of the dead letters that no redrive has sent back, up to the topic's present end."""
        with self.bridge.consumer(self.topic, start="latest") as tail:
            tail.poll(1, timeout=0)  # assigns the consumer's partitions
            ends = tail.positions()
        with self.bridge.consumer(self.topic, f"txnbridge-redrive-{self.topic}") as consumer:
            while not _is_through(consumer, ends):
                batch = consumer.poll(_BATCH, _POLL_SECONDS)
                # Messages after the ends are new, some perhaps dead letters that this redrive has sent there.
                if before_end := [m for m in batch if m.position < ends.get((m.topic, m.partition), ())]:
                    yield before_end


def _send_to_retry(txn: Transaction, retry_topic: str, message: Message, letter: DeadLetter) -> None:
    original = message._replace(
        topic=letter.topic,
        partition=letter.partition,
        position=letter.position,
        timestamp=letter.timestamp,
        headers=Headers(without_prefix(message.headers, PREFIX)),
    )
    origin = origin_headers(_retries.PREFIX, original, letter.group, Poison(letter.reason), 0, txn.id)
    txn.send(retry_topic, message.value, key=message.key, headers=[*origin, *_retries.waiting_headers(0, delay=0)])


def _is_through(consumer: Consumer, ends: Mapping[Partition, Position]) -> bool:
    """Return whether a consumer has partitions assigned, and has read each of them up to its position in `ends`."""
    positions = consumer.positions()
    if not positions:
        return False  # another running redrive has all partitions: wait until it ends
    return all(at >= ends.get(p, ()) for p, at in positions.items()) or not any(consumer.lag().values())
