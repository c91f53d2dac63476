"""Half messages, publishers, administration and relays of tasks."""

import asyncio
import sys
import threading
from concurrent.futures import Future

import anyio
import pytest
import sqlalchemy as sa
from anyio import to_thread
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.aio.kit import SOON, cancelled_when, undecided, until, values
from txnbridge import Abort, Decision, HalfMessages, Outcome, aio
from txnbridge.aio._calls import Call, OneCall
from txnbridge.aio._loop_functions import LoopFunctions
from txnbridge.aio._services import check_cancelled
from txnbridge.errors import InvalidOption, InvalidState, NotFound, OutcomeUnknown
from txnbridge.sql import Outbox

pytestmark = pytest.mark.anyio


async def test_half_messages_are_published_if_execute_says_so(url, bridge):
    worked = []

    async def execute(txn, decision):
        await anyio.sleep(0)
        worked.append(txn.id)
        return decision

    with pytest.raises(InvalidState, match="async with"):
        bridge.half_messages("shop", execute=execute, check=undecided).transaction()
    with pytest.raises(InvalidOption, match="execute= is an `async def`"):
        bridge.half_messages("shop", execute=lambda txn, arg: None, check=undecided)
    async with bridge.half_messages("shop", execute=execute, check=undecided) as sales:
        for decision in (Decision.COMMIT, Decision.ABORT, Decision.UNDECIDED):
            async with sales.transaction(decision) as txn:
                await txn.send("orders", decision.value.encode())
                await txn.send_many("orders", [b"more"])
            assert txn.outcome is {"commit": Outcome.COMMITTED, "abort": Outcome.ABORTED}.get(
                decision.value.lower(), Outcome.UNKNOWN
            )
        async with sales.transaction() as txn:
            raise Abort
        assert txn.outcome is Outcome.ABORTED
        with pytest.raises(ZeroDivisionError):
            async with sales.transaction() as txn:
                raise ZeroDivisionError
    assert len(worked) == 3
    assert [value.lower() for value in values(url, "orders")] == [b"commit", b"more"]


async def test_work_whose_task_was_cancelled_goes_on(url, bridge):
    working, go = anyio.Event(), anyio.Event()

    async def execute(txn, arg):
        working.set()
        await go.wait()
        return Decision.COMMIT

    async with bridge.half_messages("shop", execute=execute, check=undecided) as sales:
        txn = sales.transaction()

        async def sell():
            async with txn:
                await txn.send("orders", b"1")

        await cancelled_when(working.is_set, sell)
        assert txn.outcome is Outcome.UNKNOWN
        go.set()
        assert await txn.settle() is Outcome.COMMITTED
    assert values(url, "orders") == [b"1"]


async def test_work_that_is_cancelled_with_its_block_is_decided_by_check(url):
    async def committed(transaction, messages):
        return Decision.COMMIT

    working = anyio.Event()

    async def execute(txn, arg):
        working.set()
        await anyio.sleep(SOON)

    async def sell():
        async with bridge.half_messages("shop", execute=execute, check=undecided) as sales:
            done.append(sales.transaction(timeout=0.5))
            async with done[0] as txn:
                await txn.send("orders", b"1")

    done: list[aio.HalfTransaction] = []
    async with aio.connect(url + "?half_check_seconds=0.1") as bridge:
        await cancelled_when(working.is_set, sell)
        assert await done[0].settle() is Outcome.UNKNOWN
        async with bridge.resolver("shop", check=committed) as resolver:
            await until(lambda: resolver.stats.committed)
    assert values(url, "orders") == [b"1"]


