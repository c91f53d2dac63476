"""The translation of confluent-kafka's errors into the errors of the core, and which errors are temporary."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from txnbridge import errors

DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
}
_REPLACED = {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID}
MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
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
    KafkaError._STATE,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError._DESTROY,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
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
    if code in _REFUSED:
        return errors.InvalidOption(text)
    return errors.BrokerUnavailable(text)


def is_passing(error: BaseException | None) -> bool:
    """Return whether the consumer's client recovers by itself from an error, such as one of group coordination."""
    cause = None if error is None else kafka_error(error)
    return cause is not None and (cause.retriable() or cause.code() in _PASSING)
