"""The broker's file: its SQLite connections, the queue of its writers, its topics, and the translation of errors."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from txnbridge import errors
from txnbridge.spi import Deadline, Emitter, FairSemaphore
from txnbridge_embedded.client import files, schema
from txnbridge_embedded.client.schema import MAX_PARTITION_ID
from txnbridge_embedded.settings import Settings

_log = logging.getLogger("txnbridge.embedded")

# The interval at which the first writer in the queue tries to get SQLite's write lock. It is short compared with a
# commit of 0.2 ms or more, and only one writer polls so often.
_LOCK_POLL = 0.0002
# The interval at which the other writers try to become the first in the queue.
_QUEUE_POLL = 0.0005
# The longest wait in the queue. The queue only makes writing fair, and the first writer's process may be suspended.
_LONGEST_QUEUE_WAIT = 0.1
# For this time, some commits, a thread may write repeatedly while other threads of its process wait.
_CONSECUTIVE_SECONDS = 0.002
# The interval at which a reader tries again while the file is recovered, or closed by its last user: milliseconds.
_READ_POLL = 0.001
# The longest wait of a new connection, which has no caller's deadline, for such a recovery.
_CONNECT_SECONDS = 5.0
# The longest wait for a locked file when a reader leaves its group or a bridge closes: some hundred commits. If rows
# are not deleted then, a member's lease expires, and a writer's row is deleted later.
CLOSING_SECONDS = 1.0
# The length at which the write-ahead log is copied into the file: commits wait during a copy, so it must not be long.
CHECKPOINT_BYTES = 8 << 20
_PARTITIONS_AT_ONCE = 10_000  # the rows of one insert, which takes some ten milliseconds
_WAL_BYTES = 64 << 20  # a write-ahead log that has grown beyond this, because of a slow reader, is truncated


class CommitUnclear(errors.StorageFailed):
    """Raised if SQLite failed during a commit: it is not known whether the commit took effect."""


class FileConnection(sqlite3.Connection):
    """A SQLite connection for one thread at a time, with the lock by which the file's writers queue.

    Any thread may call `close`. SQLite crashes if a connection is closed in use, so `leave` closes it then.
    """

    queue_lock = -1  # a descriptor of the queue's lock file, for flock

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self._guard = threading.Lock()  # guards the two flags
        self._used, self._closing = True, False
        _connections.add(self)  # now, because another thread may fork while it is opened
        super().__init__(path, **options)
        self._used = False

    def enter(self) -> None:
        """Mark the connection as in use. Raise `InvalidState` if it was closed."""
        with self._guard:
            if self._closing:
                raise errors.InvalidState("this bridge is closed")
            self._used = True

    def leave(self) -> None:
        """Mark the connection as unused; close it if `close` was called meanwhile."""
        with self._guard:
            self._used = False
            if self._closing:
                self._close_now()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the connection as in use during the block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        with self._guard:
            self._closing = True
            if not self._used:
                self._close_now()

    def _close_now(self) -> None:
        queue_lock, self.queue_lock = self.queue_lock, -1
        if queue_lock >= 0:
            os.close(queue_lock)
        super().close()

    def keep_as_parents(self) -> None:
        """In the child of a fork, keep the connection from being freed, also at the interpreter's exit."""
        self._used |= self._guard.locked()
        self._guard = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        _parents.append(self)

    def close_parents(self) -> None:
        """Close this connection of the parent process. Raise `InvalidState` if it was in use at the fork."""
        if self._used:
            text = f"this process was forked during a call on {self.path}, so SQLite cannot open the file here: fork"
            raise errors.InvalidState(text + " while no bridge to it is in use, or spawn the process")
        self.close()


_connections: WeakSet[FileConnection] = WeakSet()  # of this process
_parents: list[FileConnection] = []  # those of them that this process has by a fork


