"""Writes a task's rows into one prepared transaction. The driver decides later whether the transaction is committed.

If the iterator of rows ends early because another part of the task has failed, this code cannot distinguish that from
the real end. Only the driver sees which tasks succeeded, so only the driver decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from pyspark_txnbridge._kept_bridges import ClientPool, Opening, SinkSession, close_logging_errors, connect, sessions
from pyspark_txnbridge._worker_gc import begin_call
from pyspark_txnbridge._write.batch_identity import BatchId, Written
from pyspark_txnbridge._write.rows import Columns, RowTotals
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.transaction_cleanup import (
    abort_open,
    check_log,
    check_number,
    fence_older,
    finish_decided,
    is_done,
    lost_parts,
    unfinished,
    writer_id,
)
from txnbridge import Bridge, Decision, InvalidState, TransactionAborted, TxnBridgeError

if TYPE_CHECKING:
    import pyarrow as pa

# The longest life of a transaction where the broker sets no limit: as long as a broker's default limit.
_DEFAULT_LIFETIME_SECONDS = 900.0
# The share of a transaction's life in which a task may write; the rest is for the other tasks and the driver.
TASK_SHARE = 0.8


def write_partition(
    identity: BatchId,
    options: SinkOptions,
    columns: Columns,
    rows: Iterable[pa.RecordBatch],
    partition: int,
    holder: str,
) -> Written:
    """Write a partition's rows into a prepared transaction, unless the batch is decided; return the task's report.

    `holder` names the task's process to others that want the same transactional id.
    """
    begin_call()
    application = options.application(identity.query)
    key = (options, application)
    with (
        sessions.held(key, lambda: SinkSession(options, application)) as session,
        _slot_writers.held((key, identity.path), lambda: SlotWriters(options)) as writers,
    ):
        return _write(identity, options, columns, rows, partition, holder, session, writers)


def _write(
    identity: BatchId,
    options: SinkOptions,
    columns: Columns,
    batches: Iterable[pa.RecordBatch],
    partition: int,
    holder: str,
    session: SinkSession,
    writers: SlotWriters,
) -> Written:
    opening, attempt = _look(identity, session)
    if writers.number != opening.number:
        check_log(session, options, identity)
        check_number(session, identity)
        if partition == 0 and opening.number > 1:
            # The decisions of older runs are finished first. Their other open transactions would hold readers back.
            finish_decided(session, identity.path)
            fence_older(session, options, identity.path, opening.number - 1)
            abort_open(session, options, identity.path, opening.number - 1)
        attempt = _attempt(identity, session)
    if attempt is None:
        return _settled(identity, partition, _count(columns, batches))
    began_at = _now()
    rows = iter(batches)
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        return Written(identity, partition, attempt, began_at=began_at, prepared_at=_now())
    try:
        bridge = writers.take(session, identity, opening, holder)
    except InvalidState:
        if not is_done(session, identity):
            raise
        # The batch was marked done in the meantime.
        return _settled(identity, partition, _count(columns, chain([first], rows)))
    count = RowTotals()
    timeout, hold = _times(bridge)
    with bridge.transaction(prepare=True, timeout=timeout, hold=hold) as txn:
        count.add(columns.send(first, txn))
        for batch in rows:
            count.add(columns.send(batch, txn))
    assert txn.token is not None
    if not _is_still_needed(identity, session, str(txn.token)):
        return _settled(identity, partition, count)
    return Written(
        identity,
        partition,
        attempt,
        token=str(txn.token),
        topics=sorted(count.topics),
        rows=count.rows,
        bytes=count.bytes,
        fingerprint=count.fingerprint,
        began_at=began_at,
        prepared_at=_now(),
        expires_at=txn.token.expires_at,
    )


def _times(bridge: Bridge) -> tuple[float, float | None]:
    """Return a task's time to write, and its transaction's time to wait for a decision (None: the broker's limit)."""
    longest = bridge.limits.prepared_seconds
    if longest is None:
        return _DEFAULT_LIFETIME_SECONDS * TASK_SHARE, _DEFAULT_LIFETIME_SECONDS * (1 - TASK_SHARE)
    return longest * TASK_SHARE, None


def _look(identity: BatchId, session: SinkSession) -> tuple[Opening, int | None]:
    """Open the query's id for this run in the decision log; return the opening, and the number of the present attempt.

    The log is read once for both. The number is None if the batch is decided (see `_attempt`).
    """
    with session.decisions.reading_once():
        return session.decisions.open(identity.path, name=identity.run), _attempt(identity, session)


def _attempt(identity: BatchId, session: SinkSession) -> int | None:
    """Return the number of the batch's present attempt; None if the batch is decided.

    A decided batch that has lost transactions gets another attempt. Raise `TransactionAborted` if the driver has given
    up the attempt.
    """
    if is_done(session, identity):
        return None
    known = unfinished(session, identity.batch_path)
    if known:
        # The tasks write all rows again, and the driver picks the parts that replace the decision's lost ones.
        return int(known[-1].id[-1]) + 1 if lost_parts(session, known[-1]) else None
    claims = session.decisions.claims(identity.batch_path)
    by_this_run = any(claim.opening == identity.run for claim in claims)
    if by_this_run if identity.attempt is None else len(claims) > identity.attempt:
        raise TransactionAborted(f"{identity} was given up by its driver: this task comes too late")
    return len(claims)


def _is_still_needed(identity: BatchId, session: SinkSession, token: str) -> bool:
    """Return whether a driver will still end the prepared transaction of this task; if not, abort it here.

    A newer run, and a driver whose batch is done or given up, end all open transactions of this run's tasks. But they
    may have listed these transactions before this task's transaction began.
    """
    try:
        _, attempt = _look(identity, session)
    except TxnBridgeError:
        session.bridge.abort(token)
        raise
    if attempt is None:
        session.bridge.abort(token)
    return attempt is not None


def _settled(identity: BatchId, partition: int, count: RowTotals) -> Written:
    return Written(identity, partition, rows=count.rows, bytes=count.bytes, fingerprint=count.fingerprint, settled=True)


def _count(columns: Columns, batches: Iterable[pa.RecordBatch]) -> RowTotals:
    count = RowTotals()
    for batch in batches:
        count.add(columns.send(batch, None))
    return count


def _now() -> int:
    return int(time.time() * 1000)


@dataclass
class _Slot:
    """A slot, which is a numbered transactional id of a run, with the bridge that this process has opened for it."""

    number: int
    bridge: Bridge
    batch: int  # the batch that the slot is leased for
    used: int = 0  # the number of its transactions that wait for that batch's decision


@dataclass
class SlotWriters:
    """This process's writers for one sink of one query: each has a numbered transactional id (slot) of the query's run.

    A process leases a slot for one batch by a claim in the decision log. For the next batch the process claims the same
    slot again, because the slot's connections are open.
    """

    options: SinkOptions
    number: int = 0  # the run's opening number in the decision log
    slots: list[_Slot] = field(default_factory=list)

    def take(self, session: SinkSession, identity: BatchId, opening: Opening, holder: str) -> Bridge:
        """Return a bridge that can prepare one more transaction. Raise `InvalidState` if the batch is done."""
        if opening.number != self.number:
            self.close()
            self.number = opening.number
        for slot in self.slots:
            most = slot.bridge.limits.prepared_transactions
            if slot.batch == identity.batch and (most is None or slot.used < most):
                slot.used += 1
                return slot.bridge
        slot = self._lease(session, identity, opening, holder)
        slot.used = 1
        return slot.bridge

    def _lease(self, session: SinkSession, identity: BatchId, opening: Opening, holder: str) -> _Slot:
        leases = ("#slots", *identity.batch_path, self.number)

        def claim(number: int) -> bool:
            claimed = session.decisions.claim((*leases, number), Decision.COMMIT, {"holder": holder}, opening=opening)
            return claimed.mine

        for slot in [slot for slot in self.slots if slot.batch != identity.batch]:
            # The slot was leased without a gap, so no other process has opened its id since.
            if slot.batch == identity.batch - 1 and claim(slot.number):
                slot.batch = identity.batch
                return slot
            self.slots.remove(slot)
            close_logging_errors(slot.bridge)
        taken = {claimed.id[-1] for claimed in session.decisions.claims(leases)}
        number = 0
        while number in taken or not claim(number):
            number += 1
        id = writer_id(self.options, identity.path, self.number, str(number))
        bridge = connect(self.options, self.options.application(identity.query), id)
        self.slots.append(_Slot(number, bridge, identity.batch))
        # A newer run fences the ids that older runs have opened. It may have listed them before this id was opened.
        session.decisions.open(identity.path, name=identity.run)
        return self.slots[-1]

    def close(self) -> None:
        while self.slots:
            close_logging_errors(self.slots.pop().bridge)


_slot_writers: ClientPool[SlotWriters] = ClientPool()
