"""The partitions assigned to one reader, and the offsets from which its client fetches them."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import InvalidState
from txnbridge.spi import Partition, Subscription
from txnbridge_kafka.client.librdkafka import ConfluentConsumer
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import translate
from txnbridge_kafka.read.partition import KafkaPartition, SeekRequest
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.write.acks import KafkaAckContext

_log = logging.getLogger("txnbridge.kafka.client")
_group_log = logging.getLogger("txnbridge.kafka")  # for users: rebalances, and the reasons why no message comes
_NAMED = 8  # how many partitions a log line names

# The interval at which a reader looks for partitions that were added; in a group the leader or the broker does so.
REFRESH_SECONDS = 3.0


@contextmanager
def telling_the_client() -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise translate(error, "telling the client what to read") from error


class KafkaAssignment:
    """One consumer of confluent-kafka with its assigned partitions. One thread at a time.

    The reader's next polls raise `errors`, which occurred in a callback or came in place of a message.
    """

    def __init__(self, cluster: KafkaCluster, subscription: Subscription, on_commit: Callable[..., None]) -> None:
        settings = cluster.settings
        self.partitions: dict[Partition, KafkaPartition] = {}
        self.paused: set[Partition] = set()
        self.errors: deque[BaseException] = deque()
        self.departures = 0  # how many times partitions were revoked or lost
        self.ahead: list[Any] = []  # messages that were fetched to find out the lag, and not yet handed out
        # By the eager protocols all partitions of a consumer are assigned at once, and each is fetched anew.
        self.eager = settings.group_protocol == "classic" and settings.assignment != "cooperative-sticky"
        self.context = KafkaAckContext(subscription.group or "")
        self.closed = False
        self._in_group = subscription.group is not None
        self._watched = cluster.watched_partitions
        self.client = _connect(settings, subscription, on_commit)

    def say(self, text: str, *args: object) -> None:
        if self._in_group:
            _group_log.info("group %r: " + text, self.context.group, *args)

    def add(self, partition: Partition) -> KafkaPartition:
        self._watched.add(partition)
        assigned = self.partitions[partition] = KafkaPartition(partition)
        return assigned

    def get(self, partition: Partition) -> KafkaPartition:
        """Return an assigned partition. Raise `InvalidState` if it is not assigned to this reader."""
        assigned = self.partitions.get(partition)
        if assigned is None or not assigned.announced:
            topic, number = partition
            raise InvalidState(
                f"{topic}[{number}] is not with this reader now; `positions()` lists the partitions that are"
            )
        return assigned

    def current(self, requests: Mapping[KafkaPartition, SeekRequest]) -> list[KafkaPartition]:
        """Return the partitions that are still assigned and whose latest seek request is the given one."""
        here = {*self.partitions.values()}
        return [each for each, request in requests.items() if each in here and each.request is request]

    def keep(self, error: BaseException, cause: BaseException) -> None:
        error.__cause__ = cause
        self.errors.append(error)

    def renew_context(self) -> None:
        """Update the proof of group membership that later acknowledgements carry."""
        if self._in_group:
            metadata = self.client.consumer_group_metadata()
            # A consumer that was removed from its group has no member id.
            if metadata != self.context.metadata and self.client.memberid():
                self.context.metadata = metadata

    def note_topic(self, assigned: KafkaPartition, topic_id: str | None) -> None:
        """Note the id of a partition's topic: a topic created later under the same name has another id."""
        assigned.topic_id = topic_id
        if topic_id is None:
            self.context.topic_ids.pop(assigned.partition, None)
        else:
            self.context.topic_ids[assigned.partition] = topic_id

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
            # Messages that were taken before the error are returned, because they would be skipped otherwise.
            self.keep(translate(error, "reading"), error)
        return batch

    def offset_ahead(self, assigned: KafkaPartition) -> int:
        """Return the client's next offset in a partition, which lies after control markers and aborted messages."""
        ahead = [each.offset() for each in self.ahead if (each.topic(), each.partition()) == assigned.partition]
        if ahead:
            return int(ahead[0])
        return int(self.client.position([assigned.at_next()])[0].offset)

    @telling_the_client()
    def place(self, assigned: Sequence[KafkaPartition]) -> None:
        """Let the client fetch partitions from their `next` offsets."""
        fresh = [each for each in assigned if not self._move(each)]
        touched = {*assigned}
        if fresh and self.eager:
            touched.update(each for each in self.partitions.values() if each.placed)
            self.client.assign([each.at_next() for each in touched])
        elif fresh:
            self.client.incremental_assign([each.at_next() for each in fresh])
        for each in touched:
            each.placed = True
            each.reached = 0
        for each in assigned:
            each.start_reading()
        self._pause([each for each in touched if each.partition in self.paused])
        self._forget_ahead(touched)

    def _move(self, assigned: KafkaPartition) -> bool:
        """Seek to the `next` offset. Return False if the client does not fetch the partition (any more)."""
        if not assigned.placed:
            return False
        try:
            self.client.seek(assigned.at_next())
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            self.displace([assigned])
            return False
        return True

    def displace(self, assigned: Iterable[KafkaPartition]) -> None:
        """Let the client stop fetching partitions."""
        placed = [each for each in assigned if each.placed]
        for each in placed:
            each.placed = False
        self._forget_ahead(placed)
        if not self.eager:
            self.client.incremental_unassign([each.at_next() for each in placed])

    def _forget_ahead(self, assigned: Iterable[KafkaPartition]) -> None:
        gone = {each.partition for each in assigned}
        self.ahead = [each for each in self.ahead if (each.topic(), each.partition()) not in gone]

    @telling_the_client()
    def pause(self, partitions: Sequence[Partition]) -> None:
        assigned = [self.get(partition) for partition in partitions]
        self.paused.update(partitions)
        self._pause(assigned)

    def _pause(self, assigned: Iterable[KafkaPartition]) -> None:
        if names := [each.at_next() for each in assigned if each.placed]:
            self.client.pause(names)

    @telling_the_client()
    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            if partition not in self.paused:
                self.get(partition)  # raises `InvalidState` if the partition is not assigned
                continue
            self.paused.discard(partition)
            assigned = self.partitions.get(partition)
            if assigned is not None and assigned.placed:
                self.client.resume([assigned.at_next()])
            if assigned is not None and assigned.reading:
                # From the reader's `next` offset: messages that the client returned during the pause were dropped.
                self.place([assigned])


