"""`Transaction`: one transaction of messages, for a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

import anyio.lowlevel
from anyio import CancelScope

import txnbridge
from txnbridge._base.token import Outcome, State
from txnbridge._base.topic import Topic
from txnbridge._process.handler import loggable
from txnbridge.aio._calls import Call, EndedByBlock, Threads, delegated, delegated_property, teller
from txnbridge.errors import Abort, DeadlineExceeded, InvalidOption

_log = logging.getLogger("txnbridge")

R = TypeVar("R")


class Transaction(EndedByBlock):
    """Sends and acknowledgements that take effect together or not at all; for one task at a time.

    The end of an `async with` block commits the transaction (or prepares it, with `prepare=True`); an exception in the
    block, also a cancellation, aborts it, and `raise Abort` aborts it without an exception outside the block.

    If a task is cancelled while its commit runs, the commit goes on in its thread. Until its end `outcome` is UNKNOWN,
    then the true outcome; `settle` waits for this end.
    """

    _sync: txnbridge.Transaction

    id: Final[str] = delegated_property(txnbridge.Transaction.id)
    state: Final[State] = delegated_property(txnbridge.Transaction.state)
    deadline: Final[float] = delegated_property(txnbridge.Transaction.deadline)
    token: Final[txnbridge.Token | None] = delegated_property(txnbridge.Transaction.token)

    async def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> None:
        """Add one message to the transaction. Wait while the broker is slow, but not beyond the transaction's deadline.

        `timestamp` is in milliseconds since 1970, or a datetime with a time zone; the default is now.

        Raise `NotFound` if the topic does not exist, `InvalidOption` for a message that cannot be sent: the transaction
        stays usable. After any other error it can only be aborted.
        """
        if self._calls.is_free and self._sync._send_from_loop(topic, value, key, headers, partition, timestamp):
            await anyio.lowlevel.checkpoint()
            return
        send = partial(
            self._sync.send, topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp
        )
        await self._run("send", send)

    async def send_many(self, topic: str | Topic, items: Iterable[Any]) -> None:
        """Add many messages for one topic; each item is a value, (value, key) or (value, key, headers).

        This is faster than a `send` for each message. A generator runs in a thread.

        Raise the errors of `send`, with the number of the item. After any error the transaction can only be aborted,
        because the items before the failing one were taken already.
        """
        if not isinstance(items, Iterable):
            raise InvalidOption(f"send_many takes a list or another iterable, not {type(items).__name__}")
        await self._run("send_many", partial(self._sync.send_many, topic, items))

    ack: Final = delegated(txnbridge.Transaction.ack)
    ack_up_to: Final = delegated(txnbridge.Transaction.ack_up_to)

    async def _run(self, name: str, function: Callable[[], R]) -> R:
        self._calls.refuse_beside_another(name)
        return await self._calls.run(Call(function, patience=self._patience), *self._limit())

    def _limit(self) -> tuple[Threads | None, float]:
        """Return the threads for a call, and how long it may wait for one.

        A call of a transaction that waits for group commit may wait for a writer. Calls of the transactions that have
        the writers must not wait for its thread, so they are not limited: there are no more of them than writers
        (hazard H112).
        """
        return (None, 0.0) if self._sync._has_writer else (self._threads, self._sync.deadline)

    async def commit(self) -> None:
        """Commit the transaction now; return only after the broker has confirmed the commit.

        Raise `TransactionAborted` (or a subclass) if it was aborted, `Fenced` if a newer owner has opened the
        transactional id, or `OutcomeUnknown` with the token by which to ask for the outcome later.
        """
        self._calls.refuse_beside_another("commit")
        await self._run_commit(Call(self._sync.commit, undo=self._end_behind, patience=self._patience))

    async def abort(self) -> None:
        """Abort the transaction now. A failed transaction allows only this call. A second abort has no effect."""
        self._calls.refuse_beside_another("abort")
        await self._run_end(self._last_call(self._sync.abort))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            return await self._abort_after(error)
        end = Call(partial(self._sync.__exit__, None, None, None), undo=self._end_behind, patience=self._patience)
        try:
            await self._run_commit(end)
        except BaseException as cancelled:
            if end.withdrawn:  # nothing was requested from the broker yet
                await self._abort_after(cancelled)
            raise
        return False

    async def _abort_after(self, error: BaseException) -> bool:
        """Abort because of an exception in the block; a cancellation waits for the end of the abort."""
        if self._ends_behind:
            return isinstance(error, Abort)
        leave = partial(self._sync.__exit__, type(error), error, None)
        with CancelScope(shield=True):
            try:
                await self._run_end(self._last_call(leave))
            except DeadlineExceeded as late:
                if isinstance(error, Abort):
                    raise
                _log.warning("transaction %s is aborted later: %s", self.id, late)
        return isinstance(error, Abort)

    def _last_call(self, function: Callable[[], R]) -> Call[R]:
        return Call(function, undo=self._end_behind, must_run=True, patience=self._patience)

    async def _run_end(self, call: Call[R], threads: Threads | None = None, seconds: float = 0.0) -> R:
        """Run a call that ends the transaction; `Bridge.close` does not abort it meanwhile (hazard H110)."""
        self._end = call
        self._sync._is_ending = True
        try:
            return await self._calls.run(call, threads, seconds)
        finally:
            self._sync._is_ending = call.runs_behind

    async def _run_commit(self, call: Call[Any]) -> None:
        """Run a call that commits; a transaction in group commit needs no thread if its batch is committed."""
        if self._calls.is_free and await self._is_committed_by_batch(call):
            call.function()  # on the event loop, because it needs memory only
        else:
            await self._run_end(call, *self._limit())

    async def _is_committed_by_batch(self, call: Call[Any]) -> bool:
        """Join a batch of group commit and wait for its end; return whether it was committed, False without a batch.

        If the task is cancelled, and the batch has begun, `call` goes on in a thread.
        """
        sync, ended = self._sync, anyio.Event()
        if not sync._commit_from_loop(teller(ended)):
            return False
        self._end = call
        sync._is_ending = True
        with self._calls.others_refused(call):
            try:
                with anyio.move_on_after(sync.deadline):
                    await ended.wait()
            except BaseException:
                if sync._taken.withdraw():
                    call.withdraw()
                else:
                    call.run_behind()
                sync._is_ending = call.runs_behind
                raise
        return sync._taken.is_committed

    def _end_behind(self, _: object) -> None:
        """In a thread, abort the transaction if a call of a cancelled task left it open, and log the outcome."""
        sync = self._sync
        if sync.state in (State.OPEN, State.FAILED):
            abort_quietly(sync)
        level = logging.INFO if sync.outcome is not Outcome.UNKNOWN else logging.WARNING
        token = "" if sync.token is None else f", token {sync.token}"
        _log.log(level, "transaction %s is %s; its task was cancelled meanwhile%s", sync.id, sync.state.value, token)


def abort_quietly(transaction: txnbridge.Transaction | None) -> None:
    """Abort a transaction, if there is one, whose task was cancelled; log an error, because nobody would get it."""
    if transaction is None:
        return
    try:
        transaction.abort()
    except Exception as error:
        _log.warning("transaction %s: abort failed after a cancellation: %s", transaction.id, loggable(error))
