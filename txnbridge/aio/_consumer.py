"""`Consumer`: reads committed messages, for a task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import txnbridge
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Batch, Message
from txnbridge.aio._calls import Call, ClosedByBlock, OneCall, delegated
from txnbridge.errors import Poison
from txnbridge.spi import Partition

R = TypeVar("R")

# A poll whose task was cancelled ends within this time, for which the next call waits. Four polls per second cost an
# idle consumer no measurable time.
_STEP_SECONDS = 0.25


class _Endless(AsyncIterator[R]):
    """Iterates without end. Trio would warn of a generator that is left by `break`."""

    def __init__(self, following: Callable[[], Awaitable[R]]) -> None:
        self._following = following

    async def __anext__(self) -> R:
        return await self._following()


class Consumer(ClosedByBlock):
    """Reads committed messages only, each partition in order; for one task at a time.

    If a task is cancelled while it polls, the next poll returns the messages that were fetched.
    """

    def __init__(self, sync: txnbridge.Consumer) -> None:
        self._sync = sync
        self._calls = OneCall(repr(sync))
        self._timeout = sync._connection.timeout  # also the time for which a call waits for a cancelled one

    async def poll(self, max_messages: int = 500, timeout: float = 1.0) -> Batch:
        """Return up to `max_messages` as soon as there is one; an empty batch if none came within `timeout` seconds.

        Raise `Poison` for a message that its codec cannot decode, after all messages before it were returned; the next
        poll continues after it. Raise `PositionLost` if retention has deleted the group's next message,
        `OutcomeUnknown` while the outcome of the transaction that acknowledged the last messages is not known. A poll
        that raises an error skips no message.
        """
        deadline = Deadline(timeout)

        def poll(hurry: Callable[[], bool]) -> Batch:
            while True:
                batch = self._sync._poll(max_messages, min(deadline.left(), _STEP_SECONDS))
                if batch or deadline.expired or hurry():
                    return batch

        return await self._read(poll)

    def batches(self, max_messages: int = 500, max_wait: float = 1.0) -> AsyncIterator[Batch]:
        """Yield non-empty batches without end; wait up to `max_wait` seconds for each batch to become full."""
        return _Endless(partial(self._next_batch, max_messages, max_wait))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages without end; each takes a call to a thread, so that `batches` is faster."""
        return _Endless(self._next_message)

    async def _next_batch(self, max_messages: int, max_wait: float) -> Batch:
        while True:
            if batch := await self._read(partial(self._sync._fill, max_messages, max_wait, _STEP_SECONDS)):
                return batch

    async def _next_message(self) -> Message:
        while True:
            for message in await self._read(lambda _: self._sync._next(_STEP_SECONDS)):
                return message

    async def _read(self, read: Callable[[Callable[[], bool]], Batch]) -> Batch:
        """Call `read` in a thread, with a function that returns whether this task was cancelled; return its batch.

        If the task is cancelled before it has the batch, or a `Poison`, the next call repeats it (hazard H111).
        """

        def batch_or_poison() -> Batch | Poison:
            try:
                return read(lambda: call.runs_behind)
            except Poison as error:
                self._sync._deliveries.on_the_way = [error.message]
                return error

        call = Call(batch_or_poison, patience=self._timeout)
        self._calls.refuse_beside_another("poll")
        found = await self._calls.run(call)
        self._sync._received()
        if isinstance(found, Poison):
            raise found
        return found

    async def assignment(self) -> list[Partition]:
        """Return the partitions that are assigned to this consumer now."""
        return await self._run("assignment", lambda: self._sync.assignment)

    positions: Final = delegated(txnbridge.Consumer.positions)
    seek: Final = delegated(txnbridge.Consumer.seek)
    pause: Final = delegated(txnbridge.Consumer.pause)
    resume: Final = delegated(txnbridge.Consumer.resume)
    lag: Final = delegated(txnbridge.Consumer.lag)
    nack: Final = delegated(txnbridge.Consumer.nack)

    async def _run(self, name: str, function: Callable[[], R]) -> R:
        self._calls.refuse_beside_another(name)
        return await self._calls.run(Call(function, patience=self._timeout))

    async def close(self, timeout: float | None = None) -> None:
        """Leave the group: other members take over at once, and get the unacknowledged messages.

        Closing takes at most `timeout` seconds, by default the bridge's timeout; a cancelled call ends in its thread.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)

        def close() -> None:
            self._sync.close(None if call.runs_behind else deadline.left())

        call = Call(close, must_run=True, patience=deadline.seconds)
        await self._calls.run(call)

    def __repr__(self) -> str:
        return repr(self._sync)
