"""The reader without a group, and `open_reader`, which opens the kind of reader that a subscription needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from txnbridge.errors import InvalidState
from txnbridge.spi import Deadline, Emitter, MessageColumns, Partition, Position, Reader, ReaderListener, Subscription
from txnbridge_embedded.client.readable_ranges import Bounds, count_between, first_since, read_bounds
from txnbridge_embedded.client.store import Store
from txnbridge_embedded.read.base_reader import PollingReader
from txnbridge_embedded.read.ordered import OrderedReader
from txnbridge_embedded.read.partition import Cursor
from txnbridge_embedded.read.shared import SharedReader
from txnbridge_embedded.settings import Settings


def open_reader(
    store: Store,
    settings: Settings,
    subscription: Subscription,
    listener: ReaderListener,
    events: Emitter,
    deadline: Deadline,
) -> Reader:
    """Return a new reader of committed messages. Raise `NotFound` if a topic is missing and may not be created."""
    kinds: dict[str, type[PollingReader]] = {"partition": OrderedReader, "message": SharedReader}
    kind: type[PollingReader] = UngroupedReader if subscription.group is None else kinds[subscription.sharing]
    return kind(store, settings, subscription, listener, events, deadline)


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
        # If a topic was deleted and created again, its partitions have other ids.
        self._lose([p for p, cursor in self._cursors.items() if p not in bounds or bounds[p].id != cursor.id])
        # Partitions that were added after the reader's start are read from their beginning.
        self._add(Cursor(bounds[p], 0, self._owner()) for p in bounds if p not in self._cursors)
        for partition, cursor in self._cursors.items():
            cursor.bounds = bounds[partition]
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
        found: list[MessageColumns] = []

        def read() -> bool:
            found.extend(self._take(max_messages, Cursor.to_columns))
            return bool(found)

        self._wait_until(read, deadline)
        return found

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
