"""Many tasks at once on the embedded broker, as on the real ones."""

import asyncio

import pytest

import txnbridge
from tests.aio.kit import SOON, until
from tests.inside import queued
from tests.live_aio import check_tasks
from txnbridge import Topic
from txnbridge.aio._calls import Threads


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_transactions_of_many_tasks_are_whole_and_told_as_they_ended(url, backend):
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics(*(Topic(name, partitions=2) for name in ("in", "beside", "out")))
        check_tasks(backend, url, bridge, ["in", "beside"], "out")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_is_cancelled_as_it_gets_a_thread_hands_it_on():
    threads = Threads(1)
    got = []

    async def take(name: str) -> None:
        async with threads.one(SOON) as taken:
            got.append((name, taken))

    async with threads.one(SOON):
        first, second = asyncio.create_task(take("first")), asyncio.create_task(take("second"))
        (semaphore,) = threads._semaphores.values()
        await until(lambda: queued(semaphore) == 2)
    first.cancel()
    await asyncio.wait([first, second], timeout=SOON)
    async with threads.one(0.0) as taken:
        got.append(("third", taken))
    assert first.cancelled() and got == [("second", True), ("third", True)]
