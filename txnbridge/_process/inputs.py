"""The consumers of a processor: of its input topics and, if it has any, of its retry topics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from types import MappingProxyType

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message, Position
from txnbridge._process.input_topics import InputTopics
from txnbridge._process.retries import parse_retry_topic, retry_group, seconds_until_due
from txnbridge._read.consumer import RawConsumer, one_call
from txnbridge._read.deliveries import Assignment
from txnbridge._read.open_consumers import Consumers
from txnbridge.spi import Partition

# The interval at which messages that are due are looked for. Delays are longer; a look may need a request.
_LOOK_SECONDS = 0.1
# The number of empty polls after which the messages of a failed attempt are not waited for any longer. It is half a
# minute with the processor's polls; brokers redeliver in less than a second, if all is well.
_POLLS_FOR_FAILED = 120


class ProcessorInputs:
    """Takes messages from the input topics and, in turn, messages that are due from the retry topics.

    The retry topics are read in a group of their own. So its members all have the same topics, whatever other
    processors of the group read, and messages that wait do not count as the group's lag.
    """

    def __init__(
        self,
        consumers: Consumers,
        topics: InputTopics,
        retry_topics: Sequence[str],
        group: str,
        start: str | int | datetime,
    ) -> None:
        """Join `group`, and the group for `retry_topics`. Raise `NotFound` if a missing topic may not be created."""
        self.topics = topics.now
        self._timeout = consumers.connection.timeout
        self._timing = consumers.connection.timing
        self._retries: RetryConsumer | None = None
        with ExitStack() as unless_opened:
            found = {topic.name for topic in topics.now} - topics.named.keys()
            self._inputs = RawConsumer._open(consumers, topics.now, group, start, found=found)
            unless_opened.callback(self._inputs.close)
            if retry_topics:
                # A message that waits must be read, whenever the group has begun.
                self._retries = RetryConsumer._open(consumers, retry_topics, retry_group(group), "earliest")
            unless_opened.pop_all()
        self._retries_next = True  # whether the next `take` looks for due messages first
        self._look_at = 0.0  # when to look for due messages again
        self._source: RawConsumer = self._inputs  # the consumer whose messages `take` returned last
        self._failed: set[Assignment] = set()  # the assignments of messages that were taken back after a failed attempt
        self._polls_for_failed = 0  # how many more polls wait for these messages
        self._idle_poll_at = 0.0  # when to poll the consumer whose turn does not come
        self._idle_since: dict[RawConsumer, float] = {}  # consumers without a partition, with the time

    def take(self, max_messages: int, timeout: float) -> list[Message]:
        """Return due messages of retry topics, or messages of the inputs: in turn, so that neither waits for long."""
        if self.awaits_failed:
            return self._take_failed(max_messages, timeout)
        now = time.monotonic()
        retries_next, self._retries_next = self._retries_next, not self._retries_next
        if self._retries is not None and retries_next and now >= self._look_at:
            if due := self._retries.take(max_messages, 0):
                self._source = self._retries
                return due
            self._look_at = now + _LOOK_SECONDS
        if self._source is self._retries:
            timeout = 0.0  # more messages may be due
        self._source = self._inputs
        return self._inputs.take(max_messages, timeout)

    @property
    def awaits_failed(self) -> bool:
        """True if the next `take` first waits for the messages whose processing has failed."""
        return self._polls_for_failed > 0

    def _take_failed(self, max_messages: int, timeout: float) -> list[Message]:
        """Return messages whose processing has failed, before all others.

        Others, if they succeed, would end the growing waits between failed attempts.
        """
        messages = self.take_more(max_messages, timeout)
        gone = all(assignment.ended for assignment in self._failed)
        self._polls_for_failed = 0 if messages or gone else self._polls_for_failed - 1
        return messages

    def take_more(self, max_messages: int, timeout: float) -> list[Message]:
        """Return more messages of the kind that the last `take` returned."""
        if time.monotonic() >= self._idle_poll_at:
            for consumer in self._consumers():
                if consumer is not self._source:
                    consumer.poll_idle()
            self._idle_poll_at = time.monotonic() + self._timing.idle_poll
        return self._source.take(max_messages, timeout)

    def take_back(self, failed: bool = True) -> None:
        """Mark all messages for redelivery that were handed out and not acknowledged.

        After a failed attempt the next `take` returns these before others, be they inputs or retries.
        """
        # After a poll that failed, the messages of the attempt before it are still waited for.
        waited_for = self._failed if self.awaits_failed else set()
        self._failed = waited_for.union(*(consumer.take_back() for consumer in self._consumers()))
        self._polls_for_failed = _POLLS_FOR_FAILED if failed else 0

    def hold(self) -> None:
        """Take no messages, but stay in the groups. Call this repeatedly, because partitions may come meanwhile."""
        for consumer in self._consumers():
            consumer.pause()
            consumer.poll_idle()

    def resume(self) -> None:
        """Take messages again, after a call of `hold` has stopped that."""
        for consumer in self._consumers():
            consumer.resume()

    @property
    def in_doubt(self) -> bool:
        """Whether the outcome of a transaction that acknowledged messages is unknown."""
        return any(consumer.in_doubt for consumer in self._consumers())

    def lag(self, timeout: float) -> int | None:
        """Return the number of unread messages in the assigned partitions of the inputs; None if none is assigned."""
        lag = self._inputs.lag_within(timeout)
        if not lag:
            self._inputs.group_lag(timeout)  # a member without partitions, too, learns so whether the broker answers
        return sum(lag.values()) if lag else None

    def is_all_read(self, lag: int | None, timeout: float) -> bool:
        """Return whether all messages of the inputs, and all messages of the retry topics that are due, are read.

        `lag` is the present lag of the inputs. While a consumer has no partition, the lag of its whole group counts.
        """
        if self.in_doubt or not self._is_read(self._inputs, lag, timeout):
            return False
        return self._retries is None or self._is_read(self._retries, self._retries.due_lag(), timeout)

    def _is_read(self, consumer: RawConsumer, lag: int | None, timeout: float) -> bool:
        if lag is not None:
            self._idle_since.pop(consumer, None)
            return lag == 0
        left = consumer.group_lag(timeout)
        if left == 0 or (left is not None and consumer is self._inputs):
            return left == 0  # of the retry topics the lag of a group also counts what is not due
        now = time.monotonic()
        return now - self._idle_since.setdefault(consumer, now) >= self._timing.without_partition

    def close(self, timeout: float | None) -> None:
        """Leave the groups within `timeout` seconds, by default the bridge's timeout."""
        deadline = Deadline(self._timeout if timeout is None else timeout)
        try:
            if self._retries is not None:
                self._retries.close(deadline.left())
        finally:
            self._inputs.close(deadline.left())

    def _consumers(self) -> list[RawConsumer]:
        return [self._inputs] if self._retries is None else [self._inputs, self._retries]


