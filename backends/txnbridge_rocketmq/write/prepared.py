"""The writer of a transaction that is prepared: durable, undecided, and ended later by its token."""

from __future__ import annotations

from txnbridge.errors import InvalidState, TransactionAborted
from txnbridge.spi import Begin, Deadline, Decision
from txnbridge_rocketmq.outcome.outcome import PREPARE, PrepareRecord
from txnbridge_rocketmq.write.writer import RocketMQWriter


class RocketMQPreparedWriter(RocketMQWriter):
    """Writer of a single transaction, which is prepared or aborted."""

    def _lifetime(self, begin: Begin) -> float:
        if begin.hold is not None:
            return begin.deadline.left() + begin.hold
        home = self._cluster.brokers.config(self._cluster.topics.home, begin.deadline)
        return min(home.longest_transaction, home.retention)

    def prepare(self, deadline: Deadline) -> None:
        self._store(deadline)
        transaction = self._begun.transaction
        prepared = PrepareRecord(self._halves.topics, self._all_acks(), self._expires_at)
        try:
            with self._cluster.context.events.step("step:record", transaction):
                self._owner.ledger.record(PREPARE, transaction, prepared.as_json(self._origin.log), deadline)
                claim = self._owner.ledger.decided(transaction, deadline, log=self._origin.log)
                if claim is not None and claim.decision is Decision.ABORT:
                    raise TransactionAborted("another process aborted the transaction; run it again")
                for context, acks in self._acks.items():
                    context.require_held(acks, transaction, deadline)
        except BaseException:
            # The prepare record may be stored although the call failed, but the caller gets no token to end it.
            self._abort_quietly(deadline)
            raise

    def commit(self, deadline: Deadline) -> None:
        raise InvalidState("a prepared transaction is committed by its token")
