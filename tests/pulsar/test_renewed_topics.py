"""A topic that is deleted and recreated under its name is another topic: a position in the one says nothing there."""

from collections.abc import Callable

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import send, take, values

from tests.pulsar.client_kit import admin, path_of
from tests.pulsar.writing_kit import Connect, concrete, new_topic, unique
from txnbridge import Bridge, PositionLost

OLD = [b"old %d" % number for number in range(10)]
NEW = [b"new %d" % number for number in range(30)]
Renew = Callable[..., None]

WAYS = pytest.mark.parametrize("options", [{}, {"admin_url": ""}], ids=["with admin_url", "without"])


@pytest.fixture
def bridge(open_bridge: Connect) -> Bridge:
    return open_bridge()


@pytest.fixture
def topic(bridge: Bridge) -> str:
    name = new_topic(bridge)
    send(bridge, name, *OLD)
    return name


@pytest.fixture
def renew(pulsar_broker: brokers.Pulsar, bridge: Bridge) -> Renew:
    """Delete a topic and make it anew; a broker has loaded it then only if it has contents."""

    def renew(topic: str, *contents: bytes) -> None:
        admin(pulsar_broker, "DELETE", f"{path_of(concrete(topic, None))}/partitions?force=true")
        admin(pulsar_broker, "PUT", f"{path_of(concrete(topic, None))}/partitions", 1)
        if contents:
            send(bridge, topic, *contents)

    return renew


@WAYS
def test_a_reader_does_not_read_on_in_a_topic_that_was_made_anew_until_it_is_told_where(
    open_bridge: Connect, topic: str, renew: Renew, options: dict[str, str]
) -> None:
    with open_bridge(pulsar=options).consumer(topic) as consumer:
        assert values(take(consumer, 5)) == OLD[:5]
        renew(topic, *NEW)
        assert values(take(consumer, 5)) == OLD[5:]  # which had come before
        for _ in range(2):
            with pytest.raises(PositionLost, match="recreated"):
                take(consumer, 1)
        consumer.seek({(topic, 0): (0, 0, 0)})
        assert values(take(consumer, len(NEW))) == NEW


@pytest.mark.parametrize("noticed", [True, False], ids=["by another reader", "by one that has not noticed"])
def test_a_position_in_the_older_topic_cannot_be_gone_to(open_bridge: Connect, topic: str, renew: Renew, noticed: bool):
    bridge = open_bridge(pulsar={"admin_url": ""})
    with bridge.consumer(topic) as consumer:
        place = take(consumer, 5)[-1].position
        renew(topic, *NEW)
        with bridge.consumer(topic) if noticed else consumer as restored:
            with pytest.raises(PositionLost, match="recreated"):
                restored.seek({(topic, 0): place})


@pytest.mark.parametrize("contents", [NEW, []], ids=["written", "empty"])
def test_a_group_does_not_read_on_in_a_topic_that_was_made_anew(open_bridge, topic, renew, contents):
    group = unique("group")
    with open_bridge().consumer(topic, group) as consumer:
        take(consumer, 5)
        renew(topic, *contents)
        with pytest.raises(PositionLost, match="subscription is gone"):
            take(consumer, 6)
    with pytest.raises(PositionLost, match="subscription is gone"):
        open_bridge().consumer(topic, group)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_without_rest_a_group_reads_a_topic_that_was_made_anew_from_its_beginning(
    open_bridge: Connect, bridge: Bridge, topic: str, renew: Renew, start: str
) -> None:
    """The group is not told that the topic is another one, and misses none of its messages."""
    with open_bridge(pulsar={"admin_url": ""}).consumer(topic, unique("group"), start=start) as consumer:
        send(bridge, topic, b"the last")
        assert values(take(consumer, 11 if start == "earliest" else 1))[-1] == b"the last"
        renew(topic, *NEW)
        assert values(take(consumer, len(NEW))) == NEW


def test_topics_that_are_made_anew_have_another_id(pulsar_broker, open_bridge, bridge, topic, renew):
    other = new_topic(bridge)
    first = bridge.admin.topic_ids([topic, other, "missing"])
    assert set(first) == {topic, other}
    admin(pulsar_broker, "PUT", f"{path_of(concrete(topic))}/unload")
    bridge.admin.grow_topic(other, 3)
    assert bridge.admin.topic_ids([topic, other]) == first
    renew(topic, *NEW)
    second = bridge.admin.topic_ids([topic, other])
    assert second[topic] != first[topic] and second[other] == first[other]
    assert open_bridge(pulsar={"admin_url": ""}).admin.topic_ids([topic]) == {}