def _after_fork() -> None:
    _parents.clear()
    for connection in list(_connections):
        connection.keep_as_parents()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class StoredTopic:
    """A topic in the file. `partitions` has the ids of the partitions, by number."""

    id: int
    name: str
    partitions: tuple[int, ...]
    retention_ms: int | None
    retention_bytes: int | None


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Store:
    """The broker's file, opened by one bridge. Any thread may use it, each with a `FileConnection` of its own."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        events: Emitter,
        *,
        durable: bool,
        max_bytes: int | None,
        create_topics: int,
    ) -> None:
        self.settings = settings
        self.events = events
        # SQLite's log and the queue's lock file are in the folder of the file itself, not of a symbolic link to it.
        self.path = path.resolve()
        self.cluster = ""
        self.durable = durable
        self._max_bytes = max_bytes
        self._create_topics = create_topics
        self._inode: tuple[int, int] | None = None
        self._connection: FileConnection | None = None
        self._wal = _WalLength(Path(f"{self.path}-wal"))
        # The queue of this process's threads. Only the first of them joins the queue of processes.
        self._thread_queue = FairSemaphore(1, _CONSECUTIVE_SECONDS, one_per_thread=True)
        self._topics: dict[str, tuple[float, StoredTopic]] = {}

    # --- opening ---------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline, *, create: bool = True) -> None:
        """Open the file, or create it.

        Raise `InvalidOption` or `NotFound` for a wrong path, another program's file or one of a newer version,
        `AccessDenied` without the right to read or write it, `StorageFailed` if it is damaged, and `DeadlineExceeded`
        if another process keeps it locked.
        """
        files.check_sqlite()
        files.check_path(self.path, create)
        # This connection stays open as long as the store: when the last connection closes, SQLite copies and removes
        # its log, which slows the next connection down. It also copies the log while other connections write.
        self._connection = self._connect()
        try:
            self._make_ready(self._connection, deadline)
            self._set_up(self._connection, self.durable, deadline)
            with self.reading(self._connection, deadline):
                (self.cluster,) = self._connection.execute("SELECT value FROM meta WHERE key = 'cluster'").fetchone()
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, f"opening {self.path}") from error
            raise

    def _make_ready(self, connection: FileConnection, deadline: Deadline) -> None:
        def look(_: FileConnection) -> int:
            return files.check_header(connection, self.path)

        def set_journal(_: FileConnection) -> str:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])

        version = self._retry(connection, deadline, "opening", _READ_POLL, look)
        if not version:
            connection.execute(f"PRAGMA page_size = {schema.PAGE_BYTES}")
        if self._retry(connection, deadline, "opening", _READ_POLL, set_journal) != "wal":
            raise errors.StorageFailed(f"{self.path} is on a file system where SQLite cannot keep a write-ahead log")
        if not version:
            self._open_queue_lock(connection)
            with self.writing(connection, deadline, "creating the file"):
                version = look(connection)  # another process may have been first
                if not version:
                    schema.create(connection)
        found = os.stat(self.path)
        self._inode = (found.st_dev, found.st_ino)

    def connect(self, *, durable: bool | None = None) -> FileConnection:
        """Return a new connection for one thread at a time. With `durable=False` a power cut may lose its commits."""
        connection = self._connect()
        try:
            self._open_queue_lock(connection)
            self._set_up(connection, self.durable if durable is None else durable, Deadline(_CONNECT_SECONDS))
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, f"opening {self.path}") from error
            raise
        return connection

    def _connect(self) -> FileConnection:
        # SQLite notes which locks its process has on a file, but a fork copies these notes without the locks. Beside a
        # parent's connection, a new one would have none, and the last other process that closes would delete its log.
        for inherited in [each for each in _parents if each.path == self.path]:
            inherited.close_parents()
        try:
            return sqlite3.connect(
                self.path, timeout=0, isolation_level=None, check_same_thread=False, factory=FileConnection
            )
        except sqlite3.Error as error:
            raise translate(error, f"opening {self.path}") from error

    def _set_up(self, connection: FileConnection, durable: bool, deadline: Deadline) -> None:
        settings = [
            f"synchronous = {'FULL' if durable else 'NORMAL'}",
            "wal_autocheckpoint = 0",  # see `_copy_log`
            f"journal_size_limit = {_WAL_BYTES}",
        ]
        if self._max_bytes is not None:
            settings.append(f"max_page_count = {max(1, self._max_bytes // schema.PAGE_BYTES)}")

        def apply(connection: FileConnection) -> None:
            for setting in settings:
                connection.execute(f"PRAGMA {setting}")

        self._retry(connection, deadline, "opening", _READ_POLL, apply)

    def _open_queue_lock(self, connection: FileConnection) -> None:
        try:
            connection.queue_lock = os.open(f"{self.path}-turn", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise errors.AccessDenied(f"{self.path}-turn cannot be opened: {error.strerror}") from error

    def close(self) -> None:
        """Close the store's own connection. The connections that `connect` returned are closed by their users."""
        self._wal.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- transactions of SQLite ------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, connection: FileConnection, deadline: Deadline, what: str) -> Iterator[FileConnection]:
        """Run a block in a write transaction of SQLite, after waiting in a fair queue.

        `what` names the block in error texts. Raise `DeadlineExceeded` if other writers lock the file until the
        deadline, and `CommitUnclear` if SQLite failed during the commit. After any other error the block's changes are
        not in the file.
        """
        connection.enter()
        place = self._thread_queue.place()
        try:
            try:
                if not place.enter(deadline):
                    text = f"{what} waited {deadline.seconds:g} s for other threads of this process, which write to"
                    raise errors.DeadlineExceeded(text + f" {self.path}")
                self._begin(connection, deadline, what)
                yield connection
            except (sqlite3.Error, UnicodeEncodeError) as error:
                raise translate(error, f"{what} in {self.path}") from error
            self._commit(connection, what)
        finally:
            try:
                _roll_back(connection)  # also if a signal handler's exception came before the commit
                place.leave()
            finally:
                connection.leave()

    @contextmanager
    def reading(self, connection: FileConnection, deadline: Deadline) -> Iterator[FileConnection]:
        """Run a block with a snapshot of the file. The block must be short: the log cannot be truncated meanwhile."""
        connection.enter()
        try:
            _roll_back(connection)  # as in `_begin`
            self._retry(connection, deadline, "reading", _READ_POLL, _begin_snapshot)
            yield connection
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise translate(error, f"reading {self.path}") from error
        finally:
            _roll_back(connection)
            connection.leave()

    def require_in_place(self) -> None:
        """Raise `StorageFailed` if the file was removed, moved or replaced since it was opened."""
        if self._inode is not None and not files.in_place(self.path, self._inode):
            raise files.moved(self.path)

    def _begin(self, connection: FileConnection, deadline: Deadline, what: str) -> None:
        self.require_in_place()
        _roll_back(connection)  # a signal handler's exception may have left a SQLite transaction open
        self._wait_to_be_first(connection, deadline)
        try:
            self._retry(connection, deadline, what, _LOCK_POLL, _begin_immediate)
            if self._wal.is_long():
                self._copy_log()
                # A write transaction that begins after the whole log was copied writes to the log's beginning.
                _roll_back(connection)
                self._retry(connection, deadline, what, _LOCK_POLL, _begin_immediate)
        finally:
            with suppress(OSError):
                fcntl.flock(connection.queue_lock, fcntl.LOCK_UN)

    def _wait_to_be_first(self, connection: FileConnection, deadline: Deadline) -> None:
        """Wait to become the first of the waiting writers, because SQLite's write lock itself has no queue."""
        patience = time.monotonic() + min(_LONGEST_QUEUE_WAIT, deadline.left())
        while True:
            try:
                return fcntl.flock(connection.queue_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # another writer is first, or the system has no free lock and there is no queue
                if not isinstance(error, BlockingIOError) or time.monotonic() >= patience:
                    return None
            time.sleep(_QUEUE_POLL)

    def _retry(
        self,
        connection: FileConnection,
        deadline: Deadline,
        what: str,
        pause: float,
        step: Callable[[FileConnection], Any],
    ) -> Any:
        """Return the result of `step`. Call it again after each `pause` while another connection locks the file."""
        while True:
            try:
                return step(connection)
            except sqlite3.Error as error:
                if code_of(error) not in (_BUSY, _LOCKED, _PROTOCOL):  # then no other connection has a lock
                    raise
                if deadline.expired:
                    text = f"{what} waited {deadline.seconds:g} s for {self.path}, which another process keeps locked; "
                    raise errors.DeadlineExceeded(text + f"`fuser {self.path}` shows which") from error
            time.sleep(pause)

    def _commit(self, connection: FileConnection, what: str) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            still_open = connection.in_transaction
            _roll_back(connection)
            meaning = translate(error, f"{what} in {self.path}")
            # The last page that SQLite writes commits its transaction. That page was not written if the transaction is
            # still open, or if a page could not be written. Any other error, as of fsync, may have occurred later.
            if still_open or code_of(error) == _FULL or getattr(error, "sqlite_errorcode", None) == _IOERR_WRITE:
                raise meaning from error
            raise CommitUnclear(str(meaning)) from error

    def _copy_log(self) -> None:
        """Copy the write-ahead log into the file, while the caller holds the write lock and has written nothing.

        By default SQLite copies the log after a commit, without the write lock. Versions before 3.51.3 can damage the
        file then, if a writer restarts the log while another process begins a copy: SQLite mistakes the new log for
        copied. While the caller holds the lock, no writer restarts the log.
        """
        keeper = self._connection
        if keeper is None:  # another thread has closed the store meanwhile
            return
        try:
            with suppress(errors.InvalidState), keeper.in_use():
                keeper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:  # such as a full disk: the data stay in the log, and the next writer tries again
            _log.debug("the log of %s could not be copied: %s", self.path, error)

    # --- topics ----------------------------------------------------------------------------------------------------

    def topic(self, connection: FileConnection, name: str) -> StoredTopic:
        """Return a topic, from the cache if it was read within the last second. Raise `NotFound` if it is missing."""
        if (known := self._cached_topic(name)) is not None:
            return known
        topic = read_topic(connection, name)
        if topic is None:
            self.forget_topic(name)
            raise errors.NotFound(f"there is no topic {name!r}; create it with: txnbridge topics create {name}")
        self._topics[name] = (time.monotonic(), topic)
        return topic

    def _cached_topic(self, name: str) -> StoredTopic | None:
        read_at, topic = self._topics.get(name, (0.0, None))
        return topic if time.monotonic() - read_at < self.settings.timing.topic_age else None

    def ensure_topic(self, connection: FileConnection, name: str, deadline: Deadline) -> StoredTopic:
        """Return a topic; create a missing one unless `create_topics` is 0. Not for use in `writing` or `reading`."""
        if (known := self._cached_topic(name)) is not None:
            return known
        try:
            with self.reading(connection, deadline):
                return self.topic(connection, name)
        except errors.NotFound:
            if not self._create_topics:
                raise
        with self.writing(connection, deadline, f"creating topic {name!r}"):
            add_topic(connection, name, self._create_topics, deadline)
        with self.reading(connection, deadline):  # only now: if the commit fails, other topics get these ids
            return self.topic(connection, name)

    def forget_topic(self, name: str) -> None:
        """Drop a topic from the cache."""
        self._topics.pop(name, None)


class _WalLength:
    """Checks whether SQLite's write-ahead log has reached `CHECKPOINT_BYTES`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        # In the write-ahead log each page has a header of 24 bytes, and the log itself one of 32.
        self._last = 32 + CHECKPOINT_BYTES // schema.PAGE_BYTES * (24 + schema.PAGE_BYTES)

    def is_long(self) -> bool:
        """Return whether the page at `CHECKPOINT_BYTES` was written since SQLite last restarted the log.

        At a restart the log's file does not shrink, but the header of the log, and of each page written later, gets a
        new salt. (Opening and closing this file is safe: SQLite's locks are on the other two files.)
        """
        try:
            if self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0:
                self.close()
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            salt = os.pread(self._descriptor, 8, 16)
            return salt != b"" and salt == os.pread(self._descriptor, 8, self._last + 8)
        except OSError:  # the log does not exist yet
            return False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def latest_time(connection: sqlite3.Connection) -> int:
    """Return the latest time in the file, which is ahead of the clock if the clock was set back."""
    (found,) = connection.execute(
        "SELECT max(coalesce((SELECT max(used_at) FROM writers), 0),"
        " coalesce((SELECT max(opened_at) FROM identities), 0), coalesce((SELECT max(created_at) FROM topics), 0))"
    ).fetchone()
    return int(found)


def read_topic(connection: sqlite3.Connection, name: str) -> StoredTopic | None:
    row = connection.execute("SELECT id, retention_ms, retention_bytes FROM topics WHERE name = ?", (name,)).fetchone()
    if row is None:
        return None
    # An exception from a signal handler must not leave a statement half read: it would hold its snapshot, and the
    # connection's next write transaction would be refused.
    ids = connection.execute("SELECT id FROM partitions WHERE topic_id = ? ORDER BY number", (row[0],)).fetchall()
    return StoredTopic(row[0], name, tuple(id for (id,) in ids), row[1], row[2])


def add_topic(
    connection: sqlite3.Connection,
    name: str,
    partitions: int,
    deadline: Deadline,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
) -> bool:
    """Add a topic, in the caller's write transaction. Return False if the name exists."""
    added = connection.execute(
        "INSERT INTO topics(name, retention_ms, retention_bytes, created_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING RETURNING id",
        (name, retention_ms, retention_bytes, now_ms()),
    ).fetchall()
    for (topic_id,) in added:
        add_partitions(connection, topic_id, 0, partitions, deadline)
    return bool(added)


def add_partitions(connection: sqlite3.Connection, topic_id: int, first: int, count: int, deadline: Deadline) -> None:
    """Add `count` partitions to a topic, numbered from `first` on, in the caller's write transaction."""
    used = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'partitions'").fetchone()
    if (used[0] if used else 0) + count > MAX_PARTITION_ID:
        raise errors.InvalidOption(f"a file can have at most {MAX_PARTITION_ID} partitions, including deleted ones")
    for start in range(first, first + count, _PARTITIONS_AT_ONCE):
        deadline.check(f"adding {count} partitions")
        connection.executemany(
            "INSERT INTO partitions(topic_id, number) VALUES (?, ?)",
            ((topic_id, number) for number in range(start, min(start + _PARTITIONS_AT_ONCE, first + count))),
        )


def _roll_back(connection: sqlite3.Connection) -> None:
    """Roll back SQLite's transaction if it is open: after many errors SQLite itself has rolled it back."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _begin_immediate(connection: FileConnection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_snapshot(connection: FileConnection) -> None:
    # BEGIN takes no snapshot. The first query takes it, and can fail because of a lock.
    if not connection.in_transaction:
        connection.execute("BEGIN")
    connection.execute("SELECT 1 FROM meta LIMIT 1").fetchone()


# --- errors ----------------------------------------------------------------------------------------------------------

# SQLite's primary result codes.
_PERM, _BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _PROTOCOL, _NOTADB = (
    *(3, 5, 6, 8, 10, 11, 13, 14, 15, 26),
)
_IOERR_WRITE = _IOERR | 3 << 8
_MEANINGS: dict[int, tuple[type[errors.TxnBridgeError], str]] = {
    _BUSY: (errors.DeadlineExceeded, "another process keeps the file locked"),
    _LOCKED: (errors.DeadlineExceeded, "another connection keeps the file locked"),
    _PROTOCOL: (errors.DeadlineExceeded, "other processes keep the file's lock table busy"),
    _PERM: (errors.AccessDenied, "the operating system refuses access"),
    _READONLY: (
        errors.AccessDenied,
        "the file may not be written: check the rights of the file, its folder and its mount",
    ),
    _CANTOPEN: (
        errors.AccessDenied,
        "the file, its -wal or its -shm cannot be opened: check rights and number of open files",
    ),
    _FULL: (errors.StorageFailed, "there is no space: the disk is full or max_bytes is reached"),
    _IOERR: (errors.StorageFailed, "the disk failed to read or write"),
    _CORRUPT: (
        errors.StorageFailed,
        "the file is damaged: restore a copy; `sqlite3 FILE .recover` saves what can be read",
    ),
    _NOTADB: (errors.StorageFailed, "the file is not an SQLite database, or its header is damaged"),
}


def code_of(error: sqlite3.Error) -> int | None:
    """Return the primary result code of SQLite's error; None if it has none."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def translate(error: sqlite3.Error | UnicodeEncodeError, what: str) -> errors.TxnBridgeError:
    """Return txnbridge's error for an error of SQLite; `what` names the failed action in the error's text."""
    if isinstance(error, UnicodeEncodeError):
        return errors.InvalidOption(
            f"{what} failed: a name has half a character (a lone surrogate), which cannot be stored"
        )
    kind, meaning = _MEANINGS.get(code_of(error) or 0, (errors.BrokerUnavailable, str(error)))
    return kind(f"{what} failed: {meaning}")
