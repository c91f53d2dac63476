"""`spanning(…, db=…)`: the transaction of a database decides about a span's parts on brokers.

The parts are prepared, and the span's record, a half message, stores their tokens, before the database's transaction
inserts its COMMIT row and commits, as with `bridge.transaction(db=…)`. A resolver that is asked about the record of a
dead process finds the decision by the row, and ends the parts by it. The record itself is never published.

Parts whose process died before it had stored the record have the row's name in their ids, so that a sweep can insert
the ABORT row, or find the COMMIT row, as a resolver does: whoever comes first, all of them end the parts by one row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from txnbridge import errors
from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline
from txnbridge._base.token import Decision, Outcome
from txnbridge._half.common import end_half
from txnbridge._half.half_messages import END_SECONDS
from txnbridge._half.span_sweep import digest
from txnbridge.spi import Half
from txnbridge.sql.barrier import LOOK_SECONDS, BarrierResolver, Barriers, BarrierTable, BarrierTransaction


class PartsOfSpans(Protocol):
    """The part of `_half.span.Spans` that this module uses."""

    def end_parts(self, half: Half, decision: Decision) -> bool: ...

    def decision_of_parts(self, half: Half) -> Decision: ...


class SpanBarriers(Barriers):
    """Makes the database's part of transactions over one set of clusters, and runs the resolvers of their records."""

    def __init__(self, connection: Connection, spans: PartsOfSpans) -> None:
        super().__init__(connection)
        self._new_transaction = partial(SpanTransaction, spans)
        self._new_resolver = partial(SpanResolver, spans)

    def _resolver(self, barrier: BarrierTable) -> BarrierResolver:
        if barrier.database.engine.dialect.is_async:
            text = "spanning() takes no session of asyncio: its engine works on no other thread, so that no resolver"
            raise errors.NotSupported(text + " of this process could end what a broker that is away leaves prepared")
        return super()._resolver(barrier)

    def settle(self, row: str, until: int) -> Decision:
        """Return the decision in a transaction's `row` after `until` (seconds); insert ABORT if there is no row.

        Return UNDECIDED if this process does not know the row's database, or a database transaction has locked the row.
        """
        database, _, name = row.replace(":", "/").partition("-")
        for (group, _), resolver in list(self._resolvers.items()):
            if digest(group) == database:  # the group has the names of the application and the database
                return resolver.barrier.settle(f"half-{group}-{name}", until * 1000, Deadline(LOOK_SECONDS))
        return Decision.UNDECIDED


class SpanResolver(BarrierResolver):
    """Ends transactions over brokers and a database whose process has died, as the row in the database decides."""

    def __init__(self, spans: PartsOfSpans, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._spans = spans

    def _decide(self, half: Half) -> Decision:
        decision = super()._decide(half)
        if decision is Decision.UNDECIDED or not self._spans.end_parts(half, decision):
            return Decision.UNDECIDED
        return Decision.ABORT  # the record is dropped, whatever was decided

    def _note_end(self, half: Half, outcome: Outcome) -> None:
        super()._note_end(half, outcome)
        if outcome is Outcome.ABORTED:
            self.forget(half.transaction)


class SpanTransaction(BarrierTransaction):
    """The database's part of a transaction over several brokers. Its only half message is the record of them all."""

    def __init__(self, spans: PartsOfSpans, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._spans = spans

    @property
    def row(self) -> str:
        """The name of the database's row that decides. It has no slash, because ids of the parts end with it."""
        return f"{digest(self._group)}-{self._id.removeprefix(f'half-{self._group}-')}".replace("/", ":")

    def _end(self, half: Half | None, decision: Decision) -> Outcome:
        if half is None:
            return super()._end(half, decision)
        if self._settled and decision is Decision.ABORT:
            # After a COMMIT a resolver may have ended everything, and deleted the row: then the parts are committed.
            try:
                decision = self._spans.decision_of_parts(half)
            except errors.TxnBridgeError as error:
                raise errors.OutcomeUnknown(f"no answer about the end of span {self._id}: {error}") from error
        wanted = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
        if self._spans.end_parts(half, decision):
            deadline = self._deadline if self._deadline.left() > END_SECONDS else Deadline(END_SECONDS)
            try:
                end_half(self._connection, self._store, half, Decision.ABORT, deadline)
            except errors.TxnBridgeError:
                return wanted  # a resolver drops the record
            self._resolver.forget(self._id)
        return wanted
