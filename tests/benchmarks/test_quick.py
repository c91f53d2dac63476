"""Each question can be asked of each of its brokers. The figures are not judged: a machine that runs tests is busy."""

import ast
import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import BROKERS, PAIRS, main, module_of, questions
from tests.house.rooms import ROOT
from tests.pulsar.kit import url_of as pulsar_url
from tests.sql.postgres import Postgres

GROWTH = {"day": 0, "growth_partitions": 6, "growth_transactions": 3, "growth_bridges": 0}
# The number of figures that have a target: a question that no longer measures its own is rotten, too.
TARGETS = {
    "none": {"overhead": 3, "checker": 2},
    "embedded": {"write": 6, "read": 4, "commit": 0, "group_commit": 3, "aio": 0, "memory": 4, "processes": 10}
    | {"large_file": 5, "telemetry": 4, "spans": 2, "growth_log": 0}
    | GROWTH,
    "kafka": {
        "write": 8,
        "read": 2,
        "process": 3,
        "waiting": 1,
        "group_commit": 3,
        "aio": 0,
        "half_messages": 4,
        "small": 2,
    }
    | {"tokens": 1, "telemetry": 4, "outbox": 7, "processor_db": 0, "spark_write": 6, "spark_read": 2}
    | {"spark_recover": 1, "spans": 2, "copy": 1, "mirror": 1, "growth_log": 0}
    | GROWTH,
    "pulsar": {"write": 3, "read": 2, "process": 1, "commit": 1, "group_commit": 3, "half_messages": 4, "memory": 4}
    | {"spark_write": 0, "spans": 2, "copy": 1}
    | GROWTH
    | {"growth_partitions": 4},
    "rocketmq": {"write": 3, "read": 2, "group_commit": 7, "recover": 0} | GROWTH | {"growth_partitions": 4},
}

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
    assert {(question, broker) for question, *brokers in listed for broker in brokers} == set(PAIRS)
    assert {broker: set(questions) for broker, questions in TARGETS.items()} == {
        broker: set(questions.split()) for broker, questions in BROKERS.items()
    }


def test_each_question_is_a_function_of_its_module_and_each_module_has_one():
    modules = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert {module_of(question) for question in questions()} == modules.keys()
    for question in questions():
        assert question in {
            node.name for node in modules[module_of(question)].body if isinstance(node, ast.FunctionDef)
        }


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


@pytest.mark.full  # the first run fetches Kafka's tools, and what it is compared with
@pytest.mark.parametrize(
    ("question", "broker"),
    [pytest.param(*pair, marks=() if pair[1] in ("none", "embedded") else WITH_A_BROKER) for pair in PAIRS],
)
def test_a_benchmark_runs_and_leaves_nothing(question, broker, tmp_path, request):
    if question in WITH_POSTGRES and (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    env = os.environ | environment_of(broker, request)
    command = [sys.executable, "-W", "error", "-m", "benchmarks", question, broker, "--quick", "--folder", tmp_path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "" or "spark" in question  # the JVM tells how it was started
    rows = [line.split("|") for line in run.stdout.splitlines() if line.startswith("| ") and "median" not in line]
    assert sum(bool(row[4].strip()) for row in rows) == TARGETS[broker][question]
    assert list(tmp_path.iterdir()) == []
