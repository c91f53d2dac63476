"""Exceptions from signal handlers that come into `poll` at any point: another consumer of the group loses nothing."""

import pytest

from tests.interrupts import check_that_interrupted_polls_lose_nothing


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_the_messages_of_an_interrupted_poll_come_to_the_next_consumer(txnbridge_url: str, sharing: str) -> None:
    check_that_interrupted_polls_lose_nothing(txnbridge_url, sharing)
