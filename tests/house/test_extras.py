"""A module that lacks a library says which extra of the package has it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("library", "program", "extra"),
    [
        ("anyio", "from txnbridge import aio", "aio"),
        ("sqlalchemy", "from txnbridge.sql import Outbox", "sql"),
        ("opentelemetry", "from txnbridge import opentelemetry", "opentelemetry"),
        ("confluent_kafka", "import txnbridge; txnbridge.connect('kafka://localhost')", "kafka"),
        ("numpy", "from txnbridge.cli import main; main(['conformance', 'run', 'embedded:x.db'])", "conformance"),
    ],
)
def test_a_missing_extra_is_named(library, program, extra):
    missing = f"import sys; sys.modules[{library!r}] = None; {program}"
    done = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and f"pip install -e '.[{extra}]'" in done.stderr.splitlines()[-1]
