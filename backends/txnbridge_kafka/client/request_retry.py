"""Repeats a raw request until it is answered or refused, or its deadline passes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import TypeVar

from txnbridge import errors
from txnbridge.spi import Deadline
from txnbridge_kafka.client.connection import (
    AttemptError,
    LoginRefusedError,
    NoAnswerError,
    NotConnectedError,
    TooOldError,
)
from txnbridge_kafka.client.connections import LONGEST_ATTEMPT, Connections
from txnbridge_kafka.client.marker_proof import CoordinatorSession
from txnbridge_kafka.client.protocol_types import RetryLaterError, error_name
from txnbridge_kafka.settings import KafkaSettings

T = TypeVar("T")

# The least time for one attempt if there are several servers: a login on a busy machine takes tenths of a second.
_SHORTEST_ATTEMPT = 0.3
# The pauses between attempts; the last is repeated. Markers are written in milliseconds, coordinators move in seconds.
_PAUSES = (0.005, 0.02, 0.1, 0.3)
# For this time a missing topic is asked for again: each broker learns of a new topic a little later than the first one.
_MISSING_SECONDS = 0.5
# How many idle connections are kept for reuse. If more threads call at once, their connections are closed afterwards.
_MOST_IDLE = 4


class RequestRunner:
    """Runs requests for any number of threads, and repeats them. Each uses connections that no other request uses."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._servers = [server.strip() for server in settings.bootstrap.split(",") if server.strip()]
        self._access = settings.access
        self._advice = f"; {settings.advice}" if settings.advice else ""
        self._idle: list[Connections] = []
        self._lock = threading.Lock()
        self._closed = False

    def repeat(
        self,
        deadline: Deadline,
        what: str,
        attempt: Callable[[Connections], T],
        no_listener_for: float = math.inf,
        slow: bool = False,
    ) -> T:
        """Repeat an attempt until it succeeds or is refused, or the deadline passes; return its result.

        `what` names the request in error texts. Raise `BrokerUnavailable` before the deadline if nothing listened at
        any server for `no_listener_for` seconds. A broker may need long for a `slow` request, so one attempt may take
        half of the time left.
        """
        reason, cause = "no time was left to ask", None
        begun, silent = time.monotonic(), 0  # consecutive attempts at addresses without a listener
        sure_at = begun + min(_MISSING_SECONDS, deadline.left() / 2)
        for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
            if deadline.expired:
                break
            nobody_listens = False
            try:
                return self._once(attempt, deadline.left() / 2 if slow else self._attempt_seconds(deadline))
            except errors.TxnBridgeError as error:
                if not isinstance(error, errors.NotFound) or time.monotonic() >= sure_at:
                    raise
                reason = str(error)
            except RetryLaterError as error:
                reason, cause = str(error), error.__cause__
            except (TooOldError, LoginRefusedError) as error:
                raise self._refusal(error, what) from error
            except AttemptError as error:
                nobody_listens = isinstance(error, NotConnectedError) and error.nobody_listens
                # An earlier attempt's error has more details than the error of an attempt that the deadline ended.
                if cause is None or not isinstance(error, NoAnswerError):
                    reason = f"{error}{self._advice if isinstance(error, NotConnectedError) else ''}"
                    cause = error
            silent = silent + 1 if nobody_listens else 0
            if silent >= len(self._servers) and time.monotonic() - begun >= no_listener_for:
                raise errors.BrokerUnavailable(
                    f"nothing listens at {', '.join(self._servers)} ({reason.partition(';')[0]}); start the broker, or"
                    " correct the URL"
                )
            time.sleep(min(pause, deadline.left()))
        raise errors.DeadlineExceeded(
            f"{what} at {','.join(self._servers)} took longer than the deadline of {deadline.seconds:g} s: {reason}"
        ) from cause

    def _refusal(self, error: TooOldError | LoginRefusedError, what: str) -> errors.TxnBridgeError:
        if isinstance(error, TooOldError):
            return errors.NotSupported(f"{what}: the broker does not have {error}, which Kafka has since 3.0")
        return errors.AccessDenied(f"{what}: the broker refuses the login: {error_name(error.code)}{self._advice}")

    def _attempt_seconds(self, deadline: Deadline) -> float:
        """Return how long one attempt may take.

        If there are several servers, about half of the time that is left is kept for an attempt at another server.
        """
        left = deadline.left()
        return min(left, LONGEST_ATTEMPT, max(left / 2, _SHORTEST_ATTEMPT) if len(self._servers) > 1 else left)

    def _once(self, attempt: Callable[[Connections], T], seconds: float) -> T:
        """Make one attempt, and return its result.

        After an answer the connections return to the pool, except one that a `CoordinatorSession` keeps.
        """
        connections = self._take()
        kept = lent = False
        try:
            result = connections.run(attempt, seconds)
            kept, lent = True, isinstance(result, CoordinatorSession)
        except (errors.TxnBridgeError, RetryLaterError):
            connections.forget_coordinators()
            kept = True
            raise
        except AttemptError:
            with self._lock:
                if self._servers[0] == connections.server:  # the next attempt uses another one
                    self._servers.append(self._servers.pop(0))
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
                raise errors.InvalidState("the connection to Kafka is closed")
            connections = self._idle.pop() if self._idle else None
            server = self._servers[0]
        if connections is not None:
            connections.notice_closed()
            return connections
        return Connections(server, self._access)

    def give_back(self, connections: Connections) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connections)
                return
        connections.close()

    def close(self) -> None:
        """Close all idle connections. A request that is under way closes its connection at its end. Safe to repeat."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connections in idle:
            connections.close()
