"""One transactional producer of confluent-kafka, and what it noticed."""

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
_log.addHandler(logging.NullHandler())  # a program that configures no logging is not to find this on its screen

# The least that librdkafka and a broker take.
LEAST_TIMEOUT_MS = 1000
# No request of a transaction can be on a connection that was never made.
_NEVER_CONNECTED = ("Connect to ", "Failed to resolve", "Connection setup timed out")
# A call of the client cannot be interrupted. It may be told meanwhile that there is less time: a program has to stop.
_SLICE_SECONDS = 0.5
# Errors that only say that the transaction has failed before, and not why.
_CONSEQUENCES = {KafkaError._STATE, KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


# What the client makes of syslog's levels.
_THRESHOLDS = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}


class ClientLogMonitor:
    """The client's log, read for what makes a writer doubtful: a connection that dropped, a request that timed out.

    A request of this transaction may then still be on its way, and would take effect on the next one, because the
    client keeps one epoch for all of them. Nothing else tells: the client reconnects, sends again and says OK.
    """

    def __init__(self, log_level: int) -> None:
        self.taint_reason = ""
        self._threshold = _THRESHOLDS.get(log_level, logging.CRITICAL)

    def log(self, level: int, text: str, *parts: str) -> None:
        """What confluent-kafka calls, on the thread that polls, with the line's kind as the first part."""
        line = text % parts if parts else text
        kind = parts[0] if parts else line
        if kind == "REQTMOUT" or (kind == "FAIL" and not any(harmless in line for harmless in _NEVER_CONNECTED)):
            # The first is kept. The client is thrown away for it, which matters: librdkafka does not log the same
            # failure of one connection again within half a minute.
            self.taint_reason = self.taint_reason or line
        if level >= self._threshold:
            _log.log(level, "%s", line)


class TransactionalProducer:
    """A producer with a transactional id. One thread at a time; let go of it by `drop`, never by closing it.

    Calls of a transaction return the client's last error, None when all went well: what it means depends on what was
    asked before, which the writer knows.
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
            # With less the client would not say that a connection dropped.
            "log_level": 6,
            "log.connection.close": True,
            "logger": self.log_monitor,
        }
        self._client = make_producer(settings, self.failures.append, own)
        self.produce: Callable[..., None] = self._client.produce
        self.poll: Callable[[float], int] = self._client.poll

    def refresh_metadata(self, topic: str, deadline: Deadline) -> None:
        """Let the client know a topic's partitions, of which it would otherwise learn within a minute."""
        try:
            refresh_metadata(self._client, deadline, topic)
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error

    def open(self, deadline: Deadline) -> None:
        """Take the id: whoever held it is fenced, and what it left open is aborted."""
        settle(self._client, self._log_topic, deadline)
        error = self._until_done(self._client.init_transactions, deadline)
        if error is not None:
            what = f"opening the transactional id {self.id}"
            found = too_late(error, what, deadline) if error.retriable() else translate(error, what)
            raise found from KafkaException(error)

    def begin(self) -> KafkaError | None:
        try:
            self._client.begin_transaction()
        except (KafkaException, SystemError) as error:
            return _require(error)
        return None

    def flush(self, deadline: Deadline) -> KafkaError | None:
        """Send what waits. Raises `DeadlineExceeded` if the broker has not taken all of it in time."""
        try:
            while (left := self._client.flush(_slice(deadline))) and not deadline.expired:
                pass
        except (KafkaException, SystemError) as error:
            return _require(error)
        if left:
            raise DeadlineExceeded(f"{left} messages were not stored within {deadline.seconds:g} s")
        return self._first_failure()

    def wait(self, seconds: float) -> KafkaError | None:
        """Let the broker take what it can for a moment; the first thing that has gone wrong."""
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
        """Why the transaction failed, for an error that only says that it did; any other error as it is."""
        # One that has failed may not begin, and says why. Nothing is sent.
        return (self.begin() or error) if error.code() in _CONSEQUENCES else error

    def taint_reason(self) -> str:
        """Why this producer should not be used for another transaction; empty if nothing speaks against it.

        One poll, because the log reaches us with it.
        """
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
        """Call again as long as the client says that this helps, and there is time; the last error."""
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
    found = kafka_error(error)
    if found is None:
        raise error
    return found
