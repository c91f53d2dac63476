"""Who writes: the owner of an id, and each writer's evidence of what it committed last."""

from __future__ import annotations

import secrets
import sqlite3

from txnbridge.errors import Fenced, OutcomeUnknown, TransactionAborted, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_embedded.client.store import Connection, Store, now_ms
from txnbridge_embedded.outcome import outcome


class Owner:
    """An identity as one bridge opened it; `epoch` is None if nobody else can hold the name."""

    def __init__(self, name: str, host: str, epoch: int | None) -> None:
        self.host = host
        self.name = None if epoch is None else name  # to file things under
        self._epoch = epoch

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise `Fenced` if a newer owner has opened the id."""
        if self.name is None:
            return
        epoch, host = connection.execute("SELECT epoch, host FROM identities WHERE name = ?", (self.name,)).fetchone()
        if epoch != self._epoch:
            raise Fenced(
                f"transactional id {self.name!r} was opened by a newer owner, {host}; this one must stop", newer=host
            )


def take_over(connection: sqlite3.Connection, name: str, host: str) -> int:
    """Become the newest owner of an id, inside a write transaction: nothing older commits any more; its epoch."""
    ((epoch,),) = connection.execute(
        "INSERT INTO identities VALUES (?, 1, ?, ?) ON CONFLICT(name) DO UPDATE SET epoch = epoch + 1,"
        " host = excluded.host, opened_at = excluded.opened_at RETURNING epoch",
        (name, host, now_ms()),
    ).fetchall()
    connection.execute("UPDATE writers SET retired = 1 WHERE identity = ? AND retired = 0", (name,))
    left_open = connection.execute(
        "SELECT number FROM transactions WHERE ended_at IS NULL AND state = 'open' AND identity = ?", (name,)
    ).fetchall()
    for (number,) in left_open:
        outcome.mark_aborted(connection, number, f"its id was opened by {host}")
    return int(epoch)


class Instance:
    """A row of `writers`: it numbers one writer's transactions and remembers the last that was committed.

    A commit counts only while the row is there and not retired. So whoever retires it (a newer owner of the id, or the
    writer itself after any doubt) knows from `last` what happened, and that nothing more can.
    """

    def __init__(self, owner: Owner) -> None:
        self.id = secrets.token_hex(8)
        self.last = 0
        self.told = False  # a token may name this instance, so its row has to outlive it
        self.dead = False  # others have retired or forgotten it
        self._owner = owner

    def add(self, connection: sqlite3.Connection) -> None:
        """Enter it, inside a write transaction."""
        connection.execute(
            "INSERT INTO writers(id, identity, used_at) VALUES (?, ?, ?)", (self.id, self._owner.name, now_ms())
        )

    def claim(self, connection: sqlite3.Connection) -> None:
        """Note the next transaction as committed, inside the write transaction that commits it.

        Raises `Fenced` or `TransactionAborted` if this instance may commit no more.
        """
        found = connection.execute(
            "UPDATE writers SET last = ?, used_at = max(used_at, ?) WHERE id = ? AND retired = 0",
            (self.last + 1, now_ms(), self.id),
        )
        if not found.rowcount:
            self.dead = True
            self._owner.check(connection)
            raise TransactionAborted(
                "this writer was taken for dead: it was silent for long, or somebody's clock is ahead; run it again"
            )

    def retire(self, connection: sqlite3.Connection) -> int:
        """Let it commit nothing more, inside a write transaction; returns the last that it did commit."""
        # It always writes, also for a row that was never stored: see `settle`.
        ((last,),) = connection.execute(
            "INSERT INTO writers(id, identity, used_at, retired) VALUES (?, ?, ?, 1)"
            " ON CONFLICT(id) DO UPDATE SET retired = 1 RETURNING last",
            (self.id, self._owner.name, now_ms()),
        ).fetchall()
        return int(last)

    def settle(self, store: Store, connection: Connection, deadline: Deadline) -> bool:
        """Whether a commit happened in whose middle SQLite failed; `connection` is a new one.

        Retiring is a commit of its own. Once it is done the failed one cannot come to life any more: whatever it left
        in the log, behind the last commit that SQLite knows, has been written over. Raises `OutcomeUnknown`.
        """
        try:
            with store.writing(connection, deadline, "looking what became of the commit"):
                return self.retire(connection) > self.last
        except TxnBridgeError as error:
            raise OutcomeUnknown(f"looking what became of the commit: {error}") from error.__cause__

    def forget(self, connection: sqlite3.Connection) -> None:
        """Remove the row of a writer that nobody will ever ask about."""
        connection.execute("DELETE FROM writers WHERE id = ?", (self.id,))
