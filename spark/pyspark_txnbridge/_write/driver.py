"""The driver's part of a batch: write small tasks' rows, decide, publish and mark it done, when all tasks succeeded.

The driver may die after any step. The next driver, or `txnbridge spark recover`, reads the decision log and continues.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

from pyspark_txnbridge._kept_bridges import (
    Claim,
    ClientPool,
    Opening,
    SinkSession,
    close_logging_errors,
    connect,
    sessions,
)
from pyspark_txnbridge._worker_gc import begin_call
from pyspark_txnbridge._write.batch_identity import SMALL_TASKS, BatchId, Part, Written, place
from pyspark_txnbridge._write.rows import Columns, total
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.task import TASK_SHARE, SlotWriters, prepare, slot_writers
from pyspark_txnbridge._write.transaction_cleanup import (
    abort_open,
    ask_all,
    check_log,
    check_number,
    finish,
    finish_decided,
    first_number,
    in_doubt,
    is_done,
    lost_parts,
    mark_done,
    other_rows,
    record_first_number,
    recover_command,
    unfinished,
)
from txnbridge import (
    AccessDenied,
    Bridge,
    BrokerUnavailable,
    Capability,
    Decision,
    Fenced,
    InvalidOption,
    InvalidState,
    NotFound,
    OutcomeUnknown,
    TokenState,
    TransactionAborted,
    TxnBridgeError,
)

_log = logging.getLogger("txnbridge.spark")

# Spark sets this environment variable if it collects log lines of Python workers; else a worker logs only warnings.
_LOGS_COLLECTED = "PYSPARK_SPARK_SESSION_UUID"

# The most rows that the driver turns into messages at once: as many as Spark gives a task in one batch.
_ROWS_AT_ONCE = 10_000

_Result = TypeVar("_Result")
# The JSON that the decision log stores for one transaction of a batch, or for the batch's totals.
_Stored = Mapping[str, Any]

# Spark creates a writer, which checks the broker, for each micro-batch. One connection for each sink serves all checks.
_checked: ClientPool[Bridge] = ClientPool()


def commit(options: SinkOptions, messages: Sequence[Written | None], identity: BatchId | None = None) -> None:
    """Decide to commit a batch, unless it is decided, and commit the transactions of its tasks. Safe to repeat.

    Return when each transaction of the batch is committed, by this or another process. `identity` is needed if it is
    possible that no task has reported the batch's identity.
    """
    begin_call()
    if _LOGS_COLLECTED in os.environ and _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    identity, parts = _check(messages, identity)
    with_session(options, identity, lambda session: _commit(session, identity, parts))


def abort(options: SinkOptions, messages: Sequence[Written | None], identity: BatchId | None = None) -> None:
    """Decide to ABORT a batch unless it is decided already, and abort the batch's transactions.

    If this fails, the transactions end later by their time-out.
    """
    written = [message for message in messages if message is not None]
    identity = identity or (written[0].identity if written else None)
    if identity is None:
        return  # no task has reported the identity of the batch
    attempt = next(iter(_attempts(written)), identity.attempt)
    try:
        with_session(options, identity, lambda session: _abort(session, identity, attempt))
    except TxnBridgeError as error:
        _log.warning("%s could not be given up, its transactions end by their time-out: %s", identity, error)


def next_attempt(options: SinkOptions, identity: BatchId) -> int:
    """Return the number of the batch's next attempt. Raise `Fenced` if a newer run of the query has opened the sink."""

    def look(session: SinkSession) -> int:
        session.decisions.open(identity.path, name=identity.run)
        return len(session.decisions.claims(identity.batch_path))

    return with_session(options, identity, look)


def check_broker(options: SinkOptions, query: str | None = None) -> None:
    """Raise an error, before the first row, if the broker cannot be reached or lacks a capability that this sink needs.

    Raise an error also if the topic that an option names is missing, or if the decision log cannot be read. The
    decision log is not checked while its name is unknown: the name may contain the query's id, which only Spark knows.
    """
    known = query or options.app_id or options.log
    application = options.application(known or "check")
    with _checked.held((options, application), lambda: _check_all(options, application, known is not None)):
        pass  # a check that passed once is not repeated in this process


def with_session(options: SinkOptions, identity: BatchId, work: Callable[[SinkSession], _Result]) -> _Result:
    application = options.application(identity.query)
    with sessions.held((options, application), lambda: SinkSession(options, application)) as session:
        return work(session)


def _check_all(options: SinkOptions, application: str, with_log: bool) -> Bridge:
    bridge = connect(options, application)
    try:
        for capability in (Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.DECISION_LOG):
            bridge.capabilities.require(capability)
        if options.topic is not None:
            _check_topic(bridge, options.topic)
        if with_log:
            with closing(bridge.decisions()) as decisions:
                decisions.read(application)
    except BaseException:
        close_logging_errors(bridge)
        raise
    return bridge


