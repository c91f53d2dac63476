"""Proof topics: each transaction sends a proof message to one, which readers see once the transaction is committed.

A missing proof message means an abort only if a later record, sent outside any transaction, can be read: an open
transaction hides everything after its first message. So each writer has its own proof topic, with one open transaction
at a time (hazard H47).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from txnbridge.errors import DeadlineExceeded, EvidenceLost, NotFound
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess, last_entry, start_before, value_of
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, encoded
from txnbridge_pulsar.write.fence_records import ProofLocation

VERSION = 1
PRESENCE, PROOF, PROBE = "here", "mark", "probe"

# The most entries that are received at once; each is small.
_MAX_ENTRIES_PER_RECEIVE = 1000
# Seconds without an entry after which all stored ones count as read; stored entries arrive within milliseconds.
_RECEIVE_SECONDS = 0.05


def proof_prefix(cluster: ClusterAccess) -> str:
    """Return the prefix of the topics in which writers leave proofs of their commits; the writer's name follows."""
    return f"{cluster.settings.prefix}marker-"


def proof_topic(cluster: ClusterAccess, writer: str, deadline: Deadline) -> str:
    """Return the full name of the topic in which a writer leaves proofs of its commits; create a missing topic."""
    return cluster.topics.internal(f"{proof_prefix(cluster)}{encoded(writer)}", deadline)


@dataclass(frozen=True)
class ProofRecord:
    """A record on a proof topic, of one of three kinds: by such records a process finds a transaction's outcome.

    A writer sends `PRESENCE` before its first transaction, and `PROOF` inside each transaction; a process that looks
    for an outcome sends `PROBE`. On the proof topic of a prepared transaction, `PRESENCE` has the transaction's name.
    """

    kind: str
    nonce: str = ""
    transaction: str = ""
    until: int = 0  # of PRESENCE: its transactions are open no longer; milliseconds since 1970
    owned: bool = False  # of PRESENCE: whether the writer has a transactional id, which may be opened again

    def pack(self) -> bytes:
        given = {"v": VERSION, "k": self.kind, "n": self.nonce, "t": self.transaction, "e": self.until, "o": self.owned}
        return json.dumps({name: value for name, value in given.items() if value}, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes | None) -> ProofRecord | None:
        """Parse a record. Return None if the data is not a record of this version."""
        try:
            fields: Any = json.loads(data or b"")
            if fields["v"] != VERSION:
                return None
            kind, nonce, transaction = str(fields["k"]), str(fields.get("n", "")), str(fields.get("t", ""))
            if kind != PRESENCE:
                return cls(kind, nonce, transaction)
            return cls(kind, nonce, transaction, int(fields["e"]), bool(fields.get("o")))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None


def last_presence(cluster: ClusterAccess, topic: str, deadline: Deadline) -> tuple[ProofLocation, ProofRecord] | None:
    """Return the last readable record of a proof topic and its location, if the record is a presence record, else None.

    A writer stores presence records before its transactions; that of an open prepared transaction has its name.
    """
    entry = last_entry(cluster, topic, deadline)
    record = None if entry is None else ProofRecord.unpack(value_of(entry))
    if entry is None or record is None or record.kind != PRESENCE:
        return None
    return ProofLocation(topic, (entry.id.ledger, entry.id.entry), record.nonce), record


def was_committed(cluster: ClusterAccess, proof: ProofLocation, txn: wire.TxnId, deadline: Deadline) -> bool | None:
    """Return whether a transaction was committed, by its proof message; None if an open transaction hides the message.

    Call this only after the coordinator has forgotten the transaction. Raise `EvidenceLost` if the topic has lost
    records.
    """
    start = start_before(wire.MessageId(*proof.since))
    try:
        with translated(f"reading the outcome of transaction {txn} from {proof.topic}"):
            opened = cluster.client.read(proof.topic, timeout=deadline.left(), start=start, create=False)
            with wire.closing(opened, deadline.left) as reader:
                return _search_proof(cluster, _entries(reader, proof.topic, deadline), proof, txn, deadline)
    except NotFound as error:
        gone = f"the proof topic {proof.topic} was deleted, and with it the outcomes of its transactions"
        raise EvidenceLost(gone) from error


