"""Decision logs: topics with one partition that keep every record until an administrator trims the log."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from txnbridge import errors
from txnbridge.spi import Deadline, DecisionLog, Emitter, Position
from txnbridge_kafka.client.librdkafka import CALL_LIMIT, ConfluentConsumer, ConfluentProducer, ignore, seconds, warm_up
from txnbridge_kafka.errors import MISSING, kafka_error, translate
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import LOG_GROUP, KafkaTopics

_log = logging.getLogger("txnbridge.kafka.client")

_LONGEST_NAME = 249
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_NAME}}}")
_READ_AT_ONCE = 100  # records in memory at once, besides those that the client has fetched ahead
# The wait for more records after the reported end of the partition. A new leader learns the high watermark from the
# replicas' fetches, two a second, and until then reports an end that is too low.
_HIGH_WATERMARK_SECONDS = 2.0
# The pause before a call is repeated, such as one to a broker that has just started and has not loaded its topics yet.
_RETRY_SECONDS = 0.05
# A running broker answers the client within a second.
_LONG_SECONDS = 1.0
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
# With these error codes a record is certainly not stored. After any other code it may be stored.
_NOT_STORED = {
    *_TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
}
_TRIMMED = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION}
# The error if this user has no right to the consumer's group. It is ignored: the consumer never joins the group.
_GROUP_DENIED = KafkaError.GROUP_AUTHORIZATION_FAILED
# The longest wait in one call for delivery reports.
_POLL_SECONDS = 0.1

# The error of a record, or None, and its offset.
Report = tuple[KafkaError | None, int]


class _Sent:
    """A sent record. `wake` is set when it is stored or refused, or when its thread has to poll for all threads."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.wake = threading.Event()

    def take_report(self, error: KafkaError | None, message: Message) -> None:
        self.report = error, message.offset() or 0
        self.wake.set()


