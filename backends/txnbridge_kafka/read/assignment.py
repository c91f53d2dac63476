"""The partitions assigned to one reader, and the confluent-kafka consumer that fetches them."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txnbridge.errors import InvalidState
from txnbridge.spi import Partition, ReaderListener, Subscription
from txnbridge_kafka.client.librdkafka import ConfluentConsumer, GroupMembership, membership_of
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import translate
from txnbridge_kafka.read.partition import KafkaPartition, PartitionReadState, SeekRequest
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.write.acks import KafkaAckContext

_log = logging.getLogger("txnbridge.kafka.client")
_group_log = logging.getLogger("txnbridge.kafka")  # for users: rebalances, and why no messages arrive
_MOST_NAMED = 8  # a log line names no more partitions

# The interval at which new partitions of the topics are looked up: by a reader without a group, or by the client.
REFRESH_SECONDS = 3.0


@contextmanager
def translating_errors() -> Iterator[None]:
    """Translate a `KafkaException` of the consumer into txnbridge's error."""
    try:
        yield
    except KafkaException as error:
        raise translate(error, "assigning partitions to the client") from error


class KafkaAssignment:
    """The partitions that a reader has now, and confluent-kafka's consumer, which fetches them. One thread at a time.

    `errors` has the errors of callbacks, and the errors that the client returned in place of messages. The reader's
    polls raise them.
    """

    def __init__(self, cluster: KafkaCluster, subscription: Subscription) -> None:
        settings = cluster.settings
        self.partitions: dict[Partition, KafkaPartition] = {}
        self.paused: set[Partition] = set()
        self.errors: deque[BaseException] = deque()
        self.revocations = 0  # how many times partitions were revoked or lost
        self.prefetched: list[Any] = []  # messages that `lag` fetched, and that the next poll hands out
        # With an eager protocol each assignment replaces all partitions of the client, which fetches all of them anew.
        self.eager = settings.group_protocol == "classic" and settings.assignment != "cooperative-sticky"
        self.context = KafkaAckContext(subscription.group or "")
        self.closed = False
        self._in_group = subscription.group is not None
        self._watched = cluster.watched_partitions
        self.client = open_consumer(settings, subscription)

    def log_for_group(self, text: str, *args: object) -> None:
        """Log a line about the reader's group. A reader without a group logs nothing."""
        if self._in_group:
            _group_log.info("group %r: " + text, self.context.group, *args)

    def add(self, partition: Partition) -> KafkaPartition:
        self._watched.add(partition)
        self.context.epochs.pop(partition, None)
        assigned = self.partitions[partition] = KafkaPartition(partition, self.context.epochs)
        return assigned

    def get(self, partition: Partition) -> KafkaPartition:
        """Return an assigned partition. Raise `InvalidState` if it is not assigned to this reader."""
        assigned = self.partitions.get(partition)
        if assigned is None or not assigned.announced:
            topic, number = partition
            raise InvalidState(
                f"{topic}[{number}] is not assigned to this reader now; `positions()` lists its partitions"
            )
        return assigned

    def current(self, requests: Mapping[KafkaPartition, SeekRequest]) -> list[KafkaPartition]:
        """Return the partitions of `requests` that are still assigned and have had no newer seek request."""
        here = {*self.partitions.values()}
        return [each for each, request in requests.items() if each in here and each.request is request]

    def raise_later(self, error: BaseException, cause: BaseException) -> None:
        """Let the reader's next poll raise an error."""
        error.__cause__ = cause
        self.errors.append(error)

    def renew_context(self) -> None:
        """Update the group membership for later acknowledgements: the member's id and generation."""
        if self._in_group:
            metadata = self.client.consumer_group_metadata()
            # A consumer that was removed from its group has no member id.
            if metadata != self.context.metadata and self.client.memberid():
                self.context.metadata = metadata

    def membership(self) -> GroupMembership | None:
        """Return the membership in the group; None if this consumer is no member now."""
        return membership_of(self.client.consumer_group_metadata()) if self.client.memberid() else None

    def note_topic(self, assigned: KafkaPartition, topic_id: str | None) -> None:
        """Store the id that a partition's topic has now.

        With the id an acknowledgement notices that the topic was deleted and created again since.
        """
        assigned.topic_id = self.context.topic_ids[assigned.partition] = topic_id

    def fetch(self, limit: int, wait: float) -> list[Any]:
        """Return the messages that the client has buffered, else wait for the first ones for up to `wait` seconds."""
        batch: list[Any] = []
        try:
            batch = self.client.consume(limit, 0)
            if not batch and wait > 0 and (first := self.client.poll(wait)) is not None:
                batch = [first]
                if limit > 1:
                    batch += self.client.consume(limit - 1, 0)
        except KafkaException as error:
            # Messages that the client returned before the error would be skipped if they were not returned.
            self.raise_later(translate(error, "reading"), error)
        return batch

    def client_position(self, assigned: KafkaPartition) -> int:
        """Return the offset that the client reads next in a partition.

        This offset is beyond the control markers and aborted messages that the client has skipped.
        """
        ahead = [each.offset() for each in self.prefetched if (each.topic(), each.partition()) == assigned.partition]
        return int(ahead[0] or 0) if ahead else int(self.client.position([assigned.at_next()])[0].offset)

    @translating_errors()
    def start_fetching(self, assigned: Sequence[KafkaPartition]) -> None:
        """Let the client fetch partitions from their `next` offsets."""
        fresh = [each for each in assigned if not self._seek(each)]
        touched = {*assigned}
        if fresh and self.eager:
            touched.update(each for each in self.partitions.values() if each.fetched)
            self.client.assign([each.at_next() for each in touched])
        elif fresh:
            self.client.incremental_assign([each.at_next() for each in fresh])
        for each in touched:
            each.fetched, each.reached = True, 0
        for each in assigned:
            each.state = PartitionReadState.READING
        self._pause([each for each in touched if each.partition in self.paused])
        self._drop_prefetched(touched)

    def _seek(self, assigned: KafkaPartition) -> bool:
        """Let the client seek to the `next` offset. Return False if the client does not fetch the partition."""
        if not assigned.fetched:
            return False
        try:
            self.client.seek(assigned.at_next())
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            self.stop_fetching([assigned])
            return False
        return True

    def stop_fetching(self, assigned: Iterable[KafkaPartition]) -> None:
        """Let the client stop fetching partitions."""
        fetched = [each for each in assigned if each.fetched]
        for each in fetched:
            each.fetched = False
        self._drop_prefetched(fetched)
        if not self.eager:
            self.client.incremental_unassign([each.at_next() for each in fetched])

    def _drop_prefetched(self, assigned: Iterable[KafkaPartition]) -> None:
        gone = {each.partition for each in assigned}
        self.prefetched = [each for each in self.prefetched if (each.topic(), each.partition()) not in gone]

    @translating_errors()
    def pause(self, partitions: Sequence[Partition]) -> None:
        assigned = [self.get(partition) for partition in partitions]
        self.paused.update(partitions)
        self._pause(assigned)

    def _pause(self, assigned: Iterable[KafkaPartition]) -> None:
        if names := [each.at_next() for each in assigned if each.fetched]:
            self.client.pause(names)

    @translating_errors()
    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            if partition not in self.paused:
                self.get(partition)  # raises `InvalidState` if the partition is not assigned
                continue
            self.paused.discard(partition)
            if (assigned := self.partitions.get(partition)) is not None and assigned.fetched:
                self.client.resume([assigned.at_next()])
            if assigned is not None and assigned.reading:
                # From the reader's `next` offset: messages that the client returned during the pause were dropped.
                self.start_fetching([assigned])


