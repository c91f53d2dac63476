"""Everything at once, for minutes, on a broker of its own. An independent reader judges what was promised."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from subprocess import PIPE, Popen

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers.plugin import StartKafka
from txnbridge_kafka.broker import KafkaBroker
from txnbridge_kafka.ends import forgotten
from txnbridge_kafka.offsets import Offsets
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition

import txnbridge
from txnbridge import Bridge, Outcome, TokenState
from txnbridge.errors import OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SECONDS = float(os.environ.get("TXNBRIDGE_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("TXNBRIDGE_CHAOS_SEED", str(random.randrange(10**6))))
SETTLING = 180.0  # for what is left to do when nothing fails any more
PARTITIONS = 3
SESSION = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}

Placed = tuple[int, bytes]  # a partition, and a value in it


def say(text: str) -> None:
    """Shown with `pytest -s`, or when the test fails."""
    sys.stderr.write(f"{text}\n")


class Readable:
    """What a plain client reads of topics, as far as it is committed, and when it came."""

    def __init__(self, broker: brokers.Broker, *topics: str) -> None:
        self._topics = topics
        self.found: dict[str, list[Placed]] = {topic: [] for topic in topics}
        self.came: list[float] = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.url.removeprefix("kafka://"),
                "group.id": "independent",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, n, 0) for topic in topics for n in range(PARTITIONS)])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            for message in self._consumer.consume(1000, 0.1):
                topic, partition, value = message.topic(), message.partition(), message.value()
                if message.error() is None and topic and partition is not None and value:
                    self.found[topic].append((partition, value))
                    self.came.append(time.monotonic())

    def until(self, enough: Callable[[], bool]) -> None:
        """Wait for it, and then for what may come too much; or as long as it may take."""
        waited_until = time.monotonic() + SETTLING
        while not enough() and time.monotonic() < waited_until:
            time.sleep(0.1)
        time.sleep(3)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()


def what_is_wrong(found: Sequence[Placed], sent: Mapping[int, int]) -> list[str]:
    """Of each partition the numbers from 0 on have to be there, once each and in order."""
    wrong = []
    for partition, count in sent.items():
        numbers = [int(value) for where, value in found if where == partition]
        if lost := set(range(count)) - set(numbers):
            wrong.append(f"[{partition}] lost {len(lost)}: {sorted(lost)[:10]}")
        if len(numbers) != len(set(numbers)):
            wrong.append(f"[{partition}] doubled {len(numbers) - len(set(numbers))}")
        if (out_of_order := [b for a, b in itertools.pairwise(numbers) if b < a]) and len(numbers) == len(set(numbers)):
            wrong.append(f"[{partition}] out of order: {out_of_order[:10]}")
    return wrong


def test_what_judges_would_notice() -> None:
    good = [(0, b"0"), (1, b"0"), (0, b"1")]
    assert what_is_wrong(good, {0: 2, 1: 1}) == []
    assert what_is_wrong(good[:2], {0: 2, 1: 1}) == ["[0] lost 1: [1]"]
    assert what_is_wrong([*good, (1, b"0")], {0: 2, 1: 1}) == ["[1] doubled 1"]
    assert what_is_wrong([(0, b"1"), (0, b"0")], {0: 2}) == ["[0] out of order: [0]"]


@pytest.fixture
def broker(start_kafka: StartKafka) -> brokers.Broker:
    return start_kafka()


@pytest.fixture
def chance() -> random.Random:
    say(f"TXNBRIDGE_CHAOS_SEED={SEED}")
    return random.Random(SEED)


@contextmanager
def reading(broker: brokers.Broker, *topics: str) -> Iterator[Readable]:
    with txnbridge.connect(broker.url) as bridge:
        for topic in topics:
            bridge.admin.create_topic(topic, partitions=PARTITIONS)
    readable = Readable(broker, *topics)
    try:
        yield readable
    finally:
        readable.close()


class Feeder:
    """Numbers into each partition of a topic, from a plain client that repeats nothing, until it is closed."""

    def __init__(self, broker: brokers.Broker, topic: str) -> None:
        self._topic = topic
        self.sent = dict.fromkeys(range(PARTITIONS), 0)
        self._failed: list[object] = []
        self._producer = Producer(
            {
                "bootstrap.servers": broker.url.removeprefix("kafka://"),
                "enable.idempotence": True,
                "log_level": 0,
                "on_delivery": lambda error, _: self._failed.append(error) if error else None,
            }
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        while not self._ended.wait(0.05):
            for partition in self.sent:
                for _ in range(5):
                    self._producer.produce(self._topic, b"%d" % self.sent[partition], partition=partition)
                    self.sent[partition] += 1
            self._producer.poll(0)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self._producer.flush(120) == 0 and not self._failed, self._failed


COPIER = """
import json, sys, txnbridge
url, source, target, group, options = sys.argv[1:]
with txnbridge.connect(url, writers=1, kafka=json.loads(options)) as bridge:
    copy = lambda message, txn: txn.send(target, message.value, partition=message.partition)
    bridge.processor(source, group=group, each=copy, max_messages=20, max_wait=0.05).run()
