"""A semaphore and a lock that are freed even if a signal handler's exception keeps their taker from freeing them.

Such an exception may come right behind the call that has acquired a `threading.Lock`, before its caller knows of it.
Then no thread releases the lock. A slot is an object, and frees itself when nothing refers to it any more.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue


class Slot:
    """A slot of the semaphore `Slots`, to keep until the end of a `with` block, or until `free`."""

    __slots__ = ("_free",)

    def __init__(self, free: weakref.ref[SimpleQueue[Slot]]) -> None:
        self._free = free

    def free(self) -> None:
        if (free := self._free()) is not None:
            free.put(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.free()

    def __del__(self) -> None:
        if (free := self._free()) is not None:
            free.put(Slot(self._free))


class Slots:
    """A semaphore of `count` slots. A slot frees itself when nothing refers to it any more."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(count):
            self._free.put(Slot(weakref.ref(self._free)))

    @property
    def left(self) -> int:
        """The number of free slots."""
        return self._free.qsize()

    def take(self, timeout: float | None) -> Slot | None:
        """Return a slot; None if none became free within `timeout` seconds. With `timeout=None` wait without an end."""
        with suppress(Empty):
            return self._free.get_nowait()
        with suppress(Empty):
            # Without the failed call before, CPython waits for ever if the time passes between two steps of this one.
            return self._free.get(timeout=None if timeout is None else max(0.0, timeout))
        return None
