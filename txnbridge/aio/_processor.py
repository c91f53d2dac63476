"""`Processor`: consumes, transforms and produces exactly once, with a handler that is a coroutine function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import txnbridge
from txnbridge._base.messages import Batch, Message
from txnbridge._base.service_stop import leaving_seconds
from txnbridge._process.processor import ProcessorStats
from txnbridge._process.side_by_side import RecordedSends
from txnbridge.aio._calls import Call, Threads, delegated_property
from txnbridge.aio._loop_functions import LoopFunctions, require_async
from txnbridge.aio._services import LoopService
from txnbridge.aio._transaction import Transaction
from txnbridge.errors import TransactionAborted

Each = Callable[[Message, Transaction], Awaitable[object]]
OnBatch = Callable[[Batch, Transaction], Awaitable[object]]


class LoopProcessor(txnbridge.Processor):
    """A processor whose loop runs in a thread, and whose handler runs on the event loop."""

    functions: LoopFunctions

    def _hurry(self, at: float) -> None:
        """Move the transaction's deadline to `at`, and cancel the handler in time for an abort by then."""
        super()._hurry(at)
        self.functions.cancel_at(at - 2 * leaving_seconds(self._stop_timeout))

    def leave_unused(self, _: object) -> None:
        """Leave the processor's group, which was joined for a task that was cancelled meanwhile."""
        if self._inputs is not None:
            self._leave()


class Processor(LoopService):
    """Consumes, transforms and produces exactly once; made by `bridge.processor(inputs, group=…, each=… | batch=…)`.

    The handler, `async def each(message, txn)` or `async def batch(batch, txn)`, runs on the event loop of `run` or of
    the block, inside a transaction. The messages that it sends with `await txn.send(…)`, and the acknowledgement of its
    input, take effect together or not at all. All else is as for `txnbridge.Processor`.

    A stop lets the handler finish; if it takes nearly `stop_timeout`, it is cancelled, and its transaction aborted. If
    the task of `run`, or of the block, is cancelled, the processor stops in the same way, and the task waits for that.
    """

    def __init__(
        self, make: Callable[..., LoopProcessor], threads: Threads, each: Each | None, batch: OnBatch | None
    ) -> None:
        functions = LoopFunctions()
        super().__init__(functions)
        self._threads = threads
        self._lent: Transaction | None = None  # the transaction of the last call of the handler
        self._sync = make(each=each and self._on_loop("each", each), batch=batch and self._on_loop("batch", batch))
        self._sync.functions = functions

    def _on_loop(self, setting: str, handler: Callable[..., Awaitable[object]]) -> Callable[[Any, Any], object]:
        """Return a synchronous handler, for the processor's thread, which runs `handler` on the event loop."""
        require_async(setting, handler)

        def handle(input: Any, sync: txnbridge.Transaction | RecordedSends) -> object:
            if isinstance(sync, RecordedSends):
                return self._functions.call(_handler_cancelled, handler, input, _LoopSends(sync))
            if self._lent is None or self._lent._sync is not sync:
                self._lent = Transaction(sync, self._threads)
            return self._functions.call(_handler_cancelled, handler, input, self._lent)

        return handle

    async def _open(self) -> None:
        await Call(self._sync._begin, undo=self._sync.leave_unused).run()

    def _work(self, until_idle: bool) -> None:
        try:
            self._sync._loop_until_stopped(until_idle)
            if self._sync._stop.forced:
                raise self._sync._late()
        finally:
            self._lent = None

    async def run(self, until_idle: bool = False) -> None:
        """Process messages until stopped; with `until_idle=True` until all assigned partitions are read.

        Raise errors that a retry cannot solve, as `txnbridge.Processor.run` does. Signals are left to the program:
        Ctrl-C cancels the main task, and so stops the processor.
        """
        await self._run(until_idle)

    def stop(self) -> None:
        """Ask the loop to stop after the running transaction. Return at once; any thread or task may call this."""
        self._sync.stop()

    healthy: Final[bool] = delegated_property(txnbridge.Processor.healthy)
    lag: Final[int | None] = delegated_property(txnbridge.Processor.lag)
    stats: Final[ProcessorStats] = delegated_property(txnbridge.Processor.stats)

    def __repr__(self) -> str:
        return repr(self._sync)


class _LoopSends:
    """The messages sent by one call of a handler, of several that run at once; it takes the transaction's place."""

    def __init__(self, sends: RecordedSends) -> None:
        self._sends = sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sends, name)

    async def send(self, *message: Any, **named: Any) -> None:
        self._sends.send(*message, **named)

    async def send_many(self, topic: Any, items: Any) -> None:
        self._sends.send_many(topic, items)


def _handler_cancelled() -> TransactionAborted:
    return TransactionAborted("the handler was cancelled: it did not end in the time of the stop")
