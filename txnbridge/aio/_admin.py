"""`Admin`: a broker's administration, for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import txnbridge
from txnbridge._messages import Position
from txnbridge._token import Decision, Outcome
from txnbridge.aio._calls import Call, Threads
from txnbridge.spi import Advice, GroupInfo, Half, OpenTransaction, Partition, TopicInfo

R = TypeVar("R")


class Admin:
    """A broker's administration, as users call it (`bridge.admin`). Each call ends within the bridge's timeout."""

    def __init__(self, sync: txnbridge.Admin, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._threads = threads
        self._timeout = timeout

    async def _ask(self, function: Callable[[], R]) -> R:
        return await self._threads.run(Call(function), self._timeout)

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        """Create a topic, or return False if it exists. Raise `InvalidOption` if its number of partitions differs."""
        kept: dict[str, Any] = {"retention_seconds": retention_seconds, "retention_bytes": retention_bytes}
        return await self._ask(partial(self._sync.create_topic, name, partitions, **kept))

    async def topics(self, internal: bool = False) -> list[TopicInfo]:
        """Return the topics, sorted by name; topics that txnbridge made for itself only with `internal=True`."""
        return await self._ask(partial(self._sync.topics, internal))

    async def topic(self, name: str) -> TopicInfo:
        """Return one topic. Raise `NotFound` if it does not exist."""
        return await self._ask(partial(self._sync.topic, name))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages.

        Raise `NotFound` if it does not exist, `InvalidState` while an open transaction has messages in it.
        """
        await self._ask(partial(self._sync.delete_topic, name))

    async def grow_topic(self, name: str, partitions: int) -> None:
        """Add partitions until a topic has `partitions`. Stored messages stay in theirs; new ones use all of them."""
        await self._ask(partial(self._sync.grow_topic, name, partitions))

    async def bounds(self, topics: str | Iterable[str]) -> dict[Partition, tuple[Position, Position]]:
        """Return, for each partition, the first position that is kept, and the present end for readers.

        Reading between two positions before this end always yields the same messages, until retention removes them.
        Raise `NotFound` if a topic does not exist.
        """
        return await self._ask(partial(self._sync.bounds, topics))

    async def topic_ids(self, topics: str | Iterable[str]) -> dict[str, str]:
        """Return, for each topic, an id that a later topic of the same name does not have.

        A position is valid only in the topic in which it was read, so a program that stores positions should store
        these ids with them. Topics that do not exist, and topics for which the broker has no id, are left out.
        """
        return await self._ask(partial(self._sync.topic_ids, topics))

    async def groups(self) -> dict[str, int]:
        """Return the number of members of every group, by name."""
        return await self._ask(self._sync.groups)

    async def group(self, name: str) -> GroupInfo:
        """Return a group's members with their partitions, positions and lag. Raise `NotFound` for an unknown group."""
        return await self._ask(partial(self._sync.group, name))

    async def reset_group(
        self, name: str, to: str | int = "earliest", topics: str | Iterable[str] | None = None
    ) -> dict[Partition, Position]:
        """Set the positions of a group without members to "earliest", "latest" or a time in milliseconds since 1970.

        Return the new positions, in the given topics or in all that the group has read. Raise `NotFound` for an unknown
        group or topic, `InvalidState` while the group has members or an open transaction has acknowledged for it.
        """
        return await self._ask(partial(self._sync.reset_group, name, to, topics))

    async def transactions(self, owners: str = "") -> list[OpenTransaction]:
        """Return the open and prepared transactions whose transactional id begins with `owners`, oldest first."""
        return await self._ask(partial(self._sync.transactions, owners))

    async def transaction(self, transaction: str) -> OpenTransaction:
        """Return one open or prepared transaction. Raise `NotFound` if none has this id; it may have ended."""
        return await self._ask(partial(self._sync.transaction, transaction))

    async def commit(self, transaction: str, *, reason: str = "") -> Outcome:
        """Commit a prepared transaction by its id, overriding the application's decision; return the outcome.

        Listeners and logs get `reason` with the event of this commit. Raise `NotFound` if no open transaction has this
        id, `InvalidState` for a transaction that is not prepared.
        """
        return await self._ask(partial(self._sync.commit, transaction, reason=reason))

    async def abort(self, transaction: str, *, reason: str = "") -> Outcome:
        """Abort an open or prepared transaction by its id, overriding the application; return the outcome."""
        return await self._ask(partial(self._sync.abort, transaction, reason=reason))

    async def parked(self, group: str) -> list[Half]:
        """Return the parked half messages of a group; they had too many check-backs without a decision."""
        return await self._ask(partial(self._sync.parked, group))

    async def resume(self, group: str, transaction: str) -> None:
        """Start the check-backs of a parked half message again. Raise `NotFound` if none with this id is parked."""
        await self._ask(partial(self._sync.resume, group, transaction))

    async def end_parked(self, group: str, transaction: str, decision: Decision, *, reason: str = "") -> Outcome:
        """Publish or drop a parked half message, overriding the application's decision; return the outcome."""
        return await self._ask(partial(self._sync.end_parked, group, transaction, decision, reason=reason))

    async def repair(self, transaction: str) -> str:
        """Complete a transaction that the broker ended only in part; return the repair as text for the operator."""
        return await self._ask(partial(self._sync.repair, transaction))

    async def check(self) -> list[Advice]:
        """Return the broker's settings and states that weaken a guarantee or keep messages from readers."""
        return await self._ask(self._sync.check)
