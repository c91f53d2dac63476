"""The owner of a transactional id, or of the random name of a bridge without a transactional id."""

from __future__ import annotations

from collections.abc import Sequence

from txnbridge.errors import DeadlineExceeded, Fenced, InvalidOption
from txnbridge.spi import Deadline, FairSemaphore, Identity, Ledger, Writer
from txnbridge_rocketmq.client.protocol.records import pack_properties
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.outcome import publish_decided
from txnbridge_rocketmq.write.writer import RocketMQPreparedWriter, RocketMQWriter


class RocketMQOwner:
    """Owner of a transactional id: opens the id in the decision log, after which older owners cannot commit.

    The new owner first publishes the transactions that the previous owner committed and did not publish. Undecided
    transactions are aborted after the broker's check-back. The owner does not wait for that, because undecided halves
    do not block readers.

    A bridge without a transactional id has a random name, which no other process can own. It opens this name only for
    prepared transactions and half messages.
    """

    def __init__(self, cluster: RocketMQCluster, identity: Identity, ledger: Ledger, ender: HalfEnder) -> None:
        try:
            pack_properties({"transaction": identity.name})
        except ValueError as error:
            raise InvalidOption(f"transactional_id {identity.name!r} is a property of each message: {error}") from error
        self.cluster = cluster
        self.ledger = ledger
        self.ender = ender
        self.owned = identity.owned  # whether other processes may open the transactional id
        self.opening: str | None = None  # id of this process's opening in the decision log; None before `open`
        self._identity = identity
        self._turns = FairSemaphore(1, 0.0)  # a signal handler's exception loses no place of it

    def open_writers(self, count: int, deadline: Deadline) -> Sequence[Writer]:
        """Return `count` writers. With a transactional id, first open it, which fences older owners."""
        if self._identity.owned:
            self.open(deadline)
        return [RocketMQWriter(self, number) for number in range(count)]

    def prepare_writer(self, deadline: Deadline) -> Writer:
        """Return a writer for one prepared transaction. Raise `Fenced` if a newer owner has opened the id."""
        self.open(deadline)
        return RocketMQPreparedWriter(self, 0)

    def open(self, deadline: Deadline) -> None:
        """Open the transactional id, at the first call only: a second opening would fence the first."""
        turn = self._turns.place()
        try:
            if not turn.enter(deadline):
                raise DeadlineExceeded(
                    f"another thread opened {self._identity.name} for longer than {deadline.seconds:g} s"
                )
            if self.opening is not None:
                return
            with self.cluster.context.events.step("step:open"):
                opening = self.ledger.opened({"host": self._identity.host}, deadline)
            if self._identity.owned:
                self._finish(deadline)
            self.opening = opening
        finally:
            turn.leave()

    def _finish(self, deadline: Deadline) -> None:
        """Publish the previous owner's last commit of each writer: the broker may not have published it yet.

        Earlier commits are published already. A writer publishes one transaction before it begins the next, and each
        owner calls this method before its first commit (hazard H71).
        """
        for transaction, claim in self.ledger.claims(deadline):
            publish_decided(self.ender, transaction, claim, deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if another process has opened the transactional id after this owner."""
        if self.opening is None:
            return
        newest = self.ledger.newest_opening(deadline)
        if newest is None or newest[0] != self.opening:
            host = None if newest is None else str(newest[1].get("host", "")) or None
            raise Fenced(f"{self._identity.name} was opened by {host or 'another process'} since", newer=host)
