"""`Admin`: a broker's administration, for tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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

    create_topic = delegated(txnbridge.Admin.create_topic)
    topics = delegated(txnbridge.Admin.topics)
    topic = delegated(txnbridge.Admin.topic)
    delete_topic = delegated(txnbridge.Admin.delete_topic)
    grow_topic = delegated(txnbridge.Admin.grow_topic)
    bounds = delegated(txnbridge.Admin.bounds)
    topic_ids = delegated(txnbridge.Admin.topic_ids)
    groups = delegated(txnbridge.Admin.groups)
    group = delegated(txnbridge.Admin.group)
    reset_group = delegated(txnbridge.Admin.reset_group)
    transactions = delegated(txnbridge.Admin.transactions)
    transaction = delegated(txnbridge.Admin.transaction)
    commit = delegated(txnbridge.Admin.commit)
    abort = delegated(txnbridge.Admin.abort)
    parked = delegated(txnbridge.Admin.parked)
    resume = delegated(txnbridge.Admin.resume)
    end_parked = delegated(txnbridge.Admin.end_parked)
    repair = delegated(txnbridge.Admin.repair)
    doctor = delegated(txnbridge.Admin.doctor)
