"""Transactions in doubt: their coordinators have forgotten them, and their proof topics do not show the outcomes yet.

On a topic that a commit has not reached, the end of any later transaction takes the commit back. So the owner ends no
transaction on the topics of transactions in doubt, and uses other proof topics meanwhile (hazard H50).
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
    """The transactions in doubt of one owner. Thread-safe."""

    def __init__(self, cluster: ClusterAccess) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._transactions: dict[TxnId, AnnouncedTransaction] = {}

    def resolve(self, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
        """Find a transaction's outcome, and deliver a commit to all its topics again. Return whether the outcome is
        known; if it is not, the transaction is in doubt from now on.
        """
        clear = confirm_by_proof(self._cluster, ended, deadline)
        with self._lock:
            if clear:
                self._transactions.pop(ended.txn, None)
            else:
                self._transactions[ended.txn] = ended
        return clear

    def touching(self, topics: Iterable[str]) -> list[AnnouncedTransaction]:
        """Return the transactions in doubt that used one of these topics for messages or acknowledgements."""
        if not self._transactions:
            return []
        wanted = set(topics)
        with self._lock:
            return [ended for ended in self._transactions.values() if not wanted.isdisjoint(_touched_topics(ended))]

    def require(self, topics: Iterable[str], deadline: Deadline) -> list[AnnouncedTransaction]:
        """Resolve the transactions in doubt on these topics, and return them.

        Raise `BrokerUnavailable` if a transaction stays in doubt: no other transaction may end on its topics yet.
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


def _touched_topics(ended: AnnouncedTransaction) -> set[str]:
    return {*ended.topics, *(topic for topic, _ in ended.subscriptions)}
