"""Calls that have to end by their deadlines, also while a broker says nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from txnbridge_conformance import brokers

from txnbridge.spi import Deadline

# A call may end a little after its deadline: clients look at their clocks a few times a second, on a busy machine.
GRACE = 5.0


def takes(seconds: float, error: type[Exception], call: Callable[[Deadline], object]) -> Exception:
    """It raises that error, and not much later than its deadline."""
    started = time.monotonic()
    with pytest.raises(error) as raised:
        call(Deadline(seconds))
    assert time.monotonic() - started < seconds + GRACE
    return raised.value


@contextmanager
def paused(broker: brokers.Broker) -> Iterator[None]:
    """Inside, the broker hears and says nothing."""
    broker.pause()
    try:
        yield
    finally:
        broker.resume()
