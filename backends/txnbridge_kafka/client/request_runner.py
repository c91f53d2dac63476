"""Repeats a raw request until it is answered or refused, or its deadline passes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidState,
    NotSupported,
    TxnBridgeError,
)
from txnbridge.spi import Deadline
from txnbridge_kafka.client import kafka_python
from txnbridge_kafka.client.connections import PATIENCE, Connections
from txnbridge_kafka.client.coordinator_session import CoordinatorSession
from txnbridge_kafka.client.responses import RetryLaterError
from txnbridge_kafka.settings import KafkaSettings

T = TypeVar("T")

# The shortest time for one attempt: a login on a busy machine takes tenths of a second.
_LEAST_PATIENCE = 0.3
_NOBODY = ("ECONNREFUSED", "DNS Resolution failure")  # kafka-python's texts for an address at which nothing listens
# The pauses between attempts: control markers are written within milliseconds, a coordinator moves within seconds.
_PAUSES = (0.005, 0.02, 0.1, 0.3)
# How many idle connections are kept for reuse. More callers make connections of their own, which are then closed.
_IDLE = 4
# The largest answer. A list of all transactions has 60 bytes for each, which soon exceeds kafka-python's limit of 1 MB.
_MOST_BYTES = 256 << 20


class RequestRunner:
    """Sends requests for any number of threads, each on its own `Connections` from a pool."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._servers = [server.strip() for server in settings.bootstrap.split(",") if server.strip()]
        self._config = {"receive_message_max_bytes": _MOST_BYTES, **settings.raw}
        self._advice = f"; {settings.advice}" if settings.advice else ""
        self._idle: list[Connections] = []
        self._lock = threading.Lock()
        self._closed = False

    def repeat(
        self,
        deadline: Deadline,
        what: str,
        attempt: Callable[[Connections], Awaitable[T]],
        nobody_for: float = math.inf,
        patient: bool = False,
    ) -> T:
        """Repeat an attempt until it succeeds or is refused, or the deadline passes.

        Raise `BrokerUnavailable` before the deadline if nothing listened at any server for `nobody_for` seconds. One
        attempt of a `patient` request, for which a broker may need long, takes up to half of the time left.
        """
        reason, cause = "no time was left to ask", None
        begun, nobody = time.monotonic(), 0  # consecutive attempts that met no server
        for pause in _pauses():
            if deadline.expired:
                break
            try:
                return self._once(attempt, deadline.left() / 2 if patient else self._patience(deadline))
            except RetryLaterError as error:
                reason, cause = str(error), error.__cause__
            except kafka_python.errors.IncompatibleBrokerVersion as error:
                raise NotSupported(f"{what}: the broker is too old for it; Kafka 3.0 or newer is needed") from error
            except _login_errors() as error:
                name = type(error).__name__
                raise AccessDenied(f"{what}: the broker refuses the login ({name}){self._advice}") from error
            except kafka_python.errors.KafkaTimeoutError as error:
                # The error of an earlier attempt has more details than that of an attempt cut short by the deadline.
                reason, cause = (_reason(error), error) if cause is None else (reason, cause)
            except (kafka_python.errors.KafkaError, OSError) as error:
                advice = self._advice if isinstance(error, kafka_python.errors.KafkaConnectionError) else ""
                reason, cause = _reason(error) + advice, error
            nobody = nobody + 1 if any(sign in reason for sign in _NOBODY) else 0
            if nobody >= len(self._servers) and time.monotonic() - begun >= nobody_for:
                raise BrokerUnavailable(
                    f"nothing listens at {', '.join(self._servers)} ({reason.partition(';')[0]}); start the broker, or"
                    " correct the URL"
                )
            time.sleep(min(pause, deadline.left()))
        raise DeadlineExceeded(
            f"{what} at {','.join(self._servers)} took longer than the deadline of {deadline.seconds:g} s: {reason}"
        ) from cause

    def _patience(self, deadline: Deadline) -> float:
        """Return how long one attempt may take. With several servers, half of the time is left to try another."""
        left = deadline.left()
        return min(left, PATIENCE, max(left / 2, _LEAST_PATIENCE) if len(self._servers) > 1 else left)

    def _once(self, attempt: Callable[[Connections], Awaitable[T]], seconds: float) -> T:
        """Make one attempt. After an answer its connections return to the pool, or stay in a `CoordinatorSession`."""
        connections = self._take()
        kept = lent = False
        try:
            result = connections.run(attempt, seconds)
            kept, lent = True, isinstance(result, CoordinatorSession)
        except (TxnBridgeError, RetryLaterError):
            connections.forget_coordinators()
            kept = True
            raise
        except (kafka_python.errors.KafkaError, OSError):
            self._try_another(connections.server)
            raise
        finally:
            if not kept:
                connections.close()
            elif not lent:
                self.give_back(connections)
        return result

    def _take(self) -> Connections:
        with self._lock:
            if self._closed:
                raise InvalidState("the connection to Kafka is closed")
            connections = self._idle.pop() if self._idle else None
            server = self._servers[0]
        if connections is not None:
            connections.notice_closed()
            return connections
        return Connections(server, self._config)

    def give_back(self, connections: Connections) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE:
                self._idle.append(connections)
                return
        connections.close()

    def _try_another(self, server: str) -> None:
        """Move a server that did not answer to the end of the list of servers."""
        with self._lock:
            if self._servers[0] == server:
                self._servers.append(self._servers.pop(0))

    def close(self) -> None:
        """Close every idle connection; a call that is under way closes its own at its end. Safe to repeat."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connections in idle:
            connections.close()


def _login_errors() -> tuple[type[BaseException], ...]:
    return (
        kafka_python.errors.SaslAuthenticationFailedError,
        kafka_python.errors.UnsupportedSaslMechanismError,
        kafka_python.errors.IllegalSaslStateError,
        kafka_python.errors.AuthorizationError,
    )


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, kafka_python.errors.KafkaError) else f"{type(error).__name__}: {error}"


def _pauses() -> Iterator[float]:
    yield from _PAUSES
    while True:
        yield _PAUSES[-1]
