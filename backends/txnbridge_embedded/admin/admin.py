"""Administration: topics, groups, open transactions, and the doctor."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from txnbridge.errors import BrokerUnavailable, InvalidOption, InvalidState, NotFound, StorageFailed, TxnBridgeError
from txnbridge.spi import (
    Admin,
    Advice,
    Deadline,
    Decision,
    GroupInfo,
    OpenTransaction,
    Outcome,
    Partition,
    Position,
    Token,
    TopicInfo,
)
from txnbridge_embedded.admin import groups
from txnbridge_embedded.client.headers import unpack_raw
from txnbridge_embedded.client.readable_ranges import read_bounds
from txnbridge_embedded.client.schema import MAX_OFFSET, MAX_PARTITION_ID, OFFSET_BITS
from txnbridge_embedded.client.shared_connection import SharedConnection
from txnbridge_embedded.client.store import (
    FileConnection,
    StoredTopic,
    add_partitions,
    add_topic,
    latest_time,
    now_ms,
    read_topic,
)
from txnbridge_embedded.outcome import ending
from txnbridge_embedded.write import acks, retention

INTERNAL = "_txnbridge-"
_LITTLE_SPACE_BYTES = 256 << 20
_CLOCK_SECONDS = 5  # a synchronised clock is never set back by more than this


class EmbeddedAdmin(Admin):
    """Administration of the broker's file, through the bridge's shared connection."""

    def __init__(self, session: SharedConnection) -> None:
        self._session = session
        self._store = session.store

    def create_topic(
        self,
        name: str,
        partitions: int,
        deadline: Deadline,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        if (refuse := self._store.settings.refuse_name) is not None:
            refuse(name)
        if not 1 <= partitions <= MAX_PARTITION_ID:
            raise InvalidOption(f"a topic has 1 to {MAX_PARTITION_ID} partitions, not {partitions}")
        kept_ms = None if retention_seconds is None else int(retention_seconds * 1000)
        with (
            self._session(deadline) as connection,
            self._store.writing(connection, deadline, f"creating topic {name!r}"),
        ):
            if add_topic(connection, name, partitions, deadline, kept_ms, retention_bytes):
                return True
            found = read_topic(connection, name)
            assert found is not None
            asked = (partitions, kept_ms, retention_bytes)
            if (len(found.partitions), found.retention_ms, found.retention_bytes) != asked:
                raise InvalidOption(f"topic {name!r} exists already, {_described(found)}")
            return False

    def topics(self, deadline: Deadline) -> list[TopicInfo]:
        with self._session(deadline) as connection, self._store.reading(connection, deadline):
            rows = connection.execute(
                "SELECT name, (SELECT count(*) FROM partitions WHERE topic_id = topics.id), retention_ms,"
                " retention_bytes FROM topics ORDER BY name"
            ).fetchall()
        return [
            TopicInfo(name, count, name.startswith(INTERNAL), None if kept is None else kept / 1000, size)
            for name, count, kept, size in rows
        ]

    def delete_topic(self, name: str, deadline: Deadline) -> None:
        with self._session(deadline) as connection:
            with self._store.writing(connection, deadline, f"deleting topic {name!r}"):
                topic = self._existing(connection, name)
                self._check_decided(connection, topic)
                acks.forget_partitions(connection, topic.partitions)
                for partition in topic.partitions:
                    connection.execute("DELETE FROM marks WHERE partition_id = ?", (partition,))
                    connection.execute("INSERT INTO garbage VALUES (?)", (partition,))
                connection.execute("DELETE FROM sequences WHERE topic_id = ?", (topic.id,))
                connection.execute("DELETE FROM partitions WHERE topic_id = ?", (topic.id,))
                connection.execute("DELETE FROM topics WHERE id = ?", (topic.id,))
            self._store.forget_topic(name)
            # The topic is deleted now. If removing its messages fails, the next deletion, or the doctor, removes them.
            with suppress(TxnBridgeError):
                self._remove_deleted(connection, deadline)

    def _check_decided(self, connection: sqlite3.Connection, topic: StoredTopic) -> None:
        for partition in topic.partitions:
            row = connection.execute(
                "SELECT id FROM transactions JOIN undecided USING (number) WHERE partition_id = ?"
                " UNION SELECT id FROM transactions JOIN pending_acks USING (number) WHERE partition_id = ? LIMIT 1",
                (partition, partition),
            ).fetchone()
            if row is not None:
                raise InvalidState(f"topic {topic.name!r} is in use by transaction {row[0]}; end that first")

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        with (
            self._session(deadline) as connection,
            self._store.writing(connection, deadline, f"growing topic {name!r}"),
        ):
            topic = self._existing(connection, name)
            count = len(topic.partitions)
            if partitions < count:
                raise InvalidOption(f"topic {name!r} has {count} partitions; they cannot become fewer")
            add_partitions(connection, topic.id, count, partitions - count, deadline)
        self._store.forget_topic(name)

    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        with self._session(deadline) as connection:
            # Expired transactions would hold back the ends of partitions, and there may be no reader to abort them.
            ending.end_expired(self._store, connection, deadline)
            with self._store.reading(connection, deadline):
                for name in topics:
                    self._existing(connection, name)
                found = read_bounds(connection, topics)
        return {partition: ((bounds.kept,), (bounds.end,)) for partition, bounds in found.items()}

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        with self._session(deadline) as connection, self._store.reading(connection, deadline):
            ids = dict(connection.execute("SELECT name, id FROM topics"))
        return {name: str(ids[name]) for name in topics if name in ids}

    def _existing(self, connection: sqlite3.Connection, name: str) -> StoredTopic:
        topic = read_topic(connection, name)
        if topic is None:
            raise NotFound(f"there is no topic {name!r}")
        return topic

    def groups(self, deadline: Deadline) -> dict[str, int]:
        with self._session(deadline) as connection, self._store.reading(connection, deadline):
            rows = connection.execute(
                "SELECT name, (SELECT count(*) FROM members WHERE group_id = groups.id AND expires_at >= ?)"
                " FROM groups",
                (now_ms(),),
            )
            return dict(rows.fetchall())

    def group(self, name: str, deadline: Deadline) -> GroupInfo:
        with self._session(deadline) as connection, self._store.reading(connection, deadline):
            return groups.describe(connection, name)

    def reset_group(
        self, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
    ) -> dict[Partition, Position]:
        with self._session(deadline) as connection:
            return groups.reset(self._store, connection, name, to, topics, deadline)

    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        with self._session(deadline) as connection:
            # There may be no reader that they hold back, which would abort them.
            ending.end_expired(self._store, connection, deadline)
            with self._store.reading(connection, deadline):
                rows = connection.execute(
                    "SELECT number, id, identity, host, state, begun_at, deadline_at, messages FROM transactions"
                    " WHERE ended_at IS NULL"
                ).fetchall()
                return [
                    OpenTransaction(
                        transaction=transaction,
                        state=state,
                        owner=f"{identity} at {host}" if identity else host,
                        transactional_id=identity or "",
                        since=begun_at,
                        expires_at=deadline_at,
                        partitions=tuple(_partitions_of(connection, number)),
                        groups=tuple(acks.groups_of(connection, number)),
                        messages=messages,
                        token=Token("embedded", self._store.cluster, transaction, {"p": 1}, True, deadline_at, messages)
                        if state == "prepared"
                        else None,
                    )
                    for number, transaction, identity, host, state, begun_at, deadline_at, messages in rows
                    if (identity or "").startswith(owners)
                ]

    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        reason = "aborted by an administrator"
        with self._session(deadline) as connection:
            with self._store.reading(connection, deadline):
                row = connection.execute("SELECT state FROM transactions WHERE id = ?", (transaction,)).fetchone()
            if row is None:
                raise NotFound(f"no open or prepared transaction {transaction!r}: it has ended, or never began here")
            abort = row[0] == "open" and decision is Decision.ABORT
            if abort and ending.abort_open(self._store, connection, transaction, reason, deadline):
                return Outcome.ABORTED
            return ending.decide(self._store, connection, transaction, decision, deadline, reason)

    def check(self, deadline: Deadline) -> list[Advice]:
        # Not the shared connection, because checking a large file takes long.
        with closing(self._store.connect()) as connection:
            damage = list(self._check_file(connection, deadline))
            if damage:
                return damage  # a damaged file should not be written, and other findings in it may be wrong
            sound = Advice("ok", "file", f"{self._store.path} is sound")
            return [sound, *self._remove_expired(connection, deadline), *self._check_use(connection, deadline)]

    def _remove_expired(self, connection: FileConnection, deadline: Deadline) -> Iterator[Advice]:
        """Abort expired transactions, and remove messages of deleted topics and beyond retention; yield findings."""
        try:
            ended = ending.end_expired(self._store, connection, deadline)
            self._remove_deleted(connection, deadline)
            with self._store.reading(connection, deadline):
                names = [name for (name,) in connection.execute("SELECT name FROM topics").fetchall()]
                topics = [self._store.topic(connection, name) for name in names]
            for topic in topics:
                while not (retention.trim(self._store, connection, topic, deadline) or deadline.expired):
                    pass
        except TxnBridgeError as error:
            yield Advice("problem", "writing", str(error), "free disk space, or stop the process that locks the file")
            return
        if ended:
            yield Advice("warning", "transactions", f"{ended} past their deadline were aborted just now")

    def _check_use(self, connection: FileConnection, deadline: Deadline) -> Iterator[Advice]:
        yield from self._check_space()
        if not self._store.durable:
            yield Advice("warning", "durability", "a power cut may take the last commits", "open with durability=full")
        with self._store.reading(connection, deadline):
            held = connection.execute(
                "SELECT id, state, deadline_at FROM transactions WHERE ended_at IS NULL ORDER BY deadline_at"
            ).fetchall()
            ahead = (latest_time(connection) - now_ms()) // 1000
            halves = connection.execute(
                "SELECT group_name, state, count(*), min(check_at) FROM halves WHERE ended_at IS NULL"
                " GROUP BY group_name, state"
            ).fetchall()
        if ahead > _CLOCK_SECONDS:
            text = (
                f"the file has times {ahead} s ahead of this machine's clock, which was set back: deadlines, leases and"
                " half messages take so much longer"
            )
            yield Advice("warning", "clock", text, "set the clock right, and let a time service slew it")
        for transaction, state, deadline_at in held:
            left = max(0, deadline_at - now_ms()) // 1000
            text = f"is {state} and holds readers back for up to {left} s more"
            end = f"txnbridge transactions commit (or abort) {shlex.quote(transaction)} --yes --reason TEXT"
            yield Advice("warning", f"transaction {transaction}", text, end if state == "prepared" else "")
        for group, state, count, check_at in halves:
            late = (now_ms() - check_at) // 1000
            if state == "parked":
                text = f"{count} are parked: their check-backs were not answered"
                remedy = f"txnbridge resolver parked --group {shlex.quote(group)}"
                yield Advice("warning", f"half messages of {group}", text, remedy)
            elif late > self._store.settings.half_check_seconds:
                text = f"{count} wait, and a check-back is {late} s overdue: no resolver runs"
                remedy = f"txnbridge resolver run --group {shlex.quote(group)} --check MODULE:FUNCTION"
                yield Advice("warning", f"half messages of {group}", text, remedy)

    def _check_file(self, connection: FileConnection, deadline: Deadline) -> Iterator[Advice]:
        # Checking a large file takes long, and only SQLite's progress handler can stop the check at the deadline.
        connection.set_progress_handler(lambda: deadline.expired, self._store.settings.timing.check_instructions)
        try:
            with self._store.reading(connection, deadline):
                found = [line for (line,) in connection.execute("PRAGMA quick_check(5)").fetchall()]
                found += _damaged_headers(connection) if found == ["ok"] else []
        except StorageFailed as error:
            found = [str(error)]
        except BrokerUnavailable:
            deadline.check(f"looking through all of {self._store.path}")
            raise
        finally:
            connection.set_progress_handler(None, 0)
        if found != ["ok"]:
            found = [line for line in found if line != "ok"]
            remedy = "stop all its users and restore a copy; `sqlite3 FILE .recover` saves what can be read"
            yield Advice("problem", "file", "; ".join(found), remedy)

    def _check_space(self) -> Iterator[Advice]:
        free = shutil.disk_usage(self._store.path.parent).free
        if free < _LITTLE_SPACE_BYTES:
            text = f"{free >> 20} MiB are free"
            yield Advice("warning", "disk", text, "free disk space: with a full disk no commit is possible")
        try:
            log = os.stat(f"{self._store.path}-wal").st_size
        except OSError:
            return
        if log > self._store.settings.timing.long_wal_bytes:
            yield Advice("warning", "log", f"{log >> 20} MiB long: a reader keeps an old snapshot of the file")

    def _remove_deleted(self, connection: FileConnection, deadline: Deadline) -> None:
        with self._store.reading(connection, deadline):
            deleted = connection.execute("SELECT partition_id FROM garbage").fetchall()
        for (partition,) in deleted:
            is_over = False
            while not is_over:
                with self._store.writing(connection, deadline, "removing the messages of a deleted topic"):
                    done = ending.remove_messages(self._store, connection, partition, 0, MAX_OFFSET) == MAX_OFFSET
                    if done:
                        connection.execute("DELETE FROM garbage WHERE partition_id = ?", (partition,))
                is_over = done or deadline.expired


def _partitions_of(connection: sqlite3.Connection, number: int) -> list[Partition]:
    return connection.execute(
        "SELECT DISTINCT topics.name, partitions.number FROM undecided JOIN partitions ON partitions.id = partition_id"
        " JOIN topics ON topics.id = topic_id WHERE undecided.number = ? ORDER BY 1, 2",
        (number,),
    ).fetchall()


def _damaged_headers(connection: sqlite3.Connection) -> list[str]:
    """Return a text about the first message with damaged headers, in a list; an empty list if there is none."""
    for row_id, text in connection.execute("SELECT id, headers FROM messages WHERE headers IS NOT NULL"):
        try:
            unpack_raw(text)
        except StorageFailed:
            partition, offset = row_id >> OFFSET_BITS, row_id & MAX_OFFSET
            return [f"the headers of the message at {offset} of the partition with id {partition} are damaged"]
    return []


def _described(topic: StoredTopic) -> str:
    text = f"with {len(topic.partitions)} partition{'s' if len(topic.partitions) > 1 else ''}"
    if topic.retention_ms is not None:
        text += f", kept for {topic.retention_ms / 1000:g} s"
    if topic.retention_bytes is not None:
        text += f", kept up to {topic.retention_bytes} bytes"
    return text
