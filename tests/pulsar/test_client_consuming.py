"""Consumers on a real broker: what they get, what they acknowledge, and what comes again."""

import time
from contextlib import suppress

import pytest
from txnbridge_pulsar import client as wire

from tests.pulsar.client_kit import SOON, acknowledge, admin, batch_of, cut, path_of, payloads, receive, waiting
from tests.pulsar.reading_kit import write, write_chunks

ALL_TYPES = pytest.mark.parametrize("type", list(wire.SubscriptionType), ids=lambda type: type.name)


def subscribe(client: wire.PulsarClient, topic: str, **options: object):
    return client.subscribe(topic, "s", timeout=SOON, **{"start": wire.EARLIEST, **options})  # type: ignore[arg-type]


def ids(entries):
    return [message.id for entry in entries for message in entry.messages()]


@ALL_TYPES
def test_the_unacknowledged_messages_of_a_batch_come_again(client, topic, type):
    write(client, topic, batch_of(b"0", b"1", b"2", b"3"))
    consumer = subscribe(client, topic, type=type)
    found = ids(receive(consumer, 4))
    acknowledge(consumer, [found[1]])
    acknowledge(consumer, [found[3]])
    consumer.close(SOON)
    again = subscribe(client, topic, type=type)
    entries = receive(again, 2)
    assert payloads(entries) == [b"0", b"2"]
    acknowledge(again, ids(entries))
    again.close(SOON)
    write(client, topic, b"marker")
    assert payloads(receive(subscribe(client, topic, type=type), 1)) == [b"marker"]


def test_everything_up_to_the_middle_of_a_batch_can_be_acknowledged(client, topic):
    write(client, topic, b"first", batch_of(b"0", b"1", b"2"))
    consumer = subscribe(client, topic)
    consumer.acknowledge_up_to(ids(receive(consumer, 4))[2], timeout=SOON)
    consumer.close(SOON)
    assert payloads(receive(subscribe(client, topic), 1)) == [b"2"]


@pytest.mark.parametrize(
    "type", [wire.SubscriptionType.SHARED, wire.SubscriptionType.KEY_SHARED], ids=lambda type: type.name
)
def test_acknowledging_up_to_a_message_is_refused_where_the_broker_would_ignore_it(client, topic, type):
    write(client, topic, b"x")
    consumer = subscribe(client, topic, type=type)
    (entry,) = receive(consumer, 1)
    with pytest.raises(ValueError, match="exclusive and failover"):
        consumer.acknowledge_up_to(entry.id, timeout=SOON)


def test_more_ids_than_fit_in_one_command_are_acknowledged(client, topic):
    producer = client.create_producer(topic, timeout=SOON)
    for number in range(6000):
        producer.send(wire.Single(b"%d" % number), timeout=SOON)
    producer.flush(SOON)
    consumer = subscribe(client, topic, type=wire.SubscriptionType.SHARED)
    entries = receive(consumer, 6000)
    assert len(consumer.start_acknowledge(ids(entries), timeout=SOON)) == 2
    acknowledge(consumer, ids(entries))
    consumer.close(SOON)
    write(client, topic, b"marker")
    assert payloads(receive(subscribe(client, topic, type=wire.SubscriptionType.SHARED), 1)) == [b"marker"]


def test_an_exclusive_subscription_takes_one_consumer(client, topic):
    subscribe(client, topic)
    with pytest.raises(wire.ConsumerBusy):
        subscribe(client, topic, connection_key="other")


def test_the_broker_sends_no_more_than_was_asked_for(client, topic):
    consumer = subscribe(client, topic, permits=10)
    write(client, topic, *(b"%d" % number for number in range(100)))
    assert consumer.last_message_id(SOON).entry == 99
    assert len(waiting(consumer.inbox)) <= 16
    assert payloads(receive(consumer, 100)) == [b"%d" % number for number in range(100)]
    assert consumer._outstanding <= 10


