"""Ends transactions that their coordinators have forgotten, on topics where they still hold readers back.

Readers see nothing after the first message of a topic's oldest open transaction. A transaction stays open on a topic
for good if its end does not reach the topic (hazard H49), or if its first message arrives there after its end (hazard
H44). Then its coordinator no longer knows it. So the first entry of each transaction on a topic names the transaction's
proof topic. Any reader that waits on the topic finds the outcome there, and ends the transaction once more
(hazard H98).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from txnbridge.errors import AccessDenied, DeadlineExceeded, EvidenceLost
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of, unavailable
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.broker_evidence import (
    entry_headers,
    first_open_message,
    ledger_sizes,
    parse_position,
    txn_of_headers,
)
from txnbridge_pulsar.outcome.late_writes import refuse_late_writes
from txnbridge_pulsar.outcome.proof import was_committed
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation

_log = logging.getLogger("txnbridge")

_REST = "/admin/v3/transactions"
_PROPERTY = "txnbridge-proof"
# Seconds for reading a proof topic: only an open transaction can hide a proof for longer.
_PROOF_SECONDS = 5.0
NO_PROOF = ProofLocation("", (0, 0), "")


def proof_property(proof: ProofLocation) -> list[tuple[str, str]]:
    """Return the property of a transaction's first entry on a topic, which names its proof topic."""
    return [(_PROPERTY, json.dumps(proof.fields()))]


def oldest_open(rest: Rest, topic: str, deadline: Deadline) -> wire.TxnId | None:
    """Return the id of the open transaction that hides the topic's messages from readers; None if there is none."""
    try:
        stats = _buffer_stats(rest, topic, deadline)
        if not stats.get("ongoingTxnSize"):
            return None
        ledgers = ledger_sizes(rest, topic, deadline)
        first = _position_after(parse_position(stats["maxReadPosition"]), ledgers)
        return txn_of_headers(entry_headers(rest, topic, first, deadline))
    except (RestRefused, KeyError, ValueError):
        return None  # the topic is not loaded, or the transaction has ended meanwhile


def _buffer_stats(rest: Rest, topic: str, deadline: Deadline) -> Mapping[str, Any]:
    return rest.get(f"{_REST}/transactionBufferStats/{path_of(topic)}", deadline)  # type: ignore[no-any-return]


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


def load_coordinators(cluster: ClusterAccess, deadline: Deadline) -> int:
    """Connect to all coordinators, because one that is not loaded knows no transaction; return their number."""
    with translated("loading the coordinators"):
        return cluster.client.transactions.connect(deadline.left())


def is_known(rest: Rest, txn: wire.TxnId, coordinators: int, deadline: Deadline) -> bool:
    """Return whether a transaction's coordinator knows it. All coordinators have to be loaded."""
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


def first_if_forgotten(
    cluster: ClusterAccess, topic: str, txn: wire.TxnId, coordinators: int, deadline: Deadline
) -> tuple[int, int] | None:
    """Return the position of a transaction's first message, if it is open on a topic and no coordinator knows it.

    If the coordinator does not answer, return None.
    """
    try:
        patience = Deadline(min(cluster.settings.timing.coordinator_seconds, deadline.left()))
        if is_known(cluster.rest, txn, coordinators, patience):
            return None
    except DeadlineExceeded:
        return None
    return first_open_message(cluster.rest, topic, txn, deadline)  # it may have ended between the two requests


def was_committed_by_property(
    cluster: ClusterAccess, txn: wire.TxnId, held: Mapping[str, tuple[int, int]], deadline: Deadline
) -> bool | None:
    """Return whether a forgotten transaction was committed, by the proof topic that its first entries name.

    `held` has the position of its first message by topic. Return None if no proof topic is named or tells the outcome.
    """
    for topic, first in held.items():
        with suppress(EvidenceLost, RestRefused, KeyError, TypeError, ValueError):
            properties = json.loads(entry_headers(cluster.rest, topic, first, deadline)["x-pulsar-property"])
            proof = ProofLocation.read(json.loads(properties[_PROPERTY]))
            read_by = Deadline(min(_PROOF_SECONDS, deadline.left() / 2))  # the rest is for ending the transaction
            committed = was_committed(cluster, proof, txn, read_by)
            if committed is not None:
                return committed
    return None


def release(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    """End the transaction that hides a topic's messages, by its proof message, if its coordinator has forgotten it.

    Do nothing if there is no such transaction, or if its outcome is not known. Raise `AccessDenied` if a superuser has
    to end it.
    """
    txn = oldest_open(cluster.rest, topic, deadline)
    if txn is None:
        return
    first = first_if_forgotten(cluster, topic, txn, load_coordinators(cluster, deadline), deadline)
    if first is None:
        return
    committed = was_committed_by_property(cluster, txn, {topic: first}, deadline)
    if committed is None:
        return
    try:
        end_on_topics(cluster, txn, [topic], committed, deadline)
    except AccessDenied:
        # Another open transaction may be a committed one, which the low water mark would abort, too.
        if committed or _buffer_stats(cluster.rest, topic, deadline)["ongoingTxnSize"] > 1:
            raise
        refuse_late_writes(cluster, AnnouncedTransaction("", txn, (topic,), (), NO_PROOF), deadline)
    _log.warning(
        "readers of %s were held back by transaction %s, which its coordinator has forgotten. It was %s, as its proof"
        " says, so it was ended in the same way on this topic",
        *(topic, txn, "committed" if committed else "aborted"),
    )


def end_on_topics(
    cluster: ClusterAccess, txn: wire.TxnId, topics: Collection[str], commit: bool, deadline: Deadline
) -> None:
    """End a transaction on topics once more. Raise `AccessDenied` if the user is not a superuser."""
    decision = "commit" if commit else "abort"
    with cluster.events.step("step:repair", str(txn), decision=decision, topics=len(topics)):
        for topic in topics:
            try:
                with translated(f"ending transaction {txn} on {topic}"):
                    cluster.client.transactions.end_on_partition(txn, topic, commit, deadline.left())
            except AccessDenied as error:
                raise AccessDenied(f"{error}: a superuser of the cluster has to do it") from error.__cause__
