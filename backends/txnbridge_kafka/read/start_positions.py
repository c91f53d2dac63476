"""Where the reading of a partition starts, and goes on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import AccessDenied, TxnBridgeError
from txnbridge.spi import Context, Deadline, LedgerValue, Partition, Subscription
from txnbridge_kafka.client.offsets import Offsets, is_another, made_anew
from txnbridge_kafka.read.partition import Wish

_log = logging.getLogger("txnbridge")

# How soon is asked again for positions that an open transaction may change: it ends within milliseconds, mostly.
_PAUSE = 0.02
# Still undecided after that long, its end may have been forgotten.
_PATIENCE = 3.0
_LONGEST_LOOK = 10.0  # meanwhile nothing is asked about other partitions that have just come


@dataclass(frozen=True)
class Lost:
    """Nobody but the user can say where a partition goes on: why, and where it stood."""

    why: str
    at: int


@dataclass(frozen=True)
class Found:
    """Where partitions go on: `known` as it is, `begun` only once it is committed as the group's position."""

    known: Mapping[Partition, int | Lost]
    begun: Mapping[Partition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)  # of topics that have one, as it was before all that


class Starts:
    """Without a group: where the subscription says."""

    def __init__(self, offsets: Offsets, subscription: Subscription) -> None:
        self._offsets = offsets
        self._subscription = subscription

    def first(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Where the subscription lets partitions begin that are there already."""
        match self._subscription.start:
            case "earliest":
                return self._offsets.begins(partitions, deadline)
            case "latest":
                return self._offsets.ends(partitions, deadline)
            case timestamp:
                since = self._offsets.since(partitions, int(timestamp), deadline)
                return {partition: first for partition, (first, _end) in since.items()}

    def settle(self, wishes: Mapping[Partition, Wish], deadline: Deadline) -> Found:
        """What is new since the start is read from its beginning, whatever the start was: it has all come since."""
        topic_ids, wishes = self._there(wishes, deadline)
        told = {partition: wish.target for partition, wish in wishes.items() if wish.target is not None}
        new = self._offsets.begins([partition for partition in wishes if partition not in told], deadline)
        known = {**told, **new, **self._refused(wishes, deadline), **self._made_anew(wishes, topic_ids)}
        return Found(known, topic_ids=topic_ids)

    def owner(self) -> str:
        """Whose position it is, for errors."""
        return "this reader's position"

    def _there(
        self, wishes: Mapping[Partition, Wish], deadline: Deadline
    ) -> tuple[Mapping[str, str], Mapping[Partition, Wish]]:
        """Return the ids of the topics, and the wishes about topics that the broker knows now.

        A broker that has just started answers before it knows its topics; the others are asked about again.
        """
        topic_ids = self._offsets.topic_ids({topic for topic, _ in wishes}, deadline)
        return topic_ids, {partition: wish for partition, wish in wishes.items() if partition[0] in topic_ids}

    def _made_anew(self, wishes: Mapping[Partition, Wish], topic_ids: Mapping[str, str]) -> Mapping[Partition, Lost]:
        """Return the partitions whose offsets belong to a topic that is there no more."""
        return {
            partition: self.made_anew(partition, wish.target or wish.refused or 0)
            for partition, wish in wishes.items()
            if is_another(topic_ids.get(partition[0]), wish.topic_id)
        }

    def made_anew(self, partition: Partition, at: int) -> Lost:
        return Lost(made_anew(self.owner(), partition, at), at)

    def _refused(self, wishes: Mapping[Partition, Wish], deadline: Deadline) -> Mapping[Partition, int | Lost]:
        """The positions that the broker does not have, each with what it has."""
        refused = {partition: wish.refused for partition, wish in wishes.items() if wish.refused is not None}
        begins, ends = self._offsets.begins(refused, deadline), self._offsets.ends(refused, deadline)
        return {
            partition: at
            if begins[partition] <= at <= ends[partition]
            else Lost(out_of_range(self.owner(), partition, at, begins[partition], ends[partition]), at)
            for partition, at in refused.items()
        }


class GroupStarts(Starts):
    """In a group: where the group stands.

    Where it begins is committed, and recorded in the decision log, before anything is handed out. By the commit nothing
    is skipped if the first batch aborts. By the record a group whose positions the broker has forgotten is told from a
    new one: it holds how many partitions a topic had when the group began, and where each that there is now began, None
    for one that had not by then.
    """

    def __init__(
        self,
        offsets: Offsets,
        subscription: Subscription,
        context: Context,
        counts: Mapping[str, int],
        mend: Callable[[Deadline], list[str]],
        deadline: Deadline,
    ) -> None:
        super().__init__(offsets, subscription)
        self._mend = mend
        self._look_at: float | None = None  # when to look for an end that was forgotten
        self._counts = counts
        self._group = str(subscription.group)
        self._records = {
            topic: LedgerValue(context.ledger(context.application, f"group/{self._group}/{topic}"))
            for topic in subscription.topics
        }
        self._denied = False
        self.unchecked = set(subscription.topics)  # whose records may not cover all that has begun
        self.owed: set[str] = set()  # whose records certainly do not
        partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
        # "latest" means now, not whenever the group has been shared out.
        self._latest = offsets.ends(partitions, deadline) if subscription.start == "latest" else None

    def owner(self) -> str:
        return f"the position of group {self._group!r}"

    def settle(self, wishes: Mapping[Partition, Wish], deadline: Deadline) -> Found:
        """Without the partitions of which nobody can tell yet, because an open transaction has acknowledged some."""
        topic_ids, wishes = self._there(wishes, deadline)
        committed = self._offsets.committed_with_topics(self._group, wishes, deadline, decided=True)
        if len(committed) < len(wishes):
            time.sleep(min(_PAUSE, deadline.left()))
            self._look_for_forgotten(deadline)
        else:
            self._look_at = None
        known: dict[Partition, int | Lost] = {}
        missing: dict[str, list[int]] = {}
        for (topic, number), found in committed.items():
            target = wishes[topic, number].target
            strange = found is not None and is_another(topic_ids[topic], found.topic_id)
            if found is None or (strange and target is not None):
                missing.setdefault(topic, []).append(number)
            elif strange:
                known[topic, number] = self.made_anew((topic, number), found.at)
            else:
                # What was acknowledged is not read again.
                known[topic, number] = max(found.at, target or 0)
        begun: dict[Partition, int] = {}
        for topic, numbers in missing.items():
            begins = self._begin(topic, numbers, wishes, deadline)
            known.update(begins.known)
            begun.update(begins.begun)
        known.update(self._refused({p: wish for p, wish in wishes.items() if p in known}, deadline))
        lost = self._made_anew(wishes, topic_ids)
        return Found({**known, **lost}, {p: at for p, at in begun.items() if p not in lost}, topic_ids)

    def _look_for_forgotten(self, deadline: Deadline) -> None:
        now = time.monotonic()
        if self._look_at is None or now < self._look_at:
            self._look_at = self._look_at or now + _PATIENCE
            return
        self._look_at = math.inf  # without the rights to mend it we look no more: each try shuts a living producer out
        try:
            for written in self._mend(Deadline(min(deadline.left(), _LONGEST_LOOK))):
                _log.warning("group %r stood still: the broker had forgotten an end of %s", self._group, written)
        except AccessDenied as error:
            _log.warning(
                "group %r waits for the end of a transaction that has acknowledged something. Whether a broker has"
                " forgotten to write it cannot be found out, or not be mended, by this user: %s. See txnbridge doctor",
                *(self._group, error),
            )
            return
        except TxnBridgeError as error:
            _log.debug("whether an end was forgotten that group %r waits for is asked again: %s", self._group, error)
        self._look_at = time.monotonic() + _PATIENCE

    def _begin(self, topic: str, numbers: Sequence[int], wishes: Mapping[Partition, Wish], deadline: Deadline) -> Found:
        """Partitions for which the group has no position: they begin, or it was lost."""
        there, began = self._read_record(topic, deadline)
        told: dict[Partition, int] = {}
        lost: dict[Partition, Lost] = {}
        old: list[Partition] = []
        new: list[Partition] = []
        for number in numbers:
            partition = topic, number
            at = began[number] if number < len(began) else None
            if (target := wishes[partition].target) is not None:
                told[partition] = target
            elif at is not None:
                lost[partition] = Lost(_expired(self._group, partition, at), at)
            else:
                # What has been added to the topic since the group began is read from its beginning.
                (old if number < there else new).append(partition)
        return Found(lost, {**told, **self._first(old, deadline), **self._offsets.begins(new, deadline)})

    def _first(self, partitions: Sequence[Partition], deadline: Deadline) -> dict[Partition, int]:
        if self._latest is not None:
            return {partition: self._latest[partition] for partition in partitions}
        return self.first(partitions, deadline)

    def record(self, topics: Iterable[str], deadline: Deadline) -> None:
        """Make the records of topics cover every partition in which the group has a position."""
        for topic in topics:
            if not self._denied:
                self._complete_record(topic, deadline)
            self.unchecked.discard(topic)
            self.owed.discard(topic)

    def _complete_record(self, topic: str, deadline: Deadline) -> None:
        count = self._offsets.counts([topic], deadline)[topic]
        committed = self._offsets.committed(self._group, [(topic, number) for number in range(count)], deadline)

        def complete(record: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            partitions, positions = self._from_record(topic, record)
            padded = [*positions, *[None] * (count - len(positions))]
            completed = [committed.get((topic, n)) if at is None else at for n, at in enumerate(padded)]
            return None if completed == padded else {"partitions": partitions, "positions": completed}

        try:
            self._records[topic].update(complete, deadline)
        except AccessDenied as error:
            self._go_on_without(error)

    def _read_record(self, topic: str, deadline: Deadline) -> tuple[int, Sequence[int | None]]:
        """Return how many partitions the topic had when the group began, and where each began."""
        record = None
        try:
            record = None if self._denied else self._records[topic].read(deadline)
        except AccessDenied as error:
            self._go_on_without(error)
        return self._from_record(topic, record)

    def _from_record(self, topic: str, record: Mapping[str, Any] | None) -> tuple[int, Sequence[int | None]]:
        if record is None:
            return self._counts[topic], ()
        return int(record["partitions"]), list(record["positions"])

    def _go_on_without(self, error: AccessDenied) -> None:
        self._denied = True
        _log.warning(
            "group %r: without the rights to use the decision log nobody will notice if the broker forgets the group's"
            " positions (after offsets.retention.minutes without members), and it would begin again: %s",
            self._group,
            error,
        )


def out_of_range(owner: str, partition: Partition, at: int, begin: int, end: int) -> str:
    """The text for a position that the broker does not have."""
    topic, number = partition
    if at < begin:
        return (
            f"{owner} is {at} in {topic}[{number}], but retention has removed everything before {begin}."
            f" Nothing was skipped: seek({{({topic!r}, {number}): ({begin},)}}) goes on there without what is gone"
        )
    return (
        f"{owner} is {at} in {topic}[{number}], but the log ends at {end}: it was cut off, or the topic was deleted and"
        f" made anew. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) says where to go on"
    )


def _expired(group: str, partition: Partition, began: int) -> str:
    topic, number = partition
    return (
        f"group {group!r} began to read {topic}[{number}] at {began}, but the broker has no position of it any more: it"
        " forgets those of a group without members after offsets.retention.minutes (7 days by default), and those of a"
        f" deleted topic. Nothing was skipped or read again: say where to go on by seek({{({topic!r}, {number}):"
        " (offset,)}), or read with a new group"
    )
