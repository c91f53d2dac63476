"""`Relay`: publishes the rows of an outbox exactly once.

A relay prepares a broker transaction with a batch of rows, and then stores the transaction's token and the batch in the
outbox's state, by compare-and-set. This database commit decides: only the transaction of a stored token is committed,
and the batch's rows are read again only after the broker has answered that this transaction is aborted. So it does not
matter when a relay dies, or how many relays work at once. A relay ends a stored batch, its own or another's, before it
prepares the next one, so that rows are published in order.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypedDict

import sqlalchemy as sa

from txnbridge import errors
from txnbridge._admin import Admin
from txnbridge._base.connection import Connection, random_name
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.service import Service
from txnbridge._base.token import Outcome
from txnbridge._write.transaction import Transaction
from txnbridge.capabilities import Capabilities, Capability
from txnbridge.sql._database import EXACT_TEXT, Database, insert_missing
from txnbridge.sql.outbox import PARKED, PUBLISHED, WAITING, DamagedRow, Outbox, OutboxRow, unpacked_headers

_log = logging.getLogger("txnbridge")

# The pauses before the next attempt after an error: each is twice as long, from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0
# The errors by which a broker, or what is stored, refuses a message for ever.
_REFUSALS = (errors.InvalidOption, errors.NotFound, errors.NotSupported, DamagedRow)
# A message that could not be delivered so many times, although its broker answers, is parked.
_DELIVERIES = 3
# The size of one batch, in bytes of keys, values and headers, without its last row.
_BATCH_BYTES = 16_000_000
# After a look into the database that took long and brought nothing to publish, the relay rests for this many times as
# long, but not longer than the seconds.
_REST, _LONGEST_REST = 9, 5.0
# The number of ranges of ids in one statement: some databases limit the depth of an expression.
_RANGES = 200
# The number of rows that are taken from the driver at a time, because single rows take longer.
_ROWS = 100
# The deadline of a look into the database: short, because a relay that shall stop waits for it.
_LOOK_SECONDS = 5.0
# The interval at which published rows that are kept are looked at.
_PURGE_SECONDS = 10.0
_PURGE_ROWS = 10_000  # the most of them that one statement deletes, so that it fits its deadline


class _StoredText(sa.TypeDecorator[str]):
    """Text that is read as bytes. What is not UTF-8 becomes halves of characters, with which no broker takes it."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, _: sa.Dialect) -> str | None:
        return value if value is None else value.decode(errors="surrogateescape")


class OutboxState(NamedTuple):
    """The state of an outbox, a row of a table: the batch that is being published, its token, and the working relay."""

    version: int
    relay: str | None
    token: str | None
    batch: str | None
    parked: int


class RelayStats(NamedTuple):
    """Counts of a relay's work since it was made."""

    published: int = 0
    parked: int = 0
    batches: int = 0
    aborted: int = 0  # batches whose transaction was aborted, and whose rows were read again


Waiting = tuple[OutboxState, list[OutboxRow]]  # the state, and rows that wait; no rows while there is a batch


