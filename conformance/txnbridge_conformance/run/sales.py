"""`Sales`: the local work of a run's half messages, a SQLite database of whether each transaction's work was done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from txnbridge import Decision


class Sales:
    """The decisions on a run's half messages, in a database. For each transaction, the first stored decision counts.

    If the first one is UNDECIDED, no decision counts, and `decide` returns to each process its own decision.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._open()) as database, database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE IF NOT EXISTS sales(id TEXT PRIMARY KEY, decision TEXT)")

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=60)

    def decide(self, transaction: str, decision: Decision) -> Decision:
        """Store a decision if the transaction has none. Return the decision that counts, or this one if none does."""
        with closing(self._open()) as database, database:
            database.execute("INSERT OR IGNORE INTO sales VALUES (?, ?)", (transaction, decision.name))
            (name,) = database.execute("SELECT decision FROM sales WHERE id = ?", (transaction,)).fetchone()
        return decision if name == Decision.UNDECIDED.name else Decision[name]

    def all(self) -> dict[str, Decision]:
        with closing(self._open()) as database:
            return {id: Decision[name] for id, name in database.execute("SELECT id, decision FROM sales")}
