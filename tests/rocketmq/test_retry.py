"""Retries on RocketMQ, judged by what the broker has stored: no reader of ours leaves anything out."""

import pytest
from txnbridge_conformance.plugin import NewTopic

from tests.retry_live import assert_a_missing_dead_letter_topic_is_told_at_the_start, assert_each_has_its_effect_once
from tests.rocketmq.kit import bodies
from txnbridge import Bridge


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.timeout(300)
def test_each_message_has_its_effect_once_though_processors_are_killed(txnbridge_url, bridge, client, keep_order):
    assert_each_has_its_effect_once(txnbridge_url, bridge, lambda topic: bodies(client, topic), keep_order)


@pytest.mark.timeout(120)
def test_a_missing_dead_letter_topic_is_told_at_the_start(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    assert_a_missing_dead_letter_topic_is_told_at_the_start(bridge, new_topic(), group)
