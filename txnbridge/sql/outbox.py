"""`Outbox`: messages as rows of a database transaction, which a relay publishes exactly once after its commit."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.dialects import mysql
from sqlalchemy.util.concurrency import in_greenlet

from txnbridge._base.messages import milliseconds
from txnbridge._base.plugins import plugins
from txnbridge._base.topic import Topic, encode_message
from txnbridge.errors import InvalidOption, InvalidState, StorageFailed
from txnbridge.spi import RawHeaders
from txnbridge.sql._database import EXACT_TEXT, commits_each_statement

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_LARGEST_VALUE = 1 << 30  # of a column, in bytes; some databases have a smaller type for smaller columns

_header_makers = functools.cache(plugins.header_makers)

# States of a row. A row of a batch that is being published is still waiting.
WAITING, PUBLISHED, PARKED = 0, 1, 2


class Outbox:
    """Messages that are stored with the data of a program, in one database transaction, and published later by a relay.

        outbox = Outbox("shop", Base.metadata)

        with Session(engine) as session, session.begin():
            session.add(order)
            outbox.send(session, "orders", b"...", key="42")

    `metadata` gets two tables, `shop_outbox` and `shop_outbox_relay`, which Alembic then finds; or call `create`.
    """

    def __init__(self, name: str, metadata: sa.MetaData | None = None) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidOption("an outbox has a name of 1 to 40 small letters, digits and _, such as shop")
        self.name = name
        metadata = sa.MetaData() if metadata is None else metadata
        try:
            self.rows: sa.Table = _rows_table(name, metadata)
            self.state: sa.Table = _state_table(name, metadata)
        except exc.InvalidRequestError as error:
            raise InvalidOption(f"this metadata has an outbox {name!r} already: use one `Outbox` for both") from error
        self._insert = sa.insert(self.rows).inline()
        self._insert_in_order = _insert_in_order(self.rows)
        self._row_class: Any = type("PendingRow", (_PendingRow,), {})
        orm.registry(metadata=metadata).map_imperatively(self._row_class, self.rows)
        sa.event.listen(self._row_class, "before_insert", self._check_flushed)

    def __repr__(self) -> str:
        return f"Outbox({self.name!r})"

    @property
    def tables(self) -> tuple[sa.Table, sa.Table]:
        return self.rows, self.state

    def create(self, engine: sa.Engine) -> None:
        """Create the tables that do not exist yet, for programs without migrations."""
        self.rows.metadata.create_all(engine, tables=list(self.tables))

    def send(
        self,
        to: orm.Session | sa.Connection | Any,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> None:
        """Add one message to the database transaction of `to`, a `Session`, `AsyncSession` or `Connection`.

        A relay publishes the message after the commit of this transaction. Messages with the same topic and key are
        published in the order in which their transactions commit; on PostgreSQL transactions that send the same key
        wait for each other, to keep this order. The message is stored at once; with an `AsyncSession` when it is
        flushed, unless `send` is called inside `run_sync`.

        Raise `InvalidOption` for a message that cannot be encoded, for a connection that commits each statement by
        itself (AUTOCOMMIT), and for a session whose transaction includes a second database. Only the relay learns
        what the broker accepts.
        """
        encoded = encode_message(topic, value, key, headers, _header_makers())
        if partition is not None and (type(partition) is not int or not 0 <= partition < 1 << 31):
            raise InvalidOption(f"partition= is a number from 0, of at most 31 bits, not {partition!r}")
        row = {
            "topic": encoded.topic,
            "key": encoded.key,
            "value": encoded.value,
            "headers": _packed(encoded.headers),
            "partition": partition,
            "timestamp": None if timestamp is None else milliseconds(timestamp, "timestamp="),
            "state": WAITING,
            "changed_at": int(time.time() * 1000),
        }
        session = getattr(to, "sync_session", to)
        if isinstance(session, orm.scoped_session):
            session = session()
        if isinstance(session, sa.Connection):
            self._store(session, row)
        elif not isinstance(session, orm.Session):
            text = f"an outbox sends to a Session, AsyncSession or Connection of SQLAlchemy, not {type(to).__name__}"
            raise InvalidOption(text)
        elif session.get_bind(self._row_class).dialect.is_async and not in_greenlet():
            self._add(session, row)
        else:
            connection = session.connection(bind_arguments={"mapper": self._row_class})
            _listen(session)
            _require_one_database(session, connection)
            self._store(connection, row)

    def _store(self, connection: sa.Connection, row: dict[str, Any]) -> None:
        self._require_transaction(connection)
        statement, row = self._statement(connection.dialect, row)
        connection.execute(statement, row)

    def _require_transaction(self, connection: sa.Connection) -> None:
        if commits_each_statement(connection):
            raise InvalidOption(
                f"outbox {self.name!r} needs a transaction, but this connection commits each statement by itself"
                " (AUTOCOMMIT): a message would be published although its transaction is rolled back"
            )

    def _check_flushed(self, _: object, connection: sa.Connection, made: _PendingRow) -> None:
        self._require_transaction(connection)
        _require_one_database(orm.object_session(made), connection)  # type: ignore[arg-type]

    def _add(self, session: Any, row: Mapping[str, Any]) -> None:
        """Let a session store a row when it is flushed, and refuse a commit if the session has forgotten the row."""
        dialect = session.get_bind(self._row_class).dialect
        if row["key"] is not None and dialect.name == "postgresql":
            row = {**row, "id": self._id_in_order(dialect, row)}
        made = self._row_class()
        for name, column in row.items():
            setattr(made, name, column)
        _listen(session)
        session.add(made)

    def _statement(self, dialect: sa.Dialect, row: dict[str, Any]) -> tuple[sa.Insert, dict[str, Any]]:
        """Return the statement that stores a row, and its values.

        On PostgreSQL sequences do not follow the order of commits, so a row of a key takes its id only after older
        transactions of the key have ended. SQLite has one writing transaction at a time.
        """
        if row["key"] is None or dialect.name != "postgresql":
            return self._insert, row
        return self._insert_in_order, row | {"lock": self._lock(row)}

    def _lock(self, row: Mapping[str, Any]) -> int:
        """Return the number of the advisory lock for the key of a row."""
        lock = hashlib.blake2b(repr((self.rows.fullname, row["topic"], row["key"])).encode(), digest_size=8).digest()
        return int.from_bytes(lock, "big", signed=True)

    def _id_in_order(self, dialect: sa.Dialect, row: Mapping[str, Any]) -> sa.ColumnElement[int]:
        """Return an expression for a row's id: it takes the lock of the row's key, and only then the next number."""
        locked = sa.func.pg_advisory_xact_lock(self._lock(row))
        table = dialect.identifier_preparer.format_table(self.rows)
        sequence = sa.func.pg_get_serial_sequence(table, "id")
        return sa.case((sa.cast(locked, sa.Text).is_not(None), sa.func.nextval(sequence)))


class _PendingRow:
    """Base of the objects by which an `AsyncSession` stores rows when it is flushed."""


def _require_one_database(session: orm.Session, connection: sa.Connection) -> None:
    """Raise `InvalidOption` if the session's transaction includes a second database, or comes to (hazard H124)."""
    session.info[Outbox] = connection.engine.pool
    root: Any = session.get_transaction()
    for used, *_ in root._connections.values():  # SQLAlchemy has no public name for them
        _refuse_second_database(session, root, used)


