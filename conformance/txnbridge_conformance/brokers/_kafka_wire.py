"""Asks a Kafka broker for its cluster."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from txnbridge_kafka.client import wire
from txnbridge_kafka.client.connection import AttemptError, Connection, TooOldError
from txnbridge_kafka.settings.security import Access

from txnbridge_conformance.brokers._ports import HOST


def ask(port: int, request: wire.Request, seconds: float = 5) -> Any:
    """Send a request to a port, and return the answer's fields. Raise `OSError` if no valid answer comes."""
    until = time.monotonic() + seconds
    try:
        with closing(Connection(HOST, port, Access(), until)) as connection:
            return connection.ask(request, until)
    except (AttemptError, TooOldError) as error:
        raise OSError(f"port {port}: {error}") from error


def cluster(port: int) -> tuple[str, int]:
    """Ask the broker at a port for the cluster's id and number of live nodes. Raise `OSError` without an answer."""
    answer = ask(port, metadata([]))
    return answer.cluster_id, len(answer.brokers)


def metadata(topics: list[dict[str, Any]] | None) -> wire.Request:
    """Return a request for the metadata of topics; None: all topics."""
    return wire.METADATA(
        topics=topics,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
        include_cluster_authorized_operations=False,
    )
