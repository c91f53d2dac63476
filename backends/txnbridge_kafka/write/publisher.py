"""Sending without transactions: an idempotent producer that stops for good at a message that it cannot store."""

from __future__ import annotations

import logging
import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import AccessDenied, DeadlineExceeded, DeliveryFailed, InvalidState, NotSupported
from txnbridge.spi import Deadline, Publisher, RawHeaders
from txnbridge_kafka.client.librdkafka import (
    ConfluentProducer,
    make_producer,
    milliseconds,
    refresh_metadata,
    seconds,
    settle,
    too_large,
)
from txnbridge_kafka.errors import DENIED, kafka_error, translate
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import KafkaTopics

_log = logging.getLogger("txnbridge.kafka.client.publisher")
# The client calls a setting experimental that it has had, unchanged, since it became idempotent.
_log.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())

# Serving delivery reports frees their memory: often enough to keep that flat, seldom enough to cost nothing.
_SERVE_AFTER = 1000
_SLICE = 0.1
_PAUSE = 0.01
_UNKNOWN = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_NO_SEQUENCE = "Kafka keeps no sequence of a publisher beyond its session, so it cannot skip what is stored already"


class KafkaPublisher(Publisher):
    """Stores each message once and each partition's messages in order.

    A message is tried until it is stored, refused, or the publisher is closed: if it were given up while the messages
    behind it go on, it would be missing in the middle. After a refusal nothing more of its partition is stored, and
    nothing more is taken. Other partitions may have stored messages that were sent later, before the refusal came.
    """

    def __init__(self, settings: KafkaSettings, topics: KafkaTopics) -> None:
        self._topics = topics
        self._partitions: dict[str, int] = {}  # of the topics that were checked
        self._failures: list[KafkaError] = []
        self._unserved = 0
        self._producer: ConfluentProducer | None = make_producer(settings, self._failures.append, _own(settings))

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> None:
        if sequence is not None:
            raise NotSupported(_NO_SEQUENCE)
        producer = self._ready()
        if not self._partitions:
            settle(producer, topic, deadline)
        if partition is None:
            partition = -1
            if topic not in self._partitions:
                self._partitions[topic] = self._topics.require(topic, None, deadline)
        elif not 0 <= partition < self._partitions.get(topic, 0):
            self._partitions[topic] = self._topics.require(topic, partition, deadline)
        while not self._take(producer, topic, value, key, headers or (), partition, milliseconds(timestamp), deadline):
            deadline.check(f"waiting for room for a message to {topic}")  # or for the client to learn of the partition
        self._unserved += 1
        if self._unserved >= _SERVE_AFTER:
            self._serve(producer, 0)

    def _take(
        self,
        producer: ConfluentProducer,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders,
        partition: int,
        timestamp: int,
        deadline: Deadline,
    ) -> bool:
        """Hand a message to the client; False if the client could not take it yet."""
        try:
            producer.produce(topic, value, key, partition=partition, timestamp=timestamp, headers=list(headers))
        except BufferError:
            self._serve(producer, min(_SLICE, seconds(deadline)))
            return False
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() in _UNKNOWN:
                self._refresh_metadata(producer, topic, partition, deadline)
                return False
            if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise too_large(topic) from error
            self._fail(cause)
        return True

    def _refresh_metadata(self, producer: ConfluentProducer, topic: str, partition: int, deadline: Deadline) -> None:
        """Let the client learn of a topic or a partition that was added. Raise `NotFound`."""
        self._partitions[topic] = self._topics.require(topic, max(partition, 0), deadline)
        try:
            refresh_metadata(producer, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error
        time.sleep(_PAUSE)

    def flush(self, deadline: Deadline) -> None:
        """Return when every message is stored. A message that is not stored by the deadline is tried further."""
        producer = self._ready()
        while left := self._serve(producer, min(_SLICE, seconds(deadline)), flush=True):
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{left} messages were not stored within {deadline.seconds:g} s; they may yet be"
                )

    def _serve(self, producer: ConfluentProducer, wait: float, flush: bool = False) -> int:
        """Take delivery reports. Return how many messages are left. Raise `DeliveryFailed`."""
        self._unserved = 0
        try:
            if flush:
                producer.flush(wait)
            else:
                producer.poll(wait)
        except (KafkaException, SystemError) as error:
            cause = kafka_error(error)
            if cause is None:
                raise
            self._failures.append(cause)
        if self._failures:
            self._fail(self._failures[0])
        return len(producer)

    def _fail(self, error: KafkaError) -> None:
        """Give up for good: messages that still wait in this process are never sent."""
        self._failures.append(error)
        self._let_go()
        self._ready()

    def _ready(self) -> ConfluentProducer:
        if self._failures:
            first = self._failures[0]
            kind = AccessDenied if first.code() in DENIED else DeliveryFailed
            raise kind(
                "a message could not be stored, and nothing after it in its partition was:"
                f" {first.str()} ({first.name()})"
            ) from KafkaException(first)
        if self._producer is None:
            raise InvalidState("this publisher is closed")
        return self._producer

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        raise NotSupported(_NO_SEQUENCE)

    def close(self, deadline: Deadline) -> None:
        """Flush, and let go. Raise the errors of `flush`; messages that are not stored then are given up."""
        if self._producer is None:
            return
        try:
            self.flush(deadline)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Send nothing more. The client's own `close` would wait without limit."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # An error that the caller keeps would keep the client too, and that would go on with what it has.
            producer.purge()


def _own(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "acks": "all",
        "enable.idempotence": True,
        # Without this the client goes on behind a message that the broker refused.
        "enable.gapless.guarantee": True,
        # And it goes on behind a message that it gave up for its age, whatever is set.
        "message.timeout.ms": 0,
        "log_level": settings.log_level,
        "logger": _log,
    }
