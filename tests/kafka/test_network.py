"""Tests of a commit after the network failed, besides those in test_outcomes: the table in docs/kafka.md."""

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException
from txnbridge_conformance import faults
from txnbridge_conformance.observing import seen, values
from txnbridge_kafka.client.librdkafka import CALL_LIMIT, refresh_metadata

import txnbridge
from txnbridge import Bridge, Outcome
from txnbridge.errors import DeadlineExceeded
from txnbridge.spi import Deadline

# The deadline of a transaction: as long as a test waits for an answer that does not come. The other is for the rest,
# and is what the broker lets a transaction live.
SHORT, LONG = 5.0, 20.0


@pytest.fixture
def through(proxy: faults.Proxy, owner: str) -> Iterator[Bridge]:
    """A bridge with one writer behind the proxy."""
    with txnbridge.connect(proxy.url, writers=1, timeout=LONG, transactional_id=owner) as bridge:
        yield bridge
        proxy.release()


def test_a_missing_topic_is_made_also_by_a_broker_that_answers_slowly(proxy, bridge, topic):
    missing = f"{topic}-missing"
    with txnbridge.connect(proxy.url, writers=1, timeout=LONG, create_topics=1) as through:
        with through.transaction() as txn:
            txn.send(topic, b"1")
            proxy.delay(0.4)  # a question and its answer take longer than a topic is looked for
            txn.send(missing, b"2")
            proxy.delay(0)
    assert values(seen(bridge, missing)) == [b"2"]


def test_a_waiting_prepare_names_the_oldest_prepared_transaction_even_if_the_broker_is_slow(proxy, owner, topic):
    with txnbridge.connect(proxy.url, timeout=LONG, transactional_id=owner, kafka={"prepared_ids": 1}) as through:
        with through.transaction(prepare=True) as txn:
            txn.send(topic, b"1")
        proxy.delay(0.15)  # a question and its answer take longer than is left after the last look
        with pytest.raises(DeadlineExceeded, match=f"the oldest is {txn.token}"):
            through.transaction(prepare=True, timeout=SHORT)
        proxy.delay(0)
        assert through.commit(str(txn.token)) is Outcome.COMMITTED


def test_a_question_that_is_never_answered_is_asked_anew_until_the_deadline():
    """Librdkafka forgets one to a broker that leaves the cluster meanwhile. (It could not be made to on purpose.)"""
    forgotten = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    client = Mock(**{"list_topics.side_effect": [forgotten, forgotten, None, forgotten]})
    refresh_metadata(client, Deadline(60))
    assert [each.args[1] for each in client.list_topics.mock_calls] == [CALL_LIMIT] * 3
    with pytest.raises(KafkaException):
        refresh_metadata(client, Deadline(0))
