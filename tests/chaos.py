"""Everything at once, for minutes, on a broker of its own. An independent reader judges what was promised.

Three attacks that every broker has to stand: processors of one group, tokens that several end, and a network that
fails. The tests of each broker say how it is started, and who reads it independently.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from subprocess import PIPE, Popen
from typing import Any, Protocol

from txnbridge_conformance import brokers, faults

import txnbridge
from txnbridge import Bridge, Outcome, TokenState
from txnbridge.errors import OutcomeUnknown, TxnBridgeError

SECONDS = float(os.environ.get("TXNBRIDGE_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("TXNBRIDGE_CHAOS_SEED", str(random.randrange(10**6))))
SETTLING = 240.0  # for what is left to do when nothing fails any more
PARTITIONS = 3
COPIERS, ENDERS = 3, 3

Placed = tuple[int, bytes]  # a partition, and a value in it


def say(text: str) -> None:
    """Shown with `pytest -s`, or when the test fails."""
    sys.stderr.write(f"{text}\n")


def begin() -> random.Random:
    # What pytest would dump of all threads after five minutes reads their frames while they run, and may crash.
    faulthandler.cancel_dump_traceback_later()
    say(f"TXNBRIDGE_CHAOS_SEED={SEED}")
    return random.Random(SEED)


@dataclass(frozen=True)
class World:
    """A broker, how everybody connects to it, and who judges."""

    broker: brokers.Broker
    read: Callable[[str], list[Placed]]
    """What an independent reader finds of a topic by now, as far as it is committed."""
    requests: Sequence[str]
    """What may be late on its way."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def connect(self, url: str = "", **more: Any) -> Bridge:
        return txnbridge.connect(url or self.broker.url, **{**self.settings, **more})

    def create(self, *topics: str) -> None:
        with self.connect() as bridge:
            for topic in topics:
                bridge.admin.create_topic(topic, partitions=PARTITIONS)

    def program(self, text: str, *arguments: str) -> list[str]:
        return [sys.executable, "-c", text, self.broker.url, json.dumps(dict(self.settings)), *arguments]

    def restart(self, chance: random.Random) -> None:
        node = chance.choice(self.broker.nodes)
        self.broker.kill(node)
        time.sleep(chance.uniform(0, 3))
        self.broker.start(node)

    def until(self, enough: Callable[[], bool]) -> None:
        """Wait for it, and then for what may come too much; or as long as it may take."""
        waited_until = time.monotonic() + SETTLING
        while not enough() and time.monotonic() < waited_until:
            time.sleep(1)
        time.sleep(3)

    def as_ours(self, topic: str) -> Counter[bytes]:
        """What our own reader finds of a topic."""
        with self.connect() as bridge:
            return Counter(message.value for message in bridge.read(topic, 1_000_000) if message.value is not None)


def what_is_wrong(found: Sequence[Placed], sent: Sequence[Placed]) -> list[str]:
    """Of each partition exactly what was sent has to be there, once each and in its order."""
    wrong = []
    for partition in sorted({where for where, _ in [*found, *sent]}):
        there = [int(value) for where, value in found if where == partition]
        wanted = [int(value) for where, value in sent if where == partition]
        if lost := Counter(wanted) - Counter(there):
            wrong.append(f"[{partition}] lost {lost.total()}: {sorted(lost)[:10]}")
        if doubled := Counter(there) - Counter(wanted):
            wrong.append(f"[{partition}] too many {doubled.total()}: {sorted(doubled)[:10]}")
        if not lost and not doubled and there != wanted:
            moved = [is_there for is_there, is_wanted in zip(there, wanted, strict=True) if is_there != is_wanted]
            wrong.append(f"[{partition}] out of order: {moved[:10]}")
    return wrong


def check_what_judges() -> None:
    """The judge itself would notice."""
    sent = [(0, b"0"), (1, b"0"), (0, b"1")]
    assert what_is_wrong(sent, sent) == []
    assert what_is_wrong(sent[:2], sent) == ["[0] lost 1: [1]"]
    assert what_is_wrong([*sent, (1, b"0")], sent) == ["[1] too many 1: [0]"]
    assert what_is_wrong([*sent, (2, b"7")], sent) == ["[2] too many 1: [7]"]
    assert what_is_wrong([(0, b"1"), (1, b"0"), (0, b"0")], sent) == ["[0] out of order: [1, 0]"]


# --- processors of one group ------------------------------------------------------------------------------------------


