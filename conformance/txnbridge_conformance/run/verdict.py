"""The verdict on a history: promises are kept, or broken, or the run tried too little to tell."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from txnbridge_conformance.checker import ABORTED, COMMITTED, Finding, Findings, fates
from txnbridge_conformance.history import History, Key, Operation
from txnbridge_conformance.run.plan import WORKLOADS, floor_of

OF_PARTITION_ORDER = (
    *("inconsistent-offsets", "int-poll-skip", "int-nonmonotonic-poll", "poll-skip", "nonmonotonic-poll"),
    *("int-nonmonotonic-send", "nonmonotonic-send", "G0-realtime"),
)

# Findings that a broker does not promise to avoid if it declares one of these capabilities absent.
EXCUSED_BY = {
    "torn-transaction": ("atomic-topics",),
    "half-ack": ("atomic-ack",),
    "group-skip": ("partition-order", "group-order"),
    "replay-duplicate": ("atomic-ack", "conflict"),
    "precommitted-read": ("isolation",),
    "wrong-partition": ("choose-partition",),
    "zombie-write": ("fencing",),
    "early-read": ("prepare", "isolation"),
    "lost-prepare": ("prepare",),
    **dict.fromkeys(("lost-write", "unseen"), ("survives-broker-kill",)),
    "hang": ("deadline",),
    **dict.fromkeys(OF_PARTITION_ORDER, ("partition-order",)),
    "int-nonmonotonic-poll": ("partition-order", "group-order"),  # what a group's member gave up comes late to another
}

# Findings that no broker promises to avoid: in a log, messages of transactions that run at once may interleave, and a
# long transaction may lie before another one in one partition and behind a third one in the next. Readers of txnbridge
# drop copies that a broker stores when a request comes twice; nobody can make other clients' readers drop them.
NOT_PROMISED = frozenset({"int-send-skip", "G0", "G1c", "G1c-realtime", "foreign-duplicate"})


class Verdict(Enum):
    """A run's verdict: promises kept, broken, or untested (THIN). Values are exit codes of `txnbridge conformance`."""

    KEPT = 0
    BROKEN = 1
    THIN = 4  # not 2, the code of a wrong call


@dataclass(frozen=True)
class Judgement:
    """The verdict on a history, with the counts of what was tried and the names of the findings."""

    verdict: Verdict
    counts: Mapping[str, int]
    missing: Mapping[str, int]  # what the floor wants, for each count below it
    broken: tuple[str, ...]  # names of findings that break a promise
    reported: tuple[str, ...]  # names of findings that no promise excludes
    causes: Mapping[str, frozenset[str]]  # the names of the findings that all cases of a finding are consequences of

    @property
    def sentence(self) -> str:
        """The verdict and the most important counts, as one sentence of English."""
        c = self.counts
        others = [f"{c[name]:,} {name}" for name in ("half messages", "claims") if c[name]]
        results = f"{c['committed']:,} committed, {c['aborted']:,} aborted and {c['unknown']:,} unknown transactions"
        some = c["committed"] or c["aborted"] or c["unknown"] or not others
        tried = ", ".join([results, *others] if some else others)
        if self.verdict is Verdict.BROKEN:
            names = [name for name in self.broken if name not in self.causes]
            return f"Broken: {', '.join(names)}, in {tried} under {c['faults']:,} faults."
        if self.verdict is Verdict.THIN:
            wanted = ", ".join(f"{c[name]:,} {name} instead of {floor:,}" for name, floor in self.missing.items())
            return f"Too thin to say: {wanted}. Run it for longer, or lower the floor."
        if self.reported:
            found = f"{', '.join(self.reported)} ({'breaks' if len(self.reported) == 1 else 'break'} no promise)"
            return f"Kept: nothing is wrong but {found} in {tried} under {c['faults']:,} faults."
        return f"Kept: nothing is wrong in {tried} under {c['faults']:,} faults."


