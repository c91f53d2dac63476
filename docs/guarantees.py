"""Writes the table of docs/guarantees.md: python docs/guarantees.py FOLDER…, with a run's report in each folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- the table of guarantees.py -->\n\n", "\n\n<!-- its end -->"
COUNTS = ("committed", "killed and committed", "killed and aborted", "faults", "broker kills")


def table(reports: list[dict[str, Any]]) -> str:
    """Return the table of promises, counts and findings, with a column for each run."""
    products = [report["about"]["product"].partition(",")[0].removeprefix("the ") for report in reports]
    promises = [{f"**{each['name']}**": each["verdict"] for each in report["promises"]} for report in reports]
    counts = [{name: f"{report['counts'][name]:,}" for name in COUNTS} for report in reports]
    findings = [{f"`{each['name']}`": f"{each['times']:,}" for each in report["findings"]} for report in reports]
    rows = [["", *products], ["---"] * (len(products) + 1)]
    for columns in (promises, counts, findings):
        for name in dict.fromkeys(name for column in columns for name in column):
            rows.append([name, *(column.get(name, "") for column in columns)])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def main(folders: list[str]) -> None:
    """Put the table of the runs in these folders into the page."""
    reports = [json.loads((Path(folder) / "report.json").read_text()) for folder in folders]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(reports)}{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
