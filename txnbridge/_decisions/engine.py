"""`Engine`: makes claims and appends records in one decision log, for applications and for backends' ledgers."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txnbridge._base.deadline import Deadline
from txnbridge._base.events import Emitter
from txnbridge._base.messages import Position
from txnbridge._base.timing import Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.conclusions import CountingClaim, KnownOpening
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.follower import Follower
from txnbridge._decisions.queries import Query, fenced, require_body, require_complete, require_readable
from txnbridge._decisions.records import (
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
from txnbridge.errors import Conflict, DeadlineExceeded, InvalidState, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Ack, DecisionLog

# The largest tolerated difference between the clocks of two hosts: with a larger one, records may be trimmed too early.
# Kerberos tolerates the same.
_CLOCK_SKEW = 300.0
# A presence expires one renewal interval after it is needed. The interval's lower bound keeps a presence that is needed
# for a short time from being renewed every second.
_LONGEST_RENEWAL, _SHORTEST_RENEWAL = 3600.0, 60.0
# A snapshot is written after this many records or bytes, which a process that opens the log reads in about a second.
# Mostly a snapshot has a few kilobytes. After a longer one as many bytes of records come first, so that all snapshots
# together are no longer than the records.
TIDY_RECORDS, _TIDY_BYTES = 10_000, 16_000_000
# The age of the last snapshot at which a new one is written. Some brokers drop records after three days in any case,
# and by then there must be a newer snapshot. Where records are dropped sooner, this many snapshots are written until
# then.
_TIDY_SECONDS = 6 * 3600.0
_SNAPSHOTS_IN_KEEPING = 12
# The second follower is dropped, with all that it keeps in memory, after this time without use.
_IDLE_SECONDS = 600.0

_logger = logging.getLogger("txnbridge")


def _next_opening(path: IdPath, name: str, newest: KnownOpening | None) -> OpeningRef:
    return OpeningRef(path, name, newest.under.number + 1 if newest else 1)


@dataclass(eq=False, repr=False)
class Engine:
    """Reads and appends to one decision log for this process, and keeps which ids this process owns. Thread-safe."""

    _log: DecisionLog
    _events: Emitter
    _begins: Mapping[str, str]
    _lifetime: float
    _tidy_after: int
    _clock: Callable[[], float]
    host: str
    _timing: Timing

    def __post_init__(self) -> None:
        self.follower = Follower(self._log, self._events, self.now, self._timing)
        self._older: Follower | None = None
        self._older_used = 0.0
        self._older_lock = threading.Lock()
        # The prefix of this process's nonces: it recognises its claims by it even if an append's answer was lost.
        self._author = secrets.token_hex(8)
        self._counter = itertools.count(1)
        self.owned: dict[IdPath, OpeningRef] = {}
        # The openings of ids that this process made up, by name and data: the log may have dropped them already.
        self.made_up: dict[IdPath, tuple[str, Mapping[str, Any]]] = {}
        self._presence: tuple[EvidenceBegin, int] | None = None
        self._presence_lock = threading.Lock()
        self._tidying = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        # The age (in seconds) of the last snapshot at which a new one is written.
        self.tidy_seconds = min(_TIDY_SECONDS, (self._log.keeps or math.inf) / _SNAPSHOTS_IN_KEEPING)

    def require_open(self) -> None:
        if self._closed:
            raise InvalidState("this decision log is closed")
        if self._process != os.getpid():
            raise InvalidState("this decision log was opened before a fork: open it again in the child process")

    def close(self) -> None:
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._log.close()

    def begin(self, under: OpeningRef | None, deadline: Deadline) -> dict[str, Any]:
        """Return the place in the log after which records about a new transaction come, as JSON for its token.

        Raise `Fenced` if the owner named by `under` is no longer the newest owner of its id.
        """
        presence = self._be_present(self._lifetime, deadline)
        if under is not None:
            self._require_newest(under, deadline)
        self.tidy_if_due(deadline)
        return {**self._begins, "at": list(presence.at), "id": presence.id}

    def open(self, path: IdPath, data: Mapping[str, Any], deadline: Deadline, name: str | None = None) -> KnownOpening:
        """Open an id, so that this process owns it and older owners are fenced; return the opening.

        If the id was opened under the name `name` before, use that opening; raise `Fenced` if it is not the newest.
        """
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
            # Another process appended an opening with this number first: try again with the next number.

    def open_behind(self, path: IdPath, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Become the owner of an id if its last owner is still the one named `before` (None: it never had one).

        Return whether this process is the owner now: of several processes with the same `before` only one is.
        """
        newest = self.newest_opening(path, deadline)
        if before != (newest.under.name if newest else None):
            return False
        return self._append_opening(_next_opening(path, secrets.token_hex(8), newest), False, data, deadline)

    def newest_opening(self, path: IdPath, deadline: Deadline) -> KnownOpening | None:
        with self.follower.following(deadline) as state:
            require_complete(state)
            return state.ids.openings.get(path)

    def _append_opening(self, under: OpeningRef, named: bool, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Append the record that makes a process the id's owner; return whether no other one took its number first."""
        fields = {"under": under, "named": named, "host": self.host, "data": data}
        return bool(self.append(Opened, fields, deadline)[1])

    def _own(self, newest: KnownOpening | None, name: str) -> KnownOpening:
        if newest is None or newest.under.name != name:
            raise fenced(newest)
        self.owned[newest.under.id] = newest.under
        return newest

    def open_made_up(self, path: IdPath, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Become the owner of an id that this process made up for itself, fencing nobody; return this owner's name."""
        with self.follower.following(deadline) as state:
            require_complete(state)
        under = OpeningRef.of_made_up(path)
        self._append_opening(under, False, data, deadline)
        self._require_newest(under, deadline)
        self.made_up[path], self.owned[path] = (under.name, data), under
        return under.name

    def _require_newest(self, under: OpeningRef, deadline: Deadline) -> None:
        with self.follower.looking(deadline) as state:
            # This process has read the log up to its presence, so it has read each opening before the presence; but its
            # reading must be complete.
            require_complete(state)
            if not state.ids.openings.is_newest(under):
                raise fenced(state.ids.openings.get(under.id))

    def follower_of(self, begin: EvidenceBegin | None, deadline: Deadline) -> Follower:
        """Return a reader of the log that reads from where the records about a transaction begin, or from before that.

        If this process began to read after that position, with a snapshot, a second follower reads from the position
        on. Its reading may take long; other threads use the first follower meanwhile.
        """
        if begin is None:
            return self.follower
        with self.follower.looking(deadline) as state:
            fresh = state.start is None
        with self.follower.following(deadline, may_create=False) if fresh else self.follower.looking(deadline) as state:
            renewed = state.completeness.renewed is not None and begin.at <= state.completeness.renewed.position
            if state.start is None or state.start <= begin.at or renewed:
                return self.follower
        return self._reading_from(begin.at, deadline)

    def everything(self, deadline: Deadline) -> Follower:
        """Return a reader of the log (a `Follower`) whose reading includes every record that is still in the log."""
        with self.follower.following(deadline) as state:
            start, renewed = state.start, state.completeness.renewed
        begin = self._log.begin(deadline)  # without the follower's lock, for which other threads wait
        if begin is not None and renewed is not None:
            begin = max(begin, renewed.position)
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
            return self.follower  # a query to it raises `EvidenceLost`
        with self._older_lock:
            if self._older is None:
                self._older = Follower(self._log, self._events, self.now, self._timing, position)
            elif not self._older.reaches(position):
                # This query needs even earlier records, as later ones may: replace the follower by one for all records.
                self._older = Follower(self._log, self._events, self.now, self._timing, begin)
            return self._older

    @property
    def has_written(self) -> bool:
        """True if this process has opened an id or begun a transaction in this log, and does not only read the log."""
        return bool(self.owned) or self._presence is not None

    def is_own(self, nonce: str) -> bool:
        """Return whether this process appended the record with this nonce."""
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
        """Return the claim that decides the query's id; if there is none, claim `decision` with the data `said`."""
        follower = self.follower_of(query.begin, deadline)
        if known := self.known(query, follower, deadline):
            return known
        # Until this presence expires, no body part of the claim can be trimmed before the claim itself is in the log.
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
                text = f"a claim on {query.name} is stored, and this process has not seen whether it counts: {error}"
                raise OutcomeUnknown(text) from error
        self.tidy_if_due(deadline)
        return decided

    def _acked(
        self, query: Query, acks: Sequence[Ack], follower: Follower, deadline: Deadline
    ) -> ClaimAcks | CountingClaim:
        """Return the ranges that a claim acknowledges, with the position up to which the log was read to check them.

        Return the claim that decides the transaction instead if there is one by now. Raise `Conflict` if the log shows
        that another transaction acknowledged on one of the partitions.
        """
        assert query.begin is not None
        transaction = (query.path, query.begin)
        with follower.following(deadline, max(ack.read_up_to for ack in acks)) as state:
            assert state.cursor is not None and state.start is not None
            if decided := self.answer(query, state):
                return decided
            for ack in acks:
                history = state.tokens.ack_histories.get((ack.group, ack.partition))
                # Claims before the first record that this process has read are unknown to it.
                if ack.read_up_to < state.start or (history and history.rival_behind(ack.read_up_to, transaction)):
                    text = f"another transaction acknowledged partition {ack.partition[1]} of {ack.partition[0]!r} for"
                    raise Conflict(text + f" group {ack.group!r} since this member read the group's position")
            # Only claims that are appended after the cursor and before this claim are not checked yet.
            ranges = tuple(AckRange(ack.group, ack.partition, ack.first, ack.end) for ack in acks)
            return ClaimAcks(state.cursor[0], ranges)

    def counting_claim(self, query: Query, deadline: Deadline) -> CountingClaim | None:
        """Read to the log's end; return the claim (COMMIT or ABORT) that decides a transaction, or None."""
        with self.follower_of(query.begin, deadline).following(deadline, may_create=query.begin is None) as state:
            return self.answer(query, state)

    def known(self, query: Query, follower: Follower, deadline: Deadline) -> CountingClaim | None:
        """Return the claim (a recorded decision) that decides about the query's id, or None if there is none yet.

        Read on in the log only if the records read so far cannot tell. Raise `EvidenceLost` if records that could tell
        are deleted, `OutcomeUnknown` if they cannot be read.
        """
        with follower.looking(deadline) as state:
            if query.has_evidence(state):
                return self.answer(query, state)
        with follower.following(deadline, may_create=query.begin is None) as state:
            return self.answer(query, state)

    def answer(self, query: Query, state: LogState) -> CountingClaim | None:
        """Return the claim (a decision) that decides the query's id by the records read so far; None if none does."""
        claim = query.claim(state)
        if claim is None:
            require_readable(state)  # a claim before an unreadable record counts; the lack of a claim proves nothing
        else:
            require_body(query.id, claim)
        return claim

    # --- keeping the log short --------------------------------------------------------------------------------------

    def tidy(self, deadline: Deadline) -> Position:
        """Write a snapshot and trim the log; return the first position that is kept. See `Decisions.tidy`."""
        with self.follower.following(deadline) as state:
            require_readable(state)
            require_complete(state)
            assert state.cursor is not None
            covers, raw = state.cursor
            born = state.completeness.born
            body = state.to_json(self.now())
        fields = {"born": born, "covers": covers, "digest": digest(raw), "at": self.now()}
        self._append_support(Snapshot, fields | self._body(body, deadline), deadline)
        with self.follower.looking(deadline) as state:
            needed = (state.oldest_living(self.now()), state.oldest_ack_window())
        # The trim ends before the snapshot, which does not replace the records between its covered record and itself.
        before = min([covers, *(position for position in needed if position is not None)])
        with self._older_lock:
            if time.monotonic() - self._older_used > _IDLE_SECONDS:
                self._older = None
        self._log.trim(before, deadline)
        return before

    def renew(self, deadline: Deadline) -> Position:
        """Begin a log anew that lost needed records; return the position where it begins now. See `Decisions.renew`."""
        while True:
            with self.follower.following(deadline, may_create=False) as state:
                require_readable(state)
                if state.completeness.complete or state.cursor is None:
                    raise InvalidState("this decision log has all of its evidence: there is nothing to renew")
                covers, raw = state.cursor
            name, nonce = secrets.token_hex(8), self._nonce()
            renewed = Renewed(log=name, nonce=nonce, covers=covers, digest=digest(raw), at=self.now(), host=self.host)
            if self.follower.append(renewed, deadline)[1]:
                with self.follower.looking(deadline) as state:
                    renewal = state.completeness.renewed
                    assert renewal is not None
                    return renewal.position  # that of the first copy, if the answer to its append was lost
            deadline.check("renewing a decision log to which others append")

    def tidy_if_due(self, deadline: Deadline) -> None:
        """Write a snapshot and trim the log if it is time to. Errors are logged: the caller's own record is stored."""
        held: list[bool] = []
        try:
            if self._is_tidying_due(deadline) and Deadline(0).acquire(self._tidying, held):
                self.tidy(deadline)
        except TxnBridgeError as error:
            _logger.warning("a decision log could not be tidied, the next decision tries again: %s", error)
        finally:
            if held:
                self._tidying.release()

    def _is_tidying_due(self, deadline: Deadline) -> bool:
        with self.follower.looking(deadline) as state:
            age = self.now() - (state.snapshot_at or 0)
            long = state.records_since_snapshot >= self._tidy_after or state.bytes_since_snapshot >= _TIDY_BYTES
            due = (long and state.bytes_since_snapshot >= state.snapshot_bytes) or age >= self.tidy_seconds * 1000
            return due and state.completeness.complete and not state.blocked

    # --- appending --------------------------------------------------------------------------------------------------

    def _be_present(self, seconds: float, deadline: Deadline) -> EvidenceBegin:
        """Return a record that announces this process for `seconds`, before its transactions; append it if needed."""
        held: list[bool] = []
        try:
            if not deadline.acquire(self._presence_lock, held):
                raise DeadlineExceeded(f"another thread wrote a presence record for longer than {deadline.seconds:g} s")
            needed = int((seconds + _CLOCK_SKEW) * 1000)
            if self._presence is not None and self._presence[1] - self.now() >= needed:
                with self.follower.looking(deadline) as state:
                    at = self._presence[0].at
                    # New readers miss a record that the newest snapshot replaces.
                    far_back = self._log.numbered and state.covered is not None and at < state.covered
                    if state.holds(self._presence[0]) and not far_back:
                        return self._presence[0]
            renewal = min(max(seconds, _SHORTEST_RENEWAL), _LONGEST_RENEWAL)
            until = self.now() + needed + int(renewal * 1000)
            nonce = self._nonce()
            position = self._append_support(Presence, {"nonce": nonce, "until": until}, deadline)
            self._presence = (EvidenceBegin(position, nonce), until)
            return self._presence[0]
        finally:
            if held:
                self._presence_lock.release()

    def _body(self, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Return the fields for a record's body: the body itself, or, if it is too large, its appended body parts."""
        raw = dump_json(body)
        if len(raw) <= self._timing.inline_bytes:
            return {"body": body, "stored": None}
        size = self._timing.part_bytes
        pieces = (raw[at : at + size] for at in range(0, len(raw), size))
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
        """Append a record and read the log up to it; return its position, and whether it counts (None if not known)."""
        record = kind(**{"log": self._log_to_write(deadline), "nonce": self._nonce(), **fields})
        return (follower or self.follower).append(record, deadline, transaction)

    def _append_support(
        self, kind: Callable[..., LogRecord], fields: Mapping[str, Any], deadline: Deadline
    ) -> Position:
        """Append a record that decides nothing: a process's announcement, body part or snapshot. Return its position.

        Raise `OutcomeUnknown` if another process has trimmed the record already.
        """
        position, counts = self.append(kind, fields, deadline)
        if not counts:
            raise OutcomeUnknown(f"the record at {list(position)} was trimmed while it was still needed; ask again")
        return position

    def _log_to_write(self, deadline: Deadline) -> str | None:
        """Return the id of the log, which a new record names as its log; None if the id is unknown.

        Raise `OutcomeUnknown` if the log has an unreadable record, after which no process can judge new records.
        """
        with self.follower.looking(deadline) as state:
            if state.cursor is not None:
                require_readable(state)
                return state.completeness.log
        with self.follower.following(deadline) as state:
            require_readable(state)
            return state.completeness.log

    def _nonce(self) -> str:
        return f"{self._author}-{next(self._counter)}"

    def now(self) -> int:
        return int(self._clock() * 1000)
