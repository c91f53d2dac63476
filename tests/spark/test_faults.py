"""Tests of a writer in a real Spark under faults of Spark, of its machines and of the broker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txnbridge
from benchmarks.spark import connector_jars
from tests.spark import faults, kit
from tests.spark.faults import Fault

pyspark = pytest.importorskip("pyspark", reason="needs PySpark")
from pyspark.errors import StreamingQueryException  # noqa: E402

from tests.spark import measured  # noqa: E402

# Two drivers, one after the other, on a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(600)

# Three files, each a batch, so large that Spark shares each out to two tasks where partitions are small. Each task has
# more rows than travel to the driver.
ROWS, FILES = 300, 3
WIDTH = 200
SMALL = {"spark.sql.files.maxPartitionBytes": str(ROWS * (WIDTH + 1) * 2 // 3)}
# With one driver.
PATIENCE = 240


def wait_for(what, *args):
    end = time.monotonic() + PATIENCE
    while not what(*args):
        assert time.monotonic() < end, f"{what} {args} did not come true"
        time.sleep(0.05)


class Query:
    """A stream over files of numbers, whose drivers are processes of their own."""

    def __init__(self, folder: Path, url: str, **options: str) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        self.sink = kit.options(url, topic=f"out-{kit.new_run()}", **options)
        self.checkpoint = folder / "checkpoint"
        self.input = folder / "input"
        self.input.mkdir()
        for number in range(FILES):
            values = range(number * ROWS, (number + 1) * ROWS)
            path = self.input / f"{number}.txt"
            path.write_text("".join(f"{value:{WIDTH}}\n" for value in values))
            os.utime(path, (number, number))  # Spark takes the oldest first
        self.environment = {**os.environ, **faults.installed(self.faults), "PYSPARK_PYTHON": sys.executable}
        self.options = {
            "url": url,
            "topic": self.sink.topic,
            "createTopics": "2",
            "checkpointLocation": str(self.checkpoint),
            **options,
        }

    @contextlib.contextmanager
    def driver(
        self,
        settings: dict[str, str] | None = None,
        *,
        master: str = "local[2,3]",
        shuffled: int = 0,
        connect: bool = False,
        format: str = "txnbridge",
        jobs: Sequence[int] = (),
        source: tuple[str, dict[str, str]] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A driver that writes all there is, or runs these jobs; it is killed if it still runs at the end."""
        source = source or ("text", {"path": str(self.input), "maxFilesPerTrigger": "1"})
        given = {
            "master": master,
            "settings": settings or {},
            "connect": connect,
            "format": format,
            "jobs": jobs,
            "source": source[0],
            "source_options": source[1],
            "shuffled": shuffled,
            "options": self.options,
        }
        command = [sys.executable, "-m", "tests.spark.drivers", json.dumps(given)]
        with open(self.folder / "drivers.log", "ab") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, *args: Any, **given: Any) -> int:
        """Run a driver to its end; its exit code."""
        with self.driver(*args, **given) as process:
            return process.wait(PATIENCE)

    def prepared(self) -> list[int]:
        """The task partitions of every transaction that was prepared so far."""
        return [note["partition"] for note in faults.notes(self.faults) if note["event"] == "prepare/after"]

    def log(self) -> str:
        return (self.folder / "drivers.log").read_text()

    def id(self) -> str:
        return str(json.loads((self.checkpoint / "metadata").read_text())["id"])

    def after_the_first_batch(self) -> str:
        return str(self.checkpoint / "commits" / "0")

    def check(self) -> None:
        """Every row was published once, and nothing is left open."""
        assert kit.published(self.sink) == list(range(ROWS * FILES))
        assert kit.left_open(self.sink, self.id()) == []


@pytest.fixture
def query(tmp_path, url):
    return Query(tmp_path, url)


STEPS: dict[str, dict[str, Any]] = {
    "before the decision": {"at": "decision.append/before:claim"},
    "after the decision": {"at": "decision.append/after:claim"},
    "between two tokens": {"at": "resolve/before", "nth": 2, "behind": "resolve/after"},
    "before the mark": {"at": "decision.append/before:done"},
    "after the mark": {"at": "decision.append/after:done"},
}
# Two drivers take some 20 seconds: without --full these two, in which a naive writer loses or doubles most.
EVERY_RUN = {("embedded", "after the decision"), ("kafka", "between two tokens")}


