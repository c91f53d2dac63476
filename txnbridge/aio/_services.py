"""`LoopService`, and the resolvers and relays of an event loop: loops that work in a thread until they are stopped."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

import txnbridge
from txnbridge._base.messages import Message
from txnbridge._base.token import Decision
from txnbridge._half.resolver import ResolverStats
from txnbridge._process.handler import loggable
from txnbridge.aio._calls import Call
from txnbridge.aio._loop_functions import LoopFunctions, require_async
from txnbridge.errors import InvalidState, OutcomeUnknown

if TYPE_CHECKING:
    from txnbridge.sql.relay import Relay as SyncRelay
    from txnbridge.sql.relay import RelayStats

_log = logging.getLogger("txnbridge")

S = TypeVar("S", bound="LoopService")

Check = Callable[[str, Sequence[Message]], Awaitable[Decision]]


class LoopService:
    """Base of services that work in a thread, and call functions of the application on the event loop.

    A cancellation of `run`, or of the service's `async with` block, stops the service, and waits for its end.
    """

    def __init__(self, functions: LoopFunctions) -> None:
        self._functions = functions
        self._started = False
        self._error: BaseException | None = None
        self._tasks: TaskGroup | None = None

    async def _open(self) -> None:
        """Prepare the work; raise an error if that is not possible."""

    def _work(self, until_idle: bool) -> None:
        """Work until `stop`; a processor with `until_idle` until all is read. Runs in a thread."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask for a stop after the current step. Return at once; any thread or task may call this."""
        raise NotImplementedError

    async def run(self) -> None:
        """Work until `stop`, or until the task is cancelled."""
        await self._run(until_idle=False)

    async def _run(self, until_idle: bool) -> None:
        await self._begin()
        ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._serve, until_idle, ended)
            try:
                await ended.wait()
            except BaseException:
                self.stop()
                raise
        if self._error is not None:
            raise self._error

    async def _begin(self) -> None:
        if self._started:
            raise InvalidState(f"{self!r} runs once; make another one")
        self._started = True
        await self._open()

    async def _serve(self, until_idle: bool, ended: anyio.Event) -> None:
        """Work in a thread; a cancellation of the task ends neither the work nor the functions of the application."""
        with CancelScope(shield=True):
            async with self._functions:
                try:
                    await Call(partial(self._work, until_idle)).run()
                except Exception as error:
                    self._error = error
                except BaseException:  # the event loop itself ends
                    self.stop()
                    raise
                finally:
                    ended.set()
                    await self._functions.cancel_all()

    async def __aenter__(self: S) -> S:
        """Work until the end of the block, which raises the error that has ended the work, if any."""
        await self._begin()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._serve, False, anyio.Event())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self.stop()
        await self._tasks.__aexit__(None, None, None)  # not with the error, which a group would wrap
        if self._error is not None:
            if error is None:
                raise self._error
            _log.error("%r ended with an error, and so did its block: %s", self, loggable(self._error))


class Resolver(LoopService):
    """Calls `await check(transaction_id, messages)` for undecided half messages, and ends them by its answers.

    It is run by `await resolver.run()` or `async with resolver`.
    """

    def __init__(self, make: Callable[[Callable[..., Decision]], txnbridge.Resolver], check: Check) -> None:
        super().__init__(LoopFunctions())
        require_async("check", check)
        self._make = partial(make, partial(self._functions.call, check_cancelled, check))
        self._sync: txnbridge.Resolver | None = None
        self._stopped = False

    async def _open(self) -> None:
        self._sync = await Call(self._make).run()

    def _work(self, until_idle: bool) -> None:
        assert self._sync is not None
        if not self._stopped:
            self._sync.run()

    def stop(self) -> None:
        """Ask for a stop; running checks end first. Return at once; any thread or task may call this."""
        self._stopped = True
        if self._sync is not None:
            self._sync.stop()

    @property
    def stats(self) -> ResolverStats:
        """Counts of the resolver's work so far."""
        return ResolverStats() if self._sync is None else self._sync.stats

    @property
    def healthy(self) -> bool:
        """True if the resolver runs, the broker has answered within the bridge's timeout, and not all checks hang."""
        return self._sync is not None and self._sync.healthy


def check_cancelled() -> OutcomeUnknown:
    return OutcomeUnknown("check was cancelled, because its event loop ends; another resolver will call it")


class Relay(LoopService):
    """Publishes the rows of an outbox exactly once; run by `await relay.run()` or `async with relay`."""

    def __init__(self, sync: SyncRelay) -> None:
        super().__init__(LoopFunctions())
        self._sync = sync

    def _work(self, until_idle: bool) -> None:
        self._sync.run()

    def stop(self) -> None:
        """Ask for a stop after the running batch. Return at once; any thread or task may call this."""
        self._sync.stop()

    @property
    def stats(self) -> RelayStats:
        """Counts of the relay's work so far."""
        return self._sync.stats

    @property
    def healthy(self) -> bool:
        """True if the relay runs, and broker and database have answered within the bridge's timeout."""
        return self._sync.healthy

    async def lag(self) -> int:
        """Return how many rows of the outbox wait to be published; refused ones do not. Each call asks the database."""
        return await Call(lambda: self._sync.lag).run()
