"""Detects that a fence topic was deleted and created anew.

With a fence topic the names of all unresolved transactions are lost, and the broker counts the topic epochs of a new
topic with the same name from the start. So the first fence record of a transactional id gets a random fence id, which
all later records and the decision log repeat. A topic that was created anew has no fence id, or another one (hazard
H43).
"""

from __future__ import annotations

import logging
import secrets

from txnbridge.errors import AccessDenied, EvidenceLost
from txnbridge.spi import Deadline, Ledger, LedgerValue
from txnbridge_pulsar.write.fence_records import FenceRecord

_log = logging.getLogger("txnbridge")


class FenceIdentity:
    """The fence id of one transactional id, as recorded in the decision log.

    `ledger` is the record for one fence topic: the same transactional id on another cluster has another record.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._value = LedgerValue(ledger)
        self._blind = False

    def follow(self, before: FenceRecord | None, deadline: Deadline) -> str:
        """Return the fence id for the newest owner's records: the id used so far, or a new one for a new fence topic.
        Call this while holding the fence topic, so that no other process can write to it.

        Raise `EvidenceLost` if the decision log has a fence id, and the fence topic has another one or no record.
        """
        known = self._known(deadline)
        recorded_id = "" if before is None else before.fence_id
        # A record of an earlier version has no fence id, but names all unresolved transactions.
        if known and recorded_id != known and (before is None or recorded_id):
            raise self._lost()
        return known or recorded_id or secrets.token_hex(8)

    def record(self, fence_id: str, deadline: Deadline) -> None:
        """Record the fence id in the decision log. Call this after the fence topic has a record with the fence id: a
        fence id in the decision log alone would make the next opening fail.

        Raise `EvidenceLost` if the decision log has another fence id.
        """
        if self._blind:
            return
        try:
            recorded = self._value.update(lambda value: None if value else {"lineage": fence_id}, deadline)
        except AccessDenied as error:
            self._go_on_without(error)
        else:
            if recorded is not None and str(recorded["lineage"]) != fence_id:
                raise self._lost()

    def _known(self, deadline: Deadline) -> str:
        if self._blind:
            return ""
        try:
            value = self._value.read(deadline)
        except AccessDenied as error:
            self._go_on_without(error)
            return ""
        return "" if value is None else str(value["lineage"])

    def _lost(self) -> EvidenceLost:
        return EvidenceLost(
            f"the fence topic of {self._name} was deleted, and with it what told which transactions its older owners"
            " have not ended. Stop every program that uses this id, end what `txnbridge transactions` lists of it, and"
            " then connect with another transactional_id"
        )

    def _go_on_without(self, error: AccessDenied) -> None:
        self._blind = True
        _log.warning("%s: nobody will notice if its fence topic is deleted: %s", self._name, error)