"""


@pytest.mark.parametrize(
    ("protocol", "nodes"), [("classic", 1), ("consumer", 1), ("classic", 3)], ids=["classic", "consumer", "three-nodes"]
)
def test_copiers_lose_double_and_reorder_nothing(
    start_kafka: StartKafka, chance: random.Random, protocol: str, nodes: int
) -> None:
    broker = start_kafka(nodes=nodes)
    options = {"group_protocol": "consumer"} if protocol == "consumer" else SESSION
    with reading(broker, "target") as readable, txnbridge.connect(broker.url) as bridge:
        bridge.admin.create_topic("source", partitions=PARTITIONS)
        command = [sys.executable, "-c", COPIER, broker.url, "source", "target", "copiers", json.dumps(options)]
        copiers = [Popen(command) for _ in range(3)]
        feeder, until, back = Feeder(broker, "source"), time.monotonic() + SECONDS, list[float]()
        try:
            while time.monotonic() < until:
                time.sleep(chance.uniform(1, 6))
                deeds = chance.sample(["kill", "pause", "broker"], chance.choice([1, 1, 2, 3]))
                one = chance.randrange(3)
                if "pause" in deeds:
                    copiers[one - 1].send_signal(signal.SIGSTOP)
                if "kill" in deeds:
                    copiers[one].kill()
                if "broker" in deeds:
                    node = chance.choice(broker.nodes)  # of three each leads a partition
                    broker.kill(node)
                    time.sleep(chance.uniform(0, 3))
                    broker.start(node)
                    back.append(time.monotonic())
                if "kill" in deeds:
                    copiers[one].wait()
                    copiers[one] = Popen(command)
                if "pause" in deeds:
                    time.sleep(chance.uniform(0, 10))
                    copiers[one - 1].send_signal(signal.SIGCONT)
                assert [each.poll() for each in copiers] == [None] * 3, "a copier has ended by itself"
            feeder.close()
            readable.until(lambda: len(readable.found["target"]) >= sum(feeder.sent.values()))
        finally:
            for each in copiers:
                each.kill()
                each.wait()
            with suppress(AssertionError):
                feeder.close()
        report(readable.came, back)
        if wrong := what_is_wrong(readable.found["target"], feeder.sent):
            say(who_stands_where(bridge, ["source", "target"], "copiers"))
        assert wrong == []


def who_stands_where(bridge: Bridge, topics: Sequence[str], group: str) -> str:
    """What to know if something did not go on: who holds a partition open, and how far everybody is."""
    assert isinstance(bridge._connection.broker, KafkaBroker)
    cluster, deadline = bridge._connection.broker._cluster, Deadline(60)
    offsets = Offsets(cluster.requests)
    partitions = [(topic, number) for topic in topics for number in range(PARTITIONS)]
    own = offsets_partition(group, cluster.topics.partitions(OFFSETS_TOPIC, deadline))
    held = cluster.requests.producers([*partitions, own], deadline)
    ids = {each.pid: each.id for each in cluster.requests.transactions(deadline)}
    told = cluster.requests.describe(list(ids.values()), deadline)
    found = forgotten.survey(cluster, deadline)
    return "\n".join(
        [
            *(
                f"open in {at}: {one}, {ids.get(one.pid)}"
                for at, all in held.items()
                for one in all
                if one.start_offset is not None
            ),
            *(f"{each}" for each in told.values() if not each.state.startswith("Complete")),
            *(f"forgotten: {each}" for each in found.forgotten),
            f"no coordinator knows: {found.unknown}",
            f"ends: {offsets.ends(partitions, deadline)}",
            f"group, decided: {offsets.committed(group, partitions[:PARTITIONS], deadline, decided=True)}",
            f"group: {offsets.committed(group, partitions[:PARTITIONS], deadline)}",
        ]
    )


def report(came: Sequence[float], back: Sequence[float]) -> None:
    """How soon something was passed on after each start of the broker."""
    waits = sorted(next((at for at in came if at > start), float("inf")) - start for start in back)
    if waits:
        p90 = waits[min(len(waits) - 1, int(len(waits) * 0.9))]
        say(f"{len(waits)} starts; something new after {statistics.median(waits):.1f} s, p90 {p90:.1f} s")


PREPARER = """
import sys, itertools, txnbridge
url, first = sys.argv[1], int(sys.argv[2])
with txnbridge.connect(url, transactional_id="preparer", writers=1, hold=600) as bridge:
    for number in itertools.count(first):
        try:
            with bridge.transaction(prepare=True) as txn:
                txn.send("left", b"%d" % number)
                txn.send("right", b"%d" % number)
            print(number, txn.token, flush=True)
        except txnbridge.errors.TxnBridgeError as error:
            print(f"{number}: {error}", file=sys.stderr)