class OutboxStore:
    """The database side of a relay: reads and changes the tables of an outbox, each call in one transaction."""

    def __init__(self, outbox: Outbox, database: str | sa.Engine) -> None:
        self._rows, self._state, self._name = outbox.rows, outbox.state, outbox.name
        self._clusters = sa.Table(  # to which broker's cluster the messages of each outbox go
            "txnbridge_outbox_clusters",
            sa.MetaData(schema=self._state.schema),
            sa.Column("outbox", sa.String(40), primary_key=True),
            sa.Column("cluster", sa.String(255), nullable=False),
            **EXACT_TEXT,
        )
        columns = [self._state.c[name] for name in OutboxState._fields]
        self._select_state = sa.select(*columns)
        self._look = sa.select(*columns, sa.exists().where(self._rows.c.state == WAITING).select_from(self._rows))
        self._what = f"the outbox {outbox.name!r}"
        self._reading = f"reading {self._what}"
        self._database = Database(database, self._what)
        self._select_rows = sa.select(*self._columns(OutboxRow))

    def _columns(self, row: type[OutboxRow | ParkedRow]) -> list[sa.ColumnElement[Any]]:
        """Return the columns of a row, on SQLite as bytes: its driver stops at a text that is not UTF-8."""
        is_sqlite = self._database.engine.dialect.name == "sqlite"
        types = {sa.Text: _StoredText, sa.String: _StoredText, sa.LargeBinary: sa.LargeBinary} if is_sqlite else {}
        columns = (self._rows.c[name] for name in row._fields)
        return [sa.cast(each, types[type(each.type)]) if type(each.type) in types else each for each in columns]

    def close(self) -> None:
        self._database.close()

    def open(self, cluster: str, deadline: Deadline) -> None:
        """Create missing tables and the outbox's state. Raise `InvalidOption` if its rows go to another cluster."""

        def insert(connection: sa.Connection) -> None:
            insert_missing(connection, self._state, number=1, version=0, parked=0)
            insert_missing(connection, self._clusters, outbox=self._name, cluster=cluster)

        trial = self._rows, "topic", {"state": PUBLISHED, "changed_at": 0}
        self._database.open((self._rows, self._state, self._clusters), [trial], deadline)
        self._database.ask(f"opening {self._what}", insert, deadline)
        mine = sa.select(self._clusters.c.cluster).where(self._clusters.c.outbox == self._name)
        if (known := self._database.ask(f"opening {self._what}", lambda c: c.scalar(mine), deadline)) != cluster:
            raise errors.InvalidOption(
                f"{self._what} is published on the cluster {known}, and this bridge is connected to another, {cluster}:"
                f" connect to the first, or delete the row of {self._clusters.name} to publish what waits on the second"
            )

    def exists(self, deadline: Deadline) -> bool:
        name = self._database.engine.url.database or ":memory:"
        is_file = self._database.engine.dialect.name == "sqlite" and not name.startswith((":memory:", "file:"))
        if is_file and not os.path.exists(name):
            return False  # a connection would create the file

        def look(connection: sa.Connection) -> bool:
            made = sa.inspect(connection).has_table(self._state.name, schema=self._state.schema)
            return made and connection.scalar(sa.select(self._state.c.number)) is not None

        return self._database.ask(self._reading, look, deadline)

    def state(self, deadline: Deadline) -> OutboxState:
        return OutboxState(*self._database.ask(self._reading, lambda c: c.execute(self._select_state).one(), deadline))

    def waiting(self, limit: int, ordered: bool, deadline: Deadline) -> Waiting:
        """Return the outbox's state, and the first waiting rows; if `ordered`, none whose key has a refused row."""
        return self._database.ask(self._reading, lambda c: self._read_waiting(c, limit, ordered), deadline)

    def _read_waiting(self, connection: sa.Connection, limit: int, ordered: bool) -> Waiting:
        *columns, some_wait = connection.execute(self._look).one()
        state = OutboxState(*columns)
        if state.token is not None or not some_wait:
            return state, []
        r = self._rows.c
        sizes = (sa.func.coalesce(sa.func.length(column), 0) for column in (r.key, r.value, r.headers))
        first = sa.select(r.id, sum(sizes, sa.literal_column("0")).label("size"))
        first = first.where(r.state == WAITING).order_by(r.id)
        if ordered and state.parked:
            first = self._without_held(first, connection.dialect)
        found = first.limit(limit).subquery().c
        before = sa.func.sum(found.size).over(order_by=found.id, rows=(None, 0)) - found.size
        sized = sa.select(found.id, before.label("before")).subquery()
        wanted = self._select_rows.join(sized, sized.c.id == r.id).where(sized.c.before < _BATCH_BYTES)
        with connection.execute(wanted.order_by(r.id)) as rows:
            return state, list(map(OutboxRow._make, chain.from_iterable(rows.partitions(_ROWS))))

    def _without_held(self, rows: sa.Select[Any], dialect: sa.Dialect) -> sa.Select[Any]:
        """Return the statement `rows` without the rows that have the topic and key of a refused (parked) row.

        Each form lets its database make a table of these topics and keys once, and look each row up in it: SQLite reads
        the whole list of NOT IN for each row, MariaDB makes such a table only for NOT IN, and only of short texts.
        """
        parked, r = self._rows.alias().c, self._rows.c
        of_parked = (parked.state == PARKED) & parked.key.is_not(None)
        if dialect.name in ("mysql", "mariadb"):
            key, parked_key = (sa.func.coalesce(sa.func.sha2(each, 256), "") for each in (r.key, parked.key))
            keys = sa.select(parked.topic, parked_key).where(of_parked)
            return rows.where(r.key.is_(None) | sa.tuple_(r.topic, key).not_in(keys))
        held = sa.select(parked.topic, parked.key).where(of_parked).distinct().subquery()
        same = (held.c.topic == r.topic) & (held.c.key == r.key)
        return rows.outerjoin(held, same).where(held.c.topic.is_(None))

    def count(self, deadline: Deadline) -> int:
        """Return how many rows wait."""
        counted = sa.select(sa.func.count()).select_from(self._rows).where(self._rows.c.state == WAITING)
        return self._database.ask(self._reading, lambda c: int(c.scalar(counted) or 0), deadline)

    def store_batch(self, version: int, relay: str, token: str, batch: str, deadline: Deadline) -> bool:
        """Store a batch and its token, unless the state has changed since `version`. Return whether it is stored.

        Raise `OutcomeUnknown` if that is not known.
        """
        same = self._state.c.version == version
        change = functools.partial(self._set_state, where=same, relay=relay, token=token, batch=batch)
        return self._database.change(f"storing a batch of {self._what}", change, deadline)

    def end_batch(
        self, token: str, batch: str, relay: str | None, keep: bool, limit: int, ordered: bool, deadline: Deadline
    ) -> Waiting | None:
        """Delete the rows of a published batch, or with `keep` only mark them; return the next waiting rows.

        Return None if another relay has ended the batch.
        """

        def change(connection: sa.Connection) -> Waiting | None:
            if not self._set_state(connection, self._state.c.token == token, relay, token=None, batch=None):
                return None
            for ids in self._within(batch):
                kept = sa.update(self._rows).values(state=PUBLISHED, changed_at=_now())
                connection.execute((kept if keep else sa.delete(self._rows)).where(ids))
            return self._read_waiting(connection, limit, ordered)

        return self._database.ask(f"ending a batch of {self._what}", change, deadline)

    def withdraw_batch(self, token: str, relay: str | None, deadline: Deadline) -> None:
        """Forget the batch stored with `token`, whose transaction was aborted, so that its rows are read again."""
        same = self._state.c.token == token
        change = functools.partial(self._set_state, where=same, relay=relay, token=None, batch=None)
        self._database.ask(f"withdrawing a batch of {self._what}", change, deadline)

    def park(self, version: int, row: int, reason: str, relay: str, deadline: Deadline) -> bool:
        """Park a refused row (set it aside), unless the outbox has changed since `version`; return whether so."""

        def change(connection: sa.Connection) -> bool:
            same = self._state.c.version == version
            if not self._set_state(connection, same, relay, parked=self._state.c.parked + 1):
                return False
            parked = sa.update(self._rows).where(self._rows.c.id == row)
            connection.execute(parked.values(state=PARKED, reason=reason, changed_at=_now()))
            return True

        return self._database.change(f"parking a row of {self._what}", change, deadline)

    def leave(self, relay: str, deadline: Deadline) -> None:
        """Stop being the relay that publishes, so that another relay need not wait before it takes over."""
        change = functools.partial(self._set_state, where=self._state.c.relay == relay, relay=None)
        self._database.ask(f"leaving {self._what}", change, deadline)

    def purge(self, seconds: float, deadline: Deadline) -> bool:
        """Delete the first rows that were published more than `seconds` ago. Return whether more are left."""
        r = self._rows.c
        old = (r.state == PUBLISHED) & (r.changed_at < _now() - int(seconds * 1000))

        def remove_some(connection: sa.Connection) -> bool:
            end = connection.scalar(sa.select(r.id).where(old).order_by(r.id).offset(_PURGE_ROWS).limit(1))
            connection.execute(sa.delete(self._rows).where(old if end is None else old & (r.id < end)))
            return end is not None

        return self._database.ask(f"deleting published rows of {self._what}", remove_some, deadline)

    def parked(self, deadline: Deadline) -> list[ParkedRow]:
        """Return the rows that the broker refused and an administrator has to judge (parked), without their values."""
        wanted = sa.select(*self._columns(ParkedRow)).where(self._rows.c.state == PARKED).order_by(self._rows.c.id)
        return self._database.ask(self._reading, lambda c: [ParkedRow(*row) for row in c.execute(wanted)], deadline)

    def unpark(self, rows: Sequence[int] | None, delete: bool, deadline: Deadline) -> int:
        """Let refused (parked) rows wait again, or delete them; all of them if `rows` is None. Return their number."""

        def change(connection: sa.Connection) -> int:
            chosen = (self._rows.c.state == PARKED) & (sa.true() if rows is None else self._rows.c.id.in_(rows))
            # The state's row is changed first, as everywhere: its lock keeps two changes apart.
            self._set_state(connection, sa.true(), self._state.c.relay)
            again = sa.update(self._rows).values(state=WAITING, reason=None, changed_at=_now())
            done = connection.execute((sa.delete(self._rows) if delete else again).where(chosen)).rowcount
            self._set_state(connection, sa.true(), self._state.c.relay, parked=self._state.c.parked - done)
            return done

        return self._database.ask(f"changing parked rows of {self._what}", change, deadline)

    def _set_state(self, connection: sa.Connection, where: object, relay: object, **values: object) -> bool:
        changed = sa.update(self._state).where(where)  # type: ignore[arg-type]
        values |= {"version": self._state.c.version + 1, "relay": relay}
        return connection.execute(changed.values(**values)).rowcount == 1

    def _within(self, batch: str) -> Iterable[sa.ColumnElement[bool]]:
        """Return the conditions that choose the rows of a batch, whose ids the text `batch` has as ranges."""
        ranges = _parsed(batch)
        for at in range(0, len(ranges), _RANGES):
            yield sa.or_(*(self._rows.c.id.between(*each) for each in ranges[at : at + _RANGES]))


