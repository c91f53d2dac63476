"""The findings of a history, and the meaning of each finding's name.

A name that Jepsen's checkers of queues use, too, has Jepsen's meaning. docs/conformance.md has all definitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MEANINGS = {
    # about messages
    "lost-write": "a committed message was not read, although a later position of its partition was",
    "unseen": "a committed message was not read by a reader that read everything",
    "duplicate": "one message is at two or more positions of its partition",
    "foreign-duplicate": "a reader of another client received a copy of a message that txnbridge's readers drop",
    "inconsistent-offsets": "one position of a partition holds two or more messages",
    "phantom-message": "a message was read that no process of the history sent",
    "wrong-partition": "a message was read from another partition than its sender chose",
    "G1a": "a message of an aborted transaction was read",
    "torn-transaction": "a reader that read everything read a part of a transaction's messages",
    "zombie-write": "a transaction of a fenced owner took effect",
    "early-read": "a message was read before any call could have committed its transaction",
    "precommitted-read": "a transaction read a message that it had sent itself",
    # about acknowledgements
    "replay-duplicate": "a group processed one message in two committed transactions",
    "half-ack": "a group's position has passed a message that no committed transaction acknowledged",
    # about order
    "group-skip": "a group's member skipped messages of a partition that no member had begun to acknowledge",
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
    "split-decision": "two calls returned different outcomes of one transaction",
    "stale-status": "a transaction was said to be prepared after its outcome had been returned",
    "lost-prepare": "a prepared transaction was aborted before its hold had passed, and nobody asked for that",
    "outcome-lie": "a transaction's returned outcome is contradicted by what readers read",
    "orphan-half": "a half message whose local work succeeded was not published",
    "checkback-lie": "a check-back showed other messages than its transaction had stored",
    "phantom-commit": "a half message whose local work was not done was published",
    "hang": "a call took longer than its deadline allows",
    "crash": "a process of the run crashed, or did not stop when it was asked to",
    "stuck-reader": "a reader could not read up to the end of a partition in the time it had",
}


@dataclass(frozen=True)
class Finding:
    """One case of a violation: the violation's name, a sentence, and the operations and values that show the case."""

    name: str
    text: str
    operations: tuple[int, ...] = ()  # by `Operation.order`
    values: tuple[str, ...] = ()


@dataclass
class Findings:
    """The findings of one history. All cases are counted, and the first `most` cases of each name are kept."""

    most: int = 20
    cases: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, text: str, operations: Iterable[int] = (), values: Iterable[str] = ()) -> None:
        """Add a case of a finding; its name must be one of `MEANINGS`."""
        assert name in MEANINGS, name
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.counts[name] <= self.most:
            self.cases.append(Finding(name, text, tuple(operations), tuple(values)))

    @property
    def names(self) -> list[str]:
        """The names that have at least one case, in the order of `MEANINGS`."""
        return [name for name in MEANINGS if name in self.counts]