async def test_a_block_that_is_cancelled_drops_its_half_messages(bridge):
    async with bridge.half_messages("shop", execute=undecided, check=undecided) as sales:
        with anyio.CancelScope() as scope:
            async with sales.transaction() as txn:
                scope.cancel()
                await txn.send("orders", b"1")
        assert txn.outcome is Outcome.ABORTED
        with anyio.CancelScope() as scope:
            async with sales.transaction() as txn:
                await txn.send("orders", b"1")
                scope.cancel()  # is noticed at the end of the block
        assert txn.outcome is Outcome.ABORTED


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_end_of_a_half_message_block_may_be_cancelled_once_more(bridge, monkeypatch):
    """The scopes around the block would be broken if it left its own one open."""
    closing, go_on = threading.Event(), threading.Event()
    close = HalfMessages.close

    def close_later(sync: HalfMessages) -> None:
        closing.set()
        go_on.wait(SOON)
        close(sync)

    async def sell():
        with anyio.move_on_after(SOON):
            async with bridge.half_messages("shop", execute=undecided, check=undecided):
                await anyio.sleep(0)

    monkeypatch.setattr(HalfMessages, "close", close_later)
    task = asyncio.create_task(sell())
    await until(closing.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


async def test_a_resolver_asks_check_on_the_loop(url):
    asked = []

    async def check(transaction, messages):
        asked.append([message.value for message in messages])
        return Decision.COMMIT

    async with aio.connect(url + "?half_check_seconds=0.1") as bridge:
        async with bridge.half_messages("shop", execute=undecided, check=undecided) as sales:
            async with sales.transaction(timeout=2) as txn:
                await txn.send("orders", b"1")
        async with bridge.resolver("shop", check=check) as resolver:
            await until(lambda: resolver.stats.committed)
            assert resolver.healthy
        assert not resolver.healthy and asked == [[b"1"]]
    assert values(url, "orders") == [b"1"]


async def test_a_thread_that_asks_for_a_function_as_its_block_ends_is_not_left_waiting():
    functions = LoopFunctions()
    async with functions:
        pass
    functions._portal.start_task_soon = lambda *call: Future()  # type: ignore[union-attr, method-assign]
    with pytest.raises(OutcomeUnknown):
        await to_thread.run_sync(functions.call, check_cancelled, undecided)


async def test_very_many_calls_may_be_cancelled_while_an_earlier_one_runs():
    calls, begun, may_end = OneCall("an object"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()

    await cancelled_when(begun.is_set, lambda: calls.run(Call(work)))
    try:
        for _ in range(sys.getrecursionlimit()):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await calls.run(Call(may_end.wait))
        assert not calls.is_free
    finally:
        may_end.set()
    assert await calls.run(Call(lambda: "next")) == "next" and calls.is_free


async def test_a_publisher_stores_in_the_order_of_calls_and_resumes(url, bridge):
    async with bridge.publisher("p") as publisher:
        for number in range(3):
            await publisher.send("a", b"%d" % number, sequence=number)
        await publisher.flush()
        assert await publisher.last_sequence("a") == 2
        async with anyio.create_task_group() as tasks:
            for number in range(3, 20):
                tasks.start_soon(publisher.send, "a", b"%d" % number)
    assert sorted(map(int, values(url, "a"))) == list(range(20))


async def test_an_administrator_asks_without_stopping_the_loop(url, bridge):
    assert await bridge.admin.create_topic("a", 2, retention_seconds=60)
    assert [topic.name for topic in await bridge.admin.topics()] == ["a"]
    with pytest.raises(NotFound):
        await bridge.admin.topic("b")
    async with bridge.transaction(prepare=True) as txn:
        await txn.send("a", b"1")
    (found,) = await bridge.admin.transactions()
    assert await bridge.admin.commit(found.transaction, reason="test") is Outcome.COMMITTED
    assert await bridge.admin.doctor() == await bridge.admin.doctor()
    assert values(url, "a") == [b"1"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_relay_publishes_what_an_asynchronous_session_has_stored(url, bridge, tmp_path):
    outbox = Outbox("shop")
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox.create(engine)
    engine.dispose()
    asynchronous = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    await bridge.ensure_topics("orders")
    with pytest.raises(InvalidOption, match="AsyncEngine"):
        bridge.relay(outbox, asynchronous)
    async with bridge.relay(outbox, f"sqlite:///{tmp_path}/shop.db") as relay:
        async with AsyncSession(asynchronous) as session, session.begin():
            outbox.send(session, "orders", b"1")
        await until(lambda: relay.stats.published == 1)
        assert relay.healthy and await relay.lag() == 0
    await asynchronous.dispose()
    assert values(url, "orders") == [b"1"]
