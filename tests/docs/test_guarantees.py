"""The tables of docs/guarantees.md are those of the reports beside it."""

import json

from docs.guarantees import PAGE, RUNS, kept, tables


def test_the_page_shows_the_runs():
    assert tables(json.loads(RUNS.read_text())) in PAGE.read_text()


def test_a_finding_that_breaks_a_promise_is_bold():
    counts = dict.fromkeys(json.loads(RUNS.read_text())[0]["counts"], 1)
    promise = {"name": "atomic", "verdict": "broken", "evidence": "2 torn-transaction"}
    findings = [
        {"name": "torn-transaction", "times": 2, "breaks a promise": True},
        {"name": "G0", "times": 3, "breaks a promise": False},
    ]
    about = {"product": "Toy 1.0", "begun": "2026-11-29 12:00:00+00:00"}
    report = {"about": about, "promises": [promise], "counts": counts, "findings": findings}
    shown = tables([kept(report)])
    assert "|`torn-transaction`|**2**|" in shown
    assert "|`G0`|3|" in shown
    assert "|atomic|broken|" in shown
