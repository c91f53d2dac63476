"""One transactional producer of confluent-kafka, and what it noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import DeadlineExceeded, InvalidOption
from txnbridge.spi import Deadline
from txnbridge_kafka.clients import Producer
from txnbridge_kafka.errors import kafka_error, translate
from txnbridge_kafka.settings import Settings

_log = logging.getLogger("txnbridge.kafka.client")
_log.addHandler(logging.NullHandler())  # a program that configures no logging is not to find this on its screen

# The least that librdkafka and a broker take.
LEAST_TIMEOUT_MS = 1000
# Bounds what waits in this process for a slow broker; a sender then waits for room.
_BUFFER_KBYTES = 64 * 1024
# A call with less time than this could not even be answered by a broker on this machine.
_LEAST_SECONDS = 0.01
# No request of a transaction can be on a connection that was never made.
_NEVER_CONNECTED = ("Connect to ", "Failed to resolve", "Connection setup timed out")


# What the client makes of syslog's levels.
_THRESHOLDS = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}


class Watch:
    """The client's log, read for what makes a writer doubtful: a connection that dropped, a request that timed out.

    A request of this transaction may then still be on its way, and would take effect on the next one, because the
    client keeps one epoch for all of them. Nothing else tells: the client reconnects, sends again and says OK.
    """

    def __init__(self, log_level: int) -> None:
        self.doubt = ""
        self._threshold = _THRESHOLDS.get(log_level, logging.CRITICAL)

    def log(self, level: int, text: str, *parts: str) -> None:
        """What confluent-kafka calls, on the thread that polls, with the line's kind as the first part."""
        line = text % parts if parts else text
        kind = parts[0] if parts else line
        if kind == "REQTMOUT" or (kind == "FAIL" and not any(harmless in line for harmless in _NEVER_CONNECTED)):
            # The first is kept. The client is thrown away for it, which matters: librdkafka does not log the same
            # failure of one connection again within half a minute.
            self.doubt = self.doubt or line
        if level >= self._threshold:
            _log.log(level, "%s", line)


class TransactionalProducer:
    """A producer with a transactional id. One thread at a time; let go of it by `drop`, never by closing it.

    Calls of a transaction return the client's last error, None when all went well: what it means depends on what was
    asked before, which the writer knows.
    """

    def __init__(self, settings: Settings, id: str, timeout_ms: int) -> None:
        self.id = id
        self.timeout_ms = timeout_ms
        self.failures: list[KafkaError] = []
        self.watch = Watch(settings.log_level)
        failed = self.failures.append

        def delivered(error: KafkaError | None, message: object) -> None:
            # A closure over the list and not a method: through a method the producer would be part of a cycle, live on
            # after `drop` until the next garbage collection, and keep its connections.
            if error is not None:
                failed(error)

        try:
            self._client = Producer(
                {
                    "queue.buffering.max.kbytes": _BUFFER_KBYTES,
                    **settings.client,
                    **settings.producer,
                    "transactional.id": id,
                    "transaction.timeout.ms": timeout_ms,
                    "message.timeout.ms": timeout_ms,
                    "partitioner": "murmur2_random",
                    "on_delivery": delivered,
                    "delivery.report.only.error": True,
                    # With less the client would not say that a connection dropped.
                    "log_level": 6,
                    "log.connection.close": True,
                    "logger": self.watch,
                    "error_cb": _ignore,  # the log has it too
                }
            )
        except KafkaException as error:
            raise InvalidOption(f"the client refuses these settings: {error.args[0].str()}") from error
        self.produce: Callable[..., None] = self._client.produce
        self.poll: Callable[[float], int] = self._client.poll

    def look_at(self, topic: str, deadline: Deadline) -> None:
        """Let the client know a topic's partitions, of which it would otherwise learn within a minute."""
        try:
            self._client.list_topics(topic, max(deadline.left(), _LEAST_SECONDS))
        except KafkaException as error:
            raise translate(error, f"looking at topic {topic!r}") from error

    def open(self, deadline: Deadline) -> None:
        """Take the id: whoever held it is fenced, and what it left open is aborted."""
        error = self._until_done(self._client.init_transactions, deadline)
        if error is not None:
            raise translate(error, f"opening the transactional id {self.id}") from KafkaException(error)

    def begin(self) -> KafkaError | None:
        try:
            self._client.begin_transaction()
        except (KafkaException, SystemError) as error:
            return _require(error)
        return None

    def flush(self, deadline: Deadline) -> KafkaError | None:
        """Send what waits. Raises `DeadlineExceeded` if the broker has not taken all of it in time."""
        try:
            left = self._client.flush(max(deadline.left(), _LEAST_SECONDS))
        except (KafkaException, SystemError) as error:
            return _require(error)
        if left:
            raise DeadlineExceeded(f"{left} messages were not stored within {deadline.seconds:g} s")
        return self.failures[0] if self.failures else None

    def send_offsets(self, offsets: list[Any], group: object, deadline: Deadline) -> KafkaError | None:
        return self._until_done(lambda left: self._client.send_offsets_to_transaction(offsets, group, left), deadline)

    def commit(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.commit_transaction, deadline)

    def abort(self, deadline: Deadline) -> KafkaError | None:
        return self._until_done(self._client.abort_transaction, deadline)

    def doubt(self) -> str:
        """Why this producer should not be used for another transaction; empty if nothing speaks against it.

        One poll, because the log reaches us with it.
        """
        try:
            self.poll(0)
        except (KafkaException, SystemError) as error:
            return str(_require(error))
        if self.failures:
            return f"a delivery failed: {self.failures[0].str()}"
        return self.watch.doubt

    def drop(self) -> None:
        """Let go without ending what is open: closing would abort it, and wait for that without limit."""
        del self._client, self.produce, self.poll

    def _until_done(self, call: Callable[[float], object], deadline: Deadline) -> KafkaError | None:
        """Call again as long as the client says that this helps, and there is time; the last error."""
        while True:
            try:
                call(max(deadline.left(), _LEAST_SECONDS))
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
            self.poll(_LEAST_SECONDS)


def _require(error: BaseException) -> KafkaError:
    found = kafka_error(error)
    if found is None:
        raise error
    return found


def _ignore(error: KafkaError) -> None:
    pass
