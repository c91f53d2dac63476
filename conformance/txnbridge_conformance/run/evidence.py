"""What each promise was tried with: how often a history has the situations in which a broker could break it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence

from txnbridge_conformance.checker import ABORTED, COMMITTED, Findings, fates
from txnbridge_conformance.history import History, Key, Operation

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
        found["overslept"] += late > 1e9 * fields.get("deadline", _NEVER)
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
