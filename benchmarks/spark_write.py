"""The exactly-once writer beside Spark's own Kafka sink, which publishes at least once: the same rows, in turn.

On Pulsar, beside a loop of the official client, which has no transactions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import _kafka
from benchmarks._harness import Report, Round, Settings, at_least, at_most, estimate, in_turn, timed
from benchmarks._spark import exactly_once, rows, spark

ROWS = {100: 5_000_000, 1024: 1_000_000}
BATCHES = 30  # micro-batches of one query, after five that warm it up
TASKS = 200  # tasks of one row each, which show the cost of a task
Write = Callable[[str], object]  # it writes all rows to a topic
TUNED = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}


def measure(settings: Settings, broker: str) -> None:
    {"kafka": kafka, "pulsar": pulsar}[broker](settings)


def kafka(settings: Settings) -> None:
    with _kafka.broker(settings) as url, spark() as session:
        for size, wanted in ROWS.items():
            count = 10_000 if settings.quick else wanted
            frame = rows(session, size, count)
            writers = {
                "ours": exactly_once(frame, url),
                "sink": _sink(frame, url, {}),
                "tuned": _sink(frame, url, TUNED),
            }
            for write in writers.values():
                write(_kafka.new_topic(url, 2))  # the first write starts the workers and does not count
            found = _in_turn(settings, url, writers, count)
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B to Kafka, two partitions")
            report.ratio("exactly once / Spark's sink", found["ours"], found["sink"], at_least(1.7))
            name = "exactly once / the sink with linger.ms=20, batch.size=1000000"
            report.ratio(name, found["ours"], found["tuned"], at_least(0.95))
            report.each(found, "a row")
        _many_tasks(settings, session, url)
        _micro_batches(settings, session, url)


def _in_turn(settings: Settings, url: str, writers: Mapping[str, Write], units: int) -> dict[str, list[Round]]:
    """Write to a new topic in each round."""

    def turn(write: Write) -> Round:
        topic = _kafka.new_topic(url, 2)
        found = timed(lambda: write(topic), units)()
        _kafka.drop_topic(url, topic)  # each of a large batch holds half a gigabyte or more
        return found

    return in_turn({name: partial(turn, write) for name, write in writers.items()}, settings.rounds)


def _sink(frame: Any, url: str, options: dict[str, str]) -> Write:
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", _kafka.bootstrap(url)).options(**options)
    return lambda topic: writer.option("topic", topic).save()


def _many_tasks(settings: Settings, session: Any, url: str) -> None:
    tasks = 4 if settings.quick else TASKS
    frame = session.range(0, tasks, 1, tasks).selectExpr("cast(id as string) as value")
    writers = {"exactly once": exactly_once(frame, url), "Spark's sink": _sink(frame, url, {})}
    found = _in_turn(settings, url, writers, tasks)
    report = Report(settings, f"Spark: {tasks} tasks of one row to Kafka")
    name = "a task exactly once / one of Spark's sink"
    report.ratio(name, found["Spark's sink"], found["exactly once"], at_most(3))
    report.each(found, "a task", "ms")


def _micro_batches(settings: Settings, session: Any, url: str) -> None:
    batches = 3 if settings.quick else BATCHES
    found = {"ours": [], "noop": []}  # type: dict[str, list[float]]
    for number in range(2 if settings.quick else 4):
        for name in list(found)[:: -1 if number % 2 else 1]:
            found[name] += _query(session, url, name, batches)
    report = Report(settings, "Spark: a micro-batch of 100 rows to Kafka, in milliseconds")
    ours, noop = estimate(found["ours"]), estimate(found["noop"])
    pairs = [a - b for a, b in zip(found["ours"], found["noop"], strict=True)]
    report.figure("exactly once, above the noop sink", estimate(pairs), "ms", at_most(300))
    report.figure("exactly once", ours, "ms")
    report.figure("noop", noop, "ms")


def _query(session: Any, url: str, name: str, batches: int) -> list[float]:
    """Return the duration of each micro-batch after those that warm up."""
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2)
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = source.load().selectExpr("cast(value as string) as value").writeStream
        writer = writer.option("checkpointLocation", checkpoint)
        if name == "ours":
            writer = writer.format("txnbridge").option("url", url).option("topic", _kafka.new_topic(url, 2))
        else:
            writer = writer.format("noop")
        query = writer.start()
        while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < batches + 5):
            time.sleep(0.1)
        if error := query.exception():
            raise RuntimeError(str(error))
        query.stop()
        warm = [each for each in query.recentProgress if 5 <= each.batchId < batches + 5]
    return [float(each.durationMs["triggerExecution"]) for each in warm]


PULSAR_ROWS = {100: 300_000, 1024: 100_000}


def pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    def to_new_topic(write: Write, count: int) -> Round:
        topic = pulsar.new_topic(url)
        return timed(lambda: write(topic), count)()

    with (
        pulsar.broker(settings) as url,
        pulsar.official(settings, url) as client,
        spark(with_sink=False) as session,
    ):
        for size, wanted in PULSAR_ROWS.items():
            count = 1_000 if settings.quick else wanted
            frame = rows(session, size, count)
            writers = {
                "exactly once": exactly_once(frame, url),
                "`send_async` in a loop": pulsar.write(client, size, count),
            }
            turns = {name: partial(to_new_topic, write, count) for name, write in writers.items()}
            for turn in turns.values():
                turn()  # the first write starts the workers and does not count
            found = in_turn(turns, settings.rounds)
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B from two partitions to a topic of Pulsar")
            writer, loop = found
            report.ratio(f"{writer} / {loop}", found[writer], found[loop])
            report.each(found, "a row")