def _refuse_second_database(session: orm.Session, _: object, connection: sa.Connection) -> None:
    if connection.engine.pool is not session.info.get(Outbox, connection.engine.pool):
        raise InvalidOption(
            "the session has sent to an outbox in a transaction in two databases, whose commits are two: use a session"
            " for each"
        )


def _note_forgotten(session: orm.Session, made: object) -> None:
    if isinstance(made, _PendingRow):
        session.info.setdefault(_PendingRow, session.get_nested_transaction() or session.get_transaction())


def _end_transaction(session: orm.Session, transaction: orm.SessionTransaction) -> None:
    if transaction.parent is None or session.info.get(_PendingRow) is transaction:  # not at the end of a flush
        session.info.pop(_PendingRow, None)  # a rollback, also of a savepoint, forgets rows rightly
    if transaction.parent is None:
        session.info.pop(Outbox, None)


def _refuse_commit(session: orm.Session) -> None:
    if _PendingRow in session.info:
        text = "the session was told to forget a message of an outbox (expunge) before it was flushed, so it does not"
        raise InvalidState(text + " commit: flush before, or send inside run_sync")


_LISTENERS: dict[str, Any] = {
    "after_begin": _refuse_second_database,
    "pending_to_transient": _note_forgotten,
    "after_transaction_end": _end_transaction,
    "before_commit": _refuse_commit,
}


