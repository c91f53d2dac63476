"""The offsets at which the reading of partitions starts, and at which it resumes after a seek."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import AccessDenied, NotFound, StorageFailed, TxnBridgeError
from txnbridge.spi import Context, Deadline, LedgerValue, Partition, Subscription
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.read.partition import KafkaPartition, SeekRequest, SeekRequests

_log = logging.getLogger("txnbridge")

# The pause before undecided offsets, or a missing topic, are looked up again: mostly that changes within milliseconds.
_RETRY_SECONDS = 0.02
_LEADER_SECONDS = 5.0  # an election takes less; after this time a warning names a partition without a leader
# After this time an undecided offset may be due to a hanging transaction (hazard H9), which is then searched for.
_UNDECIDED_SECONDS = 3.0
_WARNING_SECONDS = 60.0  # the pause after a search that found a transaction which cannot be ended from here
_SEARCH_SECONDS = 10.0  # the longest search, which delays the look-ups for other partitions


@dataclass(frozen=True)
class LostPosition:
    """An offset `at` that cannot be read, and the reason `why`. The partition is not read until the user seeks."""

    why: str
    at: int


@dataclass(frozen=True)
class ResolvedOffsets:
    """The offsets found by a look-up: where to read partitions next, and which positions are lost.

    The offsets in `to_commit` are committed for the group before a message is read from them.
    """

    offsets: Mapping[Partition, int | LostPosition]
    to_commit: Mapping[Partition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)  # the topics' ids, looked up before the offsets


class KafkaStartPositions:
    """Finds the offsets at which a reader without a group starts, by the `start` of its subscription."""

    def __init__(self, client: Requests, subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription
        self._warn_at: dict[Partition, float] = {}  # of partitions without a leader

    def first(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return the first offset to read of each partition, by the `start` of the subscription."""
        match self._subscription.start:
            case "earliest":
                return self._client.begins(partitions, deadline)
            case "latest":
                return self._client.ends(partitions, deadline)
            case timestamp:
                since = self._client.since(partitions, int(timestamp), deadline)
                return {partition: first for partition, (first, _end) in since.items()}

    def at_time(
        self, partitions: Mapping[Partition, KafkaPartition], timestamp: int, deadline: Deadline
    ) -> dict[KafkaPartition, SeekRequest]:
        """Return the seek requests to the first messages with a timestamp at or after a time."""
        topic_ids = self._client.topic_ids({topic for topic, _ in partitions}, deadline)
        since = self._client.since(partitions, timestamp, deadline)
        return {
            partitions[name]: SeekRequest(target=first, since=(timestamp, end), topic_id=topic_ids.get(name[0]))
            for name, (first, end) in since.items()
        }

    def counts(self, deadline: Deadline) -> dict[str, int]:
        return self._client.counts(self._subscription.topics, deadline)

    def resolve(self, requests: SeekRequests, deadline: Deadline) -> ResolvedOffsets:
        """Return the offsets for seek requests. A partition added after the reader's start is read from its begin."""
        topic_ids, requests = self._of_known_topics(requests, deadline)
        targets = {partition: request.target for partition, request in requests.items() if request.target is not None}
        added = self._client.begins(self._led(requests.keys() - targets.keys(), deadline), deadline)
        refused, recreated = self._refused(requests, deadline), self._recreated(requests, topic_ids)
        return ResolvedOffsets({**targets, **added, **refused, **recreated}, topic_ids=topic_ids)

    def owner(self) -> str:
        """Return words for error texts that say whether a position is this reader's or a group's."""
        return "this reader's position"

    def _of_known_topics(self, requests: SeekRequests, deadline: Deadline) -> tuple[Mapping[str, str], SeekRequests]:
        """Return the topics' ids, and the requests for known topics; of refused offsets those of led partitions.

        A broker that has just started answers before it has loaded its topics. Requests for other topics wait, and so
        does this call, because each poll of the reader looks them up again.
        """
        topic_ids = self._client.topic_ids({topic for topic, _ in requests}, deadline)
        refused = {partition for partition, request in requests.items() if request.refused is not None}
        away = refused - self._led(refused, deadline)
        known = {each: request for each, request in requests.items() if each[0] in topic_ids and each not in away}
        if len(known) < len(requests):
            time.sleep(min(_RETRY_SECONDS, deadline.left()))
        return topic_ids, known

    def _led(self, partitions: Collection[Partition], deadline: Deadline) -> set[Partition]:
        """Return the partitions that have a leader. Requests for others wait, as in `_of_known_topics`."""
        led = self._client.led(partitions, deadline, self._subscription.group or "")
        for each in partitions:
            if each in led:
                self._warn_at.pop(each, None)
            elif self._warn_at.setdefault(each, (now := time.monotonic()) + _LEADER_SECONDS) <= now:
                self._warn_at[each] = math.inf
                _log.warning("%s[%d] has no leader, and waits until a broker leads it", *each)
        if len(led) < len(partitions):
            time.sleep(min(_RETRY_SECONDS, deadline.left()))
        return led

    def _recreated(self, requests: SeekRequests, topic_ids: Mapping[str, str]) -> Mapping[Partition, LostPosition]:
        """Return a lost position for each partition whose topic was deleted and created again."""
        return {
            partition: self.recreated(partition, request.target or request.refused or 0)
            for partition, request in requests.items()
            if is_another_topic(topic_ids.get(partition[0]), request.topic_id)
        }

    def recreated(self, partition: Partition, at: int) -> LostPosition:
        return LostPosition(recreated_text(self.owner(), partition, at), at)

    def _refused(self, requests: SeekRequests, deadline: Deadline) -> Mapping[Partition, int | LostPosition]:
        """Check offsets that the broker did not have; return the valid ones, and a lost position for each other."""
        refused = {partition: request.refused for partition, request in requests.items() if request.refused is not None}
        begins, ends = self._client.begins(refused, deadline), self._client.ends(refused, deadline)
        return {
            partition: at
            if begins[partition] <= at <= ends[partition]
            else LostPosition(out_of_range_text(self.owner(), partition, at, begins[partition], ends[partition]), at)
            for partition, at in refused.items()
        }


