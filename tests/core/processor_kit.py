"""Helpers of the tests of processors on the embedded broker."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

from txnbridge import Bridge, Processor, Topic

# Short, so that the partitions of a killed member are free again soon.
LEASE_SECONDS = 0.3
# Kinds of events at which a walk has to kill a processor.
WITHIN_A_TRANSACTION = {"reader.poll/after", "message.send/after", "ack/after", "commit/before", "commit/after"}


def url_of(folder: Path, lease_seconds: float = LEASE_SECONDS) -> str:
    return f"embedded:{folder}/broker.db?lease_seconds={lease_seconds}"


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def send(bridge: Bridge, topic: str | Topic, *values: Any, **options: Any) -> None:
    """Send these values in one transaction."""
    with bridge.transaction() as txn:
        for value in values:
            txn.send(topic, value, **options)


def values(bridge: Bridge, topic: str) -> list[Any]:
    return [message.value for message in bridge.read(topic, limit=100_000)]


def thread_of(processor: Processor) -> Thread:
    """Return the thread in which a processor runs."""
    thread = processor._thread
    assert thread is not None
    return thread


class Fresh:
    """Makes new brokers that hold some input, from any thread."""

    def __init__(self, folder: Path, feed: Callable[[str], object]) -> None:
        self.folder = folder
        self.feed = feed
        self._numbers = count(1)

    def __call__(self) -> str:
        url = f"embedded:{self.folder}/{next(self._numbers)}.db?lease_seconds={LEASE_SECONDS}"
        self.feed(url)
        return url
