"""A decision log in memory with faults, and worlds of several processes that decide on it, step by step.

A world runs each process on a thread of its own, but only one at a time: before and after each operation on the log
the process stops and a random number generator says who goes on, what is lost, who is killed and what is trimmed. So a
seed is one interleaving, the same one each time. What the processes were told is then held against an oracle that
looks at every record that was ever stored.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from txnbridge import errors
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.timing import Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Claim, Decisions, Opening
from txnbridge._decisions.records import (
    Birth,
    Claimed,
    Done,
    EntryRecord,
    LogRecord,
    Opened,
    OpeningRef,
    PreparedAcks,
    Presence,
    Renewed,
    Snapshot,
    decode,
    digest,
)
from txnbridge.spi import Ack, DecisionLog, Ledger, LedgerClaim

Records = Iterator[tuple[Position, bytes]]


def follower_of(decisions: Decisions) -> Any:
    """Return the `Follower` by which a process reads its log."""
    return decisions._engine.follower


def state_of(decisions: Decisions) -> Any:
    """Return what a process knows of its log, without reading on."""
    return follower_of(decisions)._state


class MemoryLog(DecisionLog):
    """A log in memory. `archive` keeps what was trimmed: what really happened."""

    def __init__(self, first: int = 0, origin: Position | None = None) -> None:
        self.records: list[tuple[Position, bytes]] = []
        self.archive: list[tuple[Position, bytes]] = []
        self.next = first
        self.origin = origin
        self.reads = 0  # records handed out

    def begin(self, deadline: Deadline | None = None) -> Position | None:
        return self.records[0][0] if self.records else None

    def end(self, deadline: Deadline | None = None) -> Position | None:
        return self.records[-1][0] if self.records else None

    def append(self, record: bytes, deadline: Deadline | None = None) -> Position:
        position = (self.next,)
        self.next += 1
        self.records.append((position, record))
        self.archive.append((position, record))
        return position

    def read(self, first: Position | None, last: Position | None, deadline: Deadline | None = None) -> Records:
        begin = self.records[0][0] if self.records else (self.next,)
        first = begin if first is None else first
        if first < begin:
            raise errors.PositionLost(f"{first} was trimmed")
        for position, raw in self.records[first[0] - begin[0] :]:
            if last is not None and position > last:
                return
            self.reads += 1
            yield position, raw

    def trim(self, before: Position, deadline: Deadline | None = None) -> None:
        self.records = [(position, raw) for position, raw in self.records if position >= before]

    def truncate(self, after: Position) -> None:
        """Lose the records behind a position, as a fail-over to an older copy does."""
        self.records = [(position, raw) for position, raw in self.records if position <= after]
        self.archive = [(position, raw) for position, raw in self.archive if position <= after]
        self.next = after[0] + 1


def decoded(records: Iterable[tuple[Position, bytes]]) -> list[tuple[Position, LogRecord]]:
    return [(position, decode(raw)) for position, raw in records]


class Oracle:
    """The records that count by the words of the rules, found from all records without snapshots or increments.

    A log that was renewed has an oracle for each of its times: `since` is where that begins, and `log` its id.
    """

    def __init__(self, archive: list[tuple[Position, bytes]], since: Position = (), log: str | None = None) -> None:
        self._since = since
        self._records = [
            each for each in decoded(archive) if log is None or isinstance(each[1], Birth) or each[1].log in (None, log)
        ]
        self.openings: dict[Any, list[tuple[Position, Any]]] = {}
        for position, record in self._records:
            if isinstance(record, Opened):
                counting = self.openings.setdefault(record.under.id, [])
                if record.under.number > max((under.number for _, under in counting), default=-1):
                    counting.append((position, record.under))

    @classmethod
    def of_each_time(cls, archive: list[tuple[Position, bytes]]) -> dict[Position, Oracle]:
        """Return an oracle for each time of the log, by the position where that time begins."""
        starts: list[tuple[int, Position, str | None]] = [(0, (), None)]
        for number, (position, record) in enumerate(decoded(archive)):
            before = archive[number - 1]
            if isinstance(record, Renewed) and (before[0], digest(before[1])) == (record.covers, record.digest):
                starts.append((number, position, record.log))
        ends = [*[number for number, _, _ in starts[1:]], len(archive)]
        return {since: cls(archive[at:end], since, log) for (at, since, log), end in zip(starts, ends, strict=True)}

    def is_newest(self, under: Any, at: Position) -> bool:
        """Whether an opening is its id's newest one as seen at a position. Ids that are made up have no other one."""
        before = [other for position, other in self.openings.get(under.id, ()) if position < at]
        return bool(before[-1] == under if before else under.number == 0)

    def notes(self, owner: Any, transaction: Any, at: Position) -> list[tuple[str, str]]:
        """(kind, nonce) of the ledger entries that count in front of a position; copies count once."""
        found: dict[str, str] = {}
        for position, record in self._records:
            if position >= at or not isinstance(record, EntryRecord) or record.transaction != transaction:
                continue
            if record.under.id == owner and self.is_newest(record.under, position):
                found.setdefault(record.nonce, record.about)
        return [(about, nonce) for nonce, about in found.items()]

    def winner(self, id: Any, begin: dict[str, Any] | None, at: Position | None = None) -> Claimed | None:
        """The first claim that counts (of those in front of a position)."""
        path = (id,) if isinstance(id, str) else id
        for position, record in self._records:
            if at is not None and position >= at:
                return None
            if not isinstance(record, Claimed) or record.id != path:
                continue
            mine = record.begin and {"at": list(record.begin.at), "id": record.begin.id}
            if mine == begin and self._counts(position, record):
                return record
        return None

    def is_committed(self, id: str) -> bool:
        claims = [record for _, record in self._records if isinstance(record, Claimed) and record.id == (id,)]
        begins = [{"at": list(each.begin.at), "id": each.begin.id} for each in claims if each.begin is not None]
        winners = [self.winner(id, begin) for begin in begins]
        return any(winner is not None and winner.decision is Decision.COMMIT for winner in winners)

    def last_commit(self, owner: str, before: Position, now: int, kept: Position | None) -> str | None:
        """The last transaction that an owner committed on its own account, if anybody needs and can still prove it."""
        last = None
        for position, record in self._records:
            if position >= before or not isinstance(record, Claimed) or record.by is None or record.begin is None:
                continue
            begin = {"at": list(record.begin.at), "id": record.begin.id}
            if (
                record.by.id == (owner,)
                and record.decision is Decision.COMMIT
                and self.is_newest(record.by, position)
                and self.winner(record.id, begin) is record
            ):
                last = record
        if last is None or last.begin is None:
            return None
        until = {at: record.until for at, record in self._records if isinstance(record, Presence)}
        at = last.begin.at
        return str(last.id[0]) if until[at] > now and kept is not None and kept <= at else None

    def held(self, at: Position) -> dict[Any, list[str]]:
        """The prepared transactions that hold a group's partitions, as seen at a position, oldest first."""
        found: dict[Any, list[str]] = {}
        for position, record in self._records:
            if position >= at:
                break
            if isinstance(record, EntryRecord) and (prepared := PreparedAcks.of(record)) is not None:
                for place in prepared.places if self.is_newest(record.under, position) else ():
                    found.setdefault(place, []).append(record.transaction)
            elif isinstance(record, Claimed) and record.begin is not None and self._counts(position, record):
                found = {place: [id for id in ids if (id,) != record.id] for place, ids in found.items()}
        return found

    def is_done(self, id: Any, at: Position) -> bool:
        return any(
            isinstance(record, Done) and id[: len(record.id)] == record.id != id and id[len(record.id)] <= record.up_to
            for position, record in self._records
            if position < at
        )

    def acknowledged(self, at: Position | None = None) -> dict[Any, list[tuple[Position, Position]]]:
        """The ranges that the counting claims acknowledge (of those in front of a position), in their order."""
        found: dict[Any, list[tuple[Position, Position]]] = {}
        counted: set[Any] = set()
        for position, record in self._records:
            if at is not None and position >= at:
                break
            if not isinstance(record, Claimed) or record.begin is None or (record.id, record.begin) in counted:
                continue
            if self._counts(position, record):
                counted.add((record.id, record.begin))
                for each in record.acked.ranges if record.acked else ():
                    found.setdefault(each.place, []).append((each.first, each.end))
        return found

    def chains(self) -> list[str]:
        """Return the findings of messages that were acknowledged twice or left out."""
        return [
            f"{place}: somebody read from {first} when the group stood at {end}"
            for place, ranges in self.acknowledged().items()
            for (_, end), (first, _) in itertools.pairwise(ranges)
            if first != end
        ]

    def _is_overtaken(self, position: Position, record: Claimed) -> bool:
        """Whether others acknowledged between what a claim's author had read and the claim, or it is far too late."""
        assert record.acked is not None and record.begin is not None
        read_up_to, places = record.acked.read_up_to, {each.place for each in record.acked.ranges}
        if read_up_to < self._since:
            return True
        for at, other in self._records:
            if at >= position:
                return False
            if isinstance(other, Snapshot) and other.covers > read_up_to:
                return True
            if at > read_up_to and isinstance(other, Claimed) and other.acked is not None:
                shared = places & {each.place for each in other.acked.ranges}
                if shared and (other.id, other.begin) != (record.id, record.begin):
                    return True
            if at > read_up_to and isinstance(other, EntryRecord) and (other.transaction,) != record.id:
                prepared = PreparedAcks.of(other)
                if prepared is not None and places & set(prepared.places):
                    return True
        return False

    def _counts(self, position: Position, record: Claimed) -> bool:
        if record.acked is not None and self._is_overtaken(position, record):
            return False
        if record.begin is None and self.is_done(record.id, position):
            return False
        if record.by is None or self.is_newest(record.by, position):
            return True
        if record.begin is None or record.acked is not None:
            return False
        return any(about == "prepare" for about, _ in self.notes(record.by.id, record.id[0], position))


