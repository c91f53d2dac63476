"""Sends without a transaction: an idempotent producer that stops for good at the first message it cannot store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import DeadlineExceeded, DeliveryFailed, InvalidOption, InvalidState, NotFound, NotSupported
from txnbridge.spi import Deadline, Emitter, Publisher, RawHeaders
from txnbridge_kafka.clients import Producer
from txnbridge_kafka.errors import kafka_error, translate
from txnbridge_kafka.settings import Settings
from txnbridge_kafka.topics import Topics

_log = logging.getLogger("txnbridge.kafka.client.publisher")
# The client calls a setting experimental that it has had, unchanged, since it has been idempotent.
_log.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())

# Bounds what waits in this process for a slow broker; a sender then waits for room.
_BUFFER_KBYTES = 64 * 1024
# Reports of what is stored free its memory. Often enough to keep that flat, seldom enough to cost nothing.
_SERVE_AFTER = 1000
_SLICE = 0.1
_PAUSE = 0.01
_LEAST_SECONDS = 0.01  # the client takes no time limit of zero
_UNKNOWN = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_NO_SEQUENCE = "Kafka keeps no sequence of a publisher beyond its session, so it cannot skip what is stored already"


class KafkaPublisher(Publisher):
    """Stores each message once and each partition's messages in order.

    A message is tried until it is stored, refused, or the publisher is closed: a message that is given up while those
    behind it go on would be missing in the middle. After a refusal nothing more of its partition is stored, and nothing
    more is taken. Other partitions may have stored messages that were sent later, before the refusal came.
    """

    def __init__(self, settings: Settings, topics: Topics, deadline: Deadline, events: Emitter) -> None:
        self._topics = topics
        self._partitions: dict[str, int] = {}  # of the topics that were looked at
        self._failures: list[KafkaError] = []
        self._unserved = 0
        self._producer: Producer | None = _producer(settings, self._failures.append)

    # --- sending --------------------------------------------------------------------------------------------------

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
        if partition is None:
            partition = -1
            if topic not in self._partitions:
                self._look_at(topic, 0, deadline)
        elif not 0 <= partition < self._partitions.get(topic, 0):
            self._look_at(topic, partition, deadline)
        while not self._take(producer, topic, value, key, headers or (), partition, _milliseconds(timestamp), deadline):
            deadline.check(f"waiting for room for a message to {topic}")  # or for the client to see its partition
        self._unserved += 1
        if self._unserved >= _SERVE_AFTER:
            self._serve(producer, 0)

    def _look_at(self, topic: str, partition: int, deadline: Deadline) -> None:
        if partition < 0:
            raise NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        count = self._topics.partitions(topic, deadline, at_least=partition + 1)
        if partition >= count:
            raise NotFound(f"{topic} has {count} partitions, so there is no partition {partition}")
        self._partitions[topic] = count

    def _take(
        self,
        producer: Producer,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders,
        partition: int,
        timestamp: int,
        deadline: Deadline,
    ) -> bool:
        """Hand a message to the client; False if it could not take it yet."""
        try:
            producer.produce(topic, value, key, partition=partition, timestamp=timestamp, headers=list(headers))
        except BufferError:
            self._serve(producer, min(_SLICE, _seconds(deadline)))
            return False
        except KafkaException as error:
            found: KafkaError = error.args[0]
            if found.code() in _UNKNOWN:
                self._catch_up(producer, topic, partition, deadline)
                return False
            if found.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise InvalidOption(
                    f"a message to {topic} is larger than the client's bound (message.max.bytes)"
                ) from error
            self._fail(found)
        return True

    def _catch_up(self, producer: Producer, topic: str, partition: int, deadline: Deadline) -> None:
        """Let the client see a topic or a partition that was added since it last looked. Raises `NotFound`."""
        self._look_at(topic, max(partition, 0), deadline)
        try:
            producer.list_topics(topic, timeout=_seconds(deadline))
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error
        time.sleep(_PAUSE)

    # --- what became of it ----------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        """As the contract says. What is not stored by the deadline is tried further."""
        producer = self._ready()
        while left := self._serve(producer, min(_SLICE, _seconds(deadline)), flush=True):
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{left} messages were not stored within {deadline.seconds:g} s; they may yet be"
                )

    def _serve(self, producer: Producer, wait: float, flush: bool = False) -> int:
        """Hear what became of messages; how many are left. Raises `DeliveryFailed`."""
        self._unserved = 0
        try:
            if flush:
                producer.flush(wait)
            else:
                producer.poll(wait)
        except (KafkaException, SystemError) as error:
            found = kafka_error(error)
            if found is None:
                raise
            self._failures.append(found)
        if self._failures:
            self._fail(self._failures[0])
        return len(producer)

    def _fail(self, error: KafkaError) -> None:
        """Give up for good: whatever is still waiting in this process is never sent."""
        self._failures.append(error)
        self._let_go()
        self._ready()

    def _ready(self) -> Producer:
        if self._failures:
            first = self._failures[0]
            raise DeliveryFailed(
                "a message could not be stored, and nothing after it in its partition was:"
                f" {first.str()} ({first.name()})"
            ) from KafkaException(first)
        if self._producer is None:
            raise InvalidState("this publisher is closed")
        return self._producer

    # --- the rest -------------------------------------------------------------------------------------------------

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        raise NotSupported(_NO_SEQUENCE)

    def close(self, deadline: Deadline) -> None:
        """As the contract says. Raises what `flush` raises; what is not stored then is given up."""
        if self._producer is None:
            return
        try:
            self.flush(deadline)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Send nothing more. Never by the client's own `close`, which waits without limit."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # An error that the caller keeps would keep the client too, and it would go on with what it has.
            producer.purge()


def _producer(settings: Settings, failed: Callable[[KafkaError], object]) -> Producer:
    def delivered(error: KafkaError | None, message: object) -> None:
        # No method of the publisher: the client would be part of a cycle, and live on after it was let go.
        if error is not None:
            failed(error)

    wanted: dict[str, Any] = {
        "queue.buffering.max.kbytes": _BUFFER_KBYTES,
        **settings.client,
        **settings.producer,
        "acks": "all",
        "enable.idempotence": True,
        # Without it the client goes on behind a message that the broker refused.
        "enable.gapless.guarantee": True,
        # And behind one that it gave up for its age, whatever is set.
        "message.timeout.ms": 0,
        "partitioner": "murmur2_random",
        "on_delivery": delivered,
        "delivery.report.only.error": True,
        "log_level": settings.log_level,
        "logger": _log,
        "error_cb": _ignore,
    }
    try:
        return Producer(wanted)
    except KafkaException as error:
        raise InvalidOption(f"the client refuses these settings: {error.args[0].str()}") from error


def _milliseconds(timestamp: int | None) -> int:
    if timestamp is None:
        return 0  # the client puts the present time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def _seconds(deadline: Deadline) -> float:
    return max(deadline.left(), _LEAST_SECONDS)


def _ignore(error: KafkaError) -> None:
    """The log has it too, and the call that suffers from it says so."""
