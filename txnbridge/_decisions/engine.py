"""Decides and records in one log, for an application (`decisions`) and for a backend (`ledger`)."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txnbridge._deadline import Deadline
from txnbridge._decisions.conclusions import CountingClaim
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.follower import Follower
from txnbridge._decisions.openings import KnownOpening
from txnbridge._decisions.queries import Query, fenced, require_body, require_complete, require_readable
from txnbridge._decisions.records import (
    MAX_RECORD_BYTES,
    PART_BYTES,
    AckRange,
    BodyPart,
    ClaimAcks,
    Claimed,
    EvidenceBegin,
    IdPath,
    LogRecord,
    Opened,
    OpeningRef,
    Presence,
    Renewed,
    Snapshot,
    StoredBody,
    digest,
    dump_json,
)
from txnbridge._events import Emitter
from txnbridge._messages import Position
from txnbridge._token import Decision
from txnbridge.errors import Conflict, DeadlineExceeded, InvalidState, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Ack, DecisionLog

# The difference between the clocks of two hosts at which a record is trimmed too early; Kerberos allows as much.
_CLOCK_SKEW = 300.0
# A presence lives longer than it is needed for by one renewal interval. The shortest keeps a short-lived presence from
# being renewed every second.
_LONGEST_RENEWAL, _SHORTEST_RENEWAL = 3600.0, 60.0
# A process that opens the log reads this many records or bytes in about a second; a snapshot is mostly a few kilobytes.
TIDY_RECORDS, _TIDY_BYTES = 10_000, 16_000_000
# Some brokers drop records after three days whatever is asked of them: by then there must be a newer snapshot. Where
# records are dropped sooner, this many snapshots are written in that time.
_TIDY_SECONDS = 6 * 3600.0
_SNAPSHOTS_IN_KEEPING = 12
# The second reading is dropped, with all that it holds in memory, after this time without use.
_IDLE_SECONDS = 600.0
# The largest body that fits into one record beside the record's other fields.
_INLINE_BYTES = MAX_RECORD_BYTES - 20_000

_logger = logging.getLogger("txnbridge")


def _next_opening(path: IdPath, name: str, newest: KnownOpening | None) -> OpeningRef:
    return OpeningRef(path, name, newest.under.number + 1 if newest else 1)


class Engine:
    """Follows one log for this process, appends to it, and knows which ids this process owns. Thread-safe."""

    def __init__(
        self,
        log: DecisionLog,
        events: Emitter,
        begins: Mapping[str, str],
        lifetime: float,
        tidy_after: int,
        clock: Callable[[], float],
        host: str,
    ) -> None:
        self._log = log
        self.host = host
        self._begins = begins
        self._lifetime = lifetime
        self._tidy_after = tidy_after
        self._clock = clock
        self._events = events
        self.follower = Follower(log, events, self.now)
        self._older: Follower | None = None
        self._older_used = 0.0
        self._older_lock = threading.Lock()
        # Every nonce begins with this: so this process recognises a claim of its own also after its answer was lost.
        self._author = secrets.token_hex(8)
        self._counter = itertools.count(1)
        self.owned: dict[IdPath, OpeningRef] = {}
        self._made_up: dict[IdPath, dict[str, Any]] = {}  # the fields of the openings of ids that this process made up
        self._presence: tuple[EvidenceBegin, int] | None = None
        self._presence_lock = threading.Lock()
        self._tidying = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        # The age at which a snapshot is replaced.
        self.tidy_seconds = min(_TIDY_SECONDS, (log.keeps or math.inf) / _SNAPSHOTS_IN_KEEPING)

    def require_open(self) -> None:
        if self._closed:
            raise InvalidState("this decision log is closed")
        if self._process != os.getpid():
            raise InvalidState("this decision log was opened before a fork: open it anew in the child process")

    def close(self) -> None:
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._log.close()

    def begin(self, under: OpeningRef | None, deadline: Deadline) -> dict[str, Any]:
        """Return where the evidence about a transaction that begins now begins; an owner must still be the newest."""
        presence = self._be_present(self._lifetime, deadline)
        if under is not None:
            if under.made_up:
                self._repeat_opening(under, presence, deadline)
            self._require_newest(under, deadline)
        self.tidy_if_due(deadline)
        return {**self._begins, "at": list(presence.at), "id": presence.id}

    def open(self, path: IdPath, data: Mapping[str, Any], deadline: Deadline, name: str | None = None) -> KnownOpening:
        """Open an id as its newest owner, or under a name that is its newest opening already. Raise `Fenced`."""
        while True:
            with self.follower.following(deadline) as state:
                require_complete(state)
                newest = state.ids.openings.get(path)
                if name is not None and name in state.ids.names.get(path, ()):
                    return self._own(newest, name)
            under = _next_opening(path, name or secrets.token_hex(8), newest)
            if self._append_opening(under, name is not None, data, deadline):
                with self.follower.looking(deadline) as state:
                    return self._own(state.ids.openings.get(path), under.name)
            # Another process took this number first, or has opened the id since: this opening comes behind that one.

    def open_behind(self, path: IdPath, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Open an id if its newest opening is still `before` (None: it has none). Return whether it was."""
        newest = self.newest_opening(path, deadline)
        if before != (newest.under.name if newest else None):
            return False
        return self._append_opening(_next_opening(path, secrets.token_hex(8), newest), False, data, deadline)

    def newest_opening(self, path: IdPath, deadline: Deadline) -> KnownOpening | None:
        with self.follower.following(deadline) as state:
            require_complete(state)
            return state.ids.openings.get(path)

    def _append_opening(self, under: OpeningRef, named: bool, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Append an opening; return whether it counts, and not another one that took its number first."""
        fields = {"under": under, "named": named, "host": self.host, "data": data}
        return bool(self.append(Opened, fields, deadline)[1])

    def _own(self, newest: KnownOpening | None, name: str) -> KnownOpening:
        if newest is None or newest.under.name != name:
            raise fenced(newest)
        self.owned[newest.under.id] = newest.under
        return newest

    def open_made_up(self, path: IdPath, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Open an id that this process has made up for itself; return the opening's name. It shuts nobody out."""
        with self.follower.following(deadline) as state:
            require_complete(state)
        under = OpeningRef.of_made_up(path)
        fields = {"under": under, "named": False, "host": self.host, "data": data}
        self.append(Opened, fields, deadline)
        self._require_newest(under, deadline)
        self._made_up[path], self.owned[path] = fields, under
        return under.name

    def made_up(self, path: IdPath) -> tuple[str, Mapping[str, Any]] | None:
        """Return name and data of the opening of an id that this process has made up; the log may have forgotten it."""
        fields = self._made_up.get(path)
        return None if fields is None else (fields["under"].name, fields["data"])

    def _repeat_opening(self, under: OpeningRef, presence: EvidenceBegin, deadline: Deadline) -> None:
        """Append the opening of a made-up id behind the presence that its owner is about to use.

        From then on snapshots keep the opening for as long as that presence lives. A version that does not know of
        made-up ids counts the owner's records only if it finds the opening.
        """
        with self.follower.looking(deadline) as state:
            known = state.ids.openings.get(under.id)
        if known is None or known.position < presence.at:
            self.append(Opened, self._made_up[under.id], deadline)

    def _require_newest(self, under: OpeningRef, deadline: Deadline) -> None:
        with self.follower.looking(deadline) as state:
            # This process has read the log up to its presence, so it knows each opening in front of that; but it must
            # have read without a gap, or again from the first record.
            require_complete(state)
            if not state.ids.openings.is_newest(under):
                raise fenced(state.ids.openings.get(under.id))

    def follower_of(self, begin: EvidenceBegin | None, deadline: Deadline) -> Follower:
        """Return the follower that has read from where a query's evidence begins.

        This process may have begun to read behind that position, with a snapshot. Then a second follower begins where
        the evidence does. That may take long; other threads go on deciding by the first follower meanwhile.
        """
        if begin is None:
            return self.follower
        with self.follower.looking(deadline) as state:
            fresh = state.start is None
        with self.follower.following(deadline, may_create=False) if fresh else self.follower.looking(deadline) as state:
            renewed = state.trust.renewed is not None and begin.at <= state.trust.renewed.position
            if state.start is None or state.start <= begin.at or renewed:
                return self.follower
        return self._reading_from(begin.at, deadline)

    def everything(self, deadline: Deadline) -> Follower:
        """Return a follower that has read every record that is still in the log."""
        with self.follower.following(deadline) as state:
            start, begin = state.start, self._log.begin(deadline)
            if begin is not None and state.trust.renewed is not None:
                begin = max(begin, state.trust.renewed.position)
        if begin is None or start is None or start <= begin:
            return self.follower
        return self._reading_from(begin, deadline)

    def _reading_from(self, position: Position, deadline: Deadline) -> Follower:
        with self._older_lock:
            self._older_used = time.monotonic()
            if self._older is not None and self._older.reaches(position):
                return self._older
        begin = self._log.begin(deadline)
        if begin is None or position < begin:
            return self.follower  # it reports that the evidence is gone
        with self._older_lock:
            if self._older is None:
                self._older = Follower(self._log, self._events, self.now, position)
            elif not self._older.reaches(position):
                # This query goes further back, and more such queries may come: one follower is enough for all of them.
                self._older = Follower(self._log, self._events, self.now, begin)
            return self._older

    def _let_go_of_older(self) -> None:
        with self._older_lock:
            if time.monotonic() - self._older_used > _IDLE_SECONDS:
                self._older = None

    @property
    def has_written(self) -> bool:
        """True if this process writes to this log, and does not merely read it."""
        return bool(self.owned) or self._presence is not None

    def is_own(self, nonce: str) -> bool:
        """Return whether this process wrote the record with this nonce."""
        return nonce.startswith(f"{self._author}-")

    # --- deciding ---------------------------------------------------------------------------------------------------

    def decide(
        self,
        query: Query,
        decision: Decision,
        said: Mapping[str, Any],
        by: OpeningRef | None,
        acks: Sequence[Ack],
        deadline: Deadline,
    ) -> CountingClaim:
        """Return the claim that counts, after claiming if there was none. See `Decisions.claim`."""
        follower = self.follower_of(query.begin, deadline)
        if known := self.known(query, follower, deadline):
            return known
        # While this presence lives, no body part of the claim is trimmed before the claim itself is in the log.
        self._be_present(deadline.seconds, deadline)
        fields = {"id": query.path, "decision": decision, "begin": query.begin, "by": by}
        fields |= self._body(said, deadline)
        decided = None
        while decided is None:
            acked = self._acked(query, acks, follower, deadline) if acks else None
            if isinstance(acked, CountingClaim):
                return acked
            self.append(Claimed, {**fields, "acked": acked}, deadline, query.name, follower)
            try:
                with follower.looking(deadline) as state:
                    decided = self.answer(query, state)
                    if decided is None and (acked is None or (by is not None and state.tokens.openings.is_void(by))):
                        openings = state.tokens.openings if query.begin else state.ids.openings
                        raise fenced(openings.get(by.id) if by else None)
            except DeadlineExceeded as error:
                raise OutcomeUnknown(
                    f"a claim on {query.name} is stored, and this process has not seen whether it counts: {error}"
                ) from error
        self.tidy_if_due(deadline)
        return decided

    def _acked(
        self, query: Query, acks: Sequence[Ack], follower: Follower, deadline: Deadline
    ) -> ClaimAcks | CountingClaim:
        """Return what a claim acknowledges, or the claim that counts if there is one by now.

        Raise `Conflict` if the log shows already that the claim would not count.
        """
        assert query.begin is not None
        transaction = (query.path, query.begin)
        with follower.following(deadline, max(ack.read_up_to for ack in acks)) as state:
            assert state.cursor is not None and state.start is not None
            if decided := self.answer(query, state):
                return decided
            for ack in acks:
                history = state.tokens.ack_histories.get((ack.group, ack.partition))
                # This process does not know the claims in front of the first record that it has read.
                if ack.read_up_to < state.start or (history and history.rival_behind(ack.read_up_to, transaction)):
                    raise Conflict(
                        f"somebody else acknowledged partition {ack.partition[1]} of {ack.partition[0]!r} for group"
                        f" {ack.group!r} since this member read where the group stands"
                    )
            # So only claims behind the cursor can stand between `read_up_to` and this claim.
            ranges = tuple(AckRange(ack.group, ack.partition, ack.first, ack.end) for ack in acks)
            return ClaimAcks(state.cursor[0], ranges)

    def counting_claim(self, query: Query, deadline: Deadline) -> CountingClaim | None:
        """Return the claim that counts now, if there is one. Decides nothing."""
        with self.follower_of(query.begin, deadline).following(deadline, may_create=query.begin is None) as state:
            return self.answer(query, state)

    def known(self, query: Query, follower: Follower, deadline: Deadline) -> CountingClaim | None:
        """Return the claim that counts, if there is one. Raise an error if the evidence is gone or cannot be read."""
        with follower.looking(deadline) as state:
            if query.has_evidence(state):
                return self.answer(query, state)
        with follower.following(deadline, may_create=query.begin is None) as state:
            return self.answer(query, state)

    def answer(self, query: Query, state: LogState) -> CountingClaim | None:
        """Return the claim that counts among the records read so far."""
        claim = query.claim(state)
        if claim is None:
            require_readable(state)  # a claim in front of an unreadable record still counts
        else:
            require_body(query.id, claim)
        return claim

    # --- keeping the log short --------------------------------------------------------------------------------------

    def tidy(self, deadline: Deadline) -> Position:
        """See `Decisions.tidy`."""
        with self.follower.following(deadline) as state:
            require_readable(state)
            require_complete(state)
            assert state.cursor is not None
            covers, raw = state.cursor
            born = state.trust.born
            body = state.to_json(self.now())
        fields = {"born": born, "covers": covers, "digest": digest(raw), "at": self.now()}
        self._append_support(Snapshot, fields | self._body(body, deadline), deadline)
        with self.follower.looking(deadline) as state:
            needed = (state.oldest_living(self.now()), state.oldest_ack_window())
        # Not up to the snapshot itself: it does not stand for the records between its covered record and itself.
        before = min([covers, *(position for position in needed if position is not None)])
        self._let_go_of_older()
        self._log.trim(before, deadline)
        return before

    def renew(self, deadline: Deadline) -> Position:
        """See `Decisions.renew`."""
        while True:
            with self.follower.following(deadline, may_create=False) as state:
                require_readable(state)
                if state.trust.complete or state.cursor is None:
                    raise InvalidState("this decision log has all of its evidence: there is nothing to renew")
                covers, raw = state.cursor
            name, nonce = secrets.token_hex(8), self._nonce()
            renewed = Renewed(log=name, nonce=nonce, covers=covers, digest=digest(raw), at=self.now(), host=self.host)
            if self.follower.append(renewed, deadline)[1]:
                with self.follower.looking(deadline) as state:
                    assert state.trust.renewed is not None
                    return state.trust.renewed.position  # of the first copy, if the answer to that one was lost
            deadline.check("renewing a decision log to which others append")

    def tidy_if_due(self, deadline: Deadline) -> None:
        """Tidy the log if it is time to. Never raises: the record that was written before counts in any case."""
        try:
            if self._is_tidying_due(deadline) and self._tidying.acquire(blocking=False):
                try:
                    self.tidy(deadline)
                finally:
                    self._tidying.release()
        except TxnBridgeError as error:
            _logger.warning("a decision log could not be tidied, the next decision tries again: %s", error)

    def _is_tidying_due(self, deadline: Deadline) -> bool:
        with self.follower.looking(deadline) as state:
            age = self.now() - (state.snapshot_at or 0)
            due = (
                state.records_since_snapshot >= self._tidy_after
                or state.bytes_since_snapshot >= _TIDY_BYTES
                or age >= self.tidy_seconds * 1000
            )
            return due and state.trust.complete and not state.blocked

    # --- appending --------------------------------------------------------------------------------------------------

    def _be_present(self, seconds: float, deadline: Deadline) -> EvidenceBegin:
        """Return a presence of this process that lives for so many seconds more, after writing it if there is none."""
        if not self._presence_lock.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(f"another thread wrote a presence record for longer than {deadline.seconds:g} s")
        try:
            needed = int((seconds + _CLOCK_SKEW) * 1000)
            if self._presence is not None and self._presence[1] - self.now() >= needed:
                with self.follower.looking(deadline) as state:
                    if state.holds(self._presence[0]) and not self._is_far_back(self._presence[0], state):
                        return self._presence[0]
            renewal = min(max(seconds, _SHORTEST_RENEWAL), _LONGEST_RENEWAL)
            until = self.now() + needed + int(renewal * 1000)
            nonce = self._nonce()
            position = self._append_support(Presence, {"nonce": nonce, "until": until}, deadline)
            self._presence = (EvidenceBegin(position, nonce), until)
            return self._presence[0]
        finally:
            self._presence_lock.release()

    def _is_far_back(self, presence: EvidenceBegin, state: LogState) -> bool:
        """Return whether a process that begins with the newest snapshot would need a second follower for a presence."""
        return self._log.numbered and state.covered is not None and presence.at < state.covered

    def _body(self, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Return the fields for a record's body: the body, or the body parts that were appended if it is too large."""
        raw = dump_json(body)
        if len(raw) <= _INLINE_BYTES:
            return {"body": body, "stored": None}
        pieces = (raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES))
        parts = tuple(self._append_support(BodyPart, {"payload": piece}, deadline) for piece in pieces)
        return {"body": None, "stored": StoredBody(parts, digest(raw))}

    def append(
        self,
        kind: Callable[..., LogRecord],
        fields: Mapping[str, Any],
        deadline: Deadline,
        transaction: str | None = None,
        follower: Follower | None = None,
    ) -> tuple[Position, bool | None]:
        """Append a record and read up to it; return its position, and whether it counts (None: unknown)."""
        record = kind(**{"log": self._log_to_write(deadline), "nonce": self._nonce(), **fields})
        return (follower or self.follower).append(record, deadline, transaction)

    def _append_support(
        self, kind: Callable[..., LogRecord], fields: Mapping[str, Any], deadline: Deadline
    ) -> Position:
        """Append a record that later records depend on. Raise `OutcomeUnknown` if it is gone already."""
        position, counts = self.append(kind, fields, deadline)
        if not counts:
            raise OutcomeUnknown(f"the record at {list(position)} was trimmed while it was still needed; ask again")
        return position

    def _log_to_write(self, deadline: Deadline) -> str | None:
        """Return the log's id if it is known. Raise an error if no process could judge records appended to this log."""
        with self.follower.looking(deadline) as state:
            if state.cursor is not None:
                require_readable(state)
                return state.trust.log
        with self.follower.following(deadline) as state:
            require_readable(state)
            return state.trust.log

    def _nonce(self) -> str:
        return f"{self._author}-{next(self._counter)}"

    def now(self) -> int:
        return int(self._clock() * 1000)
