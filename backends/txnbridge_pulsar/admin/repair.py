"""Transactions that no coordinator knows, and that hold readers back all the same.

A message that comes after the end of its transaction opens the transaction again on its topic, where no coordinator
ends it any more; nor does one on a topic that was never named in the transaction. An administrator ends it there by
hand, as it had ended: aborting a transaction that was committed takes its committed messages away.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice

from txnbridge.errors import AccessDenied, DeadlineExceeded, InvalidOption, InvalidState, NotFound, TxnBridgeError
from txnbridge.spi import Deadline, Outcome
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.client.rest import Rest, RestRefused, path_of, unavailable
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.late_writes import late_write_canary
from txnbridge_pulsar.outcome.proof import proof_prefix
from txnbridge_pulsar.read.last_entry import start_before

_log = logging.getLogger("txnbridge")

_NUMBER = re.compile(r"(\d+):(\d+)")
_REST = "/admin/v3/transactions"
# A coordinator that knows a transaction answers in milliseconds.
_PATIENCE = 3.0
_COMMIT_MARKER = "21"
# How many entries before a late message are looked at for the marker of its transaction's end; each is a request.
_MOST_BEFORE = 500
# Messages of a transaction are sent within its time, which is minutes with most programs and hours with some.
_AROUND_MS = 3 * 3600 * 1000


def is_number(transaction: str) -> bool:
    return _NUMBER.fullmatch(transaction) is not None


def held_back(cluster: ClusterAccess, rest: Rest, deadline: Deadline) -> Iterator[tuple[str, TxnId]]:
    """The concrete topics whose readers wait for a transaction that no coordinator knows, each with the oldest one.

    Topics that are not loaded have no readers, and are passed over.
    """
    coordinators = _connect(cluster, deadline)
    for topic in _topics(cluster, deadline):
        txn = _oldest_open(rest, topic, deadline)
        if (
            txn is not None
            and not _seems_known(rest, txn, coordinators, deadline)
            and _first_open(rest, topic, txn, deadline)  # it may have ended between the two questions
        ):
            yield topic, txn


def _seems_known(rest: Rest, txn: TxnId, coordinators: int, deadline: Deadline) -> bool:
    """Brokers of 4.0 never answer while a topic of a transaction is not loaded, so they know it."""
    try:
        return _is_known(rest, txn, coordinators, Deadline(min(_PATIENCE, deadline.left())))
    except DeadlineExceeded:
        return True


def repair(cluster: ClusterAccess, rest: Rest, transaction: str, deadline: Deadline) -> str:
    """Commit such a transaction wherever it holds readers back, if it had been committed, and say what tells so.

    Raises `InvalidState` where nothing tells, and for one that a coordinator knows; `NotFound` if it holds nothing
    back; `AccessDenied`.
    """
    txn, held = _find_held(cluster, rest, transaction, deadline)
    where = ", ".join(map(cluster.settings.namespace.short_name, held))
    proof = _proof_of_commit(cluster, rest, txn, held, deadline)
    if proof is None:
        raise InvalidState(
            f"{txn} holds back {where}, and nothing was found that tells whether it had been committed; if it had, an"
            " abort takes committed messages away. Nothing was changed; if you know how it had ended, say so by:"
            f" txnbridge transactions abort {txn} --yes --reason TEXT, or commit {txn}"
        )
    _end(cluster, txn, held, True, deadline)
    return f"committed {txn} on {where}: {proof}, so it had been committed"


def end_by_hand(cluster: ClusterAccess, rest: Rest, transaction: str, commit: bool, deadline: Deadline) -> Outcome:
    """End such a transaction as an administrator says that it had ended; but commit it where something tells that it
    had been committed. Raises as `repair`, but for what nothing tells.
    """
    txn, held = _find_held(cluster, rest, transaction, deadline)
    committed = commit or _proof_of_commit(cluster, rest, txn, held, deadline) is not None
    _end(cluster, txn, held, committed, deadline)
    return Outcome.COMMITTED if committed else Outcome.ABORTED


def _find_held(
    cluster: ClusterAccess, rest: Rest, transaction: str, deadline: Deadline
) -> tuple[TxnId, dict[str, tuple[int, int]]]:
    """A transaction that no coordinator knows, and the topics that it holds back, each with its first message there."""
    number = _NUMBER.fullmatch(transaction)
    if number is None:
        raise InvalidOption(f"{transaction!r} is no number of a transaction as the doctor tells it, such as 0:15")
    txn = TxnId(int(number[1]), int(number[2]))
    # The coordinator is asked first: a transaction that is open on a topic once it has forgotten it stays open there.
    if _is_known(rest, txn, _connect(cluster, deadline), deadline):
        raise InvalidState(
            f"transaction {txn} has a coordinator that knows it, so there is nothing to repair; end it with:"
            f" txnbridge transactions abort {txn}"
        )
    found = ((topic, _first_open(rest, topic, txn, deadline)) for topic in _topics(cluster, deadline))
    held = {topic: first for topic, first in found if first is not None}
    if not held:
        raise NotFound(f"transaction {txn} has ended, and holds back no topic of {cluster.settings.namespace}")
    return txn, held


def _topics(cluster: ClusterAccess, deadline: Deadline) -> list[str]:
    """Without the one where late messages are sent on purpose."""
    canary = cluster.settings.namespace.full_name(late_write_canary(cluster))
    return [topic for topic in cluster.topics.all_concrete(deadline) if topic != canary]


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
    """Load all coordinators, which else say that they know nothing; how many there are."""
    with translated("loading the coordinators"):
        return cluster.client.transactions.connect(deadline.left())


def _is_known(rest: Rest, txn: TxnId, coordinators: int, deadline: Deadline) -> bool:
    if txn.most >= coordinators:
        return False  # of a coordinator that was never there
    try:
        rest.get(f"{_REST}/transactionMetadata/{txn.most}/{txn.least}", deadline)
    except RestRefused as refused:
        # With the same status they say that the coordinator is not there; with another, that a topic is not loaded.
        if refused.status == 404 and f"({txn.most},{txn.least})" in refused.text:
            return False
        if refused.status == 404:
            raise unavailable(refused, f"asking the coordinator of transaction {txn}") from refused
    return True


def _first_open(rest: Rest, topic: str, txn: TxnId, deadline: Deadline) -> tuple[int, int] | None:
    """Where a transaction that is open on a topic begins there."""
    path = f"{_REST}/transactionInBufferStats/{path_of(topic)}/{txn.most}/{txn.least}"
    try:
        told = rest.get(path, deadline).get("startPosition")
    except RestRefused:
        return None  # it is not loaded, or has never been part of a transaction
    return _position(told) if told else None


def _oldest_open(rest: Rest, topic: str, deadline: Deadline) -> TxnId | None:
    """The transaction of the first message that readers cannot see yet."""
    try:
        stats = rest.get(f"{_REST}/transactionBufferStats/{path_of(topic)}", deadline)
        if not stats.get("ongoingTxnSize"):
            return None
        ledgers = _sizes(rest, topic, deadline)
        headers = _headers(rest, topic, _behind(_position(stats["maxReadPosition"]), ledgers), deadline)
        return _txn_of(headers)
    except (RestRefused, KeyError):
        return None  # it is not loaded, or it has ended meanwhile


def _txn_of(headers: Mapping[str, str]) -> TxnId:
    return TxnId(int(headers["x-pulsar-txnid-most-bits"]), int(headers["x-pulsar-txnid-least-bits"]))


def _position(text: str) -> tuple[int, int]:
    ledger, entry = map(int, text.split(":"))
    return ledger, entry


def _sizes(rest: Rest, topic: str, deadline: Deadline) -> dict[int, int]:
    """The ledgers of a topic and how many entries each has."""
    stats = rest.get(f"/admin/v2/persistent/{path_of(topic)}/internalStats", deadline)
    sizes = {int(each["ledgerId"]): int(each["entries"]) for each in stats["ledgers"]}
    sizes[max(sizes)] = int(stats["currentLedgerEntries"])  # of the last one the list does not know it
    return sizes


def _headers(rest: Rest, topic: str, place: tuple[int, int], deadline: Deadline) -> Mapping[str, str]:
    ledger, entry = place
    return rest.headers(f"/admin/v2/persistent/{path_of(topic)}/ledger/{ledger}/entry/{entry}", deadline)


def _behind(place: tuple[int, int], sizes: Mapping[int, int]) -> tuple[int, int]:
    """The place after one, which may be in the next ledger. Raises `KeyError` if nothing is there."""
    ledger, entry = place
    if entry + 1 < sizes.get(ledger, 0):
        return ledger, entry + 1
    for later in sorted(sizes):
        if later > ledger and sizes[later]:
            return later, 0
    raise KeyError(place)


def _before(place: tuple[int, int], sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The places before one, the nearest first."""
    ledger, entry = place
    for each in sorted(sizes, reverse=True):
        if each <= ledger:
            yield from ((each, at) for at in reversed(range(entry if each == ledger else sizes[each])))


