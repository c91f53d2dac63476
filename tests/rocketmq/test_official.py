"""Tests with the official Python client over gRPC: each reads the other's messages, and its open halves are listed."""

import subprocess
from pathlib import Path

import pytest
from txnbridge_rocketmq.client import administration

from benchmarks._peers import environment, peer
from benchmarks._rocketmq import OFFICIAL
from tests.rocketmq.kit import BROKER, LONG, becomes_true
from tests.rocketmq.reading_kit import new_topic, unique
from tests.rocketmq.writing_kit import copies, flush, prepare, times_asked
from txnbridge import Abort, Outcome

PROGRAM = Path(__file__).with_name("official.py")


@pytest.fixture(scope="module")
def python():
    try:
        return environment(OFFICIAL)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the official client, which pip cannot install here: {error}")


@pytest.fixture
def official(rocketmq_broker, client, topic, python, tmp_path):
    """Return the official client, which reads the messages that are sent from now on."""
    group = unique("official")
    client.call(BROKER, administration.create_group(group), LONG)
    with peer(python, PROGRAM, rocketmq_broker.grpc_address(), topic, group, home=tmp_path) as client:
        assert client.answer() == "ready"
        yield client


def test_the_official_client_reads_what_we_commit_once_and_nothing_that_is_aborted_or_open(
    official, open_bridge, client, topic
):
    other = new_topic(client)
    bridge = open_bridge()
    with bridge.transaction() as txn:
        txn.send(topic, b"one", key=b"our-key", headers=[("our", b"header")])
        txn.send(topic, b"two", headers=[("__SHARDINGKEY", b"our-message-group")])
        txn.send(other, b"beside")
    with bridge.transaction() as txn:
        txn.send(topic, b"aborted")
        raise Abort
    with bridge.transaction(prepare=True) as prepared:
        prepared.send(topic, b"prepared")
    with open_bridge().transaction() as still_open:
        still_open.send(topic, b"open")
        flush(still_open)
        with bridge.transaction() as txn:
            txn.send(topic, b"end")
        found = official.ask("read", "end")
        assert [body for body, *_ in found] == ["one", "two", "end"]
        assert found[0][1] == ["our-key"] and found[0][2]["our"] == "header"
        assert [group for *_, group in found] == [None, "our-message-group", None]
        assert bridge.commit(str(prepared.token)) is Outcome.COMMITTED
        assert [body for body, *_ in official.ask("read", "prepared")] == ["prepared"]
    assert [body for body, *_ in official.ask("read", "open")] == ["open"]
    assert [message.value for message in bridge.read(other, limit=1)] == [b"beside"]


def test_our_reader_gets_the_official_clients_committed_messages_and_no_open_ones(official, open_bridge, topic):
    half, left = official.ask("half", "theirs"), official.ask("half", "left")
    consumer = open_bridge().consumer(topic)
    official.ask("commit", half)
    (found,) = consumer.poll(timeout=LONG)
    assert (found.value, found.key) == (b"theirs", b"their-key")
    assert found.headers["their"] == "header"
    official.ask("commit", official.ask("half_in_gzip", "packed"))
    assert [message.value for message in consumer.poll(timeout=LONG)] == [b"packed"]
    official.ask("commit", official.ask("half", "end"))
    assert [message.value for message in consumer.poll(timeout=LONG)] == [b"end"]
    official.ask("commit", left)


def test_a_half_of_the_official_client_is_listed_asked_about_and_can_be_aborted(official, open_bridge, topic):
    admin = open_bridge(application="observers").admin
    half = official.ask("half", "left")
    assert becomes_true(lambda: half in official.ask("asked"))
    (found,) = [each for each in admin.transactions() if each.transaction == half]
    assert (found.state, found.partitions, found.token) == ("open", ((topic, 0),), None)
    assert admin.abort(half) is Outcome.ABORTED
    assert becomes_true(lambda: half not in [each.transaction for each in admin.transactions()])
    official.ask("commit", official.ask("half", "end"))
    assert [body for body, *_ in official.ask("read", "end")] == ["end"]


def test_a_client_of_a_topic_named_like_our_application_is_asked_nothing_of_ours(official, open_bridge, client, topic):
    bridge = open_bridge(application=topic)  # the proxy puts the client into the producer group named like its topic
    token = prepare(bridge, topic, *(b"%d" % number for number in range(4)))
    (name,) = [each.transaction for each in bridge.admin.transactions() if each.partitions[0][0] == topic]
    assert becomes_true(lambda: times_asked(client, topic, name) >= 4)
    half = official.ask("half", "theirs")
    assert becomes_true(lambda: half in official.ask("asked"))
    ours = {copies(client, topic, name, number)[0].unique_key for number in range(4)}
    assert not ours & set(official.ask("asked"))
    assert bridge.commit(token) is Outcome.COMMITTED
    official.ask("commit", half)
    assert sorted(body for body, *_ in official.ask("read", "theirs")) == ["0", "1", "2", "3", "theirs"]
