"""The background look-ups of the offsets at which a reader's partitions are read next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded
from txnbridge.spi import BackgroundTask, Deadline, Partition, ReaderListener
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.protocol_types import DONE
from txnbridge_kafka.errors import is_passing, translate
from txnbridge_kafka.read.assignment import REFRESH_SECONDS, KafkaAssignment, as_text
from txnbridge_kafka.read.partition import KafkaPartition, PartitionReadState, SeekRequest
from txnbridge_kafka.read.start_positions import (
    KafkaGroupStartPositions,
    KafkaStartPositions,
    LostPosition,
    ResolvedOffsets,
)

_log = logging.getLogger("txnbridge.kafka.client")


class StartLookup:
    """Looks up, in the background, the offsets at which partitions are read next, and lets the client fetch from them.

    The requests to brokers run on another thread. One task runs at a time: a look-up, or the commit of first offsets.
    """

    def __init__(
        self, assignment: KafkaAssignment, starts: KafkaStartPositions, listener: ReaderListener, timeout: float
    ) -> None:
        self._assignment = assignment
        self.starts = starts
        self._group_starts = starts if isinstance(starts, KafkaGroupStartPositions) else None
        self._listener = listener
        self._timeout = timeout
        self._task: BackgroundTask[Any] | None = None
        self._refresh_at = 0.0
        self._left_out = False  # whether the last look-up found nothing for some partitions, so that other work is next

    @property
    def busy(self) -> bool:
        return self._task is not None

    def advance(self) -> None:
        """Apply the result of a finished look-up, and start the next look-up. The reader calls this in each poll."""
        if self._task is not None:
            if not self._task.done:
                return
            task, self._task = self._task, None
            try:
                task.finish()
            except BrokerUnavailable as error:
                if not isinstance(error, DeadlineExceeded) and not is_passing(error.__cause__):
                    raise
                _log.warning("looking up where to read is repeated: %s", error)
        if self._task is None:
            self._look_up(Deadline(self._timeout))

    def _look_up(self, deadline: Deadline) -> None:
        unanswered = (PartitionReadState.ASSIGNED, PartitionReadState.SEEKING)
        requests = {each: each.request for each in self._assignment.partitions.values() if each.state in unanswered}
        starts, unchecked = self.starts, self._group_starts and self._group_starts.unchecked
        refreshes = self._group_starts is None and time.monotonic() >= self._refresh_at
        left_out, self._left_out = self._left_out, False
        if requests and not (left_out and (unchecked or refreshes)):
            member = None if self._group_starts is None else self._assignment.membership()
            if self._group_starts is not None and member in (None, self._group_starts.left):
                return  # the client has not noticed yet that it is no member
            asked = {each.partition: request for each, request in requests.items()}
            self._task = BackgroundTask(
                lambda: starts.resolve(asked, deadline), lambda resolved: self._begin(requests, resolved, member)
            )
        elif unchecked and self._assignment.partitions:
            self._record(sorted(unchecked), lambda: None)
        elif refreshes:
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            self._task = BackgroundTask(lambda: starts.counts(deadline), self._add_new_partitions)

    def _add_new_partitions(self, counts: Mapping[str, int]) -> None:
        for topic, count in counts.items():
            for number in range(count):
                if (topic, number) not in self._assignment.partitions:
                    self._assignment.add((topic, number))

    def _begin(
        self, requests: Mapping[KafkaPartition, SeekRequest], resolved: ResolvedOffsets, member: GroupMembership | None
    ) -> None:
        self._left_out = len({*resolved.offsets, *resolved.to_commit}) < len(requests)
        unrecorded = set() if self._group_starts is None else self._group_starts.unrecorded
        self.apply({p: request for p, request in requests.items() if p.partition[0] not in unrecorded}, resolved)
        current = [each.partition for each in self._assignment.current(requests)]
        begun = {partition: at for partition in current if (at := resolved.to_commit.get(partition)) is not None}
        if begun and member is not None:
            self._assignment.log_for_group("%s: begins at %s", as_text(begun), ", ".join(map(str, begun.values())))
            self._commit(requests, begun, resolved.topic_ids, member)
        elif unrecorded:
            left = {each: request for each, request in requests.items() if each.partition[0] in unrecorded}
            self._record(sorted(unrecorded), lambda: self.apply(left, resolved))

    def _commit(
        self,
        requests: Mapping[KafkaPartition, SeekRequest],
        first: Mapping[Partition, int],
        topic_ids: Mapping[str, str],
        member: GroupMembership,
    ) -> None:
        """Commit a group's first offsets, record the topics, and read on. After a temporary error look up again."""
        group_starts, deadline = self._group_starts, Deadline(self._timeout)
        assert group_starts is not None

        def then(code: int) -> None:
            cause = KafkaException(KafkaError(code))
            if code == DONE:
                group_starts.unrecorded.update(topic for topic, _ in first)
                read_on = ResolvedOffsets(first, topic_ids=topic_ids)
                self._record(sorted(group_starts.unrecorded), lambda: self.apply(requests, read_on))
            elif not is_passing(cause):
                what = f"committing the first offsets of group {self._assignment.context.group!r}"
                raise translate(cause, what) from cause

        self._task = BackgroundTask(lambda: group_starts.commit(member, first, topic_ids, deadline), then)

    def _record(self, topics: Sequence[str], then: Callable[[], object]) -> None:
        starts, deadline = self._group_starts, Deadline(self._timeout)
        assert starts is not None
        self._task = BackgroundTask(lambda: starts.record(topics, deadline), lambda _: then())

    def apply(self, requests: Mapping[KafkaPartition, SeekRequest], resolved: ResolvedOffsets) -> None:
        """Let the client fetch partitions from the offsets that a look-up has found, `resolved`.

        A partition for which it has found none keeps its seek request.
        """
        ready: list[KafkaPartition] = []
        for each in self._assignment.current(requests):
            if (start := resolved.offsets.get(each.partition)) is None:
                continue
            if not each.announced:
                at = start.at if isinstance(start, LostPosition) else start
                self._assignment.log_for_group("%s: is read here, from %d on", as_text([each.partition]), at)
                each.announce(self._listener.assigned(each.partition))
            if isinstance(start, LostPosition):
                each.lose(start.why, start.at)
            else:
                each.next = start
                self._assignment.note_topic(each, resolved.topic_ids.get(each.partition[0], each.request.topic_id))
                if start != each.request.target:
                    each.since = None  # the group's committed offset is beyond the target of the seek
                ready.append(each)
        self._assignment.start_fetching(ready)

    def request(self, requests: Mapping[KafkaPartition, SeekRequest]) -> None:
        """Let partitions be read at the targets of seeks.

        A reader without a group moves them at once if it knows that the topics' ids are unchanged. Otherwise the next
        poll first looks up the topics' ids, and the group's offsets: acknowledged messages are not read again.
        """
        for each, request in requests.items():
            each.next = request.target
            each.seek(request)
        if self._group_starts is None and all(request.topic_id == p.topic_id for p, request in requests.items()):
            self.apply(requests, ResolvedOffsets({p.partition: p.next for p in requests if p.next is not None}))
