"""Deciding and recording in one log, for an application (`decisions`) and for a backend (`ledger`)."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txnbridge._deadline import Deadline
from txnbridge._decisions.follower import Follower
from txnbridge._decisions.questions import Question, fenced, require_body, require_founded, require_readable
from txnbridge._decisions.records import (
    MAX_RECORD_BYTES,
    PART_BYTES,
    Acked,
    Begin,
    Claimed,
    Opened,
    Part,
    Path,
    Presence,
    Range,
    Record,
    Renewed,
    Snapshot,
    Stored,
    Under,
    digest,
    dump_json,
)
from txnbridge._decisions.state import State, Winner, stands
from txnbridge._events import Emitter
from txnbridge._messages import Position
from txnbridge._token import Decision
from txnbridge.errors import Conflict, DeadlineExceeded, InvalidState, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Ack, DecisionLog

# By how much the clocks of two hosts may differ before something is trimmed too early; Kerberos allows as much.
_CLOCK_SKEW = 300.0
# A presence lives a renewal longer than it is needed for; a short-lived one is not renewed every second for that.
_LONGEST_RENEWAL, _SHORTEST_RENEWAL = 3600.0, 60.0
# A reader that starts anew takes about a second for so many records or bytes; a snapshot is mostly a few kilobytes.
TIDY_RECORDS, _TIDY_BYTES = 10_000, 16_000_000
# Some brokers drop records after three days whatever is asked of them: by then there must be a newer snapshot. Where
# they drop them sooner, so many are written in that time.
_TIDY_SECONDS = 6 * 3600.0
_TIMES_IN_KEEPING = 12
# The second reading is dropped, with all that it holds in memory, when it was not used for so long.
_IDLE_SECONDS = 600.0
# A body with its record's other fields must fit into one record.
_INLINE_BYTES = MAX_RECORD_BYTES - 20_000

_logger = logging.getLogger("txnbridge")


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
        # Every nonce begins with this: so a claim of ours is known as ours also after its answer was lost.
        self._author = secrets.token_hex(8)
        self._counter = itertools.count(1)
        self.owned: dict[Path, Under] = {}
        self._made_up: dict[Path, dict[str, Any]] = {}  # what the openings of ids say that this process made up
        self._presence: tuple[Begin, int] | None = None
        self._presence_lock = threading.Lock()
        self._tidying = threading.Lock()
        # How old a snapshot may get.
        self.tidy_seconds = min(_TIDY_SECONDS, (log.keeps or math.inf) / _TIMES_IN_KEEPING)

    def begin(self, under: Under | None, deadline: Deadline) -> dict[str, Any]:
        """Where the evidence about a transaction that begins now begins; an owner's opening must still stand."""
        presence = self._be_present(self._lifetime, deadline)
        if under is not None:
            if under.made_up:
                self._repeat_opening(under, presence, deadline)
            self._require_newest(under, deadline)
        self.tidy_if_due(deadline)
        return {**self._begins, "at": list(presence.at), "id": presence.id}

    def open_made_up(self, path: Path, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Open an id that this process has made up for itself; the opening's name. It shuts nobody out."""
        with self.follower.following(deadline) as state:
            require_founded(state)
        under = Under.of_made_up(path)
        fields = {"under": under, "named": False, "host": self.host, "data": data}
        self.append(Opened, fields, deadline)
        self._require_newest(under, deadline)
        self._made_up[path], self.owned[path] = fields, under
        return under.name

    def made_up(self, path: Path) -> tuple[str, Mapping[str, Any]] | None:
        """The name and data of the opening of an id that this process has made up. Others may have forgotten it."""
        fields = self._made_up.get(path)
        return None if fields is None else (fields["under"].name, fields["data"])

    def _repeat_opening(self, under: Under, presence: Begin, deadline: Deadline) -> None:
        """Append the opening of a made-up id behind the presence that its owner is about to use.

        Snapshots keep it from then on for as long as that presence lives. A version that does not know of made-up ids
        counts what the owner appends only if it finds the opening.
        """
        with self.follower.looking(deadline) as state:
            known = state.ids.openings.get(under.id)
        if known is None or known.position < presence.at:
            self.append(Opened, self._made_up[under.id], deadline)

    def _require_newest(self, under: Under, deadline: Deadline) -> None:
        with self.follower.looking(deadline) as state:
            # This process has read the log up to its presence, so it knows each opening in front of that. It must have
            # read without a gap, or from the first record again.
            require_founded(state)
            if not stands(state.ids.openings, under):
                raise fenced(state.ids.openings.get(under.id))

    def follower_of(self, begin: Begin | None, deadline: Deadline) -> Follower:
        """The reading that reaches back to where a question's evidence begins.

        This process may have begun to read behind that, with a snapshot. Then a second reading begins where the
        evidence does. It may take long, and other threads go on deciding by the first one meanwhile.
        """
        if begin is None:
            return self.follower
        with self.follower.looking(deadline) as state:
            fresh = state.start is None
        with self.follower.following(deadline, may_create=False) if fresh else self.follower.looking(deadline) as state:
            renewed = state.renewed is not None and begin.at <= state.renewed.position
            if state.start is None or state.start <= begin.at or renewed:
                return self.follower
        return self._reading_from(begin.at, deadline)

    def everything(self, deadline: Deadline) -> Follower:
        """The reading of every record that is still in the log."""
        with self.follower.following(deadline) as state:
            start, begin = state.start, self._log.begin(deadline)
            if begin is not None and state.renewed is not None:
                begin = max(begin, state.renewed.position)
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
            return self.follower  # which says that the evidence is gone
        with self._older_lock:
            if self._older is None:
                self._older = Follower(self._log, self._events, self.now, position)
            elif not self._older.reaches(position):
                # This question goes further back, and more may come that do: one reading is enough for all of them.
                self._older = Follower(self._log, self._events, self.now, begin)
            return self._older

    def _let_go_of_older(self) -> None:
        with self._older_lock:
            if time.monotonic() - self._older_used > _IDLE_SECONDS:
                self._older = None

    @property
    def has_written(self) -> bool:
        """Whether this process has a part in this log, and does not merely look."""
        return bool(self.owned) or self._presence is not None

    def is_own(self, nonce: str) -> bool:
        """Whether a record is this process's."""
        return nonce.startswith(f"{self._author}-")

    # --- deciding ---------------------------------------------------------------------------------------------------

    def decide(
        self,
        question: Question,
        decision: Decision,
        said: Mapping[str, Any],
        by: Under | None,
        acks: Sequence[Ack],
        deadline: Deadline,
    ) -> Winner:
        """The claim that counts, after ours was made if there was none. See `Decisions.claim`."""
        follower = self.follower_of(question.begin, deadline)
        if known := self.known(question, follower, deadline):
            return known
        # While this presence lives, no part of the claim is trimmed before the claim itself stands.
        self._be_present(deadline.seconds, deadline)
        fields = {"id": question.path, "decision": decision, "begin": question.begin, "by": by}
        fields |= self._body(said, deadline)
        decided = None
        while decided is None:
            acked = self._acked(question, acks, follower, deadline) if acks else None
            if isinstance(acked, Winner):
                return acked
            self.append(Claimed, {**fields, "acked": acked}, deadline, question.name, follower)
            try:
                with follower.looking(deadline) as state:
                    decided = self.answer(question, state)
                    if decided is None and (acked is None or (by is not None and state.tokens.is_void(by))):
                        openings = state.tokens.openings if question.begin else state.ids.openings
                        raise fenced(openings.get(by.id) if by else None)
            except DeadlineExceeded as error:
                raise OutcomeUnknown(
                    f"a claim on {question.name} is stored, and this process has not seen whether it counts: {error}"
                ) from error
        self.tidy_if_due(deadline)
        return decided

    def _acked(self, question: Question, acks: Sequence[Ack], follower: Follower, deadline: Deadline) -> Acked | Winner:
        """What a claim acknowledges; the claim that counts if there is one by now.

        `Conflict` if the log shows already that it would not count.
        """
        assert question.begin is not None
        transaction = (question.path, question.begin)
        with follower.following(deadline, max(ack.read_up_to for ack in acks)) as state:
            assert state.cursor is not None and state.start is not None
            if decided := self.answer(question, state):
                return decided
            for ack in acks:
                ackers = state.tokens.ackers.get((ack.group, ack.partition))
                # This process does not know the claims in front of the first record that it has read.
                if ack.read_up_to < state.start or (ackers and ackers.rival_behind(ack.read_up_to, transaction)):
                    raise Conflict(
                        f"somebody else acknowledged partition {ack.partition[1]} of {ack.partition[0]!r} for group"
                        f" {ack.group!r} since this member read where the group stands"
                    )
            # So only claims behind this record can stand between it and ours.
            ranges = tuple(Range(ack.group, ack.partition, ack.first, ack.end) for ack in acks)
            return Acked(state.cursor[0], ranges)

    def known(self, question: Question, follower: Follower, deadline: Deadline) -> Winner | None:
        """The claim that counts if one is known; refuses to go on where there is no evidence."""
        with follower.looking(deadline) as state:
            if question.has_evidence(state):
                return self.answer(question, state)
        with follower.following(deadline, may_create=question.begin is None) as state:
            return self.answer(question, state)

    def answer(self, question: Question, state: State) -> Winner | None:
        """The claim that counts, as far as was read."""
        winner = question.winner(state)
        if winner is None:
            require_readable(state)  # a claim in front of an unreadable record still counts
        else:
            require_body(question.id, winner)
        return winner

    # --- keeping the log short --------------------------------------------------------------------------------------

    def tidy(self, deadline: Deadline) -> Position:
        """See `Decisions.tidy`."""
        with self.follower.following(deadline) as state:
            require_readable(state)
            require_founded(state)
            assert state.cursor is not None
            covers, raw = state.cursor
            born = state.born
            body = state.to_json(self.now())
        fields = {"born": born, "covers": covers, "digest": digest(raw), "at": self.now()}
        self._append_support(Snapshot, fields | self._body(body, deadline), deadline)
        with self.follower.looking(deadline) as state:
            needed = (state.oldest_living(self.now()), state.oldest_window())
        # Not up to the snapshot itself: it does not hold the records between the one that it covers and itself.
        before = min([covers, *(position for position in needed if position is not None)])
        self._let_go_of_older()
        self._log.trim(before, deadline)
        return before

    def renew(self, deadline: Deadline) -> Position:
        """See `Decisions.renew`."""
        while True:
            with self.follower.following(deadline, may_create=False) as state:
                require_readable(state)
                if state.founded or state.cursor is None:
                    raise InvalidState("this decision log has all of its evidence: there is nothing to renew")
                covers, raw = state.cursor
            name, nonce = secrets.token_hex(8), self._nonce()
            renewed = Renewed(log=name, nonce=nonce, covers=covers, digest=digest(raw), at=self.now(), host=self.host)
            if self.follower.append(renewed, deadline)[1]:
                with self.follower.looking(deadline) as state:
                    assert state.renewed is not None
                    return state.renewed.position  # where its first copy is, if the answer to that was lost
            deadline.check("renewing a decision log to which others append")

    def tidy_if_due(self, deadline: Deadline) -> None:
        """To be called behind each record that an application or a backend asked for; it may not fail for this."""
        try:
            if self._is_tidying_due(deadline) and self._tidying.acquire(blocking=False):
                try:
                    self.tidy(deadline)
                finally:
                    self._tidying.release()
        except TxnBridgeError as error:
            # The decision that brought us here stands whether or not the log could be tidied.
            _logger.warning("a decision log could not be tidied, the next decision tries again: %s", error)

    def _is_tidying_due(self, deadline: Deadline) -> bool:
        with self.follower.looking(deadline) as state:
            age = self.now() - (state.snapshot_at or 0)
            due = (
                state.records_since_snapshot >= self._tidy_after
                or state.bytes_since_snapshot >= _TIDY_BYTES
                or age >= self.tidy_seconds * 1000
            )
            return due and state.founded and not state.blocked

    # --- appending --------------------------------------------------------------------------------------------------

    def _be_present(self, seconds: float, deadline: Deadline) -> Begin:
        """A presence record of this process that lives long enough, written anew if there is none."""
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
            self._presence = (Begin(position, nonce), until)
            return self._presence[0]
        finally:
            self._presence_lock.release()

    def _is_far_back(self, presence: Begin, state: State) -> bool:
        """Whether a process that begins with the newest snapshot would need a second reading for this presence."""
        return self._log.numbered and state.covered is not None and presence.at < state.covered

    def _body(self, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """A body as fields of its record: within it, or in parts in front of it if it is too large."""
        raw = dump_json(body)
        if len(raw) <= _INLINE_BYTES:
            return {"body": body, "stored": None}
        pieces = (raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES))
        parts = tuple(self._append_support(Part, {"payload": piece}, deadline) for piece in pieces)
        return {"body": None, "stored": Stored(parts, digest(raw))}

    def append(
        self,
        kind: Callable[..., Record],
        fields: Mapping[str, Any],
        deadline: Deadline,
        transaction: str | None = None,
        follower: Follower | None = None,
    ) -> tuple[Position, bool | None]:
        """Append a record of this log and read up to it; its position, and whether it counts (None: unknown)."""
        record = kind(**{"log": self._log_to_write(deadline), "nonce": self._nonce(), **fields})
        return (follower or self.follower).append(record, deadline, transaction)

    def _append_support(self, kind: Callable[..., Record], fields: Mapping[str, Any], deadline: Deadline) -> Position:
        """Append a record that others will stand on."""
        position, counts = self.append(kind, fields, deadline)
        if not counts:
            raise OutcomeUnknown(f"the record at {list(position)} was trimmed while it was still needed; ask again")
        return position

    def _log_to_write(self, deadline: Deadline) -> str | None:
        """The log's id as far as it is known. Refuses a log in which nobody could judge what is appended."""
        with self.follower.looking(deadline) as state:
            if state.cursor is not None:
                require_readable(state)
                return state.log
        with self.follower.following(deadline) as state:
            require_readable(state)
            return state.log

    def _nonce(self) -> str:
        return f"{self._author}-{next(self._counter)}"

    def now(self) -> int:
        return int(self._clock() * 1000)
