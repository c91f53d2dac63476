"""`SharedProducer`: a client's producer that several threads use at once; each waits until its own record is stored."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from txnbridge.spi import Deadline
from txnbridge_kafka.client.librdkafka import ConfluentProducer, seconds

# The longest wait in one call for delivery reports.
_POLL_SECONDS = 0.1

# The error of a record, or None, and its offset.
Report = tuple[KafkaError | None, int]


class _Sent:
    """A sent record. `wake` is set when it is stored or refused, or when its thread has to poll for all threads."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.polls = False
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
        self._lock = threading.Lock()
        self._waiting: list[_Sent] = []

    def send(self, topic: str, record: bytes, deadline: Deadline) -> Report | None:
        """Send a record to partition 0 of a topic; return its delivery report, None if none came in time."""
        sent = _Sent()
        try:
            self._producer.produce(topic, record, partition=0, on_delivery=sent.take_report)
        except KafkaException as error:
            return error.args[0], 0
        with self._lock:
            self._waiting.append(sent)
            sent.polls = self._waiting[0] is sent
        try:
            while sent.report is None and not deadline.expired:
                if sent.polls:
                    self._producer.poll(min(_POLL_SECONDS, seconds(deadline)))
                else:
                    sent.wake.wait(seconds(deadline))
        except KafkaException as error:
            sent.report = sent.report or (error.args[0], 0)
        finally:
            self._leave(sent)
        return sent.report

    def _leave(self, sent: _Sent) -> None:
        with self._lock:
            self._waiting.remove(sent)
            if sent.polls and self._waiting:
                self._waiting[0].polls = True
                self._waiting[0].wake.set()
