"""`LoopFunctions`: runs coroutine functions of the application on its event loop, for threads of txnbridge."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, TypeVar, cast

import anyio
from anyio import CancelScope
from anyio.from_thread import BlockingPortal

from txnbridge.errors import InvalidOption

R = TypeVar("R")

# The interval at which a thread that waits for a function checks whether the block has ended.
_LOOK_SECONDS = 1.0

_CANCELLED = Exception()  # instead of the error of a cancelled function


class LoopFunctions:
    """Runs functions on the event loop on which it was entered; threads call them, and wait for them."""

    def __init__(self) -> None:
        self._portal: BlockingPortal | None = None
        self._scopes: set[CancelScope] = set()  # one for each function that runs
        self._ended = False

    async def __aenter__(self) -> LoopFunctions:
        self._portal = BlockingPortal()
        await self._portal.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Wait for the functions that run; refuse further ones."""
        assert self._portal is not None
        try:
            await self._portal.__aexit__(None, None, None)
        finally:
            self._ended = True

    async def cancel_all(self) -> None:
        """Cancel the functions that run, and refuse further ones."""
        assert self._portal is not None
        await self._portal.stop(cancel_remaining=True)

    def call(self, cancelled: Callable[[], Exception], function: Callable[..., Awaitable[R]], *arguments: Any) -> R:
        """Run a function on the loop, from a thread. Raise `cancelled()` if it was cancelled."""
        assert self._portal is not None
        try:
            result, error = self._result(self._portal.start_task_soon(self._outcome, function, *arguments))
        except CancelledError:  # the block on the loop was cancelled
            result, error = None, _CANCELLED
        if error is not None:
            raise cancelled() if error is _CANCELLED else error
        return cast(R, result)

    def _result(self, future: Future[R]) -> R:
        """Return a function's result once it has one. Raise `CancelledError` if the block ends without running it."""
        while not self._ended:
            with suppress(FutureTimeout):
                return future.result(_LOOK_SECONDS)
        if future.done():
            return future.result()
        raise CancelledError

    async def _outcome(
        self, function: Callable[..., Awaitable[R]], *arguments: Any
    ) -> tuple[R | None, Exception | None]:
        """Return the result or the error of a function, whose traceback then begins with the application's frames."""
        with CancelScope() as scope:
            self._scopes.add(scope)
            try:
                result, error = await function(*arguments), None
            except Exception as caught:
                result, error = None, caught
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                result, error = None, RuntimeError("a task that the function awaited was cancelled")
            finally:
                self._scopes.discard(scope)
        return (None, _CANCELLED) if scope.cancel_called else (result, error)

    def cancel_at(self, at: float) -> None:
        """Cancel the functions that run at the time `at` of `time.monotonic`. Any thread may call this."""
        with suppress(RuntimeError):  # the block has ended
            assert self._portal is not None
            self._portal.start_task_soon(self._cancel_later, at)

    async def _cancel_later(self, at: float) -> None:
        await anyio.sleep(max(0.0, at - time.monotonic()))
        for scope in list(self._scopes):
            scope.cancel()


def require_async(setting: str, function: Any) -> None:
    """Raise `InvalidOption` unless a function of the application is an `async def`."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(called):
        raise InvalidOption(f"{setting}= is an `async def`; plain functions are for the bridge of txnbridge.connect()")