@pytest.mark.parametrize(
    ("url", "step"),
    [
        pytest.param(broker, step, marks=() if (broker, step) in EVERY_RUN else pytest.mark.full)
        for broker in ("embedded", "kafka")
        for step in STEPS
    ],
    indirect=["url"],
)
def test_a_driver_killed_while_it_commits_a_batch_loses_and_doubles_nothing(query, step):
    fault = Fault("die", then="kill driver", once=query.after_the_first_batch(), **STEPS[step])
    faults.order(query.faults, fault)
    assert query.run(SMALL) == -signal.SIGKILL
    assert faults.happened(query.faults, "die"), query.log()
    assert sorted(query.prepared()) == [0, 0, 1, 1]
    # The second batch comes again under a new run, as one task; what is decided is not written again.
    assert query.run() == 0, query.log()
    assert query.prepared()[4:] == ([0, 0] if step == "before the decision" else [0])
    query.check()


@pytest.mark.full
def test_a_driver_killed_while_tasks_write_loses_and_doubles_nothing(query):
    """One task has prepared; nobody has decided."""
    once = query.after_the_first_batch()
    faults.order(query.faults, Fault("die", at="prepare/after", then="kill driver", in_task=True, once=once))
    assert query.run(SMALL) == -signal.SIGKILL
    assert query.run() == 0, query.log()
    query.check()


@pytest.mark.full
def test_a_driver_killed_while_it_publishes_in_foreach_batch_loses_and_doubles_nothing(query):
    fault = Fault("die", then="kill driver", once=query.after_the_first_batch(), **STEPS["between two tokens"])
    faults.order(query.faults, fault)
    assert query.run(SMALL, format="foreachBatch") == -signal.SIGKILL
    assert query.run(format="foreachBatch") == 0, query.log()
    query.check()


@kit.mostly_embedded
def test_a_job_killed_behind_its_decision_and_run_again_publishes_once(query):
    job = f"job-{kit.new_run()}"
    query.options |= {"txnAppId": job, "txnVersion": "1"}
    faults.order(query.faults, Fault("die", then="kill driver", **STEPS["after the decision"]))
    assert query.run(jobs=[ROWS * FILES], shuffled=2) == -signal.SIGKILL
    assert faults.happened(query.faults, "die"), query.log()
    assert kit.published(query.sink) == []
    assert query.run(jobs=[ROWS * FILES], shuffled=3) == 0, query.log()
    assert sorted(query.prepared()) == [0, 1]  # the second one writes nothing, and publishes what the first one wrote
    assert kit.published(query.sink) == list(range(ROWS * FILES))
    assert kit.left_open(query.sink, job) == []


@pytest.mark.full
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_rows_of_sparks_own_kafka_source_are_published_once(query, url):
    topic = f"in-{kit.new_run()}"
    with txnbridge.connect(url, create_topics=0) as bridge:
        bridge.admin.create_topic(topic, partitions=2)
        with bridge.transaction() as txn:
            txn.send_many(topic, [b"%*d" % (WIDTH, value) for value in range(ROWS * FILES)])
    where = {"kafka.bootstrap.servers": url.removeprefix("kafka://"), "kafka.isolation.level": "read_committed"}
    batches = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(ROWS)}
    jars = {"spark.jars": ",".join(map(str, connector_jars()))}
    fault = Fault("die", then="kill driver", once=query.after_the_first_batch(), **STEPS["between two tokens"])
    faults.order(query.faults, fault)
    assert query.run(jars, source=("kafka", where | batches)) == -signal.SIGKILL
    assert faults.happened(query.faults, "die"), query.log()
    assert query.run(jars, source=("kafka", where | batches)) == 0, query.log()
    query.check()


