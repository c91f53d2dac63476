"""Cancelling a program at each of its calls, and telling what became of it."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import anyio.lowlevel
from anyio import from_thread

import txnbridge
from txnbridge.aio import _calls
from txnbridge.sql._database import DatabaseThread

# Far more than anything takes, also on a busy machine.
SOON = 60.0

# The moments of a call at which its task can be cancelled.
MOMENTS = ("before", "queued", "running", "ended")


async def undecided(*_: object) -> txnbridge.Decision:
    return txnbridge.Decision.UNDECIDED


async def until(condition: Callable[[], object]) -> None:
    pause = 0.0005
    with anyio.fail_after(SOON):
        while not condition():
            await anyio.sleep(pause := min(2 * pause, 0.02))  # some conditions open a bridge


async def cancelled_when(condition: Callable[[], object], program: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run a program, and cancel it once this is true."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(program)
        await until(condition)
        tasks.cancel_scope.cancel()


def values(url: str, topic: str) -> list[bytes]:
    """Return the values that a reader without an event loop finds."""
    with txnbridge.connect(url) as bridge:
        return [message.value for message in bridge.read(topic, 1000)]


def in_txnbridge(beside: Collection[threading.Thread] = ()) -> list[str]:
    """The threads, other than this one and those, that run code of ours now."""
    found = []
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread not in beside}
    for ident, frame in sys._current_frames().items():
        idle = frame.f_code is DatabaseThread._run.__code__  # of databases: it waits for the next work
        at: Any = frame if ident in names and ident != threading.get_ident() and not idle else None
        while at is not None:
            if str(at.f_globals.get("__name__")).startswith("txnbridge"):
                found.append(f"{names[ident]} in {at.f_code.co_name}")
                break
            at = at.f_back
    return found


class Cancelling:
    """Cancels a program at one moment of its call number `target`; the calls of a cleanup under a shield count, too."""

    def __init__(self, monkeypatch: Any, target: int, moment: str, natively: bool = False) -> None:
        self.reached = False
        self._left = target
        self._moment = moment
        self._natively = natively
        self._run = _calls.Call.run
        count = self._count

        async def run(call: Any, *previous: Any) -> Any:
            return await count(call, *previous)

        monkeypatch.setattr(_calls.Call, "run", run)

    async def run(self, program: Callable[[], Awaitable[object]]) -> None:
        """Run a program, which must let the cancellation pass."""
        if not self._natively:
            with anyio.CancelScope() as self._scope:
                await program()
                await anyio.lowlevel.checkpoint()  # if the program ended under a shield
            assert self._scope.cancelled_caught == self.reached
            return
        self._task = asyncio.ensure_future(program())
        await asyncio.wait([self._task])
        if self.reached:
            assert self._task.cancelled() or self._task.exception() is None
        else:
            self._task.result()

    def _cancel(self) -> None:
        self.reached = True
        if self._natively:
            self._task.cancel()
        else:
            self._scope.cancel()

    def _cancel_from_thread(self, left: threading.Event) -> None:
        """Cancel the program, and wait until its task has left the call; under a shield it stays."""
        from_thread.run_sync(self._cancel)
        for _ in range(10):
            if not left.is_set():
                from_thread.run_sync(lambda: None)  # another turn of the loop

    async def _count(self, call: Any, *previous: Any) -> Any:
        self._left -= 1
        if self._left:
            return await self._run(call, *previous)
        left = threading.Event()
        getattr(self, f"_cancel_{self._moment}")(call, left)
        try:
            return await self._run(call, *previous)
        finally:
            left.set()

    def _cancel_before(self, call: Any, left: threading.Event) -> None:
        self._cancel()

    def _cancel_queued(self, call: Any, left: threading.Event) -> None:
        """The thread has the call, and has not begun it."""
        self._cancel_first(call, "_work", left)

    def _cancel_running(self, call: Any, left: threading.Event) -> None:
        self._cancel_first(call, "function", left)

    def _cancel_first(self, call: Any, name: str, left: threading.Event) -> None:
        work = getattr(call, name)

        def cancelled_first() -> Any:
            self._cancel_from_thread(left)
            return work()

        setattr(call, name, cancelled_first)

    def _cancel_ended(self, call: Any, left: threading.Event) -> None:
        work = call._work

        def cancelled_last() -> Any:
            try:
                return work()
            finally:
                self._cancel_from_thread(left)

        call._work = cancelled_last
