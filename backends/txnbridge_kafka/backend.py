"""What Kafka promises through us, and how a URL becomes a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge.errors import BackendMissing
from txnbridge.spi import (
    NATIVE,
    Backend,
    Broker,
    Capabilities,
    Capability,
    Context,
    Deadline,
    Limits,
    Support,
    Url,
    absent,
    emulated,
)
from txnbridge_kafka.limits import DEFAULT_LONGEST_MS, message_bytes
from txnbridge_kafka.settings import OPTIONS, read

_ONE_POSITION = "a group has one position in each partition, so messages are acknowledged in order"
_ONE_MEMBER = "a partition is read by one member of a group"

CAPABILITIES = Capabilities(
    "Kafka",
    {
        **dict.fromkeys(Capability, NATIVE),
        Capability.FENCING: emulated(
            "the broker fences each writer; the decision log says which owner of the id is newest"
        ),
        Capability.PREPARE: emulated(
            "an open transaction whose producer is dropped; a record of it is in the decision log"
        ),
        Capability.RESOLVE_ANYWHERE: emulated("EndTxn with the producer id and epoch that the token carries"),
        Capability.STATUS_LOOKUP: emulated(
            "the coordinator's start time tells a transaction from others of its writer"
        ),
        Capability.REDELIVERY: emulated("the reader goes back; what came after the message comes again too"),
        Capability.DECISION_LOG: emulated("a topic with one partition in which the first record for an id counts"),
        Capability.INDIVIDUAL_ACK: absent(_ONE_POSITION),
        Capability.SHARE_MESSAGE: absent(_ONE_MEMBER),
        Capability.SHARE_KEY: absent(_ONE_MEMBER),
        Capability.RESUME_SEQUENCE: absent("a producer's sequence ends with its session"),
        Capability.HALF_MESSAGES: absent("the broker asks nobody back"),
    },
)


def without_log(denied: str) -> Mapping[Capability, Support]:
    """What is left for an owner that may not use its decision log; `denied` says what it would need."""
    return {
        Capability.FENCING: emulated(
            "the broker fences each writer; without the decision log an owner that may use it can take the id back"
        ),
        Capability.PREPARE: absent(f"it needs the decision log, and {denied}"),
        Capability.STATUS_LOOKUP: emulated(
            "the coordinator tells until a writer is opened again; after that nobody can without the decision log"
        ),
    }


class KafkaBackend(Backend):
    """Apache Kafka from 2.5 on."""

    name = "kafka"
    schemes = ("kafka",)
    capabilities = CAPABILITIES
    limits = Limits(message_bytes=message_bytes({}), prepared_seconds=DEFAULT_LONGEST_MS / 1000)
    options = OPTIONS
    steps = (
        *("step:log", "step:open", "step:fence"),  # ids
        *("step:acks", "step:commit", "step:end", "step:record", "step:repair"),  # transactions
    )

    def check_installed(self) -> None:
        try:
            from txnbridge_kafka import broker  # noqa: F401
            from txnbridge_kafka.wire.library import check_version
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0].replace("_", "-")
            if package.startswith("txnbridge"):
                raise
            raise BackendMissing(
                f"{package} is not installed: in a clone of txnbridge, pip install -e '.[kafka]'"
            ) from error
        check_version()

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        self.check_installed()
        from txnbridge_kafka.broker import KafkaBroker

        return KafkaBroker(read(url, options, context), context, self, deadline)
