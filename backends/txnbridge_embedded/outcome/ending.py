"""Ends transactions with undecided messages in the file: prepared ones, and plain ones larger than the memory.

The decision is one small write transaction. A commit is then complete. After an abort the messages are removed in small
batches, so that other writers do not wait long. If a process dies meanwhile, another process removes the rest.
"""

from __future__ import annotations

import logging
import sqlite3

from txnbridge.errors import EvidenceLost, InvalidState, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Decision, Outcome
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.client.store import CommitUnclear, FileConnection, Store, now_ms
from txnbridge_embedded.write import acks

_log = logging.getLogger("txnbridge.embedded")

# The most bytes that are removed at once, which takes some ten milliseconds; `Timing.removed_rows` has the most rows.
_REMOVED_BYTES = 8 << 20


def decide(
    store: Store,
    connection: FileConnection,
    transaction: str,
    decision: Decision,
    deadline: Deadline,
    reason: str = "aborted by its token",
) -> Outcome:
    """End a prepared transaction, and return its outcome, which another process may have decided. Safe to repeat.

    Raise `EvidenceLost` if the file has no row of the transaction, `InvalidState` if it is not prepared,
    `OutcomeUnknown` if SQLite failed during the commit, and `BrokerUnavailable` if SQLite failed before.
    """
    try:
        with (
            store.events.step("step:decide", transaction, decision=decision.value) as found,
            store.writing(connection, deadline, "ending a transaction"),
        ):
            state = found["state"] = _decide_once(connection, transaction, decision, reason)
    except CommitUnclear as error:
        raise OutcomeUnknown(f"ending transaction {transaction}: {error}") from error.__cause__
    if state == "committed":
        return Outcome.COMMITTED
    remove_aborted_messages(store, connection, deadline)
    return Outcome.ABORTED


def _decide_once(connection: FileConnection, transaction: str, decision: Decision, reason: str) -> str:
    row = connection.execute(
        "SELECT number, state, deadline_at FROM transactions WHERE id = ?", (transaction,)
    ).fetchone()
    if row is None:
        raise EvidenceLost(f"the file has no record of transaction {transaction}: it may have been deleted by age")
    number, state, deadline_at = row
    if state == "open":
        raise InvalidState(f"transaction {transaction} is open, not prepared: it can only be aborted")
    if state == "prepared":
        if deadline_at < now_ms():
            decision, reason = Decision.ABORT, "its deadline passed"
        if decision is not Decision.COMMIT:
            return mark_aborted(connection, number, reason)
        acks.commit_pending(connection, number)
        connection.execute("DELETE FROM undecided WHERE number = ?", (number,))
        connection.execute(
            "UPDATE transactions SET state = 'committed', ended_at = ? WHERE number = ?", (now_ms(), number)
        )
        return "committed"
    return str(state)


def mark_aborted(connection: sqlite3.Connection, number: int, reason: str) -> str:
    """Record in the caller's write transaction that a transaction is aborted, and return its new state, "aborting".

    `remove_aborted_messages` later removes the transaction's messages.
    """
    acks.abort_pending(connection, number)
    connection.execute("UPDATE transactions SET state = 'aborting', reason = ? WHERE number = ?", (reason, number))
    return "aborting"


def abort_open(store: Store, connection: FileConnection, transaction: str, reason: str, deadline: Deadline) -> bool:
    """Abort an open transaction of which a part is stored, and remove that part; return False if it is not open."""
    aborted = _abort_if(store, connection, transaction, "state = 'open'", reason, deadline)
    remove_aborted_messages(store, connection, deadline)
    return aborted


def _abort_if(
    store: Store, connection: FileConnection, transaction: str, condition: str, reason: str, deadline: Deadline
) -> bool:
    with (
        store.events.step("step:decide", transaction, decision="abort"),
        store.writing(connection, deadline, "aborting a transaction"),
    ):
        query = f"SELECT number FROM transactions WHERE id = ? AND {condition}"
        if (row := connection.execute(query, (transaction,)).fetchone()) is not None:
            mark_aborted(connection, row[0], reason)
    return row is not None


