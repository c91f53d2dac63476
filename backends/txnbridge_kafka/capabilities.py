"""The guarantees (capabilities) that this backend declares, and the limits by settings of cluster and client."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.spi import NATIVE, Capabilities, Capability, Support, absent, emulated

_ONE_POSITION = "a group has one committed offset in each partition, so messages are acknowledged in order"
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
            "the coordinator's start time distinguishes a transaction from others of its writer"
        ),
        Capability.REDELIVERY: emulated("the reader seeks back; the messages after that one are delivered again too"),
        Capability.DECISION_LOG: emulated("a topic with one partition in which the first record for an id counts"),
        Capability.INDIVIDUAL_ACK: absent(_ONE_POSITION),
        Capability.SHARE_MESSAGE: absent(_ONE_MEMBER),
        Capability.SHARE_KEY: absent(_ONE_MEMBER),
        Capability.RESUME_SEQUENCE: absent("a producer's sequence ends with its session"),
        Capability.HALF_MESSAGES: emulated(
            "txnbridge keeps them in a topic of each group; a resolver publishes those that the decision log commits"
        ),
    },
)


def without_log(denied: str) -> Mapping[Capability, Support]:
    """Return the reduced capabilities of an owner without access to its decision log; `denied` names the rights."""
    return {
        Capability.FENCING: emulated(
            "the broker fences each writer; without the decision log an owner that may use it can take the id back"
        ),
        Capability.PREPARE: absent(f"it needs the decision log, and {denied}"),
        Capability.HALF_MESSAGES: absent(f"they need the decision log, and {denied}"),
        Capability.STATUS_LOOKUP: emulated(
            "the coordinator has it until a writer is opened again; after that it is unknown without the decision log"
        ),
    }


WITHOUT_LISTS: Mapping[Capability, Support] = {
    Capability.LIST_OPEN: absent("this broker does not know the request ListTransactions")
}

# The default of the broker's transaction.max.timeout.ms.
DEFAULT_LONGEST_MS = 900_000

# librdkafka's default of message.max.bytes, and the overhead that it adds to the size of a message.
_MESSAGE_BYTES, _MESSAGE_OVERHEAD = 1_000_000, 36


def message_bytes(client: Mapping[str, object]) -> int:
    """Return the largest total size of a message's key, value and headers with these librdkafka settings."""
    return int(str(client.get("message.max.bytes", _MESSAGE_BYTES))) - _MESSAGE_OVERHEAD


def longest_ms(settings: Mapping[str, str]) -> int:
    """Return the longest transaction time-out in a broker's settings; Kafka's default if the setting is not there."""
    return int(settings.get("transaction.max.timeout.ms", DEFAULT_LONGEST_MS))
