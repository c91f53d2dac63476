"""The owner of a transactional id, which has opened it last, and the rows that prove writers' last commits."""

from __future__ import annotations

import secrets
import sqlite3

from txnbridge.errors import Fenced, OutcomeUnknown, TransactionAborted, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_embedded.client.store import FileConnection, Store, now_ms
from txnbridge_embedded.outcome import ending


class Owner:
    """The process that has opened a transactional id; a newer owner raises the id's `epoch` in the file.

    `epoch` is None for an id that the bridge generated, because no other process opens such an id.
    """

    def __init__(self, name: str, host: str, epoch: int | None) -> None:
        self.host = host
        self.name = None if epoch is None else name  # the id in the owner's rows; None for a generated id
        self._epoch = epoch

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise `Fenced` if a newer owner has opened the transactional id."""
        if self.name is None:
            return
        epoch, host = connection.execute("SELECT epoch, host FROM identities WHERE name = ?", (self.name,)).fetchone()
        if epoch != self._epoch:
            raise Fenced(
                f"transactional id {self.name!r} was opened by a newer owner, {host}; this one must stop", newer=host
            )


def take_over(connection: sqlite3.Connection, name: str, host: str) -> int:
    """Become the owner of a transactional id, in the caller's write transaction; return the id's new epoch.

    Older owners can no longer commit, and their open transactions are aborted.
    """
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
        ending.mark_aborted(connection, number, f"its id was opened by {host}")
    return int(epoch)


class WriterRow:
    """A writer's row in the table `writers`, with the number of the writer's last committed transaction.

    A commit succeeds only while the row exists and is not retired. A newer owner of the id retires the row, or the
    writer itself after an unclear commit. From then on the number of the last commit never changes.
    """

    def __init__(self, owner: Owner) -> None:
        self.id = secrets.token_hex(8)
        self.last = 0
        self.in_token = False  # True if a token may name this row, which then must not be deleted
        self.retired_by_other = False  # True if another process has retired or deleted the row
        self._owner = owner

    def add(self, connection: sqlite3.Connection) -> None:
        """Insert the row, in the caller's write transaction."""
        connection.execute(
            "INSERT INTO writers(id, identity, used_at) VALUES (?, ?, ?)", (self.id, self._owner.name, now_ms())
        )

    def record_commit(self, connection: sqlite3.Connection) -> None:
        """Store the next transaction's number as committed, in the write transaction that commits its messages.

        If the row is retired or missing, raise `Fenced` if the id has a newer owner, or else `TransactionAborted`.
        """
        found = connection.execute(
            "UPDATE writers SET last = ?, used_at = max(used_at, ?) WHERE id = ? AND retired = 0",
            (self.last + 1, now_ms(), self.id),
        )
        if not found.rowcount:
            self.retired_by_other = True
            self._owner.check(connection)
            raise TransactionAborted(
                "this writer's row was retired or deleted: the writer was idle for long, or another process's clock is"
                " ahead; run it again"
            )

    def retire(self, connection: sqlite3.Connection) -> int:
        """Retire the row, in the caller's write transaction, to stop commits; return the number of the last commit."""
        # The statement writes even if the row was never stored: `was_committed` needs a commit after the failed one.
        ((last,),) = connection.execute(
            "INSERT INTO writers(id, identity, used_at, retired) VALUES (?, ?, ?, 1)"
            " ON CONFLICT(id) DO UPDATE SET retired = 1 RETURNING last",
            (self.id, self._owner.name, now_ms()),
        ).fetchall()
        return int(last)

    def was_committed(self, store: Store, connection: FileConnection, deadline: Deadline) -> bool:
        """Return whether a commit during which SQLite failed took effect. `connection` must be new.

        The row is retired by another commit, which overwrites the pages of the failed commit in the write-ahead log. So
        the failed commit cannot take effect later. Raise `OutcomeUnknown` if the row cannot be retired.
        """
        try:
            with store.writing(connection, deadline, "looking up the outcome of the commit"):
                return self.retire(connection) > self.last
        except TxnBridgeError as error:
            raise OutcomeUnknown(f"looking up the outcome of the commit: {error}") from error.__cause__

    def forget(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM writers WHERE id = ?", (self.id,))
