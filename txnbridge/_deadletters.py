"""Dead letters: poison messages in a topic of their own, unchanged, with the reason in their headers."""

from __future__ import annotations

import json

from txnbridge._handler_errors import loggable, reason_of
from txnbridge._messages import Headers, Message
from txnbridge._polled_batch import PolledBatch
from txnbridge._transaction import Transaction
from txnbridge.errors import InvalidOption, Poison

PREFIX = "txnbridge-dead-"
# Long enough for a validator's text about a message, and far below every broker's limit for headers.
_MAX_REASON = 1000


def dead_letter_headers(
    message: Message, group: str, error: BaseException, attempts: int
) -> list[tuple[str, bytes | None]]:
    """Return the headers of a dead letter: the message's own, then where it came from and why it is poison."""
    ours = {
        # The reason may quote the message, which is in the same topic anyway.
        "reason": reason_of(error)[:_MAX_REASON],
        "topic": message.topic,
        "partition": str(message.partition),
        "position": json.dumps(message.position, separators=(",", ":")),
        "timestamp": str(message.timestamp),
        "group": group,
        "attempts": str(attempts),
    }
    return [
        *without_ours(message.headers),
        *((PREFIX + name, value.encode("utf-8", "surrogateescape")) for name, value in ours.items()),
    ]


def without_ours(headers: Headers) -> list[tuple[str, bytes | None]]:
    """Return the headers that a message had before it became a dead letter."""
    return [(name, value) for name, value in headers.raw if not name.startswith(PREFIX)]


class DeadLetters:
    """Sends the poison of a processor's batches to its dead-letter topic, if it has one."""

    def __init__(self, topic: str | None, group: str, max_in_a_row: int | None) -> None:
        if max_in_a_row is not None and max_in_a_row < 0:
            raise InvalidOption("max_dead_letters_in_a_row must be at least 0, or None for no limit")
        self.topic = topic
        self._group = group
        self._max_in_a_row = max_in_a_row
        self.in_a_row = 0  # dead letters since the last good message

    def without_fatal_poison(self, batch: PolledBatch) -> PolledBatch:
        """Return the batch; without a dead-letter topic, its messages in front of the first poison.

        Raise the `Poison` once it is the first message.
        """
        if self.topic is not None:
            return batch
        for index, poison in batch.poison.items():
            if index:
                return batch.first(index)
            raise self._stopped_by(batch.raws[0], poison, "and there is no dead_letter= topic to set it aside in")
        return batch

    def send(self, batch: PolledBatch, txn: Transaction, attempts: int) -> int:
        """Send the poison of a batch; return the number of dead letters in a row with which the batch ends.

        The limit is checked here, before the commit: nothing of a batch that exceeds it is done.
        """
        in_a_row = self.in_a_row
        behind = 0  # the index behind the last poison
        for index, poison in batch.poison.items():
            in_a_row = in_a_row + 1 if index == behind else 1
            behind = index + 1
            raw = batch.raws[index]
            if self._max_in_a_row is not None and in_a_row > self._max_in_a_row:
                raise self._stopped_by(
                    raw, poison, f"and so were the {in_a_row - 1} before it: more than max_dead_letters_in_a_row"
                )
            assert self.topic is not None
            headers = dead_letter_headers(raw, self._group, poison, attempts)
            txn.send(self.topic, raw.value, key=raw.key, headers=headers)
        return in_a_row if behind == len(batch) else 0

    def _stopped_by(self, raw: Message, poison: Exception, why: str) -> Poison:
        error = Poison(
            f"{raw!r} is poison ({loggable(poison)}), {why}; it holds its place in group {self._group!r}", message=raw
        )
        error.__cause__ = poison
        return error
