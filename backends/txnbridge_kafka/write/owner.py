"""This process as the owner of a transactional id, and what the decision log records about that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from txnbridge.errors import AccessDenied, EvidenceLost, Fenced
from txnbridge.spi import Deadline, Identity, Ledger, LedgerEntry

_log = logging.getLogger("txnbridge")

# Kinds of ledger records; "prepare" has a meaning for the ledger itself.
PREPARE, OUTCOME = "prepare", "outcome"


class KafkaOwner:
    """Knows whether this process still owns the id, and records outcomes that the coordinator is about to forget."""

    def __init__(self, identity: Identity, ledger: Ledger, prepared_ids: int) -> None:
        self.identity = identity
        self.ledger = ledger
        self.prepared_ids = prepared_ids
        self.opening: str | None = None
        self.spared: list[str] = []  # ids under which earlier owners have left something prepared
        self.denied = ""  # the rights to grant, if the id was opened without the log
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.identity.name

    def open(self, writers: int, deadline: Deadline) -> Mapping[str, Any]:
        """Become the newest owner. Return the data of the opening before.

        The largest number of writers that any owner had is handed on: an owner that dies while it opens the id leaves
        the writers of its predecessors to the next. (And the largest number of ids for prepared transactions, which an
        owner of an earlier version looks for.)
        """
        with self._lock:
            newest = self.ledger.newest_opening(deadline)
            before = newest[1] if newest else {}
            about = {
                "writers": max(writers, int(before.get("writers", 0))),
                "prepared_ids": max(self.prepared_ids, int(before.get("prepared_ids", 0))),
                "host": self.identity.host,
                "at": int(time.time() * 1000),
            }
            self.opening = self.ledger.opened(about, deadline)
            return before

    def go_on_without_log(self, error: AccessDenied) -> None:
        """Own the id as far as the broker alone can tell, and log what that does not promise.

        For good, even if the right is granted meanwhile: an opening that is recorded only later would fence the owner
        that has opened the id since.
        """
        self.denied = str(error)
        _log.warning(
            "%s was opened without its decision log, which this user may not use. The broker fences older owners all"
            " the same, but one that may use the log can take the id back, and what that is preparing is not ended. A"
            " transaction whose time is over at the broker looks like a newer owner: it stops this one. Nothing can be"
            " prepared, and how a transaction ended is unknown once its writer was opened again. What gives all of it"
            " back: %s",
            self.name,
            error,
        )

    def open_once(self, deadline: Deadline) -> None:
        """Open an id that the bridge made up for itself, when something has to be recorded about it."""
        if self.opening is None and not self.denied:
            self.open(0, deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if another process has opened the id since (hazard H14)."""
        if self.opening is None:
            return
        newest = self.ledger.newest_opening(deadline)
        if newest is None or newest[0] != self.opening:
            host = newest[1].get("host") if newest else None
            raise Fenced(
                f"{self.name} was opened by {host or 'another process'} since: this owner must stop", newer=host
            )

    def record_outcome(self, key: str, committed: bool, deadline: Deadline) -> None:
        """Record the outcome of an id's last transaction before opening the id makes the coordinator forget it.

        Only of a transaction that this owner has begun: another owner may have begun one since the coordinator was
        asked.
        """
        if self.opening is None:
            return  # without the log nobody was promised that the outcome can be asked for
        self.ledger.record(OUTCOME, key, {"state": "committed" if committed else "aborted"}, deadline)


def evidence_key(id: str, pid: int, mark: str) -> str:
    """Return the key of a recorded outcome; `mark` is the epoch of a plain transaction, the start of a prepared one."""
    return f"{id}/{pid}/{mark}"


def recorded_outcome(ledger: Ledger, key: str, deadline: Deadline, under: object = None) -> str | None:
    """Return "committed" or "aborted" if that was recorded; None if nothing was, or nothing of it is left.

    `under` names the opening that must have recorded it: one version recorded also what the next opener had seen.
    """
    try:
        entries: list[LedgerEntry] = ledger.find(key, deadline)
    except EvidenceLost:
        return None
    own = [entry for entry in entries if entry.kind == OUTCOME and under in (None, entry.opening)]
    return next((str(entry.data["state"]) for entry in own), None)
