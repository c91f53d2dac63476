"""The meaning of the client's errors for the transaction in which they happen."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaError

from txnbridge.errors import AccessDenied, Conflict, Fenced, TransactionAborted, TransactionTimedOut, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_kafka.errors import DENIED, kafka_error

_GROUP_MOVED_ON = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
# The coordinator has ended the transaction, or the id is another producer's.
ENDED = {*_FENCED, KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING}
# The rights that an administrator has to grant.
_NEEDED = {
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write on this transactional id",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Write on every topic that it sends to and Read on those it acknowledges",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read on the group",
}


def is_fenced(error: BaseException | None) -> bool:
    cause = None if error is None else kafka_error(error)
    return cause is not None and cause.code() in _FENCED


def ends_producer(error: KafkaError) -> bool:
    """Return whether the producer can begin no other transaction after this error."""
    passes = {*_GROUP_MOVED_ON, KafkaError.MSG_SIZE_TOO_LARGE}
    return error.code() in DENIED or (_is_lost(error) and error.code() not in passes)


def _is_lost(error: KafkaError) -> bool:
    return error.code() in _FENCED or error.fatal()


def failure(
    error: KafkaError,
    what: str,
    id: str,
    newer_owner: Callable[[], Fenced | None],
    deadline: Deadline,
    otherwise: type[TransactionAborted],
) -> TxnBridgeError:
    """Return our error for an error after which a transaction can only be aborted, or is already.

    `what` says what was being done under the transactional id; `deadline` is the transaction's own.
    """
    code, text = error.code(), f"{what}: {error.str()} ({error.name()})"
    if code in _GROUP_MOVED_ON:
        return Conflict(f"{text}: other members of the group have these partitions now")
    if code in DENIED:
        needed = f"; the user of {id} needs {_NEEDED[code]}" if code in _NEEDED else ""
        return AccessDenied(text + needed)
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return otherwise(f"{text}: it is larger than its topic takes (max.message.bytes); smaller messages pass")
    fenced = newer_owner() if code in ENDED or _is_lost(error) else None
    if fenced is not None:
        return fenced
    return _lost(error, text, deadline) if _is_lost(error) else otherwise(f"{text}; run it again")


def _lost(error: KafkaError, text: str, deadline: Deadline) -> TxnBridgeError:
    """Return our error for a producer that was fenced although the id has no newer owner, or that is broken."""
    if error.code() not in ENDED:
        return TransactionAborted(f"{text}: the client could not go on, and the transaction is aborted; run it again")
    if deadline.expired:
        return TransactionTimedOut(f"{text}: the transaction was aborted because its time was over; run it again")
    return TransactionAborted(f"{text}: the broker or an administrator ended the transaction; run it again")
