"""Translation of the protocol client's errors to those of `txnbridge.errors`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    Fenced,
    InvalidOption,
    InvalidState,
    NotFound,
    NotSupported,
    StorageFailed,
    TxnBridgeError,
)
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


def translate(error: wire.PulsarError, what: str) -> TxnBridgeError:
    """Return txnbridge's error for a client error, from which the caller raises it; `what` names the action.

    Use this only for reads, and for requests that decide nothing about a transaction.
    """
    text = f"{what}: {error}"
    if isinstance(error, wire.NotAuthenticated | wire.NotAuthorized):
        return AccessDenied(text + _REMEDIES.get(type(error), ""))
    if isinstance(error, wire.TopicNotFound) or _NO_PARTITION in text:
        return NotFound(text)
    if isinstance(error, wire.ProducerFenced):
        return Fenced(text)
    if isinstance(error, wire.NotAllowed | wire.TopicTerminated):
        return NotSupported(text)
    if isinstance(error, wire.MessageTooLarge | wire.MissingLibrary):
        return InvalidOption(text)
    if isinstance(error, wire.CorruptEntry):
        return StorageFailed(text)
    if isinstance(error, wire.RequestTimedOut):
        return DeadlineExceeded(text)
    if isinstance(error, wire.Closed):
        return InvalidState(text)
    if isinstance(error, wire.ServerError):
        return _refusal(error, text)
    return BrokerUnavailable(text)


def _refusal(error: wire.ServerError, text: str) -> TxnBridgeError:
    if error.code == wire.ServerErrorCode.INVALID_TOPIC_NAME:
        return InvalidOption(text)
    if error.code == wire.ServerErrorCode.INCOMPATIBLE_SCHEMA:
        return NotSupported(f"{text}; messages of a bridge have no schema: switch isSchemaValidationEnforced off there")
    if error.code == wire.ServerErrorCode.PERSISTENCE or error.code in _QUOTA:
        return StorageFailed(text)
    return BrokerUnavailable(text)


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
        raise AccessDenied(
            f"{scope}: {error}; an administrator grants it to this user's role:"
            f"\n  pulsar-admin {kind} grant-permission --role ROLE --actions {actions} {scope}"
        ) from error


def retry_translated(
    attempt: Callable[[], T],
    what: str,
    deadline: Deadline,
    words: Callable[[wire.PulsarError, str], TxnBridgeError] = translate,
) -> T:
    """Call `attempt`, which must be harmless to repeat, until it returns, fails for good, or the deadline passes.

    Return its result. `what` describes the action, and `words` translates the client's errors about it. Raise the
    translated error, or `DeadlineExceeded` at the deadline.
    """
    answer: TxnBridgeError | None = None
    while True:
        try:
            return attempt()
        except wire.PulsarError as error:
            refused = words(error, what)
            if answer is not None and type(refused) is DeadlineExceeded:
                raise DeadlineExceeded(f"{refused}; before that: {answer}") from error
            if type(refused) is not BrokerUnavailable:
                raise refused from error
            answer = refused
            if deadline.left() <= _RETRY_PAUSE_SECONDS:
                raise DeadlineExceeded(f"{refused}; repeated for {deadline.seconds:g} s") from error
        time.sleep(_RETRY_PAUSE_SECONDS)