def _listen(session: orm.Session) -> None:
    for event, listener in _LISTENERS.items():
        if not sa.event.contains(session, event, listener):
            sa.event.listen(session, event, listener)


class DamagedRow(StorageFailed):
    """The row of an outbox does not have what `Outbox.send` has written."""


class OutboxRow(NamedTuple):
    """One message of an outbox, as it is stored; see `unpacked_headers`."""

    id: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: str | None
    partition: int | None
    timestamp: int | None


def unpacked_headers(text: str | None) -> RawHeaders:
    """Return the headers that a row stores as the JSON `text`. Raise `DamagedRow` if the text is damaged."""
    try:
        pairs = json.loads(text) if text is not None else []
        headers = tuple((str(name), None if value is None else value.encode("latin-1")) for name, value in pairs)
        "".join(name for name, _ in headers).encode()  # JSON may have halves of characters
        return headers
    except (ValueError, TypeError, AttributeError, RecursionError):  # the error's text would quote the headers
        raise DamagedRow("the headers of a message in the outbox are damaged") from None


def _packed(headers: RawHeaders) -> str | None:
    """Return headers as JSON, with each value's bytes as Latin-1 characters; None if there are none."""
    if not headers:
        return None
    return json.dumps([(name, None if value is None else value.decode("latin-1")) for name, value in headers])


def _insert_in_order(rows: sa.Table) -> sa.Insert:
    """Return PostgreSQL's statement that takes a lock, and then inserts a row.

    The lock is taken in the FROM clause of the inserted SELECT, so the row takes its id from the sequence after that.
    """
    columns = [column for column in rows.c if column.name not in ("id", "reason")]
    values = [sa.cast(sa.bindparam(column.name, type_=column.type), column.type) for column in columns]
    locked = sa.func.pg_advisory_xact_lock(sa.bindparam("lock", type_=sa.BigInteger())).alias("locked")
    return sa.insert(rows).from_select(columns, sa.select(*values).select_from(locked))


def _rows_table(name: str, metadata: sa.MetaData) -> sa.Table:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite numbers only rows of INTEGER PRIMARY KEY
    text = _long_text()
    return sa.Table(
        f"{name}_outbox",
        metadata,
        sa.Column("id", number, primary_key=True, autoincrement=True),
        sa.Column("topic", sa.String(249), nullable=False),
        sa.Column("key", sa.LargeBinary(_LARGEST_VALUE)),
        sa.Column("value", sa.LargeBinary(_LARGEST_VALUE)),
        sa.Column("headers", text),
        sa.Column("partition", sa.Integer),
        sa.Column("timestamp", sa.BigInteger),  # of the message, in milliseconds since 1970
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),  # when `state` was set, in milliseconds since 1970
        sa.Column("reason", text),  # why a parked row could not be published
        sa.Index(f"{name}_outbox_state", "state", "id"),
        sqlite_autoincrement=True,  # SQLite would use the numbers of deleted rows again (hazard H123)
        **EXACT_TEXT,
    )


def _long_text() -> sa.types.TypeEngine[str]:
    """Return the type of texts that may be long: MariaDB's TEXT has 64 KiB only."""
    return sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def _state_table(name: str, metadata: sa.MetaData) -> sa.Table:
    """Return the table with the one row that says which batch of rows is being published."""
    return sa.Table(
        f"{name}_outbox_relay",
        metadata,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # always 1
        sa.Column("version", sa.BigInteger, nullable=False),  # incremented by each change
        sa.Column("relay", sa.String(255)),  # the relay that made the last change, unless it has ended
        sa.Column("token", _long_text()),  # of the transaction with the batch; None if there is no batch
        sa.Column("batch", _long_text()),  # the ids of the batch's rows, as ranges: "1-3,7"
        sa.Column("parked", sa.BigInteger, nullable=False),  # the number of parked rows
        **EXACT_TEXT,
    )
