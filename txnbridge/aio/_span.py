"""`spanning`: one transaction over several brokers, for a task."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from anyio import CancelScope

import txnbridge
from txnbridge._base.token import Outcome, Token
from txnbridge.aio._bridge import Bridge
from txnbridge.aio._calls import Call, OneCall
from txnbridge.aio._transaction import Transaction
from txnbridge.errors import Abort, InvalidOption, InvalidState, TxnBridgeError


class Span:
    """A transaction over several brokers, for an `async with` block: at its end all parts are committed, or none.

    An exception in the block, also a cancellation, aborts all parts. If a task is cancelled while the end of the block
    runs, the end goes on in its thread. Until then `outcome` is UNKNOWN, and `settle` waits for it.
    """

    def __init__(self, bridges: tuple[Bridge, ...], timeout: float | None, hold: float | None) -> None:
        self._bridges = bridges
        self._timeout, self._hold = timeout, hold
        self._calls = OneCall("the end of a span")
        self._entered = False
        self._sync: txnbridge.Span | None = None
        self._parts: dict[Bridge, Transaction] = {}
        self._end: Call[Any] | None = None

    @property
    def outcome(self) -> Outcome | None:
        """The span's outcome; None before its end, UNKNOWN while its end goes on behind a cancelled task."""
        ends_behind = self._end is not None and self._end.runs_behind
        outcome = None if self._sync is None else self._sync.outcome
        return Outcome.UNKNOWN if outcome is None and ends_behind else outcome

    @property
    def token(self) -> Token | None:
        """The token of the broker's transaction that decides, for `Bridge.status`; None until it is prepared."""
        return None if self._sync is None else self._sync.token

    def on(self, bridge: Bridge) -> Transaction:
        """Return the transaction on one of the span's brokers, for sends and acknowledgements; the span ends it."""
        if self._sync is None:
            raise InvalidState("on() is for the block: async with aio.spanning(…) as span")
        if bridge not in self._parts:
            raise InvalidOption("on() takes one of the bridges that spanning() was given")
        return self._parts[bridge]

    async def settle(self) -> Outcome | None:
        """Wait for an end that goes on in its thread because its task was cancelled; return the outcome."""
        await self._calls.run(Call(lambda: None))
        return self.outcome

    async def __aenter__(self) -> Span:
        if self._entered:
            raise InvalidState("a span is for one block: begin another one with aio.spanning(…)")
        self._entered = True
        self._sync = sync = await self._calls.run(Call(self._open, undo=lambda span: span.abort() if span else None))
        self._parts = {each: Transaction(sync.on(each.sync), each._waiting) for each in self._bridges}
        return self

    def _open(self) -> txnbridge.Span:
        """Begin the span's transaction on each broker, so that `on` waits for nothing."""
        span = txnbridge.spanning(*(each.sync for each in self._bridges), timeout=self._timeout, hold=self._hold)
        try:
            for bridge in sorted(self._bridges, key=lambda each: each.sync.cluster):  # as in passes (`SpanPass`)
                span.on(bridge.sync)
        except BaseException:
            span.abort()
            raise
        return span

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._sync is not None
        if error is not None:
            return await self._abort_after(self._sync, error)
        end = None
        try:
            for part in self._parts.values():
                wait = Call(lambda: None, patience=part._patience)
                await part._calls.run(wait)  # for a call whose task was cancelled, if the block has gone on
            self._end = end = Call(partial(self._sync.__exit__, None, None, None))
            await self._calls.run(end)
        except BaseException as cancelled:
            if end is None or end.withdrawn:
                await self._abort_after(self._sync, cancelled)
            raise
        return False

    async def _abort_after(self, sync: txnbridge.Span, error: BaseException) -> bool:
        leave = Call(partial(sync.__exit__, type(error), error, None), must_run=True)
        with CancelScope(shield=True):
            try:
                for part in self._parts.values():
                    with suppress(TxnBridgeError):  # a call of a cancelled task may hang: then it is aborted behind it
                        await part._run_end(part._last_call(part._sync.abort))
            except BaseException:  # the task was cancelled once more by `task.cancel()`
                leave.run_behind()
                raise
            await self._calls.run(leave)
        return isinstance(error, Abort)


def spanning(*bridges: Bridge, timeout: float | None = None, hold: float | None = None) -> Span:
    """Return a transaction over several brokers, all or none, for an `async with` block; see `txnbridge.spanning`.

        async with aio.spanning(kafka, pulsar) as span:
            await span.on(kafka).send("orders", b"…")
            await span.on(pulsar).send("letters", b"…")

    The block has `timeout` seconds. A part stays prepared for `hold` seconds more, and is then aborted by its broker.
    It has a part on each broker, even where nothing is sent. A database's session cannot take part: use
    `txnbridge.spanning` with the bridges' `sync`, in a thread.
    """
    return Span(bridges, timeout, hold)