class Feeder(Protocol):
    """Writes numbers into each partition of the source, until it is closed."""

    def close(self) -> None: ...


class Publishing:
    """A feeder by our own publishers; of what one of them was not sure of nothing is sent again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        numbers = itertools.count()
        while not self._ended.is_set():
            with suppress(TxnBridgeError), self._world.connect(timeout=20) as bridge, bridge.publisher() as publisher:
                while not self._ended.wait(0.1):
                    for number, partition in itertools.product(itertools.islice(numbers, 5), range(PARTITIONS)):
                        publisher.send("source", b"%d" % number, partition=partition)
                    publisher.flush()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Batching(Publishing):
    """A feeder by transactions. A broker that stores batches gets entries of 2 to 50 messages, which copiers cut."""

    def _feed(self) -> None:
        numbers, chance = itertools.count(), random.Random(SEED)
        while not self._ended.is_set():
            with suppress(TxnBridgeError), self._world.connect(timeout=20) as bridge:
                while not self._ended.wait(0.3):
                    with bridge.transaction() as txn:
                        for partition in range(PARTITIONS):
                            for number in itertools.islice(numbers, chance.randint(2, 50)):
                                txn.send("source", b"%d" % number, partition=partition)


COPIER = """
import json, sys, txnbridge
url, settings, *options = sys.argv[1:]
with txnbridge.connect(url, writers=1, **{**json.loads(settings), **json.loads(options[0])}) as bridge:
    copy = lambda message, txn: txn.send("target", message.value, partition=message.partition)
    bridge.processor("source", group="copiers", each=copy, max_messages=20, max_wait=0.05).run()
"""


class Copiers:
    """Processors of one group, each in a process of its own, and what is done to them."""

    def __init__(self, world: World, chance: random.Random, options: Mapping[str, Any]) -> None:
        self._world, self._chance = world, chance
        self._command = world.program(COPIER, json.dumps(dict(options)))
        self.running = [Popen(self._command) for _ in range(COPIERS)]
        self.done: Counter[str] = Counter()

    def attack(self) -> None:
        deeds = {"kill": 2, "pause": 2, "broker": 2, "leave": 1, "abort": 1}
        wanted = {*self._chance.choices([*deeds], [*deeds.values()], k=self._chance.choice([1, 1, 2, 3]))}
        self.done.update(wanted)
        killed, paused, leaving = self._chance.sample(range(COPIERS), 3)
        if "pause" in wanted:
            self.running[paused].send_signal(signal.SIGSTOP)
        if "kill" in wanted:
            self.running[killed].kill()
        if "leave" in wanted:
            self.running[leaving].send_signal(signal.SIGTERM)
        if "broker" in wanted:
            self._world.restart(self._chance)
        if "abort" in wanted:
            self._abort_something()
        if "kill" in wanted:
            self._replace(killed, -signal.SIGKILL)
        if "pause" in wanted:
            time.sleep(self._chance.uniform(0, 10))
            self.running[paused].send_signal(signal.SIGCONT)
        if "leave" in wanted:
            self._replace(leaving, 0)
        assert [each.poll() for each in self.running] == [None] * COPIERS, "a copier has ended by itself"

    def _replace(self, which: int, code: int) -> None:
        ended = self.running[which].wait(120)
        # A signal to leave comes at any time, also while Python starts.
        assert ended in (code, -signal.SIGTERM), f"a copier ended with {ended}"
        self.running[which] = Popen(self._command)

    def _abort_something(self) -> None:
        """An administrator ends what he takes for forgotten."""
        with suppress(TxnBridgeError), self._world.connect(timeout=10) as bridge:
            if found := bridge.admin.transactions():
                bridge.admin.abort(self._chance.choice(found).transaction, reason="chaos")
                self.done["aborted"] += 1

    def close(self) -> None:
        for each in self.running:
            each.kill()
            each.wait()


def copiers_lose_double_and_reorder_nothing(
    world: World,
    chance: random.Random,
    feed: Callable[[], Feeder],
    options: Mapping[str, Any] | None = None,
    tell: Callable[[Bridge], str] | None = None,
) -> None:
    """`options` are the copiers' own; `tell` says more of what went wrong."""
    check_what_judges()
    world.create("source", "target")
    copiers, feeder = Copiers(world, chance, options or {}), feed()
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(chance.uniform(1, 6))
            copiers.attack()
        before = world.as_ours("target").total()
        feeder.close()
        source = world.read("source")
        world.until(lambda: len(world.read("target")) >= len(source))
    finally:
        copiers.close()
        feeder.close()
    wrong = what_is_wrong(world.read("target"), source)
    say(f"{before} of {len(source)} were copied under attack: {dict(copiers.done)}")
    with world.connect() as bridge:
        if wrong and tell:
            say(tell(bridge))
        assert wrong == []
        assert before > 0
        assert world.as_ours("target") == Counter(value for _, value in source)
        world.until(lambda: not bridge.admin.transactions())
        assert bridge.admin.transactions() == []


