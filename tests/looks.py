"""Tests of each broker: a call that only looks creates nothing."""

from collections.abc import Callable

import pytest
from txnbridge_conformance.plugin import Connect

from txnbridge import NotFound


def test_a_read_of_a_missing_topic_creates_no_topic(connect: Connect, unique: Callable[[str], str]) -> None:
    bridge = connect(create_topics=1)
    missing = unique("missing")
    with pytest.raises(NotFound, match=missing):
        bridge.read(missing, limit=1)
    assert missing not in {topic.name for topic in bridge.admin.topics()}
