"""Writes a task's rows into prepared transactions. The driver decides later whether they are committed.

A transaction costs far more than a few rows, so a small task writes nothing: its rows travel in its report to the
driver, which writes the rows of all small tasks together.

If the iterator of rows ends early because another part of the task has failed, this code cannot distinguish that from
the real end. Only the driver sees which tasks succeeded, so only the driver decides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pyspark_txnbridge._kept_bridges import ClientPool, Opening, SinkSession, close_logging_errors, connect, sessions
from pyspark_txnbridge._worker_gc import begin_call
from pyspark_txnbridge._write.batch_identity import BatchId, Part, Written
from pyspark_txnbridge._write.rows import Columns, RowTotals, total
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.transaction_cleanup import (
    abort_open,
    ask_all,
    check_log,
    check_number,
    fence_older,
    finish_decided,
    is_done,
    lost_parts,
    unfinished,
    writer_id,
)
from txnbridge import Bridge, Decision, TransactionAborted

if TYPE_CHECKING:
    import pyarrow as pa

# The longest life of a transaction where the broker sets no limit: as long as a broker's default limit.
_DEFAULT_LIFETIME_SECONDS = 900.0
# The share of a transaction's life in which a task may write; the rest is for the other tasks and the driver.
TASK_SHARE = 0.8
# The most bytes of a small task's rows, encoded by Arrow: so few that the rows of 200 tasks, of which Spark makes as
# many after a shuffle, are 3 MiB together.
_SMALL_BYTES = 16 << 10


def write_partition(
    identity: BatchId,
    options: SinkOptions,
    columns: Columns,
    rows: Iterable[pa.RecordBatch],
    partition: int,
    holder: str,
) -> Written:
    """Write a partition's rows into prepared transactions, unless the batch is decided; return the task's report.

    Few rows are not written, but part of the report. `holder` names the task's process to others that want the same
    transactional id.
    """
    begin_call()
    batches = (batch.select(sorted(columns.names)) for batch in rows if batch.num_rows)
    # The task of partition 0 first ends what older runs left open: its rows may take long to come.
    first, is_small = _first_batches(batches) if partition else ([], False)
    if is_small:
        return _small(identity, partition, None, columns, first)
    application = options.application(identity.query)
    key = (options, application)
    with (
        sessions.held(key, lambda: SinkSession(options, application)) as session,
        slot_writers.held((key, identity.path), lambda: SlotWriters(options)) as writers,
    ):
        attempt = _begin(identity, partition, session, writers)
        if attempt is None:
            return Written(identity, partition, None, *_count(columns, chain(first, batches)).sums, settled=True)
        if not partition:
            first, is_small = _first_batches(batches)
        if is_small:
            return _small(identity, partition, attempt, columns, first)
        take = partial(writers.take, session, identity, holder)
        parts = prepare(take, columns, chain(first, batches), partition)
        totals = total(parts).sums
        if not _are_still_needed(identity, session, parts):
            return Written(identity, partition, None, *totals, settled=True)
        return Written(identity, partition, attempt, *totals, parts=parts)


def _first_batches(batches: Iterator[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], bool]:
    """Return a partition's first batches, up to the one that makes its task a large one; and whether these are all."""
    from pyarrow.ipc import get_record_batch_size

    first, size = [], 0
    for batch in batches:
        first.append(batch)
        size += get_record_batch_size(batch)
        if size > _SMALL_BYTES:
            return first, False
    return first, True


def _small(
    identity: BatchId, partition: int, attempt: int | None, columns: Columns, batches: list[pa.RecordBatch]
) -> Written:
    """Return the report of a small task. Counting its rows raises the errors of rows that no broker takes."""
    if not batches:
        return Written(identity, partition, attempt)
    import pyarrow as pa

    with pa.BufferOutputStream() as output, pa.ipc.new_stream(output, batches[0].schema) as stream:
        stream.write_table(pa.Table.from_batches(batches))
    travels = output.getvalue().to_pybytes()
    return Written(identity, partition, attempt, *_count(columns, batches).sums, travels=travels)


