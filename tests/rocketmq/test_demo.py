"""The demo's story on a RocketMQ that already runs."""

from __future__ import annotations

from tests.brokers.demo_kit import check_every_claim
from txnbridge import Bridge


def test_every_claim_holds_on_a_broker_of_yours_and_its_topics_are_gone_afterwards(
    txnbridge_url: str, bridge: Bridge
) -> None:
    before = [topic.name for topic in bridge.admin.topics()]
    check_every_claim("--url", txnbridge_url)
    assert [topic.name for topic in bridge.admin.topics()] == before