# --- whether it had been committed ----------------------------------------------------------------------------------


def _proof_of_commit(
    cluster: ClusterAccess, rest: Rest, txn: TxnId, held: Mapping[str, tuple[int, int]], deadline: Deadline
) -> str | None:
    """Words for what tells that a transaction had been committed.

    Nothing tells that it had been aborted, not even a marker that says so: brokers write one also where they clear
    away what a commit has not reached.
    """
    short_name = cluster.settings.namespace.short_name
    markers_read_by = Deadline(deadline.left() / 4)
    for topic, first in held.items():
        if _has_commit_marker(rest, topic, txn, first, markers_read_by):
            return f"the marker of its commit stands on {short_name(topic)}"
    about = min(_published(rest, topic, first, deadline) for topic, first in held.items())
    topics = _topics(cluster, deadline)
    markers = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
    read_by = Deadline(deadline.left() / 2)  # the rest is for its end
    for topic in dict.fromkeys((*held, *(topic for topic in topics if topic.startswith(markers)), *topics)):
        # A topic that cannot be read tells nothing, nor does one that there is no time for.
        with suppress(TxnBridgeError, RestRefused):
            if _can_be_read(cluster, rest, topic, txn, about, read_by):
                return f"a message of it can be read on {short_name(topic)}"
    return None


