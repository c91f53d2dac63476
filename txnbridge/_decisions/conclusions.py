"""The results of folding a decision log: counting claims, counting entries, unfinished commits."""

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
class CountingClaim:
    """The first counting claim on an id. `body`, its data, is None if a part of the data is gone from the log."""

    position: Position
    nonce: str
    decision: Decision
    by: OpeningRef | None
    body: Mapping[str, Any] | None
    acked: ClaimAcks | None = None


@dataclass(frozen=True)
class UnfinishedCommit:
    """A commit that the log has decided and that its author may not have carried out at the broker yet.

    `certain` is True if the log was read from the transaction's presence on, so that no earlier claim was missed.
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
class CountingEntry:
    """One ledger entry that counts, that is, no newer opening of its owner's id precedes it."""

    position: Position
    nonce: str
    about: str
    data: Mapping[str, Any]
    under: OpeningRef


@dataclass(frozen=True)
class PartitionHold:
    """The undecided prepared transaction that acknowledges on a partition of a group, so that nobody else may there.

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
    """An operator's renewal of the log: its position, its time (ms since 1970) and the operator's host."""

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
