"""Many processes at once: every reader sees exactly the committed messages, in partition order."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.embedded import kit
from tests.embedded.members import Member
from txnbridge.spi import Deadline, Subscription
from txnbridge.testing import Child, tell

PARTITIONS = 3
END = b"end"


def write(path: Path, name: str, seed: int, count: int, timeout: float) -> dict[str, bool]:
    """Transactions of every kind and size; which of them were committed, as far as this process was told."""
    # So few bytes that a third of the transactions goes to the file before its end.
    broker = kit.open_broker(path, spill_bytes=400)
    writer, preparing = kit.open_writer(broker), kit.open_preparing(broker)
    chance, done = random.Random(seed), {}
    for number in range(count):
        prepare = chance.random() < 0.3
        committed = done[f"{name}-{number}"] = chance.random() < 0.6
        using = preparing if prepare else writer
        transaction = kit.begin(using, timeout=timeout, hold=1, prepare=prepare)
        for index in range(chance.choice([1, 3, 20, 60])):
            kit.send(using, "orders", b"%s-%d-%d" % (name.encode(), number, index), partition=chance.randrange(3))
        if prepare:
            using.prepare(Deadline(30))
            token = kit.token_of(broker, using, transaction, prepared=True)
            preparing = kit.open_preparing(broker)
            time.sleep(chance.random() * 0.02)
            (broker.commit if committed else broker.abort)(token, kit.NO_LEDGER, Deadline(30))
        else:
            (using.commit if committed else using.abort)(Deadline(30))
        tell((f"{name}-{number}", committed))
    broker.close(Deadline(10))
    return done


def write_and_vanish(path: Path, seed: int) -> None:
    """Transactions that nobody ends: spilled and left open, or prepared for a moment."""
    broker = kit.open_broker(path, spill_bytes=400)
    chance = random.Random(seed)
    for number in range(5):
        writer = kit.open_preparing(broker) if number % 2 else kit.open_writer(broker)
        kit.begin(writer, timeout=6, hold=0.1, prepare=bool(number % 2))
        kit.send(writer, "orders", *[b"left alone"] * 60, partition=chance.randrange(PARTITIONS))
        if number % 2:
            writer.prepare(Deadline(30))
        time.sleep(0.2)
    tell("left")
    time.sleep(60)


def read(path: Path, seed: int, group: str | None, sharing: str) -> list[tuple[int, int, bytes]]:
    """What one reader gets until it has seen the end of every partition."""
    broker = kit.open_broker(path)
    chance, seen = random.Random(seed), []
    if group is None:
        reader = broker.reader(Subscription(("orders",)), kit.Silent(), Deadline(10))
    else:
        reader = Member(broker, group=group, sharing=sharing).reader
    tell("reading")
    ended = 0
    while ended < PARTITIONS:
        messages = reader.poll(chance.choice([1, 7, 500]), Deadline(chance.choice([0.001, 0.05, 1])))
        seen += [(message.partition, message.position[0], message.value) for message in messages]
        ended += sum(message.value == END for message in messages)
    broker.close(Deadline(10))
    return seen


def ended(path: Path) -> dict[int, list[tuple[int, bytes]]]:
    """Put an end to every partition; what is in it, by partition."""
    broker = kit.open_broker(path)
    for partition in range(PARTITIONS):
        writer = kit.open_writer(broker)
        kit.begin(writer)
        kit.send(writer, "orders", END, partition=partition)
        writer.commit(Deadline(30))
    found: dict[int, list[tuple[int, bytes]]] = {partition: [] for partition in range(PARTITIONS)}
    deadline = Deadline(30)
    while sum(messages[-1][1] == END for messages in found.values() if messages) < PARTITIONS:
        deadline.check("reading everything")  # what was left alone is in the way until its deadline
        found = {partition: [] for partition in range(PARTITIONS)}
        for message in kit.read(broker, "orders"):
            found[message.partition].append((message.position[0], message.value))
    broker.close(Deadline(10))
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start child processes, which are killed at the end."""
    with ExitStack() as stack:
        yield lambda *task, **options: stack.enter_context(Child(*task, **options))


@pytest.mark.timeout(180)  # 8 s where there is a free core
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_readers_see_exactly_the_committed_messages_in_order_whatever_writers_do(opened, path, start, seed):
    opened().admin.create_topic("orders", PARTITIONS, Deadline(10))
    kinds = [(None, "partition"), (None, "partition"), ("ordered", "partition"), ("shared", "message")]
    readers = [start(read, path, seed + number, *kind) for number, kind in enumerate(kinds)]
    for reader in readers:
        assert reader.told() == "reading"
    lonely = start(write_and_vanish, path, seed)
    doomed = start(write, path, "doomed", seed, 10_000, 6)
    writers = [start(write, path, name, seed + number, 8, 20) for number, name in enumerate("ab")]
    committed = dict(doomed.told() for _ in range(10))
    doomed.kill()
    for writer in writers:
        committed.update(writer.result())
    assert lonely.told() == "left"
    truth = ended(path)
    for reader in readers:
        history = reader.result()
        for partition in range(PARTITIONS):
            assert [(offset, value) for p, offset, value in history if p == partition] == truth[partition]
    check_against_writers(truth, committed)


def check_against_writers(truth: dict[int, list[tuple[int, bytes]]], committed: dict[str, bool]) -> None:
    """Each committed transaction is there whole and in order, and nothing of the aborted ones."""
    found = Counter(value.decode().rpartition("-")[0] for messages in truth.values() for _, value in messages)
    assert b"left alone" not in {value for messages in truth.values() for _, value in messages}
    assert any(committed.values())
    for transaction, is_committed in committed.items():
        assert (transaction in found) == is_committed
    for messages in truth.values():
        for writer in "ab":
            order = [
                tuple(map(int, value.decode().split("-")[1:]))
                for _, value in messages
                if value.startswith(writer.encode() + b"-")
            ]
            assert order == sorted(order)