@pytest.mark.full
@pytest.mark.parametrize(
    ("format", "where"),
    [("in-tasks", {"at": "resolve/after", "in_task": True}), ("without-a-log", STEPS["between two tokens"])],
)
def test_a_simpler_writer_doubles_rows_when_its_driver_is_killed(query, format, where):
    faults.order(query.faults, Fault("die", then="kill driver", once=query.after_the_first_batch(), **where))
    assert query.run(SMALL, format=format) == -signal.SIGKILL
    assert query.run(format=format) == 0, query.log()
    doubled = Counter(kit.published(query.sink)) - Counter(range(ROWS * FILES))
    assert doubled and doubled.keys() <= set(range(ROWS, 2 * ROWS))  # of the batch whose driver was killed
    with pytest.raises(AssertionError):
        query.check()


@pytest.mark.full
@pytest.mark.parametrize("step", ["before the decision", "after the decision"])
def test_one_of_two_drivers_on_one_checkpoint_goes_on(query, step):
    faults.order(query.faults, Fault("held", then="hold", once=query.after_the_first_batch(), **STEPS[step]))
    with query.driver(SMALL) as first:
        wait_for(faults.happened, query.faults, "held")
        assert query.run() == 0, query.log()
        query.check()
        faults.release(query.faults, "held")
        assert first.wait(PATIENCE) != 0
    query.check()


