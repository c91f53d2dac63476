"""Each question can be asked of each of its brokers. The figures are not judged: a machine that runs tests is busy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import QUESTIONS, main
from tests.house.rooms import ROOT
from tests.pulsar.kit import url_of as pulsar_url
from tests.sql.postgres import Postgres

# The number of figures that have a target: a question that no longer measures its own is rotten, too.
TARGETS = {
    "aio embedded": 0,
    "aio kafka": 0,
    "checker none": 2,
    "commit embedded": 0,
    "commit pulsar": 1,
    "group_commit embedded": 3,
    "group_commit kafka": 3,
    "group_commit pulsar": 3,
    "group_commit rocketmq": 7,
    "half_messages kafka": 4,
    "half_messages pulsar": 4,
    "imports none": 1,
    "large_file embedded": 5,
    "memory embedded": 4,
    "memory pulsar": 4,
    "outbox kafka": 7,
    "process kafka": 3,
    "process pulsar": 1,
    "processor_db kafka": 0,
    "read embedded": 4,
    "read kafka": 2,
    "read pulsar": 2,
    "read rocketmq": 2,
    "recover rocketmq": 0,
    "send none": 2,
    "small kafka": 2,
    "spark_read kafka": 2,
    "spark_recover kafka": 1,
    "spark_write kafka": 6,
    "spark_write pulsar": 0,
    "telemetry embedded": 4,
    "telemetry kafka": 4,
    "token kafka": 1,
    "wakeup embedded": 4,
    "write embedded": 6,
    "write kafka": 8,
    "write pulsar": 3,
    "write rocketmq": 3,
    "writers embedded": 6,
}

# The first run fetches Kafka's tools, and what it is compared with.
full = pytest.mark.full
WITH_A_BROKER = [pytest.mark.live, pytest.mark.timeout(600)]
WITH_POSTGRES = ("outbox", "processor_db")


def environment_of(broker: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment that tells a benchmark of the broker of this run."""
    if broker == "kafka":
        return {"TXNBRIDGE_URL": request.getfixturevalue("kafka_broker").url}
    if broker == "pulsar":
        return {"TXNBRIDGE_URL": pulsar_url(request.getfixturevalue("pulsar_broker"))}
    if broker == "rocketmq":
        started = request.getfixturevalue("rocketmq_broker")
        return {"TXNBRIDGE_URL": started.url, "TXNBRIDGE_GRPC": started.grpc_address()}
    return {}


def test_without_arguments_each_question_is_listed_with_its_brokers(capsys):
    main([])
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    modules = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert {question for question, *_ in listed} == set(QUESTIONS) == modules
    assert {f"{question} {broker}" for question, *brokers in listed for broker in brokers} == set(TARGETS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("reed kafka", "there is no question 'reed'"),
        ("read redis", "read does not take 'redis', but: embedded kafka pulsar rocketmq"),
        ("read", "read needs a broker: embedded kafka pulsar rocketmq"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_which_there_are(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert told in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name.endswith(("none", "embedded")) else WITH_A_BROKER) for name in TARGETS],
)
def test_a_benchmark_runs_and_leaves_nothing(name, tmp_path, request):
    question, broker = name.split()
    if question in WITH_POSTGRES and (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    env = os.environ | environment_of(broker, request)
    command = [sys.executable, "-W", "error", "-m", "benchmarks", question, broker, "--quick", "--folder", tmp_path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" or "spark" in name  # the JVM tells how it was started
    rows = [line.split("|") for line in run.stdout.splitlines() if line.startswith("| ") and "median" not in line]
    assert sum(bool(row[4].strip()) for row in rows) == TARGETS[name]
    assert list(tmp_path.iterdir()) == []
