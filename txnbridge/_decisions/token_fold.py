"""The conclusions about transactions with tokens, from a decision log's records; a token says where to begin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from txnbridge._base.messages import Position
from txnbridge._decisions.conclusions import CountingClaim, KnownOpening, Openings
from txnbridge._decisions.records import (
    PREPARE,
    ClaimAcks,
    Claimed,
    EntryRecord,
    EvidenceBegin,
    GroupPartition,
    IdPath,
    Opened,
    OpeningRef,
    PreparedAcks,
    Presence,
)

TokenTransaction = tuple[IdPath, EvidenceBegin]


@dataclass
class AckHistory:
    """The last two claims that acknowledge on one partition of a group, of two different transactions.

    A prepare record with acknowledgements is kept as a claim is. Claims are kept here whether or not they count. Of
    consecutive claims by one transaction (copies, repeated attempts) only the last is kept: these two claims suffice to
    see whether another transaction claimed after a given position.
    """

    last: TokenTransaction
    at: Position
    before: Position | None = None  # the position of the last claim of any transaction but `last`

    def add(self, transaction: TokenTransaction, position: Position) -> None:
        if transaction != self.last:
            self.last, self.before = transaction, self.at
        self.at = position

    def rival_behind(self, position: Position, transaction: TokenTransaction) -> bool:
        """Return whether another transaction has claimed with acknowledgements on the partition after `position`.

        `position` is that in the log up to which the owner of `transaction` had read when it read the group's position.
        """
        rival = self.before if transaction == self.last else self.at
        return rival is not None and rival > position


@dataclass
class TokenFold:
    """The decisions and entries about transactions with tokens, by the records that were read.

    Records before the first one read are not needed: an owner begins transactions after announcing itself in a record,
    if it has read the whole log up to there and owns its id. So only an owner with a higher number can be newer.
    """

    openings: Openings = field(default_factory=Openings)
    presences: dict[Position, Presence] = field(default_factory=dict)
    claims: dict[IdPath, dict[EvidenceBegin, CountingClaim]] = field(default_factory=dict)
    # By owner and transaction, with their positions: no newer owner had opened the id before an entry was appended.
    entries: dict[tuple[IdPath, str], list[tuple[Position, EntryRecord]]] = field(default_factory=dict)
    ack_histories: dict[GroupPartition, AckHistory] = field(default_factory=dict)

    def open(self, position: Position, record: Opened) -> None:
        if self.openings.is_next(record.under):
            self.openings[record.under.id] = KnownOpening(record.under, position, record.host, record.data)

    def add_entry(self, position: Position, record: EntryRecord) -> None:
        self.hold(position, record)
        if self.openings.is_void(record.under):
            return
        known = self.entries.setdefault((record.under.id, record.transaction), [])
        if all(entry.nonce != record.nonce for _, entry in known):
            known.append((position, record))

    def remove_entry(self, position: Position, record: EntryRecord) -> None:
        """Remove a backend's record about a transaction (an entry), at `position`, which the caller has found void.

        Its owner had been replaced before the first record that was read.
        """
        known = self.entries.get((record.under.id, record.transaction), [])
        known[:] = [entry for entry in known if entry[0] != position]

    def claim(self, begin: EvidenceBegin, record: Claimed, claim: CountingClaim, covered: Position | None) -> bool:
        """Note a claim; return whether it counts. The first claim that counts decides the transaction.

        `begin` is where the transaction's records begin, `covered` the last position that earlier snapshots cover.
        """
        acked, transaction = record.acked, (record.id, begin)
        acks_count = acked is None or self._acknowledge(transaction, acked, claim.position, covered)
        if not acks_count or (record.by is not None and self._is_shut_out(record.by, record)):
            return False
        self.claims.setdefault(record.id, {}).setdefault(begin, claim)
        return True

    def remove_void_claim(self, begin: EvidenceBegin, record: Claimed) -> None:
        """Remove an earlier claim, taken for the deciding one, if the author of `record` knew that claim to be void.

        The author of a claim with acknowledgements has read the log up to `read_up_to`, and had found no valid claim on
        its transaction. A reader that began after the transaction's first records may not know the snapshot that made
        the earlier claim void.
        """
        known = self.claims.get(record.id, {})
        if record.acked is not None and begin in known and known[begin].position <= record.acked.read_up_to:
            del known[begin]

    def _acknowledge(
        self, transaction: TokenTransaction, acked: ClaimAcks, position: Position, covered: Position | None
    ) -> bool:
        """Note a claim with acknowledgements; return whether the claim counts.

        It counts if no other transaction acknowledged on the same partitions between `read_up_to` and the claim.
        """
        # A claim is void if a snapshot before it covers more than the claim's author had read: a reader that begins
        # with this snapshot does not know the claims between `read_up_to` and the covered record.
        counts = acked.read_up_to >= transaction[1].at and (covered is None or acked.read_up_to >= covered)
        histories = [self.ack_histories[each.place] for each in acked.ranges if each.place in self.ack_histories]
        counts = counts and not any(history.rival_behind(acked.read_up_to, transaction) for history in histories)
        self.acknowledge(transaction, acked, position)
        return counts

    def hold(self, position: Position, record: EntryRecord) -> None:
        """Note the partitions on which a prepared transaction acknowledges, whether or not its record counts.

        A later claim of another transaction that acknowledges there is void unless its author had read this record.
        """
        if (prepared := PreparedAcks.of(record)) is not None:
            self._note(((record.transaction,), prepared.begin), prepared.places, position)

    def acknowledge(self, transaction: TokenTransaction, acked: ClaimAcks | None, position: Position) -> None:
        """Note on which partitions a claim acknowledges messages, whether or not the claim counts."""
        if acked is not None:
            self._note(transaction, [each.place for each in acked.ranges], position)

    def _note(self, transaction: TokenTransaction, places: Iterable[GroupPartition], position: Position) -> None:
        for place in places:
            self.ack_histories.setdefault(place, AckHistory(transaction, position)).add(transaction, position)

    def _is_shut_out(self, by: OpeningRef, record: Claimed) -> bool:
        # An owner's claim on a prepared transaction counts even after a newer opening. If it acknowledges messages, its
        # author leaves `by` out instead: a reader that begins with a snapshot does not know what was prepared before.
        return self.openings.is_void(by) and (record.acked is not None or not self.is_prepared(by.id, record.id))

    def is_prepared(self, owner: IdPath, id: IdPath) -> bool:
        """Return whether a valid prepare record has made a transaction independent of its owner."""
        return len(id) == 1 and any(e.about == PREPARE for _, e in self.entries.get((owner, str(id[0])), ()))

    def forget(self, before: Position, covered: Position | None) -> None:
        """Drop records before the position `before`, but keep claims behind `covered`, the end of the last snapshot.

        These claims are needed to judge later claims with acknowledgements.
        """
        self.presences = {at: presence for at, presence in self.presences.items() if at >= before}
        if covered is not None:
            self._forget_claims(min(before, covered))
        self.openings = self.openings.kept(before)
        kept = ((key, [e for e in entries if e[0] >= before]) for key, entries in self.entries.items())
        self.entries = {key: entries for key, entries in kept if entries}

    def _forget_claims(self, before: Position) -> None:
        left = ((id, {b: c for b, c in claims.items() if c.position >= before}) for id, claims in self.claims.items())
        self.claims = {id: claims for id, claims in left if claims}
