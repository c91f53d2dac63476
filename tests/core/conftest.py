"""What the core's tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from txnbridge._base.connection import Connection


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives bridges, also open ones, other durations and limits than those of programs."""

    def change(**changes: Any) -> None:
        monkeypatch.setattr(Connection, "timing", replace(Connection.timing, **changes))

    return change
