"""Small transactions through `txnbridge.aio`: tasks of one event loop beside as many threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio

from benchmarks._harness import WALL, Report, Round, Settings, in_turn
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