class GroupRebalance:
    """The callbacks for a group's rebalances: partitions are assigned to this member, revoked, or lost.

    The client calls them inside its `poll` or `close`, and would turn their exceptions into SystemError. So each
    exception is stored, and the reader's next poll raises it.
    """

    def __init__(self, assignment: KafkaAssignment, listener: ReaderListener) -> None:
        self._assignment = assignment
        self._listener = listener
        self.joins = bool(assignment.context.group)  # whether the group's first answer is awaited

    def join(self, topics: Sequence[str]) -> None:
        self._assignment.client.subscribe(
            list(topics), on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost
        )
        self._assignment.log_for_group("joining; the partitions of a dead member come only after its session time-out")

    def on_assign(self, client: Any, partitions: list[TopicPartition]) -> None:
        self.joins = False
        try:
            if not self._assignment.closed:
                for partition in _keys(partitions):
                    self._assignment.add(partition)
                self._assignment.log_for_group("given %s", as_text(_keys(partitions)) or "nothing")
            # The client fetches a partition only after the partition's first offset is found.
            (client.assign if self._assignment.eager else client.incremental_assign)([])
        except BaseException as error:
            self._assignment.errors.append(error)

    def on_revoke(self, client: object, partitions: list[TopicPartition]) -> None:
        self._assignment.log_for_group("gives up %s in a rebalance", as_text(_keys(partitions)))
        self._leave(partitions, before=self._revoking)

    def on_lost(self, client: object, partitions: list[TopicPartition]) -> None:
        names = as_text(_keys(partitions))
        self._assignment.log_for_group("lost %s: this member's session timed out at the broker", names)
        self._leave(partitions, after=self._listener.lost)

    def _leave(
        self,
        partitions: list[TopicPartition],
        before: Callable[[Sequence[Partition]], None] | None = None,
        after: Callable[[Sequence[Partition]], None] | None = None,
    ) -> None:
        assignment = self._assignment
        assignment.revocations += 1
        try:
            leaving = [key for key in _keys(partitions) if key in assignment.partitions]
            announced = [key for key in leaving if assignment.partitions[key].announced]
            if announced and before and not assignment.closed:
                try:
                    before(announced)
                except BaseException as error:
                    assignment.errors.append(error)
            here = [key for key in leaving if key in assignment.partitions]
            assignment.stop_fetching([assignment.partitions.pop(key) for key in here])
            if assignment.eager:
                assignment.client.unassign()
            if announced and after and not assignment.closed:
                after(announced)
        except BaseException as error:
            assignment.errors.append(error)

    def _revoking(self, partitions: Sequence[Partition]) -> None:
        # The group may have a new generation, which acknowledgements must name.
        self._assignment.renew_context()
        self._listener.revoking(partitions)


