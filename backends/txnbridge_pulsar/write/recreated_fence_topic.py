"""Detects that a fence topic was deleted and created again.

With a fence topic the names of all unresolved transactions are deleted. On a new topic of the same name the broker
counts epochs from the start, so it does not refuse the older owner. So a transactional id has a random fence id, which
its first fence record gets, and which all later records and the decision log repeat. A topic that was created again has
no fence id, or another one (hazard H43).
"""

from __future__ import annotations

import logging
import secrets

from txnbridge.errors import AccessDenied, EvidenceLost
from txnbridge.spi import Deadline, Ledger, LedgerValue
from txnbridge_pulsar.write.fence_records import FenceRecord

_log = logging.getLogger("txnbridge")


class FenceIdentity:
    """The random id (fence id) of one fence topic, which the topic's records and the decision log contain.

    `ledger` is the part of the decision log for this fence topic; each cluster has its own.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._value = LedgerValue(ledger)
        self._is_disabled = False

    def follow(self, before: FenceRecord | None, deadline: Deadline) -> str:
        """Return the fence id for the newest owner's records, called while this owner holds the fence topic.

        The id is that of the decision log or of `before`, the fence topic's last record, or a new one if there is none.
        Raise `EvidenceLost` if the decision log has a fence id, and the fence topic has another one or no record.
        """
        try:
            value = self._value.read(deadline)
        except AccessDenied as error:
            self._disable_check(error)
            value = None
        known = "" if value is None else str(value["lineage"])
        recorded_id = "" if before is None else before.fence_id
        if known and recorded_id != known:
            raise self._lost()
        return known or recorded_id or secrets.token_hex(8)

    def record(self, fence_id: str, deadline: Deadline) -> None:
        """Record the fence id in the decision log, after this owner's first fence record.

        If only the log had it, the next owner could not open the id. Raise `EvidenceLost` if the log has another one.
        """
        if self._is_disabled:
            return
        try:
            recorded = self._value.update(lambda value: None if value else {"lineage": fence_id}, deadline)
        except AccessDenied as error:
            self._disable_check(error)
        else:
            if recorded is not None and str(recorded["lineage"]) != fence_id:
                raise self._lost()

    def _lost(self) -> EvidenceLost:
        return EvidenceLost(
            f"the fence topic of {self._name} was deleted, and with it the names of transactions that have not ended."
            " Stop every program that uses this id, end the transactions that `txnbridge transactions` lists, and then"
            " connect with another transactional_id"
        )

    def _disable_check(self, error: AccessDenied) -> None:
        self._is_disabled = True
        _log.warning("%s: it will not be noticed if the fence topic is deleted: %s", self._name, error)
