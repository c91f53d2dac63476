"""The reader without a group, and `open_reader`, which opens the kind of reader that a subscription needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from txnbridge.errors import InvalidState
from txnbridge.spi import Deadline, MessageColumns, Partition, Position, Reader, ReaderListener, Subscription
from txnbridge_embedded.client.readable_ranges import Bounds, count_between, first_since, read_bounds
from txnbridge_embedded.client.store import Store
from txnbridge_embedded.read.base_reader import PollingReader
from txnbridge_embedded.read.ordered import OrderedReader
from txnbridge_embedded.read.partition import Cursor
from txnbridge_embedded.read.shared import SharedReader


def open_reader(store: Store, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
    """Return a new reader of committed messages. Raise `NotFound` if a topic is missing and may not be created."""
    kinds: dict[str, type[PollingReader]] = {"partition": OrderedReader, "message": SharedReader}
    kind: type[PollingReader] = UngroupedReader if subscription.group is None else kinds[subscription.sharing]
    return kind(store, subscription, listener, deadline)


class UngroupedReader(PollingReader):
    def _open(self, deadline: Deadline) -> None:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics)
        self._add(Cursor(found, self._first_offset(found, deadline), self._owner()) for found in bounds.values())

    def _first_offset(self, bounds: Bounds, deadline: Deadline) -> int:
        match self._subscription.start:
            case "earliest":
                return bounds.kept
            case "latest":
                return bounds.end
            case timestamp:
                return first_since(self._store, self._connection, bounds, int(timestamp), deadline)

    def _observe(self, deadline: Deadline) -> Mapping[Partition, Bounds]:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics)
        self._follow(bounds)
        return bounds

    def _owner(self) -> str:
        return "this reader's position"

    def _seek(self, offsets: Mapping[Cursor, int], deadline: Deadline) -> None:
        with self._reading(deadline):
            for cursor, offset in offsets.items():
                self._check_kept(cursor, offset)
        for cursor, offset in offsets.items():
            cursor.replay(offset)

    def poll_columns(self, max_messages: int, deadline: Deadline) -> list[MessageColumns]:
        return self._wait_for(lambda: self._take(max_messages, Cursor.to_columns), deadline)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self._refresh_state(deadline)
        for cursor in self._cursors.values():
            cursor.replay(first_since(self._store, self._connection, cursor.bounds, timestamp, deadline))

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        raise InvalidState("a reader without a group cannot give messages back; use seek")

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics)
            return {
                partition: count_between(connection, bounds[partition], cursor.position, ())
                for partition, cursor in self._cursors.items()
                if partition in bounds
            }

    def ack_context(self) -> object:
        return None

    def _leave(self, deadline: Deadline) -> None:
        pass  # a reader without a group has no rows in the file
