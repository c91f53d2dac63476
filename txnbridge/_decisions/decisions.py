"""The interface of a decision log for applications. The Spark writer uses it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txnbridge._deadline import Deadline
from txnbridge._decisions.conclusions import CountingClaim
from txnbridge._decisions.engine import TIDY_RECORDS, Engine
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.ledger import LogLedger
from txnbridge._decisions.openings import KnownOpening
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
from txnbridge._events import Emitter
from txnbridge._messages import Position
from txnbridge._token import Decision
from txnbridge.errors import InvalidOption, NotFound
from txnbridge.spi import DecisionLog, Ledger, Partition

_log = logging.getLogger("txnbridge")

# The default time for which evidence about a token is kept. Too short loses evidence (the answer is then UNKNOWN), too
# long only makes reads longer.
_LIFETIME = 7 * 86_400.0
# How often between two snapshots the background thread checks whether the next one is due.
_CHECKS_BETWEEN_SNAPSHOTS = 6


@dataclass(frozen=True)
class Claim:
    """The claim that counts for an id. `mine`: this very `Decisions` object made it."""

    id: Id
    decision: Decision
    data: Mapping[str, Any]
    position: Position
    nonce: str
    mine: bool
    opening: str | None  # the name of the opening under which its owner made it


@dataclass(frozen=True)
class Opening:
    """One opening of an id."""

    id: Id
    name: str
    number: int
    position: Position
    host: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """The log's answer about an id.

    `done`: a mark covers this id; its claims are settled and no longer kept. `done_up_to` is the mark on the id
    itself: every id that continues it with a number up to this is done. `opening` is its newest opening.
    """

    claim: Claim | None
    done: bool
    done_up_to: int | None
    opening: Opening | None


@dataclass(frozen=True)
class IncompleteLog:
    """Describes a log that proves nothing about ids without a token: why, and what it still says (perhaps out of date).

    `decided` is the number of transactions with tokens about which it still has decisions.
    """

    reason: str
    ids: Sequence[Id]
    positions: Mapping[tuple[str, Partition], Position]  # where groups stood
    decided: int


class Decisions:
    """The decisions of one log. May be used by many threads.

    An id is text, or a tuple of text and numbers such as `("query", "sink", 7, 0)`. An id that a token carries is asked
    about with the token's `begin`; every other one is judged from the log's first record. If the evidence is gone,
    every call raises `EvidenceLost`, and nothing is claimed or answered.
    """

    def __init__(
        self,
        log: DecisionLog,
        *,
        timeout: float = 30,
        events: Emitter | None = None,
        name: str | None = None,
        place: str | None = None,
        host: str = "",
        lifetime: float = _LIFETIME,
        tidy_after: int = TIDY_RECORDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lifetime`: for how many seconds anybody may ask about a transaction after its begin (timeout + hold).

        `name` is the log's and goes into every begin, as does `place` if the log is not kept by the broker itself;
        `host` describes this process to those that it fences.
        """
        self._name = name
        self._timeout = timeout
        begins = {key: value for key, value in (("log", name), ("on", place)) if value is not None}
        events = events if events is not None else Emitter("", ())
        self._engine = Engine(log, events, begins, lifetime, tidy_after, clock, host)
        self._closed = threading.Event()
        if log.keeps is not None:
            threading.Thread(target=self._stay, name="txnbridge-decisions", daemon=True).start()

    def _stay(self) -> None:
        """Write snapshots in a log that drops records by age, also while this process decides nothing.

        A process that has only read the log writes no snapshot.
        """
        while not self._closed.wait(self._engine.tidy_seconds / _CHECKS_BETWEEN_SNAPSHOTS):
            if not self._engine.has_written:
                continue
            try:
                self._engine.tidy_if_due(Deadline(self._timeout))
            except Exception as error:
                _log.warning("an idle decision log could not be tidied, that is tried again: %s", error)

    # --- owning -------------------------------------------------------------------------------------------------------

    def open(
        self,
        id: Id,
        data: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout: float | Deadline | None = None,
    ) -> Opening:
        """Open an id: records that an older owner appends on its own account from now on do not count.

        With a `name` (a run's id) all processes that open the id share one opening; a process that comes with a name
        behind which another opening stands gets `Fenced`. Without one each call is a new opening.
        """
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidOption(f"the name of an opening is text that is not empty, not {name!r:.100}")
        return _public(self._engine.open(path_of(id), check_data(data or {}), self._deadline(timeout), name))

    def begin(self, *, opening: Opening | None = None, timeout: float | Deadline | None = None) -> dict[str, Any]:
        """Return where the evidence about a transaction that begins now begins: its token carries this as `log`.

        An owner passes its `opening`. Raise `Fenced` if the log shows a newer one.
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
        """Claim a decision; return the claim that counts, whichever process made it. Safe to repeat.

        `begin` is the token's, for an id that a token carries. An owner that claims on its own account passes its
        `opening`. Raise `Fenced` if that is not the newest one and no claim counts, `InvalidState` for an id that is
        marked done, `OutcomeUnknown` while it cannot be known which claim counts, `EvidenceLost` if it never can.
        """
        deadline = self._deadline(timeout)
        if decision not in (Decision.COMMIT, Decision.ABORT):
            raise InvalidOption(f"a claim is COMMIT or ABORT, not {decision!r}")
        said = check_data(data or {})
        query = Query(id, path_of(id), begin_of(begin))
        by = None if opening is None else _under(opening)
        return self._claim(id, self._engine.decide(query, decision, said, by, (), deadline))

    def read(
        self, id: Id, *, begin: Mapping[str, Any] | None = None, timeout: float | Deadline | None = None
    ) -> Reading:
        """Return what the log says about an id at this moment. Decides nothing.

        Raise `EvidenceLost` if the evidence is gone, `OutcomeUnknown` if it cannot be read for now.
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

    def claims(self, id: Id, *, timeout: float | Deadline | None = None) -> list[Claim]:
        """Return the counting claims on all ids that continue this one and are not done, in the log's order."""
        path = path_of(id)
        with self._engine.follower.following(self._deadline(timeout)) as state:
            require_readable(state)
            require_complete(state)
            found = [(key, claim) for key, claim in state.ids.claims.items() if key[: len(path)] == path != key]
        return [self._claim(id_of(key), claim) for key, claim in sorted(found, key=lambda item: item[1].position)]

    def done(self, id: Id, up_to: int, *, timeout: float | Deadline | None = None) -> None:
        """Mark every id that continues `id` with a number up to `up_to` as settled.

        The claims on these ids are dropped in time, the mark itself never is. Call this only once all that the claims
        decided is finished.
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
        """Write a snapshot of what counts for ever, then drop the records that it covers and no token can need.

        Return the position from which on records are kept. Bridges tidy by themselves after many records. A log whose
        broker drops records by age has to be tidied now and then by some process.
        """
        return self._engine.tidy(self._deadline(timeout))

    def lost(self, *, timeout: float | Deadline | None = None) -> IncompleteLog | None:
        """Return why this log proves nothing about ids without a token, and what it still says; None for a sound log.

        Raise `NotFound` for an empty log: nobody has used it.
        """
        with self._engine.follower.following(self._deadline(timeout), may_create=False) as state:
            require_readable(state)
            if state.cursor is None:
                raise NotFound(
                    f"the decision log {self._name or ''!r} is empty, there is nothing to renew: look whether its name"
                    " (that of the application) and its place are right"
                )
            if state.trust.complete:
                return None
            ids = state.remains()
            known = {*ids.openings, *ids.done, *ids.claims}
            return IncompleteLog(
                reason=state.trust.incomplete_because,
                ids=sorted((id_of(path) for path in known), key=str),
                positions={(group, partition): at for (group, partition), at in sorted(ids.groups.items())},
                decided=len(state.tokens.claims),
            )

    def renew(self, *, timeout: float | Deadline | None = None) -> Position:
        """Renew a log whose evidence is gone for good; return the position where the log begins now.

        All earlier decisions are forgotten: an earlier token is UNKNOWN for ever, and an id without a token is taken
        for one that was never claimed, opened or done. A process that used the log before gets `EvidenceLost` from each
        call. Raise `InvalidState` if no evidence is lost.
        """
        return self._engine.renew(self._deadline(timeout))

    def ledger(self, id: str, begin: Mapping[str, Any] | None = None, *, made_up: bool = False) -> Ledger:
        """Return the ledger of one transactional id, for backends.

        With a token's `begin` it answers queries about that token's transaction. `made_up`: this process has made the
        id up for itself, and no other process opens it.
        """
        return LogLedger(self._engine, id, begin_of(begin), made_up)

    def close(self) -> None:
        """Close the log. Safe to repeat. In the child of a fork this does nothing, because the log is the parent's."""
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
