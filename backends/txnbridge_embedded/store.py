"""The file: its schema, its connections, whose turn it is to write, and what its errors mean."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge.spi import Deadline

APPLICATION_ID = 0x74786E62  # "txnb", in the file's header: tells our file from another program's
VERSION = 1  # of the schema, in the file's header
OLDEST_SQLITE = (3, 35)  # RETURNING; WITHOUT ROWID and upserts are older

OFFSET_BITS = 40  # a message's row id is partition << 40 | offset, so that a partition's messages lie together
MAX_OFFSET = (1 << OFFSET_BITS) - 1
MAX_PARTITION_ID = (1 << 22) - 1  # what 63 bits leave, with one bit to spare

# How often the writer whose turn it is asks for the lock. A commit takes from 0.5 ms, so this adds little to it, and
# only one writer of all that wait asks so often.
_LOCK_POLL = 0.0002
# How often the others ask for the turn. There is a whole commit's time to take it, so it need not be quick.
_TURN_POLL = 0.0005
# The turn is a courtesy: whoever holds it may have been stopped, so nobody waits longer for it than this.
_TURN_PATIENCE = 0.1
# A reader meets a lock only while a file is recovered or closed by its last user, which takes milliseconds.
_READ_POLL = 0.001
# How old the known partition count of a topic may be: topics grow rarely, and a look costs a query.
_TOPIC_AGE = 1.0
# Pages in the write-ahead log before they are copied into the file.
_CHECKPOINT_PAGES = 4000
_WAL_BYTES = 32 << 20  # a log that once grew longer is cut back to this

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE topics(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
  retention_ms INTEGER, retention_bytes INTEGER, created_at INTEGER NOT NULL);
-- first: the oldest offset that is kept; next: the offset to give next; bytes: all that was ever written
CREATE TABLE partitions(
  id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id INTEGER NOT NULL, number INTEGER NOT NULL,
  first INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
  UNIQUE(topic_id, number));
-- partitions of deleted topics whose messages are still to be removed
CREATE TABLE garbage(partition_id INTEGER PRIMARY KEY);
-- id: partition << 40 | offset; headers: JSON pairs, values as Latin-1
CREATE TABLE messages(
  id INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL, key BLOB, headers TEXT, value BLOB);
-- what lies below `offset` was written before `at`, and was `bytes` in all; only for topics with retention
CREATE TABLE marks(
  partition_id INTEGER NOT NULL, offset INTEGER NOT NULL, at INTEGER NOT NULL, bytes INTEGER NOT NULL,
  PRIMARY KEY(partition_id, offset)) WITHOUT ROWID;

CREATE TABLE identities(
  name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, host TEXT NOT NULL, opened_at INTEGER NOT NULL) WITHOUT ROWID;
-- last: number of the last transaction that this writer committed (or prepared); retired: it commits no more
CREATE TABLE writers(
  id TEXT PRIMARY KEY, identity TEXT, last INTEGER NOT NULL, used_at INTEGER NOT NULL,
  retired INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX writers_identity ON writers(identity) WHERE identity IS NOT NULL;
-- those with messages or acknowledgements in the file before their end; state: open, prepared, aborting, and of
-- prepared ones also committed and aborted
CREATE TABLE transactions(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, identity TEXT, owner TEXT NOT NULL,
  state TEXT NOT NULL, prepared INTEGER NOT NULL DEFAULT 0, begun_at INTEGER NOT NULL, deadline_at INTEGER NOT NULL,
  ended_at INTEGER, messages INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '');
CREATE INDEX transactions_deadline ON transactions(deadline_at) WHERE ended_at IS NULL;
-- offsets that are written and not decided (or not yet removed); readers stop before the first of a partition
CREATE TABLE undecided(
  partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, number INTEGER NOT NULL,
  PRIMARY KEY(partition_id, first)) WITHOUT ROWID;
CREATE INDEX undecided_number ON undecided(number);

CREATE TABLE groups(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, generation INTEGER NOT NULL DEFAULT 0,
  sharing TEXT NOT NULL);
CREATE TABLE members(
  id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, topics TEXT NOT NULL, host TEXT NOT NULL,
  expires_at INTEGER NOT NULL, joined_at INTEGER NOT NULL) WITHOUT ROWID;
-- epoch grows whenever the partition is given to a member, also to the same one again
CREATE TABLE assignments(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, member TEXT, epoch INTEGER NOT NULL,
  wanted TEXT, wanted_since INTEGER, PRIMARY KEY(group_id, partition_id)) WITHOUT ROWID;
-- everything below next is acknowledged; rewinds grows when acknowledgements of a prepared transaction are aborted
CREATE TABLE positions(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, next INTEGER NOT NULL,
  rewinds INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(group_id, partition_id)) WITHOUT ROWID;
-- acknowledged ranges beyond positions.next
CREATE TABLE acks(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  PRIMARY KEY(group_id, partition_id, first)) WITHOUT ROWID;
-- acknowledgements of prepared transactions: taken until they are decided
CREATE TABLE pending_acks(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  number INTEGER NOT NULL, PRIMARY KEY(group_id, partition_id, first)) WITHOUT ROWID;
CREATE INDEX pending_acks_number ON pending_acks(number);
-- messages handed out in groups that share message by message
CREATE TABLE leases(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, offset INTEGER NOT NULL, member TEXT,
  until INTEGER NOT NULL, deliveries INTEGER NOT NULL,
  PRIMARY KEY(group_id, partition_id, offset)) WITHOUT ROWID;

CREATE TABLE sequences(
  publisher TEXT NOT NULL, topic_id INTEGER NOT NULL, last INTEGER NOT NULL,
  PRIMARY KEY(publisher, topic_id)) WITHOUT ROWID;
CREATE TABLE logs(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
  first INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0);
CREATE TABLE log_records(id INTEGER PRIMARY KEY, record BLOB NOT NULL);  -- id: log << 40 | position
-- state: waiting, parked, committed, aborted
CREATE TABLE halves(
  id INTEGER PRIMARY KEY AUTOINCREMENT, group_name TEXT NOT NULL, transaction_id TEXT NOT NULL,
  state TEXT NOT NULL, check_at INTEGER NOT NULL, lent_until INTEGER NOT NULL DEFAULT 0,
  deadline_at INTEGER NOT NULL, checks INTEGER NOT NULL DEFAULT 0, ended_at INTEGER,
  UNIQUE(group_name, transaction_id));
CREATE INDEX halves_due ON halves(group_name, check_at) WHERE state = 'waiting';
CREATE TABLE half_messages(
  half INTEGER NOT NULL, number INTEGER NOT NULL, topic TEXT NOT NULL, key BLOB, headers TEXT, value BLOB,
  PRIMARY KEY(half, number)) WITHOUT ROWID;
"""


