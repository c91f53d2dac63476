"""Whether a fence topic is still the one that older owners have written to.

With a deleted fence topic goes what older owners have left unresolved, and the broker counts the epochs of the next
topic of that name from the start. So the first notice of a transactional id is given a random lineage, which all later
notices repeat and which the decision log knows, too: a topic that was made anew has none, or another.
"""

from __future__ import annotations

import logging
import secrets

from txnbridge.errors import AccessDenied, EvidenceLost
from txnbridge.spi import Deadline, Ledger, LedgerValue
from txnbridge_pulsar.write.fence_records import FenceRecord

_log = logging.getLogger("txnbridge")


class FenceIdentity:
    """What the decision log knows of one transactional id's fence topic.

    The ledger is the fence topic's own: openings of the same id on other brokers stand in other ledgers.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._value = LedgerValue(ledger)
        self._blind = False

    def follow(self, before: FenceRecord | None, deadline: Deadline) -> str:
        """The lineage that the newest owner goes on with. To be asked once the fence topic is held: nobody else writes
        there from then on.

        Raises `EvidenceLost` if the decision log knows another one than stands on the fence topic.
        """
        known = self._known(deadline)
        found = "" if before is None else before.fence_id
        # A notice of an earlier version has none; but it stands there, with all that is unresolved.
        if known and found != known and (before is None or found):
            raise self._lost()
        return known or found or secrets.token_hex(8)

    def record(self, fence_id: str, deadline: Deadline) -> None:
        """Once it stands on the fence topic; a lineage in the log alone would make the next opening fail.

        Raises `EvidenceLost` if somebody else has recorded another one meanwhile.
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
