"""The capabilities that other brokers lack: with `like=kafka` the embedded broker refuses what Kafka would refuse.

A program that passes its tests with a profile uses no feature that the other broker lacks. A profile only removes
capabilities; it does not imitate the other broker's timing and faults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from txnbridge.errors import InvalidOption, NotSupported
from txnbridge.spi import Capability, Limits, RawHeaders, Support, absent


@dataclass(frozen=True)
class BrokerProfile:
    """A broker that the embedded broker imitates (`?like=kafka`): its limits, and the capabilities that it lacks."""

    name: str
    limits: Limits
    lacks: Mapping[Capability, Support] = field(default_factory=dict)
    names: str = ".*"  # a regular expression for topics' names
    naming: str = ""  # the same rule in words

    def refuse_name(self, topic: str) -> None:
        """Raise `InvalidOption` for a topic's name that the imitated broker would refuse."""
        if not re.fullmatch(self.names, topic):
            raise InvalidOption(f"{topic!r} is no valid topic name on {self.name}: {self.naming}")

    def refuse(self, headers: RawHeaders, before: int) -> None:
        """Raise `NotSupported` for a message that the imitated broker would refuse.

        `before` is the number of earlier messages in the same transaction.
        """
        if Capability.BARE_HEADERS in self.lacks and any(not name or value is None for name, value in headers):
            raise NotSupported(f"{self.name} has no bare-headers: {self.lacks[Capability.BARE_HEADERS].note}")
        most = self.limits.transaction_messages
        if most is not None and before >= most:
            raise NotSupported(f"{self.name} accepts at most {most} messages in one transaction")


def _lacks(*pairs: tuple[Capability, str]) -> dict[Capability, Support]:
    return {capability: absent(why) for capability, why in pairs}


_ONE_POSITION = "a group has one committed offset in each partition, so messages are acknowledged in order"
_ONE_MEMBER = "a partition is read by one member of a group"

PROFILES: Mapping[str, BrokerProfile] = {
    "kafka": BrokerProfile(
        "Kafka",
        Limits(message_bytes=999_964, prepared_seconds=900.0),  # the defaults of its clients and its broker
        _lacks(
            (Capability.INDIVIDUAL_ACK, _ONE_POSITION),
            (Capability.SHARE_MESSAGE, _ONE_MEMBER),
            (Capability.RESUME_SEQUENCE, "a producer's sequence ends with its session"),
        ),
        r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}",
        "it has up to 249 letters (without accents), digits, '.', '_' and '-', and is not '.' or '..'",
    ),
    "pulsar": BrokerProfile(
        "Pulsar",
        Limits(message_bytes=5 << 20),
        _lacks((Capability.BARE_HEADERS, "a message's properties are text with a name")),
    ),
    "rocketmq": BrokerProfile(
        "RocketMQ",
        Limits(message_bytes=4 << 20, transaction_messages=10_000),
        _lacks(
            (Capability.ISOLATION, "the messages of a transaction become visible one after another"),
            (Capability.INDIVIDUAL_ACK, _ONE_POSITION),
            (Capability.SHARE_MESSAGE, _ONE_MEMBER),
            (Capability.RESUME_SEQUENCE, "the broker keeps no sequences"),
            (Capability.BARE_HEADERS, "a message's properties are text with a name"),
        ),
    ),
}
