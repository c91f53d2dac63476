"""Sending without transactions, by an idempotent producer. It stops for good at a message that cannot be stored."""

from __future__ import annotations

import logging
import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import AccessDenied, DeadlineExceeded, DeliveryFailed, InvalidState
from txnbridge.spi import Deadline, Publisher, RawHeaders
from txnbridge_kafka.client.librdkafka import (
    ConfluentProducer,
    make_producer,
    milliseconds,
    refresh_metadata,
    seconds,
    sendable,
    too_large,
    warm_up,
)
from txnbridge_kafka.errors import DENIED, MISSING, client_error, translate
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import KafkaTopics

_log = logging.getLogger("txnbridge.kafka.client.publisher")
# librdkafka calls enable.gapless.guarantee experimental, but the setting has never changed since it was added.
_log.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())

# After so many messages delivery reports are served, which frees the memory of stored messages.
_SERVE_AFTER = 1000
_LONGEST_CALL = 0.1
_RETRY_SECONDS = 0.01


class KafkaPublisher(Publisher):
    """Stores each message once, and each partition's messages in order.

    A message is retried until it is stored or refused, or until the publisher is closed. It never times out, because
    the partition would have a gap if later messages were stored. After a refusal no later message of that partition is
    stored, and the publisher accepts no more. Other partitions may already have later messages.
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
        producer = self._usable_producer()
        if not self._partitions:
            warm_up(producer, topic, deadline)
        if partition is None:
            partition = -1
            if topic not in self._partitions:
                self._partitions[topic] = self._topics.require(topic, None, deadline)
        elif not 0 <= partition < self._partitions.get(topic, 0):
            self._partitions[topic] = self._topics.require(topic, partition, deadline)
        while not self._push(producer, topic, value, key, headers or (), partition, milliseconds(timestamp), deadline):
            deadline.check(f"waiting for buffer space for a message to {topic}")  # or for a new partition's metadata
        self._unserved += 1
        if self._unserved >= _SERVE_AFTER:
            self._serve(producer, 0)

    def _push(
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
        """Pass a message to the client. Return False if it has no buffer space, or no metadata of the partition yet."""
        try:
            producer.produce(topic, value, key, partition=partition, timestamp=timestamp, headers=sendable(headers))
        except BufferError:
            self._serve(producer, min(_LONGEST_CALL, seconds(deadline)))
            return False
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() in MISSING:
                self._refresh_metadata(producer, topic, partition, deadline)
                return False
            if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise too_large(topic) from error
            self._fail(cause)
        return True

    def _refresh_metadata(self, producer: ConfluentProducer, topic: str, partition: int, deadline: Deadline) -> None:
        """Refresh the client's metadata of a topic or partition. Raise `NotFound` if it does not exist."""
        self._partitions[topic] = self._topics.require(topic, max(partition, 0), deadline, create=False)
        try:
            refresh_metadata(producer, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking up topic {topic!r}") from error
        time.sleep(_RETRY_SECONDS)

    def flush(self, deadline: Deadline) -> None:
        """Wait until every message is stored. The client retries unstored messages also after the deadline."""
        producer = self._usable_producer()
        while left := self._serve(producer, min(_LONGEST_CALL, seconds(deadline)), flush=True):
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{left} messages were not stored within {deadline.seconds:g} s; they may still be stored later"
                )

    def _serve(self, producer: ConfluentProducer, wait: float, flush: bool = False) -> int:
        """Take delivery reports for `wait` seconds; return how many are missing. Raise `DeliveryFailed` if refused."""
        self._unserved = 0
        try:
            (producer.flush if flush else producer.poll)(wait)
        except (KafkaException, SystemError) as error:
            self._failures.append(client_error(error))
        if self._failures:
            self._fail(self._failures[0])
        return len(producer)

    def _fail(self, error: KafkaError) -> None:
        """Stop the publisher after a refused message: drop buffered messages, and raise the error of the refusal."""
        self._failures.append(error)
        self._drop_producer()
        self._usable_producer()

    def _usable_producer(self) -> ConfluentProducer:
        if self._failures:
            first = self._failures[0]
            kind = AccessDenied if first.code() in DENIED else DeliveryFailed
            raise kind(
                "a message could not be stored, and no later message of its partition was stored; open a new publisher:"
                f" {first.str()} ({first.name()})"
            ) from KafkaException(first)
        if self._producer is None:
            raise InvalidState("this publisher is closed")
        return self._producer

    def close(self, deadline: Deadline) -> None:
        """Flush, and free the producer. If `flush` raises an error, the messages that are not stored are dropped."""
        if self._producer is None:
            return
        try:
            self.flush(deadline)
        finally:
            self._drop_producer()

    def _drop_producer(self) -> None:
        """Free the producer, and drop its buffered messages. The client's own `close` waits without a time limit."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # The traceback of an error that the caller keeps would keep the client, which would go on sending.
            producer.purge()


def _own(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "acks": "all",
        "enable.idempotence": True,
        # Without this setting the client sends later messages after the broker has refused one.
        "enable.gapless.guarantee": True,
        # No message times out: in spite of the setting above, the client sends later messages after a time-out.
        "message.timeout.ms": 0,
        "log_level": settings.log_level,
        "logger": _log,
    }
