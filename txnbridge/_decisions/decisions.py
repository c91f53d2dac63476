"""`Decisions`: the interface of a decision log for applications. The Spark sink uses it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from txnbridge._base.deadline import Deadline
from txnbridge._base.events import Emitter
from txnbridge._base.messages import Position
from txnbridge._base.timing import TIMING, Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.conclusions import CountingClaim, KnownOpening
from txnbridge._decisions.engine import TIDY_RECORDS, Engine
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.follower import Follower
from txnbridge._decisions.ledger import LogLedger
from txnbridge._decisions.queries import (
    Id,
    Query,
    begin_of,
    id_of,
    path_of,
    require_body,
    require_complete,
    require_readable,
)
from txnbridge._decisions.records import Done, OpeningRef, check_data
from txnbridge.errors import EvidenceLost, InvalidOption, NotFound
from txnbridge.spi import DecisionLog, Ledger, Partition

_log = logging.getLogger("txnbridge")

# The default time for which evidence about a token is kept. With too short a time, evidence is lost (a token's status
# is then UNKNOWN); with too long a time, reading the log only takes longer.
_LIFETIME = 7 * 86_400.0
# How many times between two snapshots the background thread checks whether the next snapshot is due.
_CHECKS_BETWEEN_SNAPSHOTS = 6


@dataclass(frozen=True)
class Claim:
    """The record that decides an id: its first valid claim. `mine` is True if this `Decisions` object made it."""

    id: Id
    decision: Decision
    data: Mapping[str, Any]
    position: Position
    nonce: str
    mine: bool
    opening: str | None  # the name of the opening under which an owner made the claim; None if it named none


@dataclass(frozen=True)
class Opening:
    """The record by which a process became an id's owner: its name, number and position, the owner's host and data."""

    id: Id
    name: str
    number: int
    position: Position
    host: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """The decision log's answer about an id.

    `done` is True if the id was marked done, because its decision has been carried out; its claims are then no longer
    kept. `done_up_to` is the mark under this id: each id that consists of this one and a number up to it is done.
    `opening` is the record by which a process became the id's newest owner.
    """

    claim: Claim | None
    done: bool
    done_up_to: int | None
    opening: Opening | None


@dataclass(frozen=True)
class IncompleteLog:
    """The state of a log that lacks earlier records, so that it proves nothing about ids that no token carries.

    `reason` says why it is incomplete. `ids` and `positions` are what the log still contains, perhaps out of date;
    `decided` is the number of transactions with tokens that the log still decides.
    """

    reason: str
    ids: Sequence[Id]
    positions: Mapping[tuple[str, Partition], Position]  # the last known next positions to read, by group and partition
    decided: int


class Decisions:
    """One decision log, in which processes claim decisions about ids. Any number of threads may use it.

    An id is text, or a tuple of text and numbers such as `("query", "sink", 7, 0)`. For an id that a token carries,
    calls need the token's `log` as `begin`; any other id is judged by all records since the log's birth. If records
    about an id are gone, every call about it raises `EvidenceLost` instead of claiming or answering.
    """

    def __init__(
        self,
        log: DecisionLog,
        *,
        timeout: float = 30,
        events: Emitter | None = None,
        name: str | None = None,
        place: str | None = None,
        cluster: str | None = None,
        host: str = "",
        lifetime: float = _LIFETIME,
        tidy_after: int = TIDY_RECORDS,
        clock: Callable[[], float] = time.time,
        timing: Timing = TIMING,
    ) -> None:
        """Use the log `log`; `Bridge.decisions` opens one and calls this.

        A token may be asked about for `lifetime` seconds after its transaction began: at least its timeout plus hold.
        `name` is the log's name, and `place` its store's name if this is not the bridge's broker: each token has both.
        `cluster` is then the bridge's: ledgers refuse ids of another cluster.
        `host` describes this process to owners that it fences. After `tidy_after` records a snapshot is written.
        """
        self._name = name
        self._cluster = cluster
        self._timeout = timeout
        begins = {key: value for key, value in (("log", name), ("on", place)) if value is not None}
        events = events if events is not None else Emitter("", ())
        self._engine = Engine(log, events, begins, lifetime, tidy_after, clock, host, timing)
        self._closed = threading.Event()
        if log.keeps is not None:
            threading.Thread(target=self._write_snapshots_by_age, name="txnbridge-decisions", daemon=True).start()

    def _write_snapshots_by_age(self) -> None:
        """Write snapshots in a log whose store drops records by age, even while this process makes no claims.

        The process's thread runs this until `close`. A process that has only read the log writes no snapshot.
        """
        while not self._closed.wait(self._engine.tidy_seconds / _CHECKS_BETWEEN_SNAPSHOTS):
            if not self._engine.has_written:
                continue
            try:
                self._engine.tidy_if_due(Deadline(self._timeout))
            except Exception as error:
                _log.warning("an idle decision log could not be tidied, which is retried: %s", error)

    # --- owning -------------------------------------------------------------------------------------------------------

    def open(
        self,
        id: Id,
        data: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout: float | Deadline | None = None,
    ) -> Opening:
        """Open an id, so that this process owns it and later records of older owners do not count.

        With a `name` (such as a Spark run's id) all processes that open the id under this name own it together; raise
        `Fenced` if the id was opened under another name since. Without a name each call fences all earlier owners.
        """
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidOption(f"the name of an opening is text that is not empty, not {name!r:.100}")
        return _public(self._engine.open(path_of(id), check_data(data or {}), self._deadline(timeout), name))

    def begin(self, *, opening: Opening | None = None, timeout: float | Deadline | None = None) -> dict[str, Any]:
        """Return the place in the log after which a transaction that begins now has its records: its token's `log`.

        An owner passes its `opening`. Raise `Fenced` if the id was opened again since.
        """
        return self._engine.begin(None if opening is None else _under(opening), self._deadline(timeout))

    # --- deciding -----------------------------------------------------------------------------------------------------

    def claim(
        self,
        id: Id,
        decision: Decision,
        data: Mapping[str, Any] | None = None,
        *,
        begin: Mapping[str, Any] | None = None,
        opening: Opening | None = None,
        timeout: float | Deadline | None = None,
    ) -> Claim:
        """Claim a decision about an id; return the claim that decides, whichever process made it. Safe to repeat.

        The first claim that is valid decides. For the id of a transaction with a token, `begin` is the token's `log`.
        With `opening`, which `open` has returned, the claim is not valid once a newer owner has opened the id.

        Raise `Fenced` if `opening` is not the newest and no claim counts, `InvalidState` for an id that is marked done,
        `OutcomeUnknown` while it cannot be known which claim counts, `EvidenceLost` if it can never be known.
        """
        deadline = self._deadline(timeout)
        if decision not in (Decision.COMMIT, Decision.ABORT):
            raise InvalidOption(f"a claim is COMMIT or ABORT, not {decision!r}")
        said = check_data(data or {})
        query = Query(id, path_of(id), begin_of(begin))
        by = None if opening is None else _under(opening)
        return self._claim(id, self._engine.decide(query, decision, said, by, (), deadline))

    @contextmanager
    def reading_once(self, *, timeout: float | Deadline | None = None) -> Iterator[None]:
        """Read the log once for all calls of this thread in the block; their answers are those of the block's begin.

        Without it each call asks the store for the log's end. Other threads that read the log wait until the block
        ends, so it contains nothing else that takes long.
        """
        with self._engine.follower.reading_once(self._deadline(timeout)):
            yield

    def read(
        self, id: Id, *, begin: Mapping[str, Any] | None = None, timeout: float | Deadline | None = None
    ) -> Reading:
        """Return what the log says about an id at this moment; claim nothing.

        Raise `EvidenceLost` if records about the id are gone, `OutcomeUnknown` if the log cannot be read for now.
        """
        deadline = self._deadline(timeout)
        query = Query(id, path_of(id), begin_of(begin))
        follower = self._engine.follower_of(query.begin, deadline)
        with follower.following(deadline, may_create=query.begin is None) as state:
            if query.begin is not None:
                return Reading(self._claim_of(query, state), False, None, None)
            require_complete(state)
            done = state.ids.is_done(query.path)
            newest = state.ids.openings.get(query.path)
            return Reading(
                None if done else self._claim_of(query, state),
                done,
                state.ids.done.get(query.path),
                None if newest is None else _public(newest),
            )

    def read_all(
        self, asked: Sequence[tuple[Id, Mapping[str, Any]]], *, timeout: float | Deadline | None = None
    ) -> list[Claim | EvidenceLost | None]:
        """Return the decision about each of several ids, in their order, and read the log only once.

        Each id comes with the `log` of its token, where its records begin. The result is None for an undecided id, an
        `EvidenceLost` for an id whose records are gone.
        """
        deadline = self._deadline(timeout)
        queries = [Query(id, path_of(id), begin_of(begin)) for id, begin in asked]
        by_follower: dict[Follower, list[int]] = {}
        for number, query in enumerate(queries):
            by_follower.setdefault(self._engine.follower_of(query.begin, deadline), []).append(number)
        found: dict[int, Claim | EvidenceLost | None] = {}
        for follower, numbers in by_follower.items():
            with follower.following(deadline, may_create=False) as state:
                for number in numbers:
                    try:
                        found[number] = self._claim_of(queries[number], state)
                    except EvidenceLost as error:
                        found[number] = error
        return [found[number] for number in range(len(queries))]

    def claims(self, id: Id, *, timeout: float | Deadline | None = None) -> list[Claim]:
        """Return the deciding claims on all ids that begin with this id and are not marked done, in the log's order."""
        path = path_of(id)
        with self._engine.follower.following(self._deadline(timeout)) as state:
            require_readable(state)
            require_complete(state)
            found = [(key, claim) for key, claim in state.ids.claims.items() if key[: len(path)] == path != key]
        return [self._claim(id_of(key), claim) for key, claim in sorted(found, key=lambda item: item[1].position)]

    def done(self, id: Id, up_to: int, *, timeout: float | Deadline | None = None) -> None:
        """Mark every id that consists of `id` and a number up to `up_to` as done.

        The log drops the decisions about these ids in time, but never the mark. Call this only when these decisions
        have been carried out.
        """
        deadline = self._deadline(timeout)
        path = path_of(id)
        with self._engine.follower.following(deadline) as state:
            require_complete(state)
            if up_to <= state.ids.done.get(path, up_to - 1):
                return
        self._engine.append(Done, {"id": path, "up_to": up_to}, deadline)
        self._engine.tidy_if_due(deadline)

    def _claim(self, id: Id, claim: CountingClaim) -> Claim:
        return Claim(
            id=id,
            decision=claim.decision,
            data=require_body(id, claim),
            position=claim.position,
            nonce=claim.nonce,
            mine=self._engine.is_own(claim.nonce),
            opening=claim.by.name if claim.by else None,
        )

    def _claim_of(self, query: Query, state: LogState) -> Claim | None:
        claim = self._engine.answer(query, state)
        return None if claim is None else self._claim(query.id, claim)

    # --- keeping the log ----------------------------------------------------------------------------------------------

    def tidy(self, *, timeout: float | Deadline | None = None) -> Position:
        """Write a snapshot of the log's conclusions, then drop the records that it replaces and no token can need.

        Return the first position that is kept. Bridges do this by themselves after many records. If the log's broker
        drops records by age, some process must do it from time to time.
        """
        return self._engine.tidy(self._deadline(timeout))

    def lost(self, *, timeout: float | Deadline | None = None) -> IncompleteLog | None:
        """Describe an incomplete log, which proves nothing about ids that no token carries; None for a complete log.

        Raise `NotFound` for an empty log, which no process has used.
        """
        with self._engine.follower.following(self._deadline(timeout), may_create=False) as state:
            require_readable(state)
            if state.cursor is None:
                text = f"the decision log {self._name or ''!r} is empty, there is nothing to renew: check that its name"
                raise NotFound(text + " (that of the application) and its place are right")
            if state.completeness.complete:
                return None
            ids = state.remains()
            known = {*ids.openings, *ids.done, *ids.claims}
            return IncompleteLog(
                reason=state.completeness.incomplete_because,
                ids=sorted((id_of(path) for path in known), key=str),
                positions={(group, partition): at for (group, partition), at in sorted(ids.groups.items())},
                decided=len(state.tokens.claims),
            )

    def renew(self, *, timeout: float | Deadline | None = None) -> Position:
        """Begin a log anew that has lost needed records; return the position of the record where it begins now.

        All earlier decisions are forgotten: an earlier token is UNKNOWN for ever, and an id without a token counts as
        never claimed, opened or done. A process that used the log before gets `EvidenceLost` from each call.

        Raise `InvalidState` if no needed record is lost.
        """
        return self._engine.renew(self._deadline(timeout))

    def ledger(self, id: str, begin: Mapping[str, Any] | None = None, *, made_up: bool = False) -> Ledger:
        """Return a ledger, for a backend: the part of this log about one transactional id.

        If the ledger is for the transaction of a token, `begin` is the token's field `log`. `made_up` is True if this
        process has made the id up for itself, so that no other process opens the id.
        """
        return LogLedger(self._engine, id, begin_of(begin), made_up, self._cluster)

    def close(self) -> None:
        """Close the log. Safe to repeat. In the child of a fork do nothing, because the connection is the parent's."""
        self._closed.set()
        self._engine.close()

    def _deadline(self, timeout: float | Deadline | None) -> Deadline:
        self._engine.require_open()
        if isinstance(timeout, Deadline):
            return timeout
        return Deadline(self._timeout if timeout is None else timeout)


def _public(opening: KnownOpening) -> Opening:
    under = opening.under
    return Opening(id_of(under.id), under.name, under.number, opening.position, opening.host, opening.data)


def _under(opening: Opening) -> OpeningRef:
    return OpeningRef(path_of(opening.id), opening.name, opening.number)
