"""The mark `full` and its option: the one way to leave a test out because it takes long."""

from __future__ import annotations

import pytest

from tests.house.rooms import ROOT

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("arguments", "outcome"), [([], "skipped"), (["--full"], "passed")])
def test_a_test_that_takes_minutes_runs_only_when_asked_for(pytester, arguments, outcome):
    pytester.makeini("[pytest]\nmarkers = full")
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile("import pytest\n\n@pytest.mark.full\ndef test_long():\n    pass")
    pytester.runpytest(*arguments).assert_outcomes(**{outcome: 1})
