"""Calls of the synchronous interface in worker threads, by tasks that may be cancelled at any time.

A cancelled task raises the cancellation at once, but a thread cannot be interrupted:

| the cancellation comes           | the function                  | `undo`, which is called with its result |
|----------------------------------|-------------------------------|-----------------------------------------|
| before the function begins       | never runs (see `must_run`)   | is not called                           |
| while the function runs          | runs to its end in its thread | is called afterwards in the same thread |
| after its end, before its result | has run                       | is called in another thread             |
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from functools import partial, wraps
from operator import attrgetter
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread

from txnbridge._base.token import Outcome
from txnbridge._process.handler import loggable
from txnbridge.errors import DeadlineExceeded, InvalidState

_log = logging.getLogger("txnbridge")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

# A cancelled call of the broker ends by the transaction's deadline, and needs a moment more for that.
_GRACE_SECONDS = 1.0

# By event loop, because a limiter belongs to one.
_unlimited: WeakKeyDictionary[Any, CapacityLimiter] = WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class Call(Generic[R]):
    """A call of one function in a worker thread, for one task.

    With `must_run` the function also runs if the task is cancelled before it begins, unless no thread can be started.
    With `patience` the call waits for a previous one only so many seconds, and then raises `DeadlineExceeded`, as if
    its task were cancelled.
    """

    function: Callable[[], R]
    _: KW_ONLY
    undo: Callable[[R | None], object] = lambda _: None  # gets None if the function has raised an error
    must_run: bool = False
    patience: float | None = None

    def __post_init__(self) -> None:
        self._result: R | None = None
        self._error: BaseException | None = None
        # Both lists are used as locks without waiting: the thread or the task that removes the only entry decides.
        self._start = [None]  # between the thread that runs the function, and the task that withdraws the call
        self._delivery = [None]  # between the thread that returns the result, and the task that leaves the call behind
        self.withdrawn: bool = False  # whether the function never runs
        self._left_behind = False
        self._previous: Call[Any] | None = None  # has to end before the function begins
        self._done = threading.Lock()  # released when the function has ended, or is withdrawn
        self._done.acquire()
        self._on_done: list[Callable[[], object]] = []  # called then

    @property
    def runs_behind(self) -> bool:
        """True while the function runs on although its task was cancelled."""
        return self._left_behind and not self.is_done

    @property
    def is_done(self) -> bool:
        """True once the function, and its `undo`, have ended; if it never ran, once the previous call is done."""
        return not self._done.locked() and (self._previous is None or self._previous.is_done)

    async def run(self, previous: Call[Any] | None = None) -> R:
        """Run the function after the function of the call `previous`; return its result. Call this only once."""
        self._previous = previous
        try:
            with anyio.move_on_after(self.patience) as wait:
                while previous is not None and not previous.is_done:
                    await previous._wait()
                    previous = previous._previous  # a call that never runs may itself have one
            if wait.cancelled_caught:
                raise DeadlineExceeded(f"an earlier call of a cancelled task still runs after {self.patience:g} s")
            return cast(R, await to_thread.run_sync(self._work, abandon_on_cancel=True, limiter=_no_limit()))
        except BaseException as error:
            if error is not self._error:
                self._leave()
            raise

    def withdraw(self) -> None:
        """Keep the call's function from being run, if it has not begun."""
        if not self._left_behind and _removed(self._start):
            self._never_run()

    def _never_run(self) -> None:
        self.withdrawn = True
        self._finish()

    def _finish(self) -> None:
        self._done.release()
        for tell in self._on_done:
            tell()

    async def _wait(self) -> None:
        """Wait until the function has ended, or is withdrawn, without a thread."""
        ended = anyio.Event()
        self._on_done.append(teller(ended))
        if self._done.locked():  # otherwise the function may have ended before it could set the event
            await ended.wait()

    def run_behind(self) -> bool:
        """Start a thread that runs the function: for a task that was cancelled before `run`. Return False without one.

        Nobody waits for the thread. Its errors are logged.
        """
        if _removed(self._start):
            self._left_behind = _removed(self._delivery)
            self._start.append(None)
            return _in_background(self._work_behind)
        return True

    def _leave(self) -> None:
        """Leave the call to a thread, because its task was cancelled."""
        if self.must_run and self._start:
            if not self.run_behind() and _removed(self._start):
                self._never_run()  # so that later calls do not wait for it
        elif _removed(self._start):
            self._never_run()
        elif _removed(self._delivery):
            self._left_behind = True
        else:
            _in_background(self._undo_behind)

    # --- in a thread ------------------------------------------------------------------------------------------------

    def _work(self) -> R | None:
        if not _removed(self._start):
            return None
        try:
            previous = self._previous
            while previous is not None:
                with previous._done:
                    previous = previous._previous
            self._previous = None
            self._result = self.function()
            return self._result
        except BaseException as error:
            self._error = error
            raise
        finally:
            if not _removed(self._delivery):
                self._undo_behind()
            self._finish()

    def _work_behind(self) -> None:
        with suppress(Exception):  # logged by `_undo_behind`
            self._work()

    def _undo_behind(self) -> None:
        if self._error is not None:
            _log.info("a call whose task was cancelled has failed: %s", loggable(self._error))
        try:
            self.undo(self._result)
        except Exception as error:
            _log.warning("undoing a call whose task was cancelled: %s", loggable(error))


