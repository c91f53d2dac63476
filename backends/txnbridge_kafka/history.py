"""How the transactions of an id ended, as their coordinator wrote it down: in the topic __transaction_state.

The coordinator tells of an id's last transaction only. Its log has each decision with the partitions that it was about,
until compaction takes what is not the last.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txnbridge.errors import StorageFailed
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.clients import Consumer
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.errors import translate
from txnbridge_kafka.topics import LOG_GROUP, offsets_partition

STATE_TOPIC = "__transaction_state"
_PREPARE_COMMIT, _PREPARE_ABORT = 2, 3
_READ_AT_ONCE = 500

_log = logging.getLogger("txnbridge.kafka.client")


@dataclass(frozen=True)
class Ending:
    """One decision about one transaction, and the epoch that its markers carry."""

    pid: int
    epoch: int
    commit: bool
    partitions: frozenset[Partition]


def endings(cluster: Cluster, id: str, deadline: Deadline) -> list[Ending]:
    """Every decision about transactions of this id that the log still has, oldest first.

    Raises `AccessDenied` if this user may not read it.
    """
    # The coordinator finds an id as a group's does: by the same hash.
    number = offsets_partition(id, cluster.topics.partitions(STATE_TOPIC, deadline))[1]
    found = []
    for key, value in _records(cluster, number, deadline):
        if value is not None and key == _key(id):
            ending = _ending(value)
            if ending is not None:
                found.append(ending)
    return found


def _records(cluster: Cluster, number: int, deadline: Deadline) -> Iterator[tuple[bytes | None, bytes | None]]:
    reader = Consumer(
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


def _ending(value: bytes) -> Ending | None:
    """The decision in a record; None for a record of another state."""
    try:
        version, pid, epoch, _timeout, status = struct.unpack_from(">hqhib", value)
        if status not in (_PREPARE_COMMIT, _PREPARE_ABORT):
            return None
        fields = _Fields(value, struct.calcsize(">hqhib"), flexible=version >= 1)
        return Ending(pid, epoch, status == _PREPARE_COMMIT, frozenset(fields.partitions()))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise StorageFailed(f"a record of {STATE_TOPIC} has a form that is not known here") from error


class _Fields:
    """The rest of a record. Its flexible form counts in few bytes, from one, with none for a missing list."""

    def __init__(self, data: bytes, at: int, flexible: bool) -> None:
        self._data = data
        self._at = at
        self._flexible = flexible

    def partitions(self) -> Iterator[Partition]:
        for _ in range(self._length(">i")):
            size = self._length(">h")
            topic = self._data[self._at : self._at + size].decode()
            self._at += size
            for _ in range(self._length(">i")):
                yield topic, self._take(">i")
            if self._flexible:
                self._skip_tags()

    def _skip_tags(self) -> None:
        for _ in range(self._varint()):
            self._varint()
            self._at += self._varint()

    def _length(self, form: str) -> int:
        return max(0, self._varint() - 1 if self._flexible else self._take(form))

    def _take(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