# --- tokens -----------------------------------------------------------------------------------------------------------

PREPARER = """
import json, sys, itertools, time, txnbridge
url, settings, first = sys.argv[1:]
with txnbridge.connect(url, transactional_id="preparer", writers=1, hold=600, **json.loads(settings)) as bridge:
    for number in itertools.count(int(first)):
        time.sleep(0.1)  # those who end are three, and look at each token before and after
        try:
            with bridge.transaction(prepare=True) as txn:
                txn.send("left", b"%d" % number)
                txn.send("right", b"%d" % number)
            print(number, txn.token, flush=True)
        except txnbridge.Fenced as error:
            sys.exit(str(error))
        except txnbridge.TxnBridgeError as error:
            print(f"{number}: {error}", file=sys.stderr)
"""


class Tokens:
    """What was prepared, and what each who ended it was told."""

    def __init__(self) -> None:
        self.told: dict[int, list[Outcome]] = {}
        self.tokens: dict[int, str] = {}
        self._waiting: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(ENDERS)]
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
            last, patience = 0, time.monotonic() + SETTLING
            while not self.all_told() and time.monotonic() < patience:
                if (told := sum(map(len, self.told.values()))) > last:
                    last, patience = told, time.monotonic() + SETTLING
                time.sleep(0.1)
        finally:
            self.over.set()
            for thread in threads:
                thread.join()


def all_who_end_a_token_are_told_the_same_and_it_is_whole(world: World, chance: random.Random) -> None:
    tokens = Tokens()
    world.create("left", "right")
    with ExitStack() as stack:
        bridges = [stack.enter_context(world.connect(timeout=10)) for _ in range(ENDERS)]
        with tokens.ending(bridges, chance):
            prepare_and_kill(world, chance, tokens)
        abort_what_nobody_can_end(world, bridges[0])
        committed = {b"%d" % number for number, each in tokens.told.items() if each and each[0] is Outcome.COMMITTED}
        say(f"{len(tokens.told)} tokens, {len(committed)} of them committed")
        assert {number: each for number, each in tokens.told.items() if len({*each}) > 1} == {}
        assert len(tokens.told) > 20
        assert tokens.all_told(), {number: each for number, each in tokens.told.items() if len(each) < ENDERS}
        check_sides(world, committed)
        states = {TokenState.COMMITTED, TokenState.ABORTED}
        assert {bridges[0].status(token).state for token in tokens.tokens.values()} <= states


def abort_what_nobody_can_end(world: World, bridge: Bridge) -> None:
    """The last owner may have died inside a transaction, or before it told a token: both hold readers back for long."""

    def is_over() -> bool:
        for open in bridge.admin.transactions():
            with suppress(TxnBridgeError):
                bridge.admin.abort(open.transaction, reason="its owner was killed")
        return not bridge.admin.transactions()

    world.until(is_over)
    assert bridge.admin.transactions() == []


@contextmanager
def preparing(world: World, first: int, tokens: Tokens) -> Iterator[Popen[str]]:
    with Popen(world.program(PREPARER, str(first)), stdout=PIPE, text=True) as program:
        listener = threading.Thread(target=tokens.listen, args=(program,))
        listener.start()
        try:
            yield program
        finally:
            program.kill()
            listener.join()


def prepare_and_kill(world: World, chance: random.Random, tokens: Tokens) -> None:
    """Owners of one transactional id, one after the other, each killed or replaced while it slept."""
    until = time.monotonic() + SECONDS
    firsts = itertools.count(0, 1_000_000)
    while time.monotonic() < until:
        with preparing(world, next(firsts), tokens) as program:
            time.sleep(chance.uniform(3, 10))
            match chance.choice(["kill", "kill with broker", "take over"]):
                case "kill with broker":
                    world.broker.kill()
                    program.kill()
                    world.broker.start()
                case "take over":
                    program.send_signal(signal.SIGSTOP)
                    with preparing(world, next(firsts), tokens):
                        time.sleep(chance.uniform(0, 6))
                        program.send_signal(signal.SIGCONT)
                        time.sleep(chance.uniform(3, 6))


