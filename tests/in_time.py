"""Calls that have to end by their deadlines, also while a broker says nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from txnbridge_conformance import brokers

from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Deadline

# How late a call may end. It is much, because a machine may be busy; what hangs lasts longer still.
GRACE = 30.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Check that the block does not hang beyond its deadline."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + GRACE


def wait_until(condition: Callable[[], object], seconds: float = 2 * GRACE) -> None:
    """Wait for what comes at once where the machine is not busy."""
    until, pause = time.monotonic() + seconds, 0.0005
    while not condition():
        assert time.monotonic() < until
        time.sleep(pause := min(2 * pause, 0.02))  # some conditions read topics and databases


def takes(seconds: float, error: type[Exception], call: Callable[[Deadline], object]) -> Exception:
    """Check that the call raises that error, and does not hang beyond its deadline."""
    with within(seconds), pytest.raises(error) as raised:
        call(Deadline(seconds))
    return raised.value


@contextmanager
def paused(broker: brokers.Broker) -> Iterator[None]:
    """Inside, the broker hears and says nothing."""
    broker.pause()
    try:
        yield
    finally:
        broker.resume()


class Hold:
    """A request, to be called, whose answer does not come while a block of the test runs; then it is that of `call`."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call, self.asked, self._goes_on = call, threading.Event(), threading.Event()

    def __call__(self, *given: object, **named: object) -> Any:
        self.asked.set()
        assert self._goes_on.wait(GRACE)
        if self._call is None:
            raise BrokerUnavailable("away")
        return self._call(*given, **named)

    @contextmanager
    def asked_by(self, call: Callable[[], object]) -> Iterator[None]:
        """Let a thread make `call`, which asks and waits for the answer to the end of the block."""
        with ThreadPoolExecutor(1) as pool:
            holder = pool.submit(call)
            try:
                assert self.asked.wait(GRACE)
                yield
                assert not holder.done()
            finally:
                self._goes_on.set()
            if self._call is not None:
                holder.result(GRACE)
