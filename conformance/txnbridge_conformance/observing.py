"""Helpers of tests that read a topic and prove which messages it has, or does not have.

A test does not wait for a while to show that a message is absent. It commits a marker message to the same partition:
once a reader has read the marker, every earlier message of the partition has been read, too.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable

from txnbridge import Bridge, Consumer, Message

_MARKER = b"marker "


def patience() -> float:
    """Return how many seconds a test waits for an event before it fails: 60, or TXNBRIDGE_PATIENCE.

    A passing test does not wait so long, except on a very loaded machine. The environment variable shortens the time
    for tests that are expected to fail, and for their child processes.
    """
    return float(os.environ.get("TXNBRIDGE_PATIENCE", "60"))


def mark(bridge: Bridge, topic: str) -> set[bytes]:
    """Commit a message as an end mark to each partition of a topic, for a reader to read up to; return their values."""
    partitions = len(bridge.admin.bounds(topic))
    markers = [_MARKER + secrets.token_bytes(8) for _ in range(partitions)]
    with bridge.transaction() as txn:
        for number, marker in enumerate(markers):
            txn.send(topic, marker, partition=number if partitions > 1 else None)
    return set(markers)


def seen(bridge: Bridge, topic: str) -> list[Message]:
    """Return all messages committed to a topic before this call, without the marks that tests send (see `mark`).

    Raise `AssertionError` if a new mark, behind these messages, cannot be read within `patience()`.
    """
    markers = mark(bridge, topic)
    with bridge.consumer(topic) as consumer:
        return up_to(consumer, markers)


def up_to(consumer: Consumer, markers: Iterable[bytes]) -> list[Message]:
    """Poll until all messages with the values `markers`, sent by `mark`, have arrived; return the other messages.

    Raise `AssertionError` if they do not arrive within `patience()`.
    """
    missing = set(markers)
    messages: list[Message] = []
    deadline = time.monotonic() + patience()
    while missing:
        messages += (batch := consumer.poll(timeout=min(1, patience())))
        missing -= {message.value for message in batch}
        if missing and time.monotonic() > deadline:
            raise AssertionError(f"{len(missing)} markers did not reach {consumer!r} within {patience():g} s")
    return [message for message in messages if not is_marker(message)]


def is_marker(message: Message) -> bool:
    """Return whether a message was sent by `mark`, only so that a test's reader knows how far it has read."""
    return isinstance(message.value, bytes) and message.value.startswith(_MARKER)


def take(consumer: Consumer, count: int) -> list[Message]:
    """Poll until exactly `count` messages have arrived, and return them. Raise `AssertionError` after `patience()`."""
    messages: list[Message] = []
    deadline = time.monotonic() + patience()
    while len(messages) < count:
        messages += consumer.poll(count - len(messages), timeout=min(1, patience()))
        if time.monotonic() > deadline:
            raise AssertionError(f"{consumer!r} delivered {len(messages)} of {count} messages within {patience():g} s")
    return messages


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition is true. Raise `AssertionError` after `patience()`."""
    deadline, pause = time.monotonic() + patience(), 0.005
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience():g} s")
        time.sleep(pause := min(2 * pause, 0.05))  # a condition that reads a topic takes some milliseconds


def poll_until(consumer: Consumer, condition: Callable[[list[Message]], object], what: str) -> list[Message]:
    """Poll until a condition is true of all messages that came, and return them. Raise as `eventually` does."""
    messages: list[Message] = []

    def is_true() -> object:
        messages.extend(consumer.poll(timeout=0.05))
        return condition(messages)

    eventually(is_true, what)
    return messages


def values(messages: Iterable[Message]) -> list[object]:
    """Return the messages' values, in order."""
    return [message.value for message in messages]


def send(bridge: Bridge, topic: str, *contents: bytes) -> None:
    """Send messages with these values to a topic in one transaction, and commit it."""
    with bridge.transaction() as txn:
        txn.send_many(topic, contents)


def ack(bridge: Bridge, messages: Message | Iterable[Message]) -> None:
    """Acknowledge messages in a transaction of their own, and commit it."""
    with bridge.transaction() as txn:
        txn.ack(messages)
