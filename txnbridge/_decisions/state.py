"""What follows from a decision log: a pure fold over its records, in their order.

Nothing here reads a clock or talks to a broker: whoever folds the same records comes to the same conclusions.
docs/decisions.md gives the rules and their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge._decisions.records import (
    Acked,
    Begin,
    Birth,
    Claimed,
    Done,
    Entry,
    Opened,
    Part,
    Path,
    Place,
    Presence,
    Record,
    Renewed,
    Snapshot,
    Stored,
    Under,
    Unreadable,
    decode,
    digest,
    load_json,
    read_begin,
    read_path,
    read_position,
    read_under,
)
from txnbridge._messages import Position
from txnbridge._token import Decision

# The one kind of ledger entry that has a meaning here: it makes a transaction independent of its owner.
PREPARE = "prepare"
_HOUR = 3_600_000

_AboutId = Opened | Entry | Claimed | Done
_Transaction = tuple[Path, Begin]


@dataclass(frozen=True)
class Opener:
    """One opening of an id: its name and number, where it stands in the log, and what its owner said about itself."""

    under: Under
    position: Position
    host: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Winner:
    """The first claim on an id that counts. `body` is None if its parts are gone."""

    position: Position
    nonce: str
    decision: Decision
    by: Under | None
    body: Mapping[str, Any] | None
    acked: Acked | None = None


@dataclass(frozen=True)
class Commit:
    """A commit that its author may not have carried out yet.

    `certain`: everything from the transaction's presence on was read, so that no earlier claim on it was missed.
    """

    id: Path
    begin: Begin
    winner: Winner
    certain: bool

    def to_json(self) -> list[Any]:
        winner = self.winner
        by = winner.by and _under_json(winner.by)
        begin = {"at": list(self.begin.at), "id": self.begin.id}
        return [list(self.id), begin, list(winner.position), winner.nonce, by, winner.body, self.certain]

    @classmethod
    def from_json(cls, value: Any) -> Commit:
        id, begin, position, nonce, by, body, certain = value
        winner = Winner(read_position(position), nonce, Decision.COMMIT, by and read_under(by), body)
        return cls(read_path(id), read_begin(begin), winner, bool(certain))


@dataclass(frozen=True)
class Renewal:
    """Where in the log, when (ms since 1970) and by whom it was begun anew."""

    position: Position
    at: int
    host: str

    def to_json(self) -> list[Any]:
        return [list(self.position), self.at, self.host]

    @classmethod
    def from_json(cls, value: Any) -> Renewal:
        position, at, host = value
        return cls(read_position(position), int(at), str(host))


@dataclass(frozen=True)
class Noted:
    """One counting ledger entry."""

    position: Position
    nonce: str
    about: str
    data: Mapping[str, Any]
    under: Under


def opens(openings: Mapping[Path, Opener], under: Under) -> bool:
    """Whether an opening counts. Each takes the next number, so a copy that arrives late is none.

    The owner of an id that it made up appends its opening again now and then: the last copy tells how long it is kept.
    """
    newest = openings.get(under.id)
    return newest is None or newest.under.number < under.number or (under.made_up and newest.under == under)


def stands(openings: Mapping[Path, Opener], under: Under) -> bool:
    """Whether an opening is the newest of its id. Its owner's records behind a newer opening do not count.

    The opening of a made-up id need not be known: it is forgotten in time, and there is no other one.
    """
    newest = openings.get(under.id)
    return under.made_up if newest is None else newest.under == under


def is_kept(opener: Opener, since: Position | None) -> bool:
    """Whether an opening is kept in memory and in snapshots: that of a made-up id only while its owner may live.

    `since` is where the oldest living presence stands. An owner appends its opening behind each of its presences.
    """
    return not opener.under.made_up or (since is not None and opener.position >= since)


@dataclass
class Ackers:
    """The transaction that acknowledged last on a group and partition, and where the last other one did.

    Claims are kept here whether or not they count.

    Of claims that follow each other by one transaction (copies, repeated attempts) only the last is kept: that is
    enough to see whether anybody else's stands behind a position.
    """

    last: _Transaction
    at: Position
    before: Position | None = None  # the last claim of anybody else than `last`

    def add(self, transaction: _Transaction, position: Position) -> None:
        if transaction != self.last:
            self.last, self.before = transaction, self.at
        self.at = position

    def rival_behind(self, position: Position, transaction: _Transaction) -> bool:
        """Whether a claim of anybody else than `transaction` stands behind a position."""
        rival = self.before if transaction == self.last else self.at
        return rival is not None and rival > position


@dataclass
class TokenFold:
    """What is known of transactions whose tokens say where their evidence begins, since the first record read.

    It needs no record before that: an owner uses a presence only after it has read, from the log's first record, that
    its own opening is the newest one up to that presence. So only openings with a higher number can be newer ones.
    """

    openings: dict[Path, Opener] = field(default_factory=dict)
    presences: dict[Position, Presence] = field(default_factory=dict)
    claims: dict[Path, dict[Begin, Winner]] = field(default_factory=dict)
    entries: dict[tuple[Path, str], list[Noted]] = field(default_factory=dict)
    ackers: dict[Place, Ackers] = field(default_factory=dict)

    def open(self, position: Position, record: Opened) -> None:
        if opens(self.openings, record.under):
            self.openings[record.under.id] = Opener(record.under, position, record.host, record.data)

    def note(self, position: Position, record: Entry) -> None:
        if self.is_void(record.under):
            return
        known = self.entries.setdefault((record.under.id, record.transaction), [])
        if all(entry.nonce != record.nonce for entry in known):
            known.append(Noted(position, record.nonce, record.about, record.data, record.under))

    def strike(self, position: Position, record: Entry) -> None:
        """Take back an entry: an opening from before the first record read makes it void."""
        known = self.entries.get((record.under.id, record.transaction), [])
        known[:] = [entry for entry in known if entry.position != position]

    def claim(self, begin: Begin, record: Claimed, winner: Winner, covered: Position | None) -> bool:
        """Take a claim; whether it counts (it need not be the first that does).

        `covered` is up to where the snapshots in front of it cover the log.
        """
        acked, transaction = record.acked, (record.id, begin)
        acks_stand = acked is None or self._acknowledge(transaction, acked, winner.position, covered)
        if not acks_stand or (record.by is not None and self._shuts_out(record.by, record)):
            return False
        self.claims.setdefault(record.id, {}).setdefault(begin, winner)
        return True

    def strike_void(self, begin: Begin, record: Claimed) -> None:
        """Take back a claim that seems to stand, and that the author of this one knew to be void.

        The author of a claim that acknowledges has read, up to `read_up_to`, that no claim on its transaction stands. A
        reader that began behind the transaction's presence may have missed what a snapshot covers that makes it void.
        """
        known = self.claims.get(record.id, {})
        if record.acked is not None and begin in known and known[begin].position <= record.acked.read_up_to:
            del known[begin]

    def _acknowledge(
        self, transaction: _Transaction, acked: Acked, position: Position, covered: Position | None
    ) -> bool:
        """Whether nobody else acknowledged between what a claim's author had read and the claim."""
        # A claim that comes so late that a snapshot covers more than its author had read is void: a reader that begins
        # with that snapshot does not know which claims stand in between.
        counts = acked.read_up_to >= transaction[1].at and (covered is None or acked.read_up_to >= covered)
        rivals = [self.ackers[each.place] for each in acked.ranges if each.place in self.ackers]
        counts = counts and not any(ackers.rival_behind(acked.read_up_to, transaction) for ackers in rivals)
        self.acknowledge(transaction, acked, position)
        return counts

    def acknowledge(self, transaction: _Transaction, acked: Acked | None, position: Position) -> None:
        """Note where a transaction has acknowledged, whether or not that counts."""
        for each in acked.ranges if acked is not None else ():
            self.ackers.setdefault(each.place, Ackers(transaction, position)).add(transaction, position)

    def _shuts_out(self, by: Under, record: Claimed) -> bool:
        # An owner's claim on a prepared transaction counts. Its author leaves the owner out if it acknowledges, because
        # a reader that begins with a snapshot does not know what was prepared before.
        return self.is_void(by) and (record.acked is not None or not self.is_prepared(by.id, record.id))

    def is_void(self, under: Under) -> bool:
        """Whether a newer opening shuts out the records that the owner of this one appends now."""
        newest = self.openings.get(under.id)
        # Two openings may have tried to take one number. Only the one that counts has an owner who acts under it.
        return newest is not None and newest.under.number > under.number

    def is_prepared(self, owner: Path, id: Path) -> bool:
        """Whether a counting prepare record has made a transaction independent of its owner."""
        return len(id) == 1 and any(e.about == PREPARE for e in self.entries.get((owner, str(id[0])), ()))

    def forget(self, before: Position, covered: Position | None) -> None:
        """Drop what no living presence reaches, but no claim that may stand in front of one that acknowledges."""
        self.presences = {at: presence for at, presence in self.presences.items() if at >= before}
        if covered is not None:
            self._forget_claims(min(before, covered))
        self.openings = {id: o for id, o in self.openings.items() if is_kept(o, before)}
        kept = ((key, [e for e in entries if e.position >= before]) for key, entries in self.entries.items())
        self.entries = {key: entries for key, entries in kept if entries}

    def _forget_claims(self, before: Position) -> None:
        left = ((id, {b: c for b, c in claims.items() if c.position >= before}) for id, claims in self.claims.items())
        self.claims = {id: claims for id, claims in left if claims}


