"""The conclusions from a decision log: claims that decide, and commits to be carried out.

`Openings` has the newest opening of each id, by which an owner's records are judged: they count until a newer opening.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.records import (
    ClaimAcks,
    EvidenceBegin,
    IdPath,
    OpeningRef,
    read_begin,
    read_path,
    read_position,
    read_under,
)


@dataclass(frozen=True)
class KnownOpening:
    """The record by which a process became an id's owner: its name, number and position, the owner's host and data."""

    under: OpeningRef
    position: Position
    host: str
    data: Mapping[str, Any]


class Openings(dict[IdPath, KnownOpening]):
    """The newest known opening of each id, which is the record by which a process became the id's owner."""

    def is_next(self, under: OpeningRef) -> bool:
        """Return whether `under`, the log's next record, makes its process the id's newest owner (opens the id).

        Each opening of an id takes the next number, so a late copy does not count. The owner of a random, made-up id
        may open it again, and then the data and the position of the last opening count.
        """
        newest = self.get(under.id)
        return newest is None or newest.under.number < under.number or (under.made_up and newest.under == under)

    def is_newest(self, under: OpeningRef) -> bool:
        """Return whether `under` names the id's newest owner: an older owner's records after that one do not count.

        For an id that a process made up for itself, True also if its opening is forgotten: no other process opens it.
        """
        newest = self.get(under.id)
        return under.made_up if newest is None else newest.under == under

    def is_void(self, under: OpeningRef) -> bool:
        """Return whether a newer owner of the id makes void all records that the owner named by `under` appends now."""
        newest = self.get(under.id)
        # Two processes may append openings with the same number. Only the process whose opening counts uses it.
        return newest is not None and newest.under.number > under.number

    def kept(self, since: Position | None) -> Openings:
        """Return which ids' newest owners to keep in memory and snapshots: all but those of made-up ids before `since`.

        A process made such an id up for itself. `since` is the oldest process's announcement that a transaction needs.
        """
        return Openings({id: known for id, known in self.items() if _is_kept(known, since)})


def _is_kept(known: KnownOpening, since: Position | None) -> bool:
    return not known.under.made_up or (since is not None and known.position >= since)


@dataclass(frozen=True)
class CountingClaim:
    """The record that decides an id: its first valid claim. `body`, the claim's data, is None if a part is gone."""

    position: Position
    nonce: str
    decision: Decision
    by: OpeningRef | None
    body: Mapping[str, Any] | None
    acked: ClaimAcks | None = None


@dataclass(frozen=True)
class UnfinishedCommit:
    """A commit that the log has decided and that its author may not have carried out at the broker yet.

    `certain` is True if the log was read from where the transaction's records begin: no earlier decision was missed.
    """

    id: IdPath
    begin: EvidenceBegin
    claim: CountingClaim
    certain: bool

    def to_json(self) -> list[Any]:
        claim = self.claim
        by = claim.by and opening_json(claim.by)
        begin = {"at": list(self.begin.at), "id": self.begin.id}
        return [list(self.id), begin, list(claim.position), claim.nonce, by, claim.body, self.certain]

    @classmethod
    def from_json(cls, value: Any) -> UnfinishedCommit:
        id, begin, position, nonce, by, body, certain = value
        claim = CountingClaim(read_position(position), nonce, Decision.COMMIT, by and read_under(by), body)
        return cls(read_path(id), read_begin(begin), claim, bool(certain))


@dataclass(frozen=True)
class PartitionHold:
    """The undecided prepared transaction that acknowledges on a partition of a group; meanwhile no other one may.

    `expires_at` (ms since 1970) is the time from which any process may abort it.
    """

    id: IdPath
    begin: EvidenceBegin
    expires_at: int

    def to_json(self) -> list[Any]:
        return [list(self.id), {"at": list(self.begin.at), "id": self.begin.id}, self.expires_at]

    @classmethod
    def from_json(cls, value: Any) -> PartitionHold:
        id, begin, expires_at = value
        return cls(read_path(id), read_begin(begin), int(expires_at))


@dataclass(frozen=True)
class Renewal:
    """An operator's record that began the log anew: its position, its time (ms since 1970), and the operator's host."""

    position: Position
    at: int
    host: str

    def to_json(self) -> list[Any]:
        return [list(self.position), self.at, self.host]

    @classmethod
    def from_json(cls, value: Any) -> Renewal:
        position, at, host = value
        return cls(read_position(position), int(at), str(host))


def opening_json(under: OpeningRef) -> dict[str, Any]:
    return {"id": list(under.id), "name": under.name, "number": under.number}
