"""The checker's own mutation test: it finds each defect of simulated histories, and nothing in sound ones."""

import json
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from txnbridge_conformance.checker import check
from txnbridge_conformance.commands import command
from txnbridge_conformance.history import History
from txnbridge_conformance.run.verdict import NOT_PROMISED

from tests.conformance.simulated_defects import DEFECTS
from tests.conformance.simulated_run import VARIANTS, Simulated, history
from tests.house.rooms import ROOT

# The share of histories in which a defect is rightly named. What a killed owner leaves is not always there to be read.
GOAL, GOALS = 0.95, {"zombie-killed": 0.75}


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    return 100 if request.config.getoption("--full") else 5


def findings(simulated: Simulated) -> frozenset[str]:
    """Return the names of the findings, without those that no broker promises to avoid."""
    judged = History()
    for process, lines in simulated.files.items():
        judged.add(lines, process)
    return frozenset(check(judged).names) - NOT_PROMISED


@cache
def findings_by_seed(defect: str, seeds: int) -> dict[int, frozenset[str]]:
    """Return the findings in the histories of the first seeds that show this defect, by seed; few seeds: small ones."""
    simulated = {seed: history(seed, defect, is_small=seeds < 100) for seed in range(seeds)}
    return {seed: findings(each) for seed, each in simulated.items() if each.is_planted}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_and_rightly_named(defect, seeds):
    judged = findings_by_seed(defect, seeds)
    assert len(judged) >= seeds * 0.8, "too few seeds have a chance for this defect"
    missed = {seed: set(found) for seed, found in judged.items() if not found & DEFECTS[defect].names}
    assert len(missed) <= len(judged) * (1 - GOALS.get(defect, GOAL)), f"{set(DEFECTS[defect].names)}: {missed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant or "plain")
def test_no_finding_comes_of_a_sound_broker(variant, seeds):
    judged = {seed: findings(history(seed, variant=variant)) for seed in range(seeds)}
    assert {seed: set(found) for seed, found in judged.items() if found} == {}


def test_the_page_tells_as_what_each_defect_is_found():
    page = (ROOT / "docs" / "conformance.md").read_text()
    for names in {defect.names for defect in DEFECTS.values()}:
        defects = ", ".join(name for name, defect in DEFECTS.items() if defect.names == names)
        assert f"|{', '.join(f'`{each}`' for each in sorted(names))}|{defects}|\n" in page


def test_a_history_follows_from_its_seed():
    assert history(1).files == history(1).files != history(2).files
    assert history(1, "lost").files == history(1, "lost").files != history(1, "duplicate").files


def test_the_command_judges_a_simulated_history(tmp_path):
    history(3, "duplicate").write(tmp_path)
    result = CliRunner().invoke(command, ["check", str(tmp_path), f"--out={tmp_path / 'new' / 'report'}"])
    assert (result.exit_code, "duplicate" in result.stdout) == (1, True)
    written = {path.suffix: path.read_text() for path in (tmp_path / "new" / "report").iterdir()}
    assert (sorted(written), written[".txt"]) == ([".html", ".json", ".txt"], result.stdout)
    places = [written[".html"].index(text) for text in (">duplicate</span>", 'id="time"', ">G0</span>")]
    assert (places, written[".html"].count("<details open>")) == (sorted(places), 1)  # G0 breaks no promise


def test_a_run_that_was_cut_off_is_too_thin_however_much_it_tried(tmp_path):
    history(3, variant="cut").write(tmp_path)
    floor = [f"--floor={name}=1" for name in ("committed", "aborted", "read", "faults")]
    result = CliRunner().invoke(command, ["check", str(tmp_path), *floor])
    assert (result.exit_code, result.stdout.startswith("Too thin")) == (4, True)


def test_a_finding_that_is_allowed_does_not_fail_and_one_that_is_gone_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    history(3, "duplicate").write(tmp_path / "run")
    known, junit = tmp_path / "known", tmp_path / "junit.xml"
    judge = ["check", str(tmp_path / "run"), f"--junit={junit}"]
    found = json.loads(CliRunner().invoke(command, [*judge, "--json"]).stdout)["failing"]
    assert "duplicate" in found and failures(junit) == {"exactly once", "in order", *found}
    known.write_text("\n".join([*found, "lost-prepare  # since 1.2", "isolation"]))
    result = CliRunner().invoke(command, [*judge, f"--allow={known}"])
    assert (result.exit_code, failures(junit)) == (0, set())
    assert f"does not fail: {', '.join(sorted(found))}.\n" in result.stdout
    assert "not found any more: lost-prepare.\n" in result.stdout
    summary = (tmp_path / "summary.md").read_text()
    assert (summary.count("### Broken: "), summary.count("- Allowed, ")) == (2, 2)
    known.write_text("dupilcate")
    assert "no capability dupilcate" in CliRunner().invoke(command, [*judge, f"--allow={known}"]).output


def failures(junit: Path) -> set[str | None]:
    suite = ElementTree.parse(junit).getroot()
    assert len(suite.findall("testcase")) > 10
    return {case.get("name") for case in suite.findall("testcase") if case.find("failure") is not None}


def test_the_comparison_of_many_runs_fails_if_one_is_worse_than_the_first(tmp_path):
    for name, defect, more in ("sound", "", 1), ("twice", "duplicate", 1), ("thin", "", 1000):
        history(3, defect).write(tmp_path / name)
        floor = ["--json", *(f"--floor={count}=1" for count in ("aborted", "read", "faults"))]
        judged = CliRunner().invoke(command, ["check", str(tmp_path / name), f"--floor=committed={more}", *floor])
        (tmp_path / name / "report.json").write_text(judged.stdout)

    def compared(*names: str) -> int:
        result = CliRunner().invoke(command, ["compare", *(str(tmp_path / name) for name in names)])
        assert "\nhonest  " in result.stdout
        return result.exit_code

    assert (compared("sound", "sound", "twice"), compared("twice", "twice", "sound")) == (1, 0)
    assert (compared("sound", "sound", "thin"), compared("thin", "sound"), compared("thin", "twice")) == (4, 0, 1)
