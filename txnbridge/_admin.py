"""`Admin`: topics, groups, open transactions, parked half messages, and the checks of `txnbridge doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import Position, milliseconds
from txnbridge._base.token import Decision, Outcome
from txnbridge._base.topic import Topic, check_partitions, check_topic_name
from txnbridge._half.common import check_decision, half_store, names_records_of_spans, refuse_records_of_spans
from txnbridge._half.span_sweep import PART_OF_SPAN, is_part
from txnbridge.capabilities import Capability, Level
from txnbridge.errors import InvalidOption, NotFound
from txnbridge.spi import Advice, GroupInfo, Half, HalfStore, OpenTransaction, Partition, TopicInfo


class Admin:
    """A broker's administration, as users call it (`bridge.admin`). Each call ends within the bridge's timeout."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._events = connection.events

    def _deadline(self) -> Deadline:
        """Return a call's deadline. Raise `InvalidState` if the bridge is closed, or was opened before a fork."""
        self._connection.check_open()
        return self._connection.deadline()

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        """Create a topic, or return False if it exists. Raise `InvalidOption` if its number of partitions differs."""
        check_topic_name(name)
        check_partitions(partitions)
        if retention_seconds is not None:
            check_seconds("retention_seconds", retention_seconds, above_0=True)
        if retention_bytes is not None and (type(retention_bytes) is not int or not 0 < retention_bytes < 1 << 63):
            raise InvalidOption(f"retention_bytes is a whole number above 0, below 2**63, not {retention_bytes!r}")
        self._broker.capabilities.require(Capability.TOPIC_ADMIN)
        return self._broker.admin.create_topic(
            name, partitions, self._deadline(), retention_seconds=retention_seconds, retention_bytes=retention_bytes
        )

    def _ensure(self, topics: Iterable[Topic], partitions: int) -> list[str]:
        """Create missing topics with their declared partitions and retention; return the created topics' names."""
        self._broker.capabilities.require(Capability.TOPIC_ADMIN)
        found = {topic.name: topic.partitions for topic in self._broker.admin.topics(self._deadline())}
        created = []
        for topic in topics:
            if topic.name not in found:
                wanted = topic.partitions or partitions
                if self.create_topic(topic.name, wanted, retention_seconds=topic.retention_seconds):
                    created.append(topic.name)
            elif topic.partitions not in (None, has := found[topic.name]):
                raise InvalidOption(
                    f"topic {topic.name!r} is declared with {topic.partitions} partitions and has {has}:"
                    f" declare partitions={has}, or have more with: txnbridge topics grow {topic.name} N"
                )
        return created

    def topics(self, internal: bool = False) -> list[TopicInfo]:
        """Return the topics, sorted by name; topics that txnbridge made for itself only with `internal=True`."""
        topics = self._broker.admin.topics(self._deadline())
        return sorted((t for t in topics if internal or not t.internal), key=lambda topic: topic.name)

    def unreadable(self, topics: Iterable[str]) -> list[str]:
        """Return those of the topics that this user may not read, as far as the broker tells that before a read."""
        return self._broker.admin.unreadable(list(topics), self._deadline())

    def topic(self, name: str) -> TopicInfo:
        """Return one topic. Raise `NotFound` if it does not exist."""
        for topic in self.topics(internal=True):
            if topic.name == name:
                return topic
        raise NotFound(f"there is no topic {name!r}; create it with: txnbridge topics create {name}")

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages.

        Raise `NotFound` if it does not exist, `InvalidState` while an open transaction has messages in it.
        """
        self._broker.capabilities.require(Capability.TOPIC_ADMIN)
        self._broker.admin.delete_topic(name, self._deadline())

    def grow_topic(self, name: str, partitions: int) -> None:
        """Add partitions until a topic has `partitions`. Stored messages stay in their partitions; new ones use all."""
        self._broker.capabilities.require(Capability.TOPIC_ADMIN)
        check_partitions(partitions)
        self._broker.admin.grow_topic(name, partitions, self._deadline())

    def bounds(self, topics: str | Iterable[str]) -> dict[Partition, tuple[Position, Position]]:
        """Return, for each partition, the first position that is kept, and the present end for readers.

        Reading between two positions before this end always yields the same messages, until retention removes them.
        Raise `NotFound` if a topic does not exist.
        """
        return self._broker.admin.bounds((topics,) if isinstance(topics, str) else tuple(topics), self._deadline())

    def topic_ids(self, topics: str | Iterable[str]) -> dict[str, str]:
        """Return, for each topic, an id that a later topic of the same name does not have.

        A position is valid only in the topic in which it was read, so a program that stores positions should store
        these ids with them. Topics that do not exist, and topics for which the broker has no id, are left out.
        """
        return self._broker.admin.topic_ids((topics,) if isinstance(topics, str) else tuple(topics), self._deadline())

    def groups(self) -> dict[str, int]:
        """Return the number of members of every group, by name."""
        self._broker.capabilities.require(Capability.GROUP_ADMIN)
        return dict(sorted(self._broker.admin.groups(self._deadline()).items()))

    def group(self, name: str) -> GroupInfo:
        """Return a group's members with their partitions, positions and lag. Raise `NotFound` for an unknown group."""
        self._broker.capabilities.require(Capability.GROUP_ADMIN)
        return self._broker.admin.group(name, self._deadline())

    def describe_groups(self, names: Iterable[str]) -> dict[str, GroupInfo]:
        """Return groups by name, each with its members, positions and lag; those that do not exist are left out."""
        self._broker.capabilities.require(Capability.GROUP_ADMIN)
        return self._broker.admin.describe_groups(list(names), self._deadline())

    def reset_group(
        self, name: str, to: str | int | datetime = "earliest", topics: str | Iterable[str] | None = None
    ) -> dict[Partition, Position]:
        """Set the positions of a group without members to "earliest", "latest" or a time.

        A time is in milliseconds since 1970, or a datetime with a time zone.

        Return the new positions, in the given topics or in all that the group has read. Raise `NotFound` for an unknown
        group or topic, `InvalidState` while the group has members or an open transaction has acknowledged for it.
        """
        if not isinstance(to, str) or to not in ("earliest", "latest"):
            to = milliseconds(to, "a group is set to 'earliest', 'latest' or a time: it")
        names = (topics,) if isinstance(topics, str) else None if topics is None else tuple(topics)
        self._broker.capabilities.require(Capability.GROUP_ADMIN)
        return self._broker.admin.reset_group(name, to, names, self._deadline())

    def transactions(self, owners: str = "") -> list[OpenTransaction]:
        """Return the open and prepared transactions whose transactional id begins with `owners`, oldest first."""
        self._broker.capabilities.require(Capability.LIST_OPEN)
        return sorted(self._broker.admin.transactions(self._deadline(), owners), key=lambda t: t.since or 0)

    def transaction(self, transaction: str) -> OpenTransaction:
        """Return one open or prepared transaction. Raise `NotFound` if none has this id; it may have ended."""
        for found in self.transactions():
            if found.transaction == transaction:
                return found
        raise NotFound(f"there is no open transaction {transaction!r}; it may have ended, ask with its token")

    def commit(self, transaction: str, *, reason: str = "") -> Outcome:
        """Commit a prepared transaction by its id, overriding the application's decision; return the outcome.

        Listeners and logs get `reason` with the event of this commit. Raise `NotFound` if no open transaction has this
        id, `InvalidState` for a transaction that is not prepared.
        """
        return self._end(transaction, Decision.COMMIT, reason)

    def abort(self, transaction: str, *, reason: str = "") -> Outcome:
        """Abort an open or prepared transaction by its id, overriding the application; return the outcome."""
        return self._end(transaction, Decision.ABORT, reason)

    def parked(self, group: str) -> list[Half]:
        """Return the parked half messages of a group; they had too many check-backs without a decision."""
        return self._halves().parked(group, self._deadline())

    def resume(self, group: str, transaction: str) -> None:
        """Start the check-backs of a half message that had too many (parked) again. Raise `NotFound` for other ids."""
        self._halves().resume(self._parked(group, transaction), self._deadline())

    def end_parked(self, group: str, transaction: str, decision: Decision, *, reason: str = "") -> Outcome:
        """Publish or drop a half message whose check-backs were stopped (parked), by `decision`; return the outcome."""
        check_decision("the administrator", decision)
        refuse_records_of_spans(group)
        if decision is Decision.UNDECIDED:
            raise InvalidOption("end_parked takes Decision.COMMIT or ABORT; an undecided half message stays parked")
        data = {"decision": decision.value, "by": "administrator", "reason": reason}
        with self._events.step("half.end", transaction, **data) as found:
            half = self._parked(group, transaction)
            outcome = self._halves().end(half, decision, self._deadline())
            found["outcome"] = outcome.value
        return outcome

    def _halves(self) -> HalfStore:
        return half_store(self._connection)

    def _parked(self, group: str, transaction: str) -> Half:
        for half in self.parked(group):
            if half.transaction == transaction:
                return half
        raise NotFound(f"no half message of transaction {transaction!r} is parked in group {group!r}")

    def repair(self, transaction: str) -> str:
        """Complete a transaction that the broker ended only in part; return the repair as text for the operator."""
        return self._broker.admin.repair(transaction, self._deadline())

    def doctor(self) -> list[Advice]:
        """Return the broker's settings and states that weaken a guarantee or keep messages from readers."""
        found = self._broker.admin.check(self._deadline())
        if self._connection.capabilities[Capability.HALF_MESSAGES].level is Level.EMULATED:
            found += half_store(self._connection).check(self._deadline())
        by_hand = {advice for advice in found if advice.remedy.startswith("txnbridge transactions commit")}
        parts = {f"transaction {each.transaction}" for each in self.transactions() if is_part(each)} if by_hand else ()
        of_spans = {advice for advice in by_hand if advice.subject in parts}
        of_spans |= {a for a in found if "resolver run" in a.remedy and names_records_of_spans(a.remedy)}
        return [replace(advice, remedy=PART_OF_SPAN) if advice in of_spans else advice for advice in found]

    def _end(self, transaction: str, decision: Decision, reason: str) -> Outcome:
        self._broker.capabilities.require(Capability.END_OPEN)
        data = {"decision": decision.value, "by": "administrator", "reason": reason}
        with self._events.step("resolve", transaction, **data) as found:
            outcome = self._broker.admin.end(transaction, decision, self._deadline())
            found["outcome"] = outcome.value
        return outcome
