"""Tests of pipelines from broker to broker: every message is published once, whichever process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from txnbridge_conformance.observing import eventually

from tests.spark.kit import mostly_embedded, new_run, where_positions_are_numbers
from txnbridge import BackendMissing, InvalidOption, NotFound, PositionLost

pytest.importorskip("pyspark", reason="needs PySpark")
import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.streaming.listener import SourceProgress
from pyspark_txnbridge import _cli_plugin, offsets_behind, pipeline
from pyspark_txnbridge._commands import pipeline_command as command
from pyspark_txnbridge._read.offset_lag import lags
from pyspark_txnbridge._write.batch_identity import BatchInDoubt


@pytest.fixture
def topics(bridge):
    names = f"in-{new_run()}", f"out-{new_run()}"
    for name in names:
        bridge.admin.create_topic(name, partitions=2)
    return names


@pytest.fixture
def move(spark, url, topics, tmp_path):
    """Run a pipeline until all that is there is published."""

    def move(**given):
        source, target = topics
        checkpoint = str(tmp_path / "checkpoint")
        return pipeline.run(url, source, url, target, checkpoint=checkpoint, available_now=True, spark=spark, **given)

    return move


def send(bridge, topic, values, key=None):
    with bridge.transaction() as txn:
        for value in values:
            txn.send(topic, str(value).encode(), key=key, headers={"number": str(value)})
    readable(bridge, topic, values)


def readable(bridge, topic, values):
    """Wait until readers see these: a broker may say earlier that they are committed."""
    wanted = {str(value).encode() for value in values}
    eventually(lambda: wanted <= {message.value for message in bridge.read(topic, 1_000_000)}, "they can be read")


def published(bridge, topic):
    return sorted(int(message.value) for message in bridge.read(topic, 1_000_000))


@where_positions_are_numbers
def test_messages_pass_as_they_are_and_once(bridge, topics, move):
    source, target = topics
    send(bridge, source, range(30), key="k")
    with bridge.transaction(prepare=True) as open:
        open.send(source, b"-1", partition=0)
    told: list[pipeline.Progress] = []
    done = move(max_rows_per_batch=10, report=told.append)
    assert (done.rows, done.batches) == (30, len(told)) and done.batches >= 3
    assert told[-1] == done
    # The mark behind the last message is a position where brokers have such, and a batch without rows.
    assert (told[0].behind, done.behind) in ((20, 0), (21, 1))
    readable(bridge, target, range(30))
    assert published(bridge, target) == list(range(30))
    message = bridge.read(target, 1)[0]
    assert (message.key, message.headers["number"]) == (b"k", message.value.decode())
    bridge.abort(open.token)
    send(bridge, source, range(30, 40))
    assert move().rows == 10
    readable(bridge, target, range(40))
    assert published(bridge, target) == list(range(40))
    assert left_open_in(bridge, target) == []


def left_open_in(bridge, topic):
    """Return a topic's open transactions. Those that are ending are decided, and on RocketMQ may stay listed so."""
    listed = (each for each in bridge.admin.transactions() if each.state != "ending")
    return [each for each in listed if topic in {name for name, _ in each.partitions}]


@mostly_embedded
def test_sql_and_functions_change_the_rows(bridge, topics, move, spark, url, tmp_path):
    source, target = topics
    send(bridge, source, range(10))
    move(sql="select key, cast(cast(string(value) as int) * 2 as string) as value from input where offset >= 0")
    readable(bridge, target, range(0, 20, 2))
    assert published(bridge, target) == list(range(0, 20, 2))

    def keep_the_even_and_name_the_topic(frame):
        even = frame.where(F.col("value").cast("string").cast("int") % 2 == 0)
        return even.select("value", F.lit(other).alias("topic"))

    other = f"out-{new_run()}"
    bridge.admin.create_topic(other, partitions=1)
    function, checkpoint = keep_the_even_and_name_the_topic, str(tmp_path / "other")
    pipeline.run(url, [source], url, None, checkpoint=checkpoint, transform=function, available_now=True, spark=spark)
    readable(bridge, other, range(0, 10, 2))
    assert published(bridge, other) == list(range(0, 10, 2))


@mostly_embedded
def test_a_wrong_pipeline_is_refused_in_our_words(bridge, topics, move, url, spark, tmp_path):
    _, target = topics
    with pytest.raises(InvalidOption, match="by SQL or by a function"):
        move(sql="select value from input", transform=lambda frame: frame)
    with pytest.raises(InvalidOption, match=r"Spark refuses the pipeline: .*no_such_column"):
        move(sql="select no_such_column as value from input")
    with pytest.raises(InvalidOption, match="Required attribute 'value' not found"):
        move(sql="select key from input")
    with pytest.raises(NotFound, match="in-missing"):
        pipeline.run(url, "in-missing", url, target, checkpoint=str(tmp_path), spark=spark)
    with pytest.raises(InvalidOption, match="did you mean commitTimeout"):
        move(to_options={"commitTimout": "3"})


def test_a_pipeline_that_would_feed_itself_is_refused():
    for given in ({"to_topic": "y"}, {"to_topic": None, "to_options": {"Topic": "y "}}):
        with pytest.raises(InvalidOption, match="would read what it writes"):
            pipeline.run("embedded:a", "x, y", "embedded:a", checkpoint="nowhere", **given)


@mostly_embedded
def test_a_row_that_would_go_back_to_where_it_comes_from_ends_the_pipeline(bridge, topics, url, spark, tmp_path):
    source, _ = topics
    send(bridge, source, range(10))
    given = {"checkpoint": str(tmp_path / "checkpoint"), "available_now": True, "spark": spark}
    with pytest.raises(InvalidOption, match="would read what it writes: a row's column topic"):
        pipeline.run(url, source, url, None, sql="select * from input", **given)
    assert published(bridge, source) == list(range(10))


