"""`import txnbridge` loads nothing heavy: whoever only sends pays for no database, command line or broker."""

import subprocess
import sys

from tests.house.rooms import packages

COMMANDS_AND_CLIENTS = {"click", "rich", "confluent_kafka", "pyspark", "pyarrow"}
HEAVY = {"asyncio", "anyio", "trio", "sqlalchemy", "tenacity", "pluggy", *COMMANDS_AND_CLIENTS}
NOT_THE_CORE = {package.name for package in packages()} - {"txnbridge"}


def heavy_modules_after(statement: str) -> set[str]:
    """Return the heavy modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    # -I: no environment variable and no current folder puts something into that interpreter.
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "sys" in loaded
    return loaded & (HEAVY | NOT_THE_CORE)


def test_importing_txnbridge_loads_nothing_heavy():
    assert heavy_modules_after("import txnbridge") == set()


def test_connecting_loads_no_command_and_no_client_of_another_broker(tmp_path):
    """Although every plug-in is loaded: some bring listeners."""
    loaded = heavy_modules_after(f"import txnbridge; txnbridge.connect('embedded:{tmp_path}/a.db').close()")
    assert loaded & COMMANDS_AND_CLIENTS == set()


def test_an_import_of_a_heavy_module_would_be_seen():
    seen = heavy_modules_after("import asyncio, txnbridge, click, sqlalchemy.orm, txnbridge_embedded")
    assert seen == {"asyncio", "click", "sqlalchemy", "txnbridge_embedded"}