# What claims carry: with records made small, the last one takes three parts.
BULKS = ("", "", "x" * 700)
SMALL_RECORDS = Timing(append_pause=0, inline_bytes=400, part_bytes=300)


class Killed(BaseException):
    """The process was killed at this very point."""


@dataclass
class Chances:
    """How likely each fault is, at each operation on the log (or, for the last three, at each turn of the world)."""

    unclean: float = 0.06  # no answer, stored or not
    refused: float = 0.02
    killed: float = 0.02
    echo: float = 0.5  # of an unclean append: another copy arrives at some later time
    retention: float = 0.0  # the oldest records go whether or not anybody needs them
    renewed: float = 0.0  # an operator looks whether the log has to be begun anew
    clock: float = 0.03
    made_up: float = 0.0  # a process without an id does something, under one that it makes up


@dataclass
class Token:
    """A transaction that somebody began, as others come to know of it."""

    id: str
    owner: str
    begin: dict[str, Any]
    prepared: bool = False
    # What it acknowledges if it is prepared and holds the partitions until this time (ms since 1970).
    acks: Sequence[Ack] = ()
    expires_at: int = 0


@dataclass
class World:
    """Several processes on one log. `answers` is what they were told; `findings` says what was wrong with it."""

    seed: int
    chances: Chances = field(default_factory=Chances)
    origin: Position | None = None
    numbered: bool = False
    processes: int = 3
    turns: int = 14
    timing: Timing = SMALL_RECORDS

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.log = MemoryLog(origin=self.origin)
        self.now = 1_700_000_000.0
        self.tokens: list[Token] = []
        self.echoes: list[bytes] = []
        self.checks: list[tuple[Position, Callable[[Oracle], str | None]]] = []
        self.data: dict[str, Any] = {}
        self.told: Counter[str] = Counter()
        self.findings: list[str] = []

    def run(self) -> World:
        actors = [Actor(self, number) for number in range(self.processes)]
        for actor in actors:
            actor.thread.start()
        waiting = list(actors)
        while waiting:
            self._weather()
            actor = self.random.choice(waiting)
            if not actor.turn():
                waiting.remove(actor)
        for actor in actors:
            actor.thread.join()
            if actor.error is not None:
                raise actor.error
        oracles = Oracle.of_each_time(self.log.archive)
        oracle_at = lambda at: oracles[max(since for since in oracles if since <= at)]  # noqa: E731
        self.findings += [finding for at, check in self.checks if (finding := check(oracle_at(at)))]
        self.findings += [finding for oracle in oracles.values() for finding in oracle.chains()]
        return self

    def _weather(self) -> None:
        """Let a clock jump, a late copy or retention happen by chance between two steps."""
        if self.random.random() < self.chances.clock:
            self.now += self.random.choice((60, 400, 2_000))
        if self.echoes and self.random.random() < 0.1:
            self.log.append(self.echoes.pop(self.random.randrange(len(self.echoes))))
        if self.random.random() < self.chances.retention and len(self.log.records) > 2:
            self.log.trim(self.random.choice(self.log.records[1:])[0])


