"""Our committed reader beside Spark's own Kafka source, which reads with `isolation.level=read_committed` here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, contender
from benchmarks._kafka import bootstrap, new_topic
from benchmarks._kafka import broker as kafka
from benchmarks._spark import exactly_once, rows, spark

ROWS = {100: 5_000_000, 1024: 1_000_000}


@contender
def reading(frame: Any, count: int) -> Iterator[Lap]:
    def lap() -> int:
        frame.write.format("noop").mode("overwrite").save()
        return count

    yield lap


def contenders(session: Any, url: str, topic: str, count: int) -> dict[str, Contender]:
    ours = session.read.format("txnbridge").option("url", url).option("topic", topic).load()
    plain = session.read.format("kafka").option("kafka.bootstrap.servers", bootstrap(url)).option("subscribe", topic)
    plain = plain.option("kafka.isolation.level", "read_committed").load()
    return {name: reading(frame, count) for name, frame in (("ours", ours), ("source", plain))}


def measure(settings: Settings, broker: str) -> None:
    with kafka(settings) as url, spark() as session:
        for size, wanted in ROWS.items():
            count = 10_000 if settings.quick else wanted
            topic = new_topic(url, 2)
            exactly_once(rows(session, size, count), url)(topic)
            found = alternate(settings, contenders(session, url, topic, count))
            report = Report(settings, f"Spark: reading {count:,} rows of {size} B from Kafka, two partitions")
            report.ratio("ours / Spark's source", found["ours"], found["source"], at_least(1.0))
            report.each(found, "a row")
