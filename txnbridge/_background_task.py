"""What takes longer than whoever needs it can wait: a backend's reader has it done beside its polls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """A function on a thread of its own, and what is done with its result on the thread that asks for it."""

    def __init__(
        self, function: Callable[[], T], then: Callable[[T], object], wake: Callable[[], object] = lambda: None
    ) -> None:
        """`wake` is called on the function's thread when it has ended."""
        self._function = function
        self._then = then
        self._wake = wake
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        # A daemon: a call that a dead broker does not answer must not keep the program from ending.
        threading.Thread(target=self._run, name="txnbridge-work", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        self._ended.set()
        self._wake()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def finish(self) -> None:
        """Once it is done: do what is to be done with the result, or raise what the function raised."""
        if self._error is not None:
            raise self._error
        self._then(self._result[0])

    def join(self, seconds: float) -> bool:
        """Wait for its end; whether it has come."""
        return self._ended.wait(seconds)
