"""Asks a Pulsar broker whether it is ready."""

from __future__ import annotations

import http.client
import json
from typing import Any

from txnbridge_pulsar.client import PulsarClient, PulsarError

from txnbridge_conformance.brokers._ports import HOST

_SECONDS = 5.0


def load_coordinator(port: int, number: int = 0) -> None:
    """Make a broker of the cluster load the transaction coordinator `number`, and wait until it is loaded.

    `port` is the port of any broker of the cluster. Raise `OSError` if the coordinator is not ready.
    """
    # Only a lookup makes a broker load the topic, and the coordinator with it.
    try:
        with PulsarClient(f"pulsar://{HOST}:{port}") as client:
            client.transactions.connect_to(number, _SECONDS)
    except PulsarError as error:
        raise OSError(f"port {port}: {error}") from error


def rest(port: int, path: str) -> Any:
    """Return the JSON document at a path of the broker's HTTP administration. Raise `OSError` for any other answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise OSError(f"{path}: {answer.status}")
        return json.loads(answer.read())
    except (http.client.HTTPException, ValueError):
        raise OSError(f"port {port} does not speak HTTP as Pulsar does") from None
    finally:
        connection.close()
