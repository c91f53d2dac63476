"""`Response`: the answer to a request, for which the caller waits after sending the request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from txnbridge_pulsar.client.errors import PulsarError, RequestTimedOut
from txnbridge_pulsar.client.format.codec import COMMANDS, Fields


def answer_to(name: str) -> str:
    if name == "producer":
        return "producer_success"
    answer = f"{name.removesuffix('_request')}_response"
    return answer if answer in COMMANDS else "success"


class Response:
    """A request's answer, which may still be under way. The caller does other work until it calls `result`."""

    def __init__(self, forget: Callable[[], None], what: str, kind: str) -> None:
        self.kind = kind  # the command that answers, unless it is an error
        self._future: Future[Fields] = Future()
        self._forget = forget
        self._what = what

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float) -> Fields:
        """Wait for the answer, and return its fields. Raise `ServerError` if the broker refused the request,
        `BrokerConnectionLost`, or `RequestTimedOut`.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout:
            self._forget()
            raise RequestTimedOut(f"no answer to {self._what} in {timeout:g} s") from None

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` when the answer has arrived: on the reading thread, so `call` may not block."""
        self._future.add_done_callback(lambda _: call())

    def resolve(self, outcome: Fields | PulsarError) -> None:
        """Set the answer's fields, or the error, for which the caller waits. Only the first call has an effect."""
        with suppress(InvalidStateError):
            if isinstance(outcome, PulsarError):
                self._future.set_exception(outcome)
            else:
                self._future.set_result(outcome)
