"""Spans of tasks: all or none, also if the task is cancelled anywhere."""

import asyncio
import threading
import time
from functools import partial

import anyio
import pytest

import txnbridge
from tests.aio.kit import MOMENTS, SOON, Cancelling, cancelled_when, until, values
from txnbridge import Outcome, State, aio
from txnbridge.errors import Abort, InvalidOption, InvalidState
from txnbridge.testing import listening


@pytest.mark.anyio
async def test_the_end_of_a_block_commits_all_parts_and_an_exception_aborts_them(tmp_path):
    urls = [f"embedded:{tmp_path}/{name}.db" for name in "ab"]
    async with aio.connect(urls[0]) as here, aio.connect(urls[1]) as there:
        async with aio.spanning(here, there) as committed:
            await committed.on(here).send("t", b"1")
            await committed.on(there).send("t", b"1")
        with pytest.raises(ZeroDivisionError):
            async with aio.spanning(here, there) as failed:
                await failed.on(here).send("t", b"2")
                raise ZeroDivisionError
        async with aio.spanning(here, there) as quiet:
            await quiet.on(there).send("t", b"3")
            raise Abort
        assert committed.outcome is Outcome.COMMITTED
        assert failed.outcome is quiet.outcome is Outcome.ABORTED
        assert committed.token is not None
        assert (await here.admin.transactions(), await there.admin.transactions()) == ([], [])
        with pytest.raises(InvalidState, match="block"):
            aio.spanning(here, there).on(here)
        with pytest.raises(InvalidOption, match="two or more clusters"):
            async with aio.spanning(here):
                pass
    assert [values(url, "t") for url in urls] == [[b"1"], [b"1"]]


class Program:
    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.told: Outcome | None = None

    async def run(self) -> None:
        async with aio.connect(self.urls[0]) as here, aio.connect(self.urls[1]) as there:
            span = aio.spanning(here, there, timeout=20)
            try:
                async with span:
                    await span.on(here).send("t", b"1")
                    await span.on(there).send("t", b"1")
            finally:
                with anyio.CancelScope(shield=True):
                    self.told = await span.settle()


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=() if each == "running" else pytest.mark.full) for each in MOMENTS]
)
def test_a_span_whose_task_is_cancelled_anywhere_is_all_or_none(moment, tmp_path, monkeypatch):
    for number in range(1, 100):
        urls = [f"embedded:{tmp_path}/{number}{name}.db" for name in "ab"]
        for url in urls:
            with txnbridge.connect(url) as bridge:
                bridge.ensure_topics("t")
        program = Program(urls)
        with monkeypatch.context() as patch:
            cancelling = Cancelling(patch, number, moment)
            partial(anyio.run, backend="asyncio")(cancelling.run, program.run)
        assert [values(url, "t") for url in urls] == [[b"1"] if program.told is Outcome.COMMITTED else []] * 2
        for url in urls:
            with txnbridge.connect(url) as bridge:
                assert bridge.admin.transactions() == []
        if not cancelling.reached:
            break
    assert number > 5 and program.told is Outcome.COMMITTED


async def _cancel_twice(urls: list[str], aborting: threading.Event, go: threading.Event) -> aio.Span:
    """Cancel the task of a span in its block, and again while the first part is being aborted."""
    async with aio.connect(urls[0]) as here, aio.connect(urls[1]) as there:
        span, inside = aio.spanning(here, there), asyncio.Event()

        async def program() -> None:
            async with span:
                inside.set()
                await asyncio.sleep(SOON)

        task = asyncio.ensure_future(program())
        await inside.wait()
        task.cancel()
        await until(aborting.is_set)
        task.cancel()
        await asyncio.wait([task])
        go.set()
        await until(lambda: {span.on(here).state, span.on(there).state} == {State.ABORTED})
    return span


def test_a_span_whose_task_is_cancelled_twice_aborts_all_parts(tmp_path):
    aborting, go = threading.Event(), threading.Event()

    def hold(event):
        if (event.name, event.phase) == ("abort", "before") and not aborting.is_set():
            aborting.set()
            assert go.wait(SOON)

    with listening(hold):
        span = asyncio.run(_cancel_twice([f"embedded:{tmp_path}/{name}.db" for name in "ab"], aborting, go))
    assert span.outcome is Outcome.ABORTED


@pytest.mark.anyio
async def test_the_end_of_a_block_waits_for_a_send_whose_task_was_cancelled(tmp_path):
    urls = [f"embedded:{tmp_path}/{name}.db" for name in "ab"]
    begun = threading.Event()

    def wait(event):
        if (event.name, event.phase) == ("message.send", "before") and not begun.is_set():
            begun.set()
            time.sleep(0.5)

    with listening(wait):
        async with aio.connect(urls[0]) as here, aio.connect(urls[1]) as there:
            async with aio.spanning(here, there) as span:
                await cancelled_when(begun.is_set, partial(span.on(here).send, "t", b"1"))
                await span.on(there).send("t", b"1")
            assert span.outcome is Outcome.COMMITTED
    assert [values(url, "t") for url in urls] == [[b"1"], [b"1"]]


@pytest.mark.anyio
async def test_a_span_is_for_one_block(tmp_path):
    async with aio.connect(f"embedded:{tmp_path}/a.db") as here, aio.connect(f"embedded:{tmp_path}/b.db") as there:
        span = aio.spanning(here, there)
        async with span:
            with pytest.raises(InvalidState, match="one block"):
                async with span:
                    pass
        assert await here.admin.transactions() == []
