"""What runs in a task: its rows go into a transaction of their own, which is prepared and never visible from here.

When the rest of a task fails, Spark ends its rows early and nobody here can tell; so only the driver, which sees the
tasks that succeeded, decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from pyspark_txnbridge._batch_identity import Unit, Written
from pyspark_txnbridge._cleanup import check_log, decided, finish_decided, is_done, lost, shut_out, sweep, writer_id
from pyspark_txnbridge._options import SinkOptions
from pyspark_txnbridge._rows import Columns, Count
from pyspark_txnbridge._session import Keeper, Opening, Session, close_logging_errors, connect, sessions
from txnbridge import Bridge, Decision, InvalidState, TransactionAborted, TxnBridgeError

if TYPE_CHECKING:
    import pyarrow as pa

# Where a broker sets no limit, a batch takes no longer than where one does by default.
_LIFE_SECONDS = 900.0
# Of the time for which a broker keeps a transaction: the rest is for the other tasks and the driver.
TASK_SHARE = 0.8


def write_partition(
    unit: Unit, options: SinkOptions, columns: Columns, batches: Iterable[pa.RecordBatch], partition: int, holder: str
) -> Written:
    """Write one partition's rows into a prepared transaction, unless its batch is decided already."""
    application = options.application(unit.query)
    key = (options, application)
    with (
        sessions.held(key, lambda: Session(options, application)) as session,
        _writers.held((key, unit.path), lambda: Writers(options)) as writers,
    ):
        return _write(unit, options, columns, batches, partition, holder, session, writers)


def _write(
    unit: Unit,
    options: SinkOptions,
    columns: Columns,
    batches: Iterable[pa.RecordBatch],
    partition: int,
    holder: str,
    session: Session,
    writers: Writers,
) -> Written:
    opening = session.decisions.open(unit.path, name=unit.run)
    if writers.number != opening.number:
        check_log(session, options, unit)
    if partition == 0 and opening.number > 1 and writers.number != opening.number:
        # First the decisions of older runs are finished; all else that they left open would hold readers back.
        finish_decided(session, unit.path)
        shut_out(session, options, unit.path, opening.number - 1)
        sweep(session, options, unit.path, opening.number - 1)
    attempt = _attempt(unit, session)
    if attempt is None:
        return _settled(unit, partition, _count(columns, batches))
    began_at = _now()
    rows = iter(batches)
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        return Written(unit, partition, attempt, began_at=began_at, prepared_at=_now())
    try:
        bridge = writers.take(session, unit, opening, holder)
    except InvalidState:
        if not is_done(session, unit):
            raise
        # Everything of the batch was marked done in the meantime.
        return _settled(unit, partition, _count(columns, chain([first], rows)))
    count = Count()
    timeout, hold = _times(bridge)
    with bridge.transaction(prepare=True, timeout=timeout, hold=hold) as txn:
        count.add(columns.send(first, txn))
        for batch in rows:
            count.add(columns.send(batch, txn))
    assert txn.token is not None
    if not _is_awaited(unit, session, str(txn.token)):
        return _settled(unit, partition, count)
    return Written(
        unit,
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
    """How long a task may write, and how long its transaction then waits for the other tasks and the driver."""
    longest = bridge.limits.prepared_seconds
    if longest is None:
        return _LIFE_SECONDS * TASK_SHARE, _LIFE_SECONDS * (1 - TASK_SHARE)
    return longest * TASK_SHARE, None  # all that the broker allows


def _attempt(unit: Unit, session: Session) -> int | None:
    """Under which number the batch can be decided; None if it is. Raises if this very run has given the batch up."""
    if is_done(session, unit):
        return None
    known = decided(session, unit.batch_path)
    if known:
        # The tasks write everything again, and the driver picks out the parts of the decision that were lost.
        return int(known[-1].id[-1]) + 1 if lost(session, known[-1]) else None
    claims = session.decisions.claims(unit.batch_path)
    by_this_run = any(claim.opening == unit.run for claim in claims)
    if by_this_run if unit.attempt is None else len(claims) > unit.attempt:
        raise TransactionAborted(f"{unit} was given up by its driver: this task comes too late")
    return len(claims)


def _is_awaited(unit: Unit, session: Session, token: str) -> bool:
    """Whether somebody will still end what was prepared just now; if not, it is ended here.

    A newer run, or the driver whose batch is done or given up, ends all that this run's tasks left open. It may have
    looked for that before this transaction began.
    """
    try:
        session.decisions.open(unit.path, name=unit.run)
        awaited = _attempt(unit, session) is not None
    except TxnBridgeError:
        session.bridge.abort(token)
        raise
    if not awaited:
        session.bridge.abort(token)
    return awaited


def _settled(unit: Unit, partition: int, count: Count) -> Written:
    return Written(unit, partition, rows=count.rows, bytes=count.bytes, fingerprint=count.fingerprint, settled=True)


def _count(columns: Columns, batches: Iterable[pa.RecordBatch]) -> Count:
    count = Count()
    for batch in batches:
        count.add(columns.send(batch, None))
    return count


def _now() -> int:
    return int(time.time() * 1000)


@dataclass
class _Slot:
    number: int
    bridge: Bridge
    batch: int  # it is leased for
    used: int = 0  # so many of its transactions wait for that batch's decision


@dataclass
class Writers:
    """The writer ids that this process holds for one sink of one query.

    An id is a slot of a run. Slots are leased for a batch in the decision log: the first claim has it. A process that
    had a slot for the last batch asks for the same one again, and finds its connections warm.
    """

    options: SinkOptions
    number: int = 0  # of the run
    slots: list[_Slot] = field(default_factory=list)

    def take(self, session: Session, unit: Unit, opening: Opening, holder: str) -> Bridge:
        """A bridge with room for one more prepared transaction. Raises `InvalidState` for a batch that is done."""
        if opening.number != self.number:
            self.close()
            self.number = opening.number
        for slot in self.slots:
            most = slot.bridge.limits.prepared_transactions
            if slot.batch == unit.batch and (most is None or slot.used < most):
                slot.used += 1
                return slot.bridge
        slot = self._lease(session, unit, opening, holder)
        slot.used = 1
        return slot.bridge

    def _lease(self, session: Session, unit: Unit, opening: Opening, holder: str) -> _Slot:
        leases = ("#slots", *unit.batch_path, self.number)

        def claim(number: int) -> bool:
            claimed = session.decisions.claim((*leases, number), Decision.COMMIT, {"holder": holder}, opening=opening)
            return claimed.mine

        for slot in [slot for slot in self.slots if slot.batch != unit.batch]:
            # Held without a gap, nobody else has opened its id since.
            if slot.batch == unit.batch - 1 and claim(slot.number):
                slot.batch = unit.batch
                return slot
            self.slots.remove(slot)
            close_logging_errors(slot.bridge)
        taken = {claimed.id[-1] for claimed in session.decisions.claims(leases)}
        number = 0
        while number in taken or not claim(number):
            number += 1
        id = writer_id(self.options, unit.path, self.number, str(number))
        bridge = connect(self.options, self.options.application(unit.query), id)
        self.slots.append(_Slot(number, bridge, unit.batch))
        # A newer run shuts older ones out from the ids that they have opened: it may have done so before this one was.
        session.decisions.open(unit.path, name=unit.run)
        return self.slots[-1]

    def close(self) -> None:
        while self.slots:
            close_logging_errors(self.slots.pop().bridge)


_writers: Keeper[Writers] = Keeper()
