"""Dead letters: poison messages, sent unchanged to a dead-letter topic with the reason in their headers."""

from __future__ import annotations

from collections.abc import Callable

from txnbridge._base.messages import Message
from txnbridge._process.handler import handler_location, loggable
from txnbridge._process.origin import origin_headers
from txnbridge._process.pass_transaction import PassTransaction
from txnbridge._process.polled_batch import PolledBatch
from txnbridge.errors import InvalidOption, Poison

PREFIX = "txnbridge-dead-"


class DeadLetters:
    """Sends the poison messages of a processor's batches to the processor's dead-letter topic, if it has one."""

    def __init__(
        self, topic: str | None, group: str, max_in_a_row: int | None, attempts: Callable[[Message], int]
    ) -> None:
        """Raise `InvalidOption` for a negative `max_in_a_row`. `attempts` returns how often a message was tried."""
        if max_in_a_row is not None and max_in_a_row < 0:
            raise InvalidOption("max_dead_letters_in_a_row must be at least 0, or None for no limit")
        self.topic = topic
        self._group = group
        self._max_in_a_row = max_in_a_row
        self._attempts = attempts
        self.in_a_row = 0  # the number of dead letters since the last good message

    def without_fatal_poison(self, batch: PolledBatch) -> PolledBatch:
        """Return the whole batch; without a dead-letter topic, only the messages before the first poison message.

        Raise `Poison` if the first message is poison and there is no dead-letter topic.
        """
        if self.topic is not None:
            return batch
        for index in batch.poison:
            if index:
                return batch.first(index)
            why = "and there is no dead_letter= topic to set it aside in"
            raise self._stopped_by(batch, 0, why, "Set dead_letter=, or fix the handler, and start again")
        return batch

    def send(self, batch: PolledBatch, txn: PassTransaction) -> int:
        """Send the poison messages of a batch to the dead-letter topic, in the transaction.

        Return the number of consecutive dead letters at the batch's end; messages that go to a retry topic do not
        count. Raise `Poison` if more than `max_dead_letters_in_a_row` are consecutive; the transaction then is not
        committed.
        """
        in_a_row = self.in_a_row
        behind = 0  # the index after the last poison message
        for index, poison in batch.poison.items():
            in_a_row = 1 if batch.has_good(behind, index) else in_a_row + 1
            behind = index + 1
            original = batch.originals[index]
            if self._max_in_a_row is not None and in_a_row > self._max_in_a_row:
                raise self._stopped_by(
                    batch,
                    index,
                    f"and neither could the {in_a_row - 1} before it: more than max_dead_letters_in_a_row",
                    "If what the handler needs is away, start again when it is back; with"
                    f" max_dead_letters_in_a_row=None all go to {self.topic!r}",
                )
            assert self.topic is not None
            tried = self._attempts(batch.delivered[index])
            headers = origin_headers(PREFIX, original, self._group, poison, tried, txn.id)
            txn.send(self.topic, original.value, key=original.key, headers=headers)
        return 0 if batch.has_good(behind, len(batch)) else in_a_row

    def _stopped_by(self, batch: PolledBatch, index: int, why: str, advice: str) -> Poison:
        poison, original, delivered = batch.poison[index], batch.originals[index], batch.delivered[index]
        what = loggable(poison) if isinstance(poison, Poison) else handler_location(poison)
        tried = self._attempts(delivered)
        count = "1 attempt" if tried == 1 else f"{tried} attempts"
        waits = delivered.topic != original.topic  # in a retry topic
        place = f"waits in {delivered.topic!r}" if waits else f"holds its place in group {self._group!r}"
        error = Poison(
            f"{original!r} cannot be processed ({what}, {count}), {why}. It {place}. {advice}", message=original
        )
        error.__cause__ = poison
        return error
