"""Members that are killed, paused and replaced: nothing is lost, nothing is done twice, nobody waits for the dead."""

import gc
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from txnbridge_embedded.broker import EmbeddedBroker

import txnbridge
from tests.embedded import kit
from tests.embedded.members import Member, settle
from tests.embedded.test_ordered import fill, numbers, position
from tests.in_time import within
from txnbridge.errors import Conflict, TransactionAborted
from txnbridge.spi import Deadline
from txnbridge.testing import tell

LEASE = 0.6  # seconds: short for the test's sake, and still many times what a renewal takes


def go_on(path: Path) -> Path:
    """The file whose appearance tells `hold` to go on."""
    return path.with_suffix(".go-on")


def hold(path: Path, count: int, sharing: str) -> str:
    """Take messages, wait to be told to go on, and acknowledge them."""
    broker = kit.open_broker(path, lease_seconds=LEASE)
    member = Member(broker, sharing=sharing)
    messages = member.take(count)
    writer = kit.open_writer(broker)
    kit.begin(writer, "done", *[b"by the first"] * count, timeout=60)
    member.tell(writer, *messages)
    tell("holding")
    while not go_on(path).exists():
        time.sleep(0.01)
    try:
        writer.commit(Deadline(30))
    except Conflict:
        return "conflict"
    return "committed"


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_a_member_that_was_paused_and_replaced_has_its_acknowledgements_refused(opened, start, path, sharing):
    broker = opened(lease_seconds=LEASE)
    fill(broker, 4)
    first = start(hold, path, 4, sharing)
    assert first.told() == "holding"
    second = Member(broker, sharing=sharing)
    first.pause()
    messages = second.take(4)
    second.ack(*messages[:2])
    go_on(path).touch()
    first.unpause()
    assert first.result() == "conflict"
    second.ack(*messages[2:])
    assert kit.values(broker, "done") == []
    assert position(broker) == 4
    second.close()


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_a_member_that_was_killed_holds_nobody_back_longer_than_its_lease(opened, start, path, sharing):
    broker = opened(lease_seconds=LEASE)
    fill(broker, 4)
    first = start(hold, path, 4, sharing)
    assert first.told() == "holding"
    second = Member(broker, sharing=sharing)
    assert second.poll() == []
    first.kill()
    with within(LEASE):
        assert numbers(second.take(4, timeout=100)) == [0, 1, 2, 3]
    second.close()


def idle(path: Path, seconds: float) -> list[tuple[str, tuple[str, int]]]:
    """A member that does not poll for long, and what it was told in the end."""
    member = Member(kit.open_broker(path, lease_seconds=LEASE))
    tell("joined")
    time.sleep(seconds)
    member.reader.poll(0, Deadline(0.001))
    return member.told


def test_a_member_that_works_for_longer_than_its_lease_keeps_its_partitions(opened, start, path):
    broker = opened(lease_seconds=LEASE)
    fill(broker, 1)
    first = start(idle, path, 3 * LEASE)
    assert first.told() == "joined"
    second = Member(broker)
    until = time.monotonic() + 2.5 * LEASE
    while time.monotonic() < until:
        assert second.poll(timeout=0.05) == []
    assert first.result() == [("assigned", ("orders", 0))]
    assert numbers(second.take(1)) == [0]  # its process has ended now
    second.close()


def test_a_reader_that_is_dropped_without_a_close_loses_its_lease(opened):
    broker = opened(lease_seconds=LEASE)
    fill(broker, 1)
    dropped = Member(broker)
    connection = vars(dropped.reader)["_connection"]  # to be closed here: nobody else will
    other = Member(broker)
    assert (dropped.partitions, other.partitions) == ([0], [])
    del dropped
    gc.collect()  # it and its listener know each other
    settle(other, until=lambda: other.partitions == [0])
    other.close()
    connection.close()


def with_orders(path: Path) -> str:
    """The URL of a new broker with four orders in two partitions."""
    broker = kit.open_broker(path)
    fill(broker, 4, partitions=2)
    broker.close(Deadline(10))
    return f"embedded:{path}?lease_seconds=0.5"


