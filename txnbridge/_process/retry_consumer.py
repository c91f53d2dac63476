"""`RetryConsumer`: a consumer of retry topics, which delivers messages when they are due."""

from __future__ import annotations

from txnbridge._base.messages import Message, Position
from txnbridge._process.retries import seconds_until_due
from txnbridge._read.consumer import RawConsumer, one_call
from txnbridge.spi import Partition


class RetryConsumer(RawConsumer):
    """A processor's consumer of its retry topics: `take` returns only messages that are due.

    A partition is paused at its first message that is not due, and the messages that were fetched with it are set aside
    until then. None of them is handed out, so no transaction holds them, and a rebalance simply drops them.
    """

    _waiting: frozenset[Partition] = frozenset()  # the partitions that this consumer has paused

    @one_call("poll")
    def take(self, max_messages: int, timeout: float) -> list[Message]:
        self._resume_due()
        # Poll the reader also while messages are left that became due together: some brokers expel a member that polls
        # too rarely.
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
        ready = self._waiting.intersection(self._reader.positions()) - self._not_due()
        if ready:
            self._reader.resume(sorted(ready))
            self._deliveries.resume(ready)
            self._waiting -= ready

    def _pause_not_due(self) -> None:
        since: dict[Partition, Position] = {}
        for message in self._deliveries.fetched():
            partition = message.topic, message.partition
            if partition not in since and seconds_until_due(message) > 0:
                since[partition] = message.position
        if since:
            self._waiting |= since.keys()
            self._reader.pause(sorted(since))
            self._deliveries.set_aside(since)

    def _not_due(self) -> set[Partition]:
        """Return the partitions whose first message that was set aside is not due."""
        heads = self._deliveries.first_set_aside()
        return {partition for partition, message in heads.items() if seconds_until_due(message) > 0}
