"""Tests that another backend runs the suite with three short files, and that its declarations are checked."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from txnbridge_conformance import suite
from txnbridge_conformance.run.plan import floor_of

from tests.conformance import broken
from tests.house.rooms import ROOT
from txnbridge import Capability


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with the three files, and an installed distribution with the broken brokers as a plug-in."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["txnbridge_conformance.plugin"]\n')
    (tmp_path / "test_conformance.py").write_text("from txnbridge_conformance.suite import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntxnbridge_url = embedded:{tmp}/broker.db\n")
    installed = tmp_path / "site" / "broken-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[txnbridge]\nbroken = {broken.__name__}\n")
    return tmp_path


def environment(project: Path) -> dict[str, str]:
    """Return an environment in which that project imports the broken brokers, and finds their plug-in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (project / "site", Path(__file__).parents[2])))}


def call(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=project, env=environment(project), capture_output=True, text=True)


def run(project: Path, *arguments: str) -> str:
    """Return pytest's result in that project."""
    options = ["-q", "-W", "error", "--strict-markers", "-p", "pytest_timeout"]
    return call(project, sys.executable, "-m", "pytest", *options, *arguments).stdout


def test_three_short_files_are_enough(project):
    said = run(project, "-k", "test_a_committed_message_is_read or test_a_confirmed_commit_survives_the_death")
    assert "2 passed" in said, said


def conformance(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(project, sys.executable, "-m", "txnbridge.cli", "conformance", *arguments)


def test_the_command_line_finds_an_installed_backend(project):
    done = conformance(project, "plan", f"{broken.scheme_of(broken.Sound)}:{project}/broker.db")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plug_in_may_be_in_the_current_folder_and_says_why_it_cannot_be_imported(project):
    shutil.copy(ROOT / "docs" / "toy_backend.py", project / "my_backend.py")
    (project / "unfinished.py").write_text("import no_such_client")
    # As the installed program is started; `python -m` searches the current folder by itself.
    program = (sys.executable, "-P", "-c", "from txnbridge.cli import main; main()")
    plan = (*program, "conformance", "plan", "toy:mine", "--plugin")
    done, refused = (call(project, *plan, name) for name in ("my_backend", "unfinished"))
    assert (done.stderr, "sell (the broker has no half-messages)" in done.stdout) == ("", True)
    assert refused.returncode == 2
    assert "unfinished cannot be imported: ModuleNotFoundError: No module named 'no_such_client'" in refused.stderr


def test_a_set_up_that_fails_is_no_broken_promise(project):
    shutil.copy(ROOT / "docs" / "toy_backend.py", project / "my_backend.py")
    only = "test_a_committed_message_is_read"
    done = conformance(project, "contract", "toy:mine", "--plugin", "my_backend", "--only", only)
    assert (done.returncode, "broken" in done.stdout) == (3, False), done.stdout + done.stderr
    assert re.search(rf"set-up failed .*\n    failed: {only}: .*topic-admin", done.stdout), done.stdout


@pytest.mark.full
@pytest.mark.xdist_group("conformance-runs")
def test_a_run_attacks_an_installed_backend(project):
    url = f"{broken.scheme_of(broken.Sound)}:{project}/broker.db"
    least = {**dict.fromkeys(floor_of(), 0), "committed": 1, "read": 1}
    floor = [f"--floor={name}={number}" for name, number in least.items()]
    done = conformance(project, "run", url, "--time", "12", *floor)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "Kept"), done.stdout + done.stderr


def test_the_suite_without_a_url_says_what_is_missing(project):
    (project / "pytest.ini").write_text("[pytest]\n")
    said = run(project, "-k", "test_a_committed_message_is_read")
    assert "set txnbridge_url in the pytest settings" in said, said


def test_an_outdated_declaration_fails_and_a_test_of_an_absent_capability_is_skipped_by_name(project):
    url = f"{broken.scheme_of(broken.DeclaresTooLittle)}:{project}/broker.db"
    tests = "test_a_message_without_a_value_arrives_without_one or test_a_new_group_may_start_at_a_time"
    said = run(project, f"--txnbridge-url={url}", "-rs", "-k", tests)
    assert "1 failed, 1 skipped" in said, said
    assert "tombstones is declared absent (so it says); if this passes, the declaration is out of date" in said
    assert "needs timestamps, which is absent: so it says" in said


def modules() -> list[object]:
    """Return the names of the suite's modules."""
    return [importlib.import_module(f"{suite.__name__}.{found.name}") for found in pkgutil.iter_modules(suite.__path__)]


def test_no_test_hides_another_of_its_name():
    names = [name for module in modules() for name in vars(module) if name.startswith("test_")]
    assert sorted(names) == sorted(name for name in vars(suite) if name.startswith("test_"))


def test_every_capability_has_a_test_that_proves_it():
    marks = [mark for module in modules() for test in vars(module).values() for mark in getattr(test, "pytestmark", ())]
    proved = {capability for mark in marks if mark.name == "proves" for capability in mark.args}
    assert [capability for capability in Capability if capability not in proved] == []
