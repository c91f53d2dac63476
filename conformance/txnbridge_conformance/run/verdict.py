"""The verdict on a history: are the broker's promises kept, broken, or was too little tried to say?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from txnbridge_conformance.checker import Findings
from txnbridge_conformance.history import History
from txnbridge_conformance.run.plan import FLOOR

# Findings that no broker promises to avoid: in a log, messages of transactions that run at once may interleave.
NOT_PROMISED = frozenset({"int-send-skip", "G0", "G1c"})


class Verdict(Enum):
    """The verdict, with the exit code of the command."""

    KEPT = 0
    BROKEN = 1
    THIN = 2


@dataclass(frozen=True)
class Judgement:
    """The verdict on a history, with the numbers on which it rests."""

    verdict: Verdict
    counts: Mapping[str, int]
    missing: Mapping[str, int]  # what the floor wants, for each count below it
    broken: tuple[str, ...]  # names of findings that break a promise
    reported: tuple[str, ...]  # names of findings that no promise excludes

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        c = self.counts
        tried = f"{c['committed']:,} committed, {c['aborted']:,} aborted and {c['unknown']:,} unknown transactions"
        if self.verdict is Verdict.BROKEN:
            return f"Broken: {', '.join(self.broken)}, in {tried} under {c['faults']:,} faults."
        if self.verdict is Verdict.THIN:
            wanted = ", ".join(f"{c[name]:,} {name} instead of {floor:,}" for name, floor in self.missing.items())
            return f"Too thin to say: {wanted}. Run it for longer, or lower the floor."
        return f"Kept: nothing is wrong in {tried} under {c['faults']:,} faults."


def judge(history: History, findings: Findings, floor: Mapping[str, int] = FLOOR) -> Judgement:
    """Return the judgement of a history with these findings."""
    counts = count(history)
    missing = {name: least for name, least in floor.items() if counts[name] < least}
    broken = tuple(name for name in findings.names if name not in NOT_PROMISED)
    reported = tuple(name for name in findings.names if name in NOT_PROMISED)
    verdict = Verdict.BROKEN if broken else Verdict.THIN if missing else Verdict.KEPT
    return Judgement(verdict, counts, missing, broken, reported)


def count(history: History) -> dict[str, int]:
    """Return how much a run tried: transactions by result, messages, faults, crash points, processes."""
    results = Counter(
        operation.outcome or {"ok": "committed", "fail": "aborted", "unknown": "unknown"}[operation.result]
        for operation in history.operations
        if operation.what == "transaction"
    )
    calls = Counter(operation.what for operation in history.operations)
    begun = [fault.kind for fault in history.faults if fault.phase == "begin"]
    return {
        "committed": results["committed"],
        "aborted": results["aborted"],
        "prepared": results["prepared"],
        "unknown": results["unknown"],
        "finished": calls["finish"],
        "fenced": sum(operation.fields.get("error") == "Fenced" for operation in history.operations),
        "half messages": calls["half"],
        "sent": sum(len(values) for _, _, values in history.sends),
        "read": sum(len(messages) for _, _, messages in history.polls),
        "faults": len(begun),
        "broker kills": begun.count("broker kill"),
        "crash points": len({kind for kind in begun if kind.startswith("kill at ")}),
        "processes": len(history.processes),
    }