def _keys(partitions: list[TopicPartition]) -> list[Partition]:
    return [(each.topic, each.partition) for each in partitions]


def as_text(partitions: Iterable[Partition]) -> str:
    names = [f"{topic}[{number}]" for topic, number in partitions]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


# While a dead resolver of half messages counts as a member, nothing of its group is published: by default for 45 s.
_RESOLVERS = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 2_000}


def open_consumer(settings: KafkaSettings, subscription: Subscription) -> ConfluentConsumer:
    """Return a new consumer. Raise `InvalidOption` for settings that the client refuses."""
    protocol = {"group.protocol": settings.group_protocol}
    resolvers = settings.group_protocol == "classic" and (subscription.group or "").startswith(settings.prefix)
    if settings.group_protocol == "classic":
        protocol["partition.assignment.strategy"] = settings.assignment
    try:
        return ConfluentConsumer(
            {
                # By default the client learns of new partitions only within five minutes.
                "topic.metadata.refresh.interval.ms": int(REFRESH_SECONDS * 1000),
                # After a seek the client waits for the answer to its last fetch. A broker without new messages answers
                # after this time; the client's default is half a second.
                "fetch.wait.max.ms": 100,
                # By default the client fetches nothing for a second after its queue was full; this reader is faster.
                "fetch.queue.backoff.ms": 10,
                **(_RESOLVERS if resolvers else {}),
                **settings.client,
                **settings.consumer,
                **protocol,
                "isolation.level": "read_committed",
                # A reader without a group commits no offsets, but the client requires a group id.
                "group.id": subscription.group or f"txnbridge-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                # A reader without a group mostly reads up to the end of a partition, which these events report.
                "enable.partition.eof": subscription.group is None,
                "allow.auto.create.topics": False,
                "log_level": settings.log_level,
                "logger": _log,
                # Errors such as a lost connection, from which the client recovers by itself.
                "error_cb": partial(_log.debug, "the client recovers from: %s"),
            }
        )
    except KafkaException as error:
        raise translate(error, "opening a consumer") from error