class CommitUnclear(StorageFailed):
    """SQLite was asked to commit and failed while it did: nobody knows yet whether it happened."""


class Connection(sqlite3.Connection):
    """A connection with its own place in the queue of writers."""

    turn = -1  # a descriptor of the turn file: flock belongs to it, so threads of one process queue as well

    def close(self) -> None:
        if self.turn >= 0:
            os.close(self.turn)
            self.turn = -1
        super().close()


@dataclass(frozen=True)
class Topic:
    """A topic as the file knows it; `partitions[number]` is the partition's id."""

    id: int
    name: str
    partitions: tuple[int, ...]
    retention_ms: int | None
    retention_bytes: int | None


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Store:
    """One file, opened by one broker. Any thread may use it, each with a connection of its own."""

    def __init__(
        self, path: Path, *, durable: bool = True, max_bytes: int | None = None, create_topics: int = 1
    ) -> None:
        self.path = path
        self.cluster = ""
        self._durable = durable
        self._max_bytes = max_bytes
        self._create_topics = create_topics
        self._inode = 0
        self._topics: dict[str, tuple[float, Topic]] = {}

    # --- opening ---------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline, *, create: bool = True) -> None:
        """Make the file, or see that it is one of ours. Raises for every kind of wrong file what `_check` says."""
        connection = self.connect()
        try:
            prepare_file(connection, self.path, deadline)
            row = connection.execute("SELECT value FROM meta WHERE key = 'cluster'").fetchone()
            self.cluster = row[0]
        finally:
            connection.close()

    def connect(self, *, durable: bool | None = None) -> Connection:
        """A connection for one user at a time, from any thread; `durable=False` for what a power cut may take."""
        try:
            connection = sqlite3.connect(
                self.path, timeout=0, isolation_level=None, check_same_thread=False, factory=Connection
            )
        except sqlite3.Error as error:
            raise translate(error, f"opening {self.path}") from error
        synchronous = "FULL" if (self._durable if durable is None else durable) else "NORMAL"
        try:
            connection.turn = os.open(f"{self.path}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            if self._max_bytes is not None:
                (page,) = connection.execute("PRAGMA page_size").fetchone()
                connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // page)}")
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, f"opening {self.path}") from error
            raise
        return connection

    # --- transactions of SQLite ------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, connection: Connection, deadline: Deadline, what: str) -> Iterator[Connection]:
        """One SQLite transaction that writes, begun in fair turn; `what` names it in errors ("commit").

        Raises `DeadlineExceeded` if others hold the file until then, `CommitUnclear` if the commit itself failed, and
        otherwise what `translate` says: then nothing of the block is in the file.
        """
        try:
            self._begin(connection, deadline, what)
            yield connection
        except BaseException as error:
            roll_back(connection)
            if isinstance(error, sqlite3.Error):
                raise translate(error, f"{what} in {self.path}") from error
            raise
        self._commit(connection, what)

    @contextmanager
    def reading(self, connection: Connection, deadline: Deadline) -> Iterator[Connection]:
        """One snapshot to read from. Keep it short: the file's log cannot be cut back while it lasts."""
        try:
            self._retry(connection, deadline, "reading", _READ_POLL, _begin_snapshot)
            yield connection
        except sqlite3.Error as error:
            raise translate(error, f"reading {self.path}") from error
        finally:
            roll_back(connection)

    def _begin(self, connection: Connection, deadline: Deadline, what: str) -> None:
        self._take_turn(connection, deadline)
        try:
            self._retry(connection, deadline, what, _LOCK_POLL, _begin_immediate)
        finally:
            fcntl.flock(connection.turn, fcntl.LOCK_UN)

    def _take_turn(self, connection: Connection, deadline: Deadline) -> None:
        patience = time.monotonic() + min(_TURN_PATIENCE, deadline.left())
        while True:
            try:
                fcntl.flock(connection.turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= patience:
                    return
            time.sleep(_TURN_POLL)

    def _retry(
        self,
        connection: Connection,
        deadline: Deadline,
        what: str,
        pause: float,
        step: Callable[[Connection], None],
    ) -> None:
        """Repeat `step` while others hold the file, until the deadline."""
        while True:
            try:
                return step(connection)
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    raise
                if deadline.expired:
                    raise DeadlineExceeded(
                        f"{what} waited {deadline.seconds:g} s for {self.path}: another process keeps it locked; "
                        f"`fuser {self.path}` shows which"
                    ) from error
            time.sleep(pause)

    def _commit(self, connection: Connection, what: str) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            still_open = connection.in_transaction
            roll_back(connection)
            meaning = translate(error, f"{what} in {self.path}")
            # Refused with the transaction still open, or for want of room: its last page was never written, so it did
            # not happen. Anything else may have come after that page.
            if still_open or code_of(error) == sqlite3_full:
                raise meaning from error
            raise CommitUnclear(str(meaning)) from error

    # --- topics ----------------------------------------------------------------------------------------------------

    def topic(self, connection: Connection, name: str) -> Topic:
        """A topic, as it was at most a second ago. Raises `NotFound` with the command that makes it."""
        known = self._topics.get(name)
        if known is not None and time.monotonic() - known[0] < _TOPIC_AGE:
            return known[1]
        topic = read_topic(connection, name)
        if topic is None:
            self._topics.pop(name, None)
            raise NotFound(
                f"there is no topic {name!r} in {self.path}: `txnbridge topics create {name}` makes it, "
                f"and so does connecting with create_topics=1"
            )
        self._topics[name] = (time.monotonic(), topic)
        return topic

    def ensure_topic(self, connection: Connection, name: str, deadline: Deadline) -> Topic:
        """As `topic`, but makes a missing one if the bridge may. Never call it inside `writing` or `reading`."""
        try:
            return self.topic(connection, name)
        except NotFound:
            if not self._create_topics:
                raise
        with self.writing(connection, deadline, f"creating topic {name!r}"):
            add_topic(connection, name, self._create_topics)
        return self.topic(connection, name)

    def forget_topic(self, name: str) -> None:
        """Look at the file again when the topic is next asked for."""
        self._topics.pop(name, None)


def read_topic(connection: sqlite3.Connection, name: str) -> Topic | None:
    row = connection.execute(
        "SELECT id, retention_ms, retention_bytes FROM topics WHERE name = ?", (name,)
    ).fetchone()
    if row is None:
        return None
    ids = connection.execute("SELECT id FROM partitions WHERE topic_id = ? ORDER BY number", (row[0],))
    return Topic(row[0], name, tuple(id for (id,) in ids), row[1], row[2])


def add_topic(
    connection: sqlite3.Connection,
    name: str,
    partitions: int,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
) -> bool:
    """Add a topic inside a write transaction; False if there is one of this name."""
    added = connection.execute(
        "INSERT OR IGNORE INTO topics(name, retention_ms, retention_bytes, created_at) VALUES (?, ?, ?, ?)",
        (name, retention_ms, retention_bytes, now_ms()),
    )
    if not added.rowcount:
        return False
    assert added.lastrowid is not None
    add_partitions(connection, added.lastrowid, 0, partitions)
    return True


def add_partitions(connection: sqlite3.Connection, topic_id: int, first: int, count: int) -> None:
    connection.executemany(
        "INSERT INTO partitions(topic_id, number) VALUES (?, ?)",
        ((topic_id, number) for number in range(first, first + count)),
    )
    (highest,) = connection.execute("SELECT max(id) FROM partitions").fetchone()
    if highest > MAX_PARTITION_ID:
        raise InvalidOption(f"one file holds at most {MAX_PARTITION_ID} partitions, deleted ones included")


def roll_back(connection: sqlite3.Connection) -> None:
    """End SQLite's transaction if one is open; SQLite has often done so itself after an error."""
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            if connection.in_transaction:  # pragma: no cover - SQLite ends it even when it complains
                raise


def _begin_immediate(connection: Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_snapshot(connection: Connection) -> None:
    # BEGIN alone takes no snapshot; the first look into the file does, and it alone can meet a lock.
    if not connection.in_transaction:
        connection.execute("BEGIN")
    connection.execute("SELECT 1 FROM meta LIMIT 1").fetchone()


def prepare_file(connection: Connection, path: Path, deadline: Deadline) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application == APPLICATION_ID:
        return
    connection.executescript(
        f"BEGIN IMMEDIATE; {SCHEMA}; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; "
        f"INSERT INTO meta VALUES ('cluster', '{uuid.uuid4()}'), ('created_at', {now_ms()}); COMMIT"
    )


# --- errors ----------------------------------------------------------------------------------------------------------

# SQLite's result codes, by number because Python 3.10 has no names for them.
sqlite3_perm, sqlite3_busy, sqlite3_locked, sqlite3_readonly = 3, 5, 6, 8
sqlite3_ioerr, sqlite3_corrupt, sqlite3_full, sqlite3_cantopen = 10, 11, 13, 14
sqlite3_protocol, sqlite3_notadb = 15, 26

# Python 3.10 tells the text alone.
_CODES = {
    "database is locked": sqlite3_busy,
    "database table is locked": sqlite3_locked,
    "locking protocol": sqlite3_protocol,
    "attempt to write a readonly database": sqlite3_readonly,
    "disk I/O error": sqlite3_ioerr,
    "database disk image is malformed": sqlite3_corrupt,
    "database or disk is full": sqlite3_full,
    "unable to open database file": sqlite3_cantopen,
    "file is not a database": sqlite3_notadb,
}

_MEANINGS: dict[int, tuple[type[TxnBridgeError], str]] = {
    sqlite3_busy: (DeadlineExceeded, "another process keeps the file locked"),
    sqlite3_locked: (DeadlineExceeded, "another connection keeps the file locked"),
    sqlite3_protocol: (DeadlineExceeded, "other processes keep the file's lock table busy"),
    sqlite3_perm: (AccessDenied, "the operating system refuses access to the file"),
    sqlite3_readonly: (AccessDenied, "the file may not be written: check its rights, its folder's and the mount's"),
    sqlite3_cantopen: (AccessDenied, "the file, or those beside it, cannot be opened: check the rights"),
    sqlite3_full: (StorageFailed, "no room: the disk is full or max_bytes is reached"),
    sqlite3_ioerr: (StorageFailed, "the disk refuses to read or write"),
    sqlite3_corrupt: (StorageFailed, "the file is damaged: `txnbridge doctor` says more; restore a copy"),
    sqlite3_notadb: (StorageFailed, "the file is not an SQLite database, or its header is damaged"),
}


def code_of(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None if it says none."""
    code: Any = getattr(error, "sqlite_errorcode", None)
    return _CODES.get(str(error)) if code is None else code & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else holds what was asked for, so that asking again may help."""
    return code_of(error) in (sqlite3_busy, sqlite3_locked, sqlite3_protocol)


def translate(error: sqlite3.Error, what: str) -> TxnBridgeError:
    """What an error of SQLite's means for a caller; `what` was being done. SQLite's own goes into `__cause__`."""
    kind, meaning = _MEANINGS.get(code_of(error) or 0, (BrokerUnavailable, str(error)))
    return kind(f"{what} failed: {meaning}")
