"""Many messages of a poll are handled at once: each is sent once, in order, and a failure is its message's alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnbridge
from tests.core.processor_kit import url_of, values
from tests.in_time import wait_until
from txnbridge import App, Bridge, InvalidState, Message, Poison, Transaction

KEYS = 7


@pytest.fixture
def url(tmp_path: Path) -> str:
    return url_of(tmp_path, lease_seconds=10)


@pytest.fixture
def bridge(url: str) -> Iterator[Bridge]:
    with txnbridge.connect(url, create_topics=2) as opened:
        yield opened


def feed(bridge: Bridge, count: int) -> None:
    with bridge.transaction() as txn:
        for number in range(count):
            txn.send("in", b"%d" % number, key=b"k%d" % (number % KEYS))


class Meeting:
    """A handler whose calls wait for each other: it returns once `size` of them run at the same time."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.seen: dict[Any, list[int]] = defaultdict(list)

    def __call__(self, message: Message, txn: Transaction) -> None:
        self.barrier.wait(60)
        self.seen[message.key].append(int(message.value))
        txn.send_many("out", [(message.value, message.key)])


def test_messages_of_several_keys_are_handled_at_once_and_those_of_one_key_in_order(bridge):
    feed(bridge, 5 * KEYS)
    handler = Meeting(KEYS)
    processor = bridge.processor("in", group="g", each=handler, concurrency=20)
    processor.run(until_idle=True)
    assert all(seen == sorted(seen) and len(seen) == 5 for seen in handler.seen.values())
    sent = bridge.read("out", 100)
    assert processor.stats.transactions == 1 and len(sent) == 5 * KEYS
    for key in handler.seen:
        assert [int(m.value) for m in sent if m.key == key] == handler.seen[key]


@pytest.mark.parametrize("refused", [range(2), range(1, 3)])
def test_the_messages_are_handled_where_fewer_threads_or_none_can_be_started_for_a_while(bridge, no_threads, refused):
    feed(bridge, 2 * KEYS)
    failed = no_threads(refused, when=lambda thread: thread.name in ("txnbridge g 1", "txnbridge g 2"))
    processor = bridge.processor("in", group="g", each=Meeting(1), concurrency=2)
    processor.run(until_idle=True)
    assert failed and processor.stats.messages == len(bridge.read("out", 100)) == 2 * KEYS


@pytest.mark.parametrize("name", ["txnbridge g", "txnbridge g stop"])
def test_a_processor_whose_thread_cannot_be_started_leaves_its_group(bridge, no_threads, name):
    feed(bridge, 1)
    no_threads(0, when=lambda thread: thread.name == name)
    with suppress(RuntimeError), bridge.processor("in", group="g", each=Meeting(1)):
        pass
    assert not bridge.admin.group("g").members


@pytest.mark.parametrize(("order", "at_once"), [("partition", 2), ("none", 14)])
def test_the_order_that_is_kept_is_chosen(bridge, order, at_once):
    with bridge.transaction() as txn:
        for number in range(14):
            txn.send("in", b"%d" % number, key=b"k", partition=number % 2)
    bridge.processor("in", group="g", each=Meeting(at_once), concurrency=14, order=order).run(until_idle=True)
    assert sorted(map(int, values(bridge, "out"))) == list(range(14))


def test_a_failure_is_its_messages_and_nothing_else_is_handled_twice(bridge):
    feed(bridge, 3 * KEYS)
    calls: dict[bytes, int] = defaultdict(int)

    def fail(message: Message, txn: Transaction) -> None:
        calls[message.value] += 1
        txn.send("out", message.value)
        if message.value == b"4":
            raise Poison("no")
        if message.value == b"8" or (message.value == b"9" and calls[b"9"] < 3):
            raise KeyError

    settings: Any = {"max_attempts": 3, "dead_letter": "dead", "backoff": (0.01, 0.01)}
    bridge.processor("in", group="g", each=fail, concurrency=KEYS, **settings).run(until_idle=True)
    assert sorted(values(bridge, "dead")) == [b"4", b"8"]
    assert sorted(map(int, values(bridge, "out"))) == sorted({*range(3 * KEYS)} - {4, 8})
    assert {value for value, count in calls.items() if count > 1} == {b"8", b"9"}


