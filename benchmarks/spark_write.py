"""The exactly-once writer beside Spark's own Kafka sink, which publishes at least once: the same rows, in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks._harness import Report, Round, Settings, at_least, at_most, estimate, per_unit, run, speed
from benchmarks._kafka import bootstrap, broker, drop_topic, new_topic
from benchmarks._spark import exactly_once, rows, spark

ROWS = {100: 5_000_000, 1024: 1_000_000}
BATCHES = 30  # micro-batches of one query, after five that warm it up
TASKS = 200  # tasks of one row each, which show the cost of a task
TUNED = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}


def measure(settings: Settings) -> None:
    with broker() as url, spark() as session:
        for size, wanted in ROWS.items():
            count = 10_000 if settings.quick else wanted
            frame = rows(session, size, count)
            found: dict[str, list[Round]] = {}
            writers = {
                "ours": exactly_once(frame, url),
                "sink": _sink(frame, url, {}),
                "tuned": _sink(frame, url, TUNED),
            }
            for write in writers.values():
                write(new_topic(url, 2))  # the first write starts the workers and does not count
            for number in range(settings.rounds):
                for name in list(writers)[:: -1 if number % 2 else 1]:
                    topic = new_topic(url, 2)
                    begin = time.perf_counter()
                    writers[name](topic)
                    found.setdefault(name, []).append(Round([time.perf_counter() - begin], count))
                    drop_topic(url, topic)  # each holds half a gigabyte or more
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B to Kafka, two partitions")
            report.figure("exactly once / Spark's sink", speed(found["ours"], found["sink"]), target=at_least(1.7))
            name = "exactly once / the sink with linger.ms=20, batch.size=1000000"
            report.figure(name, speed(found["ours"], found["tuned"]), target=at_least(0.95))
            for name, rounds in found.items():
                report.figure(f"{name}, a row", per_unit(rounds, 1e6), "us")
        _many_tasks(settings, session, url)
        _micro_batches(settings, session, url)


def _sink(frame: Any, url: str, options: dict[str, str]) -> Callable[[str], None]:
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", bootstrap(url)).options(**options)
    return lambda topic: writer.option("topic", topic).save()


def _many_tasks(settings: Settings, session: Any, url: str) -> None:
    tasks = 4 if settings.quick else TASKS
    frame = session.range(0, tasks, 1, tasks).selectExpr("cast(id as string) as value")
    writers = {"exactly once": exactly_once(frame, url), "Spark's sink": _sink(frame, url, {})}
    found: dict[str, list[Round]] = {}
    for number in range(settings.rounds):
        for name in list(writers)[:: -1 if number % 2 else 1]:
            topic = new_topic(url, 2)
            begin = time.perf_counter()
            writers[name](topic)
            found.setdefault(name, []).append(Round([time.perf_counter() - begin], tasks))
            drop_topic(url, topic)
    report = Report(settings, f"Spark: {tasks} tasks of one row to Kafka")
    ratio = speed(found["Spark's sink"], found["exactly once"])
    report.figure("a task exactly once / one of Spark's sink", ratio, target=at_most(3))
    for name, rounds in found.items():
        report.figure(f"{name}, a task", per_unit(rounds, 1e3), "ms")


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
            writer = writer.format("txnbridge").option("url", url).option("topic", new_topic(url, 2))
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


if __name__ == "__main__":
    run(measure)
