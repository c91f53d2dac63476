"""Helpers of the tests of the Spark writer: batches written as Spark would, and what was published."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark_txnbridge._kept_bridges import sessions
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write.batch_identity import BatchId, Written
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.task import slot_writers, write_partition
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.spark import faults
from txnbridge import NotFound
from txnbridge.spi import OpenTransaction

# What a broker hardly changes is run on Kafka only where everything is run.
mostly_embedded = pytest.mark.parametrize(
    "url", ["embedded", pytest.param("kafka", marks=pytest.mark.full)], indirect=True
)
# Those of Pulsar are a ledger, an entry in it, and more.
# The session's broker writes one op message for each end: under load it falls behind, asks about halves that have
# ended, and each answer is one more end.
LOADED_ROCKETMQ = {"transactionOpBatchInterval": "1000", "transactionTimeOut": "4000"}

where_positions_are_numbers = pytest.mark.parametrize(
    "url", ["embedded", "kafka", pytest.param("rocketmq", marks=pytest.mark.full)], indirect=True
)


@contextlib.contextmanager
def local_spark(folder: Path) -> Iterator[object]:
    """A session whose faults are ordered in this folder, and whose Java process ends with it; the one that there is."""
    sql = pytest.importorskip("pyspark.sql", reason="needs PySpark")
    if (running := sql.SparkSession.getActiveSession()) is not None:
        yield running  # it ends with whoever has started it
        return
    try:
        java()
    except brokers.ToolMissing as error:
        pytest.skip(f"Spark needs Java: {error}")
    # The workers are to be this interpreter, and to find this checkout's tests.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    builder = (
        sql.SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        # Compiling less takes less time than a test session would win by it.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.shuffle.partitions", "2")
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in faults.installed(folder).items():
            environment.setenv(name, value)
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    context = type(session.sparkContext)
    try:
        yield session
    finally:
        session.stop()
        gateway, context._gateway, context._jvm = context._gateway, None, None  # PySpark keeps it for the next session
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)


def options(url: str, **given: str) -> SinkOptions:
    return SinkOptions.parse({"url": url, "topic": "out", "createTopics": "2", **given})


# Such a row makes its task a large one, which writes a transaction.
LARGE = 17_000


def rows(values: Iterable[object]) -> list[pa.RecordBatch]:
    """Return rows for a task: a number makes a large row, which is read as the number; a text is written as it is."""
    texts = [(value if isinstance(value, str) else str(value).rjust(LARGE)).encode() for value in values]
    ends = pa.py_buffer(array("i", accumulate(map(len, texts), initial=0)))
    # Not pa.array(texts), which imports pandas: a third of a second in each of the hundreds of processes killed here.
    column = pa.Array.from_buffers(pa.string(), len(texts), [None, ends, pa.py_buffer(b"".join(texts))])
    return [pa.RecordBatch.from_arrays([column], ["value"])]


def new_run() -> str:
    return str(uuid.uuid4())


def write(found: SinkOptions, identity: BatchId, partitions: Sequence[Sequence[object]]) -> list[Written]:
    """The tasks of a batch, one after another in this process."""
    return [
        write_partition(
            identity, found, Columns(frozenset({"value"}), found.topic), rows(values), number, f"task {number}"
        )
        for number, values in enumerate(partitions)
    ]


def run_batch(found: SinkOptions, identity: BatchId, partitions: Sequence[Sequence[object]]) -> None:
    _driver.commit(found, write(found, identity, partitions))


def forget() -> None:
    """Let go of what a Python worker keeps between tasks."""
    for keeper in (sessions, slot_writers):
        keeper.clear()


def published(found: SinkOptions) -> list[int]:
    """A topic that nobody has made yet holds nothing."""
    with txnbridge.connect(found.url) as bridge, contextlib.suppress(NotFound):
        assert found.topic is not None
        bridge.ensure_topics(found.topic)  # nobody may have written to it
        return sorted(int(message.value) for message in bridge.read(found.topic, 1_000_000))
    return []


def left_open(found: SinkOptions, query: str = "") -> list[str]:
    """The transactions under a prefix, or of one query, that hold readers back; what is ending is waited for.

    The bridge has the query's application: a slow round of check-backs of RocketMQ copies halves that are being
    published, and the broker lists the copies until that application answers.
    """
    listed: list[OpenTransaction] = []
    with txnbridge.connect(found.url, application=found.application(query)) as bridge:

        def none_is_ending() -> bool:
            ours = f"{found.prefix}.{query}"
            listed[:] = (open for open in bridge.admin.transactions() if open.transactional_id.startswith(ours))
            return all(open.state != "ending" for open in listed)

        eventually(none_is_ending, "what is decided has ended")
    return [open.transaction for open in listed]
