"""Small transactions through `txnbridge.aio` on the embedded broker: tasks of one event loop beside as many threads."""

from __future__ import annotations

from benchmarks._aio import report_tasks, turns
from benchmarks._files import fresh
from benchmarks._harness import Report, Settings, run


def measure(settings: Settings) -> None:
    with fresh(settings.folder) as folder:
        found = turns(settings, f"embedded:{folder}/broker.db", "topic")
    report_tasks(Report(settings, "Embedded: transactions of one message of 100 B by tasks of one event loop"), found)


if __name__ == "__main__":
    run(measure)
