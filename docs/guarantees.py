"""Write the tables of docs/guarantees.md from reports of runs: `python docs/guarantees.py FOLDER…`.

What the page needs of each report is kept in docs/guarantees.json, so a run of one version is enough to renew its
column.
"""

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
RUNS = Path(__file__).with_suffix(".json")
_COUNTS = ("committed", "aborted", "prepared", "unknown", "half messages", "faults", "broker kills")
_BEGIN, _END = "<!-- from the reports -->\n", "<!-- to here -->\n"


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs of a report, without the names of hosts and folders."""
    return {
        "product": report["about"]["product"],
        "date": report["about"]["begun"][:10],
        "verdicts": {each["name"]: each["verdict"] for each in report["promises"]},
        "evidence": {each["name"]: each["evidence"] for each in report["promises"]},
        "counts": {name: report["counts"][name] for name in _COUNTS},
        "findings": {each["name"]: [each["times"], each["breaks a promise"]] for each in report["findings"]},
    }


def tables(runs: list[dict[str, Any]]) -> str:
    """Return the tables as Markdown: a column for each run."""
    heads = [["", *(run["product"].split(",")[0] for run in runs)], ["---"] * (len(runs) + 1)]
    promises = [[name, *(run["verdicts"][name] for run in runs)] for name in runs[0]["verdicts"]]
    found = [[name, *(f"{run['counts'][name]:,}" for run in runs)] for name in _COUNTS]
    names = sorted({name for run in runs for name in run["findings"]})
    found += [[f"`{name}`", *(_times(run["findings"].get(name)) for run in runs)] for name in names]
    return "\n".join("".join(f"|{'|'.join(row)}|\n" for row in heads + rows) for rows in (promises, found))


def _times(finding: list[Any] | None) -> str:
    if finding is None:
        return ""
    times, breaks = finding
    return f"**{times}**" if breaks else f"{times}"


def main(folders: list[str]) -> None:
    runs = {run["product"]: run for run in json.loads(RUNS.read_text())} if RUNS.exists() else {}
    for folder in folders:
        run = kept(json.loads((Path(folder) / "report.json").read_text()))
        runs[run["product"]] = run
    ordered = [runs[product] for product in sorted(runs)]
    RUNS.write_text(json.dumps(ordered, indent=1) + "\n")
    before, rest = PAGE.read_text().split(_BEGIN)
    PAGE.write_text(before + _BEGIN + tables(ordered) + _END + rest.split(_END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
