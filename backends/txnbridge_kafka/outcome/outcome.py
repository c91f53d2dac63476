"""Ending a prepared transaction, and the outcome of any transaction, by the coordinator or the recorded decisions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from txnbridge.errors import (
    AccessDenied,
    DeadlineExceeded,
    EvidenceLost,
    InvalidToken,
    NotFound,
    OutcomeUnknown,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, Ledger, Outcome, Status, Token, TokenState
from txnbridge_kafka.client.coordinator_session import CoordinatorSession
from txnbridge_kafka.client.responses import ABORTED, COMMITTED, OPEN, TransactionDescription
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

# The wait for control markers, which take milliseconds. If a partition has no leader they take longer, and the
# coordinator writes them later by itself.
_MARKERS_SECONDS = 5.0
_GONE = "its writer's id has expired or was opened again since, and no record of how it ended is left"
_UNREADABLE = (
    "its writer's id has expired or was opened again since, and only its coordinator's log (topic"
    " __transaction_state), which this user may not read, may tell how it ended"
)


def plain_status(cluster: KafkaCluster, ledger: Ledger, how: Mapping[str, Any], deadline: Deadline) -> Status:
    """Return the status of a transaction that was not prepared.

    All transactions of one opening share producer id and epoch. All messages of this transaction were stored before its
    commit, so the coordinator's last transaction of that epoch is this one. If a late copy of one of its requests may
    have begun another transaction after it, the token also has the start time (hazard H19).
    """
    if how.get("asked") is False:
        # Only its writer commits such a transaction, and did not. The coordinator may describe the previous one.
        return Status(TokenState.ABORTED, reason="its writer never came to ask for its commit")
    id, pid, epoch = _numbers(how, "pid", "epoch")
    start = how.get("start")
    last = cluster.requests.describe([id], deadline).get(id)
    if last is not None and (last.pid != pid or start not in (None, last.start)):
        last = None  # the description is of another transaction
    if last is not None and last.epoch == epoch:
        return _status_of(last)
    key = evidence_key(id, pid, f"epoch {epoch}")
    if state := recorded_outcome(ledger, key, deadline, under=how.get("opening")):
        return Status(TokenState(state))
    timed_out = last is not None and last.epoch == epoch + 1 and last.state in ABORTED
    if timed_out and "opening" not in how:
        # No other process uses this id. Its own writer records an outcome before it opens the id, or skips an epoch.
        return Status(TokenState.ABORTED, reason="its time was over, or an administrator aborted it")
    # The epoch may have been raised by a time-out, or by a program without the decision log that has opened the id
    # since and has aborted another transaction.
    return _status_from_state_log(cluster, id, pid, epoch, start, deadline)


def status_after_fencing(cluster: KafkaCluster, last: TransactionDescription, deadline: Deadline) -> Status:
    """Return the status of a transaction that the coordinator described as open, after its id was fenced."""
    return _status_from_state_log(cluster, last.id, last.pid, last.epoch, last.start, deadline)


def _status_from_state_log(
    cluster: KafkaCluster, id: str, pid: int, epoch: int, start: int | None, deadline: Deadline
) -> Status:
    """Return a transaction's status by the coordinator's log. The epoch must have been raised before the call."""
    try:
        known = state_records(cluster, id, deadline)
        committed = last_outcome(known, pid, epoch) if start is None else outcome_by_start(known, pid, start)
    except NotRecordedYetError:
        return Status(TokenState.UNKNOWN, reason="its coordinator has not written down yet how it ended")
    except AccessDenied:
        return Status(TokenState.UNKNOWN, reason=_UNREADABLE, permanent=True)
    except NotFound:
        committed = None
    if committed is None:
        return Status(TokenState.UNKNOWN, reason=_GONE, permanent=True)
    return Status(TokenState.COMMITTED if committed else TokenState.ABORTED)


def _status_of(last: TransactionDescription) -> Status:
    if last.state in COMMITTED:
        return Status(TokenState.COMMITTED)
    if last.state == OPEN:
        return Status(TokenState.UNKNOWN, reason="it is still open; its writer has not ended it yet")
    return Status(TokenState.ABORTED)


def prepared_status(cluster: KafkaCluster, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
    """Return the status of a prepared transaction, which is identified by its id, producer id and start time."""
    id, pid, epoch, start = read_how(token.how)
    last = cluster.requests.describe([id], deadline).get(id)
    # The state is compared first: older brokers keep the start of the last transaction when an id is opened again.
    if last is not None and last.pid == pid and last.state != "Empty" and last.start == start:
        if last.state == OPEN:
            return Status(TokenState.PREPARED, expires_at=token.expires_at)
        return Status(TokenState.COMMITTED if last.state in COMMITTED else TokenState.ABORTED)
    if state := recorded_outcome(ledger, evidence_key(id, pid, f"start {start}"), deadline):
        return Status(TokenState(state))
    return _status_from_state_log(cluster, id, pid, epoch, start, deadline)


def end_prepared(cluster: KafkaCluster, token: Token, commit: bool, ledger: Ledger, deadline: Deadline) -> Outcome:
    """End a prepared transaction, and return its true outcome, also if another process ended it. Safe to repeat."""
    id, pid, epoch, _ = read_how(token.how)
    with closing(cluster.requests.coordinator_session(id, deadline)) as session:
        with cluster.events.step("step:end", token.transaction, decision="commit" if commit else "abort") as event:
            ended = cluster.requests.end(id, pid, epoch, commit, deadline)
            event["code"] = ended.code
        if ended.code == 0:
            _wait_for_markers(cluster, id, session, deadline)
    if ended.code == 0:
        return Outcome.COMMITTED if commit else Outcome.ABORTED
    # Refused: the transaction had ended before, or its id was opened again. The error code has no outcome.
    status = prepared_status(cluster, token, ledger, deadline)
    if status.state is TokenState.COMMITTED:
        return Outcome.COMMITTED
    if status.state is TokenState.ABORTED:
        return Outcome.ABORTED
    if status.permanent:
        raise EvidenceLost(f"transaction {token.transaction}: {status.reason}")
    raise OutcomeUnknown(f"the coordinator refused to end {token.transaction} (code {ended.code}) and says it is open")


def _wait_for_markers(cluster: KafkaCluster, id: str, session: CoordinatorSession, deadline: Deadline) -> None:
    """Wait until the control markers of a transaction are written; if its coordinator died, write missing ones."""
    try:
        if session.last_transaction(Deadline(min(deadline.left(), _MARKERS_SECONDS))) is not None:
            return
    except DeadlineExceeded:
        return  # the coordinator still runs, and writes the markers by itself
    where = session.first_description.partitions if session.first_description is not None else ()
    try:
        with closing(cluster.requests.coordinator_session(id, deadline)) as afterwards:
            afterwards.last_transaction(deadline)
        if written := write_missing_markers_of_id(cluster, id, deadline, where):
            _log.warning("%s: the broker had forgotten markers, which are written now: %s", id, ", ".join(written))
    except TxnBridgeError as error:
        _log.warning(
            "whether the broker has told every partition of the end of %s is not known (%s); if readers stop there:"
            " txnbridge transactions repair %s --yes --reason TEXT",
            *(id, error, id),
        )


def read_how(how: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """Return a prepared token's id, producer id, epoch and start time. Raise `InvalidToken` if one is missing."""
    id, pid, epoch, start = _numbers(how, "pid", "epoch", "start")
    return id, pid, epoch, start


def _numbers(how: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    values = (how.get("id"), *(how.get(name) for name in names))
    if not isinstance(values[0], str) or not all(type(number) is int for number in values[1:]):
        raise InvalidToken(f"this token is damaged: it does not tell its id and, in numbers, its {' and '.join(names)}")
    return values
