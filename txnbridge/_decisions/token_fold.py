"""The fold over records of transactions whose tokens say where their evidence begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from txnbridge._decisions.conclusions import CountingClaim, CountingEntry
from txnbridge._decisions.openings import KnownOpening, Openings
from txnbridge._decisions.records import (
    ClaimAcks,
    Claimed,
    EntryRecord,
    EvidenceBegin,
    GroupPartition,
    IdPath,
    Opened,
    OpeningRef,
    Presence,
)
from txnbridge._messages import Position

# The one kind of ledger entry that the fold interprets: it makes a transaction independent of its owner.
PREPARE = "prepare"

TokenTransaction = tuple[IdPath, EvidenceBegin]


@dataclass
class AckHistory:
    """The last claim that acknowledged on a group's partition, and the last one by any other transaction.

    Claims are kept here whether or not they count. Of claims by one transaction that follow each other (copies,
    repeated attempts) only the last is kept: that is enough to see whether another transaction's claim stands behind a
    position.
    """

    last: TokenTransaction
    at: Position
    before: Position | None = None  # the last claim of any transaction but `last`

    def add(self, transaction: TokenTransaction, position: Position) -> None:
        if transaction != self.last:
            self.last, self.before = transaction, self.at
        self.at = position

    def rival_behind(self, position: Position, transaction: TokenTransaction) -> bool:
        """Return whether a claim by any transaction but `transaction` stands behind a position."""
        rival = self.before if transaction == self.last else self.at
        return rival is not None and rival > position


@dataclass
class TokenFold:
    """The state of transactions with tokens, after the records since the first one read.

    No record before that one is needed: an owner uses a presence only after it has read, from the log's first record,
    that its own opening is the newest one up to that presence. So only an opening with a higher number can be newer.
    """

    openings: Openings = field(default_factory=Openings)
    presences: dict[Position, Presence] = field(default_factory=dict)
    claims: dict[IdPath, dict[EvidenceBegin, CountingClaim]] = field(default_factory=dict)
    entries: dict[tuple[IdPath, str], list[CountingEntry]] = field(default_factory=dict)
    ack_histories: dict[GroupPartition, AckHistory] = field(default_factory=dict)

    def open(self, position: Position, record: Opened) -> None:
        if self.openings.is_next(record.under):
            self.openings[record.under.id] = KnownOpening(record.under, position, record.host, record.data)

    def add_entry(self, position: Position, record: EntryRecord) -> None:
        if self.openings.is_void(record.under):
            return
        known = self.entries.setdefault((record.under.id, record.transaction), [])
        if all(entry.nonce != record.nonce for entry in known):
            known.append(CountingEntry(position, record.nonce, record.about, record.data, record.under))

    def remove_entry(self, position: Position, record: EntryRecord) -> None:
        """Remove an entry that an opening before the first record read makes void."""
        known = self.entries.get((record.under.id, record.transaction), [])
        known[:] = [entry for entry in known if entry.position != position]

    def claim(self, begin: EvidenceBegin, record: Claimed, claim: CountingClaim, covered: Position | None) -> bool:
        """Take a claim; return whether it counts, though it need not be the first that does.

        `covered` is the last position that the snapshots in front of the claim cover.
        """
        acked, transaction = record.acked, (record.id, begin)
        acks_count = acked is None or self._acknowledge(transaction, acked, claim.position, covered)
        if not acks_count or (record.by is not None and self._is_shut_out(record.by, record)):
            return False
        self.claims.setdefault(record.id, {}).setdefault(begin, claim)
        return True

    def remove_void_claim(self, begin: EvidenceBegin, record: Claimed) -> None:
        """Remove a claim that this fold takes for a counting one, if the author of `record` knew it to be void.

        The author of a claim that acknowledges has read, up to `read_up_to`, that no claim on its transaction counts. A
        reader that began behind the transaction's presence may not know the snapshot that makes the claim void.
        """
        known = self.claims.get(record.id, {})
        if record.acked is not None and begin in known and known[begin].position <= record.acked.read_up_to:
            del known[begin]

    def _acknowledge(
        self, transaction: TokenTransaction, acked: ClaimAcks, position: Position, covered: Position | None
    ) -> bool:
        """Return whether no other transaction acknowledged between `read_up_to` and the claim; note the claim."""
        # A claim is void if a snapshot in front of it covers more than the claim's author had read: a reader that
        # begins with that snapshot does not know which claims stand in between.
        counts = acked.read_up_to >= transaction[1].at and (covered is None or acked.read_up_to >= covered)
        histories = [self.ack_histories[each.place] for each in acked.ranges if each.place in self.ack_histories]
        counts = counts and not any(history.rival_behind(acked.read_up_to, transaction) for history in histories)
        self.acknowledge(transaction, acked, position)
        return counts

    def acknowledge(self, transaction: TokenTransaction, acked: ClaimAcks | None, position: Position) -> None:
        """Note the partitions on which a claim acknowledges, whether or not the claim counts."""
        for each in acked.ranges if acked is not None else ():
            self.ack_histories.setdefault(each.place, AckHistory(transaction, position)).add(transaction, position)

    def _is_shut_out(self, by: OpeningRef, record: Claimed) -> bool:
        # An owner's claim on a prepared transaction counts. Its author leaves the owner out if it acknowledges, because
        # a reader that begins with a snapshot does not know what was prepared before.
        return self.openings.is_void(by) and (record.acked is not None or not self.is_prepared(by.id, record.id))

    def is_prepared(self, owner: IdPath, id: IdPath) -> bool:
        """Return whether a counting prepare record has made a transaction independent of its owner."""
        return len(id) == 1 and any(e.about == PREPARE for e in self.entries.get((owner, str(id[0])), ()))

    def forget(self, before: Position, covered: Position | None) -> None:
        """Drop what no living presence reaches, but keep claims that may stand in front of one that acknowledges."""
        self.presences = {at: presence for at, presence in self.presences.items() if at >= before}
        if covered is not None:
            self._forget_claims(min(before, covered))
        self.openings = self.openings.kept(before)
        kept = ((key, [e for e in entries if e.position >= before]) for key, entries in self.entries.items())
        self.entries = {key: entries for key, entries in kept if entries}

    def _forget_claims(self, before: Position) -> None:
        left = ((id, {b: c for b, c in claims.items() if c.position >= before}) for id, claims in self.claims.items())
        self.claims = {id: claims for id, claims in left if claims}
