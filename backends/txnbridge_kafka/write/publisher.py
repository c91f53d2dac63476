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
# The client warns about enable.gapless.guarantee, which has been in it unchanged since it became idempotent.
_log.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())

# Delivery reports are served after so many messages, which frees their memory and costs little time.
_SERVE_AFTER = 1000
_SLICE = 0.1
_PAUSE = 0.01
_UNKNOWN = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_NO_SEQUENCE = "Kafka keeps no sequence of a publisher beyond its session, so it cannot skip what is stored already"


class KafkaPublisher(Publisher):
    """Stores each message once and each partition's messages in order.

    A message is retried until it is stored, refused, or the publisher is closed: if it timed out while later messages
    are stored, the partition would have a gap. After a refusal no more messages of that partition are stored, and the
    publisher takes no more. Other partitions may by then have stored messages that were sent later.
    """

    def __init__(self, settings: KafkaSettings, topics: KafkaTopics) -> None:
        self._topics = topics
        self._partitions: dict[str, int] = {}  # by topic, the number of partitions, once the topic was checked
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
            deadline.check(f"waiting for room for a message to {topic}")  # or for metadata of a new partition
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
        """Give a message to the client. Return False if its buffer is full or it lacks metadata of the partition."""
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
        """Refresh the client's metadata of a topic or partition. Raise `NotFound` if it does not exist."""
        self._partitions[topic] = self._topics.require(topic, max(partition, 0), deadline)
        try:
            refresh_metadata(producer, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error
        time.sleep(_PAUSE)

    def flush(self, deadline: Deadline) -> None:
        """Wait until every message is stored. A message that is not stored by the deadline is still retried."""
        producer = self._ready()
        while left := self._serve(producer, min(_SLICE, seconds(deadline)), flush=True):
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{left} messages were not stored within {deadline.seconds:g} s; they may yet be"
                )

    def _serve(self, producer: ConfluentProducer, wait: float, flush: bool = False) -> int:
        """Take delivery reports, and return how many messages are not stored. Raise `DeliveryFailed` for a refusal."""
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
        """Stop the publisher after a refused message: buffered messages are dropped. Raise the refusal's error."""
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
        """Flush, and free the producer. If `flush` raises, the messages that are not stored are dropped."""
        if self._producer is None:
            return
        try:
            self.flush(deadline)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the producer and its buffered messages. The client's own `close` would wait without a limit."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # If the caller keeps an error, its traceback keeps the client, which would send its buffered messages.
            producer.purge()


def _own(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "acks": "all",
        "enable.idempotence": True,
        # Without this setting the client sends the messages after one that the broker refused.
        "enable.gapless.guarantee": True,
        # No message times out: the client sends the messages after a timed-out one in spite of the setting above.
        "message.timeout.ms": 0,
        "log_level": settings.log_level,
        "logger": _log,
    }
