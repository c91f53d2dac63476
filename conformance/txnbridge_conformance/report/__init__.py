"""The report of a run: text for the terminal, JSON, and one page of HTML.

The page needs no network. Its script draws bars on a canvas. A charting library would be hundreds of kilobytes large,
and too slow for 100,000 transactions, because it draws one element for each bar.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txnbridge_conformance.checker import MEANINGS, Finding, Findings
from txnbridge_conformance.history import CHANGED, History, Key, Position
from txnbridge_conformance.report.promises import Row, rows
from txnbridge_conformance.run.verdict import Judgement, Verdict, declared_absent

if TYPE_CHECKING:
    from txnbridge_conformance.contract_run import ContractResult

_COLOURS = {"committed": 0, "aborted": 1, "prepared": 2, "unknown": 3}
_RESULTS = {"ok": "committed", "fail": "aborted", "unknown": "unknown"}
_OF_PROCESSES = ("kill", "pause", "restart", "administrator's abort")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BARS = ("transaction", "half", "finish")  # the calls that the timeline shows


@dataclass(frozen=True)
class Report:
    """A history with its findings and verdict, to be shown as text, JSON or HTML. `command` made the run."""

    history: History
    findings: Findings
    judgement: Judgement
    command: str = ""
    contract: Sequence[ContractResult] = ()  # verdicts of the contract suite, if the run began with it
    allowed: Collection[str] = ()  # names of findings, and of broken capabilities, that do not fail

    @property
    def broken_contract(self) -> list[str]:
        """The names of the capabilities whose tests of the contract suite failed."""
        return [result.name for result in self.contract if result.verdict == "broken"]

    @property
    def failing(self) -> list[str]:
        """The names of findings that break a promise, and of broken capabilities, except those the user allows."""
        return [name for name in (*self.judgement.broken, *self.broken_contract) if name not in self.allowed]

    @property
    def exit_code(self) -> int:
        """The exit code of the verdict. Findings that the user has allowed do not count."""
        thin = self.judgement.missing or any(result.verdict == "set-up failed" for result in self.contract)
        verdict = Verdict.BROKEN if self.failing else Verdict.THIN if thin else Verdict.KEPT
        return int(verdict.value)

    def _baseline(self) -> Iterator[str]:
        """Yield sentences about the findings that the user has allowed: which were found, and which not any more."""
        found = {*self.findings.names, *self.broken_contract}
        if known := sorted(found.intersection(self.allowed)):
            yield f"Allowed, so that it does not fail: {', '.join(known)}."
        gone = sorted(name for name in {*self.allowed} - found if name in MEANINGS or self.contract)
        if gone and not self.judgement.missing:
            yield f"Allowed, and not found any more: {', '.join(gone)}."

    def text(self) -> str:
        """Return the report as text: the verdict, the counts of the run, and each finding with its first examples."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield self.judgement.sentence
        if about := self._declared().get("about"):
            yield "; ".join(f"{name} {value}" for name, value in about.items())
        if senders := self._senders():
            yield f"Sent through {', '.join(senders)}."
        yield ", ".join(f"{count:,} {name}" for name, count in self.judgement.counts.items())
        if self.contract:
            kept = sum(result.verdict == "kept" for result in self.contract)
            broken = f"; broken: {', '.join(self.broken_contract)}" if self.broken_contract else ""
            yield f"Contract suite: {kept} of {len(self.contract)} capabilities kept{broken}."
        for verdict in ("not tested", "too thin"):
            if names := [row.promise.name for row in self._rows() if row.verdict == verdict]:
                yield f"{verdict.capitalize()}: {', '.join(names)}."
        yield from self._baseline()
        causes = self.judgement.causes
        for name in self._names():
            promised = "" if name in self.judgement.broken else " (no promise excludes it)"
            promised += f" (a consequence of {', '.join(sorted(causes[name]))})" if name in causes else ""
            yield f"\n{name}, {self.findings.counts[name]:,} times: {MEANINGS[name]}{promised}"
            for case in self._cases(name)[:5]:
                yield f"  {case.text}"
                yield from (f"    {self._call(order)}" for order in case.operations[:4])

    def _rows(self) -> list[Row]:
        return rows(self.findings, self.judgement, declared_absent(self.history))

    def _names(self) -> list[str]:
        """Return the names of findings: those that break a promise first, and causes before consequences."""
        judgement = self.judgement
        return sorted(self.findings.names, key=lambda name: (name not in judgement.broken, name in judgement.causes))

    def _cases(self, name: str) -> list[Finding]:
        return [case for case in self.findings.cases if case.name == name]

    def _call(self, order: int) -> str:
        operation = self.history.operations[order]
        process = self.history.processes[operation.process]
        error = f" ({operation.fields['error']})" if operation.fields.get("error") else ""
        result = operation.outcome or operation.result
        return f"{Path(process.file).name}, call {operation.number}: {operation.what}, {result}{error}"

    def document(self) -> dict[str, Any]:
        """Return the content of the report as dicts, lists and scalars, to be written as JSON."""
        partitions = Partitions(self.history) if self.findings.cases else None
        return {
            "report": 1,
            "verdict": self.judgement.verdict.name.lower(),
            "sentence": self.judgement.sentence,
            "command": self.command,
            "counts": dict(self.judgement.counts),
            "missing": dict(self.judgement.missing),
            "failing": self.failing,
            "baseline": list(self._baseline()),
            "promises": [
                {
                    "name": row.promise.name,
                    "text": row.promise.text,
                    "verdict": row.verdict,
                    "evidence": row.evidence,
                    "broken by": [name for name in row.promise.findings if name in self.judgement.broken],
                }
                for row in self._rows()
            ],
            "about": self._declared().get("about", {}),  # the product with its version, the host, the date and so on
            "broker": self._declared().get("settings", []),  # as `txnbridge doctor` tells them
            "contract": [{**asdict(result), "failed": list(result.failed)} for result in self.contract],
            "findings": [
                {
                    "name": name,
                    "meaning": MEANINGS[name],
                    "times": self.findings.counts[name],
                    "breaks a promise": name in self.judgement.broken,
                    "consequence of": sorted(self.judgement.causes.get(name, ())),
                    "cases": [
                        {
                            "text": case.text,
                            "values": list(case.values),
                            "calls": [self._call(order) for order in case.operations],
                            "orders": list(case.operations),
                            "around": self._around(partitions, case.values),
                        }
                        for case in self._cases(name)
                    ],
                }
                for name in self._names()
            ],
            "python": platform.python_version(),
            "senders": self._senders(),
            "clients": sorted({process.client for process in self.history.processes}),
            "histories": {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in [Path(process.file) for process in self.history.processes]
            },
        }

    def _around(self, partitions: Partitions | None, values: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages around the first two values that a finding is about, in the order of their partitions."""
        assert partitions is not None
        return [
            {
                "partition": place.partition,
                "position": list(place.position),
                "value": place.value,
                "by": "unknown" if place.operation is None else self._call(place.operation),
                "named": place.value.removeprefix(CHANGED) in values,
            }
            for place in dict.fromkeys(place for value in values[:2] for place in partitions.around(value))
        ]

    def _senders(self) -> list[str]:
        """Return the clients that sent messages: a finding may be about the broker or about one of these clients."""
        processes = {self.history.operations[order].process for order, _, _ in self.history.sends}
        return sorted({self.history.processes[process].client for process in processes})

    def _declared(self) -> dict[str, Any]:
        """Return what the history's program declared at its begin."""
        return next((each.fields for each in self.history.operations if each.what == "declares"), {})

    def json(self) -> str:
        return json.dumps(self.document(), indent=1) + "\n"

    def html(self) -> str:
        """Return the report as one HTML page, with its script and style."""
        return self._rendered("page.html", json.dumps(self._timeline(), separators=(",", ":")).replace("<", "\\u003c"))

    def junit(self) -> str:
        """Return the report as JUnit's XML: a test for its least counts, each promise, finding and capability."""
        return self._rendered("junit.xml")

    def markdown(self) -> str:
        """Return the verdict, promises and findings as Markdown, for the summary of a pipeline's step."""
        return self._rendered("summary.md")

    def _rendered(self, template: str, timeline: str = "") -> str:
        import jinja2  # imported here, because the text needs none of it

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        text = environment.get_template(template).render(**self.document(), timeline=timeline)
        return _NOT_IN_XML.sub("?", text)

    def _timeline(self) -> dict[str, Any]:
        """Return the timeline: a lane for each process, a bar for each transaction, a band for each fault.

        Times are milliseconds since the first event of the history, by monotonic clocks of one host.
        """
        operations = self.history.operations
        times = [operation.start for operation in operations] + [fault.mono for fault in self.history.faults]
        zero = min(times, default=0)
        end = max([operation.end or operation.start for operation in operations] + times, default=0)
        bars = [
            [
                operation.process,
                (operation.start - zero) // 10**5 / 10,
                ((operation.end or end) - zero) // 10**5 / 10,
                _COLOURS.get(operation.outcome or _RESULTS[operation.result], _COLOURS["unknown"]),
                operation.order,
            ]
            for operation in operations
            if operation.what in _BARS
        ]
        names = {process.name: number for number, process in enumerate(self.history.processes)}
        begun: dict[tuple[str, str], int] = {}
        bands = []
        for fault in self.history.faults:
            key = (fault.kind, fault.target)
            if fault.phase == "begin":
                begun[key] = fault.mono
            start = begun.get(key, fault.mono)
            if fault.phase == "end" or fault.kind.startswith("kill at"):
                # A process that was killed while it started has no history, and no lane. Other targets concern all.
                lane = names.get(fault.target, None if fault.kind in _OF_PROCESSES else -1)
                if lane is not None:
                    bands.append([fault.kind, lane, (start - zero) / 1e6, (fault.mono - zero) / 1e6])
        return {
            "lanes": [process.name for process in self.history.processes],
            "bars": bars,
            "bands": bands,
            "end": (end - zero) / 1e6,
        }


# How many messages are shown before and after the one of a finding.
_SPAN = 3


@dataclass(frozen=True)
class PlacedMessage:
    """A message at a position of a partition. `operation` is the number of the call that sent it, None if unknown."""

    partition: str
    position: Position
    value: str
    operation: int | None


class Partitions:
    """The messages of each partition by position, as far as processes read them or recorded where they are stored."""

    def __init__(self, history: History) -> None:
        self._writers = {value: order for order, _, values in history.sends for value in values}
        found: dict[Key, set[tuple[Position, str]]] = defaultdict(set)
        for _, _, messages in history.polls:
            for topic, partition, position, value in messages:
                if position is not None and value is not None:
                    found[topic, partition].add((tuple(position), value))
        for key, values, positions in history.stored:
            found[key].update(zip(map(tuple, positions), values, strict=True))
        self._messages = {key: sorted(messages) for key, messages in found.items()}
        self._rows: dict[str, list[tuple[Key, int]]] = defaultdict(list)
        for key, placed in self._messages.items():
            for row, (_, text) in enumerate(placed):
                self._rows[text.removeprefix(CHANGED)].append((key, row))

    def around(self, value: str) -> list[PlacedMessage]:
        """Return the messages around each place of a value, in their order, with the value's own message."""
        return [
            PlacedMessage(f"{key[0]}[{key[1]}]", position, text, self._writers.get(text.removeprefix(CHANGED)))
            for key, row in self._rows.get(value, ())
            for position, text in self._messages[key][max(0, row - _SPAN) : row + _SPAN + 1]
        ]
