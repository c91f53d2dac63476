"""Transactions of tasks: what their blocks do, what a cancelled one tells, and who waits for whom."""

import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import Mock

import anyio
import pytest

import txnbridge
from tests.aio.kit import SOON, cancelled_when, undecided, until, values
from txnbridge import Outcome, State, Topic, aio, codecs
from txnbridge.errors import Abort, DeadlineExceeded, InvalidOption, InvalidState, NotFound, OutcomeUnknown
from txnbridge.testing import listening, next_commit

pytestmark = pytest.mark.anyio


class Held:
    """Holds the threads of calls at one event until `go`."""

    at = ("", "")

    def __init__(self) -> None:
        self.go = threading.Event()
        self.came = 0

    def __call__(self, event: txnbridge.Event) -> None:
        if (event.name, event.phase) == self.at:
            self.came += 1
            assert self.go.wait(60)


@pytest.fixture
def held() -> Iterator[Held]:
    """Hold threads at an event of the bridges that are opened behind it, the fixture's among them."""
    held = Held()
    with listening(held):
        yield held


async def cancelled_while_held(held: Held, program) -> None:
    """Run a program, and cancel it while a thread of its call is held."""
    await cancelled_when(lambda: held.came, program)


async def test_the_end_of_a_block_commits_and_an_exception_aborts(url, bridge):
    async with bridge.transaction() as committed:
        await committed.send("a", b"1", key="k", headers={"h": "x"})
        await committed.send(Topic("a", codecs.json), {"n": 2})
    with pytest.raises(ZeroDivisionError):
        async with bridge.transaction() as failed:
            await failed.send("a", b"3")
            raise ZeroDivisionError
    async with bridge.transaction() as quiet:
        await quiet.send("a", b"4")
        raise Abort
    assert (committed.outcome, failed.outcome, quiet.outcome) == (Outcome.COMMITTED, Outcome.ABORTED, Outcome.ABORTED)
    assert values(url, "a") == [b"1", b'{"n":2}']


async def test_a_prepared_transaction_is_ended_by_its_token(url, bridge):
    txn = await bridge.transaction(prepare=True)
    async with txn:
        await txn.send("a", b"1")
    assert txn.state is State.PREPARED and txn.outcome is None and txn.token is not None
    assert (await bridge.status(txn.token)).state.value == "prepared"
    assert await bridge.commit(txn.token) is Outcome.COMMITTED
    assert await bridge.abort(txn.token) is Outcome.COMMITTED
    assert values(url, "a") == [b"1"]


async def test_errors_are_those_of_the_synchronous_interface(url):
    async with aio.connect(url, create_topics=0) as bridge:
        async with bridge.transaction() as txn:
            with pytest.raises(NotFound):
                await txn.send("nowhere", b"1")
            with pytest.raises(InvalidOption, match="iterable"):
                await txn.send_many("nowhere", anyio.sleep)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="threads"):
            aio.connect(url, threads=0)
        with next_commit(bridge.sync, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown) as lost:
            async with bridge.transaction():
                pass
        assert lost.value.token is not None
        assert (await bridge.status(lost.value.token)).state.value == "committed"
    with pytest.raises(InvalidState, match="closed"):
        await bridge.transaction()


async def test_the_outcome_of_a_cancelled_commit_is_unknown_until_its_thread_has_ended(url, held, bridge):
    held.at = "commit", "before"
    txn = await bridge.transaction()

    async def commit():
        async with txn:
            await txn.send("a", b"1")

    await cancelled_while_held(held, commit)
    assert txn.outcome is Outcome.UNKNOWN
    held.go.set()
    assert await txn.settle() is Outcome.COMMITTED
    assert values(url, "a") == [b"1"]


async def test_a_cancelled_commit_without_an_answer_has_a_token(held, bridge):
    held.at = "commit", "before"
    txn = await bridge.transaction(group_commit=False)
    with next_commit(bridge.sync, Outcome.UNKNOWN):
        await cancelled_while_held(held, txn.commit)
        held.go.set()
        assert await txn.settle() is Outcome.UNKNOWN
    assert txn.token is not None
    assert (await bridge.status(txn.token)).state.value == "committed"


