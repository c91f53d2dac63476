"""Sends: entries that were sent, their receipts, and the limit on the bytes that have no receipt yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

from txnbridge_pulsar.client.format.ids import MessageId, TxnId

from .deadline import ClientDeadline
from .errors import PulsarError, RequestTimedOut


class Receipt(NamedTuple):
    """The broker's receipt for an entry. If `duplicate`, the broker dropped the entry because of its sequence ids."""

    sequence_id: int
    message_id: MessageId

    @property
    def duplicate(self) -> bool:
        return self.message_id.ledger < 0


class Budget:
    """Limits the bytes that all producers of a client together have sent without a receipt yet.

    Entries of a lost connection do not count until they are sent again: only their producer could make room for others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counted: set[Send] = set()
        self._used = 0
        self._changed = threading.Condition()

    def take(self, send: Send, deadline: ClientDeadline, alone: bool, is_lost: Callable[[], bool]) -> None:
        """Wait until an entry fits under the limit, or its producer `is_lost`; then count it. An entry above the limit
        waits until no other one is unconfirmed. A small one that is `alone`, the only one of its producer, waits for no
        others, whose broker may hang. Raise `RequestTimedOut`.
        """
        alone = alone and send.size <= self._limit // 1024
        with self._changed:
            fits = lambda: alone or is_lost() or not self._used or self._used + send.size <= self._limit  # noqa: E731
            if not self._changed.wait_for(fits, deadline.left):
                text = f"no room for another entry in {deadline.seconds:g} s: the broker confirms too slowly"
                raise RequestTimedOut(text, may_have_had_effect=False)
            self.count(send)

    def count(self, send: Send) -> None:
        """Count an entry, without waiting until it fits under the limit."""
        with self._changed:
            self._counted.add(send)
            self._used += send.size

    def give_back(self, sends: Iterable[Send]) -> None:
        """Count these entries no longer. Some of them may not be counted."""
        with self._changed:
            counted = self._counted.intersection(sends)
            self._counted -= counted
            self._used -= sum(send.size for send in counted)
            self._changed.notify_all()


class Send:
    """One sent entry and its result. The entry has the sequence ids `sequence_id` to `highest_sequence_id`."""

    __slots__ = ("_receipt", "count", "frame", "highest_sequence_id", "number", "refused", "sequence_id", "txn")

    def __init__(self, number: int, sequence_id: int, count: int, txn: TxnId | None, frame: bytes) -> None:
        self.number = number  # counts all sends of the producer
        self.sequence_id = sequence_id
        self.highest_sequence_id = sequence_id + count - 1
        self.count = count
        self.txn = txn
        self.frame = frame
        self.refused = False  # whether the broker has answered that it did not store the entry
        self._receipt: Future[Receipt] = Future()

    @property
    def size(self) -> int:
        return len(self.frame)

    @property
    def done(self) -> bool:
        return self._receipt.done()

    def result(self, timeout: float) -> Receipt:
        """Wait for the receipt. Raise `BrokerConnectionLost`, a `ServerError`, or `RequestTimedOut` at the timeout."""
        try:
            return self._receipt.result(timeout)
        except FutureTimeout:
            raise RequestTimedOut(f"no receipt for sequence id {self.sequence_id} in {timeout:g} s") from None

    def when_done(self, call: Callable[[Send], None]) -> None:
        """Call `call` on the connection's reading thread when this send has a result; at once if it has one already.

        `call` may not block.
        """
        self._receipt.add_done_callback(lambda _: call(self))

    def resolve(self, outcome: Receipt | PulsarError) -> None:
        """Set the receipt or the error. An entry that is sent again gets another result, after `begin_again`."""
        if isinstance(outcome, PulsarError):
            self._receipt.set_exception(outcome)
        else:
            self._receipt.set_result(outcome)

    def begin_again(self) -> None:
        """Clear the result, because the entry is sent again."""
        self._receipt = Future()
