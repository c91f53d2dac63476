"""Fixtures of the core's tests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from txnbridge._base.connection import Connection


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives bridges, also open ones, other durations and limits than those of programs."""

    def change(**changes: Any) -> None:
        monkeypatch.setattr(Connection, "timing", replace(Connection.timing, **changes))

    return change
