from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import txnbridge


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh embedded broker, which apps without a URL find in their environment."""
    url = f"embedded:{tmp_path}/broker.db?lease_seconds=0.5&durability=survives-process-kill-only"
    monkeypatch.setenv("TXNBRIDGE_URL", url)
    return url


@pytest.fixture
def bridge(url: str) -> Iterator[txnbridge.Bridge]:
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("in", "out", "dead")
        yield bridge
