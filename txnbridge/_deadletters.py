"""Dead letters: poison messages, sent unchanged to a dead-letter topic with the reason in their headers."""

from __future__ import annotations

import json

from txnbridge._handler_errors import loggable, reason_of
from txnbridge._messages import Headers, Message
from txnbridge._pass_transaction import PassTransaction
from txnbridge._polled_batch import PolledBatch
from txnbridge.errors import InvalidOption, Poison

PREFIX = "txnbridge-dead-"
# The longest reason in a header: enough for a validator's error text, and far below every broker's limit for headers.
_MAX_REASON = 1000


def dead_letter_headers(
    message: Message, group: str, error: BaseException, attempts: int, transaction: str
) -> list[tuple[str, bytes | None]]:
    """Return the headers of a dead letter: the message's own, then the reason, its original place and who sent it."""
    ours = {
        # The reason may contain data of the message, because readers of this topic get the message anyway.
        "reason": reason_of(error)[:_MAX_REASON],
        "topic": message.topic,
        "partition": str(message.partition),
        "position": json.dumps(message.position, separators=(",", ":")),
        "timestamp": str(message.timestamp),
        "group": group,
        "attempts": str(attempts),
        "transaction": transaction,
    }
    return [
        *without_ours(message.headers),
        *((PREFIX + name, value.encode("utf-8", "surrogateescape")) for name, value in ours.items()),
    ]


def without_ours(headers: Headers) -> list[tuple[str, bytes | None]]:
    """Return the headers of a dead letter's original message, without those that txnbridge added."""
    return [(name, value) for name, value in headers.raw if not name.startswith(PREFIX)]


class DeadLetters:
    """Sends the poison messages of a processor's batches to the processor's dead-letter topic, if it has one."""

    def __init__(self, topic: str | None, group: str, max_in_a_row: int | None) -> None:
        if max_in_a_row is not None and max_in_a_row < 0:
            raise InvalidOption("max_dead_letters_in_a_row must be at least 0, or None for no limit")
        self.topic = topic
        self._group = group
        self._max_in_a_row = max_in_a_row
        self.in_a_row = 0  # the number of dead letters since the last good message

    def without_fatal_poison(self, batch: PolledBatch) -> PolledBatch:
        """Return the whole batch; without a dead-letter topic, only the messages before the first poison message.

        Raise `Poison` if the first message is poison and there is no dead-letter topic.
        """
        if self.topic is not None:
            return batch
        for index, poison in batch.poison.items():
            if index:
                return batch.first(index)
            raise self._stopped_by(batch.raws[0], poison, "and there is no dead_letter= topic to set it aside in")
        return batch

    def send(self, batch: PolledBatch, txn: PassTransaction, attempts: int) -> int:
        """Send the poison messages of a batch to the dead-letter topic, in the transaction.

        Return the number of consecutive dead letters at the batch's end. Raise `Poison` if more than
        `max_dead_letters_in_a_row` are consecutive; the transaction then is not committed.
        """
        in_a_row = self.in_a_row
        behind = 0  # the index after the last poison message
        for index, poison in batch.poison.items():
            in_a_row = in_a_row + 1 if index == behind else 1
            behind = index + 1
            raw = batch.raws[index]
            if self._max_in_a_row is not None and in_a_row > self._max_in_a_row:
                raise self._stopped_by(
                    raw, poison, f"and so were the {in_a_row - 1} before it: more than max_dead_letters_in_a_row"
                )
            assert self.topic is not None
            headers = dead_letter_headers(raw, self._group, poison, attempts, txn.id)
            txn.send(self.topic, raw.value, key=raw.key, headers=headers)
        return in_a_row if behind == len(batch) else 0

    def _stopped_by(self, raw: Message, poison: Exception, why: str) -> Poison:
        error = Poison(
            f"{raw!r} is poison ({loggable(poison)}), {why}; it holds its place in group {self._group!r}", message=raw
        )
        error.__cause__ = poison
        return error
