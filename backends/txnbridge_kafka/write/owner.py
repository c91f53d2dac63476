"""This process as the owner of a transactional id: its opening and recorded outcomes in the decision log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from txnbridge.errors import AccessDenied, EvidenceLost, Fenced
from txnbridge.spi import Deadline, Identity, Ledger, LedgerEntry

_log = logging.getLogger("txnbridge")

# Kinds of records in the ledger of an id; the core's ledger itself also interprets "prepare" records.
PREPARE, OUTCOME = "prepare", "outcome"


class KafkaOwner:
    """Checks whether this process still owns a transactional id, and records outcomes in the decision log.

    An outcome is recorded before the coordinator forgets it.
    """

    def __init__(self, identity: Identity, ledger: Ledger, prepared_ids: int) -> None:
        self.identity = identity
        self.ledger = ledger
        self.prepared_ids = prepared_ids
        self.opening: str | None = None
        self.spared: list[str] = []  # ids under which earlier owners have left prepared transactions
        self.denied = ""  # the rights that are missing, if the id was opened without the decision log
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.identity.name

    def open(self, writers: int, deadline: Deadline) -> Mapping[str, Any]:
        """Record an opening, which makes this process the id's owner. Return the data of the previous opening.

        The record has the largest number of writers that any owner had: if an owner dies while it opens the id, the
        next owner still fences the writers of all earlier owners. (It also has the largest number of ids for prepared
        transactions, which earlier versions of this backend read.)
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
        """Own the id without the decision log, with fencing by the broker only, and log which guarantees are lost.

        This holds for the owner's whole life, even if the right is granted meanwhile: an opening that is recorded later
        would fence another owner that has opened the id since.
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
        """Record an opening unless this owner has one: a bridge's made-up id is opened before its first record."""
        if self.opening is None and not self.denied:
            self.open(0, deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if another process has opened the id after this process (hazard H14)."""
        if self.opening is None:
            return
        newest = self.ledger.newest_opening(deadline)
        if newest is None or newest[0] != self.opening:
            host = newest[1].get("host") if newest else None
            raise Fenced(
                f"{self.name} was opened by {host or 'another process'} since: this owner must stop", newer=host
            )

    def record_outcome(self, key: str, committed: bool, deadline: Deadline) -> None:
        """Record the outcome of an id's last transaction, before opening the id makes the coordinator forget it.

        The caller passes only outcomes of transactions that this owner has begun: another owner may have begun one
        since the coordinator described the id.
        """
        if self.opening is None:
            return  # without the decision log there is no guarantee that the outcome can be looked up
        self.ledger.record(OUTCOME, key, {"state": "committed" if committed else "aborted"}, deadline)


def evidence_key(id: str, pid: int, mark: str) -> str:
    """Return the ledger key of an outcome. `mark` is a plain transaction's epoch or a prepared one's start time."""
    return f"{id}/{pid}/{mark}"


def recorded_outcome(ledger: Ledger, key: str, deadline: Deadline, under: object = None) -> str | None:
    """Return the outcome recorded under a key, "committed" or "aborted"; None if there is no record (any more).

    With `under` only the record of that opening counts: an earlier version of this backend also recorded outcomes that
    the next owner had seen.
    """
    try:
        entries: list[LedgerEntry] = ledger.find(key, deadline)
    except EvidenceLost:
        return None
    own = [entry for entry in entries if entry.kind == OUTCOME and under in (None, entry.opening)]
    return next((str(entry.data["state"]) for entry in own), None)
