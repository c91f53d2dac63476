"""The conclusions about ids that no token carries, from a decision log's records, and what snapshots store of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.conclusions import (
    CountingClaim,
    KnownOpening,
    Openings,
    PartitionHold,
    UnfinishedCommit,
    opening_json,
)
from txnbridge._decisions.records import (
    Claimed,
    EvidenceBegin,
    GroupPartition,
    IdPath,
    Opened,
    PreparedAcks,
    read_path,
    read_position,
    read_under,
)


@dataclass
class IdFold:
    """The owners of ids, the claims on ids that no token carries, and groups' positions, by a decision log's records.

    These conclusions are proven only if no earlier record of the log was missed.
    """

    openings: Openings = field(default_factory=Openings)
    names: dict[IdPath, set[str]] = field(default_factory=dict)  # every name that a caller ever gave to an opening
    done: dict[IdPath, int] = field(default_factory=dict)
    claims: dict[IdPath, CountingClaim] = field(default_factory=dict)
    groups: dict[GroupPartition, Position] = field(default_factory=dict)  # each group's next position to read
    # Commits that are decided but that their authors may not have carried out at the broker: the last commit of each
    # writer of an id's newest owner, and the last commit that acknowledged on each partition of a group.
    commits: dict[IdPath, dict[str | int | None, UnfinishedCommit]] = field(default_factory=dict)
    last_ackers: dict[GroupPartition, UnfinishedCommit] = field(default_factory=dict)
    # Undecided prepared transactions that acknowledge on a partition of a group, oldest first: the first one has it.
    holds: dict[GroupPartition, list[PartitionHold]] = field(default_factory=dict)

    def open(self, position: Position, record: Opened) -> bool:
        """Note that a process has opened an id; return whether this opening counts."""
        if not self.openings.is_next(record.under):
            # The record is a later copy of the newest opening (it counts), or another opening took its number first.
            return self.openings[record.under.id].under == record.under
        self.openings[record.under.id] = KnownOpening(record.under, position, record.host, record.data)
        if record.named:
            self.names.setdefault(record.under.id, set()).add(record.under.name)
        return True

    def claim(self, record: Claimed, claim: CountingClaim) -> bool:
        """Note a claim (a decision about an id); return whether it counts: whether it is the id's first valid one."""
        if self.is_done(record.id) or (record.by is not None and not self.openings.is_newest(record.by)):
            return False
        self.claims.setdefault(record.id, claim)
        return True

    def commit(self, record: Claimed, commit: UnfinishedCommit) -> None:
        """Note a commit, with a token, that may not be carried out yet, and advance its groups' positions."""
        if record.by is None or self.openings.is_newest(record.by):
            self.keep_unfinished(record, commit)
            if record.acked is not None:
                self.groups.update({each.place: each.end for each in record.acked.ranges})

    def keep_unfinished(self, record: Claimed, commit: UnfinishedCommit) -> None:
        """Keep a decided commit as the last one of its writer, and of each partition on which it acknowledges.

        Earlier commits need not be kept: a writer publishes one transaction's messages before it decides to commit the
        next, and a new owner of an id first publishes what the former owner had decided to commit.
        """
        if (by := record.by) is not None:
            last = self.commits.get(by.id, {})
            self.commits[by.id] = {writer: other for writer, other in last.items() if other.claim.by == by}
            writer = (commit.claim.body or {}).get("writer")
            self.commits[by.id][writer if isinstance(writer, str | int) else None] = commit
        if record.acked is not None:
            self.last_ackers.update({each.place: commit for each in record.acked.ranges})

    def hold(self, id: IdPath, prepared: PreparedAcks) -> None:
        """Note that a prepared transaction acknowledges on partitions, where no other transaction may until it ends.

        The author of a later prepare record on the same partition finds that, and aborts its transaction.
        """
        hold = PartitionHold(id, prepared.begin, prepared.expires_at)
        for place in prepared.places:
            if hold not in (known := self.holds.setdefault(place, [])):
                known.append(hold)

    def release(self, id: IdPath, begin: EvidenceBegin) -> None:
        """Note that a prepared transaction is decided: others may acknowledge on its partitions again."""
        left = ((place, [h for h in held if (h.id, h.begin) != (id, begin)]) for place, held in self.holds.items())
        self.holds = {place: held for place, held in left if held}

    def mark_done(self, id: IdPath, up_to: int) -> None:
        """Note that the ids under `id` up to the number `up_to` are done, and drop the claims on them."""
        self.done[id] = max(up_to, self.done.get(id, up_to))
        for key in [key for key in self.claims if key[: len(id)] == id and self.is_done(key)]:
            del self.claims[key]

    def forget(self, since: Position) -> None:
        """Drop from memory owners and commits before `since` of random ids that processes made up for themselves."""
        self.openings = self.openings.kept(since)
        left = ((place, [hold for hold in held if hold.begin.at >= since]) for place, held in self.holds.items())
        self.holds = {place: held for place, held in left if held}
        for id, last in list(self.commits.items()):
            claims = [commit.claim for commit in last.values()]
            if all(claim.by and claim.by.made_up and claim.position < since for claim in claims):
                del self.commits[id]

    def is_done(self, id: IdPath) -> bool:
        """Return whether this id is marked done: its decision is carried out. A mark is for all ids up to a number."""
        for length in range(1, len(id)):
            number = id[length]
            if isinstance(number, int) and number <= self.done.get(id[:length], number - 1):
                return True
        return False

    def to_json(self, log: str, since: Position | None = None) -> dict[str, Any]:
        """Return the conclusions about ids as the body of a snapshot.

        Left out are expired transactions' commits and acknowledgements before `since`, and owners of made-up ids.
        """
        return {
            "log": log,
            "opened": [
                [opening_json(o.under), list(o.position), o.host, o.data, sorted(self.names.get(id, ()))]
                for id, o in self.openings.kept(since).items()
            ],
            "done": [[list(id), up_to] for id, up_to in self.done.items()],
            "claims": [
                [list(id), list(c.position), c.nonce, c.decision.value, c.by and opening_json(c.by), c.body]
                for id, c in self.claims.items()
            ],
            "groups": [[group, *partition, list(at)] for (group, partition), at in self.groups.items()],
            "holds": [
                [group, *partition, *hold.to_json()]
                for (group, partition), held in self.holds.items()
                for hold in held
                if hold.begin.at >= (since or ())
            ],
            **self._commits_json(since or ()),
        }

    def _commits_json(self, since: Position) -> dict[str, Any]:
        owners = [(writer, c) for last in self.commits.values() for writer, c in last.items()]
        recent = {c.claim.nonce: c for _, c in [*owners, *self.last_ackers.items()] if c.claim.position >= since}
        index = {nonce: number for number, nonce in enumerate(recent)}  # one commit may acknowledge on many partitions
        return {
            "commits": [commit.to_json() for commit in recent.values()],
            "owners": [[writer, index[c.claim.nonce]] for writer, c in owners if c.claim.nonce in index],
            "movers": [
                [group, *partition, index[c.claim.nonce]]
                for (group, partition), c in self.last_ackers.items()
                if c.claim.nonce in index
            ],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> IdFold:
        """Return the conclusions about ids that a snapshot's body stores. Raise an error if the body is damaged."""
        fold = cls()
        for under_json, position, host, data, names in body["opened"]:
            under = read_under(under_json)
            fold.openings[under.id] = KnownOpening(under, read_position(position), host, data)
            if names:
                fold.names[under.id] = set(names)
        fold.done = {read_path(id): int(up_to) for id, up_to in body["done"]}
        for id, position, nonce, decision, by, data in body["claims"]:
            claim = CountingClaim(read_position(position), nonce, Decision(decision), by and read_under(by), data)
            fold.claims[read_path(id)] = claim
        for group, topic, number, position in body["groups"]:
            fold.groups[str(group), (str(topic), int(number))] = read_position(position)
        for group, topic, number, *hold in body["holds"]:
            fold.holds.setdefault((str(group), (str(topic), int(number))), []).append(PartitionHold.from_json(hold))
        fold._read_commits(body)
        return fold

    def _read_commits(self, body: Mapping[str, Any]) -> None:
        commits = [UnfinishedCommit.from_json(each) for each in body["commits"]]
        for writer, index in body["owners"]:
            commit = commits[index]
            assert commit.claim.by is not None
            self.commits.setdefault(commit.claim.by.id, {})[writer] = commit
        for group, topic, number, index in body["movers"]:
            self.last_ackers[str(group), (str(topic), int(number))] = commits[index]
