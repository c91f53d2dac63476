"""Kafka's error codes and transaction states, and the types to which brokers' answers are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import KafkaError

from txnbridge import errors
from txnbridge.spi import Partition

DONE = 0
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
PRODUCER_FENCED = 90
TRANSACTION_ABORTABLE = 120

# The error codes after which EndTxn is not repeated, with what each says about the transaction.
END_TXN_CODES: Mapping[int, str] = {
    DONE: "the decision is durable; the same request again gets the same answer",
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
# The states in which the coordinator is writing the control markers of the last transaction.
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
# The states that do not change before a producer's next request.
SETTLED = frozenset({"Empty", "CompleteCommit", "CompleteAbort", "Dead"})
# The level of the feature transaction.version from which on ending a transaction raises the producer epoch.
EPOCH_BUMPS = 2

# The resource types in DescribeConfigs.
TOPIC, BROKER = 2, 4
# The special times in ListOffsets.
EARLIEST, LATEST = -2, -1
# The codes of ListOffsets after which it is repeated: the leader changes, is not known yet, or is too busy.
LEADER_RETRY_CODES = {3, 5, 6, 7, 56, 74, 75, 76, 78}
UNSTABLE_OFFSET = 88
_INVALID_TRANSACTION_TIMEOUT = 50
TRANSACTIONAL_ID_NOT_FOUND = 105
# The coordinator is loading, not available, or has moved, or it still writes the markers of the last transaction.
COORDINATOR_RETRY_CODES = {14, 15, 16, 51}
# The `COORDINATOR_RETRY_CODES` after which the request was certainly not carried out: loading, or writing markers.
NOT_CARRIED_OUT = {14, 51}
# For acknowledgements also: the broker does not know the topic yet, or was too slow to store the offsets.
ACK_RETRY_CODES = {*COORDINATOR_RETRY_CODES, 3, 7}
# The partition has no leader now, or its leader is another broker.
NO_LEADER = {5, 6}
UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, TIMED_OUT, INVALID_PARTITIONS, NOT_CONTROLLER = 3, 100, 7, 37, 41
DENIED = {29, 30, 31, 53}
NO_MEMBER = {25, 82}  # the group does not have the member: the broker refuses its requests
_FENCED = {INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED}


@dataclass(frozen=True)
class TransactionDescription:
    """The coordinator's description of a transactional id and its last transaction.

    `state` is "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead" or
    "PrepareEpochFence". `start` and `timeout` are in milliseconds. `start` is None for an id that never had a
    transaction.
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
    """The final answer to EndTxn: one of `END_TXN_CODES`, and the producer's id and epoch afterwards.

    `only_once` is true if the request was sent once, so that no other copy can still be carried out.
    """

    code: int
    pid: int
    epoch: int
    only_once: bool = True


@dataclass(frozen=True)
class OffsetCommitResult:
    """The final error code of a request that commits offsets, in a transaction or not.

    `answer_lost` is true if the answer to a copy of the request was lost: that copy may still be carried out.
    """

    code: int
    answer_lost: bool


@dataclass(frozen=True)
class CommittedOffset:
    """A group's committed offset in a partition, with its leader epoch and the topic's id at the commit, if known."""

    at: int
    topic_id: str | None
    epoch: int | None = None


@dataclass(frozen=True)
class ActiveProducer:
    """A producer's state at a partition's leader.

    `start_offset` is the first offset of the producer's open transaction; None if the producer has none open.
    """

    pid: int
    epoch: int
    start_offset: int | None
    last_timestamp: int
    coordinator_epoch: int


class RequestResult(NamedTuple):
    """A broker's error code for one request (0 for success), and the error's text."""

    code: int
    text: str


@dataclass(frozen=True)
class TransactionListing:
    """One entry of a broker's answer to ListTransactions."""

    id: str
    pid: int
    state: str


class RetryLaterError(Exception):
    """Raised after an answer that is not final: `RequestRunner` repeats the request."""


def check(code: int, what: str) -> None:
    """Raise txnbridge's error for a broker's error code, or `RetryLaterError` if the code is temporary."""
    if code in COORDINATOR_RETRY_CODES or code in NO_LEADER:
        raise RetryLaterError(f"{what}: {error_name(code)}")
    if code != DONE:
        raise refused(code, what)


def refused(code: int, what: str) -> errors.TxnBridgeError:
    text = f"{what}: {error_name(code)}"
    if code in DENIED:
        return errors.AccessDenied(text)
    if code in _FENCED:
        return errors.Fenced(text)
    if code == INVALID_TXN_STATE:
        return errors.InvalidState(text)
    if code == TRANSACTION_ABORTABLE:
        return errors.TransactionAborted(text)
    if code == _INVALID_TRANSACTION_TIMEOUT:
        return errors.InvalidOption(f"{text}; the broker's transaction.max.timeout.ms is the limit")
    return errors.BrokerUnavailable(text)


def error_name(code: int) -> str:
    return f"{KafkaError(code).name()} (error {code})"