@pytest.mark.parametrize("step", ["step:release/before", "step:release/after", "step:share/before", "step:share/after"])
def test_a_member_that_dies_while_partitions_move_is_replaced(opened, path, start, step):
    orders = with_orders(path)
    broker = opened(lease_seconds=0.5)
    first = start(serve, orders, kill=step)
    assert first.told() == "serving"
    second = start(serve, orders)
    assert second.told() == "serving"
    if "share" in step:  # which somebody does when another has died without a word
        second.kill()
    assert str(first.stopped()).startswith(step)
    third = Member(broker, group="movers")
    if "share" in step:
        settle(third, until=lambda: third.partitions == [0, 1])
    else:
        settle(third, until=lambda: third.partitions != [])
    third.close()
    second.kill()


def serve(url: str) -> None:
    """Join and follow the group until killed."""
    with txnbridge.connect(url) as bridge, bridge.consumer("orders", group="movers") as consumer:
        tell("serving")
        while True:
            consumer.poll(1, timeout=0.05)


def consume(url: str, sharing: str, seed: int) -> None:
    """Move orders to "done" with transactions of every kind, until killed."""
    chance = random.Random(seed)
    with txnbridge.connect(url, timeout=20, hold=0.5) as bridge:
        consumer = bridge.consumer("orders", group="movers", sharing=sharing)
        while True:
            batch = consumer.poll(chance.choice([1, 5, 20]), timeout=0.2)
            try:
                if batch:
                    transact(bridge, consumer, batch, chance)
            except TransactionAborted:
                tell("aborted")


def transact(
    bridge: txnbridge.Bridge, consumer: txnbridge.Consumer, batch: txnbridge.Batch, chance: random.Random
) -> None:
    kind = chance.choice(["commit"] * 5 + ["abort", "give back", "commit prepared", "abort prepared", "leave prepared"])
    if kind == "give back":
        consumer.nack(batch)
        return
    prepare = kind.endswith("prepared")
    with bridge.transaction(prepare=prepare, timeout=1.5 if prepare else None) as transaction:
        some = chance.sample(list(batch), chance.randint(1, len(batch)))
        for message in some:
            transaction.send("done", message.value)
        transaction.ack(some)
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.2)
        if kind == "abort":
            raise txnbridge.Abort
    if kind == "commit prepared":
        bridge.commit(str(transaction.token))
    elif kind == "abort prepared":
        bridge.abort(str(transaction.token))
    rest = [message for message in batch if message not in some]
    if rest:
        consumer.nack(rest)


@pytest.mark.timeout(180)  # 10 s where there is a free core
@pytest.mark.parametrize("sharing", [pytest.param("partition", marks=pytest.mark.full), "message"])
def test_every_message_is_moved_exactly_once_by_members_that_are_killed_and_paused(opened, start, path, sharing):
    broker = opened(lease_seconds=LEASE)
    count, chance = 600, random.Random(sharing)
    fill(broker, count, partitions=4)
    url = f"embedded:{path}?lease_seconds={LEASE}&redeliver_seconds=2"
    members = [start(consume, url, sharing, seed) for seed in range(3)]
    until = time.monotonic() + 4
    while time.monotonic() < until:
        time.sleep(chance.random() * 0.5)
        victim = chance.randrange(len(members))
        if chance.random() < 0.5:
            members[victim].kill()
            members[victim] = start(consume, url, sharing, chance.randrange(1000))
        else:
            members[victim].pause()
            time.sleep(LEASE * 2 * chance.random())
            members[victim].unpause()
    finish(broker, count)
    for member in members:
        member.kill()
    assert Counter(int(value) for value in kit.values(broker, "done")) == dict.fromkeys(range(count), 1)


def finish(broker: EmbeddedBroker, count: int) -> None:
    """Wait until the group has moved so many messages, acknowledged everything, and left nothing undecided."""
    deadline = Deadline(120)
    while len(kit.values(broker, "done")) < count or kit.rows(
        broker,
        "SELECT 1 FROM positions q JOIN partitions p ON p.id = q.partition_id WHERE q.next < p.next"
        " UNION ALL SELECT 1 FROM undecided",
    ):
        deadline.check("moving everything")
        time.sleep(0.05)
