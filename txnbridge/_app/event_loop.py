"""`EventLoop`: runs the asynchronous function of one handler, in the thread of its processor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from threading import Thread
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
    """An event loop of one handler.

    It runs while a call of the handler runs, in the calling thread. With `runs_always` it runs in a thread of its own
    until it is closed: many threads may call at once, and tasks of a lifespan run between two calls.
    """

    def __init__(self, runs_always: bool = False) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[asyncio.Task[Any] | Future[Any]] = set()
        self._cancelled = self._stopped = False
        self._thread: Thread | None = None
        if runs_always:
            self._thread = Thread(target=self._run_always, name="txnbridge event loop", daemon=True)
            self._thread.start()

    def _run_always(self) -> None:
        """Run the loop until `close` stops it. A task that exits the program ends `run_forever`, and only that task."""
        while not self._stopped:
            with suppress(KeyboardInterrupt, SystemExit):  # the result of the task, for the thread that waits for it
                self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end. Raise `TransactionAborted` if a stop has cancelled it."""
        call: asyncio.Task[Any] | Future[Any]
        if self._thread is None:
            call = self._loop.create_task(_outcome(coroutine))
        else:
            call = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop)
        self._calls.add(call)
        try:
            result, error = call.result() if isinstance(call, Future) else self._loop.run_until_complete(call)
        except (asyncio.CancelledError, CancelledError):
            if not self._cancelled:
                raise RuntimeError("a task that the handler awaited was cancelled") from None
        finally:
            self._calls.discard(call)
        if self._cancelled:  # also if the coroutine has caught the cancellation and returned
            raise TransactionAborted("the handler was cancelled: it did not end in the time of the stop")
        if error is not None:
            raise error
        return cast(R, result)

    def _complete(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._thread is None:
            return self._loop.run_until_complete(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @contextmanager
    def opened(self, block: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Enter an async context manager on the loop, and leave it at the end of the `with` block, in the same task."""

        async def begin() -> tuple[asyncio.Task[None], asyncio.Event, R]:
            entered: asyncio.Future[R] = self._loop.create_future()
            ended = asyncio.Event()

            async def hold() -> None:
                async with block as value:
                    entered.set_result(value)
                    await ended.wait()

            task = self._loop.create_task(hold())
            waits: list[asyncio.Future[Any]] = [entered, task]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()  # raises the error of the block's beginning
            return task, ended, entered.result()

        async def end() -> None:
            ended.set()
            await task

        task, ended, value = self._complete(begin())
        try:
            yield value
        finally:
            if self._calls:
                _log.warning("a lifespan is not closed, because its handler still runs")
            else:
                self._complete(end())

    def cancel_at(self, at: float) -> None:
        """Cancel the calls that run at the time `at` of `time.monotonic`. Any thread may call this."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(
                lambda: self._loop.call_later(max(0.0, at - time.monotonic()), self._cancel)
            )

    def _cancel(self) -> None:
        for call in list(self._calls):
            self._cancelled |= call.cancel()

    def close(self) -> None:
        """Cancel tasks that are left, and close the loop; leave it as it is if a handler that hangs still runs."""
        if self._calls:
            return
        self._complete(self._end())
        if self._thread is not None:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        await self._loop.shutdown_asyncgens()
