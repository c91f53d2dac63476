"""The findings of a history, and the meaning of each finding's name.

A name that Jepsen's checkers of queues use, too, has Jepsen's meaning. docs/conformance.md has all definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

MEANINGS = {
    # about messages
    "lost-write": "a committed message was not read, although a later position of its partition was",
    "unseen": "a committed message was not read by a reader that read everything",
    "duplicate": "one message is at two or more positions",
    "foreign-duplicate": "a reader of another client received a copy of a message that txnbridge's readers drop",
    "inconsistent-offsets": "one position of a partition holds two or more messages",
    "phantom-message": "a message was read that no process of the history sent",
    "changed": "a message was read with another body, key, header or timestamp than it was sent with",
    "wrong-partition": "a message was read from another partition than its sender, or its key, chose",
    "G1a": "a message of an aborted transaction was read",
    "torn-transaction": "a reader that read everything read a part of a transaction's messages",
    "torn-span": "a reader that read everything read only some parts of a span",
    "zombie-write": "a transaction of a fenced owner took effect",
    "false-fence": "an owner was fenced, although nobody had opened its transactional id since",
    "early-read": "a message was read before any call could have committed its transaction",
    "precommitted-read": "a transaction read a message that it had sent itself",
    # about acknowledgements
    "replay-duplicate": "a group processed one message in two committed transactions",
    "half-ack": "a group's position has passed a message that no committed transaction acknowledged",
    # about order
    "group-skip": "a group's member skipped messages of a partition that no other member had begun to acknowledge",
    "int-poll-skip": "within one call a reader skipped messages of a partition",
    "int-nonmonotonic-poll": "within one call a reader received a partition's messages again or backwards",
    "poll-skip": "between two calls a reader skipped messages of a partition",
    "nonmonotonic-poll": "between two calls a reader received a partition's messages again or went back",
    "int-send-skip": "another message lies between two messages that one call sent to a partition",
    "int-nonmonotonic-send": "within one call a later message lies before an earlier one",
    "nonmonotonic-send": "a later call's message lies before one of its thread's earlier calls, whose result is known",
    # about isolation
    "G0": "transactions that each wrote before the other",
    "G0-realtime": "a write order that contradicts the order in which transactions ended and began",
    "G1c": "transactions that each read from, or wrote after, the other",
    "G1c-realtime": "reads and writes that contradict the order in which transactions ended and began",
    # about outcomes
    "split-decision": "two calls returned different outcomes, or a decision was returned that nobody claimed",
    "lost-prepare": "a prepared transaction was aborted before its hold had passed, and nobody asked for that",
    "outcome-lie": "a transaction's returned outcome is contradicted by what readers read",
    "orphan-half": "a half message whose local work succeeded was not published",
    "checkback-lie": "a check-back showed other messages than its transaction had stored",
    "phantom-commit": "a half message whose local work was not done was published",
    "hang": "a call took longer than its deadline allows, or a transaction outlived its deadline or hold",
    "crash": "a process of the run crashed, or did not stop when it was asked to",
    "stuck-reader": "a reader could not read up to the end of a partition in the time it had",
}


_LOSSES = ("inconsistent-offsets", "torn-transaction", "torn-span", "orphan-half")

# By kind of finding: those that it is a consequence of, if they are about the same call or message.
CAUSES = {
    **dict.fromkeys(("lost-write", "unseen"), _LOSSES),
    "duplicate": ("wrong-partition",),
    "inconsistent-offsets": ("duplicate", "wrong-partition"),
    "G1a": ("zombie-write", "phantom-commit", "torn-span"),
    "torn-transaction": ("inconsistent-offsets", "zombie-write", "G1a", "wrong-partition"),
    "torn partition": ("inconsistent-offsets", "lost-write", "unseen", "zombie-write", "G1a", "wrong-partition"),
    "early-read": ("zombie-write",),
    "phantom-commit": ("zombie-write",),
    "orphan-half": ("torn-transaction",),
    "checkback-lie": ("changed",),
    "outcome-lie": ("zombie-write", "G1a", "lost-write", "unseen"),
    "half-ack": ("group-skip", "lost-write", "unseen"),
    "replay-duplicate": ("zombie-write",),
    "lost-prepare": ("split-decision",),
    "hang": ("lost-write", "unseen"),
    **dict.fromkeys(
        ("int-poll-skip", "poll-skip", "int-nonmonotonic-poll", "nonmonotonic-poll"),
        ("lost-write", "unseen", "inconsistent-offsets", "duplicate", "wrong-partition", "early-read"),
    ),
    **dict.fromkeys(
        ("int-send-skip", "int-nonmonotonic-send", "nonmonotonic-send", "G0", "G0-realtime"),
        ("inconsistent-offsets", "duplicate", "wrong-partition", "zombie-write"),
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation that a check found: its name, a sentence, and the operations and values that show it."""

    name: str
    text: str
    operations: tuple[int, ...] = ()  # by `Operation.order`
    values: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The finding's name in `CAUSES`: its own; "torn partition" for a transaction torn within a partition."""
        return "torn partition" if self.name == "torn-transaction" and self.values else self.name

    @property
    def subjects(self) -> Iterator[object]:
        """The calls and messages that the finding is about. They link it with the findings that caused it."""
        every = self.name in ("lost-write", "unseen", "inconsistent-offsets", "G0", "G0-realtime")
        yield from self.operations if every else self.operations[:1]
        yield from self.values


@dataclass
class Findings:
    """The findings of one history: `all` of them, and in `cases` the first ones of each name, at most `most`."""

    most: int = 20
    all: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    fate: Sequence[int] | None = None  # of each operation, by full reads, too

    def add(self, name: str, text: str, operations: Iterable[int] = (), values: Iterable[str] = ()) -> None:
        """Add a finding; its name must be one of `MEANINGS`.

        `operations` are the numbers of the history's calls that show it, `values` the messages that it is about.
        """
        assert name in MEANINGS, name
        self.counts[name] = self.counts.get(name, 0) + 1
        self.all.append(Finding(name, text, tuple(operations), tuple(values)))

    @property
    def cases(self) -> list[Finding]:
        found: dict[str, list[Finding]] = {name: [] for name in self.names}
        for case in self.all:
            if len(found.get(case.name, [None] * self.most)) < self.most:
                found[case.name].append(case)
        return [case for cases in found.values() for case in cases]

    @property
    def names(self) -> list[str]:
        """The names of which there is at least one finding, in the order of `MEANINGS`."""
        return [name for name in MEANINGS if name in self.counts]

    def causes(self) -> dict[int, int]:
        """Return, for findings that are consequences of another one, the cause of each; both are indexes in `all`."""
        wanted = {name for names in CAUSES.values() for name in names}
        known: dict[tuple[str, object], int] = {}
        for at, case in enumerate(self.all):
            if case.kind in wanted:
                for subject in case.subjects:
                    known.setdefault((case.kind, subject), at)
        found = {}
        for at, case in enumerate(self.all):
            keys = ((name, subject) for name in CAUSES.get(case.kind, ()) for subject in case.subjects)
            if (cause := next((known[key] for key in keys if key in known), None)) is not None:
                found[at] = cause
        return found
