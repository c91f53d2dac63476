"""`SideBySide`: calls a processor's handler for many messages at once, and sends the results in the messages' order.

Each call gets a `RecordedSends` in the place of the transaction, which one thread at a time may use. What it sends is
sent with the transaction later, when all calls of the batch have ended, in the order of the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from txnbridge._base.messages import Message, check_place, split_item
from txnbridge._base.token import Outcome, State
from txnbridge._base.topic import Topic, encode_message
from txnbridge._process.polled_batch import PolledBatch
from txnbridge.errors import BrokerUnavailable, InvalidOption, InvalidState

ORDERS = ("key", "partition", "none")
_place = attrgetter("source", "position")


class RecordedSends:
    """The messages that one call of a handler sends; it takes the place of the transaction that sends them later."""

    def __init__(self, id: str, ends_at: float, header_makers: Sequence[Any], refused: list[InvalidState]) -> None:
        self.id = id
        self._refused = refused
        self.state = State.OPEN
        self.outcome: Outcome | None = None
        self._ends_at = ends_at
        self._header_makers = header_makers
        self._sends: list[tuple[Any, ...]] = []

    @property
    def deadline(self) -> float:
        """The seconds until the transaction's deadline."""
        return max(0.0, self._ends_at - time.monotonic())

    def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> None:
        """Add one message to the transaction, as `Transaction.send` does."""
        at = check_place(partition, timestamp)
        encoded = encode_message(topic, value, key, headers, self._header_makers)
        self._sends.append((encoded.topic, encoded.value, encoded.key, encoded.headers, partition, at))

    def send_many(self, topic: str | Topic, items: Iterable[Any]) -> None:
        """Add many messages for one topic, as `Transaction.send_many` does."""
        for item in items:
            value, key, headers = split_item(item)
            self.send(topic, value, key=key, headers=headers)

    def _refuse(self, *_: object) -> NoReturn:
        text = f"the handler only sends with transaction {self.id}: its processor acknowledges and commits"
        self._refused.append(InvalidState(text))
        raise self._refused[-1]

    ack = ack_up_to = commit = abort = _refuse

    def replay(self, txn: Any) -> None:
        for sent in self._sends:
            txn._send_encoded(*sent)


class SideBySide:
    """Calls a handler in threads, for up to `concurrency` messages of a batch at once.

    Messages of one key, or of one partition, are handled one after another, in their order; after a failure those
    behind it are not handled. The result of a message stays until the message is acknowledged, so what had to wait for
    another one that failed is sent without a second call.
    """

    def __init__(self, each: Callable[[Message, Any], object], concurrency: int, order: str, name: str) -> None:
        self._each = each
        self._order = order
        self._concurrency = concurrency
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = 0
        self._refused: list[InvalidState] = []
        # By assignment, because a topic may be made anew.
        self._results: dict[tuple[Any, ...], RecordedSends | BaseException] = {}

    def handle(
        self,
        items: PolledBatch,
        txn: Any,
        header_makers: Sequence[Any],
        if_slow: Callable[[float, Exception | None], Exception | None],
        stopped: Callable[[], bool],
    ) -> int:
        """Call the handler for the messages that are not marked and have no result; wait for all calls.

        Return how many messages, from the first on, are marked or have a result. No call begins after half of the
        transaction's time, or when `stopped()`. `if_slow` returns the error of a call that took so many seconds.
        Raise `InvalidState` if a call has tried to acknowledge or to end the transaction, even if it hides that.
        """
        left = txn.deadline
        now = time.monotonic()
        latest, ends_at = now + left / 2, now + left

        def call_in_order(chain: list[int]) -> None:
            for index in chain:
                called_at = time.monotonic()
                if called_at > latest or stopped():
                    return
                sends = RecordedSends(txn.id, ends_at, header_makers, self._refused)
                error: BaseException | None = None
                try:
                    self._each(items.messages[index], sends)
                except BaseException as raised:  # a `SystemExit`, say, is for the processor: this thread goes on
                    error = raised
                if error is None or isinstance(error, Exception):
                    error = if_slow(time.monotonic() - called_at, error)
                self._results[_place(items.delivered[index])] = error or sends
                if error is not None:
                    return

        ended: SimpleQueue[None] = SimpleQueue()

        def work(chain: list[int]) -> None:
            try:
                call_in_order(chain)
            finally:
                ended.put(None)

        chains = self._chains(items)
        self._start_threads(len(chains))
        for chain in chains:
            self._calls.put(partial(work, chain))
        for _ in chains:
            ended.get()
        return self._handled(items)

    def _handled(self, items: PolledBatch) -> int:
        for refused in self._refused:
            raise refused
        return next((i for i in items.good() if _place(items.delivered[i]) not in self._results), len(items))

    def _start_threads(self, wanted: int) -> None:
        while self._threads < min(wanted, self._concurrency):
            # A daemon, because a call that hangs must not keep the program from ending.
            thread = Thread(target=self._work, name=f"txnbridge {self._name} {self._threads + 1}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:  # these handle all messages
                    return
                raise BrokerUnavailable(f"this machine starts no thread for the handler now: {error}") from error
            self._threads += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _chains(self, items: PolledBatch) -> list[list[int]]:
        """Return the indexes of messages to handle, in a list for each group that has to keep its order."""
        chains: dict[Any, list[int]] = {}
        for index in items.good():
            message = items.delivered[index]
            if _place(message) in self._results:
                continue
            place: Any = index
            if self._order == "partition":
                place = message.source
            elif self._order == "key" and items.originals[index].key is not None:
                place = items.originals[index].key
            chains.setdefault(place, []).append(index)
        return list(chains.values())

    def send(self, delivered: Message, txn: Any) -> None:
        """Send in `txn` the messages that the handler's call for `delivered` has sent, or raise the call's error."""
        result = self._results[_place(delivered)]
        if not isinstance(result, RecordedSends):
            raise result
        result.replay(txn)

    def drop(self, delivered: Message) -> None:
        """Forget the result of a message, which will be handled again."""
        self._results.pop(_place(delivered), None)

    def keep(self, delivered: Iterable[Message]) -> None:
        """Forget the results of all messages but these."""
        places = [_place(message) for message in delivered]
        self._results = {place: self._results[place] for place in places if place in self._results}

    def close(self) -> None:
        """Let the threads end after their calls, without waiting for them."""
        for _ in range(self._threads):
            self._calls.put(None)


def check_side_by_side(concurrency: Any, order: Any, plain: bool) -> None:
    """Raise `InvalidOption` for invalid settings; `plain` is True for a processor with `each` and no database."""
    if type(concurrency) is not int or concurrency < 1:
        raise InvalidOption(f"concurrency= is a whole number from 1, not {concurrency!r}")
    if order not in ORDERS:
        raise InvalidOption(f"order= is 'key', 'partition' or 'none', not {order!r}")
    if concurrency > 1 and not plain:
        text = "concurrency= is for each=, without db=: a batch is one call, and a database's transaction takes one"
        raise InvalidOption(text + " statement at a time")
