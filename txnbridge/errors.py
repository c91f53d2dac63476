"""The errors of txnbridge. Their classes form a tree.

The class says what a program should do: `UsageError` (the call is wrong), `TransactionAborted` (run the transaction
again), `Fenced` (a newer owner took over: stop), `OutcomeUnknown` (ask later, with the token), `BrokerUnavailable` (the
broker did not answer or could not store). The client library's error is in `__cause__`. Every error can be pickled, its
cause as text. Error texts never contain bodies, keys and secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "Abort",
    "AccessDenied",
    "BackendMissing",
    "BrokerUnavailable",
    "Conflict",
    "DeadlineExceeded",
    "DeliveryFailed",
    "EvidenceLost",
    "Fenced",
    "InvalidOption",
    "InvalidState",
    "InvalidToken",
    "NotFound",
    "NotSupported",
    "OutcomeUnknown",
    "Poison",
    "PositionLost",
    "StorageFailed",
    "TransactionAborted",
    "TransactionTimedOut",
    "TxnBridgeError",
    "UsageError",
]


class _CauseText(Exception):
    """Replaces a client library's error in a pickle; contains its class and message as text."""


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: Mapping[str, Any], cause: str | None) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = _CauseText(cause)
    return error


class _Picklable(Exception):
    """An exception that can be pickled; its cause is pickled as text, because client libraries' errors often cannot."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        text = None if cause is None else f"{type(cause).__name__}: {cause}"
        return _rebuild, (type(self), self.args, dict(self.__dict__), text)


class TxnBridgeError(_Picklable):
    """The root of every error that txnbridge raises by itself.

    `token` is the transaction's token as text, if it has one: with it any process can find the outcome later.
    """

    def __init__(self, message: str = "", *, token: str | None = None) -> None:
        super().__init__(message)
        self.token = token


# --- the call is wrong -------------------------------------------------------------------------------------------


class UsageError(TxnBridgeError):
    """The call itself is wrong; repeating the call will not help."""


class InvalidState(UsageError):
    """The object is not in the state that the call needs; the error's text names both states."""


class InvalidOption(UsageError):
    """An option, URL or argument is unknown or out of range; the error's text names it and the nearest valid one."""


class InvalidToken(UsageError):
    """The text is not a token, or the token belongs to another cluster."""


class NotFound(UsageError):
    """A topic, group or transaction does not exist."""


class NotSupported(UsageError):
    """The call needs a capability that this broker does not support; the error's text says why."""


class BackendMissing(UsageError):
    """The URL's backend or its client library is not installed; the error's text says what to install."""


# --- run it again ------------------------------------------------------------------------------------------------


class TransactionAborted(TxnBridgeError):
    """The transaction was certainly aborted; the program may run it again."""


class TransactionTimedOut(TransactionAborted):
    """The transaction was aborted because its deadline passed."""


class Conflict(TransactionAborted):
    """Another transaction acknowledged the same messages, or the assignment under which they were read has ended."""


class DeliveryFailed(TransactionAborted):
    """A message could not be stored, so the whole transaction was aborted.

    If `permanent` is true, the broker refuses a message for itself, say, for its size: it would be refused again.
    """

    permanent = False


# --- someone took over -------------------------------------------------------------------------------------------


class Fenced(TxnBridgeError):
    """A newer owner of the same transactional id exists; this owner must stop.

    `newer` is the newer owner's host and process, if the broker reports them.
    """

    def __init__(self, message: str = "", *, token: str | None = None, newer: str | None = None) -> None:
        super().__init__(message, token=token)
        self.newer = newer


# --- ask later ---------------------------------------------------------------------------------------------------


class OutcomeUnknown(TxnBridgeError):
    """The broker did not answer a request to commit or abort; with `token` a program can ask for the outcome later."""

    permanent = False


class EvidenceLost(OutcomeUnknown):
    """The records that prove the outcome are gone, so it can never be known; asking later will not help."""

    permanent = True


# --- the broker --------------------------------------------------------------------------------------------------


class BrokerUnavailable(TxnBridgeError):
    """The broker could not be reached or could not carry out the request; the call changed no outcome."""


class DeadlineExceeded(BrokerUnavailable, TimeoutError):
    """The call's deadline passed before the broker answered; the call changed no outcome."""


class StorageFailed(BrokerUnavailable):
    """The broker's storage failed: its disk is full, read-only or damaged."""


class PositionLost(TxnBridgeError):
    """The next position to read was deleted (by retention or with its topic); raised instead of skipping messages."""


class AccessDenied(TxnBridgeError, PermissionError):
    """The broker or the operating system denies the permission for this call."""


# --- signals: raised by the application, not by txnbridge ----------------------------------------------------------


class Abort(Exception):
    """A program raises it inside a transaction's block to abort the transaction; the block does not raise it again."""


class Poison(_Picklable):
    """A message can never be processed: raised by handlers, and for a message that its codec cannot decode.

    `message` is this message (undecoded if decoding failed): the program can acknowledge it and store it elsewhere.
    """

    def __init__(self, reason: str = "", *, message: Any = None) -> None:
        super().__init__(reason)
        self.message = message
