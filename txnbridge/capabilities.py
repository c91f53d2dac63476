"""Capabilities: the guarantees that txnbridge gives on a broker, declared as data by its backend.

The `NotSupported` errors, the skipped tests of the conformance suite, the table in the docs and the command
`txnbridge capabilities` all follow from this declaration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from txnbridge.errors import NotSupported

__all__ = ["NATIVE", "Capabilities", "Capability", "Level", "Limits", "Support", "absent", "emulated"]


class Capability(Enum):
    """One named guarantee. `.value` is the name that users see, `.sentence` explains the guarantee."""

    sentence: str

    ATOMIC_TOPICS = "atomic-topics", "Messages to several topics and partitions become visible together or not at all."
    ATOMIC_ACK = "atomic-ack", "Acknowledgements take effect together with the messages of their transaction."
    ISOLATION = "isolation", "A reader sees nothing of a transaction before its commit, and then all of it."
    PARTITION_ORDER = "partition-order", "Each partition is read in one order, the same for every reader."
    GROUP_ORDER = "group-order", "A group gets the messages of each partition in order, even after it has gone back."
    FENCING = "fencing", "Opening a transactional id fences its older owner."
    PREPARE = "prepare", "A transaction can be made durable and invisible, to be ended later by its token."
    RESOLVE_ANYWHERE = "resolve-anywhere", "Any process can commit or abort a prepared transaction by its token."
    STATUS_LOOKUP = (
        "status-lookup",
        "Any process can find out the outcome of a token's transaction without changing it.",
    )
    IDEMPOTENT_SEND = "idempotent-send", "A publisher's own retries never store a message twice."
    RESUME_SEQUENCE = "resume-sequence", "After a crash a named publisher resumes where its sequence stopped."
    DEADLINE = "deadline", "A transaction that nobody ends is aborted by its deadline."
    LIST_OPEN = "list-open", "Open and prepared transactions can be listed."
    END_OPEN = "end-open", "An administrator can end an open or prepared transaction."
    INDIVIDUAL_ACK = "individual-ack", "Messages may be acknowledged one by one, in any order."
    CONFLICT = "conflict", "Two transactions that acknowledge the same message never both commit."
    REDELIVERY = "redelivery", "A message given back by nack is delivered again."
    SHARE_MESSAGE = "share-message", "Members of a group may share one partition message by message."
    SHARE_KEY = "share-key", "Members of a group may share one partition key by key."
    START_BY_TIME = "start-by-time", "Reading can start at a point in time."
    REPLAY = "replay", "Reading can start again at an earlier position."
    RENEWED_TOPICS = (
        "renewed-topics",
        "If a topic is deleted and recreated under its name, no reader skips its first messages.",
    )
    TOMBSTONES = "tombstones", "A message without a value (None) differs from one with an empty value."
    EMPTY_VALUE = "empty-value", "A message may have an empty value."
    BINARY_HEADERS = "binary-headers", "Header values may be any bytes."
    REPEATED_HEADERS = "repeated-headers", "A header name may occur more than once."
    BARE_HEADERS = "bare-headers", "A header may have no value (None), or an empty name."
    CHOOSE_PARTITION = "choose-partition", "The sender may choose the partition."
    TIMESTAMPS = "timestamps", "The sender may set the timestamp."
    TOPIC_ADMIN = "topic-admin", "Topics can be created, listed, grown and deleted."
    GROUP_ADMIN = "group-admin", "Groups can be listed with their members and lag, and set back or forward."
    DECISION_LOG = "decision-log", "The broker can keep the log in which the first decision for an id wins."
    HALF_MESSAGES = "half-messages", "A message can wait for the outcome of something outside the broker."
    SURVIVES_BROKER_KILL = "survives-broker-kill", "What was committed survives kill -9 of the broker."

    def __new__(cls, name: str, sentence: str) -> Capability:
        member = object.__new__(cls)
        member._value_ = name
        member.sentence = sentence
        return member


class Level(Enum):
    """The way in which a broker supports a capability: natively, by emulation in txnbridge, or not at all."""

    NATIVE = "native"
    EMULATED = "emulated"
    ABSENT = "absent"


@dataclass(frozen=True)
class Support:
    """A backend's declaration of a capability: native, emulated (`note` says how) or absent (`note` says why)."""

    level: Level
    note: str = ""
    link: str | None = None

    def __bool__(self) -> bool:
        return self.level is not Level.ABSENT


NATIVE = Support(Level.NATIVE)


def emulated(how: str, link: str | None = None) -> Support:
    """Declare a capability that txnbridge implements itself on this broker; `how` is one sentence about it."""
    return Support(Level.EMULATED, how, link)


def absent(why: str, link: str | None = None) -> Support:
    """Declare a capability that is not supported; `why` is one sentence for the user's `NotSupported` error."""
    return Support(Level.ABSENT, why, link)


_TRANSACTIONAL = (
    Capability.ATOMIC_TOPICS,
    Capability.ATOMIC_ACK,
    Capability.FENCING,
    Capability.PREPARE,
    Capability.RESOLVE_ANYWHERE,
    Capability.STATUS_LOOKUP,
    Capability.DEADLINE,
    Capability.LIST_OPEN,
    Capability.END_OPEN,
    Capability.CONFLICT,
    Capability.HALF_MESSAGES,
)


class Capabilities(Mapping[Capability, Support]):
    """A backend's complete declaration: one `Support` for every `Capability`.

    Raise `ValueError` if an entry is missing, so that no backend forgets a new capability.
    """

    def __init__(self, broker: str, supports: Mapping[Capability, Support]) -> None:
        missing = [capability.value for capability in Capability if capability not in supports]
        if missing:
            raise ValueError(f"{broker} declares nothing about: {', '.join(missing)}")
        self.broker = broker
        self._supports = dict(supports)

    def __getitem__(self, capability: Capability) -> Support:
        return self._supports[capability]

    def __iter__(self) -> Iterator[Capability]:
        return iter(Capability)

    def __len__(self) -> int:
        return len(Capability)

    def require(self, capability: Capability) -> None:
        """Raise `NotSupported` with the declared reason unless the capability is supported."""
        support = self._supports[capability]
        if not support:
            see = f" (see {support.link})" if support.link else ""
            raise NotSupported(f"{self.broker} has no {capability.value}: {support.note}{see}")

    def without_transactions(self, why: str) -> Capabilities:
        """Return a copy without what needs the broker's transactions, for a cluster where they are off."""
        return self.but(dict.fromkeys(_TRANSACTIONAL, absent(why)))

    def but(self, changes: Mapping[Capability, Support]) -> Capabilities:
        """Return a copy with some entries replaced, for a cluster whose settings or rights forbid a capability."""
        return Capabilities(self.broker, {**self._supports, **changes})


@dataclass(frozen=True)
class Limits:
    """The limits of a broker, such as the largest message; None means no limit."""

    message_bytes: int | None = None
    transaction_messages: int | None = None
    transaction_bytes: int | None = None
    prepared_seconds: float | None = None
    prepared_transactions: int | None = None  # the number of prepared transactions of one transactional id