class Actor:
    """One process of a world: it does random things until it has had its turns; killed, it starts again."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.random = world.random
        self.name = f"p{number}"
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.error: BaseException | None = None
        self._mine = threading.Semaphore(0)
        self._theirs = threading.Semaphore(0)
        self._over = False

    # The baton: `turn` gives it to this process until its next step.
    def turn(self) -> bool:
        self._mine.release()
        self._theirs.acquire()
        return not self._over

    def step(self) -> None:
        self._theirs.release()
        self._mine.acquire()

    def _live(self) -> None:
        self._mine.acquire()
        try:
            turns = self.world.turns
            while turns:
                turns = self._until_killed(turns)
        except BaseException as error:
            self.error = error
        finally:
            self._over = True
            self._theirs.release()

    def _until_killed(self, turns: int) -> int:
        self._begin_anew()
        while turns:
            turns -= 1
            try:
                self._act()
            except Killed:
                self.world.told["killed"] += 1
                return turns
            except errors.EvidenceLost:
                self.world.told["EvidenceLost"] += 1
                if self.world.chances.renewed:
                    return turns  # it has to be started again
            except errors.TxnBridgeError as error:
                self.world.told[type(error).__name__] += 1
        return 0

    def _act(self) -> None:
        if (chance := self.world.chances.renewed) and self.random.random() < chance:
            self.renew()
        elif (chance := self.world.chances.made_up) and self.random.random() < chance:
            self.random.choice((self.transact_alone, self.transact_alone, self.consume_alone))()
        else:
            self.random.choice(self.acts)(self)

    def renew(self) -> None:
        """Renew a log that lost records, as an operator does in another process while the others go on."""
        self._begin_anew()
        if self.decisions.lost() is not None:
            self.decisions.renew()
            self.world.told["renewed"] += 1

    def _begin_anew(self) -> None:
        self.decisions = Decisions(
            _StepLog(self),
            timeout=30,
            lifetime=self.random.choice((30, 300)),
            host=self.name,
            tidy_after=self.random.choice((5, 12, 10_000)),
            clock=lambda: self.world.now,
            timing=self.world.timing,
        )
        self.opening: Opening | None = None
        self.run: Opening | None = None
        self.made_up: str | None = None
        self.known: tuple[dict[Any, Position], Position] | None = None

    # --- what a process does ----------------------------------------------------------------------------------------

    def open(self) -> None:
        self.opening = self.decisions.open("X")
        self._learn()

    def _learn(self) -> None:
        """Check the commits that earlier owners may have left: all are committed, and the last commit is among them."""
        opening = self.opening
        assert opening is not None
        found = {transaction for transaction, _ in self.decisions.ledger("X").claims(Deadline(30))}
        now, kept, end = int(self.world.now * 1000), self.world.log.begin(), self._end()
        self.world.told["learnt"] += len(found)

        def check(oracle: Oracle) -> str | None:
            last = oracle.last_commit("X", opening.position, now, kept)
            false = [id for id in found if not oracle.is_committed(id)]
            overtaken = not oracle.is_newest(_under(opening), end)
            if false or not (last is None or last in found or overtaken):
                return f"{self.name} learnt that the owners before committed {found}: {false} is false, {last} the last"
            return None

        self._check(check, opening.position)

    def transact(self) -> None:
        """Begin a transaction, let others know of it, prepare it or not, and commit it as its owner."""
        if self.opening is None:
            self.open()
        opening = self.opening
        begin = self.decisions.begin(opening=opening)
        token = Token(f"t{self.random.getrandbits(40):x}", "X", begin)
        self.world.tokens.append(token)
        if self.random.random() < 0.5:
            self.decisions.ledger("X").record("prepare", token.id, {}, Deadline(30))
            token.prepared = True
            self._expect_prepared(token)
        if self.random.random() < 0.7:
            self._claim(token.id, Decision.COMMIT, begin=begin, opening=opening)

    def resolve(self) -> None:
        """Decide somebody's transaction from outside: anything if it is prepared, ABORT if not."""
        if token := self._some_token():
            choice = self.random.choice(list(Decision)[:2]) if token.prepared else Decision.ABORT
            if token.acks and choice is Decision.COMMIT:
                self._commit_acks(token)
            else:
                self._claim(token.id, choice, begin=token.begin)

    def ask(self) -> None:
        if token := self._some_token():
            self._read(token.id, token.begin)

    def ask_about_preparing(self) -> None:
        if token := self._some_token():
            seen = self._end()
            count = len(self.decisions.ledger(token.owner, begin=token.begin).find(token.id, Deadline(30)))
            has_all = lambda oracle: count >= len(oracle.notes((token.owner,), token.id, seen))  # noqa: E731
            self._expect(has_all, f"{self.name} missed a prepare record of {token.id}", token.begin["at"])

    def batch(self) -> None:
        """Act as a run of a query: open, claim a batch, sometimes mark the batch as done."""
        if self.run is None:
            self.run = self.decisions.open("q", name=f"run-{self.random.randrange(4)}")
        id = ("q", self.random.randrange(3), self.random.randrange(2))
        if self._claim(id, self.random.choice(list(Decision)[:2]), opening=self.run) and self.random.random() < 0.15:
            self.decisions.done("q", id[1])

    def free(self) -> None:
        self._claim(("free", self.random.randrange(4)), self.random.choice(list(Decision)[:2]))

    def ask_about_batch(self) -> None:
        self._read(self.random.choice([("q", self.random.randrange(3), 0), ("free", self.random.randrange(4))]), None)

    def consume(self) -> None:
        """Read where the group stands, and acknowledge from there; or somebody else aborts that in the meantime."""
        if self.opening is None:
            self.open()
        self._acknowledge(self.decisions.ledger("X"), "X")

    def _acknowledge(self, ledger: Ledger, owner: str) -> None:
        deadline = Deadline(30)
        if self.known is None or self.random.random() < 0.6:
            self.known = self._look()
        known = self.known
        token = Token(f"c{self.random.getrandbits(40):x}", owner, dict(ledger.begin(deadline)))
        self.world.tokens.append(token)
        data = self._data()
        places = self.random.choice(([("a", 0)], [("a", 0), ("b", 0)]))
        acks = [self._ack(place, known) for place in places]
        held = {place: held for _, place, held in ledger.holds(deadline)}
        for holder in [held[place] for place in places if place in held]:
            if holder.expires_at > self.world.now * 1000:
                self.world.told["held"] += 1
                return
            ledger.claim(holder.transaction, Decision.ABORT, self._data(), deadline, log=holder.log)
        if self.random.random() < 0.2:
            self._prepare_acks(ledger, token, acks)
            return
        try:
            claim = ledger.claim(token.id, Decision.COMMIT, data, deadline, log=token.begin, acks=acks)
        except errors.Conflict:
            claim = ledger.claim(token.id, Decision.ABORT, data, deadline, log=token.begin)
            self.world.told["Conflict"] += 1
        self._learnt(token, claim)

    def _prepare_acks(self, ledger: Ledger, token: Token, acks: Sequence[Ack]) -> None:
        """Prepare a transaction that acknowledges. It is prepared if it then holds the partitions where they stood."""
        deadline, expires_at = Deadline(30), int(self.world.now * 1000) + 20_000
        listed = [[ack.group, *ack.partition, list(ack.first), list(ack.end)] for ack in acks]
        data = {"acks": listed, "log": token.begin, "expires_at": expires_at}
        ledger.record("prepare", token.id, data, deadline)
        positions, read_up_to = ledger.positions("g", deadline)
        held, seen = {place: held for _, place, held in ledger.holds(deadline)}, (read_up_to[0] + 1,)
        holders = {place: holder.transaction for place, holder in held.items()}
        self._expect(
            lambda oracle: all(id in oracle.held(seen).get(("g", place), ()) for place, id in holders.items()),
            f"{self.name} saw {holders} hold partitions, and others did",
            token.begin["at"],
        )
        if all(
            holders.get(ack.partition) == token.id and positions.get(ack.partition, (0,)) == ack.first for ack in acks
        ):
            token.prepared, token.acks, token.expires_at = True, acks, expires_at
        else:
            ledger.claim(token.id, Decision.ABORT, self._data(), deadline, log=token.begin)

    def _commit_acks(self, token: Token) -> None:
        """Commit a prepared transaction that acknowledges. Until its time is over, nobody else moves the group."""
        ledger, deadline, on_time = self.decisions.ledger(token.owner), Deadline(30), False
        while True:
            positions, read_up_to = ledger.positions("g", deadline)
            acks = [replace(ack, read_up_to=read_up_to) for ack in token.acks]
            on_time = self.world.now * 1000 < token.expires_at
            try:
                if any(positions.get(ack.partition, (0,)) != ack.first for ack in acks):
                    claim = ledger.claim(
                        token.id, Decision.ABORT, self._data("moved" if on_time else ""), deadline, log=token.begin
                    )
                else:
                    claim = ledger.claim(token.id, Decision.COMMIT, self._data(), deadline, log=token.begin, acks=acks)
                break
            except errors.Conflict:
                self.world.told["again"] += 1
        if claim.data["bulk"] == "moved":
            self.world.findings.append(f"{self.name} could not commit {token.id}, which held its partitions")
        self.world.told["held to the end"] += 1
        self._learnt(token, claim)

    def _data(self, bulk: str | None = None) -> dict[str, Any]:
        return {"by": self.name, "bulk": self.random.choice(BULKS) if bulk is None else bulk}

    def _learnt(self, token: Token, claim: LedgerClaim) -> None:
        self._expect(
            lambda oracle: (winner := oracle.winner(token.id, token.begin)) and winner.decision is claim.decision,
            f"{self.name} was told {claim.decision} about {token.id}, which does not count",
            token.begin["at"],
        )

    def transact_alone(self) -> None:
        """Act as a process without an id: make one up, which no other process opens, and prepare or commit."""
        ledger, owner = self._alone()
        token = Token(f"m{self.random.getrandbits(40):x}", owner, dict(ledger.begin(Deadline(30))))
        self.world.tokens.append(token)
        try:
            if self.random.random() < 0.6:
                ledger.record("prepare", token.id, {}, Deadline(30))
                token.prepared = True
                self._expect_prepared(token)
            if self.random.random() < 0.7:
                data = self._data()
                self._learnt(token, ledger.claim(token.id, Decision.COMMIT, data, Deadline(30), log=token.begin))
            newest = ledger.newest_opening(Deadline(30))
        except errors.Fenced:
            newest = None
        if newest is None or newest[0] != owner:
            self.world.findings.append(f"{self.name} was called fenced from {owner}, which nobody else opens")
        self.world.told["made up"] += 1

    def consume_alone(self) -> None:
        self._acknowledge(*self._alone())

    def _alone(self) -> tuple[Ledger, str]:
        owner = self.made_up or f"made-up-{self.random.getrandbits(40):x}"
        ledger = self.decisions.ledger(owner, made_up=True)
        if self.made_up is None:
            ledger.opened({}, Deadline(30))
            self.made_up = owner
        return ledger, owner

    def _ack(self, place: Any, known: tuple[dict[Any, Position], Position]) -> Ack:
        first = known[0].get(place, (0,))
        return Ack("g", place, first, (first[0] + self.random.randrange(1, 9),), known[1])

    def _look(self) -> tuple[dict[Any, Position], Position]:
        known = self.decisions.ledger("g").positions("g", Deadline(30))
        positions, behind = known[0], (known[1][0] + 1,)
        self.world.told["looked"] += 1

        def check(oracle: Oracle) -> str | None:
            stands = {place: ranges[-1][1] for (_, place), ranges in oracle.acknowledged(behind).items()}
            return None if stands == positions else f"{self.name} saw the group at {positions}, it stood at {stands}"

        self._check(check, known[1])
        return known

    def tidy(self) -> None:
        self.decisions.tidy()

    def die(self) -> None:
        raise Killed

    acts = (open, transact, transact, transact, resolve, resolve, ask, ask_about_preparing, batch, batch, free,
            ask_about_batch, consume, consume, consume, consume, tidy, die)  # fmt: skip

    # --- what it was told, to be judged at the end ------------------------------------------------------------------

    def _some_token(self) -> Token | None:
        return self.random.choice(self.world.tokens) if self.world.tokens else None

    def _end(self) -> Position:
        return (self.world.log.next,)

    def _check(self, check: Callable[[Oracle], str | None], at: Iterable[int] | None = None) -> None:
        """`at` is a position in the time that it was told about; without one that which this process knows of."""
        renewed = state_of(self.decisions).completeness.renewed
        now = renewed.position if renewed else ()
        self.world.checks.append((now if at is None else tuple(at), check))

    def _expect(self, holds: Callable[[Oracle], Any], otherwise: str, at: Iterable[int] | None = None) -> None:
        """Make the finding `otherwise` if this does not hold; for `at` see `_check`."""
        self._check(lambda oracle: None if holds(oracle) else otherwise, at)

    def _claim(self, id: Any, decision: Decision, **how: Any) -> Claim | None:
        try:
            claim = self.decisions.claim(id, decision, self._data(), **how)
        except errors.Fenced:
            at = self._end()
            self._expect(
                lambda oracle: not oracle.is_newest(_under(how["opening"]), at),
                f"{self.name} was called fenced about {id}, but it is the newest owner",
                how["opening"].position,
            )
            raise
        except errors.InvalidState:
            at = self._end()
            self._expect(lambda oracle: oracle.is_done(id, at), f"{id} was called done and is not")
            raise
        self._saw(id, how.get("begin"), claim)
        return claim

    def _read(self, id: Any, begin: dict[str, Any] | None) -> None:
        seen = self._end()
        reading = self.decisions.read(id, begin=begin)
        if reading.claim is not None:
            self._saw(id, begin, reading.claim)
        elif reading.done:
            self._expect(lambda oracle: oracle.is_done(id, self._end()), f"{id} was called done and is not")
        else:
            self.world.told["undecided"] += 1
            told = f"{self.name} saw no decision about {id} where there was one"
            at = None if begin is None else begin["at"]
            self._expect(lambda oracle: not oracle.winner(id, begin, seen), told, at)

    def _saw(self, id: Any, begin: dict[str, Any] | None, claim: Claim) -> None:
        self.world.told[claim.decision.name] += 1
        data = self.world.data.setdefault(claim.nonce, claim.data)
        if data != claim.data or claim.data.keys() != {"by", "bulk"}:
            self.world.findings.append(f"the data of the claim on {id} is not the same for all")

        def check(oracle: Oracle) -> str | None:
            winner = oracle.winner(id, begin)
            if winner is not None and (winner.nonce, winner.decision) == (claim.nonce, claim.decision):
                return None
            return f"{self.name} was told {claim.decision} at {claim.position} about {id}, which does not count"

        self._check(check, claim.position)

    def _expect_prepared(self, token: Token) -> None:
        otherwise = f"{self.name} was told that {token.id} is prepared, but its record stands behind a newer opening"
        self._expect(lambda oracle: oracle.notes((token.owner,), token.id, self._end()), otherwise, token.begin["at"])


