"""The base class of all readers: it polls the file for changes, hands out messages, and waits for more."""

from __future__ import annotations

import sqlite3
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from txnbridge import errors
from txnbridge.spi import Deadline, Message, Partition, Position, Reader, ReaderListener, Subscription, as_offset
from txnbridge_embedded.client.change_notification import ChangeNotification
from txnbridge_embedded.client.readable_ranges import Bounds
from txnbridge_embedded.client.store import FileConnection, Store, now_ms, translate
from txnbridge_embedded.outcome.ending import end_expired
from txnbridge_embedded.read.partition import Cursor, Found, Row, position_lost

# The interval at which a reader reads the state of partitions and group. It does so without a commit too, because
# leases and deadlines expire, and while it has messages, because partitions may have been revoked.
_REFRESH_SECONDS = 0.1
# Reading the state takes 0.05 ms, but 5 ms with a thousand partitions. After a commit the pause is at least 4 times as
# long. Without a commit it is at least 50 times as long, up to a second.
_IDLE_COST_FACTOR, _BUSY_COST_FACTOR = 50, 4
# The pause after expired transactions were aborted, while their messages are removed in batches.
_AFTER_ABORT_SECONDS = 0.005
# The most bytes of one poll, so that large messages do not fill the memory.
POLL_BYTES = 32 << 20
# The time limit of calls without a deadline (positions, seek, nack), which read or write a few rows.
SHORT_CALL_SECONDS = 10.0


