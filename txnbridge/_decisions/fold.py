"""The conclusions from a decision log: a pure fold over its records, in their order.

The fold reads no clock and talks to no broker: all processes that fold the same records come to the same conclusions.
docs/decisions.md gives the rules and their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.completeness import Completeness
from txnbridge._decisions.conclusions import CountingClaim, Openings, UnfinishedCommit
from txnbridge._decisions.records import (
    Birth,
    BodyPart,
    Claimed,
    Done,
    EntryRecord,
    EvidenceBegin,
    IdPath,
    LogRecord,
    Opened,
    PreparedAcks,
    Presence,
    Renewed,
    Snapshot,
    StoredBody,
    UnreadableRecord,
    decode,
    digest,
    load_json,
    read_position,
)
from txnbridge._decisions.token_fold import TokenFold, TokenTransaction
from txnbridge._decisions.tokenless_fold import IdFold

_HOUR = 3_600_000

_RecordOfId = Opened | EntryRecord | Claimed | Done


class LogState:
    """The conclusions from the records of a decision log, from the first one read (`start`) to the last (`cursor`).

    `report` is called with each record's nonce, its position and whether it counts (None: it can no longer be known),
    as soon as this is judged.
    """

    def __init__(self, report: Callable[[str, Position, bool | None], None], completeness: Completeness) -> None:
        self._report = report
        self.completeness = completeness
        self.start: Position | None = None
        self.cursor: tuple[Position, bytes] | None = None
        self.blocked = ""  # why the records after the cursor cannot be judged
        self.tokens = TokenFold()
        self.ids = IdFold()  # true only if `completeness.complete`
        self.unproven_snapshot: Mapping[str, Any] = {}  # the body of the last snapshot, if its covered record is gone
        self.lacks_body_parts = False  # whether a part of a body was not among the records
        self._living: dict[Position, int] = {}  # the time (ms since 1970) until which each presence may be needed
        self.records_since_snapshot = 0
        self.bytes_since_snapshot = 0
        self.snapshot_bytes = 0  # the length of the last snapshot with its body parts
        self.records_since_forgetting = 0
        self.snapshot_at: int | None = None
        self.covered: Position | None = None  # the last record that a snapshot covers
        # For each claim that acknowledges messages and that no snapshot covers: the claim's position, and the position
        # up to which its author had read the log.
        self._ack_windows: list[tuple[Position, Position]] = []
        self._parts: dict[Position, bytes] = {}
        # Records that can be judged only once a snapshot covers all missing records.
        self._unjudged: list[tuple[Position, _RecordOfId, CountingClaim | None]] = []

    # --- taking records ---------------------------------------------------------------------------------------------

    def take(self, position: Position, raw: bytes) -> bool:
        """Update the conclusions by the log's next record. Return False if this version cannot read the record."""
        try:
            record = decode(raw)
            self.records_since_snapshot += 1
            self.bytes_since_snapshot += len(raw)
            if isinstance(record, Renewed):
                self._take_renewal(position, raw, record)
            else:
                self._take(position, raw, record)
        except UnreadableRecord as error:
            self.blocked = f"the record at {list(position)} cannot be judged: {error}"
            return False
        self.cursor = (position, raw)
        self.records_since_forgetting += 1
        return True

    def _take(self, position: Position, raw: bytes, record: LogRecord) -> None:
        if self.cursor is None:
            self._take_first(position, record)
        self.completeness.remember(position, raw)
        if self.completeness.is_foreign(record):
            self._report(record.nonce, position, False)
            return
        match record:
            case Opened():
                self.tokens.open(position, record)
                self._judge(position, record, None)
            case EntryRecord():
                self.tokens.add_entry(position, record)
                self._judge(position, record, None)
            case Claimed():
                self._take_claim(position, record)
            case Done():
                self._judge(position, record, None)
            case _:
                self._report(record.nonce, position, self._take_support(position, raw, record))

    def _take_support(self, position: Position, raw: bytes, record: LogRecord) -> bool:
        """Take a record that decides nothing, such as a snapshot; return False for a snapshot whose body is lost."""
        if isinstance(record, BodyPart):
            self._parts[position] = record.payload
        elif isinstance(record, Presence):
            self.tokens.presences[position] = record
            self._living[position] = record.until
        elif isinstance(record, Snapshot):
            return self._take_snapshot(raw, record)
        return True

    def _take_first(self, position: Position, record: LogRecord) -> None:
        self.start = position
        self.completeness.begin(position, record)
        if self.completeness.complete and isinstance(record, Birth):
            self.snapshot_at = record.at  # a birth record counts as a snapshot of an empty log

    def _take_renewal(self, position: Position, raw: bytes, record: Renewed) -> None:
        """Forget all records before an operator's `record`, unless others follow the last one that it replaces."""
        if self.cursor is None:
            self._take_first(position, record)
        counts = self.cursor is not None and (self.cursor[0], digest(self.cursor[1])) == (record.covers, record.digest)
        if counts:
            self._renew(position, record)
        else:
            self.completeness.remember(position, raw)
        self._report(record.nonce, position, counts)

    def _renew(self, position: Position, record: Renewed) -> None:
        self.completeness.renew(position, record)
        self.start = position
        self.snapshot_at = record.at
        self.covered = position  # a claim with acknowledgements is void if its author had not read the renewal
        self.tokens, self.ids, self.unproven_snapshot = TokenFold(), IdFold(), {}
        self._living, self._parts, self._ack_windows, self._unjudged = {}, {}, [], []
        self.records_since_snapshot = self.bytes_since_snapshot = self.snapshot_bytes = 0

    def _take_claim(self, position: Position, record: Claimed) -> None:
        body = record.body if record.stored is None else self._assemble(record.stored)
        claim = CountingClaim(position, record.nonce, record.decision, record.by, body, record.acked)
        if record.begin is None:
            self._judge(position, record, claim)
            return
        assert self.start is not None
        if record.begin.at < self.start:
            self.tokens.remove_void_claim(record.begin, record)
        counts = self.tokens.claim(record.begin, record, claim, self.covered)
        self._report(record.nonce, position, counts)
        if record.acked is not None:
            self._ack_windows.append((position, record.acked.read_up_to))
        if counts and self.tokens.claims[record.id][record.begin] is claim:
            self._judge(position, record, claim)

    def _assemble(self, stored: StoredBody) -> Mapping[str, Any] | None:
        self.lacks_body_parts |= any(part not in self._parts for part in stored.parts)
        raw = b"".join(self._parts.pop(part, b"") for part in stored.parts)
        try:
            return load_json(raw) if digest(raw) == stored.digest else None
        except ValueError:
            return None

    def _judge(self, position: Position, record: _RecordOfId, claim: CountingClaim | None) -> None:
        """Decide whether a record about an id counts; while the reading is incomplete, keep the record for later."""
        if not self.completeness.complete:
            self._unjudged.append((position, record, claim))
            return
        counts = True
        if isinstance(record, Opened):
            counts = self.ids.open(position, record)
        elif isinstance(record, Done):
            self.ids.mark_done(record.id, record.up_to)
        elif isinstance(record, Claimed) and record.begin is not None and claim is not None:
            # The broker may still have to carry out what such a claim decides.
            if record.decision is Decision.COMMIT and (record.acked is not None or record.by is not None):
                self.ids.commit(record, self._unfinished(record.id, record.begin, claim))
            self.ids.release(record.id, record.begin)
            return  # `_take_claim` has reported it: whether it counts does not depend on the log's beginning
        elif isinstance(record, Claimed):
            counts = claim is not None and self.ids.claim(record, claim)
        elif not (counts := self.ids.openings.is_newest(record.under)):
            self.tokens.remove_entry(position, record)
        elif (prepared := PreparedAcks.of(record)) is not None:
            id: IdPath = (record.transaction,)
            if prepared.begin not in self.tokens.claims.get(id, ()):  # else this is a late copy of the record
                self.ids.hold(id, prepared)
        self._report(record.nonce, position, counts)

    def _unfinished(self, id: IdPath, begin: EvidenceBegin, claim: CountingClaim) -> UnfinishedCommit:
        assert self.start is not None
        # The author of a claim with acknowledgements has read the log up to `read_up_to`, and had found no counting
        # claim on its transaction by then.
        return UnfinishedCommit(id, begin, claim, certain=claim.acked is not None or begin.at >= self.start)

    # --- snapshots --------------------------------------------------------------------------------------------------

    def _take_snapshot(self, raw: bytes, record: Snapshot) -> bool:
        has_covered_record = self.completeness.has_covered_record(record)
        if has_covered_record:
            self.covered = record.covers if self.covered is None else max(self.covered, record.covers)
        parts = record.stored.parts if record.stored else ()
        size = len(raw) + sum(len(self._parts.get(part, b"")) for part in parts)
        body = record.body if record.stored is None else self._assemble(record.stored)
        if body is None:
            return False
        self.records_since_snapshot = self.bytes_since_snapshot = 0
        self.snapshot_bytes = size
        self.snapshot_at = record.at
        self.completeness.check_birth(record)
        # A later claim with acknowledgements can be judged only if the log was read from its `read_up_to` on.
        if not self.completeness.complete and has_covered_record and self._has_read_ack_windows(record.covers):
            self._complete_with(record, body)
        if self.completeness.complete:
            self._ack_windows = [window for window in self._ack_windows if window[0] > record.covers]
        else:
            self.unproven_snapshot = body
        return True

    def _has_read_ack_windows(self, covers: Position) -> bool:
        assert self.start is not None
        return all(read_up_to >= self.start for position, read_up_to in self._ack_windows if position > covers)

    def begin_behind(
        self, foundation: tuple[Snapshot, Mapping[str, Any]] | None, records: Sequence[tuple[Position, bytes]]
    ) -> bool:
        """Begin with a snapshot, and judge the records after those that it covers; return False if they do not suffice.

        `foundation` is the snapshot and its body; None if one of `records` begins the log anew. `records` are the log's
        last records, from one before the last covered record on. Covered records are not judged, because openings and
        snapshots before them are unknown. They suffice if every later record of the log can be judged.
        """
        if foundation is not None and not self._begin_with(*foundation, records):
            return False
        behind = (each for each in records if self.cursor is None or each[0] > self.cursor[0])
        # A claim's body parts may be before the first of these records; a reader that began earlier knows the body.
        return all(self.take(*each) for each in behind) and not self.lacks_body_parts

    def _begin_with(
        self, snapshot: Snapshot, body: Mapping[str, Any], records: Sequence[tuple[Position, bytes]]
    ) -> bool:
        behind = [position for position, _ in records if position > snapshot.covers]
        self.start, self.cursor = behind[0], (snapshot.covers, dict(records)[snapshot.covers])
        self._complete_with(snapshot, body)
        self.tokens.openings = Openings(self.ids.openings)
        claims: dict[TokenTransaction, Position] = {}
        for position, record in ((position, decode(raw)) for position, raw in records):
            if isinstance(record, Claimed) and record.begin is not None:
                transaction, acked = (record.id, record.begin), record.acked
                if position <= snapshot.covers:
                    claims[transaction] = position
                    self.tokens.acknowledge(transaction, acked, position)
                elif acked is not None and acked.read_up_to < max(records[0][0], claims.get(transaction, ())):
                    return False  # an earlier claim, which is not judged here, may make this claim void
            elif isinstance(record, EntryRecord) and position <= snapshot.covers:
                self.tokens.hold(position, record)
            elif isinstance(record, Snapshot) and position <= snapshot.covers:
                self.covered = max(self.covered or record.covers, record.covers)
            elif isinstance(record, BodyPart) and position <= snapshot.covers:
                self._parts[position] = record.payload
            if isinstance(record, Snapshot) and record == snapshot:
                break  # a claim after the snapshot is void if its author had not read up to the covered record
        return True

    def _complete_with(self, snapshot: Snapshot, body: Mapping[str, Any]) -> None:
        try:
            self.ids = IdFold.from_json(body)
            self._living |= {read_position(at): int(until) for at, until in body["living"]}
            self.completeness.complete_with(snapshot, body)
        except (ValueError, TypeError, KeyError, IndexError, AssertionError):
            raise UnreadableRecord("the snapshot is damaged") from None
        unjudged, self._unjudged = self._unjudged, []
        for position, record, claim in unjudged:
            if position > snapshot.covers:
                self._judge(position, record, claim)
            else:
                self._judge_covered(position, record, claim)

    def _judge_covered(self, position: Position, record: _RecordOfId, claim: CountingClaim | None) -> None:
        """Report whether a record counts that is covered by the snapshot with which the reading became complete.

        `claim` is the claim that the record makes, if any. A claim with a token was reported when it was read.
        """
        if isinstance(record, Claimed) and record.begin is not None and claim is not None:
            return
        # A record that is void from the start and one that a newer opening followed look alike in the snapshot.
        doubtful = isinstance(record, Opened | EntryRecord) and not self.ids.openings.is_newest(record.under)
        self._report(record.nonce, position, None if doubtful else True)

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def begins_with_snapshot(self) -> bool:
        """True if all records that were read are judged, and a snapshot or a renewal of the log replaces all before."""
        reading = self.completeness
        replaced = reading.founding_snapshot is not None or reading.renewed is not None
        return reading.complete and replaced and not (reading.foreign_records or reading.birth_refuted or self.blocked)

    def holds(self, begin: EvidenceBegin) -> bool:
        """Return whether the record `begin` was read, and so all records about its transaction, which follow it."""
        presence = self.tokens.presences.get(begin.at)
        return presence is not None and presence.nonce == begin.id

    def remains(self) -> IdFold:
        """Return what an incomplete log still says about ids; an operator may read it, but it proves nothing."""
        try:
            ids = IdFold.from_json(self.unproven_snapshot) if self.unproven_snapshot else IdFold()
        except (ValueError, TypeError, KeyError, IndexError, AssertionError):
            ids = IdFold()
        for position, record, claim in self._unjudged:
            if isinstance(record, Opened):
                ids.open(position, record)
            elif isinstance(record, Done):
                ids.mark_done(record.id, record.up_to)
            elif isinstance(record, Claimed) and claim is not None and record.begin is None:
                ids.claims.setdefault(record.id, claim)
            elif isinstance(record, Claimed) and record.acked is not None:
                ids.groups.update({each.place: each.end for each in record.acked.ranges})
        return ids

    def oldest_living(self, now: int) -> Position | None:
        """Return the position of the oldest announcement of a process, not expired at `now`; None without one."""
        return min((at for at, until in self._living.items() if until > now), default=None)

    def oldest_ack_window(self) -> Position | None:
        """Return the position from which records have to be kept, so that claims with acknowledgements can be judged.

        Such a claim is judged by all records behind the position up to which its author had read the log. Claims that
        a snapshot covers are left out. Return None if there are no others.
        """
        return min((read_up_to for _, read_up_to in self._ack_windows), default=None)

    # --- keeping memory and snapshots short -------------------------------------------------------------------------

    def to_json(self, now: int) -> dict[str, Any]:
        """Return the body of a snapshot that covers all records read; `now` is its time (ms since 1970)."""
        log, renewed = self.completeness.log or "", self.completeness.renewed
        body = {**self.ids.to_json(log, self.oldest_living(now)), "living": self._living_json(now)}
        return body if renewed is None else {**body, "renewed": renewed.to_json()}

    def _living_json(self, now: int) -> list[list[Any]]:
        """Return the presence records that transactions still need at the time `now`, as JSON for a snapshot.

        A presence record announces a process, whose next transactions later records decide. Of those that end in the
        same hour only the oldest is listed: the log keeps all records from it on.
        """
        living: list[list[Any]] = []
        for at, until in sorted(self._living.items()):
            if until <= now or (living and until <= living[-1][1]):
                continue
            if living and until // _HOUR == living[-1][1] // _HOUR:
                living[-1][1] = until
            else:
                living.append([list(at), until])
        return living

    def forget(self, before: Position, oldest_living: Position) -> None:
        """Drop records before the position `before`, and processes' announcements before `oldest_living`."""
        self.records_since_forgetting = 0
        self.tokens.forget(before, self.covered)
        self.ids.forget(oldest_living)
        self._living = {at: until for at, until in self._living.items() if at >= oldest_living}
        self._parts = {at: part for at, part in self._parts.items() if at >= before}
        self.completeness.forget(before)
        self._unjudged = [late for late in self._unjudged if late[0] >= before]
        if not self.completeness.complete:
            self._ack_windows = [window for window in self._ack_windows if window[0] >= before]