def shown(partitions: Iterable[Partition]) -> str:
    """Return partitions as text for a log line, which names the first eight."""
    names = [f"{topic}[{number}]" for topic, number in partitions]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _connect(settings: KafkaSettings, subscription: Subscription, on_commit: Callable[..., None]) -> ConfluentConsumer:
    """Return a new consumer. Raise `InvalidOption` for settings that the client refuses."""
    protocol = {"group.protocol": settings.group_protocol}
    if settings.group_protocol == "classic":
        protocol["partition.assignment.strategy"] = settings.assignment
    try:
        return ConfluentConsumer(
            {
                # By default the client learns of new partitions only within five minutes.
                "topic.metadata.refresh.interval.ms": int(REFRESH_SECONDS * 1000),
                # After a seek the client waits for the answer to the fetch that is under way. A broker without messages
                # answers after this time, by the client's default half a second.
                "fetch.wait.max.ms": 100,
                # By default the client fetches nothing for a second after its queue was full, which is read faster.
                "fetch.queue.backoff.ms": 10,
                **settings.client,
                **settings.consumer,
                **protocol,
                "isolation.level": "read_committed",
                # A reader without a group commits nothing; the client requires a group's name all the same.
                "group.id": subscription.group or f"txnbridge-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                # A reader without a group mostly reads up to an end, after which no message may come for a long time.
                "enable.partition.eof": subscription.group is None,
                "on_commit": on_commit,
                "allow.auto.create.topics": False,
                "log_level": settings.log_level,
                "logger": _log,
                "error_cb": _log_error,
            }
        )
    except KafkaException as error:
        raise translate(error, "opening a consumer") from error


def _log_error(error: KafkaError) -> None:
    """Log an error of the client that concerns no message: a lost connection, which it re-establishes by itself."""
    _log.debug("waited out: %s", error)
