"""Translation of the protocol client's errors to those of `txnbridge.errors`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from txnbridge import errors
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.settings.topic_names import whole_topic

T = TypeVar("T")

# Seconds between attempts: a broker that has just started refuses requests for a moment.
_RETRY_PAUSE_SECONDS = 0.05
_REMEDIES: Mapping[type[wire.PulsarError], str] = {
    wire.NotAuthenticated: "; look at the options token, token_file, user, password and tls_certificate",
    wire.NotOwner: ": the user who began it has to do this, or a superuser",
}
# What a broker answers, as NOT_ALLOWED, about a partition of a topic that was deleted.
_NO_PARTITION = "Partition metadata not found"
_QUOTA = (wire.ServerErrorCode.QUOTA_EXCEEDED_ERROR, wire.ServerErrorCode.QUOTA_EXCEEDED_EXCEPTION)


def translate(error: wire.PulsarError, what: str) -> errors.TxnBridgeError:
    """Return txnbridge's error for a client error, from which the caller raises it; `what` names the action.

    Use this only for reads, and for requests that decide nothing about a transaction.
    """
    text = f"{what}: {error}"
    if isinstance(error, wire.NotAuthenticated | wire.NotAuthorized):
        return errors.AccessDenied(text + _REMEDIES.get(type(error), ""))
    if isinstance(error, wire.TopicNotFound) or _NO_PARTITION in text:
        return errors.NotFound(text)
    if isinstance(error, wire.ProducerFenced):
        return errors.Fenced(text)
    if isinstance(error, wire.NotAllowed | wire.TopicTerminated):
        return errors.NotSupported(text)
    if isinstance(error, wire.MessageTooLarge | wire.MissingLibrary):
        return errors.InvalidOption(text)
    if isinstance(error, wire.CorruptEntry):
        return errors.StorageFailed(text)
    if isinstance(error, wire.RequestTimedOut):
        return errors.DeadlineExceeded(text)
    if isinstance(error, wire.Closed):
        return errors.InvalidState(text)
    return _refusal(error, text) if isinstance(error, wire.ServerError) else errors.BrokerUnavailable(text)


def _refusal(error: wire.ServerError, text: str) -> errors.TxnBridgeError:
    if error.code == wire.ServerErrorCode.INVALID_TOPIC_NAME:
        return errors.InvalidOption(text)
    if error.code == wire.ServerErrorCode.INCOMPATIBLE_SCHEMA:
        return errors.NotSupported(
            f"{text}; messages of a bridge have no schema: switch isSchemaValidationEnforced off there"
        )
    is_full_or_broken = error.code == wire.ServerErrorCode.PERSISTENCE or error.code in _QUOTA
    return (errors.StorageFailed if is_full_or_broken else errors.BrokerUnavailable)(text)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors of the protocol client that are raised inside the block; `what` describes the action."""
    try:
        yield
    except wire.PulsarError as error:
        raise translate(error, what) from error


@contextmanager
def needing(actions: str, scope: str) -> Iterator[None]:
    """Raise `AccessDenied`, with the command that grants the right, if the block fails because a right is missing.

    `scope` is a topic's full name or a namespace; `actions` are named as in Pulsar.
    """
    try:
        yield
    except wire.NotAuthorized as error:
        scope, _ = whole_topic(scope)
        kind = "topics" if "://" in scope else "namespaces"
        raise errors.AccessDenied(
            f"{scope}: {error}; an administrator grants it to this user's role:"
            f"\n  pulsar-admin {kind} grant-permission --role ROLE --actions {actions} {scope}"
        ) from error


def retry_translated(
    attempt: Callable[[], T],
    what: str,
    deadline: Deadline,
    words: Callable[[wire.PulsarError, str], errors.TxnBridgeError] = translate,
) -> T:
    """Call `attempt`, which must be harmless to repeat, until it returns, fails for good, or the deadline passes.

    Return its result. `what` describes the action, and `words` translates the client's errors about it. Raise the
    translated error, or `DeadlineExceeded` at the deadline.
    """
    answer: errors.TxnBridgeError | None = None
    while True:
        try:
            return attempt()
        except wire.PulsarError as error:
            refused = words(error, what)
            if answer is not None and type(refused) is errors.DeadlineExceeded:
                raise errors.DeadlineExceeded(f"{refused}; before that: {answer}") from error
            if type(refused) is not errors.BrokerUnavailable:
                raise refused from error
            answer = refused
            if deadline.left() <= _RETRY_PAUSE_SECONDS:
                raise errors.DeadlineExceeded(f"{refused}; repeated for {deadline.seconds:g} s") from error
        time.sleep(_RETRY_PAUSE_SECONDS)
