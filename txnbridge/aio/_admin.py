"""`Admin`: a broker's administration, for tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import txnbridge
from txnbridge.aio._calls import Call, Threads, delegated

R = TypeVar("R")


class Admin:
    """A broker's administration, as users call it (`bridge.admin`). Each call ends within the bridge's timeout."""

    def __init__(self, sync: txnbridge.Admin, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._threads = threads
        self._timeout = timeout

    async def _run(self, _: str, function: Callable[[], R]) -> R:
        return await self._threads.run(Call(function), self._timeout)

    create_topic: Final = delegated(txnbridge.Admin.create_topic)
    topics: Final = delegated(txnbridge.Admin.topics)
    topic: Final = delegated(txnbridge.Admin.topic)
    delete_topic: Final = delegated(txnbridge.Admin.delete_topic)
    grow_topic: Final = delegated(txnbridge.Admin.grow_topic)
    bounds: Final = delegated(txnbridge.Admin.bounds)
    topic_ids: Final = delegated(txnbridge.Admin.topic_ids)
    groups: Final = delegated(txnbridge.Admin.groups)
    group: Final = delegated(txnbridge.Admin.group)
    describe_groups: Final = delegated(txnbridge.Admin.describe_groups)
    reset_group: Final = delegated(txnbridge.Admin.reset_group)
    transactions: Final = delegated(txnbridge.Admin.transactions)
    transaction: Final = delegated(txnbridge.Admin.transaction)
    commit: Final = delegated(txnbridge.Admin.commit)
    abort: Final = delegated(txnbridge.Admin.abort)
    parked: Final = delegated(txnbridge.Admin.parked)
    resume: Final = delegated(txnbridge.Admin.resume)
    end_parked: Final = delegated(txnbridge.Admin.end_parked)
    repair: Final = delegated(txnbridge.Admin.repair)
    doctor: Final = delegated(txnbridge.Admin.doctor)