def _check_topic(bridge: Bridge, topic: str) -> None:
    with suppress(AccessDenied):  # a query may be allowed to write to a topic, but not to describe it
        try:
            bridge.admin.bounds(topic)
        except NotFound:
            # The sink's first send creates the topic if the broker allows this; otherwise its error says what to do.
            with bridge.transaction() as txn:
                txn.send(topic, b"")
                txn.abort()


def _check(messages: Sequence[Written | None], identity: BatchId | None) -> tuple[BatchId, list[Written]]:
    written = [message for message in messages if message is not None]
    identities = {message.identity for message in written} | ({identity} if identity is not None else set())
    if len(written) < len(messages) or not identities:
        raise InvalidOption(
            "some tasks reported nothing, so it is not known what they wrote. The continuous trigger does that: it is"
            " not supported, use processingTime or availableNow"
        )
    if len(identities) != 1:
        raise InvalidState(f"tasks of one batch report different batches: {', '.join(map(str, identities))}")
    return identities.pop(), written


# --- commit ----------------------------------------------------------------------------------------------------------


def _commit(session: SinkSession, identity: BatchId, written: list[Written]) -> None:
    began = time.monotonic()
    parts = [part for report in written for part in report.parts]
    decisions = session.decisions
    opening = decisions.open(identity.path, name=identity.run)
    check_log(session, identity)
    check_number(session, identity)
    if is_done(session, identity):
        published, decided_at = _check_repetition(session, identity), began
    else:
        # Batches are published in order: first those that an older run decided and did not finish.
        for older in unfinished(session, identity.path):
            if older.id[2] < identity.batch:
                finish(session, older)
        claim = _decide(session, identity, opening, written, parts)
        decided_at = time.monotonic()
        if claim is not None:
            try:
                _repeating(identity, partial(_publish, session, identity, claim))
            except (BrokerUnavailable, OutcomeUnknown) as error:
                raise OutcomeUnknown(
                    f"{identity} is decided, and perhaps published in part: {error}. Do not write its rows again: a"
                    f" restarted query, or {recover_command(session.options, identity.query)}, publishes the rest"
                ) from error
        published = None if claim is None else claim.data
    # The batch is done. Undecided transactions of its other attempts must not hold readers back.
    abort_open(session, identity.path, opening.number)
    _check_rows(session, identity, written, published)
    count = total(written)
    _log.info(
        "%s: %d rows, %d bytes in %d transactions; prepared in %d ms, decided in %.0f ms, published in %.0f ms;"
        " the oldest was %.1f s old",
        identity,
        count.rows,
        count.bytes,
        len(parts),
        max((part.prepared_at for part in parts), default=0) - min((part.began_at for part in parts), default=0),
        (decided_at - began) * 1000,
        (time.monotonic() - decided_at) * 1000,
        max((time.time() - part.began_at / 1000 for part in parts), default=0.0),
    )


def _decide(
    session: SinkSession, identity: BatchId, opening: Opening, written: list[Written], parts: list[Part]
) -> Claim | None:
    """Return the decision (a COMMIT claim) that counts for a batch, and record one if there is none yet.

    `parts` are the tasks' transactions. Those that this driver writes are added. Return None if the batch is marked
    done.
    """
    known = unfinished(session, identity.batch_path)
    if known:
        dead = lost_parts(session, known[-1])
        return _replace(session, identity, opening, known[-1], dead, written) if dead else known[-1]
    if any(report.settled for report in written) and not is_done(session, identity):
        text = f"tasks found {identity} decided, and now the decision log has no record of it: the log has lost records"
        raise InvalidState(text)
    attempts = _attempts(written) or [identity.attempt or 0]
    if len(attempts) > 1:
        raise _given_up(identity)
    record_first_number(session, identity, opening)
    count = total(written)
    totals = {"rows": count.rows, "fingerprint": count.fingerprint, "run": identity.run, **session.target}
    return _claim(session, identity, opening, attempts[0], parts, _small_rows(session, written), totals)


def _attempts(written: Sequence[Written]) -> list[int]:
    """Return the numbers of attempts in tasks' reports; small tasks, whose rows fit every attempt, may report none."""
    return sorted({report.attempt for report in written if report.attempt is not None})