def check_sides(world: World, committed: Collection[bytes], perhaps: Collection[bytes] = ()) -> None:
    """Exactly what was committed is readable, once on both sides."""
    sides = ("left", "right")
    world.until(lambda: all(len(world.read(side)) >= len(committed) for side in sides))
    both = []
    for side in sides:
        values = Counter(value for _, value in world.read(side))
        assert {value: times for value, times in values.items() if times > 1} == {}, f"doubled on the {side}"
        missing, extra = {*committed} - {*values} - {*perhaps}, {*values} - {*committed} - {*perhaps}
        assert (sorted(missing)[:10], sorted(extra)[:10]) == ([], []), f"{side}: {len(missing)}, {len(extra)}"
        assert world.as_ours(side) == values
        both.append({*values})
    assert both[0] == both[1]


# --- a network that fails ---------------------------------------------------------------------------------------------


def disturb(proxy: faults.Proxy, requests: Sequence[str], chance: random.Random) -> None:
    """One fault, undone again after a while."""
    kind = chance.choice(requests)
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


@contextmanager
def disturbed(proxy: faults.Proxy, requests: Sequence[str], chance: random.Random) -> Iterator[None]:
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(chance.uniform(0, 2)):
            disturb(proxy, requests, chance)

    disturber = threading.Thread(target=go_on)
    disturber.start()
    try:
        yield
    finally:
        over.set()
        disturber.join()


class Transactions:
    """Plain ones and prepared ones, messages and an acknowledgement in each; some are aborted."""

    def __init__(self, bridge: Bridge, consumer: txnbridge.Consumer) -> None:
        self._bridge, self._consumer = bridge, consumer
        self.outcomes: dict[int, Outcome] = {}
        self.unknown: dict[int, str] = {}

    def one(self, number: int, way: int) -> None:
        try:
            with self._bridge.transaction(prepare=way == 0) as txn:
                for side in ("left", "right"):
                    txn.send(side, b"%d" % number)
                txn.ack(self._consumer.poll(1, 1))
                if way == 1:
                    txn.abort()
        except OutcomeUnknown as error:
            self.unknown[number] = str(error.token)
        except TxnBridgeError:
            self.outcomes[number] = Outcome.ABORTED
        else:
            if way:
                self.outcomes[number] = Outcome.ABORTED if way == 1 else Outcome.COMMITTED
            else:
                self._end(number, str(txn.token))

    def _end(self, number: int, token: str) -> None:
        try:
            self.outcomes[number] = (self._bridge.commit if number % 3 else self._bridge.abort)(token)
        except TxnBridgeError:
            self.unknown[number] = token

    def resolve(self) -> None:
        """When the network is well again, what was unknown is asked for; what is prepared still is aborted."""
        for number, token in list(self.unknown.items()):
            status = self._bridge.status(token)
            if status.state is TokenState.PREPARED:
                self.outcomes[number] = self._bridge.abort(token)
            elif status.state is not TokenState.UNKNOWN:
                self.outcomes[number] = Outcome[status.state.name]
            else:
                assert status.permanent, status
                continue
            del self.unknown[number]


def whatever_the_network_does_what_was_told_is_true(world: World, chance: random.Random) -> None:
    world.create("left", "right")
    with world.connect() as direct:
        direct.admin.create_topic("inbox")
        for _ in range(4):
            with direct.transaction() as txn:
                txn.send_many("inbox", [b""] * 5_000)
    with ExitStack() as stack:
        through = stack.enter_context(faults.proxy(world.broker))
        own = stack.enter_context(world.connect(through.url, transactional_id="own", writers=1, timeout=8, hold=300))
        done = Transactions(own, stack.enter_context(own.consumer("inbox", "inbox")))
        with disturbed(through, world.requests, chance):
            until = time.monotonic() + SECONDS
            for number in itertools.count():
                if time.monotonic() > until:
                    break
                done.one(number, chance.randrange(4))
        done.resolve()
        committed = {b"%d" % number for number, outcome in done.outcomes.items() if outcome is Outcome.COMMITTED}
        say(f"{len(done.outcomes)} told, {len(committed)} committed; {len(done.unknown)} unknown for good")
        check_sides(world, committed, [b"%d" % number for number in done.unknown])
        assert committed
