"""The set of an owner's transactions in doubt, and the topics that the owner must not use meanwhile.

Their coordinators have forgotten these transactions, and no proof shows their outcomes yet.
If a commit has not reached a topic, the end of any later transaction on that topic takes the commit back. So the owner
ends no transaction on a topic that a transaction in doubt has used, and meanwhile uses other proof topics (hazard H50).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Deadline
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.outcome.outcome import confirm_by_proof
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction


class InDoubt:
    """An owner's transactions that it has tried to end and whose outcomes it does not know yet. Thread-safe."""

    def __init__(self, cluster: ClusterAccess) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._transactions: dict[TxnId, AnnouncedTransaction] = {}

    def resolve(self, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
        """Find a transaction's outcome on its proof topic; deliver a commit to all its participants again.

        Return whether the outcome is known. If it is not, keep the transaction as one in doubt; else no longer keep it.
        """
        clear = confirm_by_proof(self._cluster, ended, deadline)
        with self._lock:
            if clear:
                self._transactions.pop(ended.txn, None)
            else:
                self._transactions[ended.txn] = ended
        return clear

    @property
    def is_any(self) -> bool:
        return bool(self._transactions)

    def touching(self, topics: Iterable[str]) -> list[AnnouncedTransaction]:
        """Return the transactions in doubt that have sent to one of these topics, or acknowledged on it."""
        wanted = set(topics)
        with self._lock:
            kept = self._transactions.values()
            return [e for e in kept if not wanted.isdisjoint((*e.topics, *(topic for topic, _ in e.subscriptions)))]

    def require(self, topics: Iterable[str], deadline: Deadline) -> list[AnnouncedTransaction]:
        """Find the outcomes of the transactions in doubt that used one of these topics, and return these transactions.

        Raise `BrokerUnavailable` if an outcome stays unknown: no other transaction may end on these topics yet.
        """
        asked = self.touching(topics)
        for ended in asked:
            if not self.resolve(ended, deadline):
                raise BrokerUnavailable(
                    f"the outcome of transaction {ended.txn} of this id is not known. If it was committed, a later"
                    " transaction on its topics would take the commit back. `txnbridge doctor` names the topics; then"
                    f" run: txnbridge transactions repair {ended.txn} --yes --reason TEXT"
                )
        return asked
