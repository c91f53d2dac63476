"""`ReopeningReader`: replaces a backend's reader after an exception from a signal handler has interrupted it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from txnbridge._deadline import Deadline
from txnbridge._messages import Message, MessageColumns, Position
from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Partition, Reader, ReaderListener, Subscription

_Result = TypeVar("_Result")


class ReopeningReader(Reader):
    """Wraps a backend's reader, and replaces it by a new one after an interrupted call.

    An interrupted call may have taken messages from the broker that it never returned. Without a group, the new reader
    continues after the last messages that were returned. In a group the member leaves and joins again, and the broker
    redelivers the unacknowledged messages.
    """

    def __init__(
        self,
        open: Callable[[Subscription, ReaderListener, Deadline], Reader],
        subscription: Subscription,
        listener: ReaderListener,
        deadline: Deadline,
        timeout: float,
    ) -> None:
        """Open the first reader by `open`. `timeout` is the time in seconds for opening another reader later."""
        self._open = open
        self._subscription = subscription
        self._alone = subscription.group is None
        self._timeout = timeout
        self._events = _ReaderEvents(listener)
        self.interrupted = False  # whether the last call was interrupted
        self._paused: set[Partition] = set()
        self._to_pause: set[Partition] = set()  # paused partitions that are not assigned to the new reader yet
        self.reader = open(subscription, self._events, deadline)
        # Without a group: the time to which the reader was set (`_since`), the positions that it got by this
        # (`_first`), and the positions before the last poll (`_stood`).
        self._since = subscription.start if isinstance(subscription.start, int) else None
        self._first = self._stood = self.reader.positions() if self._alone else {}

    def _drive(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except TxnBridgeError:
            raise
        except BaseException:
            self.interrupted = not self.reader.resumes
            raise

    def mend(self) -> None:
        """Replace the reader if its last call was interrupted. The consumer calls this before it uses the reader.

        Raise the errors of opening a reader, and `PositionLost` if the new reader cannot continue at its position; the
        next call of `mend` then tries again.
        """
        if not self.interrupted:
            return
        deadline = Deadline(self._timeout)
        self._events.leave()
        with suppress(TxnBridgeError):
            self.reader.close(deadline)
        events = _ReaderEvents(self._events.listener)
        start = self._subscription.start
        if self._alone:  # a partition that was added to the topic since is read from its beginning
            start = "earliest" if self._since is None else self._since
        reader = self._open(replace(self._subscription, start=start), events, deadline)
        try:
            if self._alone:
                self._go_on(reader)
            self.reader, self._events, self._to_pause = reader, events, set(self._paused)
            self.interrupted = False
        except BaseException:
            reader.close(deadline)
            raise

    def _go_on(self, reader: Reader) -> None:
        here = reader.positions()
        moved = (p for p, at in self._stood.items() if self._since is None or at != self._first.get(p))
        reader.seek({partition: self._stood[partition] for partition in moved if partition in here})

    # --- the reader's contract ----------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        if self.reader.resumes:
            return self.reader.poll(max_messages, deadline)
        if self._alone:
            self._stood = self.reader.positions()
        return self._drive(lambda: self._pause_again(self.reader.poll(max_messages, deadline)))

    def poll_columns(self, max_messages: int, deadline: Deadline) -> list[MessageColumns]:
        """Return what the reader's `poll_columns` returns. Without an error `interrupted` is True afterwards.

        The caller sets it to False, by plain assignment right before it returns the columns.
        """
        self._stood = self.reader.positions()
        self.interrupted = True
        try:
            if self._to_pause:  # these columns would need a change like that of `_pause_again`
                return super().poll_columns(max_messages, deadline)
            return self.reader.poll_columns(max_messages, deadline)
        except TxnBridgeError:
            self.interrupted = False
            raise

    def _pause_again(self, messages: list[Message]) -> list[Message]:
        if not self._to_pause:
            return messages
        here = self._to_pause & self.reader.positions().keys()
        self.reader.pause(sorted(here))
        back: dict[Partition, list[Position]] = {}
        for message in messages:
            if (message.topic, message.partition) in here:
                back.setdefault((message.topic, message.partition), []).append(message.position)
        if self._subscription.sharing == "partition":
            self.reader.rewind({partition: positions[0] for partition, positions in back.items()})
        else:
            self.reader.nack(back)
        self._to_pause -= here
        return [message for message in messages if (message.topic, message.partition) not in here]

    def positions(self) -> dict[Partition, Position]:
        if self.interrupted:
            return dict(self._stood)
        return self.reader.positions()

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        if self.interrupted:
            self._stood = {**self._stood, **positions} if self._alone else {}
            self.mend()
        self._drive(lambda: self.reader.seek(positions))
        self._first = {partition: at for partition, at in self._first.items() if partition not in positions}

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        self._drive(lambda: self.reader.rewind(positions))

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        if self.interrupted:
            self._stood = {}
            self.mend()
        self._drive(lambda: self.reader.seek_to_time(timestamp, deadline))
        if self._alone:
            self._since, self._first = timestamp, self.reader.positions()

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._drive(lambda: self.reader.pause(partitions))
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        waiting = self._to_pause.intersection(partitions)
        self._drive(lambda: self.reader.resume([each for each in partitions if each not in waiting]))
        self._paused.difference_update(partitions)
        self._to_pause -= waiting

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        self._drive(lambda: self.reader.nack(positions))

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        return self._drive(lambda: self.reader.lag(deadline))

    def group_lag(self, deadline: Deadline) -> int | None:
        return self.reader.group_lag(deadline)

    def ack_context(self) -> object:
        return self._drive(self.reader.ack_context)

    def close(self, deadline: Deadline) -> None:
        self.reader.close(deadline)


class _ReaderEvents:
    """Forwards a reader's assignments to the consumer until `leave`, which reports its partitions as lost."""

    def __init__(self, listener: ReaderListener) -> None:
        self.listener = listener
        self._assigned: set[Partition] = set()
        self._over = False

    def leave(self) -> None:
        """Report all partitions of this reader as lost, and ignore its later reports."""
        self._over = True
        if self._assigned:
            self.listener.lost(sorted(self._assigned))
        self._assigned.clear()

    def assigned(self, partition: Partition) -> object:
        if self._over:
            return None
        self._assigned.add(partition)
        return self.listener.assigned(partition)

    def revoking(self, partitions: Sequence[Partition]) -> None:
        if not self._over:
            self.listener.revoking(partitions)
            self._assigned.difference_update(partitions)

    def lost(self, partitions: Sequence[Partition]) -> None:
        if not self._over:
            self.listener.lost(partitions)
            self._assigned.difference_update(partitions)
