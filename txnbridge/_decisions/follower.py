"""`Follower`: appends records to a decision log and reads it; each read continues where the last one ended.

Each read begins with the last record that was read before, and compares its bytes. So a log that was truncated,
trimmed or created again is detected, and never taken for the log that was read before.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from txnbridge import errors
from txnbridge._base.deadline import Deadline, Wake
from txnbridge._base.events import Emitter
from txnbridge._base.messages import Position
from txnbridge._base.timing import Timing
from txnbridge._decisions.completeness import Completeness
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.records import VERSION, Birth, LogRecord, Renewed, Snapshot, dump_json, encode
from txnbridge.spi import DecisionLog

# The longest pause before a failed append is repeated, and before a waiting thread looks whether nobody reads: an
# exception of a signal handler may keep a thread from waking others.
_LONGEST_PAUSE = 1.0
# A reading folds its records after this many bytes, so that a long log is not in memory as a whole.
_MOST_BYTES = 16_000_000
# The first bytes of the records that replace all records before them.
_REPLACING = tuple(dump_json({"txnbridge": VERSION, "kind": each.kind})[:-1] for each in (Snapshot, Renewed))
_OTHER = "another thread read the decision log"  # for error texts


class Follower:
    """Reads one decision log, keeps the conclusions from it (`LogState`), and appends to it. Any thread may use it.

    The reading begins with the newest snapshot near the log's end, or else with the log's first record. With `first` it
    begins at this position before the newest snapshot, where a process has announced itself (a presence record), or at
    the log's first record if that one is gone.

    One thread at a time reads the log, for all that wait: up to the last record that this process has stored. While it
    waits for the store, other threads look at the conclusions from the records before. They never see the conclusions
    from a part of a reading that begins anew.
    """

    def __init__(
        self, log: DecisionLog, events: Emitter, now: Callable[[], int], timing: Timing, first: Position | None = None
    ) -> None:
        self._log = log
        self._timing = timing
        self._first = first
        self._events = events
        self._now = now
        self._lock = threading.RLock()  # held by a thread that uses the state
        self._waiting: dict[int, Wake] = {}  # of threads that wait for the end of a reading
        self._reader: int | None = None  # the thread that reads the log
        self._begun = self._ended = 0  # the number of the last reading to the log's end that has begun, and has ended
        self._is_read = False  # within `reading_once`: the log is not read to its end again
        self._stored: Position | None = None  # the last record that is known to be stored
        self._awaited: dict[str, dict[Position, bool | None]] = {}
        self._log_id: str | None = None
        self._covered_at_last_forgetting: Position | None = None
        self._lost = ""  # why the log is no longer the one that was read before; empty while it is
        self._state = self._new_state()

    def _new_state(self, trust_birth: bool = True, own: str | None = None) -> LogState:
        return LogState(self._report, Completeness(self._log.origin, trust_birth, own))

    def _report(self, nonce: str, position: Position, counts: bool | None) -> None:
        if (seen := self._awaited.get(nonce)) is not None:
            seen[position] = counts

    def reaches(self, position: Position) -> bool:
        """Return whether this follower was made to begin its reading at this position or before it."""
        return self._first is not None and self._first <= position

    # --- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def looking(self, deadline: Deadline) -> Iterator[LogState]:
        """Yield the conclusions from the records read so far; no thread reads on or changes them in the block."""
        with self._locked(deadline):
            yield self._state

    @contextmanager
    def following(
        self, deadline: Deadline, up_to: Position | None = None, *, may_create: bool = True, reads: bool = False
    ) -> Iterator[LogState]:
        """Read up to a position, or to the log's present end, and yield the state.

        With `may_create`, append the birth record to an empty log. With `reads`, do not use another thread's reading,
        so that no other thread reads during the block. Raise `OutcomeUnknown` if the log ends before a record that is
        known to be stored, `EvidenceLost` if it is not the log that was read before.
        """
        before: int | None = None
        is_reading = False
        asked: int | None = None  # the number of the last reading that had begun when this thread came
        try:
            while True:
                with self._locked(deadline):
                    asked = self._begun if asked is None else asked
                    if not reads and self._has_read(up_to, asked):
                        yield self._state
                        return
                    if self._reader in (None, threading.get_ident()):
                        before, self._reader, is_reading = self._reader, threading.get_ident(), True
                        break
                    self._waiting[threading.get_ident()] = turn = Wake()
                # Without the lock, which the thread that reads may hold beyond this thread's deadline.
                turn.wait(min(deadline.left(), _LONGEST_PAUSE))
                if deadline.expired:
                    raise errors.DeadlineExceeded(f"{_OTHER} for longer than {deadline.seconds:g} s")
            if up_to is not None:
                self._reach(up_to, deadline)
            elif not self._is_read:
                self._begun += 1
                if (end := self._end(deadline, may_create)) is not None:
                    self._reach(end, deadline)
                self._ended = self._begun
            with self._locked(deadline):
                yield self._state
        finally:
            if is_reading:
                self._reader = before
                with self._lock:
                    while before is None and self._waiting:
                        self._waiting.popitem()[1].wake()

    def _has_read(self, up_to: Position | None, asked: int) -> bool:
        """Return whether the log was read up to `up_to`, or else up to an end asked for after the reading `asked`."""
        cursor = self._state.cursor
        is_read = self._ended > asked if up_to is None else cursor is not None and cursor[0] >= up_to
        return is_read and self._state.completeness.complete

    @contextmanager
    def reading_once(self, deadline: Deadline) -> Iterator[None]:
        """Read up to the log's present end, which this thread's further reads in the block take for the end.

        Other threads that use the log wait until the block ends. A record that this thread appends in the block is
        read, too.
        """
        # Else this thread, which holds the lock, could wait in the block for another one that reads and needs the lock.
        with self.following(deadline, reads=True):
            before, self._is_read = self._is_read, True
            try:
                yield
            finally:
                self._is_read = before

    @contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        with deadline.holding(self._lock, _OTHER):
            if self._lost:
                raise errors.EvidenceLost(self._lost)
            yield

    def _end(self, deadline: Deadline, may_create: bool) -> Position | None:
        end, cursor = self._log.end(deadline), self._state.cursor
        if cursor is not None and (end is None or end < cursor[0]):
            raise errors.OutcomeUnknown(
                f"the decision log ends before {list(cursor[0])}, which this process has read: the broker answers from"
                " an old copy, or has lost records"
            )
        if end is None and may_create:
            birth = Birth(log=secrets.token_hex(8), nonce=secrets.token_hex(8), at=self._now())
            return self._store(birth, deadline, None)
        return end

    def _reach(self, up_to: Position, deadline: Deadline) -> None:
        if self._state.cursor is None:
            with self._lock:
                self._read_first(up_to, deadline)
        else:
            self._read_on(max(up_to, self._stored or up_to), deadline)
            if not self._state.completeness.complete:
                self._read_to_end(deadline)
        if not self._state.blocked and (self._state.cursor is None or self._state.cursor[0] < up_to):
            raise errors.OutcomeUnknown(f"the decision log did not show its records up to {list(up_to)}; ask again")
        if self._state.completeness.complete and self._log_id not in (None, self._state.completeness.log):
            self._lose("the decision log was recreated since this process first read it")
        self._log_id = self._state.completeness.log or self._log_id
        if self._state.records_since_forgetting >= self._timing.forget_after and self._state.cursor is not None:
            with self._lock:
                self._forget(self._state.cursor[0])

    def _read_first(self, up_to: Position, deadline: Deadline) -> None:
        if self._first is None:
            self._begin_near_end(deadline)
        self._read_on(up_to, deadline)
        self._read_to_end(deadline)

    def _forget(self, cursor: Position) -> None:
        """Drop from memory the records that only expired transactions could need, at most those before `cursor`.

        A log whose positions count up by one can be read again from any position. So the records that a snapshot
        covered at the last call are dropped even if a transaction can still need them.
        """
        state, snapshot = self._state, self._covered_at_last_forgetting
        before = oldest = state.oldest_living(self._now()) or cursor
        if self._log.numbered and self._first is None and state.completeness.complete and snapshot is not None:
            before = max(before, snapshot)
            state.start = before if state.start is None else max(state.start, before)
        state.forget(before, oldest)
        self._covered_at_last_forgetting = state.covered

    def _read_to_end(self, deadline: Deadline) -> None:
        """Read the log's records that were stored during the first read of the log.

        If a trim had removed records that the first read misses, the snapshot that replaces them was stored before the
        trim, so this second read finds it.
        """
        if (end := self._log.end(deadline)) is not None:
            self._read_on(end, deadline)

    def _begin_near_end(self, deadline: Deadline) -> None:
        """Begin near a long log's end if a snapshot there replaces earlier records and positions count up by one.

        As many records as a snapshot has may follow it, so the search for it goes back twice as far each time. Records
        from a snapshot on are judged twice, so the search ends where reading the whole log takes no longer.
        """
        if not self._log.numbered:
            return
        begin, end, back = self._log.begin(deadline), self._log.end(deadline), self._timing.near_end
        if begin is not None and end is not None:
            while end[0] - begin[0] > 2 * back and not self._begins_at((end[0] - back,), end, deadline):
                back *= 2

    def _begins_at(self, first: Position, end: Position, deadline: Deadline) -> bool:
        """Begin with a snapshot among the last records, if any; return whether no search further back is needed."""
        with self._events.step("decision.read", first=list(first), last=list(end)) as found:
            try:
                records = list(self._log.read(first, end, deadline))
            except errors.PositionLost:
                return True
            found["records"] = len(records)
        if not any(raw.startswith(_REPLACING) for _, raw in records):
            return False
        seeking = LogState(lambda nonce, position, counts: None, Completeness(self._log.origin))
        if not all(seeking.take(*each) for each in records):
            return True  # a record that this version cannot judge is in the whole log, too
        state = self._new_state()
        if not seeking.begins_with_snapshot or not state.begin_behind(seeking.completeness.founding_snapshot, records):
            return False
        self._state = state
        return True

    def _read_on(self, up_to: Position, deadline: Deadline) -> None:
        """Read the decision log's records up to a position, and draw the conclusions from these records."""
        unfinished = True
        while unfinished:
            cursor = self._state.cursor
            if self._state.blocked or (cursor is not None and cursor[0] >= up_to):
                return
            first = self._first if cursor is None else cursor[0]
            with self._events.step("decision.read", first=first and list(first), last=list(up_to)) as found:
                records, unfinished = self._fetch(first, up_to, deadline)
                found["records"] = None if records is None else len(records)
            with self._lock:
                if records is None or not self._take(cursor, records):
                    self._start_anew(deadline)
                elif self._state.completeness.birth_refuted and self._state.completeness.trusts_birth:
                    self._read_anew(deadline, trust_birth=False)
                elif self._state.completeness.took_foreign_records:
                    self._read_anew(deadline, self._state.completeness.trusts_birth, self._state.completeness.log)

    def _fetch(
        self, first: Position | None, up_to: Position, deadline: Deadline
    ) -> tuple[list[tuple[Position, bytes]] | None, bool]:
        """Return records from `first` to `up_to` (None if one is gone), and whether there may be more of them."""
        records, size = [], 0
        try:
            for position, raw in self._log.read(first, up_to, deadline):
                records.append((position, raw))
                size += len(raw)
                if size > _MOST_BYTES and len(records) > 1:
                    return records, True
        except errors.PositionLost:
            return None, False
        return records, False

    def _take(self, cursor: tuple[Position, bytes] | None, records: Sequence[tuple[Position, bytes]]) -> bool:
        """Draw conclusions from records, the first of which was read before; return False if its bytes differ now."""
        if cursor is not None and records and records[0] != cursor:
            return False
        for position, raw in records if cursor is None else records[1:]:
            if not self._state.take(position, raw):
                break
        return True

    def _start_anew(self, deadline: Deadline) -> None:
        """Read the log from its beginning after a record was missing. Raise `EvidenceLost` if it was not trimmed."""
        begin, cursor = self._log.begin(deadline), self._state.cursor
        if begin is None or (cursor is not None and begin <= cursor[0]):
            self._lose("the decision log no longer has a record that this process has read: it was truncated or"
                       " recreated, and proves nothing")  # fmt: skip
        deadline.check("reading a decision log that is being trimmed")
        self._read_anew(deadline)

    def _read_anew(self, deadline: Deadline, trust_birth: bool = True, own: str | None = None) -> None:
        self._state = self._new_state(trust_birth, own)
        if own is None:
            self._first = None
        if trust_birth and own is None:
            self._begin_near_end(deadline)
        self._read_to_end(deadline)
        self._read_to_end(deadline)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        raise errors.EvidenceLost(reason)

    # --- appending --------------------------------------------------------------------------------------------------

    def append(
        self, record: LogRecord, deadline: Deadline, transaction: str | None = None
    ) -> tuple[Position, bool | None]:
        """Append a record and read the log up to it; return its position, and whether it took effect.

        A retry may store a record twice; it took effect if one of the two did. This is None if it cannot be known,
        because the log was trimmed before the record was read back. `transaction` is only named in events.
        Raise `OutcomeUnknown` if the record may or may not be stored, or could not be read back.
        """
        seen: dict[Position, bool | None] = {}
        self._awaited[record.nonce] = seen
        try:
            position = self._store(record, deadline, transaction)
            self._read_back(position, seen, deadline)
        finally:
            del self._awaited[record.nonce]
        return position, any(seen.values()) or (None if None in seen.values() else False)

    def _read_back(self, position: Position, seen: dict[Position, bool | None], deadline: Deadline) -> None:
        try:
            with self.following(deadline, position) as state:
                if position in seen:
                    return
                if state.start is not None and position < state.start:
                    seen[position] = None  # trimmed already
                    return
                if state.blocked:
                    raise errors.OutcomeUnknown(f"the decision log cannot be read on: {state.blocked}")
                if state.completeness.incomplete_because:
                    raise errors.EvidenceLost(state.completeness.incomplete_because)
                self._lose(
                    f"the decision log gave a record the position {list(position)}, and shows another one there: it"
                    " has lost records"
                )
        except (
            errors.BrokerUnavailable,
            errors.AccessDenied,
        ) as error:  # the right to read may be withdrawn after the append
            text = "a record was stored in the decision log, but could not be read back"
            raise errors.OutcomeUnknown(text) from error

    def _store(self, record: LogRecord, deadline: Deadline, transaction: str | None) -> Position:
        """Append a record, and repeat until the log returns its position, up to which the caller then reads."""
        raw = encode(record)
        may_be_stored = False
        pause = self._timing.append_pause
        while True:
            try:
                # After the deadline, for example in a process that was suspended, the record is no longer wanted.
                deadline.check("appending to a decision log")
                with self._events.step("decision.append", transaction, kind=record.kind, bytes=len(raw)) as found:
                    position = self._log.append(raw, deadline)
                    found["position"] = list(position)
                self._stored = position if self._stored is None else max(self._stored, position)
                return position
            except errors.TxnBridgeError as error:
                failure = error
            may_be_stored = may_be_stored or isinstance(failure, errors.OutcomeUnknown)
            passes = isinstance(failure, errors.OutcomeUnknown) or type(failure) is errors.BrokerUnavailable
            if not passes or deadline.left() <= pause:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if not may_be_stored:
            raise failure
        text = f"a {record.kind!r} record may or may not be in the decision log: no answer came within"
        raise errors.OutcomeUnknown(text + f" {deadline.seconds:g} s; ask again") from failure
