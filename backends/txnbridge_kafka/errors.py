"""The translation of confluent-kafka's errors into the errors of the core, and which errors are temporary.

In a transaction: was it aborted, did it time out, was it fenced?
"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException

from txnbridge import errors
from txnbridge.spi import Deadline

DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
}
_REPLACED = {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID}
MISSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_TIMEOUT = {KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError._TIMED_OUT_QUEUE, KafkaError._MSG_TIMED_OUT}
_STORAGE = {KafkaError.KAFKA_STORAGE_ERROR, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND}
_REFUSED = {
    KafkaError._INVALID_ARG,
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.INVALID_REQUEST,
}
# The group has assigned its partitions anew since the member's last answer.
REBALANCED = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_PASSING = {
    *REBALANCED,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
# In a transaction:
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


def kafka_error(error: BaseException | KafkaError) -> KafkaError | None:
    """Return the `KafkaError` in an exception of confluent-kafka; None for any other exception."""
    if isinstance(error, SystemError) and isinstance(error.__cause__, KafkaException):
        # confluent-kafka raises SystemError, from the KafkaException, if a fatal error occurs in a delivery callback.
        error = error.__cause__
    if isinstance(error, KafkaException):
        cause = error.args[0]
        return cause if isinstance(cause, KafkaError) else None
    return error if isinstance(error, KafkaError) else None


def client_error(error: BaseException) -> KafkaError:
    cause = kafka_error(error)
    if cause is None:
        raise error
    return cause


def translate(error: BaseException | KafkaError, what: str) -> errors.TxnBridgeError:
    """Return txnbridge's error for an error of confluent-kafka; `what` names the failed action in the error's text.

    This is for calls outside a transaction: `failure` translates the errors of a transaction's calls.
    """
    cause = kafka_error(error)
    if cause is None:
        return errors.BrokerUnavailable(f"{what}: {type(error).__name__}: {error}")
    code, text = cause.code(), f"{what}: {cause.str()} ({cause.name()})"
    if code in DENIED:
        return errors.AccessDenied(text)
    # After a fatal error the client reports the code _FATAL, and the original error only as text.
    if code in _REPLACED or (code == KafkaError._FATAL and any(KafkaError(each).str() in text for each in _REPLACED)):
        return errors.Fenced(f"{text}: another member of the group has this group.instance.id, so this one must stop")
    if code in MISSING:
        return errors.NotFound(text)
    if code in _TIMEOUT:
        return errors.DeadlineExceeded(text)
    if code in _STORAGE:
        return errors.StorageFailed(text)
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return errors.InvalidOption(f"{text}: ask for less, or let an administrator raise transaction.max.timeout.ms")
    return errors.InvalidOption(text) if code in _REFUSED else errors.BrokerUnavailable(text)


def is_passing(error: BaseException | None) -> bool:
    """Return whether the consumer's client recovers by itself from an error, such as one of group coordination."""
    cause = None if error is None else kafka_error(error)
    return cause is not None and (cause.retriable() or cause.code() in _PASSING)


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
