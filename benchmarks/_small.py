"""Small transactions, one after another, on a bridge that threads may share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap, Report, Round, Settings, at_most, by_threads, estimate, quantile
from txnbridge import Bridge, connect

BODY = bytes(100)


def small(bridge: Bridge, topic: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        def lap() -> int:
            with bridge.transaction() as txn:
                txn.send(topic, BODY)
            return 1

        yield lap

    return contender


def by_threads_of_one_bridge(
    settings: Settings, url: str, topic: str, threads: int, group_commit: bool | None = None
) -> Round:
    with connect(url, group_commit=group_commit) as bridge:
        return by_threads([small(bridge, topic)] * threads, settings.seconds)


def report_spread(report: Report, rounds: list[Round]) -> None:
    ratios = [quantile(each.laps, 0.99) / quantile(each.laps, 0.5) for each in rounds]
    report.figure("64 threads: p99 / p50", estimate(ratios), "", at_most(5))
