"""Gathered transactions of tasks: they need no thread, and may be cancelled before, in and after their batch."""

import threading
from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from txnbridge_embedded.write.writer import PlainWriter

import txnbridge
from tests.aio.kit import SOON, Cancelling, cancelled_when, until, values
from tests.failing import fail_call
from tests.inside import group_commit_of, writers_of
from txnbridge import Event, Outcome, State, TokenState, aio, hookimpl, plugins
from txnbridge._write.group_commit import GroupCommit
from txnbridge.errors import DeadlineExceeded, DeliveryFailed, InvalidOption, OutcomeUnknown

pytestmark = pytest.mark.anyio


class BatchHeld:
    """Holds the thread of batches before each commit of a shared transaction; it hears no other event."""

    txnbridge_event_names = ("group.commit",)

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def hold(self) -> None:
        """Hold batches from the next one on, until `go`."""
        self.go.clear()
        self.came = 0

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        if event.phase == "before":
            self.came += 1
            assert self.go.wait(SOON)


@pytest.fixture
def held() -> Iterator[BatchHeld]:
    held = BatchHeld()
    with plugins.registered(held):
        yield held


@pytest.fixture
async def bridge(url, held, with_timing) -> AsyncIterator[aio.Bridge]:
    """A bridge whose thread of batches runs, and that has sent to the topic."""
    with_timing(group_idle=SOON, topic_taken=SOON)  # a busy machine may take longer between two transactions
    async with aio.connect(url, group_commit=True, timeout=20) as bridge:
        for _ in range(2):
            await one(bridge, b"0")
        yield bridge


async def one(bridge: aio.Bridge, value: bytes) -> aio.Transaction:
    async with bridge.transaction() as txn:
        await txn.send("a", value)
    return txn


async def test_a_gathered_transaction_needs_no_thread(url, monkeypatch, bridge):
    with monkeypatch.context() as patch:
        patch.setattr(to_thread, "run_sync", None)  # so a call in a worker thread is an error
        txn = await one(bridge, b"1")
        assert txn.outcome is Outcome.COMMITTED
        async with anyio.create_task_group() as tasks:
            for number in range(2, 200):
                tasks.start_soon(one, bridge, b"%d" % number)
    assert sorted(map(int, values(url, "a"))) == [0, *range(200)]


async def test_listeners_are_never_called_on_the_thread_of_the_loop(url):
    threads = []

    class Listener:
        txnbridge_event_names = ("transaction.begin", "commit")

        @hookimpl
        def txnbridge_event(self, event: Event) -> None:
            threads.append(threading.get_ident())

    with plugins.registered(Listener()):
        async with aio.connect(url, group_commit=True) as bridge:
            for _ in range(3):
                await one(bridge, b"1")
    assert len(threads) == 3 * 2 * 2  # transactions, events of each, phases of each
    assert threading.get_ident() not in threads


async def test_a_transaction_commits_alone_if_the_next_batch_gets_no_thread(url, with_timing, monkeypatch, no_threads):
    with_timing(topic_taken=SOON)
    monkeypatch.setattr(GroupCommit, "is_running", True)  # as if the thread ended behind each look
    async with aio.connect(url, group_commit=True) as bridge:
        await one(bridge, b"0")
        refused = no_threads(0, when=lambda thread: "group commit" in thread.name)
        for value in (b"1", b"2"):
            await one(bridge, value)
    assert refused and values(url, "a") == [b"0", b"1", b"2"]


async def test_a_task_that_is_cancelled_as_its_transaction_begins_leaves_none(bridge):
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bridge.transaction()
    assert writers_of(bridge.sync).open_transactions == set()


async def test_a_withdrawn_commit_may_be_repeated(url, held, bridge):
    held.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, bridge, b"first")
        await until(lambda: held.came)
        txn = await bridge.transaction()
        await txn.send("a", b"second")
        with anyio.move_on_after(0.05):
            await txn.commit()
        assert txn.state is State.OPEN and txn.outcome is None
        held.go.set()
    await txn.commit()
    assert txn.outcome is Outcome.COMMITTED
    assert values(url, "a") == [b"0", b"0", b"first", b"second"]


async def test_a_commit_that_is_cancelled_in_its_batch_goes_on(url, held, bridge):
    held.hold()
    txn = await bridge.transaction()

    async def commit():
        async with txn:
            await txn.send("a", b"1")

    await cancelled_when(lambda: held.came, commit)
    assert txn.outcome is Outcome.UNKNOWN
    held.go.set()
    assert await txn.settle() is Outcome.COMMITTED
    assert values(url, "a") == [b"0", b"0", b"1"]


@pytest.mark.parametrize("moment", ["before", "queued"])
async def test_a_commit_whose_batch_got_no_answer_is_not_told_as_aborted_if_its_task_is_cancelled(
    moment, url, monkeypatch, bridge
):
    """The task would ask for the outcome in a thread, and is cancelled before it does, say by a timeout of its own."""
    txn = await bridge.transaction(timeout=SOON)

    async def commit():
        async with txn:
            await txn.send("a", b"1")

    with monkeypatch.context() as patch:
        fail_call(patch, PlainWriter, "commit", OutcomeUnknown("the answer is lost"), happens=True)
        cancelling = Cancelling(patch, 1, moment)
        await cancelling.run(commit)
    assert cancelling.reached
    assert txn.outcome is Outcome.UNKNOWN
    assert (await bridge.status(txn.token)).state is TokenState.COMMITTED
    assert values(url, "a") == [b"0", b"0", b"1"]


async def test_a_member_of_a_batch_that_was_aborted_commits_alone(url, monkeypatch, bridge):
    def refuse(shared, members):
        with shared:
            raise DeliveryFailed("refused by the test")

    with monkeypatch.context() as patch:
        patch.setattr(group_commit_of(bridge.sync), "_commit", refuse)
        txn = await one(bridge, b"1")
    assert txn.outcome is Outcome.COMMITTED
    assert values(url, "a") == [b"0", b"0", b"1"]


async def test_a_deadline_ends_the_wait_for_a_batch(url, held, bridge):
    held.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, bridge, b"first")
        await until(lambda: held.came)
        txn = await bridge.transaction(timeout=1.5)
        await txn.send("a", b"late")
        with pytest.raises(DeadlineExceeded):
            await txn.commit()
        await txn.abort()
        held.go.set()
    assert values(url, "a") == [b"0", b"0", b"first"]


async def test_a_gathered_transaction_raises_the_errors_of_the_synchronous_interface(url, bridge):
    with pytest.raises(InvalidOption, match="timeout"):
        await bridge.transaction(timeout=-1)
    with pytest.raises(InvalidOption, match="timeout"):
        await bridge.transaction(timeout="soon", group_commit=False)
    with txnbridge.connect(url) as other:
        assert other.admin.transactions() == []
