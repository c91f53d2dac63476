"""Brokers' error codes with their meaning, and their answers as ours."""

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

# The final codes of EndTxn, by what they mean to its sender.
END_TXN_CODES: Mapping[int, str] = {
    DONE: "the decision is durable; repeating it says the same",
    INVALID_PRODUCER_EPOCH: "timed out, or the id was opened again, perhaps after it had ended (old request versions)",
    INVALID_TXN_STATE: "it has ended the other way, or nothing was ever added to it",
    INVALID_PRODUCER_ID_MAPPING: "the id is not known, or it belongs to another producer",
    PRODUCER_FENCED: "timed out, or the id was opened again, perhaps after it had ended",
    TRANSACTION_ABORTABLE: "it can only be aborted",
}

# The coordinator's states of a transactional id, by what they mean for its last transaction.
COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
ABORTED = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})
OPEN = "Ongoing"
# The coordinator is writing the markers of these.
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
# A state that changes no more by itself.
SETTLED = frozenset({"Empty", "CompleteCommit", "CompleteAbort", "Dead"})
# From this level of the feature transaction.version on, ending a transaction raises the producer's epoch.
EPOCH_BUMPS = 2

# Kinds of resources that have settings.
TOPIC, BROKER = 2, 4
# Special times in ListOffsets.
EARLIEST, LATEST = -2, -1
# Codes of a leader that is new, that a broker has not heard of yet, or that is too busy.
LEADER_LATER = {3, 5, 6, 7, 74, 75, 76, 78}
UNSTABLE = 88
_INVALID_TRANSACTION_TIMEOUT = 50
TRANSACTIONAL_ID_NOT_FOUND = 105
# No coordinator at the moment: it loads, is not available, has moved, or still writes the previous end.
NOT_NOW = {14, 15, 16, 51}
# Those of them after which certainly nothing was done: it loads, or still writes the previous end.
UNTOUCHED = {14, 51}
# For acknowledgements also: the broker has not heard of the topic yet, or was too slow to store them.
ACK_LATER = {*NOT_NOW, 3, 7}
# The partition has no leader at the moment, or another one.
NO_LEADER = {5, 6}
UNKNOWN_TOPIC = 3
DENIED = {29, 30, 31, 53}
_FENCED = {INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED}


@dataclass(frozen=True)
class TransactionDescription:
    """The coordinator's description of a transactional id and its last transaction.

    `state` is "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead" or
    "PrepareEpochFence". `start`, None where there is none, and `timeout` are in milliseconds.
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
    """The final answer to EndTxn: one of `END_TXN_CODES`, and the producer id and epoch from now on.

    `only_once`: no other copy of the request can have arrived or be under way.
    """

    code: int
    pid: int
    epoch: int
    only_once: bool = True


@dataclass(frozen=True)
class OffsetCommitResult:
    """The final code of an acknowledgement. `answer_lost`: another copy of the request may still arrive."""

    code: int
    answer_lost: bool


@dataclass(frozen=True)
class CommittedOffset:
    """A group's position in a partition, and the id of the topic in which it was acknowledged, if known."""

    at: int
    topic_id: str | None


@dataclass(frozen=True)
class ActiveProducer:
    """A producer as a partition's leader knows it; `start_offset` is where its open transaction begins."""

    pid: int
    epoch: int
    start_offset: int | None
    last_timestamp: int
    coordinator_epoch: int


class RequestResult(NamedTuple):
    """A broker's code, 0 for success, and its text."""

    code: int
    text: str


@dataclass(frozen=True)
class TransactionListing:
    """One entry of a coordinator's list of transactional ids."""

    id: str
    pid: int
    state: str


class RetryLaterError(Exception):
    """The broker cannot answer now."""


def check(code: int, what: str) -> None:
    """Raise our error for a broker's error code, `RetryLaterError` for one that passes by itself."""
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
