"""The checker's own mutation test: it finds each defect of simulated histories, and nothing in sound ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from txnbridge_conformance.checker import check
from txnbridge_conformance.commands import command
from txnbridge_conformance.history import History
from txnbridge_conformance.run.verdict import NOT_PROMISED

from tests.conformance.simulated_defects import DEFECTS
from tests.conformance.simulated_run import VARIANTS, Simulated, history

# The share of histories with a defect in which it is found and rightly named. What a killed owner leaves is not always
# there to be read.
GOAL, GOALS = 0.95, {"zombie-killed": 0.75}


@pytest.fixture(scope="module")
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


def findings(simulated: Simulated) -> set[str]:
    """Return the names of the findings, without those that no broker promises to avoid."""
    judged = History()
    for process, lines in simulated.files.items():
        judged.add(lines, process)
    return set(check(judged).names) - NOT_PROMISED


def with_defect(defect: str, is_full: bool) -> Iterator[tuple[int, set[str]]]:
    """Yield seeds whose histories show this defect, with the names of the findings: 5, or 100 if `is_full`."""
    for seed in range(100 if is_full else 5):
        simulated = history(seed, defect, is_small=not is_full)
        if simulated.is_planted:
            yield seed, findings(simulated)


def is_named(defect: str, found: set[str]) -> bool:
    names = DEFECTS[defect].names
    return bool(found & names if names else found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_and_rightly_named(defect, is_full):
    judged = dict(with_defect(defect, is_full))
    assert len(judged) >= (80 if is_full else 4), "too few seeds have a chance for this defect"
    missed = {seed: found for seed, found in judged.items() if not is_named(defect, found)}
    assert len(missed) <= len(judged) * (1 - GOALS.get(defect, GOAL)), f"{sorted(DEFECTS[defect].names)}: {missed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant or "plain")
def test_nothing_is_found_on_a_sound_broker(variant, is_full):
    judged = {seed: findings(history(seed, variant=variant)) for seed in range(100 if is_full else 5)}
    assert {seed: found for seed, found in judged.items() if found} == {}


def test_a_history_follows_from_its_seed():
    assert history(1).files == history(1).files != history(2).files
    assert history(1, "lost").files == history(1, "lost").files != history(1, "duplicate").files


def test_the_command_judges_a_simulated_history(tmp_path):
    history(3, "duplicate").write(tmp_path)
    result = CliRunner().invoke(command, ["check", str(tmp_path)])
    assert (result.exit_code, "duplicate" in result.stdout) == (1, True)


def test_a_run_that_was_cut_off_is_too_thin_to_say_anything(tmp_path):
    history(3, variant="cut").write(tmp_path)
    result = CliRunner().invoke(command, ["check", str(tmp_path)])
    assert (result.exit_code, result.stdout.startswith("Too thin")) == (2, True)


def table(is_full: bool) -> str:
    """Return the Markdown table of docs/conformance.md: in how many histories each defect is found and named."""
    rows = ["| defect, one a history | found | rightly named | as |", "|---|---|---|---|"]
    for defect, known in DEFECTS.items():
        judged = [found for _, found in with_defect(defect, is_full)]
        right = Counter(name for found in judged for name in found & (known.names or found))
        named = sum(is_named(defect, found) for found in judged)
        names = ", ".join(f"`{name}`" for name, _ in right.most_common())
        rows.append(f"| {known.text} | {sum(map(bool, judged))} of {len(judged)} | {named} | {names or '—'} |")
    return "\n".join(rows) + "\n"
