"""Commits and aborts prepared transactions, and finds the outcome of any: by its coordinator, or by earlier records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from txnbridge import errors
from txnbridge.spi import Deadline, Ledger, Outcome, Status, Token, TokenState
from txnbridge_kafka.client.marker_proof import CoordinatorSession
from txnbridge_kafka.client.protocol_types import ABORTED, COMMITTED, DONE, OPEN, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import write_missing_markers_of_id
from txnbridge_kafka.outcome.transaction_state_log import (
    NotRecordedYetError,
    last_outcome,
    outcome_by_start,
    state_records,
)
from txnbridge_kafka.write.owner import evidence_key, recorded_outcome

_log = logging.getLogger("txnbridge")

# The longest wait for control markers, which take milliseconds. If a partition has no leader they are written later.
_MARKERS_SECONDS = 5.0
_NO_EVIDENCE = "its writer's id has expired or was opened again since, and no record of its outcome is left"
_STATE_LOG_DENIED = (
    "its writer's id has expired or was opened again since, and only its coordinator's log (topic"
    " __transaction_state), which this user may not read, may have its outcome"
)


def plain_status(cluster: KafkaCluster, ledger: Ledger, how: Mapping[str, Any], deadline: Deadline) -> Status:
    """Return the status of a transaction that was not prepared. `how` are the fields of its token.

    All transactions from one opening of a transactional id to the next have the same producer id and epoch. A commit is
    requested only after every message is stored, so the coordinator's last transaction of that epoch is the token's
    transaction, and not the one before. If a late copy of a request may have begun another transaction afterwards, the
    token also has the transaction's start time (hazard H19).
    """
    if how.get("asked") is False:
        # Only the writer commits a plain transaction, and did not. The coordinator may describe the previous one.
        return Status(TokenState.ABORTED, reason="its writer failed before it requested the commit")
    id, pid, epoch = _numbers(how, "pid", "epoch")
    start = how.get("start")
    last = cluster.requests.describe([id], deadline).get(id)
    if last is not None and (last.pid != pid or start not in (None, last.start)):
        last = None  # the description is of another transaction
    if last is not None and last.epoch == epoch:
        return _status_of(last)
    key = evidence_key(id, pid, f"epoch {epoch}")
    if state := recorded_outcome(ledger, key, deadline):
        return Status(TokenState(state))
    timed_out = last is not None and last.epoch == epoch + 1 and last.state in ABORTED
    if timed_out and "opening" not in how:
        # No other process uses this id. Its own writer records an outcome before it opens the id, or skips an epoch.
        return Status(TokenState.ABORTED, reason="it timed out, or an administrator aborted it")
    # The higher epoch may be due to a time-out of this transaction. Or it is due to an owner without the decision log,
    # which has opened the id since, and whose own transaction was aborted.
    return status_from_state_log(cluster, id, pid, epoch, start, deadline)


def status_from_state_log(
    cluster: KafkaCluster, id: str, pid: int, epoch: int, start: int | None, deadline: Deadline
) -> Status:
    """Return a transaction's status by the topic __transaction_state. Without `start` it is the last one of its epoch.

    Call this only after the producer epoch of the id was raised beyond `epoch`.
    """
    try:
        known = state_records(cluster, id, deadline)
        committed = last_outcome(known, pid, epoch) if start is None else outcome_by_start(known, pid, start)
    except NotRecordedYetError:
        return Status(TokenState.UNKNOWN, reason="its coordinator has not recorded its outcome yet")
    except errors.AccessDenied:
        return Status(TokenState.UNKNOWN, reason=_STATE_LOG_DENIED, permanent=True)
    except errors.NotFound:
        committed = None
    if committed is None:
        return Status(TokenState.UNKNOWN, reason=_NO_EVIDENCE, permanent=True)
    return Status(TokenState.COMMITTED if committed else TokenState.ABORTED)


def _status_of(last: TransactionDescription) -> Status:
    if last.state in COMMITTED:
        return Status(TokenState.COMMITTED)
    if last.state == OPEN:
        return Status(TokenState.UNKNOWN, reason="it is still open; its writer has not ended it yet")
    return Status(TokenState.ABORTED)


def prepared_status(cluster: KafkaCluster, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
    """Return the status of a prepared transaction.

    The token identifies the transaction by its transactional id, producer id and start time.
    """
    id, pid, epoch, start = read_how(token.how)
    last = cluster.requests.describe([id], deadline).get(id)
    # "Empty" is excluded: when an id is opened again, older brokers keep the start time of the last transaction.
    if last is not None and last.pid == pid and last.state != "Empty" and last.start == start:
        if last.state == OPEN:
            return Status(TokenState.PREPARED, expires_at=token.expires_at)
        return Status(TokenState.COMMITTED if last.state in COMMITTED else TokenState.ABORTED)
    if state := recorded_outcome(ledger, evidence_key(id, pid, f"start {start}"), deadline):
        return Status(TokenState(state))
    return status_from_state_log(cluster, id, pid, epoch, start, deadline)


def end_prepared(cluster: KafkaCluster, token: Token, commit: bool, ledger: Ledger, deadline: Deadline) -> Outcome:
    """End a prepared transaction, and return its outcome, which another process may have decided. Safe to repeat."""
    id, pid, epoch, start = read_how(token.how)
    code = None
    with closing(cluster.requests.coordinator_session(id, deadline)) as session:
        now = session.first_description
        # A late copy of a request may have begun another transaction of the epoch, which EndTxn would end.
        if now is None or now.state != OPEN or now.start == start:
            with cluster.events.step("step:end", token.transaction, decision="commit" if commit else "abort") as event:
                event["code"] = code = cluster.requests.end(id, pid, epoch, commit, deadline).code
        if code == DONE:
            _wait_for_markers(cluster, id, session, deadline)
            return Outcome.COMMITTED if commit else Outcome.ABORTED
    # The transaction had ended before, or its id was opened again. The error code does not have the outcome.
    status = prepared_status(cluster, token, ledger, deadline)
    if status.state in (TokenState.COMMITTED, TokenState.ABORTED):
        return Outcome(status.state.value)
    if status.permanent:
        raise errors.EvidenceLost(f"transaction {token.transaction}: {status.reason}")
    raise errors.OutcomeUnknown(f"the coordinator refused to end {token.transaction} (code {code}) and says it is open")


def _wait_for_markers(cluster: KafkaCluster, id: str, session: CoordinatorSession, deadline: Deadline) -> None:
    """Wait until the coordinator has written a transaction's control markers.

    If the coordinator dies before it has, write the missing markers in its place.
    """
    try:
        if session.last_transaction(Deadline(min(deadline.left(), _MARKERS_SECONDS))) is not None:
            return
    except errors.DeadlineExceeded:
        return  # the coordinator still runs, and will write the markers
    where = session.first_description.partitions if session.first_description is not None else ()
    try:
        with closing(cluster.requests.coordinator_session(id, deadline)) as afterwards:
            afterwards.last_transaction(deadline)
        if written := write_missing_markers_of_id(cluster, id, deadline, where):
            _log.warning("%s: wrote missing control markers: %s", id, ", ".join(written))
    except errors.TxnBridgeError as error:
        _log.warning(
            "control markers of %s may be missing in some partitions (%s); if readers stop there: txnbridge"
            " transactions repair %s --yes --reason TEXT",
            *(id, error, id),
        )


def read_how(how: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """Return a prepared token's id, producer id, epoch and start time. Raise `InvalidToken` if one is missing."""
    id, pid, epoch, start = _numbers(how, "pid", "epoch", "start")
    return id, pid, epoch, start


def _numbers(how: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    values = (how.get("id"), *(how.get(name) for name in names))
    sound = [type(how.get(name)) is int and 0 <= how[name] < 1 << (15 if name == "epoch" else 63) for name in names]
    if not isinstance(values[0], str) or not all(sound):
        raise errors.InvalidToken(f"this token is damaged: it lacks its id, or one of the numbers {', '.join(names)}")
    return values
