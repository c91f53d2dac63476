"""One transactional producer of confluent-kafka, and the monitor of its log for requests that may arrive late."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import DeadlineExceeded
from txnbridge.spi import Deadline
from txnbridge_kafka.client.librdkafka import LEAST_SECONDS, make_producer, refresh_metadata, seconds, settle
from txnbridge_kafka.errors import kafka_error, too_late, translate
from txnbridge_kafka.settings import KafkaSettings

_log = logging.getLogger("txnbridge.kafka.client")
_log.addHandler(logging.NullHandler())  # without it Python would print the lines of a program without logging

# The shortest transaction time-out that librdkafka and a broker accept.
LEAST_TIMEOUT_MS = 1000
# Log lines of connections that were never established, so that no request can be under way on them.
_NEVER_CONNECTED = ("Connect to ", "Failed to resolve", "Connection setup timed out")
# The longest call of the client: a call cannot be interrupted, and a program that stops may shorten its deadline.
_SLICE_SECONDS = 0.5
# Error codes which say that the transaction has failed before, without the reason.
_CONSEQUENCES = {KafkaError._STATE, KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


# By the option log_level, which is a syslog level as in the client's log, the level of `logging`.
_THRESHOLDS = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}


class ClientLogMonitor:
    """Watches the client's log for lost connections and timed-out requests, after which a producer is not reused.

    A request of the current transaction may then still be under way, and would take effect in the next transaction,
    because the client keeps one epoch for all of them (hazard H1). Only the log shows these events: the client
    reconnects, repeats the request and reports success.
    """

    def __init__(self, log_level: int) -> None:
        self.taint_reason = ""
        self._threshold = _THRESHOLDS.get(log_level, logging.CRITICAL)

    def log(self, level: int, text: str, *parts: str) -> None:
        """Take a line of the client's log; its kind is the first part. The client calls this during a poll."""
        line = text % parts if parts else text
        kind = parts[0] if parts else line
        if kind == "REQTMOUT" or (kind == "FAIL" and not any(harmless in line for harmless in _NEVER_CONNECTED)):
            # The first reason is kept, and the client is dropped because of it. A client that were kept would not log
            # the same failure of one connection again within half a minute.
            self.taint_reason = self.taint_reason or line
        if level >= self._threshold:
            _log.log(level, "%s", line)


class TransactionalProducer:
    """A producer with a transactional id, for one thread at a time. It is freed by `drop` and never closed.

    Methods that end or fill a transaction return the client's last error, or None on success: what an error means for
    the transaction depends on the calls before it.
    """

    def __init__(self, settings: KafkaSettings, id: str, timeout_ms: int) -> None:
        self.id = id
        self.timeout_ms = timeout_ms
        self._log_topic = settings.log_topic(settings.application)
        self.failures: list[KafkaError] = []
        self.log_monitor = ClientLogMonitor(settings.log_level)
        own = {
            "transactional.id": id,
            "transaction.timeout.ms": timeout_ms,
            "message.timeout.ms": timeout_ms,
            # With a lower level the client would not log that a connection was lost (hazard H2).
            "log_level": 6,
            "log.connection.close": True,
            "logger": self.log_monitor,
        }
        self._client = make_producer(settings, self.failures.append, own)
        self.produce: Callable[..., None] = self._client.produce
        self.poll: Callable[[float], int] = self._client.poll

    def refresh_metadata(self, topic: str, deadline: Deadline) -> None:
        """Refresh the client's metadata of a topic, so that it writes to partitions that were added just now."""
        try:
            refresh_metadata(self._client, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error

    def open(self, deadline: Deadline) -> None:
        """Open the transactional id: the coordinator fences its previous producer and aborts the open transaction."""
        settle(self._client, self._log_topic, deadline)
        error = self._until_done(self._client.init_transactions, deadline)
        if error is not None:
            what = f"opening the transactional id {self.id}"
            ours = too_late(error, what, deadline) if error.retriable() else translate(error, what)
            raise ours from KafkaException(error)

    def begin(self) -> KafkaError | None:
        try:
            self._client.begin_transaction()
        except (KafkaException, SystemError) as error:
            return _require(error)
        return None

    def flush(self, deadline: Deadline) -> KafkaError | None:
        """Send all buffered messages. Raise `DeadlineExceeded` if the broker has not stored all of them in time."""
        try:
            while (left := self._client.flush(_slice(deadline))) and not deadline.expired:
                pass
        except (KafkaException, SystemError) as error:
            return _require(error)
        if left:
            raise DeadlineExceeded(f"{left} messages were not stored within {deadline.seconds:g} s")
        return self._first_failure()

    def wait(self, seconds: float) -> KafkaError | None:
        """Poll the client, which makes room in its buffer. Return the first delivery's error, or None."""
        try:
            self.poll(seconds)
        except (KafkaException, SystemError) as error:
            return _require(error)
        return self._first_failure()

    def _first_failure(self) -> KafkaError | None:
        return self.cause(self.failures[0]) if self.failures else None

    def commit(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.commit_transaction, deadline)

    def abort(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.abort_transaction, deadline)

    def cause(self, error: KafkaError) -> KafkaError:
        """Return the original error of a failed transaction for an error that is only its consequence.

        Any other error is returned unchanged.
        """
        # begin() is refused after a failure, and the refusal has the original error. No request is sent.
        return (self.begin() or error) if error.code() in _CONSEQUENCES else error

    def taint_reason(self) -> str:
        """Poll the client's log, and return the reason why this producer must not be reused; empty if it may be."""
        try:
            self.poll(0)
        except (KafkaException, SystemError) as error:
            return str(_require(error))
        if self.failures:
            return f"a delivery failed: {self.failures[0].str()}"
        return self.log_monitor.taint_reason

    def drop(self) -> None:
        """Free the client without ending its open transaction: closing would abort it and wait without a limit."""
        del self._client, self.produce, self.poll

    def _until_done(self, call: Callable[[float], object], deadline: Deadline) -> KafkaError | None:
        """Call the client until it succeeds, the error is not retriable, or the deadline passes; return the error."""
        while True:
            try:
                call(_slice(deadline))
            except (KafkaException, SystemError) as raised:
                error = _require(raised)
                if not error.retriable() or deadline.expired:
                    return error
                self._serve()
            else:
                return None

    def _serve(self) -> None:
        # An abort waits for deliveries, whose reports a poll has to serve. The client's next call repeats a fatal
        # error, so it can be ignored.
        with suppress(KafkaException, SystemError):
            self.poll(LEAST_SECONDS)


def _slice(deadline: Deadline) -> float:
    return min(seconds(deadline), _SLICE_SECONDS)


def _require(error: BaseException) -> KafkaError:
    cause = kafka_error(error)
    if cause is None:
        raise error
    return cause
