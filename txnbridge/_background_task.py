"""A background task: a backend's reader runs slow requests beside its polls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Runs a function on a thread of its own, and `then` with its result on the thread that asks for it."""

    def __init__(
        self, function: Callable[[], T], then: Callable[[T], object], wake: Callable[[], object] = lambda: None
    ) -> None:
        """`wake` is called on the function's thread when the function has ended."""
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
        """Pass the result on, or raise the function's exception. To be called once it is done."""
        if self._error is not None:
            raise self._error
        self._then(self._result[0])

    def join(self, seconds: float) -> bool:
        """Wait for the function's end; return whether it has come."""
        return self._ended.wait(seconds)