def test_large_messages_are_asked_for_a_few_at_a_time(client, topic):
    consumer = subscribe(client, topic, inbox=wire.Inbox(max_bytes=4_000_000))
    producer = client.create_producer(topic, timeout=SOON)
    for _ in range(40):
        producer.send(wire.Single(bytes(1_000_000)), timeout=SOON)
    producer.flush(SOON)
    found, most = 0, 0
    until = time.monotonic() + SOON
    while found < 40 and time.monotonic() < until:
        found += len(consumer.receive(1, most=1))
        most = max(most, len(waiting(consumer.inbox)) if found > 20 else 0)
    assert found == 40
    assert most <= 4


@ALL_TYPES
def test_unacknowledged_messages_come_again_when_asked_for(client, topic, type):
    write(client, topic, b"1", batch_of(b"2", b"3"), b"4")
    consumer = subscribe(client, topic, type=type)
    first = receive(consumer, 4)
    acknowledge(consumer, [first[0].id, *ids(first)[1:2]])
    consumer.redeliver()
    again = receive(consumer, 2)
    assert payloads(again) == [b"3", b"4"]
    acknowledge(consumer, ids(again))


def test_waiting_messages_are_dropped_when_all_are_asked_for_again(client, topic):
    consumer = subscribe(client, topic)
    write(client, topic, *(b"%d" % number for number in range(10)))
    first = receive(consumer, 1)[:1]
    consumer.redeliver()
    consumer.redeliver()
    assert payloads(receive(consumer, 10)) == [b"%d" % number for number in range(10)]
    assert payloads(first) == [b"0"]


def test_seeking_goes_to_a_message_and_both_ends(client, topic):
    write(client, topic, b"1", b"2", b"3", b"4")
    consumer = subscribe(client, topic)
    entries = receive(consumer, 4)
    consumer.seek(entries[1].id, SOON)
    assert payloads(receive(consumer, 3)) == [b"2", b"3", b"4"]
    consumer.seek(wire.LATEST, SOON)
    write(client, topic, b"5")
    assert payloads(receive(consumer, 1)) == [b"5"]
    consumer.seek(wire.EARLIEST, SOON)
    assert payloads(receive(consumer, 5)) == [b"1", b"2", b"3", b"4", b"5"]


def test_a_subscription_that_is_ended_is_begun_anew(client, topic):
    write(client, topic, b"1")
    consumer = subscribe(client, topic)
    acknowledge(consumer, ids(receive(consumer, 1)))
    consumer.unsubscribe(SOON)
    with pytest.raises(wire.Closed):
        consumer.receive(1)
    assert payloads(receive(subscribe(client, topic), 1)) == [b"1"]


def test_the_last_message_of_an_empty_topic_is_none(client, topic):
    assert subscribe(client, topic).last_message_id(SOON).entry == -1


def test_a_reader_begins_behind_a_message_and_leaves_nothing_behind(client, topic, pulsar_broker):
    write(client, topic, b"1", b"2", b"3")
    reader = client.read(topic, timeout=SOON)
    entries = receive(reader, 3)
    reader.close(SOON)
    behind = client.read(topic, timeout=SOON, start=entries[0].id)
    assert payloads(receive(behind, 2)) == [b"2", b"3"]
    behind.close(SOON)
    assert admin(pulsar_broker, "GET", f"{path_of(topic)}/stats")["subscriptions"] == {}


def test_a_reader_can_begin_behind_any_message_of_a_batch(client, topic):
    write(client, topic, b"first", batch_of(b"0", b"1", b"2"), b"last")
    found = ids(receive(client.read(topic, timeout=SOON), 5))
    behind = [payloads(receive(client.read(topic, timeout=SOON, start=id), 4 - at)) for at, id in enumerate(found[:4])]
    assert behind == [[b"0", b"1", b"2", b"last"], [b"1", b"2", b"last"], [b"2", b"last"], [b"last"]]


