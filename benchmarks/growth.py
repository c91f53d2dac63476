"""How costs grow: with partitions and groups, unended transactions, bridges and threads, and a decision log's length.

Each figure names its size. A plain client is SQLite beside the embedded broker, and confluent-kafka beside Kafka;
Pulsar and RocketMQ have none here. Each partition of Pulsar is a topic, so it has a tenth of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import _harness as harness
from benchmarks import _ours as ours
from benchmarks._harness import PROCESSOR, WALL, Lap, Report, Settings, unique
from benchmarks.half_messages import obey, sell, undecided
from benchmarks.memory import resident
from benchmarks.small_transactions import by_tasks_of_one_bridge
from txnbridge import Bridge, Capability, Consumer, Decision, Decisions, connect
from txnbridge.cli.top import Watch

CALL, MANY = harness.at_most(2), harness.at_most(30)  # seconds: an administrator's call; 10,000 transactions
WORKERS, PREPARED_IDS = 20, 1000  # PREPARED_IDS: the most prepared ones of an id on Kafka and Pulsar
IDLE_SECONDS, CLAIM_SECONDS, TIMEOUT = 10.0, 600.0, 600.0  # a log gets no more claims after CLAIM_SECONDS
DUE_SECONDS = 9.0  # each undecided half message is due for a check-back after this time


def seconds(work: Callable[[], object]) -> float:
    begin = WALL()
    work()
    return WALL() - begin


@contextmanager
def broker_of(settings: Settings, kit: Any) -> Iterator[str]:
    with kit.broker() if kit.NAME == "RocketMQ" else kit.broker(settings) as found:
        yield getattr(found, "url", found)


def by_workers(work: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, range(count)))


def repeated(settings: Settings, work: Callable[[], object]) -> harness.Estimate:
    return harness.estimate([seconds(work) for _ in range(settings.rounds)])


def growth_partitions(settings: Settings, broker: str) -> None:
    """Measure a transaction over many partitions, a group that reads them, and an administrator's calls."""
    kit = import_module(f"benchmarks._{broker}")
    sizes, groups = ((1, 10), 2) if settings.quick else ((1, 10, 100, 1000)[: 3 if broker == "pulsar" else 4], 100)
    with broker_of(settings, kit) as url, connect(url, timeout=TIMEOUT) as bridge:
        report = Report(settings, f"{kit.NAME}: a transaction with a message of {len(ours.BODY)} B to each partition")
        for size in sizes:
            topic = new_topic(bridge, size)
            contenders = {"ours": spread(url, topic, size)}
            if hasattr(kit, "spread"):
                contenders["plain"] = kit.spread(settings, url, topic, size, ours.BODY)
            found = harness.alternate(settings, contenders)
            if "plain" in found:
                report.ratio(f"{size:,} / plain client", found["ours"], found["plain"])
            report.milliseconds(f"{size:,}", found["ours"], 0.5)
        for size in (sizes[0], sizes[-1]):
            report_group(settings, report, kit, url, bridge, size)
        report_calls(settings, report, kit, url, bridge, sizes[-1], groups)


def new_topic(bridge: Bridge, partitions: int) -> str:
    """Create a topic with one message in each of its partitions."""
    topic = unique("growth")
    bridge.admin.create_topic(topic, partitions)
    send_to_each(bridge, topic, partitions)
    return topic


def send_to_each(bridge: Bridge, topic: str, partitions: int) -> int:
    with bridge.transaction() as txn:
        for number in range(partitions):
            txn.send(topic, ours.BODY, partition=number)
    return partitions


@harness.contender
def spread(url: str, topic: str, partitions: int) -> Iterator[Lap]:
    with connect(url) as bridge:
        yield partial(send_to_each, bridge, topic, partitions)


def report_group(settings: Settings, report: Report, kit: Any, url: str, bridge: Bridge, size: int) -> None:
    topic, name = new_topic(bridge, size), f"a group on {size:,} partitions"

    def join() -> None:
        with bridge.consumer(topic, unique("group")) as consumer:
            while not consumer.poll(1):
                pass

    report.figure(f"{name}: joined, and one message read", repeated(settings, join), "s")
    with read_all(bridge, topic, unique("group"), size) as consumer:
        report.figure(f"{name}: lag", repeated(settings, consumer.lag), "s", CALL)
        report.single(f"{name}, idle", busy(settings, lambda: consumer.poll(timeout=0.5)), "% of a core")
    if kit.NAME == "Kafka":
        report.figure(f"{name}, plain", repeated(settings, lambda: kit.join(url, topic).close()), "s")
        with closing(kit.join(url, topic)) as plain:
            plain.consume(size, 1)
            report.single(f"{name}, plain, idle", busy(settings, lambda: plain.poll(0.5)), "% of a core")


