"""Mutants of the Kafka backend. Each replaces a function or two; the docstring names what is then wrong."""

from __future__ import annotations

from typing import Any

from txnbridge_kafka.client.librdkafka import ConfluentConsumer
from txnbridge_kafka.read import assignment

from tests.conformance.mutants import Mutants

KAFKA = Mutants()


@KAFKA.mutant("G1a", "early-read")
def reads_uncommitted() -> None:
    """Readers read messages of open and aborted transactions."""

    def make(settings: dict[str, Any]) -> Any:
        return ConfluentConsumer({**settings, "isolation.level": "read_uncommitted"})

    vars(assignment)["ConfluentConsumer"] = make


KAFKA.apply_chosen()
