"""Transactions that have ended, and of which nobody can tell how: their marker topics never heard of the end.

On a topic that never heard of a commit, the end of any later transaction takes back what was committed. So the owner of
such transactions ends nothing on their topics until it is known how they ended, and uses other marker topics meanwhile.
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
    """The unclear transactions of one owner. Any thread may call."""

    def __init__(self, cluster: ClusterAccess) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._found: dict[TxnId, AnnouncedTransaction] = {}

    def resolve(self, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
        """Whether it can be told how a transaction ended; one that was committed is then committed on all its topics
        once more. A transaction of which it cannot be told is kept here.
        """
        clear = confirm_by_proof(self._cluster, ended, deadline)
        with self._lock:
            if clear:
                self._found.pop(ended.txn, None)
            else:
                self._found[ended.txn] = ended
        return clear

    def touching(self, topics: Iterable[str]) -> list[AnnouncedTransaction]:
        """The unclear transactions that have touched one of these topics."""
        if not self._found:
            return []
        wanted = set(topics)
        with self._lock:
            return [found for found in self._found.values() if not wanted.isdisjoint(_places(found))]

    def require(self, topics: Iterable[str], deadline: Deadline) -> list[AnnouncedTransaction]:
        """The transactions on these topics that have turned out to be clear.

        Raises `BrokerUnavailable` if one has not: nothing may end on its topics yet.
        """
        asked = self.touching(topics)
        for found in asked:
            if not self.resolve(found, deadline):
                raise BrokerUnavailable(
                    f"nobody can tell how transaction {found.txn} of this id ended, and whatever ends behind it on its"
                    " topics would take it back, had it been committed. `txnbridge doctor` names the topics; then:"
                    f" txnbridge transactions repair {found.txn} --yes --reason TEXT"
                )
        return asked


def _places(found: AnnouncedTransaction) -> set[str]:
    return {*found.topics, *(topic for topic, _ in found.subscriptions)}
