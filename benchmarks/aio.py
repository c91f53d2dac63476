"""Small transactions through `txnbridge.aio`: tasks of one event loop beside as many threads."""

from __future__ import annotations

from functools import partial

import anyio

from benchmarks._harness import WALL, Report, Round, Settings, a_second, estimate, in_turn, quantile, speed
from benchmarks._ours import BODY, by_threads_of_one_bridge, helper
from txnbridge import aio

SIZES = (1, 16, 64)


def by_tasks_of_one_bridge(settings: Settings, url: str, topic: str, tasks: int) -> Round:
    laps: list[float] = []

    async def transact(bridge: aio.Bridge) -> None:
        async with bridge.transaction() as txn:
            await txn.send(topic, BODY)

    async def work(bridge: aio.Bridge) -> None:
        until = WALL() + settings.seconds
        while (start := WALL()) < until:
            await transact(bridge)
            laps.append(WALL() - start)

    async def program() -> None:
        async with aio.connect(url) as bridge:
            async with anyio.create_task_group() as group:
                for _ in range(tasks):
                    group.start_soon(transact, bridge)  # the first lap opens connections and does not count
            async with anyio.create_task_group() as group:
                for _ in range(tasks):
                    group.start_soon(work, bridge)

    anyio.run(program)
    return Round(laps, len(laps) * tasks)


def measure(settings: Settings, broker: str) -> None:
    kit = helper(broker)
    ways = {"tasks": by_tasks_of_one_bridge, "threads": by_threads_of_one_bridge}
    with kit.broker(settings) as url:
        topic = kit.new_topic(url, 6)
        turns = {
            f"{size} {way}": partial(work, settings, url, topic, size) for size in SIZES for way, work in ways.items()
        }
        found = in_turn(turns, settings.rounds)
    report = Report(settings, f"{kit.NAME}: transactions of one message of 100 B by tasks of one event loop")
    for size in SIZES:
        tasks, threads = found[f"{size} tasks"], found[f"{size} threads"]
        report.figure(f"{size} tasks / {size} threads", speed(tasks, threads))
        report.figure(f"{size} tasks: transactions a second", a_second(tasks))
        report.figure(f"{size} threads: transactions a second", a_second(threads))
    spread = [quantile(each.laps, 0.99) / quantile(each.laps, 0.5) for each in found["64 tasks"]]
    report.figure("64 tasks: p99 / p50", estimate(spread))
