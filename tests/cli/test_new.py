"""`txnbridge new`: what it writes passes its own test at once."""

import re
import subprocess
import sys
from importlib.metadata import metadata

import pytest


@pytest.fixture
def project(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("new", "my-shop")
    assert (result.exit_code, result.stdout) == (0, "my-shop is there. Next: cd my-shop && pytest\n")
    return tmp_path / "my-shop"


def test_a_new_service_passes_its_test_and_is_described(project):
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=project, check=True, timeout=100
    )
    described = subprocess.run(
        [sys.executable, "-m", "txnbridge.cli", "app", "describe", "app:app"],
        cwd=project,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert '"title": "my-shop"' in described.stdout


def test_the_project_files_that_new_writes_fit_the_service(project, invoke, bridge):
    yaml = pytest.importorskip("yaml")
    toml = (project / "pyproject.toml").read_text()
    assert 'name = "my-shop"' in toml
    (extras,) = re.findall(r'"txnbridge\[(.+)\]"', toml)
    assert set(extras.split(",")) <= set(metadata("txnbridge").get_all("Provides-Extra") or ())
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    for _ in range(2):  # the services may be started again
        result = invoke(*compose["services"]["topics"]["command"][1:])
        assert result.exit_code == 0, result.stderr
    created = {topic.name for topic in bridge.admin.topics()}
    used = set(
        re.findall(r'"([a-z-]+)", group=|to="([a-z-]+)"|dead_letter="([a-z-]+)"', (project / "app.py").read_text())
    )
    assert created == {name for names in used for name in names if name}
    workflow = yaml.safe_load((project / ".github" / "workflows" / "test.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][1]["with"] == {"python-version": "${{ matrix.python }}"}
    assert "COPY pyproject.toml *.py" in (project / "Dockerfile").read_text()


def test_a_new_service_runs_on_no_broker_that_is_not_named(project, monkeypatch):
    monkeypatch.delenv("TXNBRIDGE_URL", raising=False)
    command = [sys.executable, "-m", "txnbridge.cli", "run", "app:app"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "TXNBRIDGE_URL" in done.stderr
    assert list(project.glob("*.db*")) == []


@pytest.mark.parametrize("name", ["My-Shop", "1shop", "shop/a", "a--b", "..", ""])
def test_a_name_that_is_none_is_refused(refused, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert "lower-case letters" in refused("new", name)
    assert list(tmp_path.iterdir()) == []


def test_new_overwrites_no_file(project, invoke):
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    assert invoke("new", "my-shop").exit_code == 2
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before
