"""Repair of transactions that no coordinator knows, but that are open on a topic and hold readers back.

A message that arrives after its transaction's end opens the transaction again on the message's topic, and no
coordinator ends it any more. A topic that was never registered with the transaction is not told of its end either. An
administrator ends the transaction on such a topic by hand. The decision must be the transaction's earlier outcome: an
abort after a commit drops committed messages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping

from txnbridge.errors import AccessDenied, DeadlineExceeded, InvalidOption, InvalidState, NotFound
from txnbridge.spi import Deadline, Outcome
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of, unavailable
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.broker_evidence import (
    entry_headers,
    first_open_message,
    ledger_sizes,
    parse_position,
    proof_of_commit,
    topics_but_canary,
    txn_of_headers,
)

_log = logging.getLogger("txnbridge")

_TXN_ID = re.compile(r"(\d+):(\d+)")
_REST = "/admin/v3/transactions"


def is_txn_id(transaction: str) -> bool:
    return _TXN_ID.fullmatch(transaction) is not None


def held_back(cluster: ClusterAccess, rest: Rest, deadline: Deadline) -> Iterator[tuple[str, TxnId]]:
    """Yield each concrete topic whose readers wait for a transaction that no coordinator knows, and its id.

    Topics that no broker has loaded are left out, because they have no readers.
    """
    coordinators = _connect(cluster, deadline)
    for topic in topics_but_canary(cluster, deadline):
        txn = _oldest_open(rest, topic, deadline)
        patience = Deadline(min(cluster.settings.timing.coordinator_seconds, deadline.left()))
        if (
            txn is not None
            and not _may_be_known(rest, txn, coordinators, patience)
            and first_open_message(rest, topic, txn, deadline)  # it may have ended between the two requests
        ):
            yield topic, txn


def _may_be_known(rest: Rest, txn: TxnId, coordinators: int, deadline: Deadline) -> bool:
    """Return whether a coordinator knows a transaction. If the coordinator does not answer, return True."""
    try:
        return _is_known(rest, txn, coordinators, deadline)
    except DeadlineExceeded:
        return True


def repair(cluster: ClusterAccess, rest: Rest, transaction: str, deadline: Deadline) -> str:
    """Commit a transaction on the topics where it is still or again open, if evidence shows that it was committed.

    Return a sentence that names the topics and the evidence. Raise `InvalidState` without evidence, or if a
    coordinator knows the transaction; `NotFound` if the transaction is open on no topic; `AccessDenied` if the user is
    not a superuser.
    """
    txn, held = _find_held(cluster, rest, transaction, deadline)
    where = ", ".join(map(cluster.settings.namespace.short_name, held))
    proof = proof_of_commit(cluster, rest, txn, held, deadline)
    if proof is None:
        raise InvalidState(
            f"{txn} holds back {where}, and no evidence of its outcome was found. If it was committed, an abort would"
            " drop committed messages, so nothing was changed. If you know its outcome, run: txnbridge transactions"
            f" abort {txn} --yes --reason TEXT, or the same with commit"
        )
    _end(cluster, txn, held, True, deadline)
    return f"committed {txn} on {where}: {proof}, so it was committed before"


def end_by_hand(cluster: ClusterAccess, rest: Rest, transaction: str, commit: bool, deadline: Deadline) -> Outcome:
    """End a transaction on topics where it is open again, as an administrator decides, or by evidence of its commit.

    Return the true outcome. Raise the errors of `repair`, except for missing evidence.
    """
    txn, held = _find_held(cluster, rest, transaction, deadline)
    committed = commit or proof_of_commit(cluster, rest, txn, held, deadline) is not None
    _end(cluster, txn, held, committed, deadline)
    return Outcome.COMMITTED if committed else Outcome.ABORTED


def _find_held(
    cluster: ClusterAccess, rest: Rest, transaction: str, deadline: Deadline
) -> tuple[TxnId, dict[str, tuple[int, int]]]:
    """Return the id of a transaction that no coordinator knows, and its first message's position by topic.

    Only topics are returned on which the transaction is open.
    """
    number = _TXN_ID.fullmatch(transaction)
    if number is None:
        raise InvalidOption(f"{transaction!r} is not a transaction's id as the doctor shows it, such as 0:15")
    txn = TxnId(int(number[1]), int(number[2]))
    # Ask the coordinator first: a transaction that is open on a topic after its coordinator has forgotten it stays
    # open.
    if _is_known(rest, txn, _connect(cluster, deadline), deadline):
        raise InvalidState(
            f"transaction {txn} has a coordinator that knows it, so it needs no repair; end it with:"
            f" txnbridge transactions abort {txn}"
        )
    firsts = ((topic, first_open_message(rest, topic, txn, deadline)) for topic in topics_but_canary(cluster, deadline))
    held = {topic: first for topic, first in firsts if first is not None}
    if not held:
        raise NotFound(f"transaction {txn} has ended, and holds back no topic of {cluster.settings.namespace}")
    return txn, held


def _end(cluster: ClusterAccess, txn: TxnId, topics: Collection[str], commit: bool, deadline: Deadline) -> None:
    decision = "commit" if commit else "abort"
    with cluster.events.step("step:repair", str(txn), decision=decision, topics=len(topics)):
        for topic in topics:
            try:
                with translated(f"ending transaction {txn} on {topic}"):
                    cluster.client.transactions.end_on_partition(txn, topic, commit, deadline.left())
            except AccessDenied as error:
                raise AccessDenied(f"{error}: a superuser of the cluster has to do it") from error.__cause__


def _connect(cluster: ClusterAccess, deadline: Deadline) -> int:
    """Connect to all coordinators, because one that is not loaded knows no transaction; return their number."""
    with translated("loading the coordinators"):
        return cluster.client.transactions.connect(deadline.left())


def _is_known(rest: Rest, txn: TxnId, coordinators: int, deadline: Deadline) -> bool:
    if txn.most >= coordinators:
        return False  # there is no such coordinator
    try:
        rest.get(f"{_REST}/transactionMetadata/{txn.most}/{txn.least}", deadline)
    except RestRefused as refused:
        # Status 404 with another text means that the coordinator is not loaded; another status, that a topic is not.
        if refused.status == 404 and f"({txn.most},{txn.least})" in refused.text:
            return False
        if refused.status == 404:
            raise unavailable(refused, f"asking the coordinator of transaction {txn}") from refused
    return True


def _oldest_open(rest: Rest, topic: str, deadline: Deadline) -> TxnId | None:
    """Return the id of the open transaction that hides the topic's messages from readers; None if there is none."""
    try:
        stats = rest.get(f"{_REST}/transactionBufferStats/{path_of(topic)}", deadline)
        if not stats.get("ongoingTxnSize"):
            return None
        ledgers = ledger_sizes(rest, topic, deadline)
        headers = entry_headers(
            rest, topic, _position_after(parse_position(stats["maxReadPosition"]), ledgers), deadline
        )
        return txn_of_headers(headers)
    except (RestRefused, KeyError):
        return None  # the topic is not loaded, or the transaction has ended meanwhile


def _position_after(position: tuple[int, int], sizes: Mapping[int, int]) -> tuple[int, int]:
    """Return the position of the entry after `position`, perhaps in a later BookKeeper ledger.

    `sizes` has the topic's ledgers with their numbers of entries. Raise `KeyError` if there is no such entry.
    """
    ledger, entry = position
    if entry + 1 < sizes.get(ledger, 0):
        return ledger, entry + 1
    for later in sorted(sizes):
        if later > ledger and sizes[later]:
            return later, 0
    raise KeyError(position)
