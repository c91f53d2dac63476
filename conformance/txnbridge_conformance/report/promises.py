"""The promises of txnbridge in a report: the findings that break each promise, and how its verdict is found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from txnbridge_conformance.checker import Findings
from txnbridge_conformance.run.plan import WORKLOADS, floor_of
from txnbridge_conformance.run.verdict import OF_PARTITION_ORDER, Judgement


@dataclass(frozen=True)
class Promise:
    """One promise. `findings` are the names of findings that break it.

    A run does not test the promise if one of its counts `needs` is 0, and is too thin for it if one is below its least
    number by `floor_of`, else below 3.
    """

    name: str
    text: str
    findings: tuple[str, ...]
    needs: tuple[str, ...]
    capability: str  # the broker does not make the promise if it declares this capability absent
    shares_findings: bool = False  # each finding breaks another promise, too, and this one only if it was tried


PROMISES = (
    Promise(
        "atomic",
        "Messages to any topics and partitions, and acknowledgements, become visible together or not at all.",
        ("torn-transaction", "half-ack"),
        ("over topics", "killed and committed", "killed and aborted"),
        "atomic-topics",
    ),
    Promise(
        "spanning",
        "A transaction over several brokers is committed on all of them, or on none.",
        ("torn-span",),
        ("spans", "killed and committed", "killed and aborted"),
        "resolve-anywhere",
    ),
    Promise(
        "isolated",
        "Nobody reads a message of a transaction before its commit, or of an aborted one.",
        ("G1a", "early-read", "precommitted-read", "phantom-message"),
        ("aborted", "read"),
        "isolation",
    ),
    Promise(
        "in order",
        "Each message is in the partition that its sender chose, and each partition has one order for all readers.",
        ("wrong-partition", "group-skip", *OF_PARTITION_ORDER),
        ("committed", "read"),
        "partition-order",
    ),
    Promise(
        "exactly once",
        "Each committed message is stored once, as it was sent, and a group processes it in one committed transaction.",
        ("lost-write", "unseen", "duplicate", "changed", "replay-duplicate"),
        ("committed", "read", "acks with outputs", "taken again"),
        "atomic-ack",
    ),
    Promise(
        "durable",
        "Committed messages survive a kill of the broker.",
        ("lost-write", "unseen"),
        ("broker kills",),
        "survives-broker-kill",
        shares_findings=True,
    ),
    Promise(
        "fenced",
        "A fenced owner of a transactional id publishes nothing more, and only a newer owner fences it.",
        ("zombie-write", "false-fence"),
        ("fenced", "takeovers"),
        "fencing",
    ),
    Promise(
        "resolvable",
        "Any process ends a prepared transaction by its token, and all learn the same outcome.",
        ("split-decision", "lost-prepare"),
        ("prepared", "finished", "finished by others"),
        "resolve-anywhere",
    ),
    Promise(
        "honest", "A returned outcome is the true one.", ("outcome-lie",), ("committed", "aborted"), "status-lookup"
    ),
    Promise(
        "half messages",
        "A half message is published if and only if its local work was done.",
        ("orphan-half", "phantom-commit", "checkback-lie"),
        ("published", "dropped", "killed undecided"),
        "half-messages",
    ),
    Promise(
        "bounded",
        "Each call ends by its deadline, and no transaction stays open.",
        ("hang", "crash", "stuck-reader"),
        ("overslept",),
        "deadline",
    ),
)


@dataclass(frozen=True)
class Row:
    """A promise, its verdict ("kept", "broken", "declared absent", "too thin" or "not tested"), and the reason."""

    promise: Promise
    verdict: str
    evidence: str


def rows(findings: Findings, judgement: Judgement, absent: Collection[str]) -> list[Row]:
    """Return the verdict on each promise. `absent` are the capabilities that the broker declares absent."""
    return [Row(promise, *_judged(promise, findings, judgement, absent)) for promise in PROMISES]


def _judged(promise: Promise, findings: Findings, judgement: Judgement, absent: Collection[str]) -> tuple[str, str]:
    counts = judgement.counts
    broken = [name for name in promise.findings if name in judgement.broken]
    missing = [name for name in promise.needs if not counts[name]]
    times = ", ".join(f"{findings.counts[name]:,} {name}" for name in broken)
    if promise.capability in absent and (promise.shares_findings or not broken):
        return "declared absent", times or f"the broker has no {promise.capability}"
    if broken and not (missing and promise.shares_findings):
        return "broken", times
    if missing:
        return "not tested", f"no {', no '.join(missing)}"
    tried = ", ".join(f"{counts[name]:,} {name}" for name in promise.needs)
    least = {"broker kills": 1, **floor_of(WORKLOADS)}  # a kill concerns all that was committed before it
    thin = any(counts[name] < least.get(name, 3) for name in promise.needs)
    return "too thin" if thin else "kept", tried
