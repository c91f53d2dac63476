"""Marker topics: each transaction puts a record inside itself there, which can be read once it was committed.

That it cannot be read means that the transaction was aborted only if a plain record, written after the end, can:
an open transaction hides whatever stands behind it. So each writer has a marker topic of its own, where one
transaction at a time is open.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from txnbridge.errors import DeadlineExceeded, EvidenceLost, NotFound
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.read.last_entry import last_entry, start_before
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, encoded
from txnbridge_pulsar.write.fence_records import ProofLocation

VERSION = 1
PRESENCE, PROOF, PROBE = "here", "mark", "probe"
# A plain record serves the transactions that begin within so many seconds: it says until when any of them can be open,
# and what is older than that for long is dropped. Writing one takes ten milliseconds.
PRESENCE_SECONDS = 300.0
# Entries a turn when reading; each is small.
_A_TURN = 1000
# Entries that are there come in milliseconds; waiting longer for more only delays the probe.
_A_LOOK = 0.05


def proof_prefix(cluster: ClusterAccess) -> str:
    """How the names of all marker topics begin; the writer's name follows, encoded."""
    return f"{cluster.settings.prefix}marker-"


def proof_topic(cluster: ClusterAccess, writer: str, deadline: Deadline) -> str:
    """The full name of a writer's marker topic, which is there now and stays."""
    return cluster.topics.internal(f"{proof_prefix(cluster)}{encoded(writer)}", deadline)


@dataclass(frozen=True)
class ProofRecord:
    """One record on a marker topic: `HERE` before a writer's first transaction, `MARK` inside each, `PROBE` by a
    process that asks how one ended. Before a transaction that is to be prepared, `HERE` is for it alone and names it.
    """

    kind: str
    nonce: str = ""
    transaction: str = ""
    until: int = 0  # milliseconds since 1970; of HERE: no transaction that rests on it is open for longer
    owned: bool = False  # of HERE: whether it is of a transactional id, which somebody may open again

    def pack(self) -> bytes:
        fields = {
            "v": VERSION,
            "k": self.kind,
            "n": self.nonce,
            "t": self.transaction,
            "e": self.until,
            "o": self.owned,
        }
        return json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes | None) -> ProofRecord | None:
        """None for what is none of ours."""
        try:
            fields: Any = json.loads(data or b"")
            if fields["v"] != VERSION:
                return None
            kind, nonce, transaction = str(fields["k"]), str(fields.get("n", "")), str(fields.get("t", ""))
            if kind != PRESENCE:
                return cls(kind, nonce, transaction)
            return cls(kind, nonce, transaction, int(fields["e"]), bool(fields.get("o")))
        except (KeyError, TypeError, ValueError):
            return None


def new_nonce() -> str:
    return secrets.token_hex(8)


def last_presence(cluster: ClusterAccess, topic: str, deadline: Deadline) -> tuple[ProofLocation, ProofRecord] | None:
    """The last readable record of a marker topic, if it is a writer's first: that of an open transaction to be prepared
    is, and tells which one it is.
    """
    entry = last_entry(cluster, topic, deadline)
    record = None if entry is None else record_of(entry)
    if entry is None or record is None or record.kind != PRESENCE:
        return None
    return ProofLocation(topic, (entry.id.ledger, entry.id.entry), record.nonce), record


def was_committed(cluster: ClusterAccess, proof: ProofLocation, txn: wire.TxnId, deadline: Deadline) -> bool | None:
    """Whether a transaction that has ended was committed; None if that cannot be seen yet.

    Right only after its coordinator has said that it has ended. Raises `EvidenceLost` if the topic is not what it was.
    """
    try:
        with (
            translated(f"asking {proof.topic} how transaction {txn} ended"),
            _reading(cluster, proof.topic, proof.since, deadline) as entries,
        ):
            return _told(cluster, entries, proof, txn, deadline)
    except NotFound as error:
        gone = f"the marker topic {proof.topic} is gone, and with it what told how transactions ended"
        raise EvidenceLost(gone) from error


