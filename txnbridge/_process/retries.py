"""Retries: a processor sends a message that its handler could not process to a topic, where it waits for its due time.

There is one retry topic for each delay of a group. All messages in it wait equally long, so they become due in the
order in which they are stored, but for the differences of clocks and of the transactions' durations.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from txnbridge._base.connection import Connection
from txnbridge._base.deadline import check_seconds
from txnbridge._base.messages import Headers, Message
from txnbridge._base.topic import check_topic_name
from txnbridge._process.origin import Origin, origin_headers, without_prefix
from txnbridge._process.pass_transaction import PassTransaction
from txnbridge._process.polled_batch import PolledBatch
from txnbridge.capabilities import Capability
from txnbridge.errors import InvalidOption, Poison, TxnBridgeError

_log = logging.getLogger("txnbridge")

PREFIX = "txnbridge-retry-"
# Headers by which `_process.waiting_keys` knows what waits: of a message for which later ones of its key wait, and of
# notes, which are no messages to process: that such a message does not wait any more, and how far a member has read.
KEPT, DONE, MARKER = PREFIX + "kept", PREFIX + "done", PREFIX + "marker"
NEXT = PREFIX + "next"  # of a note: the retry topic to which the message went on, and where it is not done yet
_TOPIC_NAME = re.compile(r"(?P<group>.+)-retry-(?P<number>\d+)(?P<unit>m?s)", re.DOTALL)


class WaitsBehind(Exception):
    """The reason why a message waits in a retry topic: an earlier message of its key waits there, due at `due`."""

    def __init__(self, topic: str, due: float = math.inf) -> None:
        super().__init__("an earlier message of its key waits")
        self.topic = topic
        self.due = due  # in milliseconds since 1970; infinite: as late as the topic's messages are


@dataclass(frozen=True)
class WaitingMessage(Origin):
    """The contents of the headers of a message in a retry topic.

    `number` is the number of retry topics in which the message has waited, with this one; it is 0 if a redrive has sent
    the message, which then has all its attempts again. `due` is the time from which it may be processed, in
    milliseconds since 1970.
    """

    number: int
    due: int

    @classmethod
    def of(cls, message: Message) -> WaitingMessage | None:
        """Return the contents of a message's headers; None for a message without valid headers of txnbridge."""
        found = cls.read(message.headers, PREFIX)
        return None if found is None or found.number < 0 else found


def retry_topic(group: str, delay: float) -> str:
    """Return the name of the topic in which messages of a group wait for `delay` seconds."""
    milliseconds = round(delay * 1000)
    # No dots, because RocketMQ refuses them in the names of topics.
    length = f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"
    return f"{group}-retry-{length}"


def parse_retry_topic(name: str) -> tuple[str, float] | None:
    """Return the group and the delay in seconds that a retry topic's name tells; None for a name of another topic."""
    found = _TOPIC_NAME.fullmatch(name)
    return found and (found["group"], int(found["number"]) / (1000 if found["unit"] == "ms" else 1))


def retry_group(group: str) -> str:
    """Return the name of the group in which the processors of `group` read their retry topics."""
    return f"txnbridge-retry-{group}"


def waiting_headers(number: int, delay: float) -> list[tuple[str, bytes | None]]:
    """Return the headers with the number of a message's retry, and the time it is due: in `delay` seconds."""
    return [(PREFIX + "number", b"%d" % number), (PREFIX + "due", b"%d" % ((time.time() + delay) * 1000))]


def place_of(message: Message | WaitingMessage) -> str:
    """Return the original place of a message as text."""
    return f"{message.topic}/{message.partition}/{'.'.join(map(str, message.position))}"


def is_note(message: Message) -> bool:
    """Return whether a message of a retry topic is a note: a record of txnbridge's own that needs no processing."""
    return DONE in message.headers or MARKER in message.headers


def is_follower(message: Message) -> bool:
    """Return whether a message of a retry topic waits behind an earlier one, and was not tried itself."""
    return KEPT in message.headers and message.headers.get(PREFIX + "number") == "0"


def seconds_until_due(message: Message) -> float:
    """Return for how many seconds a message in a retry topic has to wait; 0 if it has no valid headers."""
    waiting = WaitingMessage.of(message)
    return 0.0 if waiting is None else max(0.0, waiting.due / 1000 - time.time())


