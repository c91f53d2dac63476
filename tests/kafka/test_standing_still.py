"""A group whose broker died while it wrote down an acknowledgement's end goes on, although nobody of then is left."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from random import Random
from subprocess import Popen
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_conformance.plugin import Connect
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.messages import offsets_of
from txnbridge_kafka.client.request_retry import RequestRunner
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.client.wire import TXN_OFFSET_COMMIT
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome import hanging_transactions
from txnbridge_kafka.read import reader

import txnbridge
from tests.failing import EACH, fail_call, replace_method
from tests.kafka.kit import LONG, cluster_of, describe, plain_producer, requests_of, write
from tests.kafka.test_admin import visible
from txnbridge import Bridge
from txnbridge.errors import AccessDenied, TxnBridgeError
from txnbridge.spi import Deadline

_numbers = count()
_left: list[str] = []  # transactional ids of transactions that may still hang


@pytest.fixture
def bridge(unverified: brokers.Broker) -> Iterator[Bridge]:
    with txnbridge.connect(unverified.url, create_topics=1) as bridge:
        yield bridge
        # Groups share a partition of positions, in which one that is left hanging would hold up the next test's.
        while _left:
            with suppress(TxnBridgeError):
                bridge.admin.repair(_left.pop())


class Still:
    """A group that has acknowledged two of three messages, by a transaction whose end its partition was not told."""

    def __init__(self, broker: brokers.Broker, bridge: Bridge, commit: bool) -> None:
        name = f"still-{next(_numbers)}"
        _left.append(name)
        self.id, self.group, self.source, self.target = name, f"{name}-group", f"{name}-source", f"{name}-target"
        send(bridge, self.source, b"1", b"2", b"3")
        bridge.admin.create_topic(self.target)
        with bridge.consumer(self.source, self.group) as consumer:
            take(consumer, 1)  # by which the group has begun
        requests, deadline = requests_of(bridge), Deadline(LONG)
        producer = plain_producer(broker, self.id)
        producer.begin_transaction()
        producer.produce(self.target, b"before", partition=0)
        assert producer.flush(LONG) == 0
        told = requests.describe([self.id], deadline)[self.id]
        self.pid, self.epoch = told.pid, told.epoch
        offsets = offsets_of(GroupMembership(self.group, -1, "", None), {(self.source, 0): 2}, {}, {})
        assert requests.acknowledge(self.id, self.pid, self.epoch, offsets, deadline).code == 0
        requests.end(self.id, self.pid, self.epoch, commit, deadline, bump_epoch=False)
        assert wait_until(lambda: describe(bridge, self.id)[self.id].state.startswith("Complete"), LONG)
        # What it has ended for its coordinator, and for nobody else:
        producer.produce(self.target, b"behind", partition=0)
        assert producer.flush(LONG) == 0
        self._acknowledge(cluster_of(bridge), offsets, deadline)
        del producer

    def _acknowledge(self, cluster: KafkaCluster, offsets: Mapping[str, Any], by: Deadline) -> None:
        def attempt(connections: Connections) -> Any:
            node = connections.group_coordinator(self.group)
            asked = {"transactional_id": self.id, "producer_id": self.pid, "producer_epoch": self.epoch}
            return connections.send(node, TXN_OFFSET_COMMIT(**asked, **offsets))

        with closing(RequestRunner(cluster.settings)) as runner:
            (topic,) = runner.repeat(by, "acknowledging", attempt).topics
        assert [each.error_code for each in topic.partitions] == [0]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_group_that_stands_still_goes_on_as_its_transaction_was_decided(unverified, bridge, commit):
    one = Still(unverified, bridge, commit)
    with bridge.consumer(one.source, one.group) as consumer:
        assert values(take(consumer, 1 if commit else 3)) == ([b"3"] if commit else [b"1", b"2", b"3"])
    wanted = [b"before", b"behind"] if commit else []
    assert wait_until(lambda: visible(unverified, one.target) == wanted, LONG)  # what was forgotten there, too


def test_a_producer_that_has_opened_the_id_again_keeps_it(unverified: brokers.Broker, bridge: Bridge) -> None:
    one = Still(unverified, bridge, True)
    producer = plain_producer(unverified, one.id)
    with bridge.consumer(one.source, one.group) as consumer:
        assert values(take(consumer, 1)) == [b"3"]
    write(producer, one.target, b"later")
    producer.commit_transaction(LONG)
    assert wait_until(lambda: visible(unverified, one.target) == [b"before", b"behind", b"later"], LONG)


def note_results(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[list[str]]:
    """Return a list of what a function returns from now on."""
    results: list[list[str]] = []

    def note(call: Callable[..., list[str]], *given: Any) -> list[str]:
        results.append(call(*given))
        return results[-1]

    replace_method(patch, owner, name, note)
    return results


def test_a_group_waits_for_a_transaction_that_has_not_ended(unverified, bridge, monkeypatch):
    name, looks = f"open-{next(_numbers)}", note_results(monkeypatch, reader, "write_missing_markers_of_group")
    send(bridge, name, b"1", b"2")
    with bridge.consumer(name, name) as consumer:
        take(consumer, 1)
    bridge.admin.create_topic(f"{name}-target")
    producer = plain_producer(unverified, name)
    write(producer, f"{name}-target", b"its own")
    requests, deadline = requests_of(bridge), Deadline(120)
    told = describe(bridge, name)[name]
    offsets = offsets_of(GroupMembership(name, -1, "", None), {(name, 0): 1}, {}, {})
    assert requests.acknowledge(name, told.pid, told.epoch, offsets, deadline).code == 0
    with bridge.consumer(name, name) as waits:
        eventually(lambda: (waits.poll(1, 0), len(looks) > 1)[-1], "it is looked at twice")
        assert looks[:2] == [[], []]
        producer.commit_transaction(LONG)
        assert values(take(waits, 1)) == [b"2"]


def test_a_reader_without_the_right_to_write_markers_logs_the_remedy_and_touches_nothing(
    unverified, bridge, monkeypatch, caplog
):
    one = Still(unverified, bridge, True)

    with monkeypatch.context() as patch, bridge.consumer(one.source, one.group) as consumer:
        asked = fail_call(patch, Requests, "write_markers", AccessDenied("it may not be marked"), EACH)
        eventually(lambda: (consumer.poll(1, 0), "it may not be marked" in caplog.text)[-1], "it is told")
        assert f"txnbridge transactions repair {one.id} --yes --reason TEXT" in caplog.text
        until = time.monotonic() + 10
        while time.monotonic() < until:
            consumer.poll(1, 1)
        assert len(asked) == 1, "a producer that lives would be shut out again and again"
        assert visible(unverified, one.target) == [b"before"]
    # As after a death between the opening of its id and the markers: whoever comes next can finish it still.
    cluster = cluster_of(bridge)
    assert hanging_transactions.write_missing_markers_of_group(cluster, one.group, Deadline(LONG))
    assert wait_until(lambda: visible(unverified, one.target) == [b"before", b"behind"], LONG)


@pytest.mark.parametrize("role", ["reads", "writes"])
def test_a_transaction_that_a_gone_process_left_is_finished_by_any_bridge_at_work_there(
    unverified, bridge, with_timing, role
):
    with_timing(monitor_interval=0.5, monitor_longest_interval=0.5)
    one = Still(unverified, bridge, True)
    with txnbridge.connect(unverified.url) as other:
        if role == "writes":
            send(other, one.target, b"later")
        else:
            other.consumer(one.target)
        wanted = [b"before", b"behind", b"later"] if role == "writes" else [b"before", b"behind"]
        assert wait_until(lambda: visible(unverified, one.target) == wanted, LONG)


def test_an_open_transaction_is_left_alone_where_a_bridge_is_at_work(unverified, bridge, monkeypatch, with_timing):
    with_timing(monitor_interval=0.2, monitor_longest_interval=0.5)
    name = f"open-{next(_numbers)}"
    looks = note_results(monkeypatch, hanging_transactions, "write_missing_markers_of_others")
    bridge.admin.create_topic(name)
    producer = plain_producer(unverified, name)
    write(producer, name, b"its own")
    with txnbridge.connect(unverified.url) as other:
        send(other, name, b"beside")
        eventually(lambda: len(looks) > 2, "it is looked at")
        assert not any(looks)
        producer.commit_transaction(LONG)  # and was not shut out
        assert wait_until(lambda: visible(unverified, name) == [b"its own", b"beside"], LONG)


def test_a_bridge_that_may_not_finish_a_gone_transaction_says_so_and_looks_no_more(
    unverified, bridge, monkeypatch, with_timing, caplog
):
    with_timing(monitor_interval=0.2, monitor_longest_interval=0.5)
    one = Still(unverified, bridge, True)
    with monkeypatch.context() as patch, txnbridge.connect(unverified.url) as other:
        asked = fail_call(patch, Requests, "write_markers", AccessDenied("it may not be marked"), EACH)
        other.consumer(one.target)
        eventually(lambda: "it may not be marked" in caplog.text, "it is told")
        assert f"txnbridge transactions repair {one.id} --yes --reason TEXT" in caplog.text
        time.sleep(2)
        assert len(asked) == 1


PROGRAM = """
import sys, txnbridge
url, source, target, group = sys.argv[1:]
with txnbridge.connect(url, transactional_id=group, writers=1) as bridge:
    bridge.processor(source, group=group, each=lambda m, txn: txn.send(target, m.value), max_messages=7).run()