@dataclass
class IdFold:
    """What is known of ids that no token carries: it holds only if every record since the log's birth went into it."""

    openings: dict[Path, Opener] = field(default_factory=dict)
    names: dict[Path, set[str]] = field(default_factory=dict)  # every name that a caller ever gave to an opening
    done: dict[Path, int] = field(default_factory=dict)
    claims: dict[Path, Winner] = field(default_factory=dict)
    groups: dict[Place, Position] = field(default_factory=dict)  # where each stands: the next position to read
    # Commits that their authors may not have carried out: the last one of each writer of an id's owner, and the last
    # that acknowledged on each partition of a group.
    commits: dict[Path, dict[str | int | None, Commit]] = field(default_factory=dict)
    movers: dict[Place, Commit] = field(default_factory=dict)

    def open(self, position: Position, record: Opened) -> bool:
        """Take an opening; whether it counts."""
        if not opens(self.openings, record.under):
            # Not the first copy of this opening, or somebody else took its number first.
            return self.openings[record.under.id].under == record.under
        self.openings[record.under.id] = Opener(record.under, position, record.host, record.data)
        if record.named:
            self.names.setdefault(record.under.id, set()).add(record.under.name)
        return True

    def claim(self, record: Claimed, winner: Winner) -> bool:
        """Take a claim; whether it counts (it need not be the first that does)."""
        if self.is_done(record.id) or (record.by is not None and not stands(self.openings, record.by)):
            return False
        self.claims.setdefault(record.id, winner)
        return True

    def commit(self, record: Claimed, commit: Commit) -> None:
        """Take the counting claim that commits a transaction with a token, and what it acknowledges."""
        if record.by is None or stands(self.openings, record.by):
            self.remember(record, commit)
            if record.acked is not None:
                self.groups.update({each.place: each.end for each in record.acked.ranges})

    def remember(self, record: Claimed, commit: Commit) -> None:
        """Take a commit as the last one of its writer, and of the partitions on which it acknowledges.

        A writer carries out one commit before it claims the next, and an owner those of the owner before.
        """
        if (by := record.by) is not None:
            last = self.commits.get(by.id, {})
            self.commits[by.id] = {writer: other for writer, other in last.items() if other.winner.by == by}
            writer = (commit.winner.body or {}).get("writer")
            self.commits[by.id][writer if isinstance(writer, str | int) else None] = commit
        if record.acked is not None:
            self.movers.update({each.place: commit for each in record.acked.ranges})

    def finish(self, id: Path, up_to: int) -> None:
        """Take a done mark: the ids that it covers are settled, and nobody needs their claims any more."""
        self.done[id] = max(up_to, self.done.get(id, up_to))
        for key in [key for key in self.claims if key[: len(id)] == id and self.is_done(key)]:
            del self.claims[key]

    def forget(self, since: Position) -> None:
        """Drop from memory what made-up ids left that snapshots leave out, too."""
        self.openings = {id: o for id, o in self.openings.items() if is_kept(o, since)}
        for id, last in list(self.commits.items()):
            winners = [commit.winner for commit in last.values()]
            if all(winner.by and winner.by.made_up and winner.position < since for winner in winners):
                del self.commits[id]

    def is_done(self, id: Path) -> bool:
        """Whether a done mark of a shorter id covers this one."""
        for length in range(1, len(id)):
            number = id[length]
            if isinstance(number, int) and number <= self.done.get(id[:length], number - 1):
                return True
        return False

    def to_json(self, log: str, since: Position | None = None) -> dict[str, Any]:
        """The body of a snapshot. `since` is where the oldest living presence stands.

        Commits in front of it are left out: nobody can carry them out any more. So are the openings of made-up ids.
        """
        return {
            "log": log,
            "opened": [
                [_under_json(o.under), list(o.position), o.host, o.data, sorted(self.names.get(id, ()))]
                for id, o in self.openings.items()
                if is_kept(o, since)
            ],
            "done": [[list(id), up_to] for id, up_to in self.done.items()],
            "claims": [
                [list(id), list(c.position), c.nonce, c.decision.value, c.by and _under_json(c.by), c.body]
                for id, c in self.claims.items()
            ],
            "groups": [[group, *partition, list(at)] for (group, partition), at in self.groups.items()],
            **self._commits_json(since or ()),
        }

    def _commits_json(self, since: Position) -> dict[str, Any]:
        owners = [(writer, c) for last in self.commits.values() for writer, c in last.items()]
        recent = {c.winner.nonce: c for _, c in [*owners, *self.movers.items()] if c.winner.position >= since}
        index = {nonce: number for number, nonce in enumerate(recent)}  # one commit may move many partitions
        return {
            "commits": [commit.to_json() for commit in recent.values()],
            "owners": [[writer, index[c.winner.nonce]] for writer, c in owners if c.winner.nonce in index],
            "movers": [
                [group, *partition, index[c.winner.nonce]]
                for (group, partition), c in self.movers.items()
                if c.winner.nonce in index
            ],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> IdFold:
        """Read a snapshot's body back. Raises ValueError, TypeError or KeyError for whatever is none."""
        fold = cls()
        for under_json, position, host, data, names in body["opened"]:
            under = read_under(under_json)
            fold.openings[under.id] = Opener(under, read_position(position), host, data)
            if names:
                fold.names[under.id] = set(names)
        fold.done = {read_path(id): int(up_to) for id, up_to in body["done"]}
        for id, position, nonce, decision, by, data in body["claims"]:
            winner = Winner(read_position(position), nonce, Decision(decision), by and read_under(by), data)
            fold.claims[read_path(id)] = winner
        for group, topic, number, position in body.get("groups", ()):  # version 1 had none
            fold.groups[str(group), (str(topic), int(number))] = read_position(position)
        fold._read_commits(body)
        return fold

    def _read_commits(self, body: Mapping[str, Any]) -> None:
        commits = [Commit.from_json(each) for each in body.get("commits", ())]  # older snapshots had none
        for writer, index in body.get("owners", ()):
            commit = commits[index]
            assert commit.winner.by is not None
            self.commits.setdefault(commit.winner.by.id, {})[writer] = commit
        for group, topic, number, index in body.get("movers", ()):
            self.movers[str(group), (str(topic), int(number))] = commits[index]


def _under_json(under: Under) -> dict[str, Any]:
    return {"id": list(under.id), "name": under.name, "number": under.number}


class State:
    """Everything that follows from the records between the first one read and `cursor`.

    `tell` is called with each record's nonce, its position and whether it counts (None: nobody can tell), as soon as
    that is known. Where every log's first record has the same position, `origin` is that: a birth record elsewhere was
    not the first. `own` is this log's id if an earlier reading has found it.
    """

    def __init__(
        self,
        tell: Callable[[str, Position, bool | None], None],
        origin: Position | None = None,
        trust_birth: bool = True,
        own: str | None = None,
    ) -> None:
        self._tell = tell
        self._origin = origin
        self._own = own
        self.trusts_birth = trust_birth
        self.misled = False  # the birth record that was trusted was not the log's first record
        self.start: Position | None = None
        self.cursor: tuple[Position, bytes] | None = None
        self.log: str | None = None
        self.born: Position | None = None  # where the birth record is, or was
        self.blocked = ""  # why nothing behind the cursor can be judged
        self.doubt = ""  # why this log's beginning proves nothing
        self.tokens = TokenFold()
        self.ids = IdFold()
        self.founded = False  # whether `ids` holds
        self.knows_living = False  # whether the snapshot on which it is founded lists the presences in front of it
        self.renewed: Renewal | None = None  # the last time that the log was begun anew
        self.foundation: tuple[Snapshot, Mapping[str, Any]] | None = None  # the snapshot by which `ids` holds
        self.unproven: Mapping[str, Any] = {}  # the body of the last snapshot, if a record that it names is gone
        self.lacks_parts = False  # whether a part of a body was not among the records
        self.strangers = False  # whether a record in front of that snapshot belongs to another log
        self._living: dict[Position, int] = {}  # until when each presence may be needed
        self._logs: set[str] = set()  # as which the records in front of that snapshot know this log
        self.records_since_snapshot = 0
        self.bytes_since_snapshot = 0
        self.records_since_forgetting = 0
        self.snapshot_at: int | None = None
        self.covered: Position | None = None  # the last record that a snapshot covers
        # Where claims that acknowledge stand, if no snapshot covers them, and up to where their authors had read.
        self._windows: list[tuple[Position, Position]] = []
        self._parts: dict[Position, bytes] = {}
        # Until a snapshot is found that covers all missing records: the hash of each record, and the records that only
        # such a snapshot allows to judge.
        self._digests: dict[Position, str] = {}
        self._waiting: list[tuple[Position, _AboutId, Winner | None]] = []

    # --- taking records ---------------------------------------------------------------------------------------------

    def take(self, position: Position, raw: bytes) -> bool:
        """Fold one more record; False if it cannot be read, and then nothing behind it can be judged."""
        try:
            record = decode(raw)
            if isinstance(record, Renewed):
                self._take_renewal(position, raw, record)
            else:
                self._take(position, raw, record)
        except Unreadable as error:
            self.blocked = f"the record at {list(position)} cannot be judged: {error}"
            return False
        self.cursor = (position, raw)
        self.records_since_snapshot += 1
        self.records_since_forgetting += 1
        self.bytes_since_snapshot += len(raw)
        return True

    def _take(self, position: Position, raw: bytes, record: Record) -> None:
        if self.cursor is None:
            self._take_first(position, record)
        if not self.founded:
            self._digests[position] = digest(raw)
        own = self.log if self.founded else self._own
        if own is not None and record.log not in (None, own) and not isinstance(record, Birth):
            if not self.founded or self._tells_strangers:
                # This log's beginning is beyond doubt: its writer still uses a log that was there before this one.
                self._tell(record.nonce, position, False)
                return
            self._distrust()
        elif not self.founded and record.log is not None:
            self._logs.add(record.log)
        match record:
            case Opened():
                self.tokens.open(position, record)
                self._judge(position, record, None)
            case Entry():
                self.tokens.note(position, record)
                self._judge(position, record, None)
            case Claimed():
                self._take_claim(position, record)
            case Done():
                self._judge(position, record, None)
            case _:
                self._tell(record.nonce, position, self._take_support(position, record))

    def _take_support(self, position: Position, record: Record) -> bool:
        """Take a record that decides nothing; whether it is of use."""
        if isinstance(record, Part):
            self._parts[position] = record.payload
        elif isinstance(record, Presence):
            self.tokens.presences[position] = record
            self._living[position] = record.until
        elif isinstance(record, Snapshot):
            return self._take_snapshot(record)
        return True

    def _take_first(self, position: Position, record: Record) -> None:
        self.start = position
        if not isinstance(record, Birth):
            self.doubt = "its first record is not its birth record, and no snapshot covers what was dropped before it"
        elif not self.trusts_birth or self._origin not in (None, position):
            self.doubt = "its birth record was not its first one, and no snapshot covers what was dropped before it"
        else:
            self.founded = True
            self.log, self.born = record.log, position
            self.snapshot_at = record.at  # a birth record covers all that was before it: nothing

    def _take_renewal(self, position: Position, raw: bytes, record: Renewed) -> None:
        """Forget all that is in front of this; not if others appended since the operator looked."""
        if self.cursor is None:
            self._take_first(position, record)
        counts = self.cursor is not None and (self.cursor[0], digest(self.cursor[1])) == (record.covers, record.digest)
        if counts:
            self._renew(position, record)
        elif not self.founded:
            self._digests[position] = digest(raw)  # the next snapshot may cover just this
        self._tell(record.nonce, position, counts)

    def _renew(self, position: Position, record: Renewed) -> None:
        self.renewed = Renewal(position, record.at, record.host)
        self.start = self.born = position
        self.log, self.snapshot_at = record.log, record.at
        self.covered = position  # a claim by somebody who had not read this acknowledges nothing
        self.tokens, self.ids, self.unproven = TokenFold(), IdFold(), {}
        self._living, self._parts, self._digests, self._windows, self._waiting = {}, {}, {}, [], []
        self.founded = self.knows_living = True
        self.misled, self.strangers, self.doubt = False, False, ""
        self.records_since_snapshot = self.bytes_since_snapshot = 0

    def _distrust(self) -> None:
        # Creating a log may race, and appends may be repeated: then there are several birth records, of which the first
        # counts. A record with another log's id, or a snapshot that knows another birth, shows that the one which was
        # trusted is not the first (or that the log was made anew while others still use the old one).
        self.misled = True
        self.founded = False
        self.doubt = "its birth record was not its first one"

    def _take_claim(self, position: Position, record: Claimed) -> None:
        body = record.body if record.stored is None else self._assemble(record.stored)
        winner = Winner(position, record.nonce, record.decision, record.by, body, record.acked)
        if record.begin is None:
            self._judge(position, record, winner)
            return
        assert self.start is not None
        if record.begin.at < self.start:
            self.tokens.strike_void(record.begin, record)
        counts = self.tokens.claim(record.begin, record, winner, self.covered)
        self._tell(record.nonce, position, counts)
        if record.acked is not None:
            self._windows.append((position, record.acked.read_up_to))
        leaves_work = record.decision is Decision.COMMIT and (record.acked is not None or record.by is not None)
        if leaves_work and counts and self.tokens.claims[record.id][record.begin] is winner:
            self._judge(position, record, winner)

    def _assemble(self, stored: Stored) -> Mapping[str, Any] | None:
        self.lacks_parts |= any(part not in self._parts for part in stored.parts)
        raw = b"".join(self._parts.pop(part, b"") for part in stored.parts)
        try:
            return load_json(raw) if digest(raw) == stored.digest else None
        except ValueError:
            return None

    def _judge(self, position: Position, record: _AboutId, winner: Winner | None) -> None:
        """Judge a record about an id; later, if too little was read so far to judge it."""
        if not self.founded:
            self._waiting.append((position, record, winner))
            return
        counts = True
        if isinstance(record, Opened):
            counts = self.ids.open(position, record)
        elif isinstance(record, Done):
            self.ids.finish(record.id, record.up_to)
        elif isinstance(record, Claimed) and record.begin is not None and winner is not None:
            self.ids.commit(record, self._commit(record.id, record.begin, winner))
            return  # whether it counts was told: that does not depend on the log's beginning
        elif isinstance(record, Claimed):
            counts = winner is not None and self.ids.claim(record, winner)
        elif not (counts := stands(self.ids.openings, record.under)):
            self.tokens.strike(position, record)
        self._tell(record.nonce, position, counts)

    def _commit(self, id: Path, begin: Begin, winner: Winner) -> Commit:
        assert self.start is not None
        # The author of a claim that acknowledges has read, up to `read_up_to`, that no claim on its transaction stands.
        return Commit(id, begin, winner, certain=winner.acked is not None or begin.at >= self.start)

    def _take_snapshot(self, record: Snapshot) -> bool:
        covers_what_is_here = self.founded or self._digests.get(record.covers) == record.digest
        if covers_what_is_here:
            self.covered = record.covers if self.covered is None else max(self.covered, record.covers)
        body = record.body if record.stored is None else self._assemble(record.stored)
        if body is None:
            return False
        self.records_since_snapshot = self.bytes_since_snapshot = 0
        self.snapshot_at = record.at
        if self.founded and record.born != self.born:
            self._distrust()
        # The record that the snapshot names must be here, exactly: then no record is missing between that one and those
        # that were read. The records that decide about the acknowledgements behind it must be here, too.
        if not self.founded and covers_what_is_here and self._sees_windows(record.covers):
            self._found(record, body)
        if self.founded:
            self._windows = [window for window in self._windows if window[0] > record.covers]
        else:
            self.unproven = body
        return True

    def begin_behind(
        self, foundation: tuple[Snapshot, Mapping[str, Any]] | None, records: Sequence[tuple[Position, bytes]]
    ) -> bool:
        """Begin with a snapshot, and take the records behind the one that it covers; whether these can be judged so.

        `records` begin in front of that one, and end where the log does. Those in front are not judged: that takes
        the openings and snapshots in front of them. Without a snapshot a renewal is among them.
        """
        if foundation is not None and not self._begin_with(*foundation, records):
            return False
        behind = (each for each in records if self.cursor is None or each[0] > self.cursor[0])
        # A claim may have parts in front of the first of these records: another reader knows what it says.
        return all(self.take(*each) for each in behind) and not self.lacks_parts

    def _begin_with(
        self, snapshot: Snapshot, body: Mapping[str, Any], records: Sequence[tuple[Position, bytes]]
    ) -> bool:
        behind = [position for position, _ in records if position > snapshot.covers]
        self.start, self.cursor = behind[0], (snapshot.covers, dict(records)[snapshot.covers])
        self._found(snapshot, body)
        self.tokens.openings = dict(self.ids.openings)
        claims: dict[_Transaction, Position] = {}
        for position, record in ((position, decode(raw)) for position, raw in records):
            if isinstance(record, Claimed) and record.begin is not None:
                transaction, acked = (record.id, record.begin), record.acked
                if position <= snapshot.covers:
                    claims[transaction] = position
                    self.tokens.acknowledge(transaction, acked, position)
                elif acked is not None and acked.read_up_to < max(records[0][0], claims.get(transaction, ())):
                    return False  # a claim in front, which is not judged here, may stand against this one
            elif isinstance(record, Snapshot) and position <= snapshot.covers:
                self.covered = max(self.covered or record.covers, record.covers)
            elif isinstance(record, Part) and position <= snapshot.covers:
                self._parts[position] = record.payload
            if isinstance(record, Snapshot) and record == snapshot:
                break  # claims behind it are void if their authors had not read up to what it covers
        return True

    def _sees_windows(self, covers: Position) -> bool:
        assert self.start is not None
        return all(read_up_to >= self.start for position, read_up_to in self._windows if position > covers)

    def _found(self, record: Snapshot, body: Mapping[str, Any]) -> None:
        try:
            self.ids = IdFold.from_json(body)
            self.log, self.born = str(body["log"]), record.born
            self.renewed = body.get("renewed") and Renewal.from_json(body["renewed"])
            self._living |= {read_position(at): int(until) for at, until in body.get("living", ())}
        except (ValueError, TypeError, KeyError, IndexError, AssertionError):
            raise Unreadable("the snapshot is damaged") from None
        self.founded, self.doubt = True, ""
        self.foundation = record, body
        self.strangers = bool(self._logs - {self.log})
        self.knows_living = "living" in body
        waiting, self._waiting, self._digests = self._waiting, [], {}
        for position, late, winner in waiting:
            if position > record.covers:
                self._judge(position, late, winner)
            elif isinstance(late, Claimed) and late.begin is not None and winner is not None:
                if "commits" not in body and (late.by is None or stands(self.ids.openings, late.by)):
                    self.ids.remember(late, self._commit(late.id, late.begin, winner))
            elif isinstance(late, Opened | Entry) and not stands(self.ids.openings, late.under):
                # Void from the start, or overtaken since: the snapshot does not tell which.
                self._tell(late.nonce, position, None)
            else:
                self._tell(late.nonce, position, True)

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def _tells_strangers(self) -> bool:
        """Whether a record of another log says nothing against this one."""
        return self._origin is not None or self.renewed is not None

    @property
    def took_strangers(self) -> bool:
        """Whether records of another log were taken for this log's, because only a snapshot behind them tells its id.

        A reader who knew the id has passed over them, and comes to other conclusions.
        """
        return self.strangers and self._tells_strangers and self._own != self.log

    @property
    def begins_with_snapshot(self) -> bool:
        """Whether every record that was read is judged, and the snapshot stands for all records in front of them."""
        return self.founded and self.knows_living and not (self.strangers or self.misled or self.blocked)

    def holds(self, begin: Begin) -> bool:
        """Whether this reading includes exactly this presence record, and so everything behind it."""
        presence = self.tokens.presences.get(begin.at)
        return presence is not None and presence.nonce == begin.id

    def remains(self) -> IdFold:
        """What a log whose beginning proves nothing still says about ids: for people, nothing can stand on it."""
        try:
            ids = IdFold.from_json(self.unproven) if self.unproven else IdFold()
        except (ValueError, TypeError, KeyError, IndexError, AssertionError):
            ids = IdFold()
        for position, record, winner in self._waiting:
            if isinstance(record, Opened):
                ids.open(position, record)
            elif isinstance(record, Done):
                ids.finish(record.id, record.up_to)
            elif isinstance(record, Claimed) and winner is not None and record.begin is None:
                ids.claims.setdefault(record.id, winner)
            elif isinstance(record, Claimed) and record.acked is not None:
                ids.groups.update({each.place: each.end for each in record.acked.ranges})
        return ids

    def oldest_living(self, now: int) -> Position | None:
        """The position of the first presence that somebody may still need."""
        return min((at for at, until in self._living.items() if until > now), default=None)

    def to_json(self, now: int) -> dict[str, Any]:
        """The body of a snapshot of all that was read, written at a time (ms since 1970)."""
        body = {**self.ids.to_json(self.log or "", self.oldest_living(now)), "living": self._living_json(now)}
        return body if self.renewed is None else {**body, "renewed": self.renewed.to_json()}

    def _living_json(self, now: int) -> list[list[Any]]:
        """The presences that decide how long records are kept: of those that end in the same hour only the oldest."""
        found: list[list[Any]] = []
        for at, until in sorted(self._living.items()):
            if until <= now or (found and until <= found[-1][1]):
                continue
            if found and until // _HOUR == found[-1][1] // _HOUR:
                found[-1][1] = until
            else:
                found.append([list(at), until])
        return found

    def oldest_window(self) -> Position | None:
        """The first position that is needed to judge what claims acknowledge that no snapshot covers."""
        return min((read_up_to for _, read_up_to in self._windows), default=None)

    def forget(self, before: Position, oldest_living: Position) -> None:
        """Drop from memory what is in front of a position, and the presences that are not living any more."""
        self.records_since_forgetting = 0
        self.tokens.forget(before, self.covered)
        self.ids.forget(oldest_living)
        self._living = {at: until for at, until in self._living.items() if at >= oldest_living}
        self._parts = {at: part for at, part in self._parts.items() if at >= before}
        self._digests = {at: hashed for at, hashed in self._digests.items() if at >= before}
        self._waiting = [late for late in self._waiting if late[0] >= before]
        if not self.founded:
            self._windows = [window for window in self._windows if window[0] >= before]
