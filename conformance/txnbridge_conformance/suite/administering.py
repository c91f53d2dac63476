"""Tests of administration: topics, groups, and transactions that other processes left open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from txnbridge import (
    Bridge,
    Capability,
    InvalidOption,
    InvalidState,
    NotFound,
    NotSupported,
    Outcome,
    Topic,
    TransactionAborted,
    codecs,
)
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import ack, eventually, mark, seen, send, take, up_to, values
from txnbridge_conformance.plugin import Connect, Much, NewTopic, RunChild, needs, proves


def listed(bridge: Bridge, owner: str) -> list[str]:
    """Return the ids of the open and prepared transactions that `admin.transactions` lists for a transactional id."""
    return [each.transaction for each in bridge.admin.transactions() if each.transactional_id == owner]


@proves(Capability.TOPIC_ADMIN)
def test_topics_are_created_listed_and_deleted(bridge: Bridge, unique: Callable[[str], str]) -> None:
    name = unique("conformance")
    assert name not in [topic.name for topic in bridge.admin.topics()]
    assert bridge.admin.create_topic(name, 3) is True
    assert bridge.admin.topic(name).partitions == 3
    send(bridge, name, b"gone")
    bridge.admin.delete_topic(name)
    eventually(lambda: name not in [topic.name for topic in bridge.admin.topics()], "the topic is gone")
    with pytest.raises(NotFound):
        bridge.admin.topic(name)


@proves(Capability.TOPIC_ADMIN)
def test_creating_a_topic_twice_is_no_error_unless_it_differs(bridge: Bridge, unique: Callable[[str], str]) -> None:
    name = unique("conformance")
    assert [bridge.admin.create_topic(name, 2), bridge.admin.create_topic(name, 2)] == [True, False]
    with pytest.raises(InvalidOption):
        bridge.admin.create_topic(name, 3)
    with suppress(NotSupported):  # some brokers keep all topics for the same time
        bridge.admin.create_topic(kept := unique("conformance"), 1, retention_seconds=86_400)
        assert bridge.admin.topic(kept).retention_seconds == 86_400


@needs(Capability.TOPIC_ADMIN)
def test_topics_declared_in_a_program_are_made_if_missing_and_else_left_alone(
    bridge: Bridge, unique: Callable[[str], str]
) -> None:
    declared, other = Topic(unique("conformance"), codecs.json, partitions=3), unique("conformance")
    assert bridge.ensure_topics(declared) == [declared.name]
    assert bridge.ensure_topics(declared, other) == [other]
    assert bridge.admin.topic(declared.name).partitions == 3
    bridge.admin.grow_topic(declared.name, 4)
    assert bridge.ensure_topics(declared.name) == []
    with pytest.raises(InvalidOption, match="3 partitions and has 4"):
        bridge.ensure_topics(declared)


@proves(Capability.TOPIC_ADMIN)
def test_a_growing_topic_keeps_its_messages_and_its_readers(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"before")
    with bridge.consumer(topic, group) as member, bridge.consumer(topic) as reader:
        assert values(take(member, 1) + take(reader, 1)) == [b"before"] * 2
        bridge.admin.grow_topic(topic, 3)
        assert bridge.admin.topic(topic).partitions == 3

        def send_to_the_new_one() -> bool:
            # Writers and readers learn of the new partition after some time.
            try:
                with bridge.transaction() as txn:
                    txn.send(topic, b"new", partition=2)
            except NotFound:
                return False
            return True

        eventually(send_to_the_new_one, "the new partition takes messages")
        assert [(m.partition, m.value) for m in take(member, 1) + take(reader, 1)] == [(2, b"new")] * 2


@proves(Capability.GROUP_ADMIN)
def test_a_group_is_shown_with_its_members_where_it_stands_and_its_lag(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic, group) as member:
        messages = take(member, 3)
        ack(bridge, messages[:2])
        # Brokers show the group to an administrator after some time.
        eventually(lambda: bridge.admin.groups().get(group) == 1, "the group is listed with its member")
        eventually(lambda: bridge.admin.group(group).lag == member.lag(), "its lag is what its member says")
        status = bridge.admin.group(group)
        assert status.lag[topic, 0] > 0
    assert [each.partitions for each in status.members] == [((topic, 0),)]
    assert messages[1].position < status.positions[topic, 0] <= messages[2].position
    eventually(lambda: bridge.admin.group(group).members == (), "the member has left")
    with pytest.raises(NotFound):
        bridge.admin.group(group + "-nobody")
    assert bridge.admin.describe_groups([group, group + "-nobody"]) == {group: bridge.admin.group(group)}


@proves(Capability.GROUP_ADMIN)
def test_a_group_is_set_back_once_it_has_no_members(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    topics = one, other = new_topic(), new_topic()
    for topic in topics:
        send(bridge, topic, b"1", b"2")
    with bridge.consumer(topics, group) as member:
        ack(bridge, take(member, 4))
        with pytest.raises(InvalidState):
            bridge.admin.reset_group(group)
    for to, names, again in (("earliest", one, [b"1", b"2"]), ("latest", None, [])):
        eventually(lambda: bridge.admin.group(group).members == (), "the member has left")
        bridge.admin.reset_group(group, to, names)
        markers = mark(bridge, one) | mark(bridge, other)
        with bridge.consumer(topics, group) as member:
            assert values(up_to(member, markers)) == again


def test_the_bounds_of_a_topic_are_what_can_be_read_of_it(bridge: Bridge, new_topic: NewTopic) -> None:
    topic, empty = new_topic(partitions=2), new_topic()
    before = bridge.admin.bounds([topic, empty])
    assert before.keys() == {(topic, 0), (topic, 1), (empty, 0)}
    assert all(first == end for first, end in before.values())
    with bridge.transaction() as txn:
        txn.send_many(topic, [b"1", b"2", b"3"])
    messages = seen(bridge, topic)
    after = bridge.admin.bounds(topic)
    assert len(messages) == 3
    for message in messages:
        first, end = after[topic, message.partition]
        assert first == before[topic, message.partition][0] <= message.position < end


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.ISOLATION)
def test_the_bounds_of_a_topic_end_before_what_is_not_decided(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"1")
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    send(bridge, topic, b"behind")
    with bridge.consumer(topic) as consumer:
        messages = take(consumer, 1)
        _, held = bridge.admin.bounds(topic)[topic, 0]
        bridge.commit(str(txn.token))
        messages += take(consumer, 2)
    _, end = bridge.admin.bounds(topic)[topic, 0]
    assert [(m.value, m.position < held, m.position < end) for m in messages] == [
        (b"1", True, True),
        (b"prepared", False, True),
        (b"behind", False, True),
    ]


def test_a_missing_topic_is_named_where_none_may_be_created(connect: Connect, unique: Callable[[str], str]) -> None:
    bridge = connect(create_topics=0)
    missing = unique("missing")
    with pytest.raises(NotFound, match=missing):
        with bridge.transaction() as txn:
            txn.send(missing, b"nowhere")
    with pytest.raises(NotFound, match=missing):
        bridge.read(missing, limit=1)
    with pytest.raises(NotFound, match=missing):
        bridge.admin.bounds(missing)


@proves(Capability.LIST_OPEN)
def test_an_open_transaction_is_listed_until_it_ends(
    run: RunChild, txnbridge_url: str, connect: Connect, topic: str, owner: str
) -> None:
    bridge = connect(application=owner)  # some brokers ask the application about the outcome
    leaver = run(programs.open_and_wait, txnbridge_url, topic, owner, 3.0)
    leaver.told()
    eventually(lambda: listed(bridge, owner), "the open transaction is listed")
    leaver.kill()
    assert values(seen(bridge, topic)) == []
    eventually(lambda: not listed(bridge, owner), "the ended transaction is not listed")


@proves(Capability.LIST_OPEN)
@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.TOPIC_ADMIN)
def test_a_prepared_transaction_is_listed_until_it_ends(
    connect: Connect, bridge: Bridge, new_topic: NewTopic, owner: str
) -> None:
    topic = new_topic(partitions=2)
    with connect(transactional_id=owner).transaction(prepare=True) as txn:
        for number in range(2):
            txn.send(topic, b"prepared", partition=number)
    (prepared,) = [one for one in bridge.admin.transactions() if one.transaction == txn.id]
    assert prepared.state == "prepared"
    assert not prepared.partitions or {*prepared.partitions} >= {(topic, 0), (topic, 1)}
    with pytest.raises(InvalidState):
        bridge.admin.delete_topic(topic)
    assert [one.transaction for one in bridge.admin.transactions(owner)] == [txn.id]
    assert bridge.admin.transactions(f"{owner}-other") == []
    bridge.commit(str(txn.token))
    eventually(lambda: not listed(bridge, owner), "the ended transaction is not listed")


@proves(Capability.END_OPEN)
@needs(Capability.LIST_OPEN)
def test_an_administrator_aborts_what_a_dead_process_left_open(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, owner: str
) -> None:
    leaver = run(programs.open_and_wait, txnbridge_url, topic, owner, 600.0)
    leaver.told()
    leaver.kill()
    eventually(lambda: listed(bridge, owner), "the open transaction is listed")
    (left,) = listed(bridge, owner)
    assert bridge.admin.abort(left) is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


@proves(Capability.END_OPEN)
@pytest.mark.parametrize("step", ["send", "commit", "prepare"])
def test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted(
    connect: Connect, bridge: Bridge, topic: str, owner: str, much: Much, step: str
) -> None:
    prepare = step == "prepare"
    if prepare and not bridge.capabilities[Capability.PREPARE]:
        pytest.skip("this broker cannot prepare transactions")
    with pytest.raises(TransactionAborted):
        with connect(transactional_id=owner).transaction(prepare=prepare) as txn:
            txn.send_many(topic, much(b"never"))
            eventually(lambda: listed(bridge, owner), "the open transaction is listed")
            (left,) = listed(bridge, owner)
            bridge.admin.abort(left)
            # Some brokers have removed the messages that were stored, and must not take the rest for the whole. A small
            # rest mostly waits in the client, so that only the end itself can fail.
            txn.send_many(topic, much(b"neither") if step == "send" else [b"neither"])
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


@proves(Capability.END_OPEN)
@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_an_administrator_ends_a_prepared_transaction_without_its_token(
    bridge: Bridge, topic: str, decision: str
) -> None:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    end = bridge.admin.commit if decision == "commit" else bridge.admin.abort
    wanted = Outcome.COMMITTED if decision == "commit" else Outcome.ABORTED
    assert end(txn.id) is wanted
    assert bridge.commit(str(txn.token)) is wanted
    assert values(seen(bridge, topic)) == ([b"prepared"] if decision == "commit" else [])
