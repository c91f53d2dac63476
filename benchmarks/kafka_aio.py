"""Small transactions through `txnbridge.aio` on Kafka: tasks of one event loop beside as many threads."""

from __future__ import annotations

from benchmarks._aio import report_tasks, turns
from benchmarks._harness import Report, Settings, run
from benchmarks._kafka import broker, new_topic


def measure(settings: Settings) -> None:
    with broker() as url:
        found = turns(settings, url, new_topic(url, 6))
    report_tasks(Report(settings, "Kafka: transactions of one message of 100 B by tasks of one event loop"), found)


if __name__ == "__main__":
    run(measure)
