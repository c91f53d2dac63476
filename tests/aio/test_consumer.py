"""Consumers of tasks: in order, and nothing is lost when a poll is cancelled at any moment."""

import threading

import anyio
import pytest

import txnbridge
from tests.aio.kit import MOMENTS, SOON, Cancelling, cancelled_when, in_txnbridge
from tests.conformance.broken import around
from txnbridge import Poison, Topic, aio, codecs
from txnbridge.errors import DeadlineExceeded

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(url: str) -> str:
    """A broker with a topic of ten messages."""
    with txnbridge.connect(url) as bridge, bridge.transaction() as txn:
        for number in range(10):
            txn.send("a", b"%d" % number)
    return url


async def take(how: str, consumer: aio.Consumer, count: int) -> list[bytes]:
    """Take up to `count` messages in one of the three ways to read."""
    if how == "poll":
        return [message.value for message in await consumer.poll(count, timeout=SOON)]
    if how == "batches":
        async for batch in consumer.batches(count, max_wait=0.05):
            return [message.value for message in batch]
    async for message in consumer:
        return [message.value]
    raise AssertionError("reading does not end by itself")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["poll", "batches", "iteration"])
async def test_messages_that_a_cancelled_poll_had_fetched_come_with_the_next_poll(how, moment, monkeypatch, bridge):
    async with bridge.consumer("a", "g") as consumer:
        seen = await take(how, consumer, 2)
        with monkeypatch.context() as patch:
            cancelling = Cancelling(patch, 1, moment)
            await cancelling.run(lambda: take(how, consumer, 2))
        assert cancelling.reached
        while len(seen) < 10:
            seen += await take(how, consumer, 2)
        assert seen == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("group", ["g", None])
@pytest.mark.parametrize("how", ["poll", "batches", "iteration"])
async def test_an_undecodable_message_is_told_with_the_next_poll_if_the_task_was_cancelled(
    how, group, moment, monkeypatch, url, bridge
):
    """Otherwise it would be skipped, and in a group on a broker of positions nothing after it could be acknowledged."""
    with txnbridge.connect(url) as sync, sync.transaction() as txn:
        txn.send_many("b", [b"{", b"1"])
    async with bridge.consumer(Topic("b", codecs.json), group) as consumer:
        with monkeypatch.context() as patch:
            cancelling = Cancelling(patch, 1, moment)
            await cancelling.run(lambda: take(how, consumer, 2))
        assert cancelling.reached
        with pytest.raises(Poison) as poison:
            await take(how, consumer, 2)
        assert poison.value.message.value == b"{"
        assert list(map(str, await take(how, consumer, 2))) == ["1"]
        if group is not None:
            async with bridge.transaction() as txn:
                await txn.ack(poison.value.message)


async def test_a_long_poll_whose_task_was_cancelled_ends_soon(bridge):
    await bridge.ensure_topics("b")
    async with bridge.consumer("b", "g") as consumer:
        with anyio.move_on_after(0.1):
            await consumer.poll(timeout=10_000)
        with anyio.move_on_after(0.1):
            async for _ in consumer.batches(max_wait=10_000):
                pass


async def test_polls_that_are_cancelled_sooner_than_they_end_make_progress(bridge):
    before = threading.enumerate()
    await bridge.ensure_topics("b")
    async with bridge.consumer("b", "g") as consumer:
        for _ in range(100):
            with anyio.move_on_after(0.001):
                await consumer.poll(timeout=SOON)
        assert len(in_txnbridge(before)) < 20
        async with bridge.transaction() as txn:
            await txn.send("b", b"1")
        seen: list[bytes] = []
        with anyio.fail_after(SOON):
            while not seen:
                with anyio.move_on_after(0.1):
                    seen = [message.value for message in await consumer.poll(timeout=SOON)]
        assert seen == [b"1"]


async def test_a_consumer_answers_and_moves(bridge):
    async with bridge.consumer("a") as consumer:
        first = (await consumer.poll(4, timeout=SOON))[0]
        assert await consumer.assignment() == [("a", 0)] == list(await consumer.positions())
        assert await consumer.lag() == {("a", 0): 6}
        await consumer.seek({("a", 0): first.position})
        await consumer.pause()
        assert not await consumer.poll(timeout=0.05)
        await consumer.resume()
        assert len(await consumer.poll(timeout=SOON)) == 10


async def test_a_call_with_wrong_arguments_leaves_its_consumer_open(bridge):
    async with bridge.consumer("a", "g") as consumer:
        with pytest.raises(TypeError, match=r"Consumer.seek\(\) missing 1 required positional argument: 'positions'"):
            await consumer.seek()
        assert await take("poll", consumer, 1) == [b"0"]


async def test_a_nack_has_messages_delivered_again(bridge):
    async with bridge.consumer("a", "g", sharing="message") as consumer:
        batch = await consumer.poll(1, timeout=SOON)
        await consumer.nack(batch)
        assert (await consumer.poll(1, timeout=SOON))[0].value == batch[0].value


async def test_a_close_whose_cancelled_task_gets_no_thread_holds_up_no_later_close(bridge, no_threads):
    consumer = await bridge.consumer("a", "g")
    with anyio.CancelScope() as scope:
        scope.cancel()
        refused = no_threads(0, when=lambda thread: thread.name == "txnbridge aio")
        await consumer.close()
    await consumer.close()
    assert refused


async def test_a_call_keeps_its_deadline_behind_a_cancelled_one_and_a_close_then_ends_in_its_thread(url, broken_broker):
    runs, go_on = threading.Event(), threading.Event()

    def lag(inner, deadline):
        runs.set()
        go_on.wait()
        return {}

    scheme = broken_broker(Reading=around(lag=lag))
    bridge = await aio.connect(url.replace("embedded", scheme), timeout=2)
    consumer = await bridge.consumer("a", "g")
    await cancelled_when(runs.is_set, consumer.lag)
    try:
        with anyio.fail_after(SOON), pytest.raises(DeadlineExceeded, match="an earlier call"):
            await consumer.close(timeout=0.01)
        for call in (consumer.positions, consumer.poll):
            with anyio.fail_after(SOON), pytest.raises(DeadlineExceeded, match="an earlier call"):
                await call()
    finally:
        go_on.set()
    await consumer.close()
    await bridge.close()
    with txnbridge.connect(url) as other:
        assert other.admin.group("g").members == ()


async def test_a_block_that_is_cancelled_leaves_its_group(url, bridge):
    with anyio.CancelScope() as scope:
        async with bridge.consumer("a", "g") as consumer:
            assert await consumer.poll(timeout=SOON)
            scope.cancel()
            await anyio.sleep(SOON)
    with txnbridge.connect(url) as other:
        assert other.admin.group("g").members == ()
