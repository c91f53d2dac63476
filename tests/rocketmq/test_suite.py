"""RocketMQ passes the whole conformance suite."""

from collections import Counter

import pytest
from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite import *  # noqa: F403
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests

from tests.rocketmq.kit import BROKER, LONG


@pytest.fixture(scope="module", autouse=True)
def _nothing_was_published_twice(rocketmq_broker, administrator):
    """Check that no message was published twice: our readers would drop it, other clients would not."""
    yield
    found: Counter[tuple[str, str]] = Counter()
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")]) as client:
        for name in (each.name for each in administrator.admin.topics() if each.name.startswith("conformance-")):
            for (_, queue), (_, (end,)) in administrator.admin.bounds(name).items():
                found.update(unique_keys(client, name, queue, end))
    assert [key for key, times in found.items() if times > 1] == []


def unique_keys(client, topic, queue, end):  # noqa: F811
    at = client.call(BROKER, read_requests.min_offset(topic, queue), LONG)
    while at < end:
        pulled = client.call(BROKER, read_requests.pull(topic, queue, at, "counting"), LONG)
        yield from ((topic, record.unique_key) for record in pulled.records)
        at = max(at, pulled.next_offset)
