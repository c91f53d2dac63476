"""What the tests of the asynchronous interface share: both event loops, and a judge that knows neither."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from tests.aio.kit import in_txnbridge, wait_until


@pytest.fixture(params=["asyncio", "trio"])
def run(request) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a coroutine function on an event loop; no thread of ours may be left behind it."""
    before = threading.enumerate()  # bridges that other tests have left to the garbage collector have threads
    yield partial(anyio.run, backend=request.param)
    wait_until(lambda: not in_txnbridge(before))


@pytest.fixture
def url(tmp_path) -> str:
    return f"embedded:{tmp_path}/broker.db"
