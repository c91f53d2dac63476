"""What runs on the driver when all tasks of a batch have succeeded: decide, then publish, then mark as done.

Every step may be the last one of this process. The next driver, or `recover`, reads the log and goes on from there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, TypeVar

from pyspark_txnbridge._batch_identity import Unit, Written
from pyspark_txnbridge._cleanup import (
    ask_all,
    check_log,
    decided,
    finish,
    finish_decided,
    in_doubt,
    is_done,
    lost,
    mark_done,
    other_rows,
    sweep,
)
from pyspark_txnbridge._options import SinkOptions
from pyspark_txnbridge._rows import Count
from pyspark_txnbridge._session import Claim, Keeper, Opening, Session, close_logging_errors, connect, sessions
from pyspark_txnbridge._task import TASK_SHARE
from txnbridge import (
    AccessDenied,
    Bridge,
    Capability,
    Decision,
    Fenced,
    InvalidOption,
    InvalidState,
    NotFound,
    TokenState,
    TransactionAborted,
    TxnBridgeError,
)

_log = logging.getLogger("txnbridge.spark")

# Set where Spark collects what its Python workers log, which by themselves let only warnings pass.
_COLLECTED = "PYSPARK_SPARK_SESSION_UUID"

_Result = TypeVar("_Result")

# Each micro-batch is checked; one connection serves all of them.
_checked: Keeper[Bridge] = Keeper()


def commit(options: SinkOptions, messages: Sequence[Written | None], unit: Unit | None = None) -> None:
    """Publish a batch. It returns when all of it is committed, by whomever. Safe to repeat.

    `unit` says which batch it is, where a batch may have no task that does.
    """
    if _COLLECTED in os.environ and _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    found, parts = _check(messages, unit)
    with_session(options, found, lambda session: _commit(session, options, found, parts))


def abort(options: SinkOptions, messages: Sequence[Written | None], unit: Unit | None = None) -> None:
    """Give a batch up, unless it is decided. Nothing depends on it: what it leaves behind ends later by itself."""
    written = [message for message in messages if message is not None]
    found = unit or (written[0].unit if written else None)
    if found is None:
        return  # Spark says that a batch is given up, and not which
    attempt = written[0].attempt if written else found.attempt
    try:
        with_session(options, found, lambda session: _abort(session, options, found, attempt))
    except TxnBridgeError as error:
        _log.warning("%s could not be given up, its transactions end by their time-out: %s", found, error)


def next_attempt(options: SinkOptions, unit: Unit) -> int:
    """The number under which a batch can be decided next. Raises `Fenced` if another run has taken over."""

    def look(session: Session) -> int:
        session.decisions.open(unit.path, name=unit.run)
        return len(session.decisions.claims(unit.batch_path))

    return with_session(options, unit, look)


def check_broker(options: SinkOptions, query: str | None = None) -> None:
    """Raises, before the first row, if the broker cannot be reached or cannot keep what is promised here.

    Or if the topic that an option names is missing, or the decision log cannot be read; of a query that is not known
    yet, only one whose name options tell.
    """
    known = query or options.app_id or options.log
    application = options.application(known or "check")
    with _checked.held((options, application), lambda: _check_all(options, application, known is not None)):
        pass  # what passed once is not asked again in this process


def with_session(options: SinkOptions, unit: Unit, work: Callable[[Session], _Result]) -> _Result:
    application = options.application(unit.query)
    with sessions.held((options, application), lambda: Session(options, application)) as session:
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
    with suppress(AccessDenied):  # a query may have the right to write a topic, and not to ask about it
        try:
            bridge.admin.bounds(topic)
        except NotFound:
            # Writing makes the topic where that is allowed; elsewhere the error says what to do.
            with bridge.transaction() as txn:
                txn.send(topic, b"")
                txn.abort()


def _check(messages: Sequence[Written | None], unit: Unit | None) -> tuple[Unit, list[Written]]:
    written = [message for message in messages if message is not None]
    units = {message.unit for message in written} | ({unit} if unit is not None else set())
    if len(written) < len(messages) or not units:
        raise InvalidOption(
            "some tasks reported nothing, so it is not known what they wrote. The continuous trigger does that: it is"
            " not supported, use processingTime or availableNow"
        )
    if len(units) != 1:
        raise InvalidState(f"tasks of one batch report different ones: {', '.join(map(str, units))}")
    return units.pop(), written


# --- commit ----------------------------------------------------------------------------------------------------------


def _commit(session: Session, options: SinkOptions, unit: Unit, written: list[Written]) -> None:
    began = time.monotonic()
    decisions = session.decisions
    opening = decisions.open(unit.path, name=unit.run)
    check_log(session, options, unit)
    if is_done(session, unit):
        published = _check_repetition(session, unit)
        decided_at = began
    else:
        # Batches are published in order, also what an older run decided and did not finish.
        for older in decided(session, unit.path):
            if older.id[2] < unit.batch:
                finish(session, older)
        claim = _decide(session, unit, opening, written)
        decided_at = time.monotonic()
        if claim is not None:
            finish(session, claim)
            mark_done(session, unit.path, unit.batch, claim.data)
        published = None if claim is None else claim.data
    # The batch is done: what attempts wrote and nobody decided must not hold readers back.
    sweep(session, options, unit.path, opening.number)
    _check_rows(session, options, unit, written, published)
    prepared = [part for part in written if part.token]
    total = _total(written)
    _log.info(
        "%s: %d rows, %d bytes in %d transactions; prepared in %d ms, decided in %.0f ms, published in %.0f ms;"
        " the oldest was %.1f s old",
        unit,
        total.rows,
        total.bytes,
        len(prepared),
        max((part.prepared_at for part in prepared), default=0) - min((part.began_at for part in prepared), default=0),
        (decided_at - began) * 1000,
        (time.monotonic() - decided_at) * 1000,
        max((time.time() - part.began_at / 1000 for part in prepared), default=0.0),
    )


def _decide(session: Session, unit: Unit, opening: Opening, written: list[Written]) -> Claim | None:
    """The decision that counts for a batch; None if somebody has marked it done meanwhile."""
    known = decided(session, unit.batch_path)
    if known:
        dead = lost(session, known[-1])
        return _replace(session, unit, opening, known[-1], dead, written) if dead else known[-1]
    if any(part.settled for part in written):
        raise InvalidState(
            f"tasks found {unit} decided, and now the decision log knows nothing of it: the log has lost records"
        )
    attempts = {part.attempt for part in written} or {unit.attempt or 0}
    if len(attempts) > 1:
        raise _given_up(unit)
    count = _total(written)
    total = {"rows": count.rows, "fingerprint": count.fingerprint, "run": unit.run}
    return _claim(session, unit, opening, attempts.pop(), written, total)


def _claim(
    session: Session, unit: Unit, opening: Opening, attempt: int, written: list[Written], total: Mapping[str, Any]
) -> Claim | None:
    _check_alive(session, unit, written)
    told = ("token", "partition", "topics", "rows", "fingerprint")
    parts = [{name: getattr(part, name) for name in told} for part in written if part.token]
    try:
        claim = session.decisions.claim(
            (*unit.batch_path, attempt), Decision.COMMIT, {"parts": parts, **total}, opening=opening
        )
    except InvalidState:
        return None
    if claim.decision is Decision.ABORT:
        raise _given_up(unit)
    return claim


def _replace(
    session: Session, unit: Unit, opening: Opening, claim: Claim, dead: list[Mapping[str, Any]], written: list[Written]
) -> Claim | None:
    """Decide to publish, for exactly the lost parts of a decision, others that hold the same rows."""
    attempt = claim.id[-1] + 1
    fresh = [part for part in written if part.token and part.attempt == attempt]
    chosen = []
    for part in dead:
        same = [each for each in fresh if (each.rows, each.fingerprint) == (part["rows"], part["fingerprint"])]
        twin = min(same, key=lambda each: each.partition != part["partition"], default=None)
        if twin is None:
            raise in_doubt(session, claim, dead, "The rows came again, but not shared out to tasks as before. ")
        fresh.remove(twin)
        chosen.append(twin)
    total = {name: claim.data[name] for name in ("rows", "fingerprint", "run")}
    return _claim(session, unit, opening, attempt, chosen, total)


def _total(written: list[Written]) -> Count:
    total = Count()
    for part in written:
        total.add(Count(part.rows, part.bytes, part.fingerprint))
    return total


def _given_up(unit: Unit) -> TransactionAborted:
    return TransactionAborted(f"{unit} was given up while it was written; restart the query to write it again")


def _check_alive(session: Session, unit: Unit, written: list[Written]) -> None:
    """Nothing is decided that may be dead, or may die before it is published."""
    by_token = {part.token: part for part in written if part.token is not None}
    for part in by_token.values():
        if part.expires_at is not None:
            _check_age(unit, part, part.expires_at)
    for token, status in ask_all(session.bridge.status, by_token).items():
        if status.state is not TokenState.PREPARED:
            raise TransactionAborted(
                f"{unit}: the transaction of partition {by_token[token].partition} is {status.state.value} before"
                f" anybody decided about it ({status.reason or 'no reason is known'}). Nothing was published"
            )


def _check_age(unit: Unit, part: Written, expires_at: int) -> None:
    age, life = time.time() - part.began_at / 1000, (expires_at - part.began_at) / 1000
    if age > TASK_SHARE * life:
        raise TransactionAborted(
            f"{unit} took too long: the transaction of partition {part.partition} is {age:.0f} s old, and the broker"
            f" keeps it for {life:.0f} s. Nothing was published. Make batches smaller (maxOffsetsPerTrigger), or let"
            " the broker keep transactions longer"
        )


def _check_repetition(session: Session, unit: Unit) -> Mapping[str, Any] | None:
    """Return rows and fingerprint of a batch that is done and comes again; None if they are not to be compared."""
    _check_order(session, unit)
    if session.decisions.read(("#skipped", *unit.batch_path)).claim is not None:
        return None  # an operator has looked at what was published
    claims = session.decisions.claims(("#results", *unit.path))
    return next((claim.data for claim in claims if claim.id[-1] == unit.batch), None)


def _check_order(session: Session, unit: Unit) -> None:
    """Spark repeats only the last batch of a checkpoint."""
    last = session.decisions.read(unit.path).done_up_to
    if last is None or unit.batch == last:
        return
    if unit.job:
        _log.warning("%s is skipped: version %d of this job is done already", unit, last)
        return
    raise InvalidOption(
        f"{unit} comes again, and every batch up to {last} is done. Nothing of it was published now. Spark repeats only"
        " the last batch of a checkpoint, so this is not the checkpoint that wrote those batches. A new one under the"
        f" same txnAppId needs txnVersion={last + 1}, to count on behind them. One restored from a backup reads again"
        f" what is published up to batch {last}: begin a new one behind that"
    )


def _check_rows(
    session: Session, options: SinkOptions, unit: Unit, written: list[Written], published: Mapping[str, Any] | None
) -> None:
    """Raise if a batch that is published comes again with other rows: those are not written."""
    if published is None:
        return
    count = _total(written)
    same = count.rows == published["rows"]
    if same and (options.nondeterministic or count.fingerprint == published["fingerprint"]):
        return
    if options.app_id is None:
        raise other_rows(session, unit, published["rows"], count.rows)
    raise InvalidOption(
        f"{unit} is done, with {published['rows']} rows; now it has {count.rows}, or other ones. Nothing of them"
        " was published. Is txnVersion used twice? The next version of a job, or a new checkpoint under the same"
        f" txnAppId, goes on behind the last one: txnVersion={unit.batch + 1}"
    )


# --- abort -----------------------------------------------------------------------------------------------------------


def _abort(session: Session, options: SinkOptions, unit: Unit, attempt: int | None) -> None:
    decisions = session.decisions
    try:
        opening = decisions.open(unit.path, name=unit.run)
        check_log(session, options, unit)
        claims = decisions.claims(unit.batch_path)
        if any(claim.decision is Decision.COMMIT for claim in claims):
            return
        id = (*unit.batch_path, len(claims) if attempt is None else attempt)
        claim = decisions.claim(id, Decision.ABORT, {"run": unit.run}, opening=opening)
    except (Fenced, InvalidState):
        return  # a newer run has taken over, or the batch is done
    if claim.decision is Decision.ABORT:
        # A broker that does not keep the log cannot tell a token that an older run decided from what nobody did.
        finish_decided(session, unit.path)
        sweep(session, options, unit.path, opening.number)