def _in_background(function: Callable[[], object]) -> bool:
    with suppress(RuntimeError):  # an interpreter that is ending starts no threads; it closes all bridges
        threading.Thread(target=copy_context().run, args=(function,), name="txnbridge aio", daemon=True).start()
        return True
    return False


def _this_loop() -> Any:
    """Return the event loop of this task: asyncio's loop, or Trio's token for its loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from trio.lowlevel import current_trio_token

        return current_trio_token()


def teller(event: anyio.Event) -> Callable[[], None]:
    """Return a function by which another thread sets an event of this event loop."""
    loop = _this_loop()
    wake = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def tell() -> None:
        with suppress(RuntimeError):  # the event loop has ended
            wake(event.set)

    return tell


def _no_limit() -> CapacityLimiter:
    """Return this event loop's limiter without a limit, for calls whose threads are not limited."""
    loop = _this_loop()
    if loop not in _unlimited:
        _unlimited[loop] = CapacityLimiter(float("inf"))
    return _unlimited[loop]


def _removed(entry: list[None]) -> bool:
    try:
        entry.pop()
    except IndexError:
        return False
    return True


class OneCall:
    """Runs the calls on one object, such as a transaction: one after the other, each in a worker thread.

    If an earlier call runs on although its task was cancelled, a call first waits for its end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._called = False  # whether a task waits for a call
        self._last: Call[Any] | None = None

    @property
    def is_free(self) -> bool:
        """True if no call runs, also none whose task was cancelled."""
        return not self._called and (self._last is None or self._last.is_done)

    def refuse_beside_another(self, name: str) -> None:
        """Raise `InvalidState` if another task's call runs."""
        if self._called:
            raise InvalidState(f"{name} on {self._name} while another call on it runs: one task at a time")

    @contextmanager
    def others_refused(self, call: Call[Any]) -> Iterator[None]:
        """During the block, which does the work of `call` on the event loop, refuse other tasks' calls."""
        self._called = True
        previous, self._last = self._last, call
        try:
            yield
        finally:
            self._called = False
            if not call.runs_behind:
                self._last = previous

    async def run(self, call: Call[R], threads: Threads | None = None, seconds: float = 0.0) -> R:
        """Run a call in a worker thread, after the object's previous call has ended; return its result.

        With `threads`, the call takes one of these threads. If none becomes free within `seconds`, it runs in an extra
        thread, so that it raises its own error at its deadline.
        """
        self._called = True
        try:
            if threads is None:
                return await self._run(call)
            async with threads.one(seconds):
                return await self._run(call)
        except BaseException:
            call.withdraw()
            raise
        finally:
            self._called = False

    async def _run(self, call: Call[R]) -> R:
        previous, self._last = self._last, call
        while previous is not None and previous.withdrawn:  # there may be very many
            previous = previous._previous
        return await call.run(None if previous is None or previous.is_done else previous)


