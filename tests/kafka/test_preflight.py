"""Tests of the warnings and refusals at connect about the topics that every promise stands on."""

from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually
from txnbridge_kafka.admin.doctor import check_replicas
from txnbridge_kafka.topics import KafkaTopics

import txnbridge
from tests.failing import EACH, fail_call
from tests.kafka.kit import describe
from txnbridge import DeadlineExceeded, NotSupported

STATE, OFFSETS = "__transaction_state", "__consumer_offsets"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "txnbridge"]


@pytest.mark.parametrize(
    ("copies", "settings", "levels", "said"),
    [
        (3, {"min.insync.replicas": "2"}, ["ok"], "3 copies"),
        (3, {}, ["ok"], "3 copies"),  # this user may not see its settings, so nothing is said of them
        (1, {}, ["warning"], "1 copy"),
        (2, {"min.insync.replicas": "2"}, ["warning"], "2 copies"),
        (3, {"min.insync.replicas": "1"}, ["warning"], "one broker only"),
        (3, {"min.insync.replicas": "2", "unclean.leader.election.enable": "true"}, ["warning"], "lacks records"),
        (1, {"min.insync.replicas": "2"}, ["problem", "warning"], "nothing can be stored"),
        (3, {"min.insync.replicas": "4"}, ["problem"], "nothing can be stored"),
    ],
)
def test_a_weakness_of_a_topic_is_named(copies: int, settings: Any, levels: list[str], said: str) -> None:
    topic: Any = SimpleNamespace(partitions={0: SimpleNamespace(replicas=list(range(copies)))})
    found = list(check_replicas({STATE: topic}, {STATE: settings}))
    assert [advice.level for advice in found] == levels
    assert said in found[0].text
    assert all(advice.subject == STATE for advice in found)


def test_a_cluster_of_one_node_gets_no_warning_about_replicas(txnbridge_url, connect, owner, caplog):
    connect(transactional_id=owner)
    connect(transactional_id=owner)  # now that all topics are there
    assert not [text for text in warned(caplog) if "__" in text or "copy" in text]


def test_writers_are_refused_and_the_doctor_is_not_where_no_transaction_can_be_stored(start_kafka, caplog):
    broker = start_kafka(settings={"transaction.state.log.min.isr": "2"})
    with txnbridge.connect(broker.url) as bridge:
        # A question about an id makes the broker create the topic.
        eventually(
            lambda: STATE in {found.name for found in bridge.admin.topics(internal=True)} or ask(bridge), "it is there"
        )
    with pytest.raises(NotSupported, match=f"{STATE}.*min.insync.replicas=2"):
        txnbridge.connect(broker.url, transactional_id="refused")
    with txnbridge.connect(broker.url) as bridge:
        assert "problem" in {advice.level for advice in bridge.admin.doctor() if advice.subject == STATE}
        with pytest.raises(NotSupported, match="nothing can be stored"):
            bridge.transaction()
    assert any("nothing can be stored" in text for text in warned(caplog))


def ask(bridge: txnbridge.Bridge) -> bool:
    describe(bridge, "nobody")
    return False


@pytest.mark.full
def test_on_several_nodes_weak_topics_are_warned_of_once_a_bridge(start_kafka, caplog):
    weak = {"transaction.state.log.min.isr": "1", "min.insync.replicas": "1"}
    broker = start_kafka(nodes=3, settings={**weak, "offsets.topic.replication.factor": "1"})
    with txnbridge.connect(broker.url, transactional_id="one", create_topics=1) as bridge:
        with bridge.transaction() as txn:
            txn.send("topic", b"1")
        with bridge.consumer("topic", "group") as consumer:
            assert consumer.poll(1, 30)
    caplog.clear()
    txnbridge.connect(broker.url).close()
    told = warned(caplog)
    assert [text.split(":")[0].split()[0] for text in told] == [STATE, OFFSETS]
    assert "one broker only" in told[0] and "1 copy" in told[1]


def test_connecting_does_not_wait_long_for_topic_settings_that_the_broker_does_not_tell(connect, owner, monkeypatch):
    connect(transactional_id=owner)
    with monkeypatch.context() as broken:
        asked = fail_call(broken, KafkaTopics, "configs", DeadlineExceeded("no answer"), EACH)
        connect()
    assert [deadline.seconds < 3 for *_, deadline in asked] == [True]
