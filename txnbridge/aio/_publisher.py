"""`Publisher`: sends messages without a transaction, for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from anyio import CancelScope

import txnbridge
from txnbridge._topic import Topic
from txnbridge.aio._calls import Call, OneCall, Threads

R = TypeVar("R")


class Publisher:
    """Sends messages in order and idempotently; readers see each as soon as it is stored. `flush` raises failures.

    Several tasks may use a publisher: its calls run in the order in which they were made. A `send` whose task was
    cancelled may have sent its message.
    """

    def __init__(self, sync: txnbridge.Publisher, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._calls = OneCall("a publisher")
        self._limit = threads, timeout

    async def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        sequence: int | None = None,
    ) -> None:
        """Send one message. Wait for buffer space if necessary, at most for the bridge's timeout.

        Raise `InvalidOption` for a sequence that is not above the last one sent by this publisher, because the broker
        would drop the message silently.
        """
        more = {"key": key, "headers": headers, "partition": partition, "timestamp": timestamp, "sequence": sequence}
        await self._run(partial(self._sync.send, topic, value, **more))

    async def flush(self) -> None:
        """Wait until all messages sent so far are stored.

        Raise `DeliveryFailed` if one could not be stored, `DeadlineExceeded` after the bridge's timeout.
        """
        await self._run(self._sync.flush)

    async def last_sequence(self, topic: str | Topic) -> int | None:
        """Return the highest sequence stored under this publisher's name in a topic; None if there is none."""
        return await self._run(partial(self._sync.last_sequence, topic))

    async def close(self) -> None:
        """Flush, and close the publisher; a cancelled call goes on in its thread."""
        await self._calls.run(Call(self._sync.close, must_run=True))

    async def _run(self, function: Callable[[], R]) -> R:
        return await self._calls.run(Call(function), *self._limit)

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await self.close()
