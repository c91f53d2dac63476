"""The decision log: everyone may decide, and nobody can disagree.

An ordered log in which the first claim on an id that counts wins. `Decisions` is what an application uses (the Spark
writer stands on it); a backend keeps its evidence in the ledger that `Decisions.ledger` gives it. docs/decisions.md
has the rules and their reasons; what follows from the records is worked out in `_decision_state`.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txnbridge._deadline import Deadline
from txnbridge._decision_follower import Follower
from txnbridge._decision_records import (
    MAX_RECORD_BYTES,
    PART_BYTES,
    Acked,
    Begin,
    Claimed,
    Done,
    Entry,
    Opened,
    Part,
    Path,
    Presence,
    Range,
    Record,
    Snapshot,
    Stored,
    Under,
    check_data,
    digest,
    dump_json,
    read_begin,
    read_path,
)
from txnbridge._decision_state import Opener, State, Winner, stands
from txnbridge._events import Emitter
from txnbridge._messages import Position
from txnbridge._token import Decision
from txnbridge.errors import (
    Conflict,
    DeadlineExceeded,
    EvidenceLost,
    Fenced,
    InvalidOption,
    InvalidState,
    InvalidToken,
    OutcomeUnknown,
    TxnBridgeError,
)
from txnbridge.spi import Ack, DecisionLog, Ledger, LedgerClaim, LedgerEntry, Partition

Id = str | tuple[str | int, ...]

# How long a token may be asked about if nobody says otherwise. Too short loses evidence (the answer is then UNKNOWN),
# too long only makes reads longer.
_LIFETIME = 7 * 86_400.0
# By how much the clocks of two hosts may differ before something is trimmed too early; Kerberos allows as much.
_CLOCK_SKEW = 300.0
# A presence lives a renewal longer than it is needed for; a short-lived one is not renewed every second for that.
_LONGEST_RENEWAL, _SHORTEST_RENEWAL = 3600.0, 60.0
# A reader that starts anew takes about a second for so many records or bytes; a snapshot is mostly a few kilobytes.
_TIDY_RECORDS, _TIDY_BYTES = 10_000, 16_000_000
# Some brokers drop records after three days whatever is asked of them: by then there must be a newer snapshot.
_TIDY_SECONDS = 6 * 3600.0
# A body with its record's other fields must fit into one record; an id may take six bytes for each of its own.
_LONGEST_ID = 1_000
_INLINE_BYTES = MAX_RECORD_BYTES - 20_000

_logger = logging.getLogger("txnbridge")


@dataclass(frozen=True)
class Claim:
    """The claim that counts for an id. `mine`: it was made through this very `Decisions`."""

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
    """What the log says about an id.

    `done`: a mark covers this id; its claims are settled and no longer kept. `done_up_to` is the mark on the id
    itself: every id that continues it with a number up to this is done. `opening` is its newest opening.
    """

    claim: Claim | None
    done: bool
    done_up_to: int | None
    opening: Opening | None


class Decisions:
    """The decisions of one log. May be used by many threads.

    An id is text, or a tuple of text and numbers such as `("query", "sink", 7, 0)`. An id that a token carries is asked
    about with the token's `begin`; every other one is judged from the log's first record. Where the evidence is gone,
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
        tidy_after: int = _TIDY_RECORDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lifetime`: for how many seconds anybody may ask about a transaction after its begin (timeout + hold).

        `name` is the log's and goes into every begin, as does `place` if the log is not kept by the broker itself;
        `host` describes this process to those that it fences.
        """
        self._log = log
        self._timeout = timeout
        self._named = {key: value for key, value in (("log", name), ("on", place)) if value is not None}
        self._host = host
        self._lifetime = lifetime
        self._tidy_after = tidy_after
        self._clock = clock
        self._follower = Follower(log, events if events is not None else Emitter("", ()), self._now)
        # Every nonce begins with this: so a claim of ours is known as ours also after its answer was lost.
        self._author = secrets.token_hex(8)
        self._counter = itertools.count(1)
        self._owned: dict[Path, Under] = {}
        self._presence: tuple[Begin, int] | None = None
        self._presence_lock = threading.Lock()
        self._tidying = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    # --- owning -----------------------------------------------------------------------------------------------------

    def open(
        self,
        id: Id,
        data: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout: float | Deadline | None = None,
    ) -> Opening:
        """Open an id: what an older owner of it appends by itself from here on counts for nothing.

        With a `name` (a run's id) it is one opening however many processes open it, and `Fenced` for whoever comes
        with a name that another has followed. Without one each call is a new opening.
        """
        deadline = self._deadline(timeout)
        path = _path(id)
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidOption(f"the name of an opening is text that is not empty, not {name!r:.100}")
        said = check_data(data or {})
        while True:
            with self._follower.following(deadline) as state:
                _require_founded(state)
                newest = state.ids.openings.get(path)
                if name is not None and name in state.ids.names.get(path, ()):
                    return self._own(id, newest, name)
            under = Under(path, name or secrets.token_hex(8), newest.under.number + 1 if newest else 1)
            fields = {"under": under, "named": name is not None, "host": self._host, "data": said}
            if self._append(Opened, fields, deadline)[1]:
                with self._follower.looking(deadline) as state:
                    return self._own(id, state.ids.openings.get(path), under.name)
            # Somebody else took this number first, or has followed already: this opening comes after theirs.

    def _own(self, id: Id, newest: Opener | None, name: str) -> Opening:
        if newest is None or newest.under.name != name:
            raise _fenced(newest)
        self._owned[newest.under.id] = newest.under
        return _public(newest)

    def begin(self, *, opening: Opening | None = None, timeout: float | Deadline | None = None) -> dict[str, Any]:
        """Where the evidence about a transaction that begins now begins: what its token carries as `log`.

        An owner names its `opening`, and gets `Fenced` if the log shows a newer one.
        """
        return self._begin(None if opening is None else _under(opening), self._deadline(timeout))

    def _begin(self, under: Under | None, deadline: Deadline) -> dict[str, Any]:
        presence = self._be_present(self._lifetime, deadline)
        if under is not None:
            with self._follower.looking(deadline) as state:
                # What was read includes the presence: so nobody else opened the id before it. It must have been read
                # without a gap, or from the first record again.
                _require_founded(state)
                if not stands(state.ids.openings, under):
                    raise _fenced(state.ids.openings.get(under.id))
        self._tidy_if_due(deadline)
        return {**self._named, "at": list(presence.at), "id": presence.id}

    # --- deciding ---------------------------------------------------------------------------------------------------

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
        """Claim a decision; returns the claim that counts, whoever made it. Safe to repeat.

        `begin` is the token's, for an id that a token carries. An owner that claims on its own account names its
        `opening`. Raises `Fenced` if that is not the newest one and no claim counts, `InvalidState` for an id that is
        marked done, `OutcomeUnknown` while nobody can say what counts, `EvidenceLost` if nobody ever can.
        """
        deadline = self._deadline(timeout)
        if decision not in (Decision.COMMIT, Decision.ABORT):
            raise InvalidOption(f"a claim is COMMIT or ABORT, not {decision!r}")
        said = check_data(data or {})
        question = _Question(id, _path(id), _begin(begin))
        by = None if opening is None else _under(opening)
        return self._decide(question, decision, said, by, (), deadline)

    def _decide(
        self,
        question: _Question,
        decision: Decision,
        said: Mapping[str, Any],
        by: Under | None,
        acks: Sequence[Ack],
        deadline: Deadline,
    ) -> Claim:
        if known := self._known(question, deadline):
            return known
        # While this presence lives, no part of the claim is trimmed before the claim itself stands.
        self._be_present(deadline.seconds, deadline)
        fields = {"id": question.path, "decision": decision, "begin": question.begin, "by": by}
        fields |= self._body(said, deadline)
        decided = None
        while decided is None:
            acked = self._acked(question, acks, deadline) if acks else None
            self._append(Claimed, {**fields, "acked": acked}, deadline, question.name)
            with self._follower.looking(deadline) as state:
                decided = self._answer(question, state)
                if decided is None and (acked is None or (by is not None and state.tokens.is_void(by))):
                    openings = state.tokens.openings if question.begin else state.ids.openings
                    raise _fenced(openings.get(by.id) if by else None)
        self._tidy_if_due(deadline)
        return decided

    def _acked(self, question: _Question, acks: Sequence[Ack], deadline: Deadline) -> Acked:
        """What a claim acknowledges; `Conflict` if the log shows already that it would not count."""
        assert question.begin is not None
        transaction = (question.path, question.begin)
        with self._follower.following(deadline, max(ack.read_up_to for ack in acks)) as state:
            assert state.cursor is not None and state.start is not None
            for ack in acks:
                ackers = state.tokens.ackers.get((ack.group, ack.partition))
                # What stands in front of the first record that was read cannot be seen.
                if ack.read_up_to < state.start or (ackers and ackers.rival_behind(ack.read_up_to, transaction)):
                    raise Conflict(
                        f"somebody else acknowledged partition {ack.partition[1]} of {ack.partition[0]!r} for group"
                        f" {ack.group!r} since this member read where the group stands"
                    )
            # So only what comes from here on can stand between.
            ranges = tuple(Range(ack.group, ack.partition, ack.first, ack.end) for ack in acks)
            return Acked(state.cursor[0], ranges)

    def read(
        self, id: Id, *, begin: Mapping[str, Any] | None = None, timeout: float | Deadline | None = None
    ) -> Reading:
        """What the log says about an id at this moment. Decides nothing.

        Raises `EvidenceLost` where the evidence is gone, `OutcomeUnknown` where it cannot be read for now.
        """
        deadline = self._deadline(timeout)
        question = _Question(id, _path(id), _begin(begin))
        with self._follower.following(deadline, may_create=question.begin is None) as state:
            if question.begin is not None:
                return Reading(self._answer(question, state), False, None, None)
            _require_founded(state)
            done = state.ids.is_done(question.path)
            newest = state.ids.openings.get(question.path)
            return Reading(
                None if done else self._answer(question, state),
                done,
                state.ids.done.get(question.path),
                None if newest is None else _public(newest),
            )

    def claims(self, id: Id, *, timeout: float | Deadline | None = None) -> list[Claim]:
        """The claims that count on every id that continues this one and is not done, in the order they were made."""
        path = _path(id)
        with self._follower.following(self._deadline(timeout)) as state:
            _require_readable(state)
            _require_founded(state)
            found = [(key, winner) for key, winner in state.ids.claims.items() if key[: len(path)] == path != key]
        return [self._claim(_id(key), winner) for key, winner in sorted(found, key=lambda item: item[1].position)]

    def done(self, id: Id, up_to: int, *, timeout: float | Deadline | None = None) -> None:
        """Mark every id that continues `id` with a number up to `up_to` as settled.

        Their claims are dropped in time, the mark itself never is. Say it only once all that they decided is finished.
        """
        deadline = self._deadline(timeout)
        path = _path(id)
        with self._follower.following(deadline) as state:
            _require_founded(state)
            if up_to <= state.ids.done.get(path, up_to - 1):
                return
        self._append(Done, {"id": path, "up_to": up_to}, deadline)
        self._tidy_if_due(deadline)

    def _known(self, question: _Question, deadline: Deadline) -> Claim | None:
        """The claim that counts if one is known; refuses to go on where there is no evidence."""
        with self._follower.looking(deadline) as state:
            if question.has_evidence(state):
                return self._answer(question, state)
        with self._follower.following(deadline, may_create=question.begin is None) as state:
            return self._answer(question, state)

    def _answer(self, question: _Question, state: State) -> Claim | None:
        winner = question.winner(state)
        if winner is None:
            _require_readable(state)  # what is decided in front of an unreadable record stays decided
            return None
        return self._claim(question.id, winner)

    def _claim(self, id: Id, winner: Winner) -> Claim:
        if winner.body is None:
            raise EvidenceLost(
                f"{_name_of(id)} was decided to {winner.decision.value}, but the data of that decision is gone"
            )
        return Claim(
            id=id,
            decision=winner.decision,
            data=winner.body,
            position=winner.position,
            nonce=winner.nonce,
            mine=winner.nonce.startswith(f"{self._author}-"),
            opening=winner.by.name if winner.by else None,
        )

    # --- keeping the log short --------------------------------------------------------------------------------------

    def tidy(self, *, timeout: float | Deadline | None = None) -> Position:
        """Write a snapshot of what counts for ever, then drop the records that it covers and no token can need.

        Returns the position from which on records are kept. It happens by itself after many records; a broker that
        drops records by age needs it now and then from somebody.
        """
        deadline = self._deadline(timeout)
        with self._follower.following(deadline) as state:
            _require_readable(state)
            _require_founded(state)
            assert state.cursor is not None
            covers, raw = state.cursor
            born = state.born
            body = state.ids.to_json(state.log or "")
        fields = {"born": born, "covers": covers, "digest": digest(raw), "at": self._now()}
        self._append_support(Snapshot, fields | self._body(body, deadline), deadline)
        with self._follower.looking(deadline) as state:
            needed = (state.oldest_living(self._now()), state.oldest_window())
        # Not up to the snapshot itself: what was appended between the record that it covers and itself is not in it.
        before = min([covers, *(position for position in needed if position is not None)])
        self._log.trim(before, deadline)
        return before

    def _tidy_if_due(self, deadline: Deadline) -> None:
        with self._follower.looking(deadline) as state:
            age = self._now() - (state.snapshot_at or 0)
            due = (
                state.records_since_snapshot >= self._tidy_after
                or state.bytes_since_snapshot >= _TIDY_BYTES
                or age >= _TIDY_SECONDS * 1000
            )
            if not (due and state.founded and not state.blocked):
                return
        if not self._tidying.acquire(blocking=False):
            return
        try:
            self.tidy(timeout=deadline)
        except TxnBridgeError as error:
            # The decision that brought us here stands whether or not the log could be tidied.
            _logger.warning("a decision log could not be tidied, the next decision tries again: %s", error)
        finally:
            self._tidying.release()

    # --- for backends -----------------------------------------------------------------------------------------------

    def ledger(self, id: str, begin: Mapping[str, Any] | None = None) -> Ledger:
        """The ledger of one transactional id; with a token's `begin` for questions about that token's transaction."""
        return _Ledger(self, id, _begin(begin))

    def _claim_transaction(
        self,
        id: str,
        transaction: str,
        decision: Decision,
        data: Mapping[str, Any],
        log: Mapping[str, Any],
        acks: Sequence[Ack],
        deadline: Deadline,
    ) -> LedgerClaim:
        if acks and decision is not Decision.COMMIT:
            raise InvalidOption("only a transaction that is committed acknowledges anything")
        question = _Question(transaction, _path(transaction), _begin(log))
        # An abort is nobody's in particular: who may not commit any more may still give up.
        by = self._owned.get(_path(id)) if decision is Decision.COMMIT else None
        if by is not None and self._known(question, deadline) is None:
            with self._follower.looking(deadline) as state:
                if state.tokens.is_prepared(by.id, question.path):
                    by = None
        claim = self._decide(question, decision, check_data(data), by, acks, deadline)
        return LedgerClaim(claim.decision, claim.data, claim.opening)

    def _claims_of(self, id: str, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        path = _path(id)
        return [
            (transaction, _public_claim(winner))
            for transaction, winner in self._known_claims(deadline)
            if winner.by is not None and winner.by.id == path
        ]

    def _acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        return {
            each.partition: (transaction, _public_claim(winner))
            for transaction, winner in self._known_claims(deadline)
            if winner.acked is not None
            for each in winner.acked.ranges
            if each.group == group
        }

    def _known_claims(self, deadline: Deadline) -> list[tuple[str, Winner]]:
        """The claims that count on transactions that may be living, oldest first."""
        with self._follower.following(deadline) as state:
            _require_readable(state)
            _require_founded(state)
            found = [
                (str(transaction[0]), winner)
                for transaction, claims in state.tokens.claims.items()
                for winner in claims.values()
                if winner.body is not None
            ]
        return sorted(found, key=lambda item: item[1].position)

    def _positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        with self._follower.following(deadline) as state:
            _require_readable(state)
            _require_founded(state)
            assert state.cursor is not None
            return {place[1]: at for place, at in state.ids.groups.items() if place[0] == group}, state.cursor[0]

    def _own_opening(self, id: str) -> Under:
        try:
            return self._owned[_path(id)]
        except KeyError:
            raise InvalidState(
                f"{id} was not opened by this process, which therefore cannot record anything for it"
            ) from None

    def _note(self, id: str, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        path = _path(id)
        under = self._own_opening(id)
        fields = {"under": under, "about": kind, "transaction": transaction, "data": check_data(data)}
        counts = self._append(Entry, fields, deadline, transaction)[1]
        if counts is None:
            raise OutcomeUnknown(f"{id} was opened by another process while a {kind!r} record of it was stored")
        if not counts:
            with self._follower.looking(deadline) as state:
                raise _fenced(state.ids.openings.get(path))
        self._tidy_if_due(deadline)

    def _noted(self, id: str, transaction: str, begin: Begin | None, deadline: Deadline) -> list[LedgerEntry]:
        path = _path(id)
        with self._follower.following(deadline, may_create=begin is None) as state:
            _require_readable(state)
            if begin is None:
                _require_founded(state)
            else:
                _require_begin(state, begin)
            noted = state.tokens.entries.get((path, transaction), ())
            return [LedgerEntry(entry.about, transaction, entry.data, entry.under.name) for entry in noted]

    def _all_noted(self, id: str, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        path = _path(id)
        with self._follower.following(deadline) as state:
            _require_readable(state)
            _require_founded(state)
            found = [
                (entry.position, LedgerEntry(entry.about, transaction, entry.data, entry.under.name))
                for (owner, transaction), noted in state.tokens.entries.items()
                for entry in noted
                if owner == path and entry.about == kind
            ]
        return [entry for _, entry in sorted(found, key=lambda item: item[0])]

    def close(self) -> None:
        """Let go of the log. Safe to repeat."""
        if not self._closed:
            self._closed = True
            self._log.close()

    # --- appending --------------------------------------------------------------------------------------------------

    def _be_present(self, seconds: float, deadline: Deadline) -> Begin:
        """A presence record of this process that lives long enough, written anew if there is none."""
        if not self._presence_lock.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(f"another thread wrote a presence record for longer than {deadline.seconds:g} s")
        try:
            needed = int((seconds + _CLOCK_SKEW) * 1000)
            if self._presence is not None and self._presence[1] - self._now() >= needed:
                with self._follower.looking(deadline) as state:
                    if state.holds(self._presence[0]):
                        return self._presence[0]
            renewal = min(max(seconds, _SHORTEST_RENEWAL), _LONGEST_RENEWAL)
            until = self._now() + needed + int(renewal * 1000)
            nonce = self._nonce()
            position = self._append_support(Presence, {"nonce": nonce, "until": until}, deadline)
            self._presence = (Begin(position, nonce), until)
            return self._presence[0]
        finally:
            self._presence_lock.release()

    def _body(self, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """A body as fields of its record: within it, or in parts in front of it if it is too large."""
        raw = dump_json(body)
        if len(raw) <= _INLINE_BYTES:
            return {"body": body, "stored": None}
        pieces = (raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES))
        parts = tuple(self._append_support(Part, {"payload": piece}, deadline) for piece in pieces)
        return {"body": None, "stored": Stored(parts, digest(raw))}

    def _append(
        self,
        kind: Callable[..., Record],
        fields: Mapping[str, Any],
        deadline: Deadline,
        transaction: str | None = None,
    ) -> tuple[Position, bool | None]:
        """Append a record of this log and read up to it; its position, and whether it counts (None: who knows)."""
        record = kind(**{"log": self._log_to_write(deadline), "nonce": self._nonce(), **fields})
        return self._follower.append(record, deadline, transaction)

    def _append_support(self, kind: Callable[..., Record], fields: Mapping[str, Any], deadline: Deadline) -> Position:
        """Append a record that others will stand on."""
        position, counts = self._append(kind, fields, deadline)
        if not counts:
            raise OutcomeUnknown(f"the record at {list(position)} was trimmed while it was still needed; ask again")
        return position

    def _log_to_write(self, deadline: Deadline) -> str | None:
        """The log's id as far as it is known. Refuses a log in which nobody could judge what is appended."""
        with self._follower.looking(deadline) as state:
            if state.cursor is not None:
                _require_readable(state)
                return state.log
        with self._follower.following(deadline) as state:
            _require_readable(state)
            return state.log

    def _nonce(self) -> str:
        return f"{self._author}-{next(self._counter)}"

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _deadline(self, timeout: float | Deadline | None) -> Deadline:
        if self._closed:
            raise InvalidState("this decision log is closed")
        if self._process != os.getpid():
            raise InvalidState("this decision log was opened before a fork: open it anew in the child process")
        if isinstance(timeout, Deadline):
            return timeout
        return Deadline(self._timeout if timeout is None else timeout)


class _Ledger(Ledger):
    """The ledger of one transactional id, in the records of a decision log."""

    def __init__(self, decisions: Decisions, id: str, begin: Begin | None) -> None:
        self._decisions = decisions
        self._id = id
        self._begin = begin

    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        return self._decisions.open(self._id, data, timeout=deadline).name

    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        opening = self._decisions.read(self._id, timeout=deadline).opening
        return None if opening is None else (opening.name, opening.data)

    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        return self._decisions._begin(self._decisions._owned.get(_path(self._id)), deadline)

    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        self._decisions._note(self._id, kind, transaction, data, deadline)

    def find(self, transaction: str, deadline: Deadline) -> list[LedgerEntry]:
        return self._decisions._noted(self._id, transaction, self._begin, deadline)

    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        return self._decisions._all_noted(self._id, kind, deadline)

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
        return self._decisions._claim_transaction(self._id, transaction, decision, data, log, acks, deadline)

    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        claim = self._decisions.read(transaction, begin=log, timeout=deadline).claim
        return None if claim is None else LedgerClaim(claim.decision, claim.data, claim.opening)

    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        return self._decisions._claims_of(self._id, deadline)

    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        return self._decisions._acknowledged(group, deadline)

    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        return self._decisions._positions(group, deadline)


@dataclass(frozen=True)
class _Question:
    """An id to be decided, and where the evidence about it begins."""

    id: Id
    path: Path
    begin: Begin | None

    @property
    def name(self) -> str:
        return _name_of(self.id)

    def has_evidence(self, state: State) -> bool:
        return state.founded if self.begin is None else state.holds(self.begin)

    def winner(self, state: State) -> Winner | None:
        """The claim that counts. Raises `EvidenceLost`, `OutcomeUnknown`, or `InvalidState` for an id that is done."""
        if self.begin is None:
            _require_founded(state)
            if state.ids.is_done(self.path):
                raise InvalidState(f"{self.name} is marked done: what it decided is settled and no longer kept")
            if self.path in state.tokens.claims:
                # Taken for an id without a token it would be decided a second time.
                raise InvalidOption(
                    f"{self.name} is the id of a token: say where its evidence begins (begin=token.log)"
                )
            return state.ids.claims.get(self.path)
        _require_begin(state, self.begin)
        return state.tokens.claims.get(self.path, {}).get(self.begin)


def _require_readable(state: State) -> None:
    if state.blocked:
        raise OutcomeUnknown(f"the decision log cannot be read on: {state.blocked}")


def _require_founded(state: State) -> None:
    if not state.founded:
        _require_readable(state)
        raise EvidenceLost(f"this decision log proves nothing about ids without a token: {state.doubt}")


def _require_begin(state: State, begin: Begin) -> None:
    if state.holds(begin):
        return
    _require_readable(state)
    if state.cursor is not None and begin.at > state.cursor[0]:
        raise OutcomeUnknown(
            f"the decision log ends at {list(state.cursor[0])}, before {list(begin.at)} where this token's evidence"
            " begins: the broker answers from an old copy, or has lost records"
        )
    raise EvidenceLost(
        f"the presence record at {list(begin.at)} where this token's evidence begins is not in the decision log: it"
        " was trimmed, or the log was truncated or made anew"
    )


def _fenced(newest: Opener | None) -> Fenced:
    if newest is None:
        return Fenced("this opening is not in the decision log: open the id again")
    host = newest.host or "another process"
    return Fenced(
        f"{_name_of(_id(newest.under.id))} was opened by {host} since: this owner must stop", newer=newest.host or None
    )


def _public(opening: Opener) -> Opening:
    under = opening.under
    return Opening(_id(under.id), under.name, under.number, opening.position, opening.host, opening.data)


def _public_claim(winner: Winner) -> LedgerClaim:
    return LedgerClaim(winner.decision, winner.body or {}, winner.by.name if winner.by else None)


def _under(opening: Opening) -> Under:
    return Under(_path(opening.id), opening.name, opening.number)


def _path(id: Id) -> Path:
    try:
        path = read_path([id] if isinstance(id, str) else id)
    except (TypeError, ValueError):
        raise InvalidOption(f"an id is text or a tuple of text and numbers, not {id!r:.100}") from None
    if not isinstance(path[0], str) or not path[0] or sum(len(str(part)) for part in path) > _LONGEST_ID:
        raise InvalidOption(f"an id begins with text that is not empty, and takes at most {_LONGEST_ID} characters")
    return path


def _id(path: Path) -> Id:
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def _name_of(id: Id) -> str:
    return id if isinstance(id, str) else "/".join(str(part) for part in id)


def _begin(begin: Mapping[str, Any] | None) -> Begin | None:
    if begin is None:
        return None
    try:
        return read_begin({"at": begin["at"], "id": begin["id"]})
    except (KeyError, TypeError, ValueError):
        raise InvalidToken("this token does not say where its evidence in the decision log begins") from None