class PollingReader(Reader):
    """The base class of all readers: polls the file for changes, and hands out messages. One thread at a time."""

    def __init__(self, store: Store, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> None:
        self._store = store
        self._settings = store.settings
        self._subscription = subscription
        self._listener = listener
        self._cursors: dict[Partition, Cursor] = {}
        self._refresh_at = 0.0
        self._not_before = 0.0
        self._has_left = False
        self._connection = store.connect()
        self._changes = ChangeNotification(self._connection, store.path)
        try:
            for topic in subscription.topics:
                self._require_topic(topic, deadline)
            self._open(deadline)
            self._refresh_state(deadline)
        except BaseException:
            self._changes.close()
            self._connection.close()
            raise

    def _require_topic(self, topic: str, deadline: Deadline) -> None:
        """Raise `NotFound` if a topic does not exist.

        A reader in a group creates a missing topic instead, if the bridge creates topics.
        """
        if self._settings.refuse_name is not None:
            self._settings.refuse_name(topic)
        if self._subscription.creates(topic):
            self._store.ensure_topic(self._connection, topic, deadline)
        else:
            with self._reading(deadline) as connection:
                self._store.topic(connection, topic)

    # --- differs between readers -------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, deadline: Deadline) -> None:
        """Join the group, or look up the start offsets. A call that raises an error must have changed nothing."""

    @abstractmethod
    def _observe(self, deadline: Deadline) -> Mapping[Partition, Bounds]:
        """Read the file's state, and add and drop partitions; return the bounds of all partitions of the topics."""

    @abstractmethod
    def _seek(self, offsets: Mapping[Cursor, int], deadline: Deadline) -> None:
        """Move the cursors of partitions to offsets."""

    @abstractmethod
    def _leave(self, deadline: Deadline) -> None:
        """Remove this reader from its group."""

    @abstractmethod
    def _owner(self) -> str:
        """Return words for error texts that say whether a position is this reader's or a group's."""

    # --- reading -----------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        return self._wait_for(lambda: self._read_messages(max_messages, deadline), deadline)

    def _wait_for(self, read: Callable[[], list[Found]], deadline: Deadline) -> list[Found]:
        """Call `read` after each change of the file, until it returns messages, or until the deadline."""
        looked = False
        while True:
            trouble: errors.BrokerUnavailable | None = None
            try:
                if time.monotonic() >= self._refresh_at:
                    looked = True
                    self._refresh_state(deadline)
            except errors.BrokerUnavailable as error:
                trouble = error  # raised after the messages that were read before
            try:
                if found := read():
                    return found
            except errors.BrokerUnavailable as error:
                trouble = error
            if trouble is not None and not isinstance(trouble, errors.DeadlineExceeded):
                raise trouble
            if looked and deadline.expired:
                return []
            self._changes.wait(min(deadline.left(), self._refresh_at - time.monotonic()))
            time.sleep(min(deadline.left(), max(0.0, self._not_before - time.monotonic())))
            self._refresh_at = 0.0

    def _refresh_state(self, deadline: Deadline) -> None:
        """Read the file's state, and abort expired transactions that keep this reader from messages."""
        begun = time.thread_time()
        self._store.require_in_place()
        self._changes.remember_version()
        bounds = self._observe(deadline)
        self._check_topics(topic for topic, _ in bounds)
        held_back = self._is_held_back(bounds.values(), deadline)
        if held_back:
            end_expired(self._store, self._connection, deadline)
        cost, now = time.thread_time() - begun, time.monotonic()
        self._not_before = now + _BUSY_COST_FACTOR * cost
        self._refresh_at = now + (
            _AFTER_ABORT_SECONDS if held_back else max(_REFRESH_SECONDS, min(1.0, _IDLE_COST_FACTOR * cost))
        )

    def _check_topics(self, found: Iterable[str]) -> None:
        for topic in set(self._subscription.topics).difference(found):
            self._store.forget_topic(topic)
            self._store.topic(self._connection, topic)  # raises `NotFound`

    def _is_held_back(self, bounds: Iterable[Bounds], deadline: Deadline) -> bool:
        """Return whether an expired transaction keeps this reader from messages, by the `bounds` of its partitions."""
        with self._reading(deadline) as connection:
            rows = connection.execute(
                "SELECT number FROM transactions WHERE ended_at IS NULL AND (state = 'aborting' OR deadline_at < ?)",
                (now_ms(),),
            ).fetchall()
            overdue = {number for (number,) in rows}
            return bool(overdue) and not overdue.isdisjoint({*self._reserving(), *(b.blocked_by for b in bounds)})

    def _reserving(self) -> Iterable[int]:
        """Return the numbers of the prepared transactions that have acknowledged messages of this reader's group."""
        return ()

    def _read_messages(self, limit: int, deadline: Deadline) -> list[Message]:
        return self._take(limit, Cursor.to_messages)

    def _take(self, limit: int, convert: Callable[[Cursor, list[Row]], list[Found]]) -> list[Found]:
        """Return up to `limit` messages, from one partition after the other; `convert` makes them from rows."""
        into: list[Found] = []
        room = POLL_BYTES
        try:
            with self._connection.in_use():
                for cursor in self._rotated(self._cursors.values()):
                    while limit > 0 and room > 0 and cursor.ready:
                        count, size = cursor.take(self._connection, limit, room, convert, into)
                        limit, room = limit - count, room - size
        except (errors.PositionLost, errors.StorageFailed, sqlite3.Error) as error:
            # Messages that were read before are returned first. The next poll raises the error again.
            if not into:
                if isinstance(error, sqlite3.Error):
                    raise translate(error, f"reading {self._store.path}") from error
                raise
        return into

    def close(self, deadline: Deadline) -> None:
        """Close the reader. Safe to repeat, also after a signal handler's exception in `close` or another call."""
        try:
            if not self._has_left:
                self._leave(deadline)
        except errors.TxnBridgeError:
            self._close_now()
            raise
        self._close_now()

    def _close_now(self) -> None:
        self._has_left = True
        self._cursors.clear()
        self._changes.close()
        self._connection.close()

    # --- assignments -------------------------------------------------------------------------------------------------

    def _add(self, cursors: Iterable[Cursor]) -> None:
        for cursor in cursors:
            cursor.source = self._listener.assigned(cursor.partition)
            self._cursors[cursor.partition] = cursor

    def _follow(self, bounds: Mapping[Partition, Bounds]) -> None:
        """Read all partitions of the topics; those that were added after the reader's start from their beginning."""
        # If a topic was deleted and created again, its partitions have other ids.
        self._lose([p for p, cursor in self._cursors.items() if p not in bounds or bounds[p].id != cursor.id])
        self._add(Cursor(bounds[p], 0, self._owner()) for p in bounds if p not in self._cursors)
        for partition, cursor in self._cursors.items():
            cursor.bounds = bounds[partition]

    def _lose(self, partitions: Sequence[Partition]) -> None:
        if partitions:
            self._forget(partitions)
            self._listener.lost(partitions)

    def _forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._cursors.pop(partition, None)

    # --- positions ---------------------------------------------------------------------------------------------------

    def positions(self) -> dict[Partition, Position]:
        return {partition: (cursor.position,) for partition, cursor in self._cursors.items()}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        offsets = {self._cursor(partition): as_offset(position) for partition, position in positions.items()}
        self._seek(offsets, Deadline(SHORT_CALL_SECONDS))

    def _check_kept(self, cursor: Cursor, offset: int) -> int:
        """Return the partition's first offset that retention kept.

        Raise `PositionLost` for a lower `offset`, and for one beyond the end: later messages up to it would be skipped.
        """
        row = self._connection.execute("SELECT first, next FROM partitions WHERE id = ?", (cursor.id,)).fetchone()
        kept, end = row or (0, offset)
        if offset < kept:
            raise position_lost("the position to seek", cursor.partition, offset, kept)
        if offset > end:
            topic, number = cursor.partition
            text = f"{topic}[{number}] ends at {end}, before the position to seek, {offset}: the topic was"
            raise errors.PositionLost(text + " recreated, or the file is a restored copy")
        return int(kept)

    def pause(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._cursor(partition).paused = True

    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._cursor(partition).paused = False

    def _cursor(self, partition: Partition) -> Cursor:
        if partition not in self._cursors:
            topic, number = partition
            text = f"{topic}[{number}] is not assigned to this reader now; `positions()` lists its partitions"
            raise errors.InvalidState(text)
        return self._cursors[partition]

    def _reading(self, deadline: Deadline) -> AbstractContextManager[FileConnection]:
        """Return a context manager with a snapshot of the file."""
        return self._store.reading(self._connection, deadline)

    @contextmanager
    def _writing(
        self, step: str, deadline: Deadline, connection: FileConnection | None = None
    ) -> Iterator[FileConnection]:
        """Run a block in a write transaction of the file, and emit events with the name `step:{step}` around it."""
        with (
            self._store.events.step(f"step:{step}", None, group=self._subscription.group),
            self._store.writing(connection or self._connection, deadline, step) as writing,
        ):
            yield writing