def end_expired(store: Store, connection: FileConnection, deadline: Deadline) -> int:
    """Abort all expired transactions, and return their number; then remove the messages of all aborted transactions."""
    # It is checked again before the abort, because a prepare that held the file's lock may have moved the deadline.
    expired = f"ended_at IS NULL AND state IN ('open', 'prepared') AND deadline_at < {now_ms()}"
    with store.reading(connection, deadline):
        found = connection.execute(f"SELECT id FROM transactions WHERE {expired}").fetchall()
    ended = [_abort_if(store, connection, id, expired, "its deadline passed", deadline) for (id,) in found]
    remove_aborted_messages(store, connection, deadline)
    return sum(ended)


def remove_aborted_messages(store: Store, connection: FileConnection, deadline: Deadline) -> None:
    """Remove the messages of aborted transactions, in batches, until the deadline. A later call removes the rest."""
    try:
        with store.reading(connection, deadline):
            aborted = connection.execute(
                "SELECT number, id FROM transactions WHERE ended_at IS NULL AND state = 'aborting'"
            ).fetchall()
        for number, transaction in aborted:
            with store.events.step("step:purge", transaction):
                while not (_remove_batch(store, connection, number, deadline) or deadline.expired):
                    pass
    except TxnBridgeError as error:
        # The abort is decided. Readers wait at the remaining messages until another call has removed them.
        _log.debug("a later call removes the rest of the aborted messages: %s", error)


def _remove_batch(store: Store, connection: FileConnection, number: int, deadline: Deadline) -> bool:
    """Remove a batch of an aborted transaction's messages; return whether none is left."""
    with store.writing(connection, deadline, "removing aborted messages"):
        row = connection.execute(
            "SELECT partition_id, first, last FROM undecided WHERE number = ? LIMIT 1", (number,)
        ).fetchone()
        if row is None:
            connection.execute("DELETE FROM transactions WHERE number = ? AND prepared = 0", (number,))
            connection.execute(
                "UPDATE transactions SET state = 'aborted', ended_at = ? WHERE number = ? AND state = 'aborting'",
                (now_ms(), number),
            )
            return True
        partition, first, last = row
        if remove_messages(store, connection, partition, first, last, aborted=True) == last:
            connection.execute("DELETE FROM undecided WHERE partition_id = ? AND first = ?", (partition, first))
        return False


def remove_messages(
    store: Store, connection: sqlite3.Connection, partition: int, first: int, last: int, *, aborted: bool = False
) -> int:
    """Remove messages from the start of a range of offsets, but at most one batch; return the last removed offset.

    With `aborted`, retention by size no longer counts these messages for the messages before them.
    """
    base, most = partition << OFFSET_BITS, store.settings.timing.removed_rows
    size, done = 0, base | last
    lengths = "coalesce(length(value), 0) + coalesce(length(key), 0) + coalesce(length(headers), 0)"
    query = f"SELECT id, {lengths} FROM messages WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
    for count, (row_id, length) in enumerate(connection.execute(query, (base | first, done, most)).fetchall(), 1):
        size += length
        if size >= _REMOVED_BYTES or count == most:
            done = row_id
            break
    connection.execute("DELETE FROM messages WHERE id BETWEEN ? AND ?", (base | first, done))
    if aborted:
        connection.execute(
            "UPDATE marks SET bytes = min(bytes + ?, (SELECT bytes FROM partitions WHERE id = partition_id))"
            " WHERE partition_id = ? AND offset <= ?",
            (size, partition, done - base),
        )
    return int(done - base)


def delete_old_rows(connection: sqlite3.Connection, before: int) -> None:
    """Delete the rows of transactions and half messages that ended, and of writers last used, before a time.

    The status of a token whose row was deleted is UNKNOWN.
    """
    connection.execute("DELETE FROM transactions WHERE ended_at < ?", (before,))
    connection.execute("DELETE FROM halves WHERE ended_at < ?", (before,))
    connection.execute("DELETE FROM writers WHERE used_at < ?", (before,))
