"""Decision logs: topics without partitions whose records stay until they are trimmed on purpose."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, OutcomeUnknown, PositionLost, StorageFailed, TxnBridgeError
from txnbridge.spi import Deadline, DecisionLog, Emitter, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import retry_translated, translate, translated
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.topics import PulsarTopics

T = TypeVar("T")

# Bytes that a reader prefetches: a few records of 900,000 bytes at most.
_PREFETCH_BYTES = 4_000_000
# Seconds that closing waits: a broker that is not informed of a closed client notices the lost connection.
_CLOSE_SECONDS = 1.0
# After these answers a record is certainly not stored. After any other error the record may be stored.
_NOT_STORED = (wire.NotAllowed, wire.NotAuthorized, wire.NotAuthenticated, wire.TopicTerminated)


class PulsarLog(DecisionLog):
    """A decision log on one topic. A position is (BookKeeper ledger, entry).

    The constructor creates a missing topic, or raises `AccessDenied` with instructions for an administrator.
    """

    def __init__(
        self, client: wire.PulsarClient, topics: PulsarTopics, topic: str, deadline: Deadline, events: Emitter
    ) -> None:
        self._client = client
        self._topics = topics
        self._name = topic
        self._lock = threading.Lock()
        self._producer: wire.PulsarProducer | None = None
        self._end_reader: wire.PulsarConsumer | None = None
        with events.step("step:log", log=topic):
            self._topic = topics.internal(topic, deadline)

    def begin(self, deadline: Deadline) -> Position | None:
        if self.end(deadline) is None:
            return None
        with self._reading(wire.EARLIEST, deadline) as reader:
            return self._next(reader, deadline).id[:2]

    def end(self, deadline: Deadline) -> Position | None:
        last = self._retry(lambda: self._reader_at_end(deadline).last_message_id(deadline.left()), "its end", deadline)
        return None if last.entry < 0 else (last.ledger, last.entry)

    def _reader_at_end(self, deadline: Deadline) -> wire.PulsarConsumer:
        """Return a reader that is only asked for the position of the log's last record, and never for records."""
        with self._opening(deadline):
            if self._end_reader is None:
                self._end_reader = self._client.read(self._topic, timeout=deadline.left(), start=wire.LATEST)
            elif self._end_reader.lost is not None:
                self._end_reader.reopen(deadline.left())
            return self._end_reader

    def _opening(self, deadline: Deadline) -> AbstractContextManager[None]:
        return deadline.holding(self._lock, f"another thread connected to the decision log {self._name}")

    def append(self, record: bytes, deadline: Deadline) -> Position:
        send = self._retry(lambda: self._start_send(record, deadline), "appending to it", deadline)
        try:
            receipt = send.result(deadline.left())
        except _NOT_STORED as error:
            raise self._as_bridge_error(error, "appending to it") from error
        except wire.PulsarError as error:
            raise self._unknown(str(error)) from error
        if receipt.duplicate:
            raise self._unknown("the broker dropped it as a duplicate")
        return receipt.message_id.ledger, receipt.message_id.entry

    def _start_send(self, record: bytes, deadline: Deadline) -> wire.Send:
        """Send a record without waiting for the receipt.

        Raise `OutcomeUnknown` if the connection is lost when the record may already have been sent, else the client's
        error.
        """
        producer = self._open_producer(deadline)
        try:
            return producer.send(wire.Single(record), timeout=deadline.left())
        except wire.BrokerConnectionLost as error:
            if error.may_have_had_effect:
                raise self._unknown(str(error)) from error
            raise

    def _open_producer(self, deadline: Deadline) -> wire.PulsarProducer:
        with self._opening(deadline):
            if self._producer is None:
                self._producer = self._client.create_producer(self._topic, timeout=deadline.left())
            elif self._producer.lost is not None:
                self._producer.forget()  # the callers that sent these records got `OutcomeUnknown`
                self._producer.reopen(deadline.left())
            return self._producer

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"a record may or may not be in the decision log {self._name}: {why}")

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`, by default all, up to the log's end if it is before `last`."""
        end = self.end(deadline)
        at = first or self.begin(deadline)
        if end is None or at is None:
            return
        stop = min(end, last or end)
        if at > stop:
            return
        with self._reading(wire.MessageId(at[0], at[1] - 1), deadline) as reader:
            yield from self._records(reader, at, stop, deadline)

    def _records(
        self, reader: wire.PulsarConsumer, at: Position, stop: Position, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        expected = at
        while True:
            entry = self._next(reader, deadline)
            position = entry.id[:2]
            if position < expected:
                continue
            if position != expected:
                self._check_gap(expected, position, deadline)
            if position <= stop:
                with translated(f"the decision log {self._name}, reading record {position}"):
                    yield position, entry.messages()[0].payload
            if position >= stop:
                return
            expected = position[0], position[1] + 1

    def _check_gap(self, expected: Position, position: Position, deadline: Deadline) -> None:
        """Raise `PositionLost` if records are missing between the expected position and the received one.

        Entries in a BookKeeper ledger have no gaps, and brokers drop only whole ledgers from the start of a topic.
        """
        if expected[1] > 0 and position[0] > expected[0] and position[1] == 0:
            before = expected[0], expected[1] - 1
            begin = self.begin(deadline)
            if begin is not None and begin <= before:
                return
        raise PositionLost(f"the decision log {self._name} was trimmed: there is no record {expected} any more")

    def _next(self, reader: wire.PulsarConsumer, deadline: Deadline) -> wire.ReceivedEntry:
        """Wait for and return the reader's next entry, which the caller knows to be stored."""
        while True:
            deadline.check(f"reading the decision log {self._name}")
            entries = self._retry(lambda: self._receive(reader, deadline), "reading it", deadline)
            if entries:
                return entries[0]

    def _receive(self, reader: wire.PulsarConsumer, deadline: Deadline) -> list[wire.ReceivedEntry]:
        if reader.lost is not None:
            reader.reopen(deadline.left())
        return reader.receive(deadline.left(), most=1)

    def _reading(self, start: wire.MessageId, deadline: Deadline) -> AbstractContextManager[wire.PulsarConsumer]:
        inbox = wire.Inbox(_PREFETCH_BYTES)
        opened = lambda: self._client.read(self._topic, timeout=deadline.left(), start=start, inbox=inbox)  # noqa: E731
        return wire.closing(self._retry(opened, "reading it", deadline), lambda: _CLOSE_SECONDS)

    def trim(self, before: Position, deadline: Deadline) -> None:
        """Allow the broker to drop the records before a position: whole BookKeeper ledgers, when it begins a new one.

        If the broker unloads the topic or dies within milliseconds of its answer, the position is forgotten; the next
        call repeats it. The last record always stays, so that a trimmed log differs from a new one.
        """
        end = self.end(deadline)
        if end is None:
            return
        at = min(before, end)
        self._topics.trim(self._topic, (at[0], at[1]), f"the decision log {self._name}, dropping old records", deadline)

    def close(self) -> None:
        with self._lock:
            used, self._producer, self._end_reader = (self._producer, self._end_reader), None, None
        for each in used:
            if each is not None:
                each.close(_CLOSE_SECONDS)

    def _retry(self, attempt: Callable[[], T], what: str, deadline: Deadline) -> T:
        return retry_translated(attempt, what, deadline, self._as_bridge_error)

    def _as_bridge_error(self, error: wire.PulsarError, what: str) -> TxnBridgeError:
        what = f"the decision log {self._name}, {what}"
        if isinstance(error, wire.TopicNotFound):
            return BrokerUnavailable(f"{what}: its topic is missing; it was deleted, or the broker has just started")
        return translate(error, what)


def cluster_id(settings: PulsarSettings, client: wire.PulsarClient, topics: PulsarTopics, deadline: Deadline) -> str:
    """Return a name that is unique to the cluster: Pulsar's own cluster names are the same everywhere.

    The name is the first record of an internal topic. A bridge that finds no record writes one. Raise `StorageFailed`
    if other internal topics exist: then the record was lost, and a new name would invalidate every token.
    """
    log = PulsarLog(client, topics, settings.cluster_topic, deadline, Emitter("", ()))
    try:
        return _read_name(log, deadline) or _write_name(log, settings, topics, deadline)
    finally:
        log.close()


def _read_name(log: PulsarLog, deadline: Deadline) -> str | None:
    begin = log.begin(deadline)
    if begin is None:
        return None
    ((_, record),) = log.read(begin, begin, deadline)
    try:
        return str(json.loads(record)["cluster"])
    except (ValueError, TypeError, KeyError) as error:
        raise StorageFailed("the record that names this cluster is not of txnbridge: choose another prefix") from error


def _write_name(log: PulsarLog, settings: PulsarSettings, topics: PulsarTopics, deadline: Deadline) -> str:
    others = {name for name in topics.all(deadline) if name.startswith(settings.prefix)} - {settings.cluster_topic}
    if others and (named := _read_name(log, deadline)):
        return named  # another process was quicker
    if others:
        raise StorageFailed(
            f"the record that names this cluster was deleted from {settings.cluster_topic}, but other topics with this"
            " prefix exist: restore it, or choose another prefix"
        )
    with suppress(OutcomeUnknown):
        log.append(json.dumps({"v": 1, "cluster": uuid.uuid4().hex}).encode(), deadline)
    if (named := _read_name(log, deadline)) is None:
        raise BrokerUnavailable(f"the record that names this cluster could not be written to {settings.cluster_topic}")
    return named
