"""What is shown of each broker: who only looks makes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from txnbridge_conformance.plugin import Connect

from txnbridge import NotFound


def test_who_only_looks_makes_no_topic(connect: Connect, unique: Callable[[str], str]) -> None:
    bridge = connect(create_topics=1)
    missing = unique("missing")
    with pytest.raises(NotFound, match=missing):
        bridge.read(missing, limit=1)
    assert missing not in {topic.name for topic in bridge.admin.topics()}
