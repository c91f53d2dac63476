"""A reader of committed messages, as a member of a group or without a group."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge import errors
from txnbridge.spi import (
    BackgroundTask,
    Context,
    Deadline,
    Message,
    MessageColumns,
    Partition,
    Position,
    Reader,
    ReaderListener,
    Subscription,
    as_offset,
)
from txnbridge_kafka.client.librdkafka import warm_up
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import DENIED, MISSING, translate
from txnbridge_kafka.outcome.hanging_transactions import write_missing_markers_of_group
from txnbridge_kafka.read.assignment import GroupRebalance, KafkaAssignment
from txnbridge_kafka.read.partition import (
    Conversion,
    Found,
    KafkaPartition,
    PartitionReadState,
    SeekRequest,
    has_errors,
    split_runs,
)
from txnbridge_kafka.read.start_lookup import StartLookup
from txnbridge_kafka.read.start_positions import (
    KafkaGroupStartPositions,
    KafkaStartPositions,
    ResolvedOffsets,
    is_another_topic,
    out_of_range_text,
)
from txnbridge_kafka.write.acks import KafkaAckContext

_log = logging.getLogger("txnbridge.kafka.client")

# The time limit for the requests of a seek, which has no deadline.
SEEK_SECONDS = 10.0
# The longest waits inside the client, which neither a signal nor an assignment nor the end of a look-up interrupts; the
# second is for polls during a member's first join, and during a look-up, which takes milliseconds.
_POLL_SECONDS, _POLL_DURING_LOOKUP_SECONDS = 0.25, 0.005
# The interval at which a reader checks its topics' ids, and the least time for the answer. Within the interval no topic
# is deleted, created again and filled beyond the reader's offset.
_TOPIC_ID_CHECK_SECONDS, _TOPIC_ID_ANSWER_SECONDS = 0.1, 1.0

_OUT_OF_RANGE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
# The client cannot read a batch: it is damaged, of an unknown format or too large. It is fetched again and again.
_BROKEN = {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED, KafkaError.MSG_SIZE_TOO_LARGE}


class KafkaReader(Reader):
    """Reads committed messages by one consumer of confluent-kafka. One thread at a time; another one does look-ups."""

    def __init__(
        self,
        subscription: Subscription,
        listener: ReaderListener,
        context: Context,
        cluster: KafkaCluster,
        deadline: Deadline,
    ) -> None:
        self._subscription = subscription
        self._timing = cluster.settings.timing
        self._fatal_error: errors.TxnBridgeError | None = None  # the error after which the client reads no more
        self._check_at: dict[str, float] = {}  # by topic, when its id is looked up next
        # A group may wait for a missing topic, so the topic is created; for a reader without a group it is not.
        creates, topics = subscription.creates, cluster.topics
        counts = {each: topics.partitions(each, deadline, create=creates(each)) for each in subscription.topics}
        self._requests = cluster.requests
        self._assignment = KafkaAssignment(cluster, subscription)
        try:
            starts = self._start_positions(context, cluster, counts, deadline)
            self._lookup = StartLookup(self._assignment, starts, listener, cluster.settings.timeout)
            self._rebalance = GroupRebalance(self._assignment, listener)
            if subscription.group is None:
                self._begin_without_group(starts, counts, deadline)
            else:
                self._rebalance.join(subscription.topics)
        except BaseException:
            with suppress(errors.DeadlineExceeded):
                self.close(deadline)
            raise

    def _start_positions(
        self, context: Context, cluster: KafkaCluster, counts: Mapping[str, int], deadline: Deadline
    ) -> KafkaStartPositions:
        if self._subscription.group is None:
            return KafkaStartPositions(self._requests, self._subscription)
        write_missing_markers = partial(write_missing_markers_of_group, cluster, self._subscription.group)
        return KafkaGroupStartPositions(
            self._requests, self._subscription, context, counts, write_missing_markers, deadline
        )

    def _begin_without_group(self, starts: KafkaStartPositions, counts: Mapping[str, int], deadline: Deadline) -> None:
        for topic in counts:
            # Otherwise the client may ask for the topic's metadata up to a second late.
            warm_up(self._assignment.client, topic, deadline)
        partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
        assigned = {partition: self._assignment.add(partition) for partition in partitions}
        if isinstance(self._subscription.start, int):
            self._lookup.request(starts.at_time(assigned, self._subscription.start, deadline))
        else:
            topic_ids = self._requests.topic_ids(counts, deadline)
            first = ResolvedOffsets(starts.first(partitions, deadline), topic_ids=topic_ids)
            self._lookup.apply({each: each.request for each in assigned.values()}, first)

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        return self._poll(max_messages, deadline, KafkaPartition.to_messages)

    def poll_columns(self, max_messages: int, deadline: Deadline) -> list[MessageColumns]:
        return self._poll(max_messages, deadline, KafkaPartition.to_columns)

    def _poll(self, max_messages: int, deadline: Deadline, convert: Conversion[Found]) -> list[Found]:
        while True:
            self._raise_pending_error()
            self._lookup.advance()
            why_lost = self._why_lost()
            idle = _POLL_DURING_LOOKUP_SECONDS if self._lookup.busy or self._rebalance.joins else _POLL_SECONDS
            wait = 0.0 if why_lost else min(deadline.left(), idle)
            batch, self._assignment.prefetched = self._assignment.prefetched, []
            room = min(max_messages, self._timing.converted_at_once) - len(batch)
            if room > 0:
                batch += self._assignment.fetch(room, 0.0 if batch else wait)
            found = self._hand_out(batch, convert)
            if found and len(batch) == self._timing.converted_at_once < max_messages:
                found = self._add_buffered(found, max_messages - len(batch), sum(map(len, batch)), convert)
            if found:
                found = self._without_recreated(found, deadline)
            if found:
                self._assignment.renew_context()
                return found
            if why_lost:
                raise errors.PositionLost(why_lost)
            if deadline.expired:
                self._raise_pending_error()
                return []

    def _why_lost(self) -> str:
        """Return the error text of an unpaused partition whose next messages are lost; empty if there is none."""
        lost = (each for each in self._assignment.partitions.values() if each.state is PartitionReadState.LOST)
        return next((each.why_lost for each in lost if each.partition not in self._assignment.paused), "")

    def _add_buffered(self, found: list[Found], room: int, size: int, convert: Conversion[Found]) -> list[Found]:
        """Add up to `room` messages that the client has buffered; return the old and new messages.

        Stop at `Timing.poll_bytes`, too: `size` is the number of bytes of the old messages. Messages of a partition
        that was revoked meanwhile are left out.
        """
        assignment, revocations, timing = self._assignment, self._assignment.revocations, self._timing
        while room > 0 and size < timing.poll_bytes and not assignment.errors:
            batch = assignment.fetch(min(timing.converted_at_once, room), 0)
            if not batch:
                break
            room -= len(batch)
            size += sum(map(len, batch))
            found += self._hand_out(batch, convert)
        if assignment.revocations == revocations:
            return found
        # A partition was revoked meanwhile. The member that has it now gets its messages again.
        here = {(*partition, each.source) for partition, each in assignment.partitions.items()}
        return [each for each in found if isinstance(each, Message) and (*each[:2], each.source) in here]

    def _without_recreated(self, messages: list[Found], deadline: Deadline) -> list[Found]:
        """Drop the messages of topics that were deleted and created again, and return the other messages.

        The partitions of such topics are marked as lost. Topic ids are looked up every tenth of a second, and by each
        acknowledgement of a group.
        """
        topics = {m.topic for m in messages} if len(self._subscription.topics) > 1 else {*self._subscription.topics}
        topics = {topic for topic in topics if self._check_at.get(topic, 0.0) <= time.monotonic()}
        if not topics:
            return messages
        try:
            topic_ids = self._requests.topic_ids(topics, Deadline(max(deadline.left(), _TOPIC_ID_ANSWER_SECONDS)))
        except errors.TxnBridgeError as error:
            if not isinstance(error, errors.BrokerUnavailable):
                self._assignment.errors.append(error)  # for the next poll: these messages are not returned again
            _log.debug("looking up the topic ids of %s is repeated: %s", ", ".join(sorted(topics)), error)
            if self._subscription.group is not None:
                return messages
            self.nack({(m.topic, m.partition): [m.position] for m in reversed(messages)})
            return []
        self._check_at.update(dict.fromkeys(topics, time.monotonic() + _TOPIC_ID_CHECK_SECONDS))
        here = [self._assignment.partitions[key] for key in {(m.topic, m.partition) for m in messages}]
        recreated = {
            each.partition: each for each in here if is_another_topic(topic_ids.get(each.partition[0]), each.topic_id)
        }
        if not recreated:
            return messages
        for partition, each in recreated.items():
            (at,) = next(m.position for m in messages if (m.topic, m.partition) == partition)
            each.lose(self._lookup.starts.recreated(partition, at).why, at)
        return [message for message in messages if (message.topic, message.partition) not in recreated]

    def _raise_pending_error(self) -> None:
        if self._assignment.errors:
            raise self._assignment.errors.popleft()
        if self._fatal_error is not None:
            raise self._fatal_error

    def _hand_out(self, batch: list[Any], convert: Conversion[Found]) -> list[Found]:
        if has_errors(batch):
            for message in batch:
                if (error := message.error()) is not None:
                    self._note_error(error, message)
            batch = [message for message in batch if message.error() is None]
        found: list[Found] = []
        for partition, run in split_runs(batch, self._subscription.topics) if batch else ():
            assigned = self._assignment.partitions.get(partition)
            if assigned is None:
                continue  # the partition was revoked meanwhile
            if not assigned.reading or partition in self._assignment.paused:
                assigned.reached = None
                continue
            found += assigned.hand_out(run, convert)
        return found

    def _note_error(self, error: KafkaError, message: Any) -> None:
        """Handle an error that the client returned in place of a message.

        Keep a fatal error, a refusal or an unreadable batch for `poll` to raise, look up an offset again that is out of
        range, note the end of a partition, and log any other error, from which the client recovers.
        """
        partition = message.topic(), message.partition()
        assigned = self._assignment.partitions.get(partition)
        reading = assigned is not None and assigned.reading
        if error.code() == KafkaError._PARTITION_EOF:
            if assigned is not None and reading and assigned.reached is not None:
                assigned.reached = message.offset()
        elif error.code() in _OUT_OF_RANGE and assigned is not None and reading:
            at = assigned.next or 0
            if message.offset() is None:  # by the leaders' epochs the client knows that the log was truncated
                assigned.lose(out_of_range_text(self._lookup.starts.owner(), partition, at, 0, None), at)
            elif message.offset() >= at:  # otherwise the error is from before a seek
                assigned.seek(SeekRequest(refused=at, topic_id=assigned.topic_id))
        elif error.code() == KafkaError._FATAL:
            self._fatal_error = translate(error, f"reading in group {self._assignment.context.group!r}")
            self._fatal_error.__cause__ = KafkaException(error)
        elif error.code() in DENIED | MISSING | _BROKEN:
            cause = KafkaException(error)
            self._assignment.raise_later(translate(cause, f"reading {partition[0]}"), cause)
        else:
            _log.debug("the client recovers from: %s", error)

    def positions(self) -> dict[Partition, Position]:
        partitions = self._assignment.partitions
        return {partition: (each.next,) for partition, each in partitions.items() if each.next is not None}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        offsets = {self._assignment.get(partition): as_offset(position) for partition, position in positions.items()}
        # A seek after an abort, to an offset that was just handed out, needs no request to the broker.
        elsewhere = {each.partition: offset for each, offset in offsets.items() if not each.was_handed_out(offset)}
        for partition, begin in self._requests.begins(elsewhere, Deadline(SEEK_SECONDS)).items():
            if (at := elsewhere[partition]) < begin:
                raise errors.PositionLost(out_of_range_text("the position to seek", partition, at, begin, begin))
        self._lookup.request({each: SeekRequest(target=offset) for each, offset in offsets.items()})

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        offsets = {self._assignment.get(partition): as_offset(position) for partition, position in positions.items()}
        self._lookup.request({p: SeekRequest(target=offset, topic_id=p.topic_id) for p, offset in offsets.items()})

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        known = {partition: each for partition, each in self._assignment.partitions.items() if each.next is not None}
        self._lookup.request(self._lookup.starts.at_time(known, timestamp, deadline))

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        lowest = {partition: min(map(as_offset, given)) for partition, given in positions.items() if given}
        # The messages of a revoked partition are delivered again to the member that has it now.
        here = {p: lowest[key] for key, p in self._assignment.partitions.items() if key in lowest}
        targets = {p: at if p.next is None else min(at, p.next) for p, at in here.items()}
        self._lookup.request({p: SeekRequest(target=at, topic_id=p.topic_id) for p, at in targets.items()})

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._assignment.pause(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._assignment.resume(partitions)

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        assignment, group = self._assignment, self._subscription.group
        # Fetching the next message moves the client's position beyond control markers, which are no lag.
        assignment.prefetched = assignment.prefetched or assignment.fetch(1, 0)
        assigned, ends = assignment.partitions, self._requests.ends(assignment.partitions, deadline)
        if group is None:
            return {key: self._lag_of(each, each.next or 0, ends[key]) for key, each in assigned.items()}
        acknowledged = self._requests.committed(group, assigned, deadline)
        begins = self._requests.begins([key for key in assigned if acknowledged.get(key) is None], deadline)
        offsets = {key: begins[key] if key in begins else acknowledged[key] or 0 for key in assigned}
        return {key: self._lag_of(each, offsets[key], ends[key]) for key, each in assigned.items()}

    def _lag_of(self, assigned: KafkaPartition, offset: int, end: int) -> int:
        if assigned.reading and assigned.reached is not None and offset >= (assigned.next or 0):
            # Every message that was handed out is acknowledged, so the client's position counts.
            offset = max(offset, assigned.reached, self._assignment.client_position(assigned))
        return max(0, end - offset)

    def ack_context(self) -> KafkaAckContext:
        if self._assignment.context.metadata is None:
            self._assignment.renew_context()
        return self._assignment.context

    def close(self, deadline: Deadline) -> None:
        if self._assignment.closed:
            return
        self._assignment.closed = True
        closing = BackgroundTask(self._assignment.client.close, lambda _: None)
        if not closing.join(deadline.left()):
            raise errors.DeadlineExceeded(f"no broker answered while the reader was closed, for {deadline.seconds:g} s")
        closing.finish()
        self._assignment.log_for_group("left")