def had_committed(
    cluster: ClusterAccess, rest: Rest, txn: TxnId, topics: Collection[str], deadline: Deadline
) -> bool | None:
    """Whether a transaction that its coordinator has forgotten had been committed, as `repair` finds out.

    False if it holds back none of its topics any more: then nothing can take it back. None if nothing tells.
    """
    try:
        for topic in topics:  # a topic that no broker has loaded does not say what is open there
            with translated(f"loading {topic}"):
                cluster.client.create_producer(topic, timeout=deadline.left()).close(deadline.left())
        found = ((topic, _first_open(rest, topic, txn, deadline)) for topic in topics)
        held = {topic: first for topic, first in found if first is not None}
        if not held:
            return False
        return True if _proof_of_commit(cluster, rest, txn, held, deadline) else None
    except (TxnBridgeError, RestRefused) as error:
        _log.debug("how %s ended: %s", txn, error)
        return None


def _has_commit_marker(rest: Rest, topic: str, txn: TxnId, first: tuple[int, int], deadline: Deadline) -> bool:
    """Whether it had ended on a topic not far before the message that opened it there again."""
    with suppress(RestRefused, DeadlineExceeded):
        for place in islice(_before(first, _sizes(rest, topic, deadline)), _MOST_BEFORE):
            headers = _headers(rest, topic, place, deadline)
            if headers.get("x-pulsar-marker-type") == _COMMIT_MARKER and _txn_of(headers) == txn:
                return True
    return False


def _published(rest: Rest, topic: str, place: tuple[int, int], deadline: Deadline) -> int:
    """When a message was sent, in milliseconds."""
    try:
        told = _headers(rest, topic, place, deadline)["x-pulsar-publish-time"]
    except RestRefused as refused:
        raise unavailable(refused, f"looking at message {place} of {topic}") from refused
    # Python 3.10 reads neither a Z nor a fraction of any length.
    return int(datetime.fromisoformat(re.sub(r"\.\d+", "", told).replace("Z", "+00:00")).timestamp() * 1000)


def _can_be_read(cluster: ClusterAccess, rest: Rest, topic: str, txn: TxnId, about: int, deadline: Deadline) -> bool:
    """Whether a message of a transaction, sent not long before or after a time, is among all that readers of a topic
    see.
    """
    what = f"reading {topic}"
    found = rest.get(f"/admin/v2/persistent/{path_of(topic)}/messageid/{about - _AROUND_MS}", deadline)
    start = wire.MessageId(found["ledgerId"], found["entryId"])
    with translated(what):
        reader = cluster.client.read(topic, timeout=deadline.left(), start=start_before(start))
        try:
            last = reader.last_message_id(deadline.left())
            at = start.ledger, start.entry - 1
            while last.entry >= 0 and at < (last.ledger, last.entry):
                deadline.check(what)
                for entry in reader.receive(deadline.left()):
                    if entry.txn == txn:
                        return True
                    if entry.publish_time > about + _AROUND_MS:
                        return False
                    at = entry.id.ledger, entry.id.entry
            return False
        finally:
            reader.close(deadline.left())
