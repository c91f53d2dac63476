"""Lookup: finds the broker that serves a topic, through redirects and proxies, and counts a topic's partitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from txnbridge_pulsar.client.deadline import ClientDeadline, retry
from txnbridge_pulsar.client.errors import ProtocolError, PulsarError, ServiceNotReady, server_error

from .address import ServiceUrl, full_topic_name, service_url
from .connection import BrokerConnection
from .connection_pool import ConnectionPool, ConnectionTarget

T = TypeVar("T")

_REDIRECT, _CONNECT = 0, 1
# The most redirects, as in the Java client: more of them are a loop.
MAX_REDIRECTS = 20
# Seconds for one broker's answer; after that another broker is asked.
_ATTEMPT_SECONDS = 10.0
_CONNECTION_KEY = ""


class Lookup:
    """Looks topics up. Any broker of the cluster answers; after a failure the service URL's next broker is asked."""

    def __init__(
        self, pool: ConnectionPool, service: ServiceUrl, listener: str | None, opening_attempt_seconds: float
    ) -> None:
        self._pool = pool
        self._service = service
        self._listener = listener
        self._opening_attempt_seconds = opening_attempt_seconds
        self._next_addresses = itertools.cycle(service.addresses)
        self._current = next(self._next_addresses)

    def connection(self, topic: str, connection_key: str, deadline: ClientDeadline) -> BrokerConnection:
        """Return a connection to the broker that serves a topic. The topic may move at any time: if this broker refuses
        the next request, the caller repeats the lookup and the request.
        """
        return self._pool.get(self._target(full_topic_name(topic), deadline), connection_key, deadline)

    def opening_attempt(self, deadline: ClientDeadline) -> ClientDeadline:
        """Return the deadline of one attempt to open a producer or consumer. Attempts are repeated until `deadline`."""
        return ClientDeadline(min(deadline.left, self._opening_attempt_seconds))

    def partitions(self, topic: str, deadline: ClientDeadline) -> int:

        def ask(connection: BrokerConnection, left: ClientDeadline) -> int:
            answer = connection.ask(
                "partition_metadata", left, topic=full_topic_name(topic), metadata_auto_creation_enabled=False
            )
            return int(answer.get("partitions", 0))

        return self._ask_any_broker(deadline, ask)

    def topics(self, namespace: str, deadline: ClientDeadline) -> list[str]:

        def ask(connection: BrokerConnection, left: ClientDeadline) -> list[str]:
            answer = connection.ask("get_topics_of_namespace", left, namespace=namespace, mode=0)
            return list(answer.get("topics", []))

        return self._ask_any_broker(deadline, ask)

    def _ask_any_broker(self, deadline: ClientDeadline, ask: Callable[[BrokerConnection, ClientDeadline], T]) -> T:
        def attempt() -> T:
            left = _attempt_deadline(deadline)
            with self._next_on_failure():
                return ask(self._pool.get(ConnectionTarget(self._current), _CONNECTION_KEY, left), left)

        return retry(deadline, attempt)

    def _target(self, topic: str, deadline: ClientDeadline) -> ConnectionTarget:
        left = _attempt_deadline(deadline)
        with self._next_on_failure():
            return self._follow(topic, ConnectionTarget(self._current), left)

    def _follow(self, topic: str, target: ConnectionTarget, deadline: ClientDeadline) -> ConnectionTarget:
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            answer = self._pool.get(target, _CONNECTION_KEY, deadline).ask(
                "lookup", deadline, topic=topic, authoritative=authoritative, advertised_listener_name=self._listener
            )
            target = self._target_in_answer(
                answer.get("broker_service_url"), answer.get("broker_service_url_tls"), answer
            )
            if answer.get("response") != _REDIRECT:
                return target
            authoritative = answer.get("authoritative", False)
        raise ServiceNotReady(6, f"the brokers redirect in circles for {topic}")

    def _target_in_answer(self, url: str | None, url_tls: str | None, answer: dict[str, object]) -> ConnectionTarget:
        if answer.get("response") not in (_REDIRECT, _CONNECT):
            raise server_error(0, "the lookup failed")
        try:
            (broker,) = service_url((url_tls if self._service.tls else url) or "").addresses
        except ValueError:
            raise ProtocolError("a lookup was answered without the address of a broker") from None
        if not answer.get("proxy_through_service_url") or broker in self._service.addresses:
            return ConnectionTarget(broker)
        return ConnectionTarget(self._current, broker)

    @contextmanager
    def _next_on_failure(self) -> Iterator[None]:
        """If the block fails, send the following lookups to the next broker in the service URL."""
        try:
            yield
        except PulsarError:
            self._current = next(self._next_addresses)
            raise


def _attempt_deadline(deadline: ClientDeadline) -> ClientDeadline:
    return ClientDeadline(min(deadline.left, _ATTEMPT_SECONDS))
