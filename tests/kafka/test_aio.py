"""Tasks of an event loop on Kafka."""

import pytest
from txnbridge_conformance.plugin import NewTopic

from tests.live_aio import check_tasks
from txnbridge import Bridge


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_transactions_of_many_tasks_are_whole_and_told_as_they_ended(
    txnbridge_url: str, bridge: Bridge, new_topic: NewTopic, backend: str
) -> None:
    check_tasks(backend, txnbridge_url, bridge, [new_topic(2), new_topic(2)], new_topic(2))