def _small_rows(session: SinkSession, written: list[Written]) -> list[Any]:
    """Return the rows of small tasks as Arrow tables, each with as many tasks as the broker allows in a transaction.

    The same reports make the same tables, so that a repetition can replace a lost transaction. All rows of a task are
    in one table, because a repetition may have them in another order.
    """
    small = sorted((report for report in written if report.travels), key=lambda report: report.partition)
    if not small:
        return []
    import pyarrow as pa

    most = session.bridge.limits.transaction_messages or sys.maxsize
    tables: list[list[Any]] = []
    room = 0
    for report in small:
        if report.rows > room:
            tables.append([])
            room = most
        tables[-1].append(pa.ipc.open_stream(report.travels).read_all())
        room -= report.rows
    return [pa.concat_tables(table).combine_chunks() for table in tables]


def _claim(
    session: SinkSession,
    identity: BatchId,
    opening: Opening,
    attempt: int,
    parts: list[Part],
    small: list[Any],
    totals: _Stored,
) -> Claim | None:
    """Write rows of small tasks, add their transactions to `parts`, and record the decision to commit all of these.

    Return the decision (claim) that counts, or None if the batch is marked done.
    """
    own: list[Part] = []
    asked = False
    try:
        for rows in small:
            own += _repeating(identity, partial(_write, session, identity, opening, rows))
        parts += own
        _check_alive(session, identity, parts)
        stored = ("token", "partition", "topics", "rows", "fingerprint")
        data = {"parts": [{name: getattr(part, name) for name in stored} for part in parts], **totals}
        asked = True
        id = (*identity.batch_path, attempt)
        claim = _repeating(identity, lambda: session.decisions.claim(id, Decision.COMMIT, data, opening=opening))
        if claim.decision is Decision.ABORT:
            raise _given_up(identity)
    except InvalidState:
        if not is_done(session, identity):
            raise
        return None
    except BaseException as error:
        if not asked or isinstance(error, Fenced | TransactionAborted):
            # It is certain that no claim counts that names them. A newer run may have listed open transactions before.
            with suppress(TxnBridgeError):
                ask_all(session.bridge.abort, [part.token for part in own])
        raise
    return claim


def _write(session: SinkSession, identity: BatchId, opening: Opening, rows: Any) -> list[Part]:
    """Write rows into prepared transactions. No decision names those of a call that fails: they are aborted later."""
    options = session.options
    key = (options, options.application(identity.query))
    with slot_writers.held((key, identity.path), lambda: SlotWriters(options)) as writers:
        writers.renew(opening)
        take = partial(writers.take, session, identity, f"driver, process {os.getpid()}")
        columns = Columns(frozenset(rows.column_names), options.topic)
        return prepare(take, columns, rows.to_batches(_ROWS_AT_ONCE), SMALL_TASKS)


def _publish(session: SinkSession, identity: BatchId, claim: Claim) -> None:
    finish(session, claim)
    mark_done(session, identity.path, identity.batch, claim.data)


def _repeating(identity: BatchId, step: Callable[[], _Result], again: int = 3) -> _Result:
    """Take a step of a commit, and up to `again` times more after an error: Spark repeats no commit."""
    try:
        return step()
    except (TransactionAborted, BrokerUnavailable, OutcomeUnknown) as error:
        if not again or getattr(error, "permanent", False):
            raise
        _log.warning("a step of the commit of %s is repeated after an error: %s", identity, error)
    return _repeating(identity, step, again - 1)


def _replace(
    session: SinkSession, identity: BatchId, opening: Opening, claim: Claim, dead: list[_Stored], written: list[Written]
) -> Claim | None:
    """Return a new decision on a batch, a claim with transactions of a repetition (`written`) for lost ones (`dead`).

    A new transaction must have the same rows as the transaction that it replaces.
    """
    attempt = claim.id[-1] + 1
    fresh = [part for report in written if report.attempt == attempt for part in report.parts]
    # Small tasks' rows are not written yet, and a table's number stands for the token.
    tables = _small_rows(session, written)
    for number, rows in enumerate(tables):
        count = Columns(frozenset(rows.column_names), session.options.topic).send(rows, None)
        fresh.append(Part(SMALL_TASKS, str(number), [], *count.sums, 0, 0, None))
    chosen = []
    for part in dead:
        same = [each for each in fresh if (each.rows, each.fingerprint) == (part["rows"], part["fingerprint"])]
        twin = min(same, key=lambda each: each.partition != part["partition"], default=None)
        if twin is None:
            raise in_doubt(session, claim, dead, "The rows were written again, but other tasks have them. ")
        fresh.remove(twin)
        chosen.append(twin)
    totals = {name: value for name, value in claim.data.items() if name != "parts"}
    parts = [part for part in chosen if part.partition != SMALL_TASKS]
    small = [tables[int(part.token)] for part in chosen if part.partition == SMALL_TASKS]
    return _claim(session, identity, opening, attempt, parts, small, totals)


def _given_up(identity: BatchId) -> TransactionAborted:
    return TransactionAborted(f"{identity} was given up while it was written; restart the query to write it again")


