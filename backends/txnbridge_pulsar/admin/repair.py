"""Repair of transactions that no coordinator knows, but that are open on a topic and hold readers back.

A message that arrives after its transaction's end opens the transaction again on the message's topic, and no
coordinator ends it any more. A topic that was never registered with the transaction is not told of its end either. An
administrator ends the transaction on such a topic by hand. The decision must be the transaction's earlier outcome: an
abort after a commit drops committed messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from txnbridge.errors import InvalidOption, InvalidState, NotFound
from txnbridge.spi import Deadline, Outcome
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.outcome.broker_evidence import first_open_message, proof_of_commit, topics_but_canary
from txnbridge_pulsar.outcome.forgotten_transactions import (
    end_on_topics,
    first_if_forgotten,
    is_known,
    load_coordinators,
    oldest_open,
    was_committed_by_property,
)

TXN_ID = re.compile(r"(\d+):(\d+)")


def held_back(cluster: ClusterAccess, deadline: Deadline) -> Iterator[tuple[str, TxnId]]:
    """Yield each topic (or partition) whose readers wait for a transaction that no coordinator knows, and its id.

    Topics that no broker has loaded are left out, because they have no readers.
    """
    coordinators = load_coordinators(cluster, deadline)
    for topic in topics_but_canary(cluster, deadline):
        txn = oldest_open(cluster.rest, topic, deadline)
        if txn is not None and first_if_forgotten(cluster, topic, txn, coordinators, deadline):
            yield topic, txn


def repair(cluster: ClusterAccess, transaction: str, deadline: Deadline) -> str:
    """End a transaction on the topics where it is still or again open, by evidence of how it had ended before.

    Return a sentence that names the topics and the evidence. Raise `InvalidState` without evidence, or if a coordinator
    knows the transaction; `NotFound` if the transaction is open on no topic; `AccessDenied` if the user is not a
    superuser.
    """
    txn, held = _held(cluster, transaction, deadline)
    where = ", ".join(map(cluster.settings.namespace.short_name, held))
    committed, evidence = was_committed_by_property(cluster, txn, held, deadline), "its proof topic says so"
    if committed is None and (proof := proof_of_commit(cluster, txn, held, deadline)):
        committed, evidence = True, proof
    if committed is None:
        raise InvalidState(
            f"{txn} holds back {where}, and no evidence of its outcome was found. If it was committed, an abort would"
            " drop committed messages, so nothing was changed. If you know its outcome, run: txnbridge transactions"
            f" abort {txn} --yes --reason TEXT, or the same with commit"
        )
    end_on_topics(cluster, txn, held, committed, deadline)
    decision = "committed" if committed else "aborted"
    return f"{decision} {txn} on {where}: {evidence}, so it was {decision} before"


def end_by_hand(cluster: ClusterAccess, transaction: str, commit: bool, deadline: Deadline) -> Outcome:
    """End a transaction on topics where it is open again, by evidence, or else as an administrator decides.

    Return the true outcome. Raise the errors of `repair`, except for missing evidence.
    """
    txn, held = _held(cluster, transaction, deadline)
    committed = was_committed_by_property(cluster, txn, held, deadline)
    if committed is None:
        committed = commit or proof_of_commit(cluster, txn, held, deadline) is not None
    end_on_topics(cluster, txn, held, committed, deadline)
    return Outcome.COMMITTED if committed else Outcome.ABORTED


def _held(cluster: ClusterAccess, transaction: str, deadline: Deadline) -> tuple[TxnId, dict[str, tuple[int, int]]]:
    """Return the id of a transaction that no coordinator knows, and its first message's position by topic.

    Only topics are returned on which the transaction is open.
    """
    number = TXN_ID.fullmatch(transaction)
    if number is None:
        raise InvalidOption(f"{transaction!r} is not a transaction's id as the doctor shows it, such as 0:15")
    txn = TxnId(int(number[1]), int(number[2]))
    # Ask the coordinator first: a transaction that it has forgotten, and that is open on a topic later, stays open.
    if is_known(cluster.rest, txn, load_coordinators(cluster, deadline), deadline):
        raise InvalidState(
            f"transaction {txn} has a coordinator that knows it, so it needs no repair; end it with:"
            f" txnbridge transactions abort {txn}"
        )
    rest = cluster.rest
    firsts = ((topic, first_open_message(rest, topic, txn, deadline)) for topic in topics_but_canary(cluster, deadline))
    held = {topic: first for topic, first in firsts if first is not None}
    if not held:
        raise NotFound(f"transaction {txn} has ended, and holds back no topic of {cluster.settings.namespace}")
    return txn, held
