"""`LogLedger`: the ledger that a backend uses for one transactional id, stored as records of a decision log."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.conclusions import CountingClaim, UnfinishedCommit
from txnbridge._decisions.engine import Engine
from txnbridge._decisions.queries import (
    Query,
    begin_of,
    fenced,
    path_of,
    require_begin,
    require_complete,
    require_readable,
)
from txnbridge._decisions.records import EntryRecord, EvidenceBegin, OpeningRef, check_data
from txnbridge._decisions.tokenless_fold import IdFold
from txnbridge.errors import EvidenceLost, InvalidOption, InvalidState, OutcomeUnknown
from txnbridge.spi import Ack, Held, Ledger, LedgerClaim, LedgerEntry, Partition

_Key = TypeVar("_Key", bound=Hashable)
_CLUSTER = "cluster"  # a name in the data of openings


@dataclass(eq=False, repr=False)
class LogLedger(Ledger):
    _opened_engine: Engine
    _id: str
    _begin: EvidenceBegin | None
    _made_up: bool
    _cluster: str | None

    @property
    def _engine(self) -> Engine:
        self._opened_engine.require_open()
        return self._opened_engine

    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        if self._made_up:
            return self._engine.open_made_up(path_of(self._id), check_data(data), deadline)
        self.newest_opening(deadline)  # raises an error for an id of another cluster
        return self._engine.open(path_of(self._id), self._with_cluster(data), deadline).under.name

    def open_behind(self, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        return self._engine.open_behind(path_of(self._id), before, self._with_cluster(data), deadline)

    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        newest = self._engine.newest_opening(path_of(self._id), deadline)
        if newest is None:
            return self._engine.made_up.get(path_of(self._id))
        data = dict(newest.data)
        if (cluster := data.pop(_CLUSTER, None)) not in (None, self._cluster):
            raise InvalidOption(f"{self._id} belongs to cluster {cluster}: give another application= or decision_log=")
        return newest.under.name, data

    def _with_cluster(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return check_data(data if self._cluster is None else {**data, _CLUSTER: self._cluster})

    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        return self._engine.begin(self._engine.owned.get(path_of(self._id)), deadline)

    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        under = self._own_opening()
        fields = {"under": under, "about": kind, "transaction": transaction, "data": check_data(data)}
        counts = self._engine.append(EntryRecord, fields, deadline, transaction)[1]
        if counts is None:
            raise OutcomeUnknown(f"{self._id} was opened by another process while a {kind!r} record of it was stored")
        if not counts:
            with self._engine.follower.looking(deadline) as state:
                raise fenced(state.ids.openings.get(path_of(self._id)))
        self._engine.tidy_if_due(deadline)

    def _own_opening(self) -> OpeningRef:
        try:
            return self._engine.owned[path_of(self._id)]
        except KeyError:
            text = f"{self._id} was not opened by this process, which therefore cannot record anything for it"
            raise InvalidState(text) from None

    def find(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any] | None = None) -> list[LedgerEntry]:
        path, begin = path_of(self._id), begin_of(log) or self._begin
        follower = self._engine.everything(deadline) if begin is None else self._engine.follower_of(begin, deadline)
        with follower.following(deadline, may_create=begin is None) as state:
            require_readable(state)
            if begin is None:
                require_complete(state)
            else:
                require_begin(state, begin)
            return [_entry(record) for _, record in state.tokens.entries.get((path, transaction), ())]

    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        path = path_of(self._id)
        with self._engine.everything(deadline).following(deadline) as state:
            require_readable(state)
            require_complete(state)
            found = [
                (position, record)
                for (owner, _), noted in state.tokens.entries.items()
                for position, record in noted
                if owner == path and record.about == kind
            ]
        return [_entry(record) for _, record in sorted(found, key=lambda item: item[0])]

    def claim(
        self,
        transaction: str,
        decision: Decision,
        data: Mapping[str, Any],
        deadline: Deadline,
        *,
        log: Mapping[str, Any],
        acks: Sequence[Ack] = (),
    ) -> LedgerClaim:
        if acks and decision is not Decision.COMMIT:
            raise InvalidOption("only a transaction that is committed acknowledges anything")
        query = Query(transaction, path_of(transaction), begin_of(log))
        # Any process may abort, so an ABORT names no owner and counts even if the id has a newer owner.
        by = self._engine.owned.get(path_of(self._id)) if decision is Decision.COMMIT else None
        follower = self._engine.follower_of(query.begin, deadline)
        if by is not None and self._engine.known(query, follower, deadline) is None:
            with follower.looking(deadline) as state:
                if state.tokens.is_prepared(by.id, query.path):
                    by = None
        return _public(self._engine.decide(query, decision, check_data(data), by, acks, deadline))

    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        claim = self._engine.counting_claim(Query(transaction, path_of(transaction), begin_of(log)), deadline)
        return None if claim is None else _public(claim)

    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        path = path_of(self._id)
        last = self._unfinished(lambda ids: ids.commits.get(path, {}), deadline).values()
        counting = [commit for commit in last if self._counts(commit, deadline)]
        return [_decided(commit) for commit in sorted(counting, key=lambda commit: commit.claim.position)]

    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        last = self._unfinished(lambda ids: ids.last_ackers, deadline)
        return {place[1]: _decided(commit) for place, commit in last.items() if place[0] == group}

    def _unfinished(
        self, of: Callable[[IdFold], Mapping[_Key, UnfinishedCommit]], deadline: Deadline
    ) -> dict[_Key, UnfinishedCommit]:
        """Return the decided commits that are perhaps not carried out at the broker yet.

        `of` selects the commits from the log's conclusions about all ids. Expired transactions are left out.
        """
        with self._engine.follower.following(deadline) as state:
            require_readable(state)
            require_complete(state)
            oldest = state.oldest_living(self._engine.now())
            found = {key: commit for key, commit in of(state.ids).items() if commit.claim.body is not None}
        return {key: commit for key, commit in found.items() if oldest is not None and commit.claim.position >= oldest}

    def _counts(self, commit: UnfinishedCommit, deadline: Deadline) -> bool:
        """Return whether a commit is the decision that counts about its transaction: the first valid one in the log.

        If this process began to read after the transaction's first records, a second reader of the log reads them.
        """
        if commit.certain:
            return True
        query = Query(str(commit.id[0]), commit.id, commit.begin)
        try:
            claim = self._engine.counting_claim(query, deadline)
        except EvidenceLost:  # the transaction has expired, so no process carries the commit out
            return False
        return claim is not None and claim.decision is Decision.COMMIT

    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        with self._engine.follower.following(deadline) as state:
            require_readable(state)
            require_complete(state)
            assert state.cursor is not None
            return {place[1]: at for place, at in state.ids.groups.items() if place[0] == group}, state.cursor[0]

    def holds(self, deadline: Deadline) -> list[tuple[str, Partition, Held]]:
        with self._engine.follower.looking(deadline) as state:
            require_readable(state)
            require_complete(state)
            oldest = state.oldest_living(self._engine.now())
            found: list[tuple[str, Partition, Held]] = []
            for place, holds in state.ids.holds.items():
                for hold in [each for each in holds if oldest is not None and each.begin.at >= oldest][:1]:
                    begin = {"at": list(hold.begin.at), "id": hold.begin.id}
                    found.append((*place, Held(str(hold.id[0]), begin, hold.expires_at)))
        return found


def _entry(record: EntryRecord) -> LedgerEntry:
    return LedgerEntry(record.about, record.transaction, record.data, record.under.name)


def _decided(commit: UnfinishedCommit) -> tuple[str, LedgerClaim]:
    return str(commit.id[0]), _public(commit.claim)


def _public(claim: CountingClaim) -> LedgerClaim:
    return LedgerClaim(claim.decision, claim.body or {}, claim.by.name if claim.by else None)
