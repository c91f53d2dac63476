"""Processors with handlers on the event loop: exactly once, and a stop or a cancellation ends them in time."""

import asyncio
import itertools
import threading
from typing import Any

import anyio
import pytest

import txnbridge
from tests.aio.kit import SOON, cancelled_when, until, values
from txnbridge import Abort, Poison, Topic, aio, codecs
from txnbridge.errors import DeadlineExceeded, InvalidOption, InvalidState, NotFound, NotSupported

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(url: str) -> str:
    """A broker with ten messages to process."""
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("out", "dead")
        with bridge.transaction() as txn:
            txn.send_many("in", [b"%d" % number for number in range(10)])
    return url


NUMBERS = [b"%d" % number for number in range(10)]


def left(url: str, group: str) -> int:
    with txnbridge.connect(url) as bridge, bridge.consumer("in", group) as consumer:
        return len(consumer.poll(timeout=0))


@pytest.mark.parametrize("way", ["each", "batch"])
async def test_input_and_output_are_one_atom_and_the_handler_runs_on_the_loop(url, way, bridge):
    threads = set()

    async def each(message, txn):
        threads.add(threading.get_ident())
        await anyio.sleep(0)
        await txn.send("out", message.value)

    async def batch(messages, txn):
        threads.add(threading.get_ident())
        await txn.send_many("out", [message.value for message in messages])

    handler: Any = {"each": each} if way == "each" else {"batch": batch}
    processor = bridge.processor("in", group="g", max_messages=4, **handler)
    await processor.run(until_idle=True)
    assert processor.stats.messages == 10 and processor.lag == 0
    assert values(url, "out") == NUMBERS and left(url, "g") == 0
    assert threads == {threading.get_ident()}


async def test_a_block_runs_a_processor_until_its_end(url, bridge):
    async def each(message, txn):
        await txn.send("out", message.value)

    async with bridge.processor("in", group="g", each=each) as processor:
        await until(lambda: processor.stats.messages == 10)
        assert processor.healthy
    assert not processor.healthy
    with pytest.raises(InvalidState, match="runs once"):
        await processor.run()
    assert values(url, "out") == NUMBERS


async def test_failures_are_those_of_the_synchronous_processor(url):
    attempts = []

    async def each(message, txn):
        attempts.append(message.value)
        await txn.send("out", message.value)
        if message.value == b"3":
            raise Poison("no")
        if message.value == b"5" and attempts.count(b"5") < 2:
            raise Abort
        if message.value == b"7":
            raise ZeroDivisionError

    async with aio.connect(url, create_topics=0) as bridge:
        processor = bridge.processor("in", group="g", each=each, dead_letter="dead", fatal=ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            await processor.run()
        with pytest.raises(NotFound):
            await bridge.processor("nowhere", group="g", each=each).run()
        with pytest.raises(NotFound):
            async with bridge.processor("nowhere", group="g", each=each):
                pass
        with pytest.raises(InvalidOption, match="async def"):
            bridge.processor("in", group="g", each=lambda message, txn: None)  # type: ignore[arg-type, return-value]
        for setting in ({"db": "sqlite:///a.db"}, {"to": bridge.sync}):
            with pytest.raises(NotSupported, match="plain handler"):
                bridge.processor("in", group="g", each=each, **setting)
        with pytest.raises(InvalidOption):
            bridge.processor("in", group="g", each=each, max_messages=0)
    assert values(url, "out") == [] and left(url, "g") == 10


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_the_handler_awaits_and_that_is_cancelled_is_a_failure_of_its_message(url, bridge):
    async def each(message, txn):
        if message.value == b"4":
            other = asyncio.create_task(anyio.sleep(SOON))
            other.cancel()
            await other
        await txn.send("out", message.value)

    settings: Any = {"max_attempts": 2, "dead_letter": "dead", "backoff": (0.01, 0.01)}
    await bridge.processor("in", group="g", each=each, **settings).run(until_idle=True)
    assert values(url, "dead") == [b"4"] and values(url, "out") == [n for n in NUMBERS if n != b"4"]


@pytest.mark.parametrize("how", ["run", "block"])
async def test_a_cancelled_processor_finishes_its_handler(url, how):
    entered = anyio.Event()

    async def batch(messages, txn):
        entered.set()
        await anyio.sleep(0.2)
        await txn.send_many("out", [message.value for message in messages])

    async def serve():
        processor = bridge.processor("in", group="g", batch=batch)
        if how == "run":
            await processor.run()
        async with processor:
            await anyio.sleep(SOON)

    async with aio.connect(url) as bridge:
        await cancelled_when(entered.is_set, serve)
    assert values(url, "out") == NUMBERS and left(url, "g") == 0


@pytest.mark.parametrize("catches", [False, True])
async def test_a_handler_that_does_not_end_in_the_time_of_a_stop_is_cancelled(url, catches):
    ends = []
    entered = anyio.Event()

    async def batch(messages, txn):
        await txn.send("out", b"never")
        entered.set()
        try:
            await anyio.sleep(10 * SOON)
        except anyio.get_cancelled_exc_class():
            ends.append("cancelled")
            if not catches:
                raise

    async with aio.connect(url) as bridge, anyio.create_task_group() as tasks:
        processor = bridge.processor("in", group="g", batch=batch, stop_timeout=5.0)
        tasks.start_soon(processor.run)
        await entered.wait()
        processor.stop()
    assert ends == ["cancelled"]
    assert values(url, "out") == [] and left(url, "g") == 10


async def test_a_handler_that_no_cancellation_ends_loses_its_transaction(url):
    entered = anyio.Event()

    async def batch(messages, txn):
        await txn.send("out", b"never")
        entered.set()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(2.0)

    async with aio.connect(url) as bridge:
        with pytest.raises(DeadlineExceeded, match="did not end"):
            async with bridge.processor("in", group="g", batch=batch, stop_timeout=0.5):
                await entered.wait()
    assert values(url, "out") == [] and left(url, "g") == 10


async def test_a_processor_that_is_cancelled_again_and_again_passes_each_message_on_once(url, bridge):
    async def each(message, txn):
        await anyio.sleep(0.002)
        await txn.send("out", message.value)

    async with bridge.transaction() as txn:
        await txn.send_many("in", [b"%d" % number for number in range(10, 100)])
    for number in itertools.count():
        processor = bridge.processor("in", group="g", each=each, max_messages=3)
        with anyio.move_on_after(0.02 * number) as scope:
            await processor.run(until_idle=True)
        if not scope.cancelled_caught:
            break
    assert number > 3
    assert sorted(map(int, values(url, "out"))) == list(range(100))


async def test_messages_are_decoded_and_keep_their_codec_errors(url, bridge):
    seen = []

    async def each(message, txn):
        seen.append(message.value)

    async with bridge.transaction() as txn:
        await txn.send("in", b"{")
    processor = bridge.processor(Topic("in", codecs.json), group="g", each=each, dead_letter="dead")
    await processor.run(until_idle=True)
    assert seen == list(range(10)) and values(url, "dead") == [b"{"]


async def test_a_message_that_fails_can_be_tried_again_later(url, bridge):
    attempts = []

    async def each(message, txn):
        attempts.append(message.value)
        if attempts.count(message.value) < 2:
            raise ZeroDivisionError
        await txn.send("out", message.value)

    processor = bridge.processor("in", group="g", each=each, retry=[0.05], dead_letter="dead")
    await processor.run(until_idle=True)
    assert sorted(values(url, "out")) == NUMBERS and values(url, "dead") == []
