"""Decides about the errors of a processor's pass: poison, worth another attempt, or the end of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from txnbridge._handler_errors import causes
from txnbridge._messages import Message
from txnbridge._transaction import Transaction
from txnbridge._transaction_state import State
from txnbridge.errors import (
    Abort,
    BrokerUnavailable,
    Conflict,
    EvidenceLost,
    Fenced,
    InvalidOption,
    InvalidState,
    OutcomeUnknown,
    Poison,
    PositionLost,
    TransactionAborted,
    TxnBridgeError,
    UsageError,
)

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying


# Going on would be wrong, also where the handler raised them.
_FINAL = (Fenced, EvidenceLost, PositionLost)
# Outside the handler these pass by themselves; anything else there is a bug or a wrong setting.
_PASSING = (TransactionAborted, BrokerUnavailable, OutcomeUnknown)
# A codec that asks a registry raises these when it cannot; the message is as good as before.
_NOT_THE_MESSAGES_FAULT = (OSError, MemoryError, TxnBridgeError)

ExceptionClasses = type[Exception] | Sequence[type[Exception]]


class FailurePolicy:
    """Tells poison from errors of the handler and of the broker, and counts the failed attempts of each message.

    See `Processor` for the settings. `has_dead_letters`: poison is set aside, and does not stop the loop.
    """

    def __init__(
        self, poison: ExceptionClasses, fatal: ExceptionClasses, max_attempts: int | None, has_dead_letters: bool
    ) -> None:
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise InvalidOption("max_attempts must be a whole number from 1, or None to try for ever")
        self._poison = _poison_classes(poison)
        self._fatal = _exception_classes("fatal", fatal)
        self._max_attempts = max_attempts
        self._has_dead_letters = has_dead_letters
        self._attempts: dict[tuple[Any, ...], int] = {}  # failed attempts of messages that are not done
        self._of_handler: BaseException | None = None  # the last error of the handler or a codec
        self._ends_loop: BaseException | None = None  # the handler's error after which it may not run again

    def forget_errors(self) -> None:
        """Note that a pass succeeded."""
        self._of_handler = None

    def forget_attempts(self, messages: Iterable[Message]) -> None:
        """Note that these messages are done."""
        if self._attempts:
            for message in messages:
                self._attempts.pop(message[:3], None)

    def is_of_handler(self, error: BaseException) -> bool:
        return error is self._of_handler

    def ends_loop(self, error: BaseException) -> bool:
        return error is self._ends_loop

    def passes_by_itself(self, error: BaseException) -> bool:
        """Return whether the pass is worth another attempt."""
        if isinstance(error, _FINAL) or error is self._ends_loop:
            return False
        return error is self._of_handler or isinstance(error, _PASSING)

    def raise_unless_undecodable(self, poison: Poison) -> None:
        """Raise the codec's own error if it says nothing about the message."""
        cause = poison.__cause__
        if isinstance(cause, _NOT_THE_MESSAGES_FAULT):
            self._of_handler = cause
            raise cause from None

    def raise_unless_poison(self, error: Exception, txn: Transaction, tried: Sequence[Message]) -> None:
        """Raise the handler's error again unless a message is the reason. `tried`: the messages the handler was given.

        To be called in an `except` clause.
        """
        require_not_ended(txn)
        if isinstance(error, self._fatal):
            self._ends_loop = error
        elif not _is_from_broker(error, txn):
            if self._is_poison(error):
                return
            if not isinstance(error, Abort) and self._is_last_attempt(tried):
                if self._has_dead_letters:
                    return
                self._ends_loop = error
        self._of_handler = error
        raise error

    def _is_last_attempt(self, tried: Sequence[Message]) -> bool:
        """Count a failed attempt of each message; return whether a message has had all its attempts."""
        if self._max_attempts is None:
            return False
        for message in tried:
            self._attempts[message[:3]] = self._attempts.get(message[:3], 0) + 1
        return any(self._attempts[message[:3]] >= self._max_attempts for message in tried)

    def _is_poison(self, error: Exception) -> bool:
        # A refused call (too large, no such topic) may as well be a wrong setting, which would empty the input into
        # the dead letters: so a `UsageError` counts only if its class was named as poison.
        if isinstance(error, UsageError):
            return isinstance(error, tuple(c for c in self._poison if issubclass(c, UsageError)))
        return isinstance(error, (Poison, *self._poison))

    def retrying(
        self,
        backoff: tuple[float, float],
        retry_for: float | None,
        sleep: Callable[[float], None],
        before_sleep: Callable[[BaseException, float], None],
    ) -> Retrying:
        """Return what repeats a pass. `before_sleep` gets the error, and the seconds until the next attempt."""
        import tenacity  # here, because it takes longer to import than all of txnbridge

        first, longest = backoff
        growing = tenacity.wait_random_exponential(multiplier=first, max=longest)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self.passes_by_itself),
            wait=lambda state: 0.0 if _is_plain_abort(state) else growing(state),
            stop=tenacity.stop_never if retry_for is None else tenacity.stop_after_delay(retry_for),
            sleep=sleep,
            before_sleep=lambda state: before_sleep(_error_of(state), state.upcoming_sleep),
            reraise=True,
        )


def require_not_ended(txn: Transaction) -> None:
    """Raise the refusal that a handler got for trying to commit: running the handler again would not help."""
    if isinstance(txn._cause, InvalidState):
        raise txn._cause


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


def _is_plain_abort(state: RetryCallState) -> bool:
    """Return whether the first attempt was aborted, and not by another process that may still be at it.

    Such a pass is worth trying again at once.
    """
    error = _error_of(state)
    return state.attempt_number == 1 and isinstance(error, TransactionAborted) and not isinstance(error, Conflict)


def _is_from_broker(error: Exception, txn: Transaction) -> bool:
    """Return whether the broker, and not the message, is the reason of an error, whatever the handler made of it."""
    failed = txn.state is not State.OPEN and not isinstance(txn._cause, UsageError)
    return failed or any(isinstance(e, TxnBridgeError) and not isinstance(e, UsageError) for e in causes(error))


def _exception_classes(setting: str, given: ExceptionClasses) -> tuple[type[Exception], ...]:
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in classes):
        raise InvalidOption(f"{setting}= takes exception classes")
    return classes


def _poison_classes(given: ExceptionClasses) -> tuple[type[Exception], ...]:
    classes = _exception_classes("poison", given)
    for kind in classes:
        if issubclass(kind, TxnBridgeError) and not issubclass(kind, UsageError):
            raise InvalidOption(f"{kind.__name__} is a broker's error, which is never the message's fault: not poison")
    return classes