def busy(settings: Settings, poll: Callable[[], object]) -> float:
    """Return the processor time, in per cent of a core, of polls that find nothing."""
    begin, used = WALL(), PROCESSOR()
    while WALL() < begin + (settings.seconds if settings.quick else IDLE_SECONDS):
        poll()
    return 100 * (PROCESSOR() - used) / (WALL() - begin)


def read_all(bridge: Bridge, topic: str, group: str, count: int) -> Consumer:
    consumer = bridge.consumer(topic, group)
    while count:
        batch = consumer.poll(count)
        with bridge.transaction() as txn:
            txn.ack(batch)
        count -= len(batch)
    return consumer


def report_calls(
    settings: Settings, report: Report, kit: Any, url: str, bridge: Bridge, size: int, groups: int
) -> None:
    topic, names = new_topic(bridge, size), [unique("filled") for _ in range(groups)]
    if kit.NAME == "Kafka":
        kit.store_positions(url, names, topic, size)
    else:
        by_workers(lambda number: read_all(bridge, topic, names[number], size).close(), groups)
    send_to_each(bridge, topic, size)  # so that each group has a lag in each partition
    calls: dict[str, Callable[[], object]] = {"doctor": bridge.admin.doctor, "top": lambda: Watch(bridge, ()).look()}
    if bridge.capabilities[Capability.GROUP_ADMIN]:
        calls |= {"groups": bridge.admin.groups, "one group": partial(bridge.admin.group, names[0])}
    for name, call in calls.items():
        report.figure(f"{groups} groups on {size:,} partitions: {name}", repeated(settings, call), "s", CALL)


def growth_transactions(settings: Settings, broker: str) -> None:
    """Measure the list of prepared transactions, and the start of a resolver of undecided half messages."""
    kit = import_module(f"benchmarks._{broker}")
    sizes = (5,) if settings.quick else (10, 1000, 10_000)
    options: dict[str, Any] = {broker: {"prepared_ids": PREPARED_IDS}} if broker in ("kafka", "pulsar") else {}
    tokens: list[str] = []
    with broker_of(settings, kit) as url, connect(url, timeout=TIMEOUT) as bridge:
        report = Report(settings, f"{kit.NAME}: prepared transactions, and undecided half messages")
        topic = new_topic(bridge, 1)
        for size in sizes:
            while (missing := size - len(tokens)) > 0:
                with connect(url, transactional_id=unique("owner"), hold=600, **options) as owner:
                    tokens += by_workers(partial(prepare, owner, topic), min(missing, PREPARED_IDS))
            assert len(bridge.admin.transactions()) == size
            report.figure(f"{size:,} prepared: listed", repeated(settings, bridge.admin.transactions), "s", MANY)
            report.figure(f"{size:,} prepared: doctor", repeated(settings, bridge.admin.doctor), "s", MANY)
            report.single(f"{size:,} prepared: a commit", seconds(partial(bridge.commit, tokens.pop())), "s")
        for size in sizes:
            report_resolver(report, broker, url, topic, size)


def prepare(owner: Bridge, topic: str, _: int) -> str:
    with owner.transaction(prepare=True) as txn:
        txn.send(topic, ours.BODY)
    return str(txn.token)


def report_resolver(report: Report, broker: str, url: str, topic: str, size: int) -> None:
    group, times = unique("group"), list[float]()

    def check(*_: object) -> Decision:
        times.append(WALL())
        return Decision.COMMIT

    options: dict[str, Any] = {} if broker == "rocketmq" else {broker: {"half_check_seconds": 1}}
    with connect(url, timeout=TIMEOUT, **options) as bridge:
        with bridge.half_messages(group, execute=obey, check=undecided) as sales:
            by_workers(lambda _: sell(sales, topic, Decision.UNDECIDED, 1), size)
    time.sleep(DUE_SECONDS)
    begin = WALL()
    with connect(url, timeout=TIMEOUT) as bridge, bridge.resolver(group, check=check):
        for count, name in ((1, "a resolver's first check"), (size, "the last check")):
            while len(times) < count:
                time.sleep(0.01)
            report.single(f"{size:,} undecided: {name}", times[-1] - begin, "s", MANY if count == 1 else None)