class RetryConsumer(RawConsumer):
    """A processor's consumer of its retry topics: `take` returns only messages that are due.

    A partition is paused at its first message that is not due, and the messages that were fetched with it are set aside
    until then, or for the topic's delay if a wrong clock or a stranger has set a later time. None of them is handed
    out, so no transaction holds them, and a rebalance simply drops them.
    """

    # The partitions that this consumer has paused, with the end of the topic's delay, by `time.monotonic`.
    _waiting: Mapping[Partition, float] = MappingProxyType({})
    # The positions before which the messages have waited for the delay, so that they are due whatever they say.
    _waited: Mapping[Partition, Position] = MappingProxyType({})

    @one_call("poll")
    def take(self, max_messages: int, timeout: float) -> list[Message]:
        self._resume_due()
        # Poll the reader also while messages that became due together are left: some brokers expel a slow member.
        left = len(self._deliveries.fetched())
        self._fetch(left + max_messages, 0.0 if left else timeout, full=True)
        self._pause_not_due()
        messages = self._deliveries.hand_out(max_messages)
        self._received()
        return messages

    def due_lag(self) -> int | None:
        """Return the lag of the partitions whose next message is due or unknown; None if no partition is assigned."""
        lag = self.lag()
        waiting = self._not_due()
        return sum(count for partition, count in lag.items() if partition not in waiting) if lag else None

    def _resume_due(self) -> None:
        """Resume paused partitions whose next message is due.

        A paused partition without messages was revoked, or an earlier message is redelivered: it is read again.
        """
        if not self._waiting:
            return
        # A partition that is not assigned now may come back, and is resumed then.
        positions = self._reader.positions()
        ready = (self._waiting.keys() & positions) - self._not_due()
        if ready:
            self._reader.resume(sorted(ready))
            self._deliveries.resume(ready)
            now, waiting = time.monotonic(), self._waiting
            self._waited = {**self._waited, **{p: positions[p] for p in ready if waiting[p] <= now}}
            self._waiting = {p: until for p, until in waiting.items() if p not in ready}

    def _pause_not_due(self) -> None:
        since: dict[Partition, Position] = {}
        for message in self._deliveries.fetched():
            partition = message.topic, message.partition
            if partition not in since and self._waits(message):
                since[partition] = message.position
        if since:
            now = time.monotonic()
            until = {p: now + found[1] for p in since if (found := parse_retry_topic(p[0]))}
            self._waiting = {**self._waiting, **until}
            self._reader.pause(sorted(since))
            self._deliveries.set_aside(since)

    def _not_due(self) -> set[Partition]:
        """Return the partitions whose first message is not due and was set aside until then."""
        heads, now = self._deliveries.first_set_aside(), time.monotonic()
        return {p for p, message in heads.items() if self._waits(message) and now < self._waiting.get(p, math.inf)}

    def _waits(self, message: Message) -> bool:
        waited = self._waited.get((message.topic, message.partition))
        return seconds_until_due(message) > 0 and (waited is None or message.position >= waited)
