"""Judges whether a process that reads a decision log knows every decision since the log's first record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge._base.messages import Position
from txnbridge._decisions.conclusions import Renewal
from txnbridge._decisions.records import Birth, LogRecord, Renewed, Snapshot, digest


class Completeness:
    """Judges whether one reading of a decision log misses no earlier record, so that its conclusions are proven.

    It misses none if it began with the birth record (the log's first one), or with a valid snapshot. `origin` is the
    position that the first record of every log has, if the log's store has such a fixed position: a birth record
    elsewhere was not the first record. `own_log` is this log's id, if an earlier reading has found it.
    """

    def __init__(self, origin: Position | None, trusts_birth: bool = True, own_log: str | None = None) -> None:
        self._origin = origin
        self._own_log = own_log
        self.trusts_birth = trusts_birth
        self.birth_refuted = False  # whether the trusted birth record turned out not to be the log's first record
        self.complete = False
        self.incomplete_because = ""
        self.log: str | None = None  # the log's id
        self.born: Position | None = None  # where the birth record is, or was
        self.renewed: Renewal | None = None  # the last renewal of the log
        self.founding_snapshot: tuple[Snapshot, Mapping[str, Any]] | None = None  # it made the reading complete
        self.foreign_records = False  # whether a record before the founding snapshot belongs to another log
        self._logs: set[str] = set()  # the log ids in the records before the founding snapshot
        self._digests: dict[Position, str] = {}  # the hashes of the records before the founding snapshot

    def begin(self, position: Position, record: LogRecord) -> None:
        """Note the first record that was read: the reading is complete if this is the log's birth record."""
        if not isinstance(record, Birth):
            self.incomplete_because = (
                "its first record is not its birth record, and no snapshot covers what was dropped before it"
            )
        elif not self.trusts_birth or self._origin not in (None, position):
            self.incomplete_because = (
                "its birth record was not its first one, and no snapshot covers what was dropped before it"
            )
        else:
            self.complete = True
            self.log, self.born = record.log, position

    def is_foreign(self, record: LogRecord) -> bool:
        """Return whether a record belongs to another log of the same name, and must be ignored.

        If the record's log id differs but this log's own id is not certain, return False, and make the reading
        incomplete.
        """
        own = self.log if self.complete else self._own_log
        if own is not None and record.log not in (None, own) and not isinstance(record, Birth):
            if not self.complete or self._recognises_foreign_records:
                # This log's id is certain, so the record's writer still uses an earlier log of the same name.
                return True
            self._refute_birth()
        elif not self.complete and record.log is not None:
            self._logs.add(record.log)
        return False

    def remember(self, position: Position, raw: bytes) -> None:
        """Keep a record's hash while earlier records may be missing: a later snapshot may name it as covered."""
        if not self.complete:
            self._digests[position] = digest(raw)

    def forget(self, before: Position) -> None:
        self._digests = {at: hashed for at, hashed in self._digests.items() if at >= before}

    def has_covered_record(self, snapshot: Snapshot) -> bool:
        """Return whether the last record that a snapshot covers was read, with identical bytes.

        If so, the snapshot and the records that were read leave no gap between them.
        """
        return self.complete or self._digests.get(snapshot.covers) == snapshot.digest

    def check_birth(self, snapshot: Snapshot) -> None:
        if self.complete and snapshot.born != self.born:
            self._refute_birth()

    def complete_with(self, snapshot: Snapshot, body: Mapping[str, Any]) -> None:
        """Let a snapshot replace all earlier records. Raise ValueError, TypeError or KeyError if it is damaged."""
        self.renewed = body.get("renewed") and Renewal.from_json(body["renewed"])
        self.log, self.born = str(body["log"]), snapshot.born
        self.complete, self.incomplete_because = True, ""
        self.founding_snapshot = snapshot, body
        self.foreign_records = bool(self._logs - {self.log})
        self._digests = {}

    def renew(self, position: Position, record: Renewed) -> None:
        """Note an operator's record that began the log anew: conclusions need no record before it any more."""
        self.renewed = Renewal(position, record.at, record.host)
        self.log, self.born = record.log, position
        self.complete = True
        self.birth_refuted, self.foreign_records, self.incomplete_because = False, False, ""
        self._digests = {}

    def _refute_birth(self) -> None:
        # Several processes may create a log at once, and appends may be repeated: then there are several birth records,
        # of which the first counts. A record with another log's id, or a snapshot that names another birth record,
        # shows that the trusted birth record is not the first (or that others still use an earlier log of this name).
        self.birth_refuted = True
        self.complete = False
        self.incomplete_because = "its birth record was not its first one"

    @property
    def _recognises_foreign_records(self) -> bool:
        """True if this log's id is certain: a record with another id is then foreign."""
        return self._origin is not None or self.renewed is not None

    @property
    def took_foreign_records(self) -> bool:
        """True if records of another log of this name were taken for this log's, until a snapshot named this log's id.

        A reader that knew this log's id from the start has ignored these records, and comes to other conclusions.
        """
        return self.foreign_records and self._recognises_foreign_records and self._own_log != self.log