def _under(opening: Opening) -> OpeningRef:
    return OpeningRef((str(opening.id),), opening.name, opening.number)


class _StepLog(DecisionLog):
    """The world's log as one process reaches it: every operation is a step, and some go wrong."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._log = actor.world.log
        self.origin = actor.world.origin
        self.numbered = actor.world.numbered

    def _step(self, may_fail: bool = True) -> None:
        self._actor.step()
        chances, draw = self._actor.world.chances, self._actor.random.random()
        if draw < chances.killed:
            raise Killed
        if may_fail and draw < chances.killed + chances.refused:
            raise errors.BrokerUnavailable("refused")

    def begin(self, deadline: Deadline) -> Position | None:
        self._step()
        return self._log.begin()

    def end(self, deadline: Deadline) -> Position | None:
        self._step()
        return self._log.end()

    def append(self, record: bytes, deadline: Deadline) -> Position:
        self._step()
        world, rng = self._actor.world, self._actor.random
        if rng.random() >= world.chances.unclean:
            position = self._log.append(record)
            self._step(may_fail=False)
            return position
        if rng.random() < world.chances.echo:
            world.echoes.append(record)
        if rng.random() < 0.5:
            self._log.append(record)
        self._step(may_fail=False)
        raise errors.OutcomeUnknown("no answer")

    def read(self, first: Position | None, last: Position | None, deadline: Deadline) -> Records:
        self._step()
        # In pieces, as brokers do: others may append and trim while a reader is on its way.
        at = first
        while True:
            piece = list(self._log.read(at, last))[:7]
            yield from piece
            if len(piece) < 7:
                return
            at = (piece[-1][0][0] + 1,)
            self._step()

    def trim(self, before: Position, deadline: Deadline) -> None:
        self._step()
        # Some brokers drop less than they may, or nothing yet.
        droppable = [position for position, _ in self._log.records if position <= before]
        if droppable and self._actor.random.random() < 0.9:
            self._log.trim(self._actor.random.choice([before, before, *droppable]))


def explore(seeds: Iterable[int], chances: Chances, stop: bool = False, **how: Any) -> tuple[list[str], Counter[str]]:
    """Run many worlds: everything that was wrong, and what was told how often. `stop`: at the first finding."""
    findings: list[str] = []
    told: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, chances, **how).run()
        findings += [f"seed {seed}: {finding}" for finding in world.findings]
        told += world.told
        if stop and findings:
            break
    return findings, told