class KafkaGroupStartPositions(KafkaStartPositions):
    """The start offsets of a group's member: the group's committed offsets, or the first offsets of a new group.

    Before a partition's first message is handed out, the group's first offset is committed, and recorded in the
    decision log. Because of the commit no message is skipped if the first batch aborts (hazard H23). Because of the
    record, a group whose offsets the broker has dropped is not mistaken for a new group (hazard H24). The record of a
    topic has the number of partitions when the group began, and the group's first offset in each partition: None if the
    group had no offset there yet.
    """

    def __init__(
        self,
        client: Requests,
        subscription: Subscription,
        context: Context,
        counts: Mapping[str, int],
        write_missing_markers: Callable[[Deadline], list[str]],
        deadline: Deadline,
    ) -> None:
        super().__init__(client, subscription)
        self._write_missing_markers = write_missing_markers
        self._search_at: float | None = None  # when to search for a hanging transaction, if offsets are still undecided
        self._counts = counts
        self._group = str(subscription.group)
        self._records = {
            topic: LedgerValue(context.ledger(context.application, f"group/{self._group}/{topic}"))
            for topic in subscription.topics
        }
        self._unanswered: GroupMembership | None = None  # the member whose commit had no answer
        self.left: GroupMembership | None = None  # the member that was removed for this reason
        self._denied = False
        self.unchecked = set(subscription.topics)  # topics whose records may lack a partition that the group has begun
        self.unrecorded: set[str] = set()  # topics whose records certainly lack such a partition
        self._recorded: set[Partition] = set()  # partitions that the records certainly have
        partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
        # "latest" is the end at this moment, and not when the group's members have got their partitions.
        self._latest = client.ends(partitions, deadline) if subscription.start == "latest" else None

    def owner(self) -> str:
        return f"the position of group {self._group!r}"

    def resolve(self, requests: SeekRequests, deadline: Deadline) -> ResolvedOffsets:
        """Return offsets for seek requests; a partition whose offset an open transaction may change is left out."""
        if self._unanswered is not None:
            self._client.leave(self._unanswered, deadline)
            self.left, self._unanswered = self._unanswered, None
            return ResolvedOffsets({})
        topic_ids, requests = self._of_known_topics(requests, deadline)
        committed = self._client.positions(self._group, requests, deadline, decided=True)
        if len(committed) < len(requests):
            time.sleep(min(_RETRY_SECONDS, deadline.left()))
            self._search_for_hanging_transactions(deadline)
        else:
            self._search_at = None
        # A member, or an earlier attempt, may have ended between the commit of a first offset and its record.
        self.unchecked |= {each[0] for each, at in committed.items() if at is not None and each not in self._recorded}
        offsets, missing = dict[Partition, int | LostPosition](), dict[str, list[int]]()
        to_commit = dict[Partition, int]()
        # By leader epochs a log is known to be truncated, although it has grown again (hazard H167).
        epochs = {each: at.epoch for each, at in committed.items() if at is not None and at.epoch is not None}
        led = self._led(epochs.keys(), deadline)
        ends = self._client.epoch_ends({each: epochs[each] for each in led}, deadline)
        for (topic, number), position in committed.items():
            request, target = requests[topic, number], requests[topic, number].target
            cut = position is not None and ends.get((topic, number), position.at) < position.at
            sought = target is not None and (request.topic_id is None or request.since is not None)
            recreated = position is not None and is_another_topic(topic_ids[topic], position.topic_id)
            if position is None or (recreated and target is not None) or (cut and sought):
                missing.setdefault(topic, []).append(number)
            elif recreated:
                offsets[topic, number] = self.recreated((topic, number), position.at)
            elif cut:
                why = out_of_range_text(self.owner(), (topic, number), position.at, 0, None)
                offsets[topic, number] = LostPosition(why, position.at)
            elif position.epoch is None or (topic, number) in led:
                # Messages that the group has acknowledged are not read again.
                offsets[topic, number] = max(position.at, target or 0)
        for topic, numbers in missing.items():
            begun = self._begin(topic, numbers, requests, deadline)
            offsets.update(begun.offsets)
            to_commit.update(begun.to_commit)
        offsets.update(self._refused({p: request for p, request in requests.items() if p in offsets}, deadline))
        lost = self._recreated(requests, topic_ids)
        return ResolvedOffsets({**offsets, **lost}, {p: at for p, at in to_commit.items() if p not in lost}, topic_ids)

    def _search_for_hanging_transactions(self, deadline: Deadline) -> None:
        now = time.monotonic()
        if self._search_at is None or now < self._search_at:
            self._search_at = self._search_at or now + _UNDECIDED_SECONDS
            return
        self._search_at = math.inf  # not again after `AccessDenied`: each attempt would fence a running producer
        try:
            for written in self._write_missing_markers(Deadline(min(deadline.left(), _SEARCH_SECONDS))):
                _log.warning("group %r waited for a hanging transaction; wrote its marker: %s", self._group, written)
        except (AccessDenied, StorageFailed) as error:
            if isinstance(error, StorageFailed):
                self._search_at = now + _WARNING_SECONDS
            _log.warning(
                "group %r waits for the end of a transaction with acknowledgements. It may be a hanging transaction,"
                " which cannot be looked for or ended from here: %s. See txnbridge doctor",
                *(self._group, error),
            )
            return
        except TxnBridgeError as error:
            _log.debug("searching for a hanging transaction for group %r is repeated: %s", self._group, error)
        self._search_at = time.monotonic() + _UNDECIDED_SECONDS

    def _begin(self, topic: str, numbers: Sequence[int], requests: SeekRequests, deadline: Deadline) -> ResolvedOffsets:
        """Return the offsets at which partitions without a committed offset are read first.

        The target of a seek comes first. Without a seek, a partition that the group had already begun to read gets a
        lost position: the broker has dropped its committed offset, and not because the topic was deleted meanwhile.
        """
        count, began = self._read_record(topic, deadline)
        targets, lost = dict[Partition, int](), dict[Partition, LostPosition]()
        old, added = list[Partition](), list[Partition]()
        led = self._led([(topic, number) for number in numbers], deadline)
        for number in numbers:
            partition = topic, number
            at = began[number] if number < len(began) else None
            if (target := requests[partition].target) is not None:
                targets[partition] = target
            elif partition not in led:
                continue
            elif at is not None:
                lost[partition] = LostPosition(_expired_text(self._group, partition, at), at)
            else:  # a partition that was added after the group began, or this member, is read from its beginning
                (old if number < min(count, self._counts[topic]) else added).append(partition)
        return ResolvedOffsets(lost, {**targets, **self._first(old, deadline), **self._client.begins(added, deadline)})

    def _first(self, partitions: Sequence[Partition], deadline: Deadline) -> dict[Partition, int]:
        if self._latest is not None:
            return {partition: self._latest[partition] for partition in partitions}
        return self.first(partitions, deadline)

    def commit(
        self, member: GroupMembership, first: Mapping[Partition, int], topic_ids: Mapping[str, str], deadline: Deadline
    ) -> int:
        """Commit the group's first offsets, as its member; return Kafka's error code.

        If the answer is lost, the request may still be carried out, and would set back a group that has acknowledged
        messages. So the next look-up first removes the member from its group, which then joins it anew.
        """
        ids = {partition: topic_ids[partition[0]] for partition in first if partition[0] in topic_ids}
        result = self._client.commit_offsets(member, first, ids, deadline)
        if result.answer_lost:
            self._unanswered = member
        return result.code

    def record(self, topics: Iterable[str], deadline: Deadline) -> None:
        """Record in the decision log at which offset the group has begun to read each partition of these topics.

        So a committed offset that the broker has dropped is not taken for a first start. Raise `NotFound`, after the
        other topics are recorded, if a topic was deleted.
        """
        gone: NotFound | None = None
        for topic in topics:
            try:
                if not self._denied:
                    self._complete_record(topic, deadline)
                self.unchecked.discard(topic)
                self.unrecorded.discard(topic)
            except NotFound as error:
                gone = error
        if gone is not None:
            raise gone

    def _complete_record(self, topic: str, deadline: Deadline) -> None:
        count = self._client.counts([topic], deadline)[topic]
        committed = self._client.committed(self._group, [(topic, number) for number in range(count)], deadline)

        def complete(record: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            partitions, positions = self._from_record(topic, record)
            padded = [*positions, *[None] * (count - len(positions))]
            completed = [committed.get((topic, n)) if at is None else at for n, at in enumerate(padded)]
            return None if completed == padded else {"partitions": partitions, "positions": completed}

        try:
            self._records[topic].update(complete, deadline)
            self._recorded |= {each for each, at in committed.items() if at is not None}
        except AccessDenied as error:
            self._continue_without_record(error)

    def _read_record(self, topic: str, deadline: Deadline) -> tuple[int, Sequence[int | None]]:
        """Return how many partitions the topic had when the group began, and the group's first offset in each."""
        try:
            return self._from_record(topic, None if self._denied else self._records[topic].read(deadline))
        except AccessDenied as error:
            self._continue_without_record(error)
        return self._from_record(topic, None)

    def _from_record(self, topic: str, record: Mapping[str, Any] | None) -> tuple[int, Sequence[int | None]]:
        if record is None:
            return self._counts[topic], ()
        return int(record["partitions"]), list(record["positions"])

    def _continue_without_record(self, error: AccessDenied) -> None:
        self._denied = True
        _log.warning(
            "group %r: this user may not use the decision log, so it is not noticed if the broker drops the group's"
            " offsets (after offsets.retention.minutes without members), and the group would begin again: %s",
            *(self._group, error),
        )


def is_another_topic(now: str | None, before: str | None) -> bool:
    """Return whether a topic was deleted and created again, by its ids now and before. Unknown ids prove nothing."""
    return bool(now) and bool(before) and now != before


def recreated_text(name: str, partition: Partition, at: int) -> str:
    """Return the error text for an offset (`name` says whose) in a topic that was deleted and created again."""
    topic, number = partition
    return (
        f"{name} is {at} in {topic}[{number}], but the topic was deleted and created again since, so that offset means"
        " nothing in the new topic. Nothing was skipped. Choose where to continue in the new topic by"
        f" seek({{({topic!r}, {number}): (offset,)}})"
    )


def out_of_range_text(owner: str, partition: Partition, at: int, begin: int, end: int | None) -> str:
    """Return the error text for an offset of `owner` that is before a partition's `begin` or behind its (old) `end`."""
    topic, number = partition
    if at < begin:
        return (
            f"{owner} is {at} in {topic}[{number}], but retention has removed everything before {begin}."
            f" Nothing was skipped. To continue without the removed messages: seek({{({topic!r}, {number}):"
            f" ({begin},)}})"
        )
    ended = "ended before" if end is None else f"ends at {end}"
    return (
        f"{owner} is {at} in {topic}[{number}], but the log {ended}: it was truncated, or the topic was deleted and"
        f" created again. Nothing was skipped. Choose where to continue: seek({{({topic!r}, {number}): (offset,)}})"
    )


def _expired_text(group: str, partition: Partition, began: int) -> str:
    topic, number = partition
    return (
        f"group {group!r} began to read {topic}[{number}] at {began}, but the broker has dropped its committed offset:"
        " it drops those of a group without members after offsets.retention.minutes (7 days by default), and those of a"
        f" deleted topic. Nothing was skipped or read again. Choose where to continue by seek({{({topic!r}, {number}):"
        " (offset,)}), or read with a new group"
    )