async def test_a_bridge_waits_for_a_commit_whose_task_was_cancelled(url, held):
    held.at = "commit", "before"
    async with aio.connect(url) as bridge:
        txn = await bridge.transaction()
        await txn.send("a", b"1")
        await cancelled_while_held(held, txn.commit)
        threading.Timer(0.1, held.go.set).start()
    assert txn.outcome is Outcome.COMMITTED


async def test_a_cancelled_begin_leaves_no_transaction(url, held):
    held.at = "transaction.begin", "after"
    async with aio.connect(url, writers=1) as bridge:

        async def begin():
            await bridge.transaction(group_commit=False)

        await cancelled_while_held(held, begin)
        held.go.set()
        async with bridge.transaction(group_commit=False) as txn:  # gets the only writer
            await txn.send("a", b"1")
    assert values(url, "a") == [b"1"]


async def test_a_second_task_is_refused_while_a_call_runs(url, held, bridge):
    held.at = "message.send", "before"
    async with bridge.transaction() as txn, anyio.create_task_group() as tasks:
        tasks.start_soon(txn.send, "a", b"1")
        await until(lambda: held.came)
        with pytest.raises(InvalidState, match="one task at a time"):
            await txn.send("a", b"2")
        held.go.set()
    assert values(url, "a") == [b"1"]


async def test_a_call_after_a_cancelled_one_waits_for_it(url, held, bridge):
    held.at = "message.send", "before"
    async with bridge.transaction() as txn:
        await cancelled_while_held(held, lambda: txn.send("a", b"1"))
        threading.Timer(0.1, held.go.set).start()
        await txn.send("a", b"2")
    assert values(url, "a") == [b"1", b"2"]


@pytest.mark.parametrize("alone", [True, False])
async def test_more_tasks_than_threads_and_writers_all_commit(url, alone):
    async with aio.connect(url, writers=2, threads=2, group_commit=None if alone else True) as bridge:

        async def work(number):
            async with bridge.transaction(group_commit=not alone) as txn:
                await txn.send("a", b"%d" % number)
                await anyio.sleep(0)
                await txn.send_many("b", [b"%d" % number] * 20)

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(work, number)
    assert sorted(map(int, values(url, "a"))) == list(range(40))


async def test_a_task_that_waits_for_other_tasks_waits_until_its_deadline(url):
    async with aio.connect(url, writers=1, threads=1) as bridge:
        async with bridge.transaction(group_commit=False), anyio.create_task_group() as tasks:

            async def wait(seconds):
                with pytest.raises(DeadlineExceeded, match="writers"):
                    await bridge.transaction(timeout=seconds, group_commit=False)

            tasks.start_soon(wait, 0.4)  # in the only thread
            tasks.start_soon(wait, 0.2)  # on the loop


async def test_the_time_that_a_task_waits_on_the_loop_counts_for_its_transaction(url):
    async with aio.connect(url, writers=1, threads=1) as bridge:
        holder = await bridge.transaction(group_commit=False)

        async def begin():
            began = time.monotonic()
            async with bridge.transaction(timeout=20, group_commit=False) as txn:
                waited = time.monotonic() - began
                counted.append((20 - txn.deadline) / waited)

        counted: list[float] = []  # the share of the wait that counts
        async with anyio.create_task_group() as tasks:
            for _ in range(2):  # one in the only thread, one on the loop
                tasks.start_soon(begin)
            await anyio.sleep(0.5)
            await holder.abort()
        assert len(counted) == 2 and min(counted) > 0.5


async def test_tasks_beyond_the_number_of_threads_wait_on_the_loop(url):
    begins: list[txnbridge.Event] = []

    def note(event: txnbridge.Event) -> None:
        if (event.name, event.phase) == ("transaction.begin", "before"):
            begins.append(event)

    with listening(note):
        async with aio.connect(url, writers=1, threads=2) as bridge:
            async with bridge.transaction(group_commit=False), anyio.create_task_group() as tasks:

                async def begin():
                    await bridge.transaction(group_commit=False)

                for _ in range(10):
                    tasks.start_soon(begin)
                await until(lambda: len(begins) >= 3)
                await anyio.wait_all_tasks_blocked()
                assert len(begins) == 3
                tasks.cancel_scope.cancel()


