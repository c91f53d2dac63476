"""Small transactions: how long one takes, and how many a second by threads, and by tasks of one event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks._harness import (
    WALL,
    Report,
    Round,
    Settings,
    Turn,
    alternate,
    as_turn,
    at_least,
    at_most,
    by_threads,
    in_turn,
)
from benchmarks._ours import BODY, by_threads_of, by_threads_of_one_bridge, helper, small, writing
from txnbridge import Decision, connect

Found = dict[str, list[Round]]
TITLE = "transactions of one message of 100 B by the threads of one bridge"


def commit(settings: Settings, broker: str) -> None:
    """Measure the duration of whole transactions, from begin to the end of the block, one after another.

    On the embedded broker, where commits are durable, the yardsticks are writing 4 KiB to an existing file and
    synchronising it, which is the least that any durable commit does, and the same rows in a transaction of a plain
    SQLite file. On Pulsar the yardstick sends the least requests of such a transaction with our own client of the
    protocol.
    """
    {"embedded": commit_embedded, "pulsar": commit_pulsar}[broker](settings)


def commit_embedded(settings: Settings) -> None:
    from benchmarks import _embedded as files

    report = Report(settings, "Durable commits of 1 KiB messages (p50 and p99 of each round)")
    one, many = files.bodies(1, files.KIB), files.bodies(1000, files.KIB)
    found = alternate(
        settings,
        {
            "write 4 KiB, fdatasync": files.synchronising(settings),
            "embedded, 1 message": files.writing(settings, one),
            "plain SQLite, 1 row": files.inserting(settings, one),
            "embedded, 1,000 messages": files.writing(settings, many),
            "plain SQLite, 1,000 rows": files.inserting(settings, many),
        },
    )
    for name, rounds in found.items():
        report.milliseconds(f"{name}: p50", rounds, 0.5)
        report.milliseconds(f"{name}: p99", rounds, 0.99)


def commit_pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    with pulsar.broker(settings) as url:
        contenders = {
            "bare requests": pulsar.bare_requests(url, pulsar.new_topic(url), len(BODY)),
            "ours": writing(url, pulsar.new_topic(url), [BODY], many=False),
        }
        report = Report(settings, "Pulsar: transactions of one message, one after another")
        found = alternate(settings, contenders)
        report.ratio("ours / bare requests", found["ours"], found["bare requests"], at_least(0.7))
        for name, rounds in found.items():
            report.milliseconds(f"{name}, p50", rounds, 0.5)


def group_commit(settings: Settings, broker: str) -> None:
    """Measure transactions of many threads on one bridge, with and without group commit.

    Beside the threads on the embedded broker stand as many threads of plain SQLite, as durable (`durability=full`),
    each with a connection of its own; on Kafka the same loop by hand on one plain producer; on Pulsar one thread; on
    RocketMQ the official client, and half messages. A half message of ours and a transaction of RocketMQ's official
    client do the same: store a half, do the local work (here none), end the half.
    """
    measured = {"embedded": group_embedded, "kafka": group_kafka, "pulsar": group_pulsar, "rocketmq": group_rocketmq}
    measured[broker](settings)


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


def group_embedded(settings: Settings) -> None:
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


def group_kafka(settings: Settings) -> None:
    from benchmarks import _kafka as kafka

    with kafka.broker(settings) as url:
        topic = kafka.new_topic(url, 6)
        by_hand = as_turn(kafka.writing(url, topic, [BODY]), settings)
        ours = turns_of(partial(by_threads_of_one_bridge, settings, url, topic), 64, 1)
        found = in_turn({"by hand": by_hand} | ours, settings.rounds)
    report = Report(settings, f"Kafka: {TITLE}")
    report.ratio("64 threads / loop by hand", found["64"], found["by hand"], at_least(20))
    report_shared(report, found, "by hand")


def group_pulsar(settings: Settings) -> None:
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


def halves_by_threads(settings: Settings, url: str, topic: str, threads: int) -> Round:
    def decide(*_: object) -> Decision:
        return Decision.COMMIT

    with connect(url) as bridge, bridge.half_messages("benchmark", execute=decide, check=decide) as halves:
        return by_threads([small(halves, topic)] * threads, settings.seconds)


def group_rocketmq(settings: Settings) -> None:
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


SIZES = (1, 16, 64)


def by_tasks_of_one_bridge(settings: Settings, url: str, topic: str, tasks: int) -> Round:
    import anyio

    from txnbridge.aio import Bridge
    from txnbridge.aio import connect as connect_tasks

    laps: list[float] = []

    async def transact(bridge: Bridge) -> None:
        async with bridge.transaction() as txn:
            await txn.send(topic, BODY)

    async def work(bridge: Bridge) -> None:
        until = WALL() + settings.seconds
        while (start := WALL()) < until:
            await transact(bridge)
            laps.append(WALL() - start)

    async def program() -> None:
        async with connect_tasks(url) as bridge:
            async with anyio.create_task_group() as group:
                for _ in range(tasks):
                    group.start_soon(transact, bridge)  # the first lap opens connections and does not count
            async with anyio.create_task_group() as group:
                for _ in range(tasks):
                    group.start_soon(work, bridge)

    anyio.run(program)
    return Round(laps, len(laps) * tasks)


def aio(settings: Settings, broker: str) -> None:
    """Measure transactions through `txnbridge.aio`: tasks of one event loop beside as many threads."""
    kit = helper(broker)
    ways: dict[str, Callable[..., Round]] = {"tasks": by_tasks_of_one_bridge, "threads": by_threads_of_one_bridge}
    with kit.broker(settings) as url:
        topic = kit.new_topic(url, 6)
        turns = {
            f"{size} {way}": partial(work, settings, url, topic, size) for size in SIZES for way, work in ways.items()
        }
        found = in_turn(turns, settings.rounds)
    report = Report(settings, f"{kit.NAME}: transactions of one message of 100 B by tasks of one event loop")
    for size in SIZES:
        tasks, threads = found[f"{size} tasks"], found[f"{size} threads"]
        report.ratio(f"{size} tasks / {size} threads", tasks, threads)
        report.rate(f"{size} tasks: transactions a second", tasks)
        report.rate(f"{size} threads: transactions a second", threads)
    report.spread("64 tasks", found["64 tasks"])
