"""`BackgroundTask`, with which a backend's reader runs slow requests while its polls continue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class BackgroundTask(Generic[T]):
    """Runs `function` on a thread of its own; `finish` then calls `then` with the result, on the caller's thread."""

    _function: Callable[[], T]
    _then: Callable[[T], object]
    _wake: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        """Start the thread. It calls `wake` when `function` has ended; `then` is called later, by `finish`."""
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        # A daemon thread, so that a request to a dead broker does not keep the program from ending.
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
        """Call `then` with the function's result, or raise its exception. Call this only when `done` is True."""
        if self._error is not None:
            raise self._error
        self._then(self._result[0])

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the function to end; return whether it has ended."""
        return self._ended.wait(seconds)
