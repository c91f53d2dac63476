"""Fixtures of the tests of the asynchronous interface: both event loops, and a judge that knows neither."""

import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.aio.kit import in_txnbridge
from tests.in_time import wait_until
from txnbridge import aio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()  # bridges that other tests have left to the garbage collector have threads
    yield
    wait_until(lambda: not in_txnbridge(before))


@pytest.fixture
def url(tmp_path) -> str:
    return f"embedded:{tmp_path}/broker.db"


@pytest.fixture
async def bridge(url) -> AsyncIterator[aio.Bridge]:
    async with aio.connect(url) as bridge:
        yield bridge
