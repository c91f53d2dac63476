"""The translation of confluent-kafka's errors in a transaction: was it aborted, did it time out, was it fenced?"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaError

from txnbridge import errors
from txnbridge.spi import Deadline
from txnbridge_kafka.errors import DENIED, REBALANCED, kafka_error

_GROUP_MOVED_ON = {*REBALANCED, KafkaError.FENCED_INSTANCE_ID}
_FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
# The codes after which the coordinator has ended the transaction, or another producer has the transactional id.
ENDED = {*_FENCED, KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING}
# By the error code, the rights that an administrator has to grant.
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
    newer_owner: Callable[[], errors.Fenced | None],
    deadline: Deadline,
    otherwise: type[errors.TransactionAborted],
) -> errors.TxnBridgeError:
    """Return txnbridge's error for an error of confluent-kafka after which a transaction is, or must be, aborted.

    `what` names the failed action in the error's text. `newer_owner` returns `Fenced` if the id has a newer owner. An
    error code without a meaning of its own becomes an error of the type `otherwise`.
    """
    code, text = error.code(), f"{what}: {error.str()} ({error.name()})"
    if code in _GROUP_MOVED_ON:
        return errors.Conflict(f"{text}: other members of the group have these partitions now")
    if code in DENIED:
        needed = f"; the user of {id} needs {_NEEDED[code]}" if code in _NEEDED else ""
        return errors.AccessDenied(text + needed)
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        refused = errors.DeliveryFailed(f"{text}: it is larger than its topic's max.message.bytes; send smaller ones")
        refused.permanent = True
        return refused
    fenced = newer_owner() if code in ENDED or _is_lost(error) else None
    if fenced is not None:
        return fenced
    return _lost(error, text, deadline) if _is_lost(error) else otherwise(f"{text}; run it again")


def _lost(error: KafkaError, text: str, deadline: Deadline) -> errors.TxnBridgeError:
    """Return the error for a transaction whose producer cannot go on, although no newer owner of its id is known."""
    if error.code() not in ENDED:
        return errors.TransactionAborted(f"{text}: the client failed, and the transaction is aborted; run it again")
    if deadline.expired:
        return errors.TransactionTimedOut(f"{text}: the transaction timed out and was aborted; run it again")
    return errors.TransactionAborted(f"{text}: the broker or an administrator ended the transaction; run it again")