def _answers(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running(folder: Path, environment: dict[str, str], name: str, *args: str) -> Iterator[None]:
    """One of a cluster's processes. A worker ends its executors when it is told to end."""
    home = Path(pyspark.__file__).parent
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--webui-port", "0", *args]
    with open(folder / "cluster.log", "ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture
def cluster(query):
    """The address of a master of Spark with two workers, each at an address and with a core of its own."""
    environment = {**query.environment, "SPARK_DAEMON_MEMORY": "256m"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        address = ("--host", "127.0.0.1", "--port", str(port))
        stack.enter_context(running(query.folder, environment, "master.Master", *address))
        wait_for(_answers, port)
        for host in ("127.0.0.2", "127.0.0.3"):
            given = ("--host", host, "--cores", "1", "--memory", "1g", "--work-dir", str(query.folder / host))
            stack.enter_context(running(query.folder, environment, "worker.Worker", *given, master))
        yield master


# A driver waits for both executors, so that each has a part of the first tasks.
BOTH = {
    "spark.cores.max": "2",
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


@pytest.mark.full
@pytest.mark.parametrize("at", ["prepare/before", "prepare/after"])
def test_a_stage_is_tried_again_after_an_executor_was_killed(query, cluster, at):
    """The executor's shuffle files are lost: Spark runs the stage before again, and then the remaining tasks."""
    once = query.after_the_first_batch()
    faults.order(query.faults, Fault("die", at=at, then="kill executor", in_task=True, once=once))
    assert query.run(SMALL | BOTH, master=cluster, shuffled=3) == 0, query.log()
    assert faults.happened(query.faults, "die")
    assert "FetchFailed" in query.log()
    query.check()


@pytest.mark.full
def test_only_one_of_two_attempts_that_both_end_well_is_published(query, cluster):
    once = query.after_the_first_batch()
    met = [
        Fault(phase, at=f"prepare/{phase}", then="meet", in_task=True, partition=0, once=once)
        for phase in ("before", "after")
    ]
    faults.order(query.faults, *met)
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.quantile": "0.5",
    }
    assert query.run(SMALL | BOTH | speculation, master=cluster) == 0, query.log()
    prepared = [note for note in faults.notes(query.faults) if note["event"] == "prepare/after"]
    assert {note["attempt"] for note in prepared if note["partition"] == 0} == {0, 1}
    query.check()


@pytest.mark.full
def test_over_spark_connect_a_stream_is_published_once_and_goes_on_after_a_kill(query):
    pytest.importorskip("grpc", reason="needs what Spark Connect needs: pip install 'pyspark[connect]'")
    fault = Fault("die", then="kill driver", once=query.after_the_first_batch(), **STEPS["between two tokens"])
    faults.order(query.faults, fault)
    assert query.run(SMALL, master="local[2]", connect=True) == -signal.SIGKILL
    assert query.run(master="local[2]", connect=True) == 0, query.log()
    query.check()


@pytest.mark.full
@kit.mostly_embedded
def test_over_spark_connect_a_function_is_told_nothing_and_still_publishes_once(query):
    pytest.importorskip("grpc", reason="needs what Spark Connect needs: pip install 'pyspark[connect]'")
    name = f"query-{kit.new_run()}"
    query.options["txnAppId"] = name
    fault = Fault("die", then="kill driver", once=query.after_the_first_batch(), **STEPS["between two tokens"])
    faults.order(query.faults, fault)
    how = {"master": "local[2]", "connect": True, "format": "foreachBatch"}
    assert query.run(SMALL, **how) == -signal.SIGKILL
    assert faults.happened(query.faults, "die"), query.log()
    assert query.run(**how) == 0, query.log()
    assert kit.published(query.sink) == list(range(ROWS * FILES))
    assert kit.left_open(query.sink, name) == []
    with txnbridge.connect(query.sink.url, application=query.sink.application(name)) as bridge:
        opening = bridge.decisions().read((name, "sink")).opening
    assert opening is not None and opening.number == 2  # as many as starts, and not one for each batch


@pytest.fixture
def orders(spark_faults):
    """Set faults in the processes of the session that tests share."""
    for path in spark_faults.iterdir():
        if path.suffix in (".happened", ".go", ".jsonl"):
            path.unlink()
    yield lambda *ordered: faults.order(spark_faults, *ordered)
    faults.order(spark_faults)
    for path in spark_faults.glob("*.happened"):
        faults.release(spark_faults, path.stem)


def stream(spark, query, rows=None):
    """The same query in the session that tests share."""
    found = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(query.input))
    if rows is not None:
        found = found.where(rows)
    writer = found.writeStream.format("txnbridge").options(**query.options)
    return writer.trigger(availableNow=True).start()


@pytest.fixture
def small(spark):
    """Small partitions: two tasks a batch."""
    for name, value in SMALL.items():
        spark.conf.set(name, value)
    yield
    for name in SMALL:
        spark.conf.unset(name)


@pytest.mark.parametrize("at", ["prepare/after", pytest.param("prepare/before", marks=pytest.mark.full)])
def test_a_worker_that_is_killed_is_replaced_and_its_rows_come_once(spark, query, orders, spark_faults, small, at):
    orders(Fault("die", at=at, then="kill", in_task=True, once=query.after_the_first_batch()))
    stream(spark, query).awaitTermination()
    assert faults.happened(spark_faults, "die")
    attempts = {note["attempt"] for note in faults.notes(spark_faults) if note["event"] == "prepare/after"}
    assert attempts == {0, 1}
    query.check()


def test_a_query_stopped_while_a_task_writes_goes_on_later(spark, query, orders, spark_faults, small):
    orders(Fault("task", at="prepare/before", then="hold", in_task=True, once=query.after_the_first_batch()))
    started = stream(spark, query)
    wait_for(faults.happened, spark_faults, "task")
    started.stop()
    faults.release(spark_faults, "task")
    assert kit.published(query.sink) == list(range(ROWS))
    stream(spark, query).awaitTermination()
    query.check()


def test_a_query_stopped_while_it_commits_goes_on_later(spark, query, orders, spark_faults, small):
    orders(Fault("commit", at="decision.append/after:claim", then="hold", once=query.after_the_first_batch()))
    started = stream(spark, query)
    wait_for(faults.happened, spark_faults, "commit")
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(started.stop)
        wait_for(lambda: not started.isActive)
        faults.release(spark_faults, "commit")
        stopped.result(PATIENCE)
    stream(spark, query).awaitTermination()
    query.check()


@pytest.mark.parametrize(
    "step",
    [
        "after the decision",
        *(pytest.param(s, marks=pytest.mark.full) for s in ("between two tokens", "after the mark")),
    ],
)
def test_a_commit_whose_process_is_killed_is_not_undone_by_the_abort(spark, query, orders, spark_faults, small, step):
    """Spark takes the commit for failed, and calls abort() with every task's message."""
    orders(Fault("die", then="kill", once=query.after_the_first_batch(), **STEPS[step]))
    with pytest.raises(StreamingQueryException):
        stream(spark, query).awaitTermination()
    assert faults.happened(spark_faults, "die")
    stream(spark, query).awaitTermination()
    query.check()


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
@pytest.mark.parametrize(
    "at",
    [
        "resolve/before",
        pytest.param("decision.append/before:claim", marks=pytest.mark.full),
        pytest.param("decision.append/before:done", marks=pytest.mark.full),
    ],
)
def test_while_the_broker_is_killed_and_started_again_a_commit_loses_and_doubles_nothing(
    spark, query, orders, spark_faults, small, kafka_broker, at
):
    orders(Fault("commit", at=at, then="hold", once=query.after_the_first_batch()))
    started = stream(spark, query)
    wait_for(faults.happened, spark_faults, "commit")
    kafka_broker.kill()
    try:
        faults.release(spark_faults, "commit")
    finally:
        kafka_broker.start()
    with contextlib.suppress(StreamingQueryException):  # whether it waited long enough is not the question
        started.awaitTermination()
    stream(spark, query).awaitTermination()
    query.check()


def test_batches_and_tasks_without_rows_are_committed(spark, query, small):
    """The second batch is empty, and so is one task of the first."""
    stream(spark, query, rows=f"value < 10 or value >= {2 * ROWS}").awaitTermination()
    assert sorted(path.name for path in query.checkpoint.glob("commits/[0-9]*")) == ["0", "1", "2"]
    assert kit.published(query.sink) == [*range(10), *range(2 * ROWS, 3 * ROWS)]
    assert kit.left_open(query.sink, query.id()) == []


# What the client allows for Kafka's format around a row; and what it is around one without key and headers, with the
# batch that it has for itself.
CLIENT, BATCH = 36, 11 + 61


def write_one_row(spark, sink, size, **given):
    frame = spark.range(1).selectExpr(f"repeat('x', {size}) as value")
    writer = frame.write.format("txnbridge").options(url=sink.url, topic=sink.topic, createTopics="1", **given)
    writer.mode("append").save()


@pytest.mark.parametrize(
    ("url", "largest", "given", "named"),
    [
        ("embedded", 100_000, {}, "max_message_bytes"),
        ("kafka", 1_000_000 - CLIENT, {}, "message.max.bytes"),
        (
            "kafka",
            1_048_588 - BATCH,
            {"kafka.max.request.size": "2000000", "kafka.compression.type": "none"},
            "MSG_SIZE_TOO_LARGE",
        ),
    ],
    indirect=["url"],
    ids=["embedded", "the client's bound", "the broker's bound"],
)
def test_the_largest_row_passes_and_one_byte_more_is_refused_by_name(spark, url, largest, given, named):
    limit = f"?max_message_bytes={largest}" if url.startswith("embedded") else ""
    sink = kit.options(url + limit, topic=f"out-{kit.new_run()}")
    write_one_row(spark, sink, largest, **given)
    with pytest.raises(Exception, match=re.escape(named)):
        write_one_row(spark, sink, largest + 1, **given)
    with txnbridge.connect(url) as bridge:
        assert sink.topic is not None
        (row,) = bridge.read(sink.topic, 10)
    assert len(row.value) == largest


@pytest.mark.full
@pytest.mark.parametrize("url", ["embedded", "kafka", "pulsar"], indirect=True)  # on RocketMQ a task has 10,000 rows
def test_a_worker_needs_no_more_memory_for_more_rows(query):
    """The second job has 180 MB more of rows. What a worker keeps of them is bounded."""
    peaks = query.folder / "peaks"
    # Nobody listens: a writer that has listeners takes another way for each row.
    query.environment = query.environment | {"PYTHONPATH": str(faults.ROOT), measured.FILE: str(peaks)}
    assert query.run(jobs=[200_000, 2_000_000], format="measured") == 0, query.log()
    few, many = map(int, peaks.read_text().split())
    assert many - few < 64 * 1024
