"""The owner of a transactional id, the process that has opened it last: its records in the decision log."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from txnbridge.errors import AccessDenied, EvidenceLost, Fenced
from txnbridge.spi import Deadline, Identity, Ledger, LedgerEntry

_log = logging.getLogger("txnbridge")

# The kinds of records in an id's ledger. The core's ledger interprets "prepare" records too.
PREPARE, OUTCOME = "prepare", "outcome"
# The transactional ids for prepared transactions. The opening of a made-up id has the id's own name.
PREPARED_ID = re.compile(r"(.+)\.([0-9a-f]{16}|\1)\.p\d+", re.DOTALL)


class KafkaOwner:
    """Opens a transactional id in the decision log, checks whether this process still owns it, and records outcomes."""

    def __init__(self, identity: Identity, ledger: Ledger, prepared_ids: int) -> None:
        self.identity = identity
        self.ledger = ledger
        self.prepared_ids = prepared_ids
        self.opening: str | None = None
        self.inherited_ids: list[str] = []  # ids with unresolved prepared transactions of earlier owners
        self.denied = ""  # the missing rights, if this owner opened the id without the decision log
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.identity.name

    def open(self, writers: int, deadline: Deadline) -> Mapping[str, Any]:
        """Record that this process is the id's owner now (its opening). Return the data of the previous owner's record.

        The record has the largest number of writers that any owner had. So if an owner dies while it opens the id, the
        next owner still fences all writers.
        """
        with deadline.holding(self._lock, f"another thread opened {self.name}"):
            newest = self.ledger.newest_opening(deadline)
            before = newest[1] if newest else {}
            most = max(writers, int(before.get("writers", 0)))
            about = {"writers": most, "host": self.identity.host, "at": int(time.time() * 1000)}
            self.opening = self.ledger.opened(about, deadline)
            return before

    def continue_without_log(self, error: AccessDenied) -> None:
        """Own the id without the decision log, with fencing by the broker only, and log which guarantees are lost.

        The owner never uses the decision log afterwards, even if the right is granted: a late record of its opening
        would fence another owner that has opened the id since.
        """
        self.denied = str(error)
        _log.warning(
            "%s was opened without its decision log, which this user may not use. The broker still fences older owners,"
            " but an older owner that may use the log can take the id back, and its unprepared transactions under ids"
            " for prepared ones are not aborted. A transaction that times out at the broker stops this owner, because"
            " it looks like a newer owner. No transaction can be prepared, and a transaction's outcome is unknown after"
            " its writer was opened again. To get all of this: %s",
            self.name,
            error,
        )

    def open_once(self, deadline: Deadline) -> None:
        """Record that this process is the transactional id's owner, unless it has done so already.

        For an id that the bridge generated, this is called only before its first record in the decision log.
        """
        if self.opening is None and not self.denied:
            self.open(0, deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if another process has opened the id since this process opened it (hazard H14)."""
        if self.opening is None:
            return
        newest = self.ledger.newest_opening(deadline)
        if newest is None or newest[0] != self.opening:
            host = newest[1].get("host") if newest else None
            raise Fenced(
                f"{self.name} was opened by {host or 'another process'} since: this owner must stop", newer=host
            )

    def record_outcome(self, key: str, committed: bool, deadline: Deadline) -> None:
        """Record the outcome of an id's last transaction.

        Call this before the id is opened again: the coordinator then forgets the transaction. The transaction must be
        this owner's. Another owner may have begun a newer transaction since the coordinator described the last one.
        """
        if self.opening is None:
            return  # without the decision log no outcome is recorded
        self.ledger.record(OUTCOME, key, {"state": "committed" if committed else "aborted"}, deadline)


def evidence_key(id: str, pid: int, mark: str) -> str:
    """Return the key under which the decision log has a transaction's outcome.

    `mark` distinguishes the transactions of a producer id: a plain one's epoch, or a prepared one's start time.
    """
    return f"{id}/{pid}/{mark}"


def recorded_outcome(ledger: Ledger, key: str, deadline: Deadline) -> str | None:
    """Return the outcome recorded under a key in the decision log, "committed" or "aborted"; None without a record."""
    try:
        entries: list[LedgerEntry] = ledger.find(key, deadline)
    except EvidenceLost:
        return None
    return next((str(entry.data["state"]) for entry in entries if entry.kind == OUTCOME), None)
