"""`Publisher`: sends messages without a transaction, for tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import txnbridge
from txnbridge.aio._calls import Call, ClosedByBlock, OneCall, Threads, delegated

R = TypeVar("R")


class Publisher(ClosedByBlock):
    """Sends messages in order and idempotently; readers see each as soon as it is stored. `flush` raises failures.

    Several tasks may use a publisher: its calls run in the order in which they were made. A `send` whose task was
    cancelled may have sent its message.
    """

    def __init__(self, sync: txnbridge.Publisher, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._calls = OneCall("a publisher")
        self._limit = threads, timeout

    send: Final = delegated(txnbridge.Publisher.send)
    flush: Final = delegated(txnbridge.Publisher.flush)
    last_sequence: Final = delegated(txnbridge.Publisher.last_sequence)

    async def close(self) -> None:
        """Flush, and close the publisher; a cancelled call goes on in its thread."""
        await self._calls.run(Call(self._sync.close, must_run=True))

    async def _run(self, _: str, function: Callable[[], R]) -> R:
        return await self._calls.run(Call(function), *self._limit)
