"""Reads the topic __transaction_state, in which coordinators record the states of all transactions.

A coordinator itself describes only the last transaction of an id. The topic has every decision with the partitions of
its transaction, until compaction removes all but the id's last record.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txnbridge.errors import StorageFailed
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client import wire
from txnbridge_kafka.client.librdkafka import ConfluentConsumer
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import translate
from txnbridge_kafka.topics import LOG_GROUP, offsets_partition

STATE_TOPIC = "__transaction_state"
_ONGOING = 1
_PREPARE_COMMIT, _PREPARE_ABORT = 2, 3
_COMMITTED, _ABORTED = {_PREPARE_COMMIT, 4}, {_PREPARE_ABORT, 5}
_READ_AT_ONCE = 500

_log = logging.getLogger("txnbridge.kafka.client")


@dataclass(frozen=True)
class RecordedDecision:
    """The decision to commit or abort a transaction, with the producer epoch of its control markers."""

    pid: int
    epoch: int
    commit: bool
    partitions: frozenset[Partition]


@dataclass(frozen=True)
class StateRecord:
    """One record of a transactional id in `__transaction_state`; `status` is Kafka's number for the state."""

    pid: int
    epoch: int
    status: int
    partitions: frozenset[Partition]
    start: int  # the transaction's start time, in milliseconds


# A record's value, after its version.
_RECORD = wire.structure(
    "pid:i64 epoch:i16 timeout:i32 status:i8 topics:[name:str partitions:[i32]] changed:i64 start:i64"
)
# Stands for a tombstone: the id has expired at the coordinator.
_EXPIRED = StateRecord(-1, -1, 6, frozenset(), -1)


def state_records(cluster: KafkaCluster, id: str, deadline: Deadline) -> list[StateRecord]:
    """Return the records of an id that are not compacted away, oldest first.

    Raise `AccessDenied` if this user may not read `__transaction_state`, and `NotFound` if it does not exist.
    """
    # Kafka uses the same hash for transactional ids and for groups.
    number = offsets_partition(id, cluster.topics.partitions(STATE_TOPIC, deadline))[1]
    return [
        _EXPIRED if value is None else parsed_state_record(value)
        for key, value in _records(cluster, number, deadline)
        if key == _key(id)
    ]


def recorded_decisions(cluster: KafkaCluster, id: str, deadline: Deadline) -> list[RecordedDecision]:
    """Return the recorded decisions about an id's transactions, oldest first. Raise `AccessDenied` or `NotFound`."""
    return [
        RecordedDecision(record.pid, record.epoch, record.status == _PREPARE_COMMIT, record.partitions)
        for record in state_records(cluster, id, deadline)
        if record.status in (_PREPARE_COMMIT, _PREPARE_ABORT)
    ]


def outcome_by_start(records: Sequence[StateRecord], pid: int, start: int) -> bool | None:
    """Return whether the transaction with this start time was committed; None if no record has its outcome."""
    for record in records:
        if (record.pid, record.start) == (pid, start) and record.status in _COMMITTED | _ABORTED:
            return record.status in _COMMITTED
    return None


def last_outcome(records: Sequence[StateRecord], pid: int, epoch: int) -> bool | None:
    """Return whether an epoch's last transaction was committed; None if no record has the outcome.

    Raise `NotRecordedYetError` while the epoch's last record is the last one of the id, because the outcome may still
    follow.
    """
    own = [number for number, record in enumerate(records) if (record.pid, record.epoch) == (pid, epoch)]
    if not own:
        return None
    last, later = records[own[-1]], records[own[-1] + 1 :]
    if not later:
        raise NotRecordedYetError
    if last.status == _ONGOING:
        # An opening of the id, or a time-out, aborts the open transaction under the next epoch.
        fenced = (later[0].pid, later[0].epoch) == (pid, epoch + 1) and later[0].status in _ABORTED
        return False if fenced else None
    return last.status in _COMMITTED if last.status in _COMMITTED | _ABORTED else None


class NotRecordedYetError(Exception):
    """The coordinator may not have recorded a transaction's outcome yet: ask again."""


def _records(cluster: KafkaCluster, number: int, deadline: Deadline) -> Iterator[tuple[bytes | None, bytes | None]]:
    reader = ConfluentConsumer(
        {
            **cluster.settings.client,
            "group.id": LOG_GROUP,
            "isolation.level": "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "log_level": 0,
            "logger": _log,
        }
    )
    what = f"reading {STATE_TOPIC}[{number}]"
    try:
        _, end = reader.get_watermark_offsets(TopicPartition(STATE_TOPIC, number), timeout=max(deadline.left(), 0.01))
        reader.assign([TopicPartition(STATE_TOPIC, number, 0)])
        while True:
            deadline.check(what)
            for message in reader.consume(_READ_AT_ONCE, min(deadline.left(), 0.5)):
                error = message.error()
                if error is None:
                    yield message.key(), message.value()
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if (message.offset() or 0) >= end - (error is None):
                    return
    except KafkaException as error:
        raise translate(error, what) from error
    finally:
        reader.close()


def _key(id: str) -> bytes:
    name = id.encode()
    return struct.pack(">hh", 0, len(name)) + name


def parsed_state_record(value: bytes) -> StateRecord:
    try:
        # Since version 1 a record is flexible, as a request is.
        (version,) = struct.unpack_from(">h", value)
        found = wire.Reader(value, classic=version < 1, at=2).read(_RECORD)
        partitions = frozenset((topic.name, number) for topic in found.topics or () for number in topic.partitions)
        return StateRecord(found.pid, found.epoch, found.status, partitions, found.start)
    except (struct.error, ValueError) as error:
        raise StorageFailed(f"a record of {STATE_TOPIC} has an unknown format") from error
