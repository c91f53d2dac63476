"""This process as the owner of a transactional id, or of a name that it made up for itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from txnbridge.errors import DeadlineExceeded, Fenced
from txnbridge.spi import Deadline, Identity, Ledger, Writer
from txnbridge_rocketmq.cluster import Cluster
from txnbridge_rocketmq.outcome.end_transaction import Ender
from txnbridge_rocketmq.outcome.outcome import publish_decided
from txnbridge_rocketmq.write.writer import PreparedWriter, RocketMQWriter


class Owner:
    """Opens the id in the decision log. From then on older owners cannot commit any more.

    The new owner first publishes the transactions that the owner before it committed and did not come to publish.
    Undecided ones are aborted when the broker asks about them; nobody waits for that, because undecided halves hold
    nothing back.

    A name that the bridge made up for itself is opened only for what has to outlive it: nobody else can hold it.
    """

    def __init__(self, cluster: Cluster, identity: Identity, ledger: Ledger, ender: Ender) -> None:
        self.cluster = cluster
        self.ledger = ledger
        self.ender = ender
        self.opening: str | None = None  # by which this process is the owner; None before
        self._identity = identity
        self._lock = threading.Lock()

    def open_writers(self, count: int, deadline: Deadline) -> Sequence[Writer]:
        """Fence every older owner, and be ready to write."""
        if self._identity.owned:
            self.open(deadline)
        return [RocketMQWriter(self, number) for number in range(count)]

    def prepare_writer(self, deadline: Deadline) -> Writer:
        """A writer for one transaction. Raises `Fenced` if a newer owner exists, as far as is known here."""
        self.open(deadline)
        return PreparedWriter(self, 0)

    def open(self, deadline: Deadline) -> None:
        """Once: a second opening would fence the first."""
        if not self._lock.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(
                f"another thread opened {self._identity.name} for longer than {deadline.seconds:g} s"
            )
        try:
            if self.opening is not None:
                return
            with self.cluster.context.events.step("step:open"):
                opening = self.ledger.opened({"host": self._identity.host}, deadline)
            if self._identity.owned:
                self._finish(deadline)
            self.opening = opening
        finally:
            self._lock.release()

    def _finish(self, deadline: Deadline) -> None:
        """Publish the last commits of the owner before us; that owner had done the same before its first commit.

        Each of its writers published one transaction before it began the next.
        """
        for transaction, claim in self.ledger.claims(deadline):
            publish_decided(self.ender, transaction, claim, deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if somebody has opened the id since."""
        if self.opening is None:
            return
        newest = self.ledger.newest_opening(deadline)
        if newest is None or newest[0] != self.opening:
            host = None if newest is None else str(newest[1].get("host", "")) or None
            raise Fenced(f"{self._identity.name} was opened by {host or 'another process'} since", newer=host)
