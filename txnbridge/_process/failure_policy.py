"""Classifies errors of a processor: a bad (poison) message, a batch to try again, or an error that ends the processor.

A pass is one poll and the processing of its messages (see `_process.processor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from txnbridge import errors
from txnbridge._base.messages import Message
from txnbridge._base.token import State
from txnbridge._process.handler import causes
from txnbridge._process.pass_transaction import PassTransaction

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying


# Errors that end the processor's loop, also if the handler raised them.
_FINAL = (errors.Fenced, errors.EvidenceLost, errors.PositionLost)
# Refused calls of the handler for which a setting is to blame, and no message.
_SETTING = (errors.BackendMissing, errors.InvalidState, errors.InvalidToken, errors.NotFound)
# Errors outside the handler after which the pass is retried; any other error there is a bug or a wrong setting.
_PASSING = (errors.TransactionAborted, errors.BrokerUnavailable, errors.OutcomeUnknown)

ExceptionClasses = type[Exception] | Sequence[type[Exception]]


class HandlerTooSlow(errors.TransactionTimedOut):
    """A call of the handler lasted longer than the transaction's timeout."""


class FailurePolicy:
    """Distinguishes poison from errors of the handler and the broker, and counts each message's failed attempts.

    `Processor` explains the settings.
    """

    def __init__(self, poison: ExceptionClasses, fatal: ExceptionClasses, max_attempts: int | None) -> None:
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise errors.InvalidOption("max_attempts must be a whole number from 1, or None to try forever")
        self._poison = _poison_classes(poison)
        self._fatal = _exception_classes("fatal", fatal)
        self._max_attempts = max_attempts
        self._attempts: dict[tuple[Any, ...], int] = {}  # failed attempts of messages that are not acknowledged
        self.of_handler: BaseException | None = None  # the last error of the handler or a codec since a success
        self.ends_loop: BaseException | None = None  # an error of the handler after which the loop must end

    def forget_attempts(self, messages: Iterable[Message]) -> None:
        """Drop the counts of failed attempts of these messages, which are acknowledged."""
        if self._attempts:
            for message in messages:
                self._attempts.pop(message[:3], None)

    def is_temporary(self, error: BaseException) -> bool:
        """Return whether the processor polls and processes once more after this error."""
        if isinstance(error, _FINAL) or error is self.ends_loop:
            return False
        return error is self.of_handler or isinstance(error, _PASSING)

    def raise_unless_set_aside(self, error: Exception, txn: PassTransaction, tried: Sequence[Message]) -> None:
        """Return if a message is to be set aside for the handler's error: it is poison, or no attempt is left.

        Otherwise raise the error again. `tried` are the messages that the handler was called with. Call this in an
        `except` clause.
        """
        require_not_ended(txn)
        if isinstance(error, self._fatal):
            self.ends_loop = error
        elif not _is_from_broker(error, txn):
            if self.is_poison(error):
                return
            # For a missing topic the message holds its place, and is not set aside.
            refused = txn._cause if refuses_message(txn._cause) else error
            if not isinstance(refused, (errors.Abort, *_SETTING)) and self._is_last_attempt(tried):
                return
        self.of_handler = error
        raise error

    def may_pass(self, error: Exception, txn: PassTransaction) -> bool:
        """Return whether the handler failed because of a message, but may succeed with this message later."""
        if isinstance(error, (errors.Abort, *self._fatal)) or isinstance(txn._cause, errors.InvalidState):
            return False
        return not self.is_poison(error) and not _is_from_broker(error, txn)

    def _is_last_attempt(self, tried: Sequence[Message]) -> bool:
        """Count a failed attempt of each message in `tried`; return whether one has reached `max_attempts`."""
        if self._max_attempts is None:
            return False
        for message in tried:
            self._attempts[message[:3]] = self._attempts.get(message[:3], 0) + 1
        return any(self._attempts[message[:3]] >= self._max_attempts for message in tried)

    def is_poison(self, error: Exception) -> bool:
        """Return whether the handler's error makes a message poison at once."""
        # A refused call (message too large, missing topic) may come from a wrong setting, with which every input
        # message would become a dead letter: so a `UsageError` makes a message poison only if its class is in `poison`.
        if isinstance(error, ExceptionGroup):
            return all(map(self.is_poison, error.exceptions))
        if isinstance(error, errors.UsageError):
            return isinstance(error, tuple(c for c in self._poison if issubclass(c, errors.UsageError)))
        return isinstance(error, (errors.Poison, *self._poison))

    def retrying(
        self,
        backoff: tuple[float, float],
        retry_for: float | None,
        sleep: Callable[[float], None],
        before_sleep: Callable[[BaseException, float], None],
    ) -> Retrying:
        """Return a callable that runs a function (a poll and its processing), and retries it by these settings.

        Before each wait it calls `before_sleep` with the error and the seconds until the next attempt.
        """
        # Only this retry is tenacity's: its import takes longer than that of all of txnbridge, so that it is not at the
        # top, and the retries of single requests are loops of few lines, which end by the call's deadline.
        import tenacity

        first, longest = backoff
        growing = tenacity.wait_random_exponential(multiplier=first, max=longest)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self.is_temporary),
            wait=lambda state: 0.0 if _is_plain_abort(state) else growing(state),
            stop=tenacity.stop_never if retry_for is None else tenacity.stop_after_delay(retry_for),
            sleep=sleep,
            before_sleep=lambda state: before_sleep(_error_of(state), state.upcoming_sleep),
            reraise=True,
        )


def refuses_message(error: BaseException | None) -> bool:
    """Return whether the broker refuses one message, say for its size, so that a retry would fail in the same way."""
    return isinstance(error, errors.DeliveryFailed) and error.permanent


def require_not_ended(txn: PassTransaction) -> None:
    """Raise `InvalidState` if the handler has itself ended the transaction, or tried to: a retry would do so again."""
    if isinstance(txn._cause, errors.InvalidState):
        raise txn._cause


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


def _is_plain_abort(state: RetryCallState) -> bool:
    """Return whether an attempt was the first, and was aborted without a conflict: it is retried without a wait.

    After a `Conflict` another process may still be working on the same messages, so the retry waits.
    """
    error = _error_of(state)
    return (
        state.attempt_number == 1
        and isinstance(error, errors.TransactionAborted)
        and not isinstance(error, errors.Conflict)
    )


def _is_from_broker(error: Exception, txn: PassTransaction) -> bool:
    """Return whether the broker, not the message, caused an error of the handler, even if the handler wrapped it."""
    if isinstance(error, HandlerTooSlow) or refuses_message(error) or refuses_message(txn._cause):
        return False
    failed = txn.state is not State.OPEN and not isinstance(txn._cause, errors.UsageError)
    return failed or any(
        isinstance(e, errors.TxnBridgeError) and not isinstance(e, errors.UsageError) for e in causes(error)
    )


def _exception_classes(setting: str, given: ExceptionClasses) -> tuple[type[Exception], ...]:
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in classes):
        raise errors.InvalidOption(f"{setting}= takes exception classes")
    return classes


def _poison_classes(given: ExceptionClasses) -> tuple[type[Exception], ...]:
    classes = _exception_classes("poison", given)
    for kind in classes:
        if issubclass(kind, errors.TxnBridgeError) and not issubclass(kind, errors.UsageError):
            text = f"{kind.__name__} is a broker's error, which is never the message's fault: not poison"
            raise errors.InvalidOption(text)
    return classes