def judge(history: History, findings: Findings, floor: Mapping[str, int] | None = None) -> Judgement:
    """Decide whether a history keeps the broker's promises: BROKEN if a finding breaks one, else KEPT or THIN.

    THIN means that a count of the history is below its least number in `floor`, by default the floor of the history's
    workloads. Findings break no promise if the broker declares the needed capability absent, if no broker promises to
    avoid them, or if they are consequences of such ones.
    """
    counts = count(history, findings)
    wanted = floor_for(history) if floor is None else floor
    missing = {name: least for name, least in wanted.items() if counts[name] < least}
    broken, causes = _unexcused(history, findings)
    names = tuple(name for name in findings.names if name in broken)
    reported = tuple(name for name in findings.names if name not in broken)
    verdict = Verdict.BROKEN if names else Verdict.THIN if missing else Verdict.KEPT
    return Judgement(verdict, counts, missing, names, reported, causes)


def _unexcused(history: History, findings: Findings) -> tuple[set[str], dict[str, frozenset[str]]]:
    """Return the names of findings that break a promise; and names found only as consequences, with their causes."""
    excuses, linked = Excuses(history), findings.causes()
    causes: dict[str, set[str]] = defaultdict(set)
    broken, own = set(), set()
    for at, case in enumerate(findings.all):
        if at in linked:
            causes[case.name].add(findings.all[linked[at]].name)
        else:
            own.add(case.name)
        cause: int | None = at
        while cause is not None and not excuses.cover(findings.all[cause]):
            cause = linked.get(cause)
        if cause is None:
            broken.add(case.name)
    return broken, {name: frozenset(names) for name, names in causes.items() if name not in own}


class Excuses:
    """The promises that a broker does not make, by the capabilities that a history declares absent."""

    def __init__(self, history: History) -> None:
        self._history = history
        absent = declared_absent(history)
        self._absent = {name: absent.intersection(needed) for name, needed in EXCUSED_BY.items()}
        ours = {process.name for process in history.processes}  # a hook's "kill" is of the system, a run's of a process
        self._last_kill: dict[str, int] = {}  # by clock
        for fault in history.faults:
            if fault.kind in ("broker kill", "kill") and fault.phase == "begin" and fault.target not in ours:
                self._last_kill[fault.clock] = max(fault.mono, self._last_kill.get(fault.clock, fault.mono))

    @cached_property
    def _keys(self) -> dict[int, set[Key]]:
        """Return, for each operation, the partitions to which it sends."""
        keys: dict[int, set[Key]] = defaultdict(set)
        for order, key, _ in self._history.sends:
            keys[order].add(key)
        return keys

    def cover(self, case: Finding) -> bool:
        """Return whether the broker makes no promise that excludes this finding."""
        absent = self._absent.get(case.name)
        if case.name in NOT_PROMISED or not absent or not case.operations:
            return case.name in NOT_PROMISED or bool(absent)
        operation = self._history.operations[case.operations[0]]
        match case.name:
            case "lost-write" | "unseen":  # a kill behind the begin of its transaction explains it
                kills = self._last_kill.items()
                return any(clock != operation.clock or mono > operation.start for clock, mono in kills)
            case "hang":
                return operation.what != "settle" and operation.end is not None
            case "torn-transaction":
                return len(self._keys[operation.order]) > 1 and case.kind == case.name  # not within one partition
            case "early-read":
                return "isolation" in absent or operation.outcome == "prepared"
        return True


def declared_absent(history: History) -> frozenset[str]:
    """Return the names of the capabilities that, by the history, the broker declares absent."""
    declared = (each for each in history.operations if each.what == "declares")
    return frozenset(name for each in declared for name in each.fields["absent"])


def floor_for(history: History) -> dict[str, int]:
    """Return the least counts that a run of the history's workloads (by default "transactions") has to reach."""
    declared = [name for each in history.operations for name in each.fields.get("workloads", ())]
    kills = any(each.fields.get("kills") for each in history.operations if each.what == "declares")
    return floor_of([name for name in declared if name in WORKLOADS] or ["transactions"], kills)


def count(history: History, findings: Findings) -> dict[str, int]:
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
        **{name: results[name] for name in ("committed", "aborted", "prepared", "unknown")},
        "finished": calls["finish"],
        "fenced": sum(operation.fields.get("error") == "Fenced" for operation in history.operations),
        "half messages": calls["half"],
        "published": halves[COMMITTED],
        "dropped": halves[ABORTED],
        "claims": calls["claim"],
        "sent": sum(len(values) for _, _, values in history.sends),
        "read": sum(len(messages) for _, _, messages in history.polls),
        "full reads": sum(each.what == "read" and each.result == "ok" for each in history.operations),
        **evidence(history, findings),
        "faults": len(begun),
        "broker kills": begun.count("broker kill"),
        "crash points": len({kind for kind in begun if kind.startswith("kill at ")}),
        "processes": len(history.processes),
    }