def _told(
    cluster: ClusterAccess,
    entries: Iterator[wire.ReceivedEntry | None],
    proof: ProofLocation,
    txn: wire.TxnId,
    deadline: Deadline,
) -> bool | None:
    try:
        _check_first(proof, _first(entries))
        probe: str | None = None
        while True:
            entry = next(entries, None)
            if entry is None:
                if probe is None:  # all is read that was there: something plain has to come behind it
                    probe = new_nonce()
                    write_plain(cluster, proof.topic, ProofRecord(PROBE, probe), deadline)
                continue
            found = _verdict(entry, txn, proof.at, probe)
            if found is not None:
                return found
    except DeadlineExceeded:
        return None


def _verdict(entry: wire.ReceivedEntry, txn: wire.TxnId, at: tuple[int, int] | None, probe: str | None) -> bool | None:
    record = record_of(entry)
    if record is not None and record.kind == PROOF and entry.txn == txn:
        return True
    if at is not None and (entry.id.ledger, entry.id.entry) > at:
        return False  # what stands behind the mark can be read
    # Else only what is certainly behind it tells: an older owner may have written in front of it, as late as it likes.
    return False if record is not None and record.kind == PROBE and record.nonce == probe else None


def _check_first(proof: ProofLocation, entry: wire.ReceivedEntry) -> None:
    record = record_of(entry)
    there = (entry.id.ledger, entry.id.entry) == proof.since
    if not there or record is None or (record.kind, record.nonce) != (PRESENCE, proof.nonce):
        raise EvidenceLost(f"the marker topic {proof.topic} has lost records: nobody can tell how transactions ended")


def write_plain(cluster: ClusterAccess, topic: str, record: ProofRecord, deadline: Deadline) -> tuple[int, int]:
    """Store a record outside of any transaction; where it is."""
    with translated(f"writing to {topic}"):
        producer = cluster.client.create_producer(topic, timeout=deadline.left())
        try:
            send = producer.send(wire.Single(record.pack()), timeout=deadline.left())
            id = send.result(deadline.left()).message_id
        finally:
            producer.close(deadline.left())
    return id.ledger, id.entry


def write_presence(
    cluster: ClusterAccess, topic: str, transaction: str, owned: bool, deadline: Deadline
) -> ProofLocation:
    """Write the plain record that the evidence of a writer's transactions begins with: before the first one there, and
    again before one that begins after `PRESENCE_SECONDS`.

    The writer must know that all transactions before on this topic have ended.
    """
    nonce = new_nonce()
    until = int((time.time() + PRESENCE_SECONDS + cluster.settings.longest_transaction) * 1000)
    since = write_plain(cluster, topic, ProofRecord(PRESENCE, nonce, transaction, until, owned), deadline)
    return ProofLocation(topic, since, nonce)


def remove(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    """Delete a marker topic that no process will ask any more. Without REST its subscription is deleted: then the
    broker deletes the topic by itself, because it is not used.
    """
    if cluster.rest is not None:
        cluster.topics.delete(topic, deadline)
        return
    with translated(f"removing {topic}"):
        cluster.client.subscribe(topic, SUBSCRIPTION, timeout=deadline.left()).unsubscribe(deadline.left())


@contextmanager
def _reading(
    cluster: ClusterAccess, topic: str, since: tuple[int, int], deadline: Deadline
) -> Iterator[Iterator[wire.ReceivedEntry | None]]:
    """The entries from a position on; None whenever nothing more has come, until `DeadlineExceeded`."""
    start = start_before(wire.MessageId(*since))
    reader = cluster.client.read(topic, timeout=deadline.left(), start=start, create=False)
    try:
        yield _entries(reader, topic, deadline)
    finally:
        reader.close(deadline.left())


def _entries(reader: wire.PulsarConsumer, topic: str, deadline: Deadline) -> Iterator[wire.ReceivedEntry | None]:
    while True:
        found = reader.receive(min(deadline.left(), _A_LOOK), most=_A_TURN)
        yield from found
        if not found:
            deadline.check(f"reading {topic}")
            yield None


def _first(entries: Iterator[wire.ReceivedEntry | None]) -> wire.ReceivedEntry:
    return next(entry for entry in entries if entry is not None)


def record_of(entry: wire.ReceivedEntry) -> ProofRecord | None:
    """The record in an entry on a marker topic; None if it is none of ours."""
    return ProofRecord.unpack(entry.messages()[0].value)