def _search_proof(
    cluster: ClusterAccess,
    entries: Iterator[wire.ReceivedEntry | None],
    proof: ProofLocation,
    txn: wire.TxnId,
    deadline: Deadline,
) -> bool | None:
    try:
        _check_first(proof, next(entry for entry in entries if entry is not None))
        probe: str | None = None
        while True:
            entry = next(entries, None)
            if entry is None:
                if probe is None:  # all stored entries are read: write a record after the proof message
                    probe = secrets.token_hex(8)
                    write_plain(cluster, proof.topic, ProofRecord(PROBE, probe), deadline)
                continue
            verdict = _judge(entry, txn, proof.at, probe)
            if verdict is not None:
                return verdict
    except DeadlineExceeded:
        return None


def _judge(entry: wire.ReceivedEntry, txn: wire.TxnId, at: tuple[int, int] | None, probe: str | None) -> bool | None:
    record = record_of(entry)
    if record is not None and record.kind == PROOF and entry.txn == txn:
        return True
    if at is not None and (entry.id.ledger, entry.id.entry) > at:
        return False  # an entry after the proof message can be read, but the message itself cannot
    # If the proof message's position is not known, only our own probe is certainly stored after it: an older owner may
    # write other records late.
    return False if record is not None and record.kind == PROBE and record.nonce == probe else None


def _check_first(proof: ProofLocation, entry: wire.ReceivedEntry) -> None:
    record = record_of(entry)
    is_expected = (entry.id.ledger, entry.id.entry) == proof.since
    if not is_expected or record is None or (record.kind, record.nonce) != (PRESENCE, proof.nonce):
        raise EvidenceLost(f"the proof topic {proof.topic} has lost records, and with them outcomes of transactions")


def write_plain(cluster: ClusterAccess, topic: str, record: ProofRecord, deadline: Deadline) -> tuple[int, int]:
    """Store a record on a proof topic outside any transaction. Return the record's position."""
    with translated(f"writing to {topic}"):
        opened = cluster.client.create_producer(topic, timeout=deadline.left())
        with wire.closing(opened, deadline.left) as producer:
            send = producer.send(wire.Single(record.pack()), timeout=deadline.left())
            id = send.result(deadline.left()).message_id
    return id.ledger, id.entry


def write_presence(
    cluster: ClusterAccess, topic: str, transaction: str, owned: bool, deadline: Deadline
) -> ProofLocation:
    """Write a presence record, which the proof messages of the writer's next transactions follow; return its location.

    A writer calls this before its first transaction on the topic, and again after `Timing.presence_seconds`. All
    earlier transactions on the topic must have ended. `transaction` is the name of a prepared transaction, else "";
    `owned` says whether the writer has a transactional id.
    """
    nonce = secrets.token_hex(8)
    settings = cluster.settings
    until = int((time.time() + settings.timing.presence_seconds + settings.longest_transaction) * 1000)
    since = write_plain(cluster, topic, ProofRecord(PRESENCE, nonce, transaction, until, owned), deadline)
    return ProofLocation(topic, since, nonce)


def remove(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    """Delete a proof topic that is not needed: by REST, or else its subscription, after which the broker deletes it."""
    if cluster.rest:
        cluster.topics.delete(topic, deadline)
        return
    with translated(f"removing {topic}"):
        cluster.client.subscribe(topic, SUBSCRIPTION, timeout=deadline.left()).unsubscribe(deadline.left())


def _entries(reader: wire.PulsarConsumer, topic: str, deadline: Deadline) -> Iterator[wire.ReceivedEntry | None]:
    """Yield the entries that a reader of a topic receives, and None while no entry arrives."""
    while True:
        received = reader.receive(min(deadline.left(), _RECEIVE_SECONDS), most=_MAX_ENTRIES_PER_RECEIVE)
        yield from received
        if not received:
            deadline.check(f"reading {topic}")
            yield None


def record_of(entry: wire.ReceivedEntry) -> ProofRecord | None:
    """Return the proof record in an entry; None if the entry contains anything else."""
    return ProofRecord.unpack(entry.messages()[0].value)
