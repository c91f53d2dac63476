"""One transactional producer of confluent-kafka, and the monitor of its log.

The monitor detects after which events a request of the producer may still arrive late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import DeadlineExceeded
from txnbridge.spi import Deadline
from txnbridge_kafka.client.librdkafka import LEAST_SECONDS, make_producer, refresh_metadata, seconds, warm_up
from txnbridge_kafka.errors import client_error, translate
from txnbridge_kafka.settings import KafkaSettings

_log = logging.getLogger("txnbridge.kafka.client")
_log.addHandler(logging.NullHandler())  # without it Python prints the lines if the program configures no logging

# The shortest transaction time-out: in less, a lost answer would leave no time for another attempt.
LEAST_TIMEOUT_MS = 2000
# The log lines about connections that were never established: no request can be under way on them.
_NEVER_CONNECTED = ("Connect to ", "Failed to resolve", "Connection setup timed out")
# The longest single call of the client. A call cannot be interrupted, and a program that stops shortens its deadlines.
_LONGEST_CALL = 0.5
# The error codes of calls after a failure of the transaction. They do not say what the failure was.
_CONSEQUENCES = {KafkaError._STATE, KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}

# The levels of `logging` for the option log_level, which is a syslog level.
_THRESHOLDS = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}


class ClientLogMonitor:
    """The logger of a producer: it forwards log lines, and detects lost connections and timed-out requests.

    After such an event a request of the current transaction may still be under way, and may take effect in the next
    transaction, which has the same epoch (hazard H1). Only the log shows the event: the client reconnects, repeats the
    request and reports success. So `taint_reason` is set, and the producer is not used for another transaction.
    """

    def __init__(self, log_level: int) -> None:
        self.taint_reason = ""
        self._threshold = _THRESHOLDS.get(log_level, logging.CRITICAL)

    def log(self, level: int, text: str, *parts: str) -> None:
        """Set `taint_reason` if the log line tells of a lost connection or a timed-out request. Forward the line.

        confluent-kafka calls this method, as it would call `logging.Logger.log`, during a poll. `parts` are the kind of
        event, such as "FAIL", the client's name, which has the user's client.id, and the event.
        """
        line = text % parts if parts else text
        kind, event = (parts[0], parts[-1]) if parts else (line, line)
        if kind == "REQTMOUT" or (kind == "FAIL" and not any(harmless in event for harmless in _NEVER_CONNECTED)):
            # The first reason is kept. The client logs no second failure of a connection within half a minute.
            self.taint_reason = self.taint_reason or line
        if level >= self._threshold:
            _log.log(level, "%s", line)


class TransactionalProducer:
    """A producer of confluent-kafka with a transactional id. One thread at a time. It is freed by `drop`, never closed.

    The methods of a transaction return the client's error, or None on success. The writer interprets the error.
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
            # The client refuses to wait longer for an answer than a transaction lasts. A prepared one may be short.
            "socket.timeout.ms": min(int(settings.client["socket.timeout.ms"]), timeout_ms),
            # With a lower level the client would not log that a connection was lost (hazard H2).
            "log_level": 6,
            "log.connection.close": True,
            "logger": self.log_monitor,
        }
        self._client = make_producer(settings, self.failures.append, own)
        self.produce: Callable[..., None] = self._client.produce
        self.poll: Callable[[float], int] = self._client.poll

    def refresh_metadata(self, topic: str, deadline: Deadline) -> None:
        """Refresh the client's metadata of a topic, so that the client knows newly added partitions."""
        try:
            refresh_metadata(self._client, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking up topic {topic!r}") from error

    def open(self, deadline: Deadline) -> None:
        """Send InitProducerId: the coordinator fences the previous producer and aborts its open transaction."""
        warm_up(self._client, self._log_topic, deadline)
        if (error := self._until_done(self._client.init_transactions, deadline)) is not None:
            what = f"opening the transactional id {self.id}"
            ours = translate(error, what)
            if error.retriable():  # a temporary error that lasted until the deadline
                text = f"{what}: {error.str()} ({error.name()}) until the deadline of {deadline.seconds:g} s"
                ours = DeadlineExceeded(text)
            raise ours from KafkaException(error)

    def begin(self) -> KafkaError | None:
        try:
            self._client.begin_transaction()
        except (KafkaException, SystemError) as error:
            return client_error(error)
        return None

    def flush(self, deadline: Deadline) -> KafkaError | None:
        """Wait until all messages are stored; return a failed one's error or None. Raise `DeadlineExceeded` if late."""
        try:
            while (left := self._client.flush(_call_seconds(deadline))) and not deadline.expired:
                pass
        except (KafkaException, SystemError) as error:
            return client_error(error)
        if left:
            raise DeadlineExceeded(f"{left} messages were not stored within {deadline.seconds:g} s")
        return self._first_failure()

    def wait(self, seconds: float) -> KafkaError | None:
        """Poll the client, which frees space in its buffer. Return the error of the first failed delivery, or None."""
        try:
            self.poll(seconds)
        except (KafkaException, SystemError) as error:
            return client_error(error)
        return self._first_failure()

    def _first_failure(self) -> KafkaError | None:
        return self.cause(self.failures[0]) if self.failures else None

    def commit(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.commit_transaction, deadline)

    def abort(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.abort_transaction, deadline)

    def cause(self, error: KafkaError) -> KafkaError:
        """Return the error by which the transaction failed, if the given error is only a consequence of that failure.

        Any other error is returned unchanged.
        """
        # After a failure the client refuses `begin` with the original error, and sends no request.
        return (self.begin() or error) if error.code() in _CONSEQUENCES else error

    def taint_reason(self) -> str:
        """Read the client's log, and return why the producer must not begin another transaction; empty if it may."""
        try:
            self.poll(0)
        except (KafkaException, SystemError) as error:
            return str(client_error(error))
        if self.failures:
            return f"a delivery failed: {self.failures[0].str()}"
        return self.log_monitor.taint_reason

    def drop(self) -> None:
        """Free the client without ending the open transaction: its `close` would abort it, without a time limit."""
        del self._client, self.produce, self.poll

    def _until_done(self, call: Callable[[float], object], deadline: Deadline) -> KafkaError | None:
        """Repeat a call of the client until it succeeds, fails with an error that is not retriable, or is late.

        Return None after a success, else the error of the last attempt.
        """
        while True:
            try:
                call(_call_seconds(deadline))
            except (KafkaException, SystemError) as raised:
                error = client_error(raised)
                if not error.retriable() or deadline.expired:
                    return error
                # An abort waits for delivery reports, which a poll serves. The next call raises a fatal error again.
                with suppress(KafkaException, SystemError):
                    self.poll(LEAST_SECONDS)
            else:
                return None


def _call_seconds(deadline: Deadline) -> float:
    return min(seconds(deadline), _LONGEST_CALL)
