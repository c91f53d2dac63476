"""Other brokers that speak Kafka's protocol: with older versions of requests, and without those for repairs and lists.

Redpanda's versions are from its sources. The broker is Kafka behind a proxy, by which it seems to know no more.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.suite import (  # noqa: F401
    test_a_processor_passes_every_message_on_once,
    test_all_topics_and_partitions_of_a_committed_transaction_are_seen,
    test_another_process_ends_what_a_killed_one_prepared,
    test_half_messages_are_published_as_the_work_went_and_not_before,
    test_no_topic_or_partition_of_an_aborted_transaction_is_seen,
)

import txnbridge
from tests.kafka.conftest import SOON
from tests.kafka.test_acks import test_acknowledgements_alone_are_committed_and_aborted  # noqa: F401
from txnbridge import Outcome
from txnbridge.capabilities import Capability
from txnbridge.errors import Fenced, NotSupported

pytestmark = pytest.mark.timeout(600)

REDPANDA = {"Metadata": 8, "FindCoordinator": 3, "InitProducerId": 3, "ListOffsets": 4, "AddOffsetsToTxn": 1}
REDPANDA |= {"EndTxn": 3, "TxnOffsetCommit": 3, "CreateTopics": 6, "WriteTxnMarkers": 1}
BARE = {**REDPANDA, "WriteTxnMarkers": None, "DescribeProducers": None, "ListTransactions": None}


@pytest.fixture(scope="module", params=[REDPANDA, BARE], ids=["Redpanda's versions", "without repairs and lists"])
def flavour(kafka_broker: brokers.Broker, request: pytest.FixtureRequest) -> Iterator[faults.Proxy]:
    with faults.proxy(kafka_broker) as proxy:
        proxy.limit_versions(request.param)
        yield proxy


@pytest.fixture(scope="module")
def txnbridge_url(flavour: faults.Proxy) -> str:
    return f"{flavour.url}?{SOON}"


def test_an_owner_goes_on_after_a_dead_one_and_the_doctor_says_what_is_missing(txnbridge_url, topic, with_timing):
    with_timing(monitor_interval=0.1)
    with txnbridge.connect(txnbridge_url, transactional_id="owner", create_topics=1) as first, pytest.raises(Fenced):
        with first.transaction() as abandoned:
            abandoned.send(topic, b"abandoned")
            with first.transaction(prepare=True) as prepared:
                prepared.send(topic, b"prepared")
            assert prepared.token is not None
            with txnbridge.connect(txnbridge_url, transactional_id="owner") as second:
                assert second.commit(prepared.token) is Outcome.COMMITTED
                with second.transaction() as txn:
                    txn.send(topic, b"next")
                assert second.status(prepared.token).state.value == "committed"
                assert [m.value for m in second.read(topic, 10)] == [b"prepared", b"next"]
                lists = bool(second.capabilities[Capability.LIST_OPEN])
                assert any("does not have" in each.text for each in second.admin.doctor()) is (not lists)
                if not lists:
                    with pytest.raises(NotSupported, match="list-open"):
                        second.admin.transactions()
