"""The report of a run, as text for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from txnbridge_conformance.checker import MEANINGS, Findings
from txnbridge_conformance.history import History
from txnbridge_conformance.run.verdict import Judgement


def text(history: History, findings: Findings, judgement: Judgement) -> str:
    """Return the report as lines of text: the verdict, the numbers, and each finding with its cases."""
    return "\n".join(_lines(history, findings, judgement)) + "\n"


def _lines(history: History, findings: Findings, judgement: Judgement) -> Iterator[str]:
    yield judgement.sentence
    yield ", ".join(f"{count:,} {name}" for name, count in judgement.counts.items())
    for name in findings.names:
        promised = "" if name in judgement.broken else " (no promise excludes it)"
        yield f"\n{name}, {findings.counts[name]:,} times: {MEANINGS[name]}{promised}"
        for case in [case for case in findings.cases if case.name == name][:5]:
            yield f"  {case.text}"
            for order in case.operations[:4]:
                yield f"    {_operation(history, order)}"


def _operation(history: History, order: int) -> str:
    operation = history.operations[order]
    process = history.processes[operation.process]
    error = f" ({operation.fields['error']})" if operation.fields.get("error") else ""
    return f"{process.file}: call {operation.number}, {operation.what}: {operation.outcome or operation.result}{error}"


def document(history: History, findings: Findings, judgement: Judgement) -> dict[str, Any]:
    """Return the report as values for JSON."""
    return {
        "report": 1,
        "verdict": judgement.verdict.name.lower(),
        "sentence": judgement.sentence,
        "counts": dict(judgement.counts),
        "findings": [
            {
                "name": name,
                "meaning": MEANINGS[name],
                "times": findings.counts[name],
                "breaks a promise": name in judgement.broken,
                "cases": [
                    {
                        "text": case.text,
                        "values": list(case.values),
                        "calls": [_operation(history, order) for order in case.operations],
                    }
                    for case in findings.cases
                    if case.name == name
                ],
            }
            for name in findings.names
        ],
    }


def to_json(history: History, findings: Findings, judgement: Judgement) -> str:
    return json.dumps(document(history, findings, judgement), indent=1) + "\n"
