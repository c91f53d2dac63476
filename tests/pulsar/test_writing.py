"""A writer's transactions, as the broker and a plain client see them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.observing import eventually, send, take, values
from txnbridge_pulsar.client import PulsarClient
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION
from txnbridge_pulsar.write.fence import last_fence_record

from tests.inside import reader_of
from tests.pulsar import writing_kit
from tests.pulsar.client_kit import SOON, admin, cut, path_of, payloads, receive
from tests.pulsar.reading_kit import hang_up
from tests.pulsar.writing_kit import Connect, cluster_of, concrete, flush, new_topic, proxied, read_all, unique
from txnbridge import Bridge, Event, Outcome, TokenState, errors
from txnbridge.spi import Deadline
from txnbridge.testing import listening, recorded

VALUES = [b"%d" % number for number in range(10_000)]


@pytest.fixture
def bridge(open_bridge: Connect) -> Bridge:
    return open_bridge()


@pytest.fixture
def topic(bridge: Bridge) -> str:
    return new_topic(bridge)


@pytest.fixture
def proxy(pulsar_broker: brokers.Pulsar) -> Iterator[faults.Proxy]:
    with faults.proxy(pulsar_broker) as found:
        yield found


def lose(proxy: faults.Proxy, held: faults.Hold) -> None:
    """Once something is held, it never arrives, and all connections end."""
    held.wait()
    held.drop()
    proxy.cut()


def test_many_small_messages_arrive_in_order_in_few_entries(bridge: Bridge, client: PulsarClient, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send_many(topic, VALUES[:6_000])
        for value in VALUES[6_000:]:
            txn.send(topic, value)
    reader = client.read(concrete(topic), timeout=SOON)
    entries = 0
    found: list[bytes | None] = []
    while len(found) < len(VALUES):
        for entry in reader.receive(SOON):
            entries += 1
            found += [message.value for message in entry.messages()]
    assert found == VALUES
    assert entries <= 10


def test_messages_with_more_than_values_keep_their_place(bridge: Bridge, client: PulsarClient, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"0")
        txn.send(topic, b"1", headers={"h": "x"})
        txn.send_many(topic, [b"2", (b"3", b"key"), (None, b"key"), b"4"])
        txn.send(topic, b"5", timestamp=1_234)
        txn.send(topic, b"6" * 1_000_000)
        txn.send(topic, b"7")
    assert read_all(client, concrete(topic)) == [
        b"0", b"1", b"2", b"3", None, b"4", b"5", b"6" * 1_000_000, b"7",
    ]  # fmt: skip


@pytest.mark.parametrize(("mixed", "entries"), [(False, [2, 1, 1, 2, 1]), (True, [7])], ids=["apart", "mixed"])
def test_messages_of_different_keys_share_an_entry_only_where_that_was_asked_for(open_bridge, client, mixed, entries):
    bridge = open_bridge(pulsar={"mix_keys": mixed})
    topic = new_topic(bridge)
    sent = [(b"0", b"a"), (b"1", b"a"), (b"2", b"b"), (b"3", b"a"), b"4", b"5", (b"6", b"a")]
    with bridge.transaction() as txn:
        txn.send_many(topic, sent)
    reader = client.read(concrete(topic), timeout=SOON)
    found = receive(reader, len(sent))
    assert [entry.count for entry in found] == entries
    assert payloads(found) == [b"%d" % number for number in range(7)]


def test_a_message_that_cannot_be_sent_changes_no_transaction(bridge: Bridge, client: PulsarClient, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"before")
        with pytest.raises(errors.InvalidOption, match="above"):
            txn.send(topic, b"x" * 5_000_001)
        with pytest.raises(errors.InvalidOption, match="timestamp"):
            txn.send(topic, b"x", timestamp=-1)
        with pytest.raises(errors.NotFound):
            txn.send(topic, b"x", partition=7)
        txn.send(topic, b"after")
    assert read_all(client, concrete(topic)) == [b"before", b"after"]


def test_an_empty_transaction_asks_the_broker_nothing(bridge: Bridge) -> None:
    with bridge.transaction() as txn:
        writer = writing_kit.writer_of(txn)
    assert txn.outcome is Outcome.COMMITTED
    assert writer.evidence().how["x"] is None


def test_no_message_is_sent_before_its_topic_was_announced_and_registered(open_bridge: Connect) -> None:
    known: list[tuple[str, set[str]]] = []

    def look(event: Event) -> None:
        if event.phase == "before" and event.name in ("step:register", "step:commit"):
            with open_bridge() as onlooker:  # it reads what the owner has stored by then
                found = last_fence_record(cluster_of(onlooker), writing_kit.fence_of(owned).topic, Deadline(SOON))
            assert found is not None
            known.append((event.name, {*found[1].under_way[-1].topics}))

    with listening(look):
        owned = open_bridge(transactional_id=unique("owner"))
    topic = new_topic(owned, partitions=3)
    with owned.transaction() as txn:
        txn.send(topic, b"0", partition=0)
        flush(txn)
        txn.send(topic, b"2", partition=2)
    marker = writing_kit.proof_topic_of(txn)
    assert known == [
        ("step:register", {marker, concrete(topic, 0)}),
        ("step:register", {marker, concrete(topic, 0), concrete(topic, 2)}),
        ("step:commit", {marker, concrete(topic, 0), concrete(topic, 2)}),
    ]


def test_the_partitions_of_the_last_transaction_are_named_together_with_the_next_one_s_first(open_bridge: Connect):
    with recorded() as events:
        bridge = open_bridge()
    topic = new_topic(bridge, partitions=4)
    for _ in range(2):
        with bridge.transaction() as txn:
            for number in range(4):
                txn.send(topic, b"x", partition=number)
                flush(txn)
    named = [event.data["topics"] for event in events if (event.name, event.phase) == ("step:register", "before")]
    assert named == [2, 1, 1, 1, 5]


def test_the_commit_is_asked_for_only_when_every_message_has_its_receipt(open_bridge, client, proxy):
    with recorded() as events:
        bridge = open_bridge(proxied(proxy))
    topic = new_topic(bridge)
    with ThreadPoolExecutor() as pool, bridge.transaction() as txn:
        txn.send(topic, b"early")
        flush(txn)
        receipts = proxy.hold(answers="SEND")
        txn.send(topic, b"late")
        committing = pool.submit(txn.commit)
        receipts.wait()
        receipts.answered()
        assert not [event for event in events if event.name == "step:commit"]
        receipts.release()
        committing.result(SOON)
    assert read_all(client, concrete(topic)) == [b"early", b"late"]


@pytest.mark.parametrize("lost", ["requests", "answers"])
def test_a_commit_that_was_lost_or_answered_in_vain_is_asked_again_and_told_truly(open_bridge, client, proxy, lost):
    bridge = open_bridge(proxied(proxy), timeout=12)
    topic = new_topic(bridge)
    send(bridge, topic, b"1")
    with bridge.transaction() as txn:
        txn.send(topic, b"2")
        held = proxy.hold(**{lost: "END_TXN"}, count=1)
        dropping = Thread(target=lose, args=(proxy, held))
        dropping.start()
    dropping.join()
    assert txn.outcome is Outcome.COMMITTED
    assert read_all(client, concrete(topic)) == [b"1", b"2"]


def test_a_commit_that_nobody_answers_is_unknown_and_the_token_tells_later(open_bridge, client, proxy):
    bridge, other = open_bridge(proxied(proxy), timeout=3), open_bridge()
    topic = new_topic(other)
    with bridge.transaction(timeout=30) as first:
        first.send(topic, b"1")
    with pytest.raises(errors.OutcomeUnknown) as caught, bridge.transaction() as txn:
        txn.send(topic, b"2")
        flush(txn)
        held = proxy.hold(answers="END_TXN")
    assert caught.value.token is not None
    assert other.status(caught.value.token).state is TokenState.COMMITTED
    held.release()
    with bridge.transaction(timeout=30) as last:
        last.send(topic, b"3")
    assert read_all(client, concrete(topic)) == [b"1", b"2", b"3"]


def test_a_message_that_comes_after_the_end_is_told_as_an_end(open_bridge: Connect, client: PulsarClient) -> None:
    bridge = open_bridge()
    topic, second = new_topic(bridge), new_topic(bridge)
    with pytest.raises(errors.TransactionAborted), bridge.transaction() as txn:
        txn.send(topic, b"never")
        client.transactions.end(flush(txn), False, SOON)
        txn.send(topic, b"late")
        txn.send(second, b"late, and the first there")
    assert (read_all(client, concrete(topic)), read_all(client, concrete(second))) == ([], [])


@pytest.mark.parametrize("left", [True, False], ids=["its partition left", "it kept its partition"])
def test_a_writer_that_sleeps_beyond_the_deadline_is_told_if_its_partitions_left_meanwhile(open_bridge, client, left):
    bridge = open_bridge()
    source, target = new_topic(bridge), new_topic(bridge)
    send(bridge, source, b"1")
    with bridge.consumer(source, unique("group")) as consumer:
        messages = take(consumer, 1)
        with pytest.raises(errors.Conflict if left else errors.DeadlineExceeded):
            with bridge.transaction(timeout=0.7) as txn:
                txn.send(target, b"never")
                txn.ack(messages)
                flush(txn)
                if left:
                    hang_up(cluster_of(bridge).client, reader_of(consumer))
                eventually(lambda: not txn.deadline, "its time is over")
        assert txn.outcome is Outcome.ABORTED
        assert values(take(consumer, 1)) == [b"1"]
    assert read_all(client, concrete(target)) == []


def test_an_acknowledgement_after_the_end_does_not_hold_its_message_back(open_bridge: Connect, client: PulsarClient):
    bridge = open_bridge()
    source = new_topic(bridge)
    for value in (b"1", b"2"):
        send(bridge, source, value)
    with bridge.consumer(source, unique("group")) as consumer:
        first, second = take(consumer, 2)
        with pytest.raises(errors.TransactionAborted, match="ended the transaction"):
            with bridge.transaction() as txn:
                txn.ack(first)
                client.transactions.end(flush(txn), False, SOON)
                txn.ack(second)  # the broker takes it
        assert values(take(consumer, 2)) == [b"1", b"2"]


@pytest.mark.parametrize("lost", ["connection", "topic"])
def test_a_producer_whose_connection_is_lost_or_topic_moves_goes_on(pulsar_broker, bridge, client, topic, lost):
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        flush(txn)
        if lost == "connection":
            cut(writing_kit.producer_of(txn, topic))
        else:
            admin(pulsar_broker, "PUT", f"{path_of(concrete(topic))}/unload")
        txn.send(topic, b"2")
    assert read_all(client, concrete(topic)) == [b"1", b"2"]


def test_entries_whose_receipts_were_lost_are_sent_again_where_the_broker_drops_repetitions(open_bridge, client, proxy):
    bridge = open_bridge(proxied(proxy))
    topic = new_topic(bridge)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        flush(txn)
        held = proxy.hold(answers="SEND")
        txn.send(topic, b"2")
        dropping = Thread(target=lose, args=(proxy, held))
        dropping.start()
    dropping.join()
    assert read_all(client, concrete(topic)) == [b"1", b"2"]


def test_entries_whose_receipts_were_lost_are_not_sent_again_where_that_could_double_them(
    pulsar_broker: brokers.Pulsar, open_bridge: Connect, client: PulsarClient, proxy: faults.Proxy
) -> None:
    bridge = open_bridge(proxied(proxy))
    topic = new_topic(bridge)
    send(bridge, topic, b"1")
    admin(pulsar_broker, "POST", f"{path_of(concrete(topic, None))}/deduplicationEnabled", body=False)
    eventually(lambda: not cluster_of(bridge).topics.deduplicates(concrete(topic), Deadline(SOON)), "it is off")
    with pytest.raises(errors.DeliveryFailed), bridge.transaction() as txn:
        txn.send(topic, b"2")
        flush(txn)
        held = proxy.hold(answers="SEND")
        txn.send(topic, b"3")
        dropping = Thread(target=lose, args=(proxy, held))
        dropping.start()
    dropping.join()
    assert txn.outcome is Outcome.ABORTED
    assert read_all(client, concrete(topic)) == [b"1"]


def test_a_bridge_without_an_id_leaves_no_topics_behind(open_bridge: Connect, client: PulsarClient) -> None:
    bridge, onlooker = open_bridge(), open_bridge()
    topic = new_topic(onlooker)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
    marker = writing_kit.proof_topic_of(txn)
    assert cluster_of(onlooker).topics.existing(marker, Deadline(SOON))
    bridge.close()
    assert not cluster_of(onlooker).topics.existing(marker, Deadline(SOON))


def test_every_topic_of_our_own_is_kept_by_a_subscription(pulsar_broker: brokers.Pulsar, open_bridge: Connect) -> None:
    bridge = open_bridge(transactional_id=unique("owner"))
    topic = new_topic(bridge)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
    for ours in (writing_kit.fence_of(bridge).topic, writing_kit.proof_topic_of(txn)):
        assert SUBSCRIPTION in admin(pulsar_broker, "GET", f"{path_of(ours)}/stats")["subscriptions"]