async def test_a_block_that_is_cancelled_waits_for_its_abort(held, bridge):
    held.at = "abort", "before"
    with anyio.CancelScope() as scope:
        async with bridge.transaction() as txn:
            threading.Timer(0.1, held.go.set).start()
            scope.cancel()
            await txn.send("a", b"1")
    assert scope.cancelled_caught and txn.outcome is Outcome.ABORTED
    assert held.came


@pytest.mark.parametrize("kind", ["transaction", "half messages", "span", "publisher"])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_block_behind_a_cancelled_call_that_hangs_ends_by_its_deadline_and_aborts_later(
    bridge, tmp_path, kind, goes_on
):
    runs, go_on = threading.Event(), threading.Event()
    hanging = Topic("a", Mock(**{"encode.side_effect": lambda *_: (runs.set(), go_on.wait())}))  # type: ignore[func-returns-value]

    async def cancel() -> None:
        await until(runs.is_set)
        (of_call if goes_on else of_block).cancel()

    url = f"embedded:{tmp_path}/other.db"
    async with aio.connect(url, timeout=2) as other:
        async with bridge.half_messages("g", execute=undecided, check=undecided) as half:
            block = {
                "transaction": lambda: bridge.transaction(timeout=1),
                "half messages": lambda: half.transaction(timeout=1),
                "span": lambda: aio.spanning(bridge, other, timeout=1),
                "publisher": other.publisher,
            }[kind]
            try:
                with anyio.fail_after(SOON):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(cancel)
                        with anyio.CancelScope() as of_block, suppress(DeadlineExceeded):
                            async with block() as opened:
                                sender = opened.on(bridge) if kind == "span" else opened
                                with anyio.CancelScope() as of_call:
                                    await sender.send(hanging, b"1")
                                with suppress(DeadlineExceeded):
                                    await sender.send("a", b"2")
                assert of_call.cancel_called == goes_on
            finally:
                go_on.set()
            if kind != "publisher":
                assert await sender.settle() is Outcome.ABORTED


async def test_an_abort_that_is_cancelled_comes_behind_the_call_that_it_waited_for(held, bridge):
    held.at = "message.send", "before"
    txn = await bridge.transaction()
    await cancelled_while_held(held, lambda: txn.send("a", b"1"))
    with anyio.move_on_after(0.05):
        await txn.abort()
    assert txn.outcome is Outcome.UNKNOWN
    held.go.set()
    assert await txn.settle() is Outcome.ABORTED


async def test_all_of_a_transaction_runs_off_the_thread_of_the_loop(url):
    threads = set()
    with listening(lambda event: threads.add(threading.get_ident())):
        async with aio.connect(url) as bridge:
            async with bridge.transaction() as txn:
                await txn.send("a", b"1")
            async with bridge.consumer("a", "g") as consumer, bridge.transaction(prepare=True) as txn:
                await txn.ack(await consumer.poll(timeout=20))
            await bridge.commit(txn.token or "")
            with pytest.raises(ZeroDivisionError):
                async with bridge.transaction() as txn:
                    await txn.send("a", b"1")
                    raise ZeroDivisionError
    assert threads and threading.get_ident() not in threads


async def test_threads_get_the_context_of_their_task(url):
    user = contextvars.ContextVar[str]("user")
    seen = []
    with listening(lambda event: seen.append(user.get(None))):
        user.set("ada")
        async with aio.connect(url) as bridge, bridge.transaction() as txn:
            await txn.send("a", b"1")
    assert set(seen) == {"ada"}


def test_a_bridge_can_be_used_on_another_loop(url):
    async def send(bridge, number):
        async with bridge.transaction() as txn:
            await txn.send("a", number)

    async def first():
        bridge = await aio.connect(url, threads=1)
        await send(bridge, b"1")
        return bridge

    bridge = anyio.run(first)
    for backend, number in (("asyncio", b"2"), ("trio", b"3")):
        anyio.run(send, bridge, number, backend=backend)
    anyio.run(bridge.close)
    assert values(url, "a") == [b"1", b"2", b"3"]


async def test_a_bridge_whose_opening_was_cancelled_is_closed(url, held):
    held.at = "bridge.open", "before"
    seen = []

    async def connect():
        await aio.connect(url)

    with listening(lambda event: seen.append(event.name)):
        await cancelled_while_held(held, connect)
        held.go.set()
        await until(lambda: "bridge.close" in seen)
