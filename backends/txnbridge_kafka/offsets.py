"""What a cluster says about offsets."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import confluent_kafka.admin
from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.clients import AdminClient, look_at, result_of, seconds, settle
from txnbridge_kafka.errors import kafka_error, translate
from txnbridge_kafka.settings import Settings

_log = logging.getLogger("txnbridge.kafka.client")

_SPEC: Any = confluent_kafka.admin.OffsetSpec  # type: ignore[attr-defined]  # missing in the client's list of names
_LISTING = "reading where partitions begin and end"
_PAUSE = 0.02  # a new partition gets its leader within milliseconds
_NOT_NOW = {
    KafkaError._NOENT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.OFFSET_NOT_AVAILABLE,  # of a new leader, until it knows how far the others have come
    KafkaError.FENCED_LEADER_EPOCH,  # the client or the broker has not heard of a new leader yet
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.REQUEST_TIMED_OUT,
}


class Offsets:
    """Questions, through a client of their own: a consumer that polls lets no other thread have its turn.

    Any thread may ask. Each question ends by its deadline, with `DeadlineExceeded`.
    """

    def __init__(self, settings: Settings) -> None:
        told: dict[str, Any] = {**settings.client, "log_level": settings.log_level, "logger": _log}
        self._client = AdminClient(told)
        self._settled = False

    def begins(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """The first offset that retention has left."""
        return self._listed(partitions, _SPEC.earliest(), deadline)

    def ends(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Where readers of committed messages come to: the first undecided message, or the end."""
        return self._listed(partitions, _SPEC.latest(), deadline)

    def since(
        self, partitions: Iterable[Partition], timestamp: int, deadline: Deadline
    ) -> dict[Partition, tuple[int, int]]:
        """The first offset stamped at or after a time, or the end if there is none; and the end.

        The broker counts the markers of transactions too, which are stamped when it writes them.
        """
        names = list(partitions)
        # The ends first: a message that comes between the two questions is not passed over then.
        ends = self.ends(names, deadline)
        found = self._listed(names, _SPEC.for_timestamp(timestamp), deadline)
        return {name: (found[name] if 0 <= found[name] < ends[name] else ends[name], ends[name]) for name in names}

    def committed(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> dict[Partition, int | None]:
        """The positions of a group, None for a partition that has none.

        With `decided=True` without the partitions that a transaction has acknowledged and not ended yet.
        """
        asked = [TopicPartition(*partition) for partition in partitions]
        if not asked:
            return {}
        self._client.poll(0)
        what = f"reading the positions of group {group!r}"
        answers = self._client.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, asked)], require_stable=decided, request_timeout=seconds(deadline)
        )
        found: dict[Partition, int | None] = {}
        for each in _answer(answers[group], what, deadline).topic_partitions:
            if each.error is None:
                found[each.topic, each.partition] = each.offset if each.offset >= 0 else None
            elif each.error.code() != KafkaError.UNSTABLE_OFFSET_COMMIT:
                raise translate(KafkaException(each.error), f"{what}, {each.topic}[{each.partition}]")
        return found

    def counts(self, topics: Iterable[str], deadline: Deadline) -> dict[str, int]:
        """How many partitions each topic has. Raises `NotFound`."""
        found: dict[str, int] = {}
        for topic in topics:
            what = f"looking for topic {topic!r}"
            try:
                told = look_at(self._client, deadline, topic).topics[topic]
                if told.error is not None:
                    raise KafkaException(told.error)
            except KafkaException as error:
                raise translate(error, what) from error
            found[topic] = len(told.partitions)
        return found

    def _listed(self, partitions: Iterable[Partition], spec: Any, deadline: Deadline) -> dict[Partition, int]:
        asked = dict.fromkeys(partitions, spec)
        if asked and not self._settled:
            settle(self._client, next(iter(asked))[0], deadline)
            self._settled = True
        found: dict[Partition, int] = {}
        while asked:
            found.update(self._list(asked, deadline))
            asked = {partition: spec for partition in asked if partition not in found}
            if asked:
                # Partitions that are new, or without a leader at the moment. A look at the topics shows which is new
                # to the client, and whether they exist.
                deadline.check(_LISTING)
                time.sleep(min(_PAUSE, deadline.left()))
                self.counts({topic for topic, _ in asked}, deadline)
        return found

    def _list(self, asked: Mapping[Partition, Any], deadline: Deadline) -> dict[Partition, int]:
        """The answers that there are."""
        self._client.poll(0)  # or its log would pile up
        answers: Mapping[TopicPartition, Future[Any]] = self._client.list_offsets(
            {TopicPartition(*partition): spec for partition, spec in asked.items()},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=seconds(deadline),
        )
        found: dict[Partition, int] = {}
        for each, answer in answers.items():
            try:
                offset = answer.result(deadline.left()).offset
            except FutureTimeoutError:
                continue
            except KafkaException as error:
                if error.args[0].code() not in _NOT_NOW:
                    raise translate(error, _LISTING) from error
            else:
                # The client says this, and nothing of an error, where it got no answer in time.
                if offset != OFFSET_INVALID:
                    found[each.topic, each.partition] = offset
        return found


def _answer(answer: Future[Any], what: str, deadline: Deadline) -> Any:
    try:
        return result_of(answer, what, deadline)
    except KafkaException as error:
        raise translate(error, what) from error


def is_passing(error: BaseException | None) -> bool:
    """Whether an error of the client is about membership or a coordinator, which the client mends by itself."""
    found = None if error is None else kafka_error(error)
    return found is not None and (found.retriable() or found.code() in _PASSING)


_PASSING = {
    KafkaError._STATE,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError._DESTROY,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
