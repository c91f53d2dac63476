"""Kafka through its plain client, for runs with `--through raw`, whose findings are not about txnbridge.

`connect` returns an object with the part of `txnbridge.Bridge` that the roles of a raw run use. The program underneath
is what a careful user of `confluent_kafka` writes by hand.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from txnbridge import Capability, Headers, Limits
from txnbridge.errors import Abort, BrokerUnavailable, Fenced, OutcomeUnknown, TransactionAborted
from txnbridge_conformance.run.plan import PARTITIONS


class _RawMessage(NamedTuple):
    topic: str
    partition: int
    position: tuple[int]
    value: bytes | None
    key: bytes | None
    headers: Headers = Headers()  # a raw run sends none


class _RawConsumer:
    """Reads committed messages by Kafka's plain client, in a group or, without one, from all partitions."""

    def __init__(self, settings: dict[str, Any], topics: Sequence[str], group: str | None) -> None:
        own = {"enable.auto.commit": False, "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
        self.client = Consumer({**settings, **own, "group.id": group or "none", "session.timeout.ms": 6000})
        if group:
            self.client.subscribe(list(topics))
        else:
            self.client.assign([TopicPartition(topic, n, 0) for topic in topics for n in range(PARTITIONS)])
        # Whether what was polled was not acknowledged, so that the next poll begins at the group's positions.
        self.behind = False

    @property
    def assignment(self) -> list[object]:
        return [(each.topic, each.partition) for each in self.client.assignment()]

    def poll(self, count: int, timeout: float) -> list[_RawMessage]:
        if self.behind:
            self._back_to_committed()
        found = []
        for each in self.client.consume(count, timeout):
            if error := each.error():
                raise BrokerUnavailable(str(error))
            place = str(each.topic()), int(each.partition() or 0), (int(each.offset() or 0),)
            key: Any = each.key()
            found.append(_RawMessage(*place, each.value(), key.encode() if isinstance(key, str) else key))
        return found

    def _back_to_committed(self) -> None:
        try:
            for each in self.client.committed(self.client.assignment(), 8):
                with suppress(KafkaException):  # the partition was taken from this member
                    self.client.seek(TopicPartition(each.topic, each.partition, max(0, each.offset)))
        except KafkaException as error:
            raise BrokerUnavailable(str(error)) from error
        self.behind = False


class _RawTransaction:
    token = None  # the plain client cannot prepare a transaction

    def __init__(self, producer: Any, consumer: _RawConsumer | None, id: str, timeout: float) -> None:
        self.id = id
        self._timeout = timeout
        self._producer = producer
        self._consumer = consumer

    def send(self, topic: str, body: bytes | None, *, key: bytes | None, partition: int) -> None:
        self._producer.produce(topic, body, key, partition)
        self._producer.poll(0)

    def ack(self, messages: Iterable[_RawMessage]) -> None:
        assert self._consumer is not None
        ends = {(each.topic, each.partition): each.position[0] + 1 for each in messages}
        offsets = [TopicPartition(*key, end) for key, end in ends.items()]
        group = self._consumer.client.consumer_group_metadata()
        self._producer.send_offsets_to_transaction(offsets, group, self._timeout)


class _RawBridge:
    limits = Limits(message_bytes=1_000_000)
    capabilities = MappingProxyType({each: each is not Capability.PREPARE for each in Capability})

    def __init__(self, servers: str, timeout: float, transactional_id: str | None) -> None:
        self._settings = {"bootstrap.servers": servers, "log_level": 0}
        self._timeout = timeout
        self._owned = transactional_id is not None
        self._opening = f"raw-{secrets.token_hex(6)}"
        self._id = transactional_id or self._opening
        self._numbers = itertools.count()
        self._producer: Any = None
        self._consumer: _RawConsumer | None = None
        if self._owned:
            self._open()

    def _open(self) -> None:
        limit = {"transaction.timeout.ms": int(self._timeout * 1000), "message.timeout.ms": int(self._timeout * 1000)}
        producer = Producer({**self._settings, **limit, "transactional.id": self._id})
        try:
            producer.init_transactions(self._timeout)
        except KafkaException as error:
            raise BrokerUnavailable(str(error)) from error
        self._producer = producer

    @contextmanager
    def consumer(self, topics: str | Sequence[str], group: str | None = None, **_: Any) -> Iterator[_RawConsumer]:
        self._consumer = _RawConsumer(self._settings, [topics] if isinstance(topics, str) else topics, group)
        try:
            yield self._consumer
        finally:
            self._consumer.client.close()

    @contextmanager
    def transaction(self, **_: Any) -> Iterator[_RawTransaction]:
        if self._producer is None:
            if self._owned:
                raise Fenced("this owner was fenced, or its client has failed")
            self._open()
        done = False
        try:
            self._producer.begin_transaction()
            yield _RawTransaction(
                self._producer, self._consumer, f"{self._opening}/{next(self._numbers)}", self._timeout
            )
            self._commit()
            done = True
        except Abort:
            self._abort()
        except (KafkaException, BufferError) as error:
            self._abort()
            raise TransactionAborted(str(error)) from error
        finally:
            if not done and self._consumer is not None:
                self._consumer.behind = True

    def _commit(self) -> None:
        """Commit, and repeat a request without an answer. Raise txnbridge's errors in the place of the client's."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                self._producer.commit_transaction(max(0.1, until - time.monotonic()))
                return
            except KafkaException as error:
                told = error.args[0]
                if told.txn_requires_abort():
                    raise
                if not told.retriable() or time.monotonic() > until:
                    self._producer = None  # a client with a commit of unknown outcome can do nothing else
                    raise OutcomeUnknown(str(told)) from error

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(self._timeout)
        except KafkaException:  # the broker aborts it when its time is over
            self._producer = None


@contextmanager
def connect(url: str, *, timeout: float, transactional_id: str | None = None, **_: Any) -> Iterator[Any]:
    """Yield an object with the methods of `txnbridge.Bridge` that a raw run uses, made of Kafka's plain client."""
    yield _RawBridge(urlsplit(url).netloc, timeout, transactional_id)
