"""The errors, as a short tree.

The class alone says what to do next: `UsageError` (the call is wrong), `TransactionAborted` (run it again), `Fenced`
(someone took over: stop), `OutcomeUnknown` (ask later, with the token), `BrokerUnavailable` (the broker did not answer
or could not store). The broker's own error is in `__cause__`. Every error survives pickling, its cause as text.
Bodies, keys and secrets never appear in a message.
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
    """Replaces a broker's own error in a pickle: its class and message as text."""


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: Mapping[str, Any], cause: str | None) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = _CauseText(cause)
    return error


class _Picklable(Exception):
    """Pickles by class, arguments and attributes; the cause travels as text because clients' errors rarely pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        text = None if cause is None else f"{type(cause).__name__}: {cause}"
        return _rebuild, (type(self), self.args, dict(self.__dict__), text)


class TxnBridgeError(_Picklable):
    """The root of every error that txnbridge raises by itself.

    `token` is the transaction's token as text, if there is one: by it any process can find the outcome later.
    """

    def __init__(self, message: str = "", *, token: str | None = None) -> None:
        super().__init__(message)
        self.token = token


# --- the call is wrong -------------------------------------------------------------------------------------------


class UsageError(TxnBridgeError):
    """The call itself is wrong; repeating it will not help."""


class InvalidState(UsageError):
    """The object is not in the state that the call needs; the message names both."""


class InvalidOption(UsageError):
    """An option, URL or argument that is unknown or out of range; the message names it and the nearest right one."""


class InvalidToken(UsageError):
    """The text is not a token, or it belongs to another cluster."""


class NotFound(UsageError):
    """A topic, group or transaction that does not exist."""


class NotSupported(UsageError):
    """A promise that this broker does not keep, refused instead of weakened; the message says why."""


class BackendMissing(UsageError):
    """No backend for this URL, or its client library is not installed; the message says what to install."""


# --- run it again ------------------------------------------------------------------------------------------------


class TransactionAborted(TxnBridgeError):
    """The transaction certainly did not happen; it may be run again."""


class TransactionTimedOut(TransactionAborted):
    """The transaction was aborted because its deadline passed."""


class Conflict(TransactionAborted):
    """Another transaction acknowledged the same messages, or they were delivered under an assignment that has ended."""


class DeliveryFailed(TransactionAborted):
    """A message could not be stored, so the whole transaction was aborted."""


# --- someone took over -------------------------------------------------------------------------------------------


class Fenced(TxnBridgeError):
    """A newer owner of the same transactional id exists; this one must stop.

    `newer` names the newer owner's host and process, if the broker tells them.
    """

    def __init__(self, message: str = "", *, token: str | None = None, newer: str | None = None) -> None:
        super().__init__(message, token=token)
        self.newer = newer


# --- ask later ---------------------------------------------------------------------------------------------------


class OutcomeUnknown(TxnBridgeError):
    """The broker was asked to commit or abort and did not answer; with `token` a program asks later."""

    permanent = False


class EvidenceLost(OutcomeUnknown):
    """The evidence of the outcome is gone; asking later will not help."""

    permanent = True


# --- the broker --------------------------------------------------------------------------------------------------


class BrokerUnavailable(TxnBridgeError):
    """The broker could not be reached or could not do what it was asked; this call decided nothing."""


class DeadlineExceeded(BrokerUnavailable):
    """The call's deadline passed first; this call decided nothing."""


class StorageFailed(BrokerUnavailable):
    """The broker's storage refused: disk full, read-only or damaged."""


class PositionLost(TxnBridgeError):
    """The position to read from is no longer there (retention, a topic made anew); nothing was skipped silently."""


class AccessDenied(TxnBridgeError):
    """The broker or the operating system refuses the right to do this."""


# --- signals: raised by the application, not by txnbridge ----------------------------------------------------------


class Abort(Exception):
    """Raise it inside a transaction block to abort and leave the block quietly."""


class Poison(_Picklable):
    """This message can never be processed: raised by handlers, and for a value that its codec cannot decode.

    `message` is the message itself (undecoded if decoding failed), so that it can be acknowledged and set aside.
    """

    def __init__(self, reason: str = "", *, message: Any = None) -> None:
        super().__init__(reason)
        self.message = message
