"""Exceptions from signal handlers that come into `poll` at any point: another consumer of the group loses nothing."""

import uuid

import pytest

import txnbridge
from tests.interrupts import check_that_interrupted_polls_lose_nothing


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_the_messages_of_an_interrupted_poll_come_to_the_next_consumer(txnbridge_url: str, sharing: str) -> None:
    with txnbridge.connect(txnbridge_url, create_topics=2, timeout=60) as bridge:
        check_that_interrupted_polls_lose_nothing(bridge, f"interrupted-{uuid.uuid4().hex[:8]}", sharing)
