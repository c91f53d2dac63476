"""Producers on a real broker: what they send is stored once and in order, and they hear what became of it."""

import pytest
from txnbridge_pulsar import client as wire

from tests.pulsar.client_kit import SOON, admin, batch_of, connection_of, everything, path_of, send_for_certain, settle


def exclusive(client: wire.PulsarClient, topic: str, **options: object) -> wire.PulsarProducer:
    return client.create_producer(topic, timeout=SOON, access=wire.AccessMode.EXCLUSIVE_WITH_FENCING, **options)  # type: ignore[arg-type]


def test_messages_alone_and_in_batches_are_read_in_order(client, topic):
    producer = client.create_producer(topic, timeout=SOON)
    sends = [producer.send(wire.Single(b"1"), timeout=SOON), producer.send(batch_of(b"2", b"3"), timeout=SOON)]
    sends.append(producer.send(wire.Single(b"4"), timeout=SOON))
    receipts = [send.result(SOON) for send in sends]
    assert [receipt.sequence_id for receipt in receipts] == [0, 1, 3]
    assert sorted(receipts, key=lambda receipt: receipt.message_id) == receipts
    assert everything(client, topic) == [b"1", b"2", b"3", b"4"]


def test_the_largest_message_is_stored_and_a_larger_one_not_sent(client, topic):
    producer = client.create_producer(topic, timeout=SOON)
    limit = connection_of(producer).max_message_size
    with pytest.raises(wire.MessageTooLarge):
        producer.send(wire.Single(bytes(limit)), timeout=SOON)
    producer.send(wire.Single(bytes(limit - 1024)), timeout=SOON).result(SOON)
    assert [len(payload) for payload in everything(client, topic)] == [limit - 1024]


def test_a_producer_that_comes_back_goes_on_behind_its_last_id(client, topic):
    for expected in (-1, 2):
        producer = client.create_producer(topic, name="same", timeout=SOON)
        assert producer.last_sequence_id == expected
        producer.send(batch_of(b"a", b"b", b"c"), timeout=SOON).result(SOON)
        producer.close(SOON)


def test_a_message_sent_twice_is_stored_once_and_the_second_receipt_says_so(client, topic):
    producer = client.create_producer(topic, name="same", timeout=SOON)
    receipts = [producer.send(wire.Single(b"x"), sequence_id=7, timeout=SOON).result(SOON) for _ in range(2)]
    assert [receipt.duplicate for receipt in receipts] == [False, True]
    assert everything(client, topic) == [b"x"]


def test_a_batch_that_overlaps_what_is_stored_is_dropped_whole_and_its_receipt_says_so(client, topic):
    producer = client.create_producer(topic, name="same", timeout=SOON)
    producer.send(batch_of(b"1", b"2"), sequence_id=1, timeout=SOON).result(SOON)
    assert producer.send(batch_of(b"2", b"3"), sequence_id=2, timeout=SOON).result(SOON).duplicate
    assert everything(client, topic) == [b"1", b"2"]


def test_messages_on_their_way_when_the_topic_moved_are_sent_again_and_stored_once(client, topic, pulsar_broker):
    producer = client.create_producer(topic, name="same", timeout=SOON)
    expected = [b"%d" % number for number in range(2000)]
    for at, payload in enumerate(expected):
        if at == 1000:
            admin(pulsar_broker, "PUT", f"{path_of(topic)}/unload")
        send_for_certain(producer, wire.Single(payload))
    settle(producer)
    assert producer.unconfirmed == []
    assert everything(client, topic) == expected


def test_a_name_can_be_used_by_one_producer_at_a_time(client, topic):
    first = client.create_producer(topic, name="same", timeout=SOON)
    with pytest.raises(wire.ProducerBusy):
        client.create_producer(topic, name="same", timeout=SOON, connection_key="other")
    first.close(SOON)
    client.create_producer(topic, name="same", timeout=SOON, connection_key="other").close(SOON)


def test_a_topic_with_an_exclusive_producer_takes_no_other_producer(client, topic):
    assert client.create_producer(topic, timeout=SOON, access=wire.AccessMode.EXCLUSIVE).topic_epoch == 0
    with pytest.raises(wire.ProducerFenced):
        client.create_producer(topic, timeout=SOON, access=wire.AccessMode.EXCLUSIVE)
    with pytest.raises(wire.ProducerBusy):
        client.create_producer(topic, timeout=SOON)


def test_a_fenced_producer_learns_it_by_its_next_send_and_stays_out(client, topic):
    bystander = client.create_producer(topic + "-other", timeout=SOON)
    old = exclusive(client, topic, connection_key="old")
    new = exclusive(client, topic, connection_key="new")
    assert (old.topic_epoch, new.topic_epoch) == (0, 1)
    with pytest.raises(wire.BrokerConnectionLost):
        old.send(wire.Single(b"late"), timeout=SOON).result(SOON)
    with pytest.raises(wire.ProducerFenced):
        old.reopen(SOON)
    # Neither its attempt nor its end has done the owner any harm.
    new.send(wire.Single(b"new"), timeout=SOON).result(SOON)
    assert everything(client, topic) == [b"new"]
    assert (new.lost, bystander.lost) == (None, None)


def test_an_owner_takes_its_topic_back_from_a_connection_that_the_broker_has_not_missed_yet(client, topic):
    owner = exclusive(client, topic, name="owner", connection_key="hangs")
    owner.send(wire.Single(b"1"), timeout=SOON).result(SOON)
    hanging, owner._connection = connection_of(owner), None  # nobody tells the broker of it
    owner.on_lost(wire.BrokerConnectionLost("it hangs"))
    owner._options = owner._options._replace(connection_key="new")
    owner.reopen(SOON)
    owner.send(wire.Single(b"2"), timeout=SOON).result(SOON)
    assert (owner.topic_epoch, hanging.closed) == (0, False)
    assert everything(client, topic) == [b"1", b"2"]


def test_a_closed_producer_says_so(client, topic):
    producer = client.create_producer(topic, timeout=SOON)
    producer.close(SOON)
    producer.close(SOON)
    for call in (lambda: producer.send(wire.Single(b"x"), timeout=SOON), lambda: producer.reopen(SOON)):
        with pytest.raises(wire.Closed):
            call()


def test_partitions_are_counted_also_when_they_become_more(client, topic, pulsar_broker):
    client.create_producer(f"{topic}-plain", timeout=SOON)
    assert client.partitions(f"{topic}-plain", SOON) == 0
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/partitions", 2)
    assert client.partitions(topic, SOON) == 2
    admin(pulsar_broker, "POST", f"{path_of(topic)}/partitions", 4)
    assert client.partitions(topic, SOON) == 4
    last = wire.partition_name(topic, 3)
    client.create_producer(last, timeout=SOON).send(wire.Single(b"x"), timeout=SOON).result(SOON)
    assert everything(client, last) == [b"x"]
    assert last in client.topics("public/default", SOON)


def test_asking_for_a_topics_partitions_does_not_make_it(client, topic):
    with pytest.raises(wire.TopicNotFound):
        client.partitions(topic, SOON)
    assert not [name for name in client.topics("public/default", SOON) if name.startswith(topic)]