def _check_alive(session: SinkSession, identity: BatchId, parts: list[Part]) -> None:
    """Raise `TransactionAborted` if one of the batch's transactions has ended, or may time out before its commit."""
    by_token = {part.token: part for part in parts}
    for part in parts:
        if part.expires_at is not None:
            _check_age(identity, part, part.expires_at)
    for token, status in ask_all(session.bridge.status, by_token).items():
        if status.state is not TokenState.PREPARED:
            raise TransactionAborted(
                f"{identity}: the transaction of {place(by_token[token].partition)} is {status.state.value} before"
                f" anybody decided about it ({status.reason or 'no reason is known'}). Nothing was published"
            )


def _check_age(identity: BatchId, part: Part, expires_at: int) -> None:
    age, life = time.time() - part.began_at / 1000, (expires_at - part.began_at) / 1000
    if age > TASK_SHARE * life:
        raise TransactionAborted(
            f"{identity} took too long: the transaction of {place(part.partition)} is {age:.0f} s old; the broker"
            f" keeps it for {life:.0f} s. Nothing was published. Make batches smaller (maxOffsetsPerTrigger), or let"
            " the broker keep transactions longer"
        )


def _check_repetition(session: SinkSession, identity: BatchId) -> _Stored | None:
    """Return the stored totals of a batch that is done and that Spark repeats; None if the log has none for it."""
    _check_order(session, identity)
    if session.decisions.read(("#skipped", *identity.batch_path)).claim is not None:
        return None  # an operator has checked what was published, and skipped the batch
    claims = session.decisions.claims(("#results", *identity.path))
    return next((claim.data for claim in claims if claim.id[-1] == identity.batch), None)


def _check_order(session: SinkSession, identity: BatchId) -> None:
    """Raise `InvalidOption` for a batch before the last one: Spark repeats only the last batch of a checkpoint."""
    last = session.decisions.read(identity.path).done_up_to
    if last is None or identity.batch == last:
        return
    if identity.job:
        _log.warning("%s is skipped: version %d of this job is done already", identity, last)
        return
    raise InvalidOption(
        f"{identity} comes again, and every batch up to {last} is done. Nothing of it was published now. Spark repeats"
        " only a checkpoint's last batch, so another checkpoint has written those batches. A new checkpoint under the"
        f" same txnAppId needs txnVersion={last + 1}. A checkpoint restored from a backup reads again what is published"
        f" up to batch {last}: begin a new checkpoint after that"
    )


def _check_rows(session: SinkSession, identity: BatchId, written: list[Written], published: _Stored | None) -> None:
    """Raise `BatchInDoubt` if a repeated batch has other rows than those that were published (None: nothing was).

    With the option `txnAppId`, by which the program numbers its batches itself, raise `InvalidOption` instead, unless
    this checkpoint has published the batch; also for the same rows, if another checkpoint has (hazard H127).
    """
    if published is None:
        return
    count, options, target = total(written), session.options, session.target
    if identity.job and (done := {name: published.get(name, now) for name, now in target.items()}) != target:
        raise InvalidOption(
            f"{identity} is done for {done}, and now it is for {target}: nothing was published there. Give each sink of"
            " a job a name of its own (option sink)"
        )
    same = options.nondeterministic or count.fingerprint == published["fingerprint"]
    ours = options.app_id is None or (not identity.job and first_number(session, identity) is not None)
    if same and count.rows == published["rows"] and (ours or identity.job or not identity.checkpoint):
        return
    if ours:
        raise other_rows(session, identity, published["rows"], count.rows)
    raise InvalidOption(
        f"{identity} is done, with {published['rows']} rows; now it has {count.rows}, or other rows, which were not"
        " published. Is txnVersion used twice? The next version of a job, or a new checkpoint under the same txnAppId,"
        f" needs a higher one: txnVersion={identity.batch + 1}"
    )


# --- abort -----------------------------------------------------------------------------------------------------------


def _abort(session: SinkSession, identity: BatchId, attempt: int | None) -> None:
    decisions = session.decisions
    try:
        opening = decisions.open(identity.path, name=identity.run)
        check_log(session, identity)
        claims = decisions.claims(identity.batch_path)
        if not any(claim.decision is Decision.COMMIT for claim in claims):
            id = (*identity.batch_path, len(claims) if attempt is None else attempt)
            claims = [decisions.claim(id, Decision.ABORT, {"run": identity.run}, opening=opening)]
    except (Fenced, InvalidState):
        return  # a newer run has opened the sink, or the batch is done
    # A job without a name has no later run. And a broker that does not keep the log can't tell what is decided.
    finish_decided(session, identity.path)
    if all(claim.decision is Decision.ABORT for claim in claims):
        abort_open(session, identity.path, opening.number)
