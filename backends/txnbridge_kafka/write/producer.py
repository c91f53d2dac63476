"""One transactional producer of confluent-kafka, and what its log reveals."""

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
_log.addHandler(logging.NullHandler())  # a program that configures no logging must not find these lines on its screen

# The shortest time-out that librdkafka and a broker take.
LEAST_TIMEOUT_MS = 1000
# No request of a transaction can be under way on a connection that was never made.
_NEVER_CONNECTED = ("Connect to ", "Failed to resolve", "Connection setup timed out")
# A call of the client cannot be interrupted. The deadline may be cut meanwhile, because a program has to stop.
_SLICE_SECONDS = 0.5
# Errors that only say that the transaction has failed before, and not why.
_CONSEQUENCES = {KafkaError._STATE, KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


# syslog's levels, in which the client logs, as levels of `logging`.
_THRESHOLDS = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}


class ClientLogMonitor:
    """Reads the client's log for what puts a producer in doubt: a lost connection, a request that timed out.

    A request of this transaction may then still be under way, and would take effect in the next one, because the client
    keeps one epoch for all of them (hazard H1). Nothing else tells: the client reconnects, repeats the request and
    reports success.
    """

    def __init__(self, log_level: int) -> None:
        self.taint_reason = ""
        self._threshold = _THRESHOLDS.get(log_level, logging.CRITICAL)

    def log(self, level: int, text: str, *parts: str) -> None:
        """Take a line of the log, whose kind is its first part. confluent-kafka calls this on the thread that polls."""
        line = text % parts if parts else text
        kind = parts[0] if parts else line
        if kind == "REQTMOUT" or (kind == "FAIL" and not any(harmless in line for harmless in _NEVER_CONNECTED)):
            # The first reason is kept. The client is thrown away for it, which matters: librdkafka does not log the
            # same failure of one connection again within half a minute.
            self.taint_reason = self.taint_reason or line
        if level >= self._threshold:
            _log.log(level, "%s", line)


class TransactionalProducer:
    """A producer with a transactional id. One thread at a time; let go of it by `drop`, never by closing it.

    Calls of a transaction return the client's last error, None on success: its meaning depends on the calls before.
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
        """Let the client learn of a topic's new partitions, which would otherwise take up to a minute."""
        try:
            refresh_metadata(self._client, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error

    def open(self, deadline: Deadline) -> None:
        """Open the id: the coordinator fences its previous producer, and aborts what that left open."""
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
        """Send what waits. Raise `DeadlineExceeded` if the broker has not taken all of it in time."""
        try:
            while (left := self._client.flush(_slice(deadline))) and not deadline.expired:
                pass
        except (KafkaException, SystemError) as error:
            return _require(error)
        if left:
            raise DeadlineExceeded(f"{left} messages were not stored within {deadline.seconds:g} s")
        return self._first_failure()

    def wait(self, seconds: float) -> KafkaError | None:
        """Let the broker take messages for a moment. Return the first error, if any."""
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
        """Return why the transaction failed, for an error that only says that it did; any other error as it is."""
        # A failed transaction may not begin again, and the refusal says why it failed. Nothing is sent.
        return (self.begin() or error) if error.code() in _CONSEQUENCES else error

    def taint_reason(self) -> str:
        """Poll once for the client's log, and return why this producer must not begin another transaction, if so."""
        try:
            self.poll(0)
        except (KafkaException, SystemError) as error:
            return str(_require(error))
        if self.failures:
            return f"a delivery failed: {self.failures[0].str()}"
        return self.log_monitor.taint_reason

    def drop(self) -> None:
        """Let go without ending what is open: closing would abort it, and wait for that without limit."""
        del self._client, self.produce, self.poll

    def _until_done(self, call: Callable[[float], object], deadline: Deadline) -> KafkaError | None:
        """Repeat a call as long as the client says that this helps, and there is time. Return the last error."""
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
        # An abort that waits for deliveries needs their reports served. A fatal error comes again with the call itself.
        with suppress(KafkaException, SystemError):
            self.poll(LEAST_SECONDS)


def _slice(deadline: Deadline) -> float:
    return min(seconds(deadline), _SLICE_SECONDS)


def _require(error: BaseException) -> KafkaError:
    cause = kafka_error(error)
    if cause is None:
        raise error
    return cause
