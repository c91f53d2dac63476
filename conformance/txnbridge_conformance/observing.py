"""Looking at topics in a way that proves something.

That a message is *not* there is never shown by waiting for it. A marker is committed behind the place where it would
be; whoever has read the marker has read everything before it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable

from txnbridge import Bridge, Consumer, Message

_MARKER = b"marker "


def patience() -> float:
    """For how many seconds something is waited for that must come.

    As long as a loaded machine may take for what otherwise takes milliseconds: no run that passes waits so long. The
    environment variable is for tests that are to fail, and for the processes that they start.
    """
    return float(os.environ.get("TXNBRIDGE_PATIENCE", "60"))


def mark(bridge: Bridge, topic: str) -> set[bytes]:
    """Commit a marker into each partition of a topic; returns their values."""
    partitions = len(bridge.admin.bounds(topic))
    markers = [_MARKER + secrets.token_bytes(8) for _ in range(partitions)]
    with bridge.transaction() as txn:
        for number, marker in enumerate(markers):
            txn.send(topic, marker, partition=number if partitions > 1 else None)
    return set(markers)


def seen(bridge: Bridge, topic: str) -> list[Message]:
    """Everything that is committed in a topic, without markers; what is not in here was not committed before now.

    Raises `AssertionError` if something holds readers back for longer than `patience()`.
    """
    markers = mark(bridge, topic)
    with bridge.consumer(topic) as consumer:
        return up_to(consumer, markers)


def up_to(consumer: Consumer, markers: Iterable[bytes]) -> list[Message]:
    """Read on until all of these markers have come; returns the messages before them, without markers."""
    missing = set(markers)
    found: list[Message] = []
    deadline = time.monotonic() + patience()
    while missing:
        found += (batch := consumer.poll(timeout=min(1, patience())))
        missing -= {message.value for message in batch}
        if missing and time.monotonic() > deadline:
            raise AssertionError(f"{len(missing)} markers are held back from {consumer!r} for {patience():g} s")
    return [message for message in found if not is_marker(message)]


def is_marker(message: Message) -> bool:
    """Whether this message is a marker, of whoever."""
    return isinstance(message.value, bytes) and message.value.startswith(_MARKER)


def take(consumer: Consumer, count: int) -> list[Message]:
    """Read until this many messages have come, not one more."""
    found: list[Message] = []
    deadline = time.monotonic() + patience()
    while len(found) < count:
        found += consumer.poll(count - len(found), timeout=min(1, patience()))
        if time.monotonic() > deadline:
            raise AssertionError(f"{consumer!r} delivered {len(found)} of {count} messages within {patience():g} s")
    return found


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until something is so, because it is promised to become so."""
    deadline = time.monotonic() + patience()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience():g} s")
        time.sleep(0.01)


def values(messages: Iterable[Message]) -> list[object]:
    """The messages' values, in order."""
    return [message.value for message in messages]


def send(bridge: Bridge, topic: str, *contents: bytes) -> None:
    """Commit messages, in one transaction."""
    with bridge.transaction() as txn:
        txn.send_many(topic, contents)