class _TaskSemaphore:
    """A fair semaphore for the tasks of one event loop.

    Before its version 4.16, anyio's `CapacityLimiter` loses a token if `task.cancel()` comes as the task gets it.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: deque[anyio.Event] = deque()

    async def acquire(self) -> None:
        if self._free:  # then no task waits
            self._free -= 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.release()
            else:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


class Threads:
    """Limits the worker threads that run calls of one kind; further tasks wait on the event loop, in their order."""

    def __init__(self, size: int) -> None:
        self._size = size
        # By event loop, because the events of a semaphore belong to one, and a bridge may be used on several.
        self._semaphores: WeakKeyDictionary[Any, _TaskSemaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def one(self, seconds: float) -> AsyncIterator[bool]:
        """Take a thread for the block, and yield True; yield False if none has become free in `seconds`."""
        semaphore = self._semaphores.setdefault(_this_loop(), _TaskSemaphore(self._size))
        with anyio.move_on_after(seconds) as wait:
            await semaphore.acquire()
        taken = not wait.cancelled_caught
        try:
            yield taken
        finally:
            if taken:
                semaphore.release()

    async def run(self, call: Call[R], seconds: float) -> R:
        """Run a call in one of these threads. Raise `DeadlineExceeded` if none becomes free in `seconds`."""
        async with self.one(seconds) as taken:
            if not taken:
                raise DeadlineExceeded(
                    f"{self._size} calls of other tasks were waiting for {seconds:g} s: start fewer of them at once, or"
                    " connect(…, threads=…) with more"
                )
            return await call.run()


class _Delegating(Protocol):
    """A class whose methods call the methods of a synchronous object."""

    _sync: Any

    async def _run(self, name: str, function: Callable[[], R], /) -> R:
        """Call the function of a method `name` in a worker thread, by the rules of the class."""


def delegated(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[_Delegating, P], Coroutine[Any, Any, R]]:
    """Return the coroutine method that calls `method` of the synchronous object, with its signature and docstring."""

    @wraps(method)
    async def call(self: _Delegating, /, *arguments: P.args, **named: P.kwargs) -> R:
        function = getattr(self._sync, method.__name__)
        return await self._run(method.__name__, partial(function, *arguments, **named))

    call.__module__ = method.__module__.replace("txnbridge.", "txnbridge.aio.", 1)
    return call


def delegated_property(read: Callable[[Any], R]) -> R:
    """Return the property that reads this property of the synchronous object, with its docstring.

    Write its type where it is assigned: Pyright does not take a property of a class for a function, as mypy does.
    """
    shown: Any = read
    made: Any = property(attrgetter(f"_sync.{shown.fget.__name__}"), doc=shown.__doc__)
    return made  # type: ignore[no-any-return]


class EndedByBlock:
    """Base of transactions for one task, which the end of an `async with` block ends."""

    def __init__(self, sync: Any, threads: Threads) -> None:
        self._sync = sync
        self._threads = threads  # for calls that may wait for a writer
        self._calls = OneCall(f"transaction {sync.id}")
        self._end: Call[Any] | None = None  # the last call that ends the transaction

    @property
    def _ends_behind(self) -> bool:
        return self._end is not None and self._end.runs_behind

    @property
    def outcome(self) -> Outcome | None:
        """The transaction's outcome; None before its end, and while it is prepared.

        UNKNOWN also while its end goes on in a thread, because the task was cancelled.
        """
        ends_behind = self._ends_behind  # read first: the outcome is there before this call has ended
        outcome: Outcome | None = self._sync.outcome
        return Outcome.UNKNOWN if outcome is None and ends_behind else outcome

    @property
    def _patience(self) -> float:
        """For how long a call waits for the end of one whose task was cancelled."""
        return float(self._sync.deadline) + _GRACE_SECONDS

    def __repr__(self) -> str:
        return repr(self._sync)

    async def settle(self) -> Outcome | None:
        """Wait for a call that goes on in its thread because its task was cancelled; return the outcome."""
        await self._calls.run(Call(lambda: None))
        return self.outcome

    async def __aenter__(self) -> Self:
        self._sync.__enter__()
        return self


B = TypeVar("B", bound=AbstractAsyncContextManager[Any])


class ClosedByBlock:
    """Base of objects that are closed at the end of an `async with` block, even if the task is cancelled."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(self, *_: object) -> None:
        with CancelScope(shield=True):
            await self.close()


def close_opened(opened: Any) -> None:
    """Close what a call has opened for a task that was cancelled meanwhile."""
    if opened is not None:
        opened.close()


class Opening(Generic[B]):
    """An object that is opened by `async with`, which closes it at the end of its block, or by `await`."""

    def __init__(self, coroutine: Coroutine[Any, Any, B]) -> None:
        self._coroutine = coroutine
        self._opened: B | None = None

    def __await__(self) -> Generator[Any, Any, B]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> B:
        self._opened = await self._coroutine
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)
