"""The error codes and states in brokers' answers with their meaning, and the types of the converted answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    Fenced,
    InvalidOption,
    InvalidState,
    TransactionAborted,
    TxnBridgeError,
)
from txnbridge.spi import Partition
from txnbridge_kafka.client import kafka_python

DONE = 0
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
PRODUCER_FENCED = 90
TRANSACTION_ABORTABLE = 120

# The final error codes of EndTxn, with their meaning for its sender.
END_TXN_CODES: Mapping[int, str] = {
    DONE: "the decision is durable; repeating it says the same",
    INVALID_PRODUCER_EPOCH: "timed out, or the id was opened again, perhaps after it had ended (old request versions)",
    INVALID_TXN_STATE: "it has ended the other way, or nothing was ever added to it",
    INVALID_PRODUCER_ID_MAPPING: "the id is not known, or it belongs to another producer",
    PRODUCER_FENCED: "timed out, or the id was opened again, perhaps after it had ended",
    TRANSACTION_ABORTABLE: "it can only be aborted",
}

# The coordinator's states of a transactional id, grouped by the outcome of its last transaction.
COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
ABORTED = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})
OPEN = "Ongoing"
# In these states the coordinator is writing the control markers of the last transaction.
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
# These states do not change before the next request of a producer.
SETTLED = frozenset({"Empty", "CompleteCommit", "CompleteAbort", "Dead"})
# From this level of the feature transaction.version on, ending a transaction raises the producer's epoch.
EPOCH_BUMPS = 2

# The resource types in DescribeConfigs.
TOPIC, BROKER = 2, 4
# The special times in ListOffsets.
EARLIEST, LATEST = -2, -1
# Error codes of ListOffsets if a leader is new, not yet known to the broker, or too busy.
LEADER_LATER = {3, 5, 6, 7, 74, 75, 76, 78}
UNSTABLE = 88
_INVALID_TRANSACTION_TIMEOUT = 50
TRANSACTIONAL_ID_NOT_FOUND = 105
# The coordinator is loading, is not available, has moved, or still writes the markers of the previous transaction.
NOT_NOW = {14, 15, 16, 51}
# Of `NOT_NOW`, the codes after which the request was certainly not carried out: loading, or still writing markers.
UNTOUCHED = {14, 51}
# For acknowledgements additionally: the broker does not know the topic yet, or was too slow to store the positions.
ACK_LATER = {*NOT_NOW, 3, 7}
# The partition has no leader at the moment, or its leader is another broker.
NO_LEADER = {5, 6}
UNKNOWN_TOPIC = 3
DENIED = {29, 30, 31, 53}
_FENCED = {INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED}


@dataclass(frozen=True)
class TransactionDescription:
    """The coordinator's description of a transactional id and its last transaction.

    `state` is "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead" or
    "PrepareEpochFence". `start`, None for an id without a transaction, and `timeout` are in milliseconds.
    """

    id: str
    state: str
    pid: int
    epoch: int
    start: int | None
    timeout: int
    partitions: tuple[Partition, ...]


@dataclass(frozen=True)
class EndTxnResult:
    """The final answer to EndTxn: one of `END_TXN_CODES`, and the producer id and epoch after the request.

    `only_once` is true if no other copy of the request can have arrived or be under way.
    """

    code: int
    pid: int
    epoch: int
    only_once: bool = True


@dataclass(frozen=True)
class OffsetCommitResult:
    """The final error code of an acknowledgement; with `answer_lost` a copy of the request may still arrive."""

    code: int
    answer_lost: bool


@dataclass(frozen=True)
class CommittedOffset:
    """A group's position in a partition, and the id of the topic in which it was committed, if known."""

    at: int
    topic_id: str | None


@dataclass(frozen=True)
class ActiveProducer:
    """A producer's state at a partition's leader; `start_offset` is its open transaction's first offset, or None."""

    pid: int
    epoch: int
    start_offset: int | None
    last_timestamp: int
    coordinator_epoch: int


class RequestResult(NamedTuple):
    """A broker's error code, 0 for success, and the error's text."""

    code: int
    text: str


@dataclass(frozen=True)
class TransactionListing:
    """One entry of a broker's answer to ListTransactions: a transactional id, its producer id and its state."""

    id: str
    pid: int
    state: str


class RetryLaterError(Exception):
    """Raised if a broker's answer is not final, so that the request has to be repeated."""


def check(code: int, what: str) -> None:
    """Raise the core's error for a broker's error code, or `RetryLaterError` for a temporary one; 0 is no error."""
    if code in NOT_NOW or code in NO_LEADER:
        raise RetryLaterError(f"{what}: {error_name(code)}")
    if code != DONE:
        raise refused(code, what)


def refused(code: int, what: str) -> TxnBridgeError:
    text = f"{what}: {error_name(code)}"
    if code in DENIED:
        return AccessDenied(text)
    if code in _FENCED:
        return Fenced(text)
    if code == INVALID_TXN_STATE:
        return InvalidState(text)
    if code == TRANSACTION_ABORTABLE:
        return TransactionAborted(text)
    if code == _INVALID_TRANSACTION_TIMEOUT:
        return InvalidOption(f"{text}; the broker's transaction.max.timeout.ms is the limit")
    return BrokerUnavailable(text)


def error_name(code: int) -> str:
    kind = kafka_python.errors.for_code(code)
    return f"{getattr(kind, 'message', None) or kind.__name__} (error {code})"
