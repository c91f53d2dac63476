"""Tests of exceptions from signal handlers at any point of `poll`: no message is skipped."""

from __future__ import annotations

import uuid

import pytest

import txnbridge
from tests.interrupts import check_that_interrupted_polls_skip_nothing


@pytest.mark.parametrize("sharing", [None, "partition"], ids=["alone", "group"])
def test_what_an_interrupted_poll_had_read_comes_with_the_next_one(txnbridge_url: str, sharing: str | None) -> None:
    with txnbridge.connect(txnbridge_url, create_topics=2, timeout=60) as bridge:
        topic, group = f"interrupted-{uuid.uuid4().hex[:8]}", sharing and "readers"
        check_that_interrupted_polls_skip_nothing(bridge, topic, group, sharing or "partition")