class SharedProducer:
    """A producer for several threads: one waiting thread polls the client for all, and wakes each at its own report.

    If every thread polled, one would often take another's report, which then waits until the end of its own poll. The
    client is freed, with its unsent records, when nobody holds this object and no thread waits any more. So no error is
    raised here: its traceback would keep the client alive.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._producer = ConfluentProducer(dict(settings))
        self._polling = threading.Lock()  # of the thread that polls
        self._waiting: dict[_Sent, None] = {}

    def send(self, topic: str, record: bytes, deadline: Deadline) -> Report | None:
        """Send a record to partition 0 of a topic; return its delivery report, None if none came in time."""
        sent, held = _Sent(), list[bool]()
        try:
            self._producer.produce(topic, record, partition=0, on_delivery=sent.take_report)
        except KafkaException as error:
            return error.args[0], 0
        try:
            self._waiting[sent] = None
            while sent.report is None and not deadline.expired:
                if held or Deadline(0).acquire(self._polling, held):
                    self._producer.poll(min(_POLL_SECONDS, seconds(deadline)))
                else:  # look again soon, because a signal handler's exception may keep a thread from waking the next
                    sent.wake.wait(min(_POLL_SECONDS, seconds(deadline)))
                    sent.wake.clear()
        except KafkaException as error:
            sent.report = sent.report or (error.args[0], 0)
        finally:
            del self._waiting[sent]
            if held:
                self._polling.release()
            for following in [*self._waiting][: len(held)]:
                following.wake.set()
        return sent.report


class KafkaDecisionLog(DecisionLog):
    """One decision log, stored in a topic with one partition. A position is a record's offset.

    The constructor creates a missing topic. It raises `InvalidOption` for a topic that would lose records or their
    order (hazard H26). If the user lacks rights it raises `AccessDenied`, with the commands for an administrator.
    """

    origin = (0,)

    def __init__(
        self, settings: KafkaSettings, name: str, deadline: Deadline, events: Emitter, topics: KafkaTopics
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._topic = settings.log_topic(name)
        self._lock = threading.Lock()
        self._producer: SharedProducer | None = None
        self._readers: list[ConfluentConsumer] = []  # consumers that are not in use
        with events.step("step:log", log=name):
            self._open(deadline)

    def _open(self, deadline: Deadline) -> None:
        if not _NAME.fullmatch(self._topic):
            raise errors.InvalidOption(
                f"{self._topic!r} is no valid topic name: on Kafka an application's name has letters, digits, '.', '_'"
                f" and '-', and together with the prefix at most {_LONGEST_NAME} characters"
            )
        self._topics.create_internal_topic(self._topic, deadline)
        self._topics.require_keeping(self._topic, deadline)

    def begin(self, deadline: Deadline) -> Position | None:
        first, following = self._bounds(deadline)
        return (first,) if first < following else None

    def end(self, deadline: Deadline) -> Position | None:
        first, following = self._bounds(deadline)
        return (following - 1,) if first < following else None

    def _bounds(self, deadline: Deadline) -> tuple[int, int]:
        while True:
            try:
                with self._reader(deadline) as reader:
                    left = min(seconds(deadline), CALL_LIMIT)
                    return reader.get_watermark_offsets(self._at(-1), timeout=left, cached=False)
            except KafkaException as error:
                self._wait_for_broker(error, "looking up its first and last offset", deadline)

    def _wait_for_broker(self, error: KafkaException, what: str, deadline: Deadline) -> None:
        """Sleep for a short pause if repeating the client's call may help; else raise the translated error."""
        refused = self._translate(error, what)
        if type(refused) not in (errors.BrokerUnavailable, errors.DeadlineExceeded):
            raise refused from error
        if deadline.left() <= _RETRY_SECONDS:
            raise errors.DeadlineExceeded(f"{refused}; tried for {deadline.seconds:g} s") from error
        time.sleep(_RETRY_SECONDS)

    def append(self, record: bytes, deadline: Deadline) -> Position:
        report = self._send(record, deadline)
        if report is None:
            raise errors.OutcomeUnknown(
                f"a record may or may not be in the decision log {self._topic}: no answer came within"
                f" {deadline.seconds:g} s"
            )
        failure, offset = report
        if failure is None:
            return (offset,)
        error = KafkaException(failure)
        if failure.code() in _NOT_STORED:
            raise self._translate(error, "appending to it") from error
        raise errors.OutcomeUnknown(
            f"a record may or may not be in the decision log {self._topic}: {failure.str()} ({failure.name()})"
        ) from error

    def _send(self, record: bytes, deadline: Deadline) -> Report | None:
        """Send a record, and return its delivery report; None if none came in time.

        A producer that could not store a record is not used again.
        """
        producer = self._take_producer(deadline)
        report = producer.send(self._topic, record, deadline)
        if report is None or report[0] is not None:
            with self._lock:
                if self._producer is producer:
                    self._producer = None
        return report

    def _take_producer(self, deadline: Deadline) -> SharedProducer:
        """Return the producer; without one, check broker and topic, and make it. After an error nothing was sent."""
        with self._lock:
            producer = self._producer
        if producer is not None:
            return producer
        self._bounds(deadline)
        producer = SharedProducer(
            {
                **self._client_settings(),
                "acks": "all",
                # A duplicate record is harmless, because the first one counts. An idempotent producer would first need
                # a producer id, which may take half a second at the start and after each lost answer.
                "enable.idempotence": False,
                "retries": 0,  # the last error says nothing of earlier copies; who appends repeats it
                "linger.ms": 0,
                "message.max.bytes": 1_000_000,  # a record has 900,000 bytes at most; the user's limit is for messages
            }
        )
        with self._lock:
            self._producer = self._producer or producer
            return self._producer

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`, or to the end of the decision log if it ends before `last`."""
        at, stop = first, last
        if at is None or stop is None:
            begin, following = self._bounds(deadline)
            at, stop = at or (begin,), stop or (following - 1,)
        if at > stop:
            return
        with self._reader(deadline) as reader:
            reader.assign([self._at(at[0])])
            try:
                yield from self._records(reader, at[0], stop[0], deadline)
            finally:
                reader.unassign()

    def _records(
        self, reader: ConfluentConsumer, at: int, stop: int, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        late: Deadline | None = None  # until when to wait for more records after the broker has reported the end
        while messages := self._fetch(reader, late, deadline):
            for message in messages:
                offset, error = message.offset() or 0, message.error()
                if error is None or error.code() == KafkaError._PARTITION_EOF:
                    if offset > at:
                        self._check_gap(at, deadline)
                    at = offset
                    if error is None and at <= stop:
                        yield (at,), message.value() or b""
                        at += 1
                    if at > stop:
                        return
                    late = Deadline(_HIGH_WATERMARK_SECONDS) if error is not None else None
                elif error.code() != _GROUP_DENIED:
                    self._wait_for_broker(KafkaException(error), f"reading record {at}", deadline)
                    reader.assign([self._at(at)])
                    break

    def _fetch(self, reader: ConfluentConsumer, late: Deadline | None, deadline: Deadline) -> list[Message]:
        """Return the next records or errors from a reader; an empty list if none came until the time `late`.

        Raise `DeadlineExceeded` at `deadline`.
        """
        while late is None or not late.expired:
            deadline.check(f"reading the decision log {self._topic}")
            first = reader.poll(seconds(deadline) if late is None else min(seconds(deadline), seconds(late)))
            if first is not None:
                return [first, *reader.consume(_READ_AT_ONCE, 0)]
        return []

    def _check_gap(self, at: int, deadline: Deadline) -> None:
        """Raise `PositionLost` if the missing record at this offset was trimmed or may have been compacted away.

        Otherwise the offset has a control marker, which consumers do not return.
        """
        begin, _ = self._bounds(deadline)
        if at < begin:
            raise errors.PositionLost(f"the decision log {self._topic} was trimmed while it was read, at record {at}")
        if not self._topics.require_keeping(self._topic, deadline):
            raise errors.PositionLost(
                f"the decision log {self._topic} has no record {at}, and this user may not see whether the topic is"
                " compacted; grant it DescribeConfigs on the topic"
            )

    @contextmanager
    def _reader(self, deadline: Deadline) -> Iterator[ConfluentConsumer]:
        """Lend a consumer. One that fails after a long wait is not used again, because it may wait for ever."""
        reader, began = self._take_reader(deadline), time.monotonic()
        try:
            yield reader
        except BaseException:
            (self._give_back if time.monotonic() - began < _LONG_SECONDS else ConfluentConsumer.close)(reader)
            raise
        self._give_back(reader)

    def _take_reader(self, deadline: Deadline) -> ConfluentConsumer:
        with self._lock:
            if self._readers:
                return self._readers.pop()
        reader = ConfluentConsumer(
            {
                **self._client_settings(),
                "group.id": LOG_GROUP,
                "isolation.level": "read_uncommitted",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                # The client's next request waits for the answer of the last fetch, by default for half a second.
                "fetch.wait.max.ms": 1,
                # A bound for the memory of records fetched ahead, each of which may have nearly a megabyte.
                "queued.max.messages.kbytes": 16 * 1024,
                "fetch.queue.backoff.ms": 5,
            }
        )
        warm_up(reader, self._topic, deadline)
        return reader

    def _give_back(self, reader: ConfluentConsumer) -> None:
        with self._lock:
            self._readers.append(reader)

    def trim(self, before: Position, deadline: Deadline) -> None:
        _, following = self._bounds(deadline)
        try:
            self._topics.drop_records((self._topic, 0), min(before[0], following), deadline)
        except KafkaException as error:
            raise self._translate(error, "dropping old records") from error

    def close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
            self._producer = None
        for reader in readers:
            reader.close()

    def _at(self, offset: int) -> TopicPartition:
        return TopicPartition(self._topic, 0, offset)

    def _client_settings(self) -> dict[str, Any]:
        # The user's settings for producers and consumers are not used: linger.ms, for example, would delay decisions.
        return {**self._settings.client, "log_level": self._settings.log_level, "logger": _log, "error_cb": ignore}

    def _translate(self, error: KafkaException, what: str) -> errors.TxnBridgeError:
        cause = kafka_error(error)
        code = None if cause is None else cause.code()
        what = f"the decision log {self._topic}, {what}"
        if code in _TRIMMED:
            return errors.PositionLost(f"{what}: the record was trimmed")
        if code in MISSING:
            return errors.BrokerUnavailable(
                f"{what}: the topic is missing; it was deleted, or the broker has just started"
            )
        if code in _TOO_LARGE:
            return errors.InvalidOption(f"{what}: the record is too large for the topic's max.message.bytes")
        ours = translate(error, what)
        if isinstance(ours, errors.AccessDenied):
            return errors.AccessDenied(f"{ours}; an administrator grants:{self._topics.grants(self._topic)}")
        return ours