@pytest.mark.offline
def test_a_batch_in_doubt_is_told_as_what_it_is():
    with pytest.raises(BatchInDoubt, match=r"^batch 3 was decided$"), pipeline._unwrapping_errors():
        raise PySparkException("Traceback:\npyspark_txnbridge._batch_identity.BatchInDoubt: batch 3 was decided\n")


@pytest.mark.offline
@pytest.mark.parametrize("latest", ["None", "null", "7", '{"topic": {"0": [3, 4, 5]}}'])
def test_offsets_that_cannot_be_counted_give_no_lag(latest):
    source = SourceProgress("a source", "None", '{"topic": {"0": [1, 2, 3]}}', latest, 0, 0.0, 0.0, {})
    assert offsets_behind(source) == {} and lags(source) == []


@mostly_embedded
def test_rows_that_are_gone_stop_the_pipeline(bridge, topics, move):
    source, target = topics
    send(bridge, source, range(3))
    start = json.dumps({source: {"0": 0, "1": 1000}})
    with pytest.raises(PositionLost, match="cannot be read at 1000"):
        move(start=start)
    assert published(bridge, target) == []


def run_command(*arguments):
    return CliRunner().invoke(command, ["run", "--checkpoint", "x", *arguments])


def test_the_command_checks_what_it_is_given():
    from_and_to = ("--from", "embedded:a", "--from-topic", "x", "--to", "embedded:b", "--to-topic", "y")
    for arguments, message in [
        (("--from-option", "timeout"), "--from-option takes NAME=VALUE"),
        (("--transform", "nowhere"), "MODULE:FUNCTION"),
        (("--transform", "no_such_module:f"), "no_such_module"),
        (("--transform", "json:no_such_function"), "no_such_function"),
        (("--transform", "json:__name__"), "is no function"),
    ]:
        with pytest.raises(InvalidOption, match=message):
            raise run_command(*from_and_to, *arguments).exception


def test_the_command_comes_with_the_package():
    assert [each.name for each in _cli_plugin.txnbridge_commands()] == ["spark", "pipeline"]
    assert "--max-rows-per-batch" in CliRunner().invoke(command, ["run", "--help"]).output


def test_without_pyspark_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(BackendMissing, match=r"pip install -e '\.\[spark\]'"):
        pipeline.run("embedded:a", "x", "embedded:b", "y", checkpoint="nowhere")


HOME = Path(str(pyspark.__file__)).parent
BY_MODULE = [sys.executable, "-m", "pyspark_txnbridge.pipeline"]


def start_command(url, topics, checkpoint, *arguments, command=BY_MODULE):
    """A pipeline in a process group of its own."""
    source, target = topics
    quiet = "--conf spark.ui.enabled=false --conf spark.driver.bindAddress=127.0.0.1 --conf spark.driver.host=127.0.0.1"
    ends = ["--from", url, "--from-topic", source, "--to", url, "--to-topic", target, "--checkpoint", str(checkpoint)]
    return subprocess.Popen(
        [*command, *ends, *arguments],
        env=os.environ
        | {"PYSPARK_SUBMIT_ARGS": f"--master local[2] {quiet} pyspark-shell"}
        | {"SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def last_life_publishes_all(bridge, url, topics, checkpoint, values, **how):
    target = topics[1]
    process = start_command(url, topics, checkpoint, "--max-rows-per-batch", "200", "--available-now", **how)
    try:
        told, shown = process.communicate(timeout=240)
    finally:
        kill(process)
    assert process.returncode == 0, shown
    assert "rows in" in told
    readable(bridge, target, values)
    assert published(bridge, target) == list(values)
    assert left_open_in(bridge, target) == []


@pytest.mark.full
@mostly_embedded
def test_the_same_options_work_with_spark_submit(bridge, url, topics, tmp_path):
    send(bridge, topics[0], range(100))
    command = [str(HOME / "bin" / "spark-submit"), "--master", "local[2]", pipeline.__file__]
    last_life_publishes_all(bridge, url, topics, tmp_path / "checkpoint", range(100), command=command)


@mostly_embedded
@pytest.mark.timeout(600)  # Spark starts twice, which took four minutes on a loaded machine
def test_killed_between_batches_the_same_command_goes_on(bridge, url, topics, tmp_path):
    source, target = topics
    send(bridge, source, range(400))
    process = start_command(url, topics, tmp_path / "checkpoint", "--max-rows-per-batch", "40")
    try:
        while len(bridge.read(target, 1_000_000)) < 40:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    finally:
        kill(process)
    assert len(published(bridge, target)) < 400
    last_life_publishes_all(bridge, url, topics, tmp_path / "checkpoint", range(400))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [6])
@pytest.mark.parametrize("url", ["embedded", "kafka", pytest.param("loaded rocketmq", id="rocketmq")], indirect=True)
def test_killed_again_and_again_every_message_is_published_once(bridge, url, topics, tmp_path, kills):
    """The pipeline may die at any point, also in the commit. Each run publishes at least one batch."""
    source, target = topics
    for first in range(0, 3000, 250):  # RocketMQ publishes the messages of a transaction one after another
        send(bridge, source, range(first, first + 250))
    for life in range(kills):
        process = start_command(url, topics, tmp_path / "checkpoint", "--max-rows-per-batch", "50")
        wanted = len(bridge.read(target, 1_000_000)) + 60
        try:
            while len(bridge.read(target, 1_000_000)) < wanted:
                assert process.poll() is None, process.communicate()
            time.sleep(life * 0.05)  # each time at another point of a batch
        finally:
            kill(process)
    last_life_publishes_all(bridge, url, topics, tmp_path / "checkpoint", range(3000))
