"""Each benchmark still runs. Its figures are not judged here: a machine that runs tests is no quiet one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import NAMES
from tests.house.rooms import ROOT
from tests.pulsar.kit import url_of as pulsar_url
from tests.sql.postgres import Postgres

# The figures that have a target: a benchmark that no longer measures its own is rotten, too.
TARGETS = {
    "send": 2,
    "imports": 1,
    "write": 6,
    "read": 4,
    "commit": 0,
    "writers": 6,
    "wakeup": 4,
    "memory": 4,
    "large_file": 5,
    "checker": 2,
    "group_commit": 3,
    "aio": 0,
    "kafka_write": 8,
    "kafka_java": 0,
    "kafka_read": 2,
    "kafka_token": 1,
    "kafka_small": 2,
    "kafka_group_commit": 3,
    "kafka_aio": 0,
    "kafka_process": 3,
    "kafka_half_messages": 4,
    "kafka_telemetry": 8,
    "pulsar_write": 3,
    "pulsar_read": 2,
    "pulsar_process": 1,
    "pulsar_commit": 1,
    "pulsar_memory": 4,
    "pulsar_spark": 0,
    "pulsar_half_messages": 4,
    "pulsar_group_commit": 3,
    "rocketmq_write": 3,
    "rocketmq_small": 7,
    "rocketmq_read": 2,
    "rocketmq_recover": 0,
    "outbox": 7,
    "processor_db": 0,
    "spark_write": 6,
    "spark_read": 2,
    "spark_recover": 1,
}

# The first run fetches Kafka's tools, and what it is compared with.
pytestmark = pytest.mark.full
WITH_A_BROKER = [pytest.mark.live, pytest.mark.timeout(600)]
BROKERS = ("kafka", "pulsar", "rocketmq", "spark")
WITH_POSTGRES = ("outbox", "processor_db")  # beside Kafka


def broker_of(name: str) -> str:
    """Return the broker of a benchmark, or another word if it needs none."""
    return "kafka" if name in WITH_POSTGRES else name.split("_")[0]


def environment_of(broker: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """What tells a benchmark of the broker of this run."""
    if broker in ("kafka", "spark"):
        return {"TXNBRIDGE_URL": request.getfixturevalue("kafka_broker").url}
    if broker == "pulsar":
        return {"TXNBRIDGE_URL": pulsar_url(request.getfixturevalue("pulsar_broker"))}
    if broker == "rocketmq":
        started = request.getfixturevalue("rocketmq_broker")
        return {"TXNBRIDGE_URL": started.url, "TXNBRIDGE_GRPC": started.grpc_address()}
    return {}


def test_every_benchmark_is_in_the_list():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert scripts == set(NAMES) == set(TARGETS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=WITH_A_BROKER) if broker_of(name) in BROKERS else name for name in NAMES],
)
def test_a_benchmark_runs_and_leaves_nothing(name, tmp_path, request):
    if name in WITH_POSTGRES and (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    env = dict(os.environ)
    env |= environment_of(broker_of(name), request)
    command = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}", "--quick", "--folder", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" or "spark" in name  # the JVM tells how it was started
    rows = [line.split("|") for line in run.stdout.splitlines() if line.startswith("| ") and "median" not in line]
    assert sum(bool(row[4].strip()) for row in rows) == TARGETS[name]
    assert list(tmp_path.iterdir()) == []
