"""The defects that a simulated broker, or a client on it, can have: one a history."""

from dataclasses import dataclass

# By the roles that can meet it, what goes wrong, and the findings that say so by the words of docs/conformance.md.
_DEFECTS = {
    "write own finish watch": {
        "torn-killed": ("torn across topics, the process killed in its commit", "torn-transaction"),
        "zombie-killed": ("a fenced owner commits, and is killed in the commit", "zombie-write"),
        "dirty-read": ("a message of an open transaction, committed later, is read", "early-read"),
        "late-commit": ("a prepared transaction is committed 100 s after its hold", "hang"),
        "stale-status": ("`status` returns prepared after a commit was answered", "split-decision"),
        "copy-partition": ("a message is also in another partition of its topic", "wrong-partition"),
        "copy-topic": ("a message is also in another topic", "wrong-partition"),
        "torn-told": ("torn across topics, told committed", "torn-transaction"),
        "torn-partition": ("one partition of a committed transaction is dropped", "torn-transaction"),
        "torn-prepared": ("a commit by token reaches one topic of two", "torn-transaction"),
        "lost": ("a committed message is lost", "lost-write unseen"),
        "log-truncated": ("messages are lost, their positions used again", "inconsistent-offsets"),
        "duplicate": ("a message is twice in its partition", "duplicate"),
        "changed": ("the body of a message is another one", "changed"),
        "aborted-visible": ("an aborted transaction is visible", "G1a"),
        "late-end": ("a part of an aborted transaction is committed by a late request", "G1a"),
        "swapped": ("two messages of a transaction change places in their partition", "int-nonmonotonic-send"),
        "late-stored": ("a message lies behind its thread's next transaction", "nonmonotonic-send G0-realtime"),
        "told-committed": ("an aborted transaction is told as committed", "outcome-lie lost-write unseen"),
        "told-aborted": ("a committed transaction is told as aborted", "outcome-lie G1a"),
        "zombie-told": ("a fenced owner commits, and is told committed", "zombie-write"),
        "zombie-message": ("a fenced owner's message is visible, and the owner told Fenced", "zombie-write G1a"),
        "dirty-prepared": ("a message of a prepared transaction is read before its commit", "early-read"),
        "future-read": ("a message is read before it is sent", "early-read G1c-realtime"),
        "lost-prepare": ("a prepared transaction is aborted within its hold, unasked", "lost-prepare"),
        "takeover-prepare": ("a new owner's opening aborts a prepared transaction", "lost-prepare"),
        "split": ("two calls by token return opposite outcomes", "split-decision"),
        "watch-skip": ("a reader without a group skips a message", "int-poll-skip poll-skip"),
        "watch-again": ("a reader without a group receives a message again", "int-nonmonotonic-poll nonmonotonic-poll"),
        "hanging": ("a transaction of a killed process stays open", "stuck-reader"),
        "hang-call": ("a call never returns, while its process goes on", "hang"),
        "hang-slow": ("a call returns 6 s after its deadline", "hang"),
    },
    "feed copy process finish": {
        "position-lost-killed": ("output committed, position not, the member killed in the commit", "replay-duplicate"),
        "position-moved-killed": ("position moved by the aborted transaction of a killed member", "half-ack"),
        "ack-lost": ("a committed acknowledgement without output does not count", "replay-duplicate"),
        "output-lost": ("an acknowledgement is committed, its output is not", "lost-write unseen"),
        "output-without-ack": ("a member is told Conflict, and its output is visible", "G1a"),
        "abort-moves": ("position moved by a transaction that its member aborted", "half-ack"),
        "prepared-moves": ("position moved by a prepared transaction that is aborted by its token", "half-ack"),
        "position-reset": ("a group's position is set back", "replay-duplicate"),
        "zombie-member": ("a member commits acknowledgements after its partition has moved", "replay-duplicate"),
        "group-skip": ("a group's member skips a message", "group-skip half-ack"),
    },
    "sell watch": {
        "dirty-half": ("a half message is read before its decision", "early-read"),
        "torn-half": ("half messages are published in one topic of two", "torn-transaction orphan-half"),
        "orphan-half": ("half messages whose work was done are dropped", "orphan-half"),
        "phantom-commit": ("half messages whose work was not done are published", "phantom-commit"),
        "checkback-lie": ("a check-back shows a message less", "checkback-lie"),
    },
    "span watch": {
        "torn-span": ("one part of a span is committed, the other is not", "torn-span"),
    },
    "decide": {
        "claim-split": ("two claims on an id return opposite decisions", "split-decision"),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Defect:
    """A defect: what goes wrong, the findings that are its right names, and the roles that can meet it."""

    text: str
    names: frozenset[str]
    roles: frozenset[str]


DEFECTS = {
    name: Defect(text, frozenset(findings.split()), frozenset(roles.split()))
    for roles, defects in _DEFECTS.items()
    for name, (text, findings) in defects.items()
}
