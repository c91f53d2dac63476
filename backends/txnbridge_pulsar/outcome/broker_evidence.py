"""Evidence that a transaction was committed, found by the REST API after its coordinator has forgotten it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice

from txnbridge.errors import DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of, unavailable
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess, start_before
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.proof import proof_prefix

_log = logging.getLogger("txnbridge")

_REST = "/admin/v3/transactions"
_COMMIT_MARKER = "21"
# Entries before a late message that are searched for the transaction's commit marker; each takes a request.
_MAX_ENTRIES_SEARCHED = 500
# A transaction's messages are searched within this time before and after a known one: no transaction lives longer.
_SEARCH_WINDOW_MS = 3 * 3600 * 1000


def topics_but_canary(cluster: ClusterAccess, deadline: Deadline) -> list[str]:
    """Return all topics and partitions of the namespace except the canary topic, which is for late messages."""
    canary = cluster.settings.namespace.full_name(cluster.settings.late_write_canary)
    return [topic for topic in cluster.topics.all_concrete(deadline) if topic != canary]


def first_open_message(rest: Rest, topic: str, txn: TxnId, deadline: Deadline) -> tuple[int, int] | None:
    """Return the position of a transaction's first message on a topic; None if the transaction is not open there."""
    path = f"{_REST}/transactionInBufferStats/{path_of(topic)}/{txn.most}/{txn.least}"
    try:
        position = rest.get(path, deadline).get("startPosition")
    except RestRefused:
        return None  # the topic is not loaded, or was never part of a transaction
    return parse_position(position) if position else None


def txn_of_headers(headers: Mapping[str, str]) -> TxnId:
    return TxnId(int(headers["x-pulsar-txnid-most-bits"]), int(headers["x-pulsar-txnid-least-bits"]))


def parse_position(text: str) -> tuple[int, int]:
    ledger, entry = map(int, text.split(":"))
    return ledger, entry


def ledger_sizes(rest: Rest, topic: str, deadline: Deadline) -> dict[int, int]:
    """Return the number of entries of each of a topic's BookKeeper ledgers, by the ledger's id."""
    stats = rest.get(f"/admin/v2/persistent/{path_of(topic)}/internalStats", deadline)
    sizes = {int(each["ledgerId"]): int(each["entries"]) for each in stats["ledgers"]}
    sizes[max(sizes)] = int(stats["currentLedgerEntries"])  # the list has no size of the ledger that is being written
    return sizes


def entry_headers(rest: Rest, topic: str, position: tuple[int, int], deadline: Deadline) -> Mapping[str, str]:
    ledger, entry = position
    return rest.headers(f"/admin/v2/persistent/{path_of(topic)}/ledger/{ledger}/entry/{entry}", deadline)


def _positions_before(position: tuple[int, int], sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the positions of the entries before `position`, nearest first, by the numbers of entries in `sizes`."""
    ledger, entry = position
    for each in sorted(sizes, reverse=True):
        if each <= ledger:
            yield from ((each, at) for at in reversed(range(entry if each == ledger else sizes[each])))


def proof_of_commit(
    cluster: ClusterAccess, txn: TxnId, held: Mapping[str, tuple[int, int]], deadline: Deadline
) -> str | None:
    """Look for evidence that a transaction was committed; return a sentence that names it, None if there is none.

    `held` has the topics on which the transaction is open, each with the position of the transaction's first message
    there. An abort cannot be proven: brokers also write an abort marker when they drop messages that a commit has not
    reached (hazard H46).
    """
    short_name = cluster.settings.namespace.short_name
    markers_read_by = Deadline(deadline.left() / 4)
    for topic, first in held.items():
        if _has_commit_marker(cluster.rest, topic, txn, first, markers_read_by):
            return f"its commit marker is on {short_name(topic)}"
    about = min(_publish_time(cluster.rest, topic, first, deadline) for topic, first in held.items())
    topics = topics_but_canary(cluster, deadline)
    markers = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
    read_by = Deadline(deadline.left() / 2)  # the rest is for ending the transaction
    for topic in dict.fromkeys((*held, *(topic for topic in topics if topic.startswith(markers)), *topics)):
        # A topic that cannot be read in time is no evidence.
        with suppress(TxnBridgeError, RestRefused):
            if _can_be_read(cluster, topic, txn, about, read_by):
                return f"a message of it can be read on {short_name(topic)}"
    return None


def has_undelivered_commit(
    cluster: ClusterAccess, txn: TxnId, topics: Collection[str], deadline: Deadline
) -> bool | None:
    """Return whether a transaction that its coordinator has forgotten has to be committed on its topics once more.

    Return True if evidence shows that it was committed, but is open on a topic; None without evidence. Return False if
    it is open on none of its topics: then no later transaction's end can take a commit back.
    """
    try:
        for topic in topics:  # brokers list open transactions only of loaded topics
            with translated(f"loading {topic}"):
                cluster.client.create_producer(topic, timeout=deadline.left()).close(deadline.left())
        firsts = ((topic, first_open_message(cluster.rest, topic, txn, deadline)) for topic in topics)
        held = {topic: first for topic, first in firsts if first is not None}
        if not held:
            return False
        return True if proof_of_commit(cluster, txn, held, deadline) else None
    except (TxnBridgeError, RestRefused) as error:
        _log.debug("the outcome of transaction %s is not known: %s", txn, error)
        return None


def _has_commit_marker(rest: Rest, topic: str, txn: TxnId, first: tuple[int, int], deadline: Deadline) -> bool:
    """Return whether the transaction's commit marker is shortly before its late message, at the position `first`."""
    with suppress(RestRefused, DeadlineExceeded):
        for position in islice(_positions_before(first, ledger_sizes(rest, topic, deadline)), _MAX_ENTRIES_SEARCHED):
            headers = entry_headers(rest, topic, position, deadline)
            if headers.get("x-pulsar-marker-type") == _COMMIT_MARKER and txn_of_headers(headers) == txn:
                return True
    return False


def _publish_time(rest: Rest, topic: str, position: tuple[int, int], deadline: Deadline) -> int:
    """Return a message's publish time in milliseconds since 1970."""
    try:
        published = entry_headers(rest, topic, position, deadline)["x-pulsar-publish-time"]
    except RestRefused as refused:
        raise unavailable(refused, f"reading the publish time of message {position} of {topic}") from refused
    return int(datetime.fromisoformat(published).timestamp() * 1000)


def _can_be_read(cluster: ClusterAccess, topic: str, txn: TxnId, about: int, deadline: Deadline) -> bool:
    """Return whether readers see a message of the transaction on a topic, published around the time `about`."""
    what = f"reading {topic}"
    first = cluster.rest.get(f"/admin/v2/persistent/{path_of(topic)}/messageid/{about - _SEARCH_WINDOW_MS}", deadline)
    start = wire.MessageId(first["ledgerId"], first["entryId"])
    with translated(what):
        reader = cluster.client.read(topic, timeout=deadline.left(), start=start_before(start))
        with wire.closing(reader, deadline.left):
            last = reader.last_message_id(deadline.left())
            at = start.ledger, start.entry - 1
            while last.entry >= 0 and at < (last.ledger, last.entry):
                deadline.check(what)
                for entry in reader.receive(deadline.left()):
                    if entry.txn == txn:
                        return True
                    if entry.publish_time > about + _SEARCH_WINDOW_MS:
                        return False
                    at = entry.id.ledger, entry.id.entry
            return False
