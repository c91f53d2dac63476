"""The verdict on a history: promises are kept, or broken, or the run tried too little to tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from txnbridge_conformance.checker import ABORTED, COMMITTED, Findings, fates
from txnbridge_conformance.history import History
from txnbridge_conformance.run.plan import WORKLOADS, floor_of

# Findings that a broker does not promise to avoid if it declares one of these capabilities absent.
EXCUSED_BY = {
    "torn-transaction": ("atomic-topics",),
    "half-ack": ("atomic-ack",),
    "group-skip": ("partition-order", "group-order"),
    "replay-duplicate": ("atomic-ack", "conflict"),
    "precommitted-read": ("isolation",),
    "wrong-partition": ("choose-partition",),
    "zombie-write": ("fencing",),
    "early-read": ("prepare",),
    "lost-prepare": ("prepare",),
    "lost-write": ("survives-broker-kill",),
    "unseen": ("survives-broker-kill",),
    "hang": ("deadline",),
    **dict.fromkeys(
        (
            "inconsistent-offsets",
            "int-poll-skip",
            "int-nonmonotonic-poll",
            "poll-skip",
            "nonmonotonic-poll",
            "int-nonmonotonic-send",
            "nonmonotonic-send",
            "G0-realtime",
        ),
        ("partition-order",),
    ),
}

# Findings that no broker promises to avoid: in a log, messages of transactions that run at once may interleave, and a
# long transaction may lie before another one in one partition and behind a third one in the next. Readers of txnbridge
# drop copies that a broker stores when a request comes twice; nobody can make other clients' readers drop them.
NOT_PROMISED = frozenset({"int-send-skip", "G0", "G1c", "G1c-realtime", "foreign-duplicate"})


class Verdict(Enum):
    """A run's verdict: promises kept, broken, or untested (THIN). Values are exit codes of `txnbridge conformance`."""

    KEPT = 0
    BROKEN = 1
    THIN = 2


@dataclass(frozen=True)
class Judgement:
    """The verdict on a history, with the counts of what was tried and the names of the findings."""

    verdict: Verdict
    counts: Mapping[str, int]
    missing: Mapping[str, int]  # what the floor wants, for each count below it
    broken: tuple[str, ...]  # names of findings that break a promise
    reported: tuple[str, ...]  # names of findings that no promise excludes

    @property
    def sentence(self) -> str:
        """The verdict and the most important counts, as one sentence of English."""
        c = self.counts
        others = [f"{c[name]:,} {name}" for name in ("half messages", "claims") if c[name]]
        results = f"{c['committed']:,} committed, {c['aborted']:,} aborted and {c['unknown']:,} unknown transactions"
        some = c["committed"] or c["aborted"] or c["unknown"] or not others
        tried = ", ".join([results, *others] if some else others)
        if self.verdict is Verdict.BROKEN:
            return f"Broken: {', '.join(self.broken)}, in {tried} under {c['faults']:,} faults."
        if self.verdict is Verdict.THIN:
            wanted = ", ".join(f"{c[name]:,} {name} instead of {floor:,}" for name, floor in self.missing.items())
            return f"Too thin to say: {wanted}. Run it for longer, or lower the floor."
        return f"Kept: nothing is wrong in {tried} under {c['faults']:,} faults."


def judge(history: History, findings: Findings, floor: Mapping[str, int] | None = None) -> Judgement:
    """Decide whether a history keeps the broker's promises: BROKEN if a finding breaks one, else KEPT or THIN.

    THIN means that a count of the history is below its least number in `floor`, by default the floor of the history's
    workloads. Findings break no promise if the broker declares the needed capability absent, or if no broker promises
    to avoid them.
    """
    counts = count(history)
    wanted = floor_for(history) if floor is None else floor
    missing = {name: least for name, least in wanted.items() if counts[name] < least}
    absent = declared_absent(history)
    excused = {name for name, needed in EXCUSED_BY.items() if not absent.isdisjoint(needed)} | NOT_PROMISED
    broken = tuple(name for name in findings.names if name not in excused)
    reported = tuple(name for name in findings.names if name in excused)
    verdict = Verdict.BROKEN if broken else Verdict.THIN if missing else Verdict.KEPT
    return Judgement(verdict, counts, missing, broken, reported)


def declared_absent(history: History) -> frozenset[str]:
    """Return the names of the capabilities that, by the history, the broker declares absent."""
    found: set[str] = set()
    for operation in history.operations:
        if operation.what == "declares":
            found.update(operation.fields["absent"])
    return frozenset(found)


def floor_for(history: History) -> dict[str, int]:
    """Return the least counts that a run of the history's workloads (by default "transactions") has to reach."""
    declared = [name for each in history.operations for name in each.fields.get("workloads", ())]
    return floor_of([name for name in declared if name in WORKLOADS] or ["transactions"])


def count(history: History) -> dict[str, int]:
    """Return the counts of what a run tried, by name: transactions by result, messages, faults and others."""
    results = Counter(
        operation.outcome or {"ok": "committed", "fail": "aborted", "unknown": "unknown"}[operation.result]
        for operation in history.operations
        if operation.what == "transaction"
    )
    calls = Counter(operation.what for operation in history.operations)
    fate = fates(history.operations, Findings())
    halves = Counter(fate[operation.order] for operation in history.operations if operation.what == "half")
    begun = [fault.kind for fault in history.faults if fault.phase == "begin"]
    return {
        "committed": results["committed"],
        "aborted": results["aborted"],
        "prepared": results["prepared"],
        "unknown": results["unknown"],
        "finished": calls["finish"],
        "fenced": sum(operation.fields.get("error") == "Fenced" for operation in history.operations),
        "half messages": calls["half"],
        "published": halves[COMMITTED],
        "dropped": halves[ABORTED],
        "claims": calls["claim"],
        "sent": sum(len(values) for _, _, values in history.sends),
        "read": sum(len(messages) for _, _, messages in history.polls),
        "faults": len(begun),
        "broker kills": begun.count("broker kill"),
        "crash points": len({kind for kind in begun if kind.startswith("kill at ")}),
        "processes": len(history.processes),
    }