class Retries:
    """The retry topics of a processor: one for each of its `delays`, in seconds. Without delays it has none."""

    def __init__(self, delays: Sequence[float] | None, group: str) -> None:
        self._delays = _checked(delays)
        self._group = group
        self._delay_of = {retry_topic(group, delay): delay for delay in self._delays}
        self.topics = list(self._delay_of)
        for topic in self.topics:
            check_topic_name(topic)

    def warn_of_unread_topics(self, connection: Connection) -> None:
        """Log a warning for each retry topic with messages of the group whose delay is not set any more."""
        if not self.topics or not connection.capabilities[Capability.GROUP_ADMIN]:
            return
        try:
            lag = connection.broker.admin.group(retry_group(self._group), connection.deadline()).lag
        except TxnBridgeError as error:
            _log.debug("looking for retry topics of group %r that are not read: %s", self._group, error)
            return
        left: Counter[str] = Counter()
        for (topic, _), count in lag.items():
            left[topic] += count
        for topic in sorted(left.keys() - set(self.topics)):
            if left[topic]:
                _log.warning(
                    "group %r does not read %s, of which %d messages or positions are left, because its delay is not in"
                    " retry=: `txnbridge retries list` shows what waits; a processor with this delay processes it",
                    self._group,
                    topic,
                    left[topic],
                )

    def takes(self, delivered: Message) -> bool:
        """Return whether a message that cannot be processed now can wait for another attempt."""
        return self._number(delivered) < len(self._delays)

    def attempts(self, delivered: Message) -> int:
        """Return how often a processor had tried a message before the message came to its present topic."""
        waited = self._waited(delivered)
        return 0 if waited is None else waited.attempts

    def original(self, delivered: Message, input_topic: Callable[[str], object]) -> Message:
        """Return a message of a retry topic as it was in its original topic. Return other messages as they are.

        Its `deliveries` are increased by the earlier attempts. Raise `Poison` for a message without valid headers of
        txnbridge, `InvalidOption` for a message from a topic for which `input_topic` returns None.
        """
        if delivered.topic not in self.topics:
            return delivered
        waited = self._waited(delivered)
        if waited is None:
            raise Poison("is in a retry topic without the headers that name its original topic", message=delivered)
        if input_topic(waited.topic) is None:
            raise InvalidOption(
                f"{delivered!r} waits for a retry and comes from {waited.topic!r}, which is no input of this processor."
                f" Give each processor with retry= a group of its own, or add {waited.topic!r} to the inputs"
            )
        return delivered._replace(
            topic=waited.topic,
            partition=waited.partition,
            position=waited.position,
            headers=Headers(without_prefix(delivered.headers, PREFIX)),
            timestamp=waited.timestamp,
            deliveries=delivered.deliveries + waited.attempts,
        )

    def next_topic(self, delivered: Message) -> str:
        """Return the retry topic in which a message waits after its handler has failed once more."""
        return retry_topic(self._group, self._delays[self._number(delivered)])

    def send(
        self,
        batch: PolledBatch,
        txn: PassTransaction,
        attempts: Callable[[Message], int],
        partition: Callable[[str, Message], int] | None = None,
    ) -> dict[int, tuple[str, float]]:
        """Send the delayed messages of a batch to their retry topics, and notes about messages that leave one.

        Return the topics and due times by index. `attempts` returns the number of attempts at a delivered message,
        `partition` its partition of a retry topic; if it is None, the broker or the key chooses.
        """
        delayed = batch.delayed
        of_retries = batch.delivered and batch.delivered[0].topic in self.topics  # a batch is of one kind of topics
        for index, delivered in enumerate(batch.delivered if of_retries else ()):
            if KEPT not in delivered.headers or (waited := self._waited(delivered)) is None:
                continue
            note = [(DONE, place_of(waited).encode())]
            if index in delayed and partition is not None:
                note.append((NEXT, self._topic_of(delayed[index], delivered).encode()))
            txn.send(delivered.topic, b"", key=None, headers=note, partition=delivered.partition)
        sent: dict[int, tuple[str, float]] = {}
        for index, error in delayed.items():
            delivered, original = batch.delivered[index], batch.originals[index]
            topic = self._topic_of(error, delivered)
            number, tried = self._number(delivered), attempts(delivered)
            if isinstance(error, WaitsBehind):  # due with the earlier message, so that a busy key catches up
                tried -= 1
                waits = min(self._delay_of[topic], max(0.0, error.due / 1000 - time.time()))
            else:
                number += 1
                waits = self._delay_of[topic]
            headers = origin_headers(PREFIX, original, self._group, error, tried, txn.id)
            headers += waiting_headers(number, waits)
            place = None if partition is None else partition(topic, original)
            if place is not None:
                headers.append((KEPT, b""))
            txn.send(topic, original.value, key=original.key, headers=headers, partition=place)
            sent[index] = topic, (time.time() + waits) * 1000
        return sent

    def _topic_of(self, error: Exception, delivered: Message) -> str:
        return error.topic if isinstance(error, WaitsBehind) else self.next_topic(delivered)

    def _number(self, delivered: Message) -> int:
        waited = self._waited(delivered)
        return 0 if waited is None else waited.number

    def _waited(self, delivered: Message) -> WaitingMessage | None:
        return WaitingMessage.of(delivered) if delivered.topic in self.topics else None


def _checked(delays: Sequence[float] | None) -> tuple[float, ...]:
    if delays is None:
        return ()
    if isinstance(delays, str | bytes) or not isinstance(delays, Sequence) or not delays:
        raise InvalidOption("retry= is a list of seconds, one delay for each retry, such as [10, 60, 600]")
    for delay in delays:
        check_seconds("a delay of retry=", delay, above_0=True)
        if round(delay * 1000) < 1:
            raise InvalidOption(f"a delay of retry= is at least a millisecond, not {delay!r} seconds")
    return tuple(delays)
