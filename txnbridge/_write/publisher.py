"""`Publisher`: sends messages without a transaction."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from txnbridge import spi
from txnbridge._base.connection import Connection, ConnectionUser
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import check_place
from txnbridge._base.topic import Topic, as_topic, encode_message
from txnbridge.capabilities import Capability
from txnbridge.errors import InvalidOption, InvalidState

_OTHERS = "other threads used this publisher"  # for error texts: the wait for their calls counts


class Publisher(ConnectionUser):
    """Sends messages in order and idempotently; readers see each as soon as it is stored. `flush` raises failures.

    With a name, and a sequence for each message, a program can resume after a crash: the broker keeps the highest
    sequence of each topic, and skips messages up to `last_sequence(topic)` that are sent again, so that each is stored
    exactly once. New messages need increasing sequences above `last_sequence(topic)`.
    """

    def __init__(self, connection: Connection, publisher: spi.Publisher, name: str | None) -> None:
        self._connection = connection
        self._publisher = publisher
        self._name = name
        self._lock = threading.Lock()  # keeps messages of several threads in the order of their sequences
        self._closed = False
        self._marks: dict[str, int] = {}  # by topic: the highest sequence that was stored before the first send
        self._last: dict[str, int] = {}  # by topic: the last sequence sent here, if above that of `_marks`

    def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
        sequence: int | None = None,
    ) -> None:
        """Send one message. Wait for buffer space if necessary, at most for the bridge's timeout.

        Raise `InvalidOption` for a sequence that is not above the last one sent by this publisher, because the broker
        would drop the message silently.
        """
        timestamp = check_place(partition, timestamp)
        if sequence is not None and (not isinstance(sequence, int) or isinstance(sequence, bool)):
            raise InvalidOption(f"a sequence is a whole number, not {type(sequence).__name__}")
        if sequence is not None and not 0 <= sequence < 1 << 63:
            raise InvalidOption("a sequence is a whole number from 0, below 2**63")
        name, data, key_data, pairs = encode_message(topic, value, key, headers, self._connection.header_makers)
        size = len(data) if data is not None else None
        deadline = self._deadline()
        with deadline.holding(self._lock, _OTHERS):
            self._check()
            if sequence is not None:
                self._check_sequence(name, sequence, deadline)
            with self._connection.events.step("message.send", None, topic=name, bytes=size, sequence=sequence):
                self._publisher.send(name, data, key_data, pairs or None, partition, timestamp, sequence, deadline)
            if sequence is not None and sequence > self._marks[name]:
                self._last[name] = sequence

    def _check_sequence(self, topic: str, sequence: int, deadline: Deadline) -> None:
        self._check_named()
        last = self._last.get(topic)
        if last is not None and sequence <= last:
            raise InvalidOption(
                f"sequence {sequence} for {topic} comes after {last}: in one session they only go up, and what is not"
                " above the last one would never be stored"
            )
        if topic not in self._marks:
            stored = self._publisher.last_sequence(topic, deadline)
            self._marks[topic] = -1 if stored is None else stored

    def _check_named(self) -> None:
        if self._name is None:
            self._connection.capabilities.require(Capability.RESUME_SEQUENCE)
            raise InvalidOption("a sequence belongs to a publisher with a name: bridge.publisher(name)")

    def flush(self) -> None:
        """Wait until all messages sent so far are stored.

        Raise `DeliveryFailed` if one could not be stored, `DeadlineExceeded` after the bridge's timeout.
        """
        deadline = self._deadline()
        with deadline.holding(self._lock, _OTHERS):
            self._check()
            with self._connection.events.step("flush"):
                self._publisher.flush(deadline)

    def last_sequence(self, topic: str | Topic) -> int | None:
        """Return the highest sequence stored under this publisher's name in a topic; None if there is none."""
        deadline = self._deadline()
        with deadline.holding(self._lock, _OTHERS):
            self._check()
            self._check_named()
            return self._publisher.last_sequence(as_topic(topic).name, deadline)

    def close(self) -> None:
        """Wait until all messages are stored, and close the publisher."""
        if self._connection.forked:
            return
        deadline = self._connection.deadline()
        with deadline.holding(self._lock, _OTHERS):
            if not self._closed:
                self._closed = True
                self._publisher.close(deadline)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _deadline(self) -> Deadline:
        self._connection.check_open()  # before the lock, which a thread that is not in a forked child may hold
        return self._connection.deadline()

    def _check(self) -> None:
        self._connection.check_open()
        if self._closed:
            raise InvalidState("this publisher is closed")