def growth_bridges(settings: Settings, broker: str) -> None:
    """Measure what each bridge of a process needs, and transactions by many threads and tasks of one bridge."""
    kit = import_module(f"benchmarks._{broker}")
    few, many, bridges = (2, 4, 3) if settings.quick else (64, 1000, 100)
    with broker_of(settings, kit) as url:
        topic = kit.new_topic(url, 6)
        report = Report(settings, f"{kit.NAME}: each of {bridges} in a process, after a transaction")
        for plain in (False, True)[: 1 + hasattr(kit, "spread")]:
            name = "a plain client" if plain else "a bridge"
            report_child(report, name, open_many, settings, broker, url, topic, bridges, plain)
        report = Report(settings, f"{kit.NAME}: transactions of one message by threads and tasks of one bridge")
        ways: dict[str, Callable[..., harness.Round]] = {"threads": ours.by_threads_of_one_bridge}
        for way, work in (ways | {"tasks": by_tasks_of_one_bridge}).items():
            turns = {f"{size:,} {way}": partial(work, settings, url, topic, size) for size in (few, many)}
            found = harness.in_turn(turns, settings.rounds)
            report.rates(found, "transactions")
            report.ratio(f"{many:,} {way} / {few} {way}", found[f"{many:,} {way}"], found[f"{few:,} {way}"])
            report.milliseconds(f"{many:,} {way}: p99", found[f"{many:,} {way}"], 0.99)


def report_child(report: Report, name: str, *work: Any) -> None:
    with harness.child(*work) as pipe:
        for figure, value, unit in pipe.recv():
            report.single(f"{name}: {figure}", value, unit)


def open_many(pipe: Connection, settings: Settings, broker: str, url: str, topic: str, count: int, plain: bool) -> None:
    """Open and use bridges or clients one after another; send what each of them needs, without the first."""
    kit = import_module(f"benchmarks._{broker}")

    def needs() -> list[float]:
        return [*(len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd")), 1024 * resident(), 1e3 * WALL()]

    with ExitStack() as stack:
        for number in range(count):
            if number == 1:
                before = needs()
            make = kit.spread(settings, url, topic, 1, ours.BODY) if plain else spread(url, topic, 1)
            stack.enter_context(make())()
        each = [(now - then) / (count - 1) for now, then in zip(needs(), before, strict=True)]
    pipe.send([*zip(("threads", "descriptors", "memory", "opened and used"), each, ("", "", "KiB", "ms"), strict=True)])


def growth_log(settings: Settings, broker: str) -> None:
    """Measure the answers that a new process gets from a decision log, whose claims are kept or marked as done."""
    kit = import_module(f"benchmarks._{broker}")
    with broker_of(settings, kit) as url, connect(url, timeout=TIMEOUT) as bridge:
        report = Report(settings, f"{kit.NAME}: a decision log")
        for kind in ("kept", "done"):
            decisions, until, made = bridge.decisions(kind), WALL() + CLAIM_SECONDS, 0
            for size in (20, 40) if settings.quick else (1000, 100_000, 1_000_000):
                numbers = range(made // WORKERS, size // WORKERS)
                made += sum(by_workers(partial(claim, decisions, kind, until, numbers), WORKERS))
                report_child(report, f"{made:,} claims, {kind}", read_log, url, kind)
                report.single(f"{made:,} claims, {kind}: a snapshot", seconds(decisions.tidy), "s")


def claim(decisions: Decisions, kind: str, until: float, numbers: range, worker: int) -> int:
    count = 0
    for count, number in enumerate(takewhile(lambda _: WALL() < until, numbers), 1):  # noqa: B007
        decisions.claim(("growth", worker, number), Decision.COMMIT)
        if kind == "done" and number % 100 == 0:
            decisions.done(("growth", worker), number)
    return count


def read_log(pipe: Connection, url: str, log: str) -> None:
    with connect(url, timeout=TIMEOUT) as bridge:
        before, decisions = resident(), bridge.decisions(log)
        first, second = (seconds(partial(decisions.read, ("growth", 0, number))) for number in range(2))
        grown = resident() - before
        pipe.send([("first answer", first, "s"), ("second answer", second, "s"), ("memory", grown, "MiB")])