def test_seeking_goes_to_any_message_of_a_batch(client, topic):
    write(client, topic, b"first", batch_of(b"0", b"1", b"2"), b"last")
    consumer = subscribe(client, topic)
    found = ids(receive(consumer, 5))
    for at, id in enumerate(found):
        consumer.seek(id, SOON)
        assert payloads(receive(consumer, 5 - at)) == [b"first", b"0", b"1", b"2", b"last"][at:]


def reopened(reader, count):
    """Return the reader's next messages. A broker that sees its old connection end late may close the new consumer."""
    while True:
        reader.reopen(SOON)
        with suppress(wire.BrokerConnectionLost):
            return receive(reader, count)


def test_a_reader_goes_on_where_it_was_when_it_is_opened_again(client, topic):
    write(client, topic, b"1", b"2", b"3")
    reader = client.read(topic, timeout=SOON)
    assert payloads(reader.receive(SOON, most=1)) == [b"1"]
    cut(reader)
    assert payloads(reopened(reader, 2)) == [b"2", b"3"]
    with pytest.raises(ValueError, match="begin another"):
        reader.seek(wire.EARLIEST, SOON)


def test_a_reader_that_is_opened_again_amid_a_message_in_chunks_gives_it_whole(client, topic):
    write(client, topic, b"1")
    reader = client.read(topic, timeout=SOON)
    assert payloads(receive(reader, 1)) == [b"1"]
    write_chunks(client, topic, [b"two, "], of=2)
    while not reader._chunks.incomplete:
        assert reader.receive(0.1) == []
    write(client, topic, b"3")
    assert payloads(receive(reader, 1)) == [b"3"]
    cut(reader)
    write_chunks(client, topic, [b"and the rest"], first=1, of=2)
    assert payloads(reopened(reader, 2)) == [b"3", b"two, and the rest"]
    cut(reader)
    write(client, topic, b"4")
    assert payloads(reopened(reader, 1)) == [b"4"]


def test_a_shared_consumer_gives_back_the_chunks_of_a_message_that_is_not_whole(client, topic):
    consumer = subscribe(client, topic, type=wire.SubscriptionType.SHARED)
    write_chunks(client, topic, [b"two, "], of=2)
    while consumer.arrived < 1 or not consumer.all_taken:
        assert consumer.receive(0.1) == []
    consumer.request_messages(1, again=True)
    while consumer.arrived < 2:
        assert consumer.receive(0.1) == []
    write_chunks(client, topic, [b"and the rest"], first=1, of=2)
    assert payloads(receive(consumer, 1)) == [b"two, and the rest"]


def test_a_consumer_whose_topic_moves_says_so_and_goes_on_when_opened_again(client, topic, pulsar_broker):
    consumer = subscribe(client, topic)
    write(client, topic, b"1", b"2")
    entries = receive(consumer, 2)
    acknowledge(consumer, [entries[0].id])
    generation = consumer.generation
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/unload")
    with pytest.raises(wire.BrokerConnectionLost):
        while True:
            consumer.receive(SOON)
    with pytest.raises(wire.BrokerConnectionLost):
        acknowledge(consumer, [entries[1].id])
    consumer.reopen(SOON)
    # The first may come again: a broker stores what is acknowledged now and then.
    assert payloads(receive(consumer, 1))[-1] == b"2"
    assert consumer.generation == generation + 1


def test_messages_that_waited_when_the_connection_ended_are_given_before_the_loss_is_told(client, topic):
    consumer = subscribe(client, topic)
    write(client, topic, b"1")
    until = time.monotonic() + SOON
    while not waiting(consumer.inbox) and time.monotonic() < until:
        time.sleep(0.01)
    cut(consumer)
    assert payloads(consumer.receive(SOON)) == [b"1"]
    with pytest.raises(wire.BrokerConnectionLost):
        consumer.receive(SOON)


def test_a_closed_consumer_says_so(client, topic):
    consumer = subscribe(client, topic)
    consumer.close(SOON)
    consumer.close(SOON)
    for call in (lambda: consumer.receive(1), lambda: consumer.reopen(SOON), lambda: consumer.redeliver()):
        with pytest.raises(wire.Closed):
            call()
