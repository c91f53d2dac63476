"""`EventLoop`: runs the asynchronous function of one handler, in the thread of its processor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, TypeVar, cast

from txnbridge.errors import TransactionAborted

_log = logging.getLogger("txnbridge")

R = TypeVar("R")

# The time that the tasks left by a function have for ending when the loop is closed.
_CLOSE_SECONDS = 1.0


async def _outcome(coroutine: Coroutine[Any, Any, R]) -> tuple[R | None, Exception | None]:
    """Return the result of a coroutine, or its error, whose traceback then has no frames of asyncio."""
    try:
        return await coroutine, None
    except Exception as error:
        return None, error


class EventLoop:
    """An event loop of one handler: it runs while a call of the handler runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end. Raise `TransactionAborted` if a stop has cancelled it."""
        task = self._task = self._loop.create_task(_outcome(coroutine))
        try:
            result, error = self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            if not self._cancelled:
                raise RuntimeError("a task that the handler awaited was cancelled") from None
        finally:
            self._task = None
        if self._cancelled:  # also if the coroutine has caught the cancellation and returned
            raise TransactionAborted("the handler was cancelled: it did not end in the time of the stop")
        if error is not None:
            raise error
        return cast(R, result)

    @contextmanager
    def opened(self, block: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Enter an async context manager on the loop, and leave it at the end of the `with` block, in the same task."""
        value: asyncio.Future[R] = self._loop.create_future()
        ended = asyncio.Event()

        async def hold() -> None:
            async with block as entered:
                value.set_result(entered)
                await ended.wait()

        task = self._loop.create_task(hold())
        waits: list[asyncio.Future[Any]] = [value, task]
        self._loop.run_until_complete(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
        if task.done():
            task.result()  # raises the error of the block's beginning
        try:
            yield value.result()
        finally:
            if self._loop.is_running():
                _log.warning("a lifespan is not closed, because its handler still runs")
            else:
                ended.set()
                self._loop.run_until_complete(task)

    def cancel_at(self, at: float) -> None:
        """Cancel the call that runs at the time `at` of `time.monotonic`. Any thread may call this."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(
                lambda: self._loop.call_later(max(0.0, at - time.monotonic()), self._cancel)
            )

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled = self._task.cancel()

    def close(self) -> None:
        """Cancel tasks that are left, and close the loop; leave it as it is if a handler that hangs still runs."""
        if self._loop.is_running():
            return
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_SECONDS))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