"""


class Tokens:
    """What was prepared, and what each who ended it was told."""

    def __init__(self, enders: int) -> None:
        self.told: dict[int, list[Outcome]] = {}
        self.tokens: dict[int, str] = {}
        self._waiting: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(enders)]
        self.over = threading.Event()

    def listen(self, program: Popen[str]) -> None:
        assert program.stdout is not None
        for line in program.stdout:
            text, _, token = line.partition(" ")
            if not token.endswith("\n"):
                return  # it was killed while it said so
            number = int(text)
            self.tokens[number], self.told[number] = token.strip(), []
            for each in self._waiting:
                each.put(number)

    def end(self, bridge: Bridge, ender: int, chance: random.Random) -> None:
        """Commit or abort each; whoever gets no answer asks again later, perhaps for the contrary."""
        mine = self._waiting[ender]
        while not self.over.is_set():
            with suppress(queue.Empty):
                number = mine.get(timeout=0.1)
                try:
                    way = bridge.commit if chance.random() < 0.5 else bridge.abort
                    self.told[number].append(way(self.tokens[number]))
                except TxnBridgeError:
                    mine.put(number)

    def all_told(self) -> bool:
        return all(len(each) == len(self._waiting) for each in self.told.values())

    @contextmanager
    def ending(self, bridges: Sequence[Bridge], chance: random.Random) -> Iterator[None]:
        threads = [
            threading.Thread(target=self.end, args=(bridge, ender, random.Random(chance.random())))
            for ender, bridge in enumerate(bridges)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
            patience = time.monotonic() + SETTLING
            while not self.all_told() and time.monotonic() < patience:
                time.sleep(0.1)
        finally:
            self.over.set()
            for thread in threads:
                thread.join()


def test_all_who_end_a_token_are_told_the_same_and_it_is_whole(broker: brokers.Broker, chance: random.Random) -> None:
    tokens = Tokens(3)
    with ExitStack() as stack:
        readable = stack.enter_context(reading(broker, "left", "right"))
        bridges = [stack.enter_context(txnbridge.connect(broker.url, timeout=10)) for _ in range(3)]
        with tokens.ending(bridges, chance):
            prepare_and_kill(broker, chance, tokens)
        assert len(tokens.told) > 20 and tokens.all_told()
        assert {number: each for number, each in tokens.told.items() if len({*each}) > 1} == {}
        committed = {b"%d" % number for number, each in tokens.told.items() if each[0] is Outcome.COMMITTED}
        check_sides(readable, committed)
        states = {TokenState.COMMITTED, TokenState.ABORTED}
        assert {bridges[0].status(token).state for token in tokens.tokens.values()} <= states
    say(f"{len(tokens.told)} tokens, {len(committed)} of them committed")


def prepare_and_kill(broker: brokers.Broker, chance: random.Random, tokens: Tokens) -> None:
    until = time.monotonic() + SECONDS
    for first in itertools.count(0, 1_000_000):
        if time.monotonic() > until:
            return
        with Popen([sys.executable, "-c", PREPARER, broker.url, str(first)], stdout=PIPE, text=True) as program:
            listener = threading.Thread(target=tokens.listen, args=(program,))
            listener.start()
            time.sleep(chance.uniform(3, 10))
            if chance.random() < 0.5:
                broker.kill()
                program.kill()
                broker.start()
            program.kill()
            listener.join()


def check_sides(readable: Readable, committed: Collection[bytes], perhaps: Collection[bytes] = ()) -> None:
    """Exactly what was committed is readable, once on both sides."""
    readable.until(lambda: all(len(readable.found[side]) >= len(committed) for side in ("left", "right")))
    both = []
    for side in ("left", "right"):
        values = [value for _, value in readable.found[side]]
        assert len(values) == len({*values}), f"doubled on the {side}"
        assert {*values} - {*perhaps} == {*committed} - {*perhaps}, side
        both.append({*values})
    assert both[0] == both[1]


REQUESTS = (
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "Produce",
    "EndTxn",
    "FindCoordinator",
)


def disturb(proxy: faults.Proxy, chance: random.Random) -> None:
    """One fault, undone again after a while."""
    kind = chance.choice(REQUESTS)
    match chance.choice(["cut", "cut after", "delay", "request", "answer"]):
        case "cut":
            proxy.cut()
        case "cut after":
            proxy.cut_after(**{chance.choice(["requests", "answers"]): chance.randrange(3000)})
        case "delay":
            proxy.delay(chance.uniform(0, 0.5))
        case "request":
            proxy.hold(requests=kind)
        case "answer":
            proxy.hold(answers=kind)
    time.sleep(chance.uniform(0, 3))
    if chance.random() < 0.5:
        proxy.cut()  # what is held arrives late
        time.sleep(chance.uniform(0, 2))
    proxy.delay(0)
    proxy.cut_after()
    proxy.release()


def test_whatever_the_network_does_what_was_told_is_true(broker: brokers.Broker, chance: random.Random) -> None:
    """Plain transactions and prepared ones, messages and an acknowledgement in each; some are aborted."""
    outcomes: dict[int, Outcome] = {}
    unknown: dict[int, str] = {}
    with ExitStack() as stack:
        readable = stack.enter_context(reading(broker, "left", "right"))
        through = stack.enter_context(faults.proxy(broker))
        over = threading.Event()

        def go_on_disturbing() -> None:
            while not over.wait(chance.uniform(0, 2)):
                disturb(through, chance)

        disturber = threading.Thread(target=go_on_disturbing)
        with txnbridge.connect(broker.url) as direct:
            direct.admin.create_topic("inbox")
            with direct.transaction() as txn:
                txn.send_many("inbox", [b""] * 20_000)
        own = stack.enter_context(
            txnbridge.connect(through.url, transactional_id="own", writers=1, timeout=8, hold=300)
        )
        consumer = stack.enter_context(own.consumer("inbox", "inbox"))
        disturber.start()
        until = time.monotonic() + SECONDS
        try:
            for number in itertools.count():
                if time.monotonic() > until:
                    break
                one_transaction(own, consumer, number, chance.randrange(4), outcomes, unknown)
        finally:
            over.set()
            disturber.join()
        resolve(own, outcomes, unknown)
        committed = {b"%d" % number for number, outcome in outcomes.items() if outcome is Outcome.COMMITTED}
        check_sides(readable, committed, [b"%d" % number for number in unknown])
    say(f"{len(outcomes)} told, {len(committed)} of them committed; {len(unknown)} unknown for good")


def one_transaction(
    own: Bridge,
    consumer: txnbridge.Consumer,
    number: int,
    way: int,
    outcomes: dict[int, Outcome],
    unknown: dict[int, str],
) -> None:
    try:
        with own.transaction(prepare=way == 0) as txn:
            for side in ("left", "right"):
                txn.send(side, b"%d" % number)
            txn.ack(consumer.poll(1, 1))
            if way == 1:
                txn.abort()
    except OutcomeUnknown as error:
        unknown[number] = str(error.token)
    except TxnBridgeError:
        outcomes[number] = Outcome.ABORTED
    else:
        if way:
            outcomes[number] = Outcome.ABORTED if way == 1 else Outcome.COMMITTED
        else:
            end_by_token(own, number, str(txn.token), outcomes, unknown)


def end_by_token(own: Bridge, number: int, token: str, outcomes: dict[int, Outcome], unknown: dict[int, str]) -> None:
    try:
        outcomes[number] = (own.commit if number % 3 else own.abort)(token)
    except TxnBridgeError:
        unknown[number] = token


def resolve(own: Bridge, outcomes: dict[int, Outcome], unknown: dict[int, str]) -> None:
    """When the network is well again, what was unknown is asked for; what is prepared still is aborted."""
    for number, token in list(unknown.items()):
        status = own.status(token)
        if status.state is TokenState.PREPARED:
            outcomes[number] = own.abort(token)
        elif status.state is not TokenState.UNKNOWN:
            outcomes[number] = Outcome[status.state.name]
        else:
            assert status.permanent, status
            continue
        del unknown[number]