@pytest.mark.parametrize("ending", [SystemExit, asyncio.CancelledError])
def test_an_error_that_is_no_exception_ends_the_processor_as_it_does_in_one_thread(bridge, ending):
    feed(bridge, 3 * KEYS)

    def end(message: Message, txn: Transaction) -> None:
        if message.value in (b"0", b"1"):  # as many as there are threads
            raise ending

    processor = bridge.processor("in", group="g", each=end, concurrency=2)
    with pytest.raises(ending), processor:
        wait_until(lambda: not processor.healthy)
    assert processor.stats.transactions == 0


@pytest.mark.parametrize(("call", "hides"), [("ack", False), ("commit", True)])
def test_a_handler_that_does_more_than_send_ends_the_processor_also_if_it_hides_that(bridge, call, hides):
    feed(bridge, KEYS)

    def stubborn(message: Message, txn: Transaction) -> None:
        with suppress(*[InvalidState] * hides):
            getattr(txn, call)(*[message] * (call == "ack"))

    with pytest.raises(InvalidState, match="the handler only sends with transaction"):
        bridge.processor("in", group="g", each=stubborn, concurrency=3, retry_for=0).run(until_idle=True)
    assert sum(bridge.admin.group("g").lag.values()) == KEYS


def test_calls_that_take_longer_than_a_transaction_are_committed_in_parts(bridge):
    feed(bridge, 4 * KEYS)

    def slow(message: Message, txn: Transaction) -> None:
        assert txn.deadline <= 2
        time.sleep(0.1)
        txn.send("out", message.value)

    processor = bridge.processor("in", group="g", each=slow, concurrency=2, order="none", timeout=2)
    processor.run(until_idle=True)
    assert sorted(map(int, values(bridge, "out"))) == list(range(4 * KEYS))
    assert processor.stats.transactions > 1 and processor.stats.retries == 0


def test_a_stop_commits_what_has_ended_and_begins_no_further_call(bridge):
    feed(bridge, 10)
    inside, go = threading.Semaphore(0), threading.Event()

    def wait(message: Message, txn: Transaction) -> None:
        inside.release()
        assert go.wait(60)
        txn.send("out", message.value)

    with bridge.processor("in", group="g", each=wait, concurrency=3, order="none") as processor:
        for _ in range(3):
            inside.acquire()
        processor.stop()
        go.set()
    assert 1 <= len(values(bridge, "out")) == processor.stats.messages <= 3
    assert not [t for t in threading.enumerate() if t.name.startswith("txnbridge g ") and not wait_ended(t)]


def wait_ended(thread: threading.Thread) -> bool:
    thread.join(60)
    return not thread.is_alive()


def test_an_asynchronous_function_keeps_its_loop_and_what_it_has_opened(url, bridge):
    feed(bridge, 60)
    loops, states = set(), []

    async def lifespan(app: App):
        states.append(asyncio.create_task(asyncio.sleep(3600)))  # such as a pool of connections
        yield states[0]

    app = App(url, lifespan=lifespan)

    @app.process("in", group="g", to="out", concurrency=30, order="none", max_messages=30)
    async def ship(value: bytes, state: Any) -> bytes:
        loops.add(asyncio.get_running_loop())
        meeting.append(value)
        while len(meeting) % 30:
            await asyncio.sleep(0.01)
        assert not state.done()
        return value

    meeting: list[bytes] = []
    app.run(until_idle=True)
    assert len(loops) == 1 and sorted(map(int, values(bridge, "out"))) == list(range(60))


@pytest.mark.parametrize("place", ["begin", "function", "background", "end"])
def test_asynchronous_code_that_exits_ends_its_app(url, bridge, place):
    feed(bridge, 5)

    async def leave(here: str) -> None:
        if place == here:
            raise SystemExit(3)

    async def lifespan(app: App):
        await leave("begin")
        app.background(leave, "background")
        yield
        await leave("end")

    async def handle(value: bytes) -> None:
        await leave("function")

    app = App(url, stop_timeout=1, lifespan=lifespan)
    app.process("in", group="g", concurrency=5)(handle)
    with pytest.raises(SystemExit), app:
        wait_until(lambda: place == "end" or not app.healthy)


def test_a_stop_cancels_asynchronous_calls_that_hang(url, bridge):
    feed(bridge, 5)
    waiting = []

    async def hang(value: bytes) -> None:
        waiting.append(value)
        await asyncio.sleep(3600)

    app = App(url, stop_timeout=3)
    app.process("in", group="g", concurrency=5, order="none")(hang)
    with app:
        wait_until(lambda: len(waiting) == 5)
    with txnbridge.connect(url) as other, other.consumer("in", "g") as consumer:
        assert len(consumer.poll(10)) == 5
