"""Half messages for tasks: `execute` and `check` are coroutine functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from anyio import CancelScope

import txnbridge
from txnbridge._base.token import Decision
from txnbridge.aio._calls import Call, EndedByBlock, Threads, close_opened, delegated, delegated_property
from txnbridge.aio._loop_functions import LoopFunctions, require_async
from txnbridge.aio._services import Check, check_cancelled
from txnbridge.errors import Abort, DeadlineExceeded, InvalidState, OutcomeUnknown

R = TypeVar("R")

Execute = Callable[["HalfTransaction", Any], Awaitable[Decision]]


class HalfTransaction(EndedByBlock):
    """A transaction of half messages: the end of its block stores the messages, and then does the local work.

    An exception in the block, also a cancellation, drops the messages before they are stored. If a task is cancelled at
    the end of the block, `execute` and the rest go on; until their end `outcome` is UNKNOWN, and `settle` waits for it.
    """

    _sync: txnbridge.HalfTransaction

    id: Final[str] = delegated_property(txnbridge.HalfTransaction.id)
    deadline: Final[float] = delegated_property(txnbridge.HalfTransaction.deadline)

    send: Final = delegated(txnbridge.HalfTransaction.send)
    send_many: Final = delegated(txnbridge.HalfTransaction.send_many)

    async def _run(self, name: str, function: Callable[[], R]) -> R:
        self._calls.refuse_beside_another(name)
        return await self._calls.run(Call(function, patience=self._patience))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            return await self._drop_after(error)
        self._end = end = Call(partial(self._sync.__exit__, None, None, None), patience=self._patience)
        try:
            await self._calls.run(end, self._threads, self._sync.deadline)
        except BaseException as cancelled:
            if end.withdrawn:
                await self._drop_after(cancelled)
            raise
        return False

    async def _drop_after(self, error: BaseException) -> bool:
        drop = partial(self._sync.__exit__, type(error), error, None)
        with CancelScope(shield=True), suppress(DeadlineExceeded):  # a call that hangs: nothing is stored anyway
            await self._calls.run(Call(drop, must_run=True, patience=self._patience))
        return isinstance(error, Abort)


class HalfMessages:
    """Sends the half messages of one group, and answers check-backs about them, inside an `async with` block.

    `execute` and `check` run on the event loop of the block, in tasks of their own.
    """

    def __init__(self, make: Callable[..., txnbridge.HalfMessages], execute: Execute, check: Check, size: int) -> None:
        require_async("execute", execute)
        require_async("check", check)
        self._execute = execute
        self._functions = LoopFunctions()
        self._make = partial(
            make, execute=self._run_execute, check=partial(self._functions.call, check_cancelled, check)
        )
        self._threads = Threads(size)  # apart from those of the bridge, which `execute` may need
        self._sync: txnbridge.HalfMessages | None = None

    def transaction(self, arg: Any = None, *, timeout: float | None = None) -> HalfTransaction:
        """Begin a transaction, for an `async with` block. At its end `await execute(txn, arg)` does the local work."""
        if self._sync is None:
            raise InvalidState("half messages are sent inside `async with bridge.half_messages(…) as …`")
        return HalfTransaction(self._sync.transaction(arg, timeout=timeout), self._threads)

    def _run_execute(self, sync: txnbridge.HalfTransaction, arg: Any) -> Decision:
        text = "execute was cancelled, because the block of its half messages ends; check is asked"
        cancelled = partial(OutcomeUnknown, text)
        return self._functions.call(cancelled, self._execute, HalfTransaction(sync, self._threads), arg)

    async def __aenter__(self) -> HalfMessages:
        await self._functions.__aenter__()
        try:
            self._sync = await Call(self._make, undo=close_opened).run()
        except BaseException:
            await self._functions.cancel_all()
            await self._functions.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop answering check-backs, and wait for `execute` and `check` functions that run."""
        assert self._sync is not None
        try:
            with CancelScope(shield=True):
                await Call(self._sync.close, must_run=True).run()
        except BaseException:  # the task was cancelled once more by `task.cancel()`
            await self._functions.cancel_all()
            raise
        finally:
            await self._functions.__aexit__()