"""


@pytest.mark.full
@pytest.mark.timeout(1200)  # a broker that was killed comes back when its last session has ended, after six seconds
def test_a_group_goes_on_whenever_its_broker_and_its_processor_die_together(
    kafka_broker: brokers.Broker, txnbridge_url: str, connect: Connect, unique: Callable[[str], str], group: str
) -> None:
    """The test has twenty rounds: in three of so many the group stood still for good before."""
    source, target = unique("source"), unique("target")
    writer = connect(writers=1)
    for topic in (source, target):
        writer.admin.create_topic(topic)
    random = Random(1)

    @contextmanager
    def at_work(passed_on: int) -> Iterator[None]:
        program = Popen([sys.executable, "-c", PROGRAM, txnbridge_url, source, target, group])
        try:
            eventually(lambda: len(writer.read(target, 10_000)) >= passed_on, "it goes on")
            yield
        finally:
            program.kill()
            program.wait()

    for number in range(20):
        send(writer, source, *(b"%d" % each for each in range(number * 300, number * 300 + 300)))
        with at_work(number * 300 + 1):
            time.sleep(random.random() / 2)
            kafka_broker.kill()
        kafka_broker.start()
    with at_work(6000):
        assert values(seen(connect(), target)) == [b"%d" % each for each in range(6000)]