def _begin(identity: BatchId, partition: int, session: SinkSession, writers: SlotWriters) -> int | None:
    """Read the decision log; return the number of the batch's present attempt (see `_attempt`).

    The first task of a run in a process checks the log. The first one of partition 0 ends what older runs left open.
    """
    opening, attempt = _look(identity, session)
    if not writers.belong_to(opening):
        check_log(session, identity)
        check_number(session, identity)
    elif partition or writers.ended_older:
        return attempt
    if partition == 0 and opening.number > 1:
        # The decisions of older runs are finished first. Their other open transactions would hold readers back.
        finish_decided(session, identity.path)
        fence_older(session, identity.path, opening.number - 1)
        abort_open(session, identity.path, opening.number - 1)
    writers.renew(opening)
    writers.ended_older = partition == 0
    return _attempt(identity, session)


def prepare(
    take: Callable[[], Bridge], columns: Columns, batches: Iterable[pa.RecordBatch], partition: int
) -> list[Part]:
    """Write rows into prepared transactions, each with as many rows as the broker allows; return the transactions.

    `take` returns a bridge for each of them.
    """
    parts: list[Part] = []
    rows = iter(batches)
    batch = next(rows, None)
    while batch is not None:
        bridge = take()
        most = bridge.limits.transaction_messages or sys.maxsize
        timeout, hold = _times(bridge)
        began_at = int(time.time() * 1000)
        count = RowTotals()
        with bridge.transaction(prepare=True, timeout=timeout, hold=hold) as txn:
            while batch is not None and (room := most - count.rows):
                count.add(columns.send(batch.slice(0, room), txn))
                batch = batch.slice(room) if room < batch.num_rows else next(rows, None)
        token = txn.token
        assert token is not None
        times = (began_at, int(time.time() * 1000), token.expires_at)
        parts.append(Part(partition, str(token), sorted(count.topics), *count.sums, *times))
    return parts


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


def _are_still_needed(identity: BatchId, session: SinkSession, parts: list[Part]) -> bool:
    """Return whether a driver will still end the prepared transactions of this task; if not, abort them here.

    A newer run, and a driver whose batch is done or given up, end all open transactions of this run's tasks. But they
    may have listed these transactions before this task's transactions began.
    """
    attempt = None
    try:
        _, attempt = _look(identity, session)
    finally:
        if attempt is None:
            ask_all(session.bridge.abort, [part.token for part in parts])
    return attempt is not None


def _count(columns: Columns, batches: Iterable[pa.RecordBatch]) -> RowTotals:
    return total(columns.send(batch, None) for batch in batches)


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

    A process leases a slot for one batch by a record in the decision log. For the next batch the process leases the
    same slot again, because the slot's connections are open.
    """

    options: SinkOptions
    opening: Opening = None  # the run's opening in the decision log
    ended_older: bool = False  # whether a task of this run has ended here what older runs left open
    slots: list[_Slot] = field(default_factory=list)

    def belong_to(self, opening: Opening) -> bool:
        """Return whether these writers are of the run that opened the query's id, by name and number of `opening`."""
        own = self.opening
        return own is not None and (own.name, own.number) == (opening.name, opening.number)

    def renew(self, opening: Opening) -> None:
        """Let new writers belong to the run that opened the query's id by `opening`; close those of another run."""
        if not self.belong_to(opening):
            self.close()
        self.opening = opening

    def take(self, session: SinkSession, identity: BatchId, holder: str) -> Bridge:
        """Return a bridge that can prepare one more transaction. Raise `InvalidState` if the batch is done."""
        for slot in self.slots:
            most = slot.bridge.limits.prepared_transactions
            if slot.batch == identity.batch and (most is None or slot.used < most):
                slot.used += 1
                return slot.bridge
        slot = self._lease(session, identity, holder)
        slot.used = 1
        return slot.bridge

    def _lease(self, session: SinkSession, identity: BatchId, holder: str) -> _Slot:
        leases = ("#slots", *identity.batch_path, self.opening.number)

        def claim(number: int) -> bool:
            id, data = (*leases, number), {"holder": holder}
            return bool(session.decisions.claim(id, Decision.COMMIT, data, opening=self.opening).mine)

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
        id = writer_id(self.options, identity.path, self.opening.number, str(number))
        bridge = connect(self.options, self.options.application(identity.query), id)
        self.slots.append(_Slot(number, bridge, identity.batch))
        # A newer run fences the ids that older runs have opened. It may have listed them before this id was opened.
        session.decisions.open(identity.path, name=identity.run)
        return self.slots[-1]

    def close(self) -> None:
        while self.slots:
            close_logging_errors(self.slots.pop().bridge)


slot_writers: ClientPool[SlotWriters] = ClientPool()
