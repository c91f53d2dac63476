"""The wheel, built from the sdist, works by itself: in a fresh environment, away from the checkout, without extras."""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.house.rooms import ROOT, packages

# Each environment takes some seconds, but what goes into it may come over a slow line. One process makes them for all.
# Not in the gate's own command: `.ci/run` names this file.
pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("wheel"), pytest.mark.full]

PACKAGES = [package.name for package in packages()]
CLIENTS = ["confluent_kafka", "pulsar", "rocketmq", "pyspark", "pyarrow", "sqlalchemy"]

# Imports every module of the packages named (but not their programs: `__main__` runs when it is imported), and prints
# those that lack something, each with what it lacks.
IMPORT_ALL = """
import importlib, pkgutil, sys

for package in sys.argv[1:]:
    path = importlib.import_module(package).__path__
    for info in pkgutil.walk_packages(path, f"{package}."):
        try:
            info.name.endswith(".__main__") or importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            print(info.name, error.name)
"""

FIND = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"

TRANSACTION = """
import txnbridge

with txnbridge.connect("embedded:wheel.db") as bridge:
    with bridge.transaction() as txn:
        txn.send("orders", b"one")
    print(*(message.value for message in bridge.read("orders", 10)))
"""


class Environment:
    """A virtual environment with one requirement installed, used from its own folder."""

    def __init__(self, folder: Path, requirement: str) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q"]
        # Not compiled: a handful of short programs run there.
        subprocess.run([*install, requirement], check=True, env=os.environ | {"PIP_COMPILE": "0"})

    def run(self, program: str, *arguments: str) -> str:
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True).stdout

    def python(self, code: str, *arguments: str) -> str:
        # -I: nothing but what is installed there can be imported.
        return self.run("python", "-I", "-c", code, *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")  # made from the sdist, which lies beside it
    return built


@pytest.fixture(scope="module")
def bare(tmp_path_factory, wheel) -> Environment:
    return Environment(tmp_path_factory.mktemp("bare"), str(wheel))


@pytest.fixture(scope="module")
def with_the_suite(tmp_path_factory, wheel) -> Environment:
    return Environment(tmp_path_factory.mktemp("suite"), f"{wheel}[conformance]")


def test_the_wheel_holds_every_file_of_ours_typed_and_nothing_else(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {
        path.relative_to(package.parent).as_posix()
        for package in packages()
        for path in [*package.rglob("*.*"), package / "py.typed"]
        if path.is_file() and path.suffix != ".pyc"
    }
    assert files - held == set()
    metadata = f"txnbridge-{version('txnbridge')}.dist-info"
    assert {name.split("/")[0] for name in held} == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in held


def test_without_a_client_library_everything_else_imports_and_only_the_suite_needs_libraries(bare):
    assert bare.python(FIND, *CLIENTS, "pytest").split() == []
    lacking = dict(line.split() for line in bare.python(IMPORT_ALL, *PACKAGES).splitlines())
    assert {(name.partition(".")[0], lacks) for name, lacks in lacking.items()} == {
        ("txnbridge", "sqlalchemy"),
        ("txnbridge", "opentelemetry"),
        ("txnbridge", "anyio"),
        ("txnbridge_conformance", "pytest"),
        ("txnbridge_conformance", "numpy"),  # the checker
        ("txnbridge_conformance", "confluent_kafka"),  # runs through the plain client
        ("txnbridge_kafka", "confluent_kafka"),
        ("txnbridge_pulsar", "google_crc32c"),
        ("txnbridge_conformance", "google_crc32c"),  # its client
        ("pyspark_txnbridge", "pyspark"),
    }
    assert [name for name, lacks in lacking.items() if lacks == "anyio"] == ["txnbridge.aio"]
    assert {name for name, lacks in lacking.items() if lacks == "sqlalchemy"} == {"txnbridge.sql"}
    # Spark imports it to see whether it is a data source, and that may never fail.
    assert "pyspark_txnbridge" not in lacking
    # What is loaded before anybody asks for the broker.
    assert not {f"txnbridge_{kind}{name}" for kind in ("kafka", "pulsar") for name in ("", ".backend", ".settings")} & {
        *lacking
    }


def test_with_the_extra_for_the_suite_every_module_of_it_imports(with_the_suite):
    assert with_the_suite.python(FIND, *CLIENTS).split() == []
    lacking = with_the_suite.python(IMPORT_ALL, *PACKAGES).split()
    assert set(lacking[1::2]) == {"anyio", "confluent_kafka", "opentelemetry", "pyspark", "sqlalchemy"}


def test_a_module_that_lacks_something_would_be_seen(bare):
    (bare.folder / "broken").mkdir()
    (bare.folder / "broken" / "__init__.py").touch()
    (bare.folder / "broken" / "part.py").write_text("import confluent_kafka")
    seen = bare.python("import sys; sys.path.insert(0, '.')" + IMPORT_ALL, "broken")
    assert seen == "broken.part confluent_kafka\n"


def test_the_command_tells_its_version(bare):
    assert version("txnbridge") in bare.run("txnbridge", "--version")
    assert version("txnbridge") in bare.run("python", "-I", "-m", "txnbridge.cli", "--version")


def test_a_transaction_commits_on_the_embedded_broker(bare):
    assert bare.python(TRANSACTION) == "b'one'\n"