_NEVER = float("inf")
NAMES = (
    *("over topics", "acks with outputs", "killed and committed", "killed and aborted", "taken again", "takeovers"),
    *("finished by others", "overslept", "killed undecided", "spans"),
)


def evidence(history: History, findings: Findings) -> dict[str, int]:
    """Return how often a history has each situation, by its name. `findings` know what killed processes did.

    - "over topics", "acks with outputs": transactions of two topics or more, and of outputs with the acknowledgements
      of their inputs, which were certainly committed or aborted.
    - "killed and committed", "killed and aborted": those of several partitions, or with acknowledgements, whose process
      was killed between the request for their commit and its answer, and nobody was told; full reads show their fate.
    - "taken again": messages that a group acknowledged in an aborted transaction, and then in a committed one.
    - "takeovers": transactions during which another process opened their transactional id.
    - "finished by others": calls that end a transaction which another process has prepared.
    - "overslept": transactions whose end was requested after their deadline.
    - "killed undecided": half messages whose process was killed before it had decided about them.
    - "spans": transactions over several brokers, which were certainly committed or aborted.
    """
    told = fates(history.operations, Findings()).tolist()
    truth: Sequence[int] = told if findings.fate is None else findings.fate
    keys: dict[int, set[Key]] = defaultdict(set)
    for order, key, _ in history.sends:
        keys[order].add(key)
    acks = {order for order, _, values in history.acks if values}
    prepared = {each.transaction: each.process for each in history.operations if each.outcome == "prepared"}
    found = Counter({"taken again": _taken_again(history, truth), "takeovers": _takeovers(history.operations)})
    for each in history.operations:
        order, fields = each.order, each.fields
        if each.what == "finish":
            found["finished by others"] += prepared.get(each.transaction, each.process) != each.process
        if each.what not in ("transaction", "half"):
            continue
        sent, acked = keys.get(order, set()), order in acks and order in keys
        known = truth[order] in (COMMITTED, ABORTED)
        found["over topics"] += (over := len({topic for topic, _ in sent}) > 1 and known)
        found["spans"] += over and each.is_span
        found["acks with outputs"] += acked and known
        if each.end is None and "ending" in fields:
            silent = (len(sent) > 1 or acked) and told[order] not in (COMMITTED, ABORTED)
            found["killed and committed"] += silent and truth[order] == COMMITTED
            found["killed and aborted"] += silent and truth[order] == ABORTED
        found["killed undecided"] += each.what == "half" and each.end is None and "ending" not in fields
        late = fields.get("ending", 0) - fields.get("begun", 0)
        found["overslept"] += each.what != "half" and late > 1e9 * fields.get("deadline", _NEVER)
    return {name: found[name] for name in NAMES}


def _taken_again(history: History, truth: Sequence[int]) -> int:
    taken: dict[int, set[tuple[str, str]]] = {COMMITTED: set(), ABORTED: set()}
    for order, group, values in history.acks:
        if (fate := truth[order]) in taken:
            taken[fate].update((group, value) for value in values)
    return len(taken[COMMITTED] & taken[ABORTED])


def _takeovers(operations: Sequence[Operation]) -> int:
    opened: dict[tuple[str, str | None], list[int]] = defaultdict(list)  # by clock and owner, when it was opened
    for each in operations:
        if each.what == "open" and each.end is not None and each.result == "ok":
            opened[each.clock, each.fields.get("owner")].append(each.end)
    opened = {key: sorted(times) for key, times in opened.items()}
    found = 0
    for each in operations:
        if each.what == "transaction" and (owner := each.fields.get("owner")):
            times = opened.get((each.clock, owner), [])
            at = bisect_right(times, each.fields.get("begun", each.start))
            # A killed process has left its transaction open for the next opening.
            found += at < len(times) and times[at] < (each.end or _NEVER)
    return found