class ParkedRow(NamedTuple):
    """A row that could not be published. `changed_at` is when it was parked, in milliseconds since 1970."""

    id: int
    topic: str
    key: bytes | None
    changed_at: int
    reason: str


class PreparingBridge(Protocol):
    """The part of `Bridge` that a relay uses."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def admin(self) -> Admin: ...

    def transaction(self, *, prepare: bool, hold: float | None) -> Transaction: ...

    def commit(self, token: str) -> Outcome: ...

    def abort(self, token: str) -> Outcome: ...


class RelaySettings(TypedDict, total=False):
    """The settings of `Bridge.relay`."""

    ordered: bool
    batch: int
    keep: float | None
    poll: float
    hold: float
    takeover: float
    stop_timeout: float


class Relay(Service):
    """Publishes an outbox's rows exactly once: `with bridge.relay(outbox, engine):`, or `run`. Made by `Bridge.relay`.

    Several relays may run, in any processes: one works, and another takes over if that one stands still for `takeover`
    seconds. A row that the broker refuses is parked with its reason, and with `ordered` it holds back the later rows of
    its topic and key. `batch` is the most rows in one transaction, `keep` how many seconds published rows stay in the
    table, `poll` the pause between two looks for new rows. If a relay dies before it has stored its batch, the batch
    holds back readers until the transaction's deadline, by the bridge's timeout, and `hold` seconds more have passed.
    """

    def __init__(
        self,
        connection: Connection,
        bridge: PreparingBridge,
        outbox: Outbox,
        database: str | sa.Engine,
        *,
        ordered: bool = True,
        batch: int = 10_000,
        keep: float | None = None,
        poll: float = 0.025,
        hold: float = 10.0,
        takeover: float = 5.0,
        stop_timeout: float = 30.0,
    ) -> None:
        if not isinstance(outbox, Outbox):
            raise errors.InvalidOption(f"relay() takes an Outbox, not {type(outbox).__name__}")
        if type(batch) is not int or batch < 1:
            raise errors.InvalidOption(f"batch= is the most rows in one transaction, from 1, not {batch!r}")
        if keep is not None:
            check_seconds("keep", keep)
        check_seconds("poll", poll, above_0=True)
        check_seconds("hold", hold)
        check_seconds("takeover", takeover)
        bridge.capabilities.require(Capability.PREPARE)
        super().__init__(connection, f"relay of {outbox.name}", stop_timeout)
        self._bridge = bridge
        self._store = OutboxStore(outbox, database)
        self._ordered = ordered
        self._batch = batch
        self._keep = keep
        self._poll = poll
        self._hold = hold
        self._takeover = takeover
        self._limit = batch  # smaller after a refusal, to find the row that is refused
        self._failed_deliveries = 0  # of a batch of one row, in a row
        self._relay = f"{os.uname().nodename} {os.getpid()} {random_name(4)}"
        self._waiting: Waiting | None = None  # what was read when the last batch was ended
        self._seen = (-1, 0.0)  # the last version of the state, and when it was seen first
        self._failing_since: float | None = None
        self._purged = 0.0
        self.stats: RelayStats = RelayStats()
        self._add(published=0, parked=0)

    @property
    def healthy(self) -> bool:
        """True if the relay runs, and broker and database have answered within the bridge's timeout."""
        since = self._failing_since
        return self._runs and (since is None or time.monotonic() - since <= self._connection.timeout)

    @property
    def lag(self) -> int:
        """The number of rows that wait, without refused (parked) ones. It is counted in the database."""
        return self._store.count(self._connection.deadline())

    # --- running ------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        pause = _FIRST_PAUSE
        opened = False
        while not self._stop.asked and not self._connection.closed:
            try:
                if opened:
                    worked = self._work()
                else:
                    self._store.open(self._connection.broker.cluster, self._look_deadline())
                    worked = opened = True
            except (errors.EvidenceLost, errors.InvalidToken) as error:
                self._failing_since = self._failing_since or float("-inf")
                _log.error("the relay stands still until `txnbridge relay end-batch` is called: %s", error)
                self._stop.sleep(_LAST_PAUSE)
            except errors.Fenced:
                raise
            except errors.TxnBridgeError as error:
                if self._connection.closed:
                    return
                # A database that is not suitable stays so.
                if not opened and isinstance(error, errors.InvalidOption | errors.NotSupported):
                    raise
                self._failing_since = self._failing_since or time.monotonic()
                _log.warning("the %s retries in %.1f s: %s", self._name, pause, error)
                self._stop.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            else:
                pause, self._failing_since = _FIRST_PAUSE, None
                if not worked:
                    self._stop.sleep(self._poll)

    def _leave(self) -> None:
        with suppress(errors.TxnBridgeError):
            self._store.leave(self._relay, Deadline(1.0))
        self._store.close()

    def _work(self) -> bool:
        """End the stored batch, or publish a new one. Return False if there is nothing to do for this relay."""
        waiting, self._waiting = self._waiting, None
        began = time.monotonic()
        with self._fewer_if_slow():
            state, rows = waiting or self._store.waiting(self._limit, self._ordered, self._look_deadline())
        if state.token is None and not rows:
            self._seen = (-1, 0.0)
            if self._keep is not None and time.monotonic() > self._purged + _PURGE_SECONDS:
                if self._store.purge(self._keep, self._connection.deadline()):
                    return True
                self._purged = time.monotonic()
            self._stop.sleep(min(_REST * (time.monotonic() - began), _LONGEST_REST))
            return False
        if not self._may_work(state):
            return False
        if state.token is not None:
            self._end_batch(state.token, state.batch or "")
        else:
            self._publish(state.version, rows)
        return True

    @contextmanager
    def _fewer_if_slow(self) -> Iterator[None]:
        """Read fewer rows from the next look on if, in the block, the database or the network is too slow."""
        try:
            yield
        except errors.DeadlineExceeded:
            self._limit = max(1, self._limit // 2)
            raise

    def _look_deadline(self) -> Deadline:
        timeout = self._connection.timeout  # for the one row that has taken too long before
        return Deadline(timeout if self._limit == 1 else min(_LOOK_SECONDS, timeout))

    def _may_work(self, state: OutboxState) -> bool:
        """Return whether no other relay works. The time is this process's own, so a wrong clock hinders nobody."""
        if state.relay in (None, self._relay):
            return True
        now = time.monotonic()
        if state.version != self._seen[0]:
            self._seen = state.version, now
        return now - self._seen[1] > self._takeover

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _publish(self, version: int, rows: list[OutboxRow]) -> None:
        """Prepare a transaction with these rows, store it as the batch, and commit it."""
        txn = self._bridge.transaction(prepare=True, hold=self._hold)  # an error of this call refuses no row
        try:
            with txn:
                for row in rows:
                    txn.send(
                        row.topic,
                        row.value,
                        key=row.key,
                        headers=unpacked_headers(row.headers) or None,
                        partition=row.partition,
                        timestamp=row.timestamp,
                    )
        except errors.TxnBridgeError as error:
            self._limit = max(1, len(rows) // 2)  # to find the row that is refused, or because a batch takes too long
            if not isinstance(error, (*_REFUSALS, errors.DeliveryFailed)):
                raise
            if len(rows) == 1:
                self._refused(version, rows[0], error)
            return
        token, batch = str(txn.token), _ranges([row.id for row in rows])
        stored = False
        try:
            with self._connection.events.step("outbox.store", txn.id, rows=len(rows)):
                stored = self._store.store_batch(version, self._relay, token, batch, self._connection.deadline())
        finally:
            if not stored:  # another relay was faster, or the database did not answer
                self._abandon(token)
        if stored:
            self._failed_deliveries = 0
            self._limit = min(self._batch, 2 * self._limit)
            self._end_batch(token, batch)

    def _abandon(self, token: str) -> None:
        """Abort a prepared batch whose token is not stored, so that it does not hold back readers until it expires.

        That is safe even if the token is stored in the end: then the batch's rows are read again.
        """
        try:
            self._bridge.abort(token)
        except errors.TxnBridgeError as error:
            _log.warning("a batch of the %s is aborted only after its hold: %s", self._name, error)

    def _end_batch(self, token: str, batch: str) -> None:
        """Commit a stored batch by its token, delete or keep its rows, and read the next ones in the same transaction.

        If it is aborted, let its rows be read again.
        """
        outcome = self._bridge.commit(token)
        if outcome is Outcome.ABORTED:
            _log.warning("the %s publishes a batch again, because its transaction was aborted", self._name)
            self._store.withdraw_batch(token, self._relay, self._connection.deadline())
            self._add(aborted=1)
        elif outcome is not Outcome.COMMITTED:
            raise errors.OutcomeUnknown("the outcome of a batch is not known yet", token=token)
        else:
            with self._fewer_if_slow(), self._connection.events.step("outbox.delete"):
                how = self._keep is not None, self._limit, self._ordered, self._connection.deadline()
                self._waiting = self._store.end_batch(token, batch, self._relay, *how)
            if self._waiting is not None:  # no other relay has ended the batch
                self._add(published=sum(last - first + 1 for first, last in _parsed(batch)), batches=1)

    def _refused(self, version: int, row: OutboxRow, error: errors.TxnBridgeError) -> None:
        """Set a row aside that the broker refused in a transaction of its own, or raise `error` to try again."""
        if isinstance(error, errors.DeliveryFailed):
            self._failed_deliveries += 1
            with suppress(errors.AccessDenied):  # an answer, too
                self._bridge.admin.topics()  # raises an error if the broker does not answer
            if self._failed_deliveries < _DELIVERIES:
                raise error
        self._failed_deliveries = 0
        if self._store.park(version, row.id, str(error), self._relay, self._connection.deadline()):
            _log.error("the %s has parked row %d: %s", self._name, row.id, error)
            self._add(parked=1)

    def _add(self, **more: int) -> None:
        self.stats = self.stats._replace(**{name: getattr(self.stats, name) + more[name] for name in more})
        self._connection.events.emit("relay.count", "after", None, service=self._name, **more)


def _now() -> int:
    return int(time.time() * 1000)


def _ranges(ids: Sequence[int]) -> str:
    """Return ascending ids as text: "1-3,7" for 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for each in ids:
        if found and each == found[-1][1] + 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _parsed(batch: str) -> list[tuple[int, int]]:
    """Return the first and the last id of each range in a text of id ranges such as "1-3,7"."""
    parts = [(part[:1], *part[1:].partition("-")) for part in batch.split(",")]  # "-" may be the sign of a number
    try:
        return [(int(sign + first), int(last or sign + first)) for sign, first, _, last in parts]
    except ValueError:
        raise DamagedRow("the ids of the batch's rows are damaged: `txnbridge relay end-batch` ends it") from None
