import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from txnbridge_embedded.broker import EmbeddedBroker

from tests.embedded.kit import open_broker
from tests.embedded.members import Member
from tests.keeping import keeping
from txnbridge.spi import Deadline
from txnbridge.testing import Child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the test's file."""
    return tmp_path / "broker.db"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., EmbeddedBroker]]:
    """Open the test's file (or another, `at=`) as often as needed; all are closed at the end."""
    yield from keeping(
        lambda at=None, **options: open_broker(at or path, **options), lambda broker: broker.close(Deadline(10))
    )


class Clock:
    """The system's clock, which a test sets `ahead` by milliseconds."""

    ahead = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, right = Clock(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + clock.ahead * 1_000_000)
    return clock


@pytest.fixture
def broker(opened: Callable[..., EmbeddedBroker]) -> EmbeddedBroker:
    """One broker on the test's file."""
    return opened()


@pytest.fixture
def join(broker: EmbeddedBroker) -> Iterator[Callable[..., Member]]:
    """Let members join groups, which they leave at the end."""
    yield from keeping(lambda *topics, **options: Member(options.pop("broker", broker), *topics, **options))


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start child processes, which are killed at the end."""
    with ExitStack() as stack:
        yield lambda *task, **options: stack.enter_context(Child(*task, **options))
