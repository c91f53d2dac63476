"""Small transactions of many threads on one bridge, with and without group commit.

Beside the threads on the embedded broker stand as many threads of plain SQLite, as durable (`durability=full`), each
with a connection of its own; on Kafka the same loop by hand on one plain producer; on Pulsar one thread; on RocketMQ
the official client, and half messages. A half message of ours and a transaction of RocketMQ's official client do the
same: store a half, do the local work (here none), end the half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks._harness import (
    Lap,
    Report,
    Round,
    Settings,
    Turn,
    as_turn,
    at_least,
    at_most,
    by_threads,
    contender,
    in_turn,
)
from benchmarks._ours import BODY, by_threads_of, by_threads_of_one_bridge
from txnbridge import Decision, HalfMessages, connect

Found = dict[str, list[Round]]
TITLE = "transactions of one message of 100 B by the threads of one bridge"


def measure(settings: Settings, broker: str) -> None:
    {"embedded": embedded, "kafka": kafka, "pulsar": pulsar, "rocketmq": rocketmq}[broker](settings)


def turns_of(by_threads: Callable[[int, bool | None], Round], *threads: int) -> dict[str, Callable[[], Round]]:
    """Return a turn for each number of threads, with group commit as it is by default and without."""
    return {
        f"{number}{name}": partial(by_threads, number, shared)
        for number in threads
        for name, shared in (("", None), (" off", False))
    }


def report_one_thread(report: Report, found: Found) -> None:
    report.spread("64 threads", found["64"], at_most(5))
    report.ratio("1 thread / the same, group_commit=False", found["1"], found["1 off"], at_least(0.95))


def embedded(settings: Settings) -> None:
    from benchmarks import _embedded as files

    def ours(threads: int, group_commit: bool | None = None) -> Round:
        with files.fresh_bridge(settings.folder, group_commit=group_commit) as bridge:
            return by_threads_of(bridge, settings, "topic", threads)

    def sqlite(threads: int) -> Round:
        # The file is made once, before the threads: SQLite locks it to change its journal.
        with files.fresh(settings.folder) as folder, files.plain(folder):
            return by_threads([files.inserting_into(folder, files.rows([BODY]))] * threads, settings.seconds)

    turns = turns_of(ours, 16) | {"16 sqlite": lambda: sqlite(16), "64": lambda: ours(64)} | turns_of(ours, 1)
    found = in_turn(turns, settings.rounds)
    report = Report(settings, f"Embedded: {TITLE}")
    report.ratio("16 threads / 16 threads of plain SQLite", found["16"], found["16 sqlite"], at_least(1.2))
    report.ratio("16 threads / the same, group_commit=False", found["16"], found["16 off"])
    for name in ("16", "16 off", "64", "1"):
        report.rate(f"{name}: transactions a second", found[name])
    report.rate("yardstick: 16 of plain SQLite", found["16 sqlite"])
    report_one_thread(report, found)


def kafka(settings: Settings) -> None:
    from benchmarks import _kafka as kafka

    with kafka.broker(settings) as url:
        topic = kafka.new_topic(url, 6)
        by_hand = as_turn(kafka.writing(url, topic, [BODY]), settings)
        ours = turns_of(partial(by_threads_of_one_bridge, settings, url, topic), 64, 1)
        found = in_turn({"by hand": by_hand} | ours, settings.rounds)
    report = Report(settings, f"Kafka: {TITLE}")
    report.ratio("64 threads / loop by hand", found["64"], found["by hand"], at_least(20))
    report_shared(report, found, "by hand")


def pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    with pulsar.broker(settings) as url:
        topic = pulsar.new_topic(url)
        found = in_turn(turns_of(partial(by_threads_of_one_bridge, settings, url, topic), 64, 1), settings.rounds)
    report = Report(settings, f"Pulsar: {TITLE}")
    report.ratio("64 threads / 1 thread", found["64"], found["1"], at_least(40))
    report_shared(report, found)


def report_shared(report: Report, found: Found, *peers: str) -> None:
    report.ratio("64 threads / the same, group_commit=False", found["64"], found["64 off"])
    for name in ("64", "64 off", "1", *peers):
        report.rate(f"{name}: transactions a second", found[name])
    report_one_thread(report, found)


# By threads: the target as a multiple of the official client's speed, and the client's transactions per thread and lap.
OFFICIAL = {1: (1.5, 100), 16: (3, 20), 64: (3, 10)}


@contender
def half_messages(halves: HalfMessages, topic: str) -> Iterator[Lap]:
    def lap() -> int:
        with halves.transaction() as txn:
            txn.send(topic, BODY)
        return 1

    yield lap


def halves_by_threads(settings: Settings, url: str, topic: str, threads: int) -> Round:
    def commit(*_: object) -> Decision:
        return Decision.COMMIT

    with connect(url) as bridge, bridge.half_messages("benchmark", execute=commit, check=commit) as halves:
        return by_threads([half_messages(halves, topic)] * threads, settings.seconds)


def rocketmq(settings: Settings) -> None:
    from benchmarks import _rocketmq as rocketmq

    with rocketmq.broker() as address:
        url, topic, foreign = address.url, rocketmq.new_topic(address.url), rocketmq.new_topic(address.url)
        with rocketmq.official(settings, address, foreign) as client:
            turns: dict[str, Turn] = {}
            for threads, (_, each) in OFFICIAL.items():
                ours = partial(by_threads_of_one_bridge, settings, url, topic, threads)
                turns[f"ours, {threads}"] = ours
                turns[f"ours off, {threads}"] = partial(ours, False)
                turns[f"half, {threads}"] = partial(halves_by_threads, settings, url, topic, threads)
                peer = rocketmq.writing(client, threads, 2 if settings.quick else each, len(BODY))
                turns[f"official, {threads}"] = as_turn(peer, settings)
            found = in_turn(turns, settings.rounds)
    report = Report(settings, f"RocketMQ: one message of {len(BODY)} B by the threads of one bridge")
    for threads, (wanted, _) in OFFICIAL.items():
        us, off, half, them = (found[f"{name}, {threads}"] for name in ("ours", "ours off", "half", "official"))
        report.ratio(f"{threads} threads: transactions / the official client", us, them, at_least(wanted))
        report.ratio(f"{threads} threads: transactions / the same, group_commit=False", us, off)
        report.ratio(f"{threads} threads: half messages / the official client", half, them, at_least(wanted))
    for name, rounds in found.items():
        report.rate(f"{name}: a second", rounds)
    report.spread("64 threads", found["ours, 64"], at_most(5))
