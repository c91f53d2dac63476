"""Two brokers of one cluster: whoever serves what, whatever moves or dies, a transaction is whole or not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_conformance.observing import eventually, mark, seen, send, take, up_to, values
from txnbridge_pulsar.client import PulsarClient, Single, full_topic_name
from txnbridge_pulsar.settings.topic_names import encoded
from txnbridge_pulsar.write.fence import fence_prefix

from tests.in_time import within
from tests.keeping import keeping
from tests.pulsar.client_kit import SOON, connection_of, everything
from tests.pulsar.cluster_kit import Cluster, coordinator
from tests.pulsar.writing_kit import cluster_of, concrete, connect_to, evidence_of, flush, new_topic, unique
from txnbridge import Bridge, Outcome, Token, TokenState, errors
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
BOTH_ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
BOTH_NODES = pytest.mark.parametrize("node", [1, 2], ids=["first", "second"])
PROGRAM = Path(__file__).with_name("official.py")
# Until a broker is missed, its topics are loaded elsewhere, and what hung is done again.
PATIENCE = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pulsar_or_skip(nodes=2, settings={"keepAliveIntervalSeconds": "5"}) as broker:
        assert isinstance(broker, brokers.PulsarCluster)
        found = Cluster(broker)
        found.balance()
        yield found


@pytest.fixture
def open_bridge(cluster: Cluster) -> Iterator[Callable[..., Bridge]]:
    def connect(node: int | None = None, **settings: Any) -> Bridge:
        url = cluster.broker.url if node is None else cluster.url_of(node)
        return connect_to(url, cluster.admin_url, **{"timeout": PATIENCE, **settings})

    yield from keeping(connect)


@pytest.fixture
def bridge(open_bridge: Callable[..., Bridge]) -> Bridge:
    return open_bridge()


def topic_on(cluster: Cluster, bridge: Bridge, node: int) -> str:
    """A topic of one partition, which a node serves."""
    topic = cluster.name_on(node)
    cluster_of(bridge).topics.create(topic, 1, Deadline(SOON))
    return topic


def official_sees(cluster: Cluster, node: int, topic: str) -> list[str]:
    """Return the messages of a topic that the official client reads when it knows one node alone."""
    if importlib.util.find_spec("pulsar") is None:
        pytest.skip("needs the official client: pip install pulsar-client")
    command = [sys.executable, str(PROGRAM), f"pulsar://{cluster.broker.address(node)}", "see"]
    full = f"persistent://public/default/{topic}"
    done = subprocess.run([*command, full], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@BOTH_NODES
def test_a_client_that_knows_one_broker_is_sent_on_to_the_one_that_serves_a_topic(cluster: Cluster, node: int) -> None:
    other = 3 - node
    topic = full_topic_name(cluster.name_on(other, full_topic_name))
    with PulsarClient(f"pulsar://{cluster.broker.address(node)}") as client:
        producer = client.create_producer(topic, timeout=SOON)
        producer.send(Single(b"1"), timeout=SOON).result(SOON)
        assert str(connection_of(producer).address) == cluster.broker.address(other)
        assert everything(client, topic) == [b"1"]


@BOTH_NODES
def test_a_change_by_the_rest_interface_of_one_broker_reaches_the_other(cluster, open_bridge, node):
    url = f"http://{cluster.broker.web_address(node)}"
    bridge = open_bridge(node, pulsar={"admin_url": url})
    topic = topic_on(cluster, bridge, 3 - node)
    bridge.admin.grow_topic(topic, 3)
    send(bridge, topic, b"1")
    assert len(bridge.admin.bounds(topic)) == 3
    with bridge.transaction() as txn:
        for number in range(3):
            txn.send(topic, b"x", partition=number)
        assert str(flush(txn)) in [found.transaction for found in bridge.admin.transactions()]
    bridge.admin.delete_topic(topic)
    assert topic not in [found.name for found in bridge.admin.topics()]


@BOTH_ENDS
def test_a_transaction_over_both_brokers_is_seen_whole_or_not_at_all(cluster, open_bridge, commit):
    bridge, other = open_bridge(1), open_bridge(2)
    orders = new_topic(bridge, partitions=6)
    assert {cluster.node_of(concrete(orders, number)) for number in range(6)} == {1, 2}
    expected = []
    used: Counter[int] = Counter()
    for node in (1, 2):
        inputs = topic_on(cluster, bridge, node)
        sent = [b"%d of %d" % (number, node) for number in range(4)]
        send(bridge, inputs, *sent)
        with bridge.consumer(inputs, "group") as consumer:
            for _ in sent:
                (message,) = take(consumer, 1)
                with bridge.transaction() as txn:
                    txn.ack(message)
                    for partition in range(6):
                        txn.send(orders, message.value, partition=partition)
                    used[flush(txn).most] += 1
                    if not commit:
                        raise errors.Abort
                assert txn.outcome is (Outcome.COMMITTED if commit else Outcome.ABORTED)
        markers = mark(other, inputs)
        with other.consumer(inputs, "group") as consumer:
            assert values(up_to(consumer, markers)) == ([] if commit else sent)
        expected += sent * 6 if commit else []
    assert {cluster.node_of(coordinator(number)) for number in used} == {1, 2}
    assert sorted(map(str, values(seen(other, orders)))) == sorted(map(str, expected))
    by_official = [value.encode() for value in official_sees(cluster, 2, orders) if not value.startswith("marker")]
    assert sorted(by_official) == sorted(expected)


def test_open_transactions_of_coordinators_on_both_brokers_are_listed_and_ended(cluster, open_bridge, bridge):
    writer = open_bridge(1, transactional_id=unique("owner"))
    topics = [topic_on(cluster, bridge, node) for node in (1, 2)]
    tokens = []
    for number in range(4):
        with writer.transaction(prepare=True) as txn:
            for topic in topics:
                txn.send(topic, b"%d" % number)
        tokens.append(str(txn.token))
    used = {evidence_of(token)[0].most for token in tokens}
    assert {cluster.node_of(coordinator(number)) for number in used} == {1, 2}
    listed = {found.transaction: found for found in bridge.admin.transactions()}
    for number, token in enumerate(tokens):
        transaction = Token.parse(token).transaction
        assert listed[transaction].state == "prepared"
        end = bridge.admin.commit if number % 2 else bridge.admin.abort
        assert end(transaction) is (Outcome.COMMITTED if number % 2 else Outcome.ABORTED)
    for topic in topics:
        assert values(seen(bridge, topic)) == [b"1", b"3"]


def prepare_and_die(url: str, admin_url: str, id: str, topics: list[str]) -> None:
    bridge = connect_to(url, admin_url, transactional_id=id)
    with bridge.transaction(prepare=True) as txn:
        for topic in topics:
            txn.send(topic, b"prepared")
    tell(str(txn.token))
    bridge.status(str(txn.token))


def known(end: Callable[[str], Outcome], token: str) -> Outcome:
    """Return the outcome once it is known: not before a broker has loaded the proof topic of another broker."""
    until = Deadline(PATIENCE)
    while True:
        try:
            return end(token)
        except errors.OutcomeUnknown:
            until.check("waiting for an outcome")


@BOTH_ENDS
@pytest.mark.parametrize("dies", ["coordinator", "topic", "fence"])
def test_a_prepared_transaction_is_ended_truly_although_a_broker_that_it_needs_dies(
    cluster: Cluster, open_bridge: Callable[..., Bridge], bridge: Bridge, dies: str, commit: bool
) -> None:
    id = cluster.name_on(
        2 if dies == "fence" else 1,
        lambda name: f"persistent://public/default/{fence_prefix(cluster_of(bridge))}{encoded(name)}",
    )
    topics = [topic_on(cluster, bridge, 2 if dies == "topic" else 1), topic_on(cluster, bridge, 1)]
    with Child(prepare_and_die, cluster.broker.url, cluster.admin_url, id, topics, kill="status/before") as child:
        token = child.told()
        child.stopped()
    txn, _ = evidence_of(token)
    cluster.move(coordinator(txn.most), 2 if dies == "coordinator" else 1)
    truth = Outcome.COMMITTED if commit else Outcome.ABORTED
    with cluster.killed(2):
        assert known(bridge.commit if commit else bridge.abort, token) is truth
        assert known(bridge.abort if commit else bridge.commit, token) is truth
        assert bridge.status(token).state.value == truth.value
        for topic in topics:
            assert values(seen(bridge, topic)) == ([b"prepared"] if commit else [])
        again = open_bridge(transactional_id=id)
        send(again, topics[0], b"next")
    assert open_bridge(1).status(token).state.value == truth.value
    assert values(seen(bridge, topics[0])) == ([b"prepared", b"next"] if commit else [b"next"])


class Writing:
    """Transactions one after the other, each over all topics, and what became of each."""

    def __init__(self, bridge: Bridge, topics: list[str]) -> None:
        self.became: dict[bytes, str | Outcome] = {}
        self.errors: list[BaseException] = []
        self._bridge = bridge
        self._topics = topics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            value = b"%d" % number
            try:
                with self._bridge.transaction() as txn:
                    for topic in self._topics:
                        txn.send(topic, value)
                self.became[value] = Outcome.COMMITTED
            except errors.OutcomeUnknown as error:
                self.became[value] = str(error.token)
            except (errors.TransactionAborted, errors.BrokerUnavailable):
                self.became[value] = Outcome.ABORTED
            except BaseException as error:
                self.errors.append(error)
                return

    def committed(self) -> int:
        return sum(each is Outcome.COMMITTED for each in list(self.became.values()))

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(3 * PATIENCE)
        assert not self._thread.is_alive()
        assert not self.errors, self.errors


@BOTH_NODES
def test_each_transaction_during_which_a_broker_dies_ends_as_its_program_was_told(cluster, open_bridge, bridge, node):
    topics = [topic_on(cluster, bridge, each) for each in (1, 2)]
    with Writing(open_bridge(transactional_id=unique("owner")), topics) as writing:
        eventually(lambda: writing.committed() > 20, "it writes")
        with cluster.killed(node):
            before = writing.committed()
            eventually(lambda: writing.committed() > before + 20, "it goes on without the broker")
        before = writing.committed()
        eventually(lambda: writing.committed() > before + 20, "it goes on with the broker back")
    ended: dict[Any, Outcome | TokenState] = {
        value: became if isinstance(became, Outcome) else bridge.status(became).state
        for value, became in writing.became.items()
    }
    final = {Outcome.COMMITTED, Outcome.ABORTED, TokenState.COMMITTED, TokenState.ABORTED}
    assert {*ended.values()} <= final
    expected = [value for value, became in ended.items() if became in (Outcome.COMMITTED, TokenState.COMMITTED)]
    for topic in topics:
        found = Counter(values(seen(bridge, topic)))
        wrong = {value for value, count in found.items() if count > 1} | (found.keys() ^ set(expected))
        told = {value: (found[value], ended.get(value)) for value in wrong}
        assert not told, f"how often they are there, and how they ended: {told}"
        assert list(found) == expected


def test_an_owner_keeps_its_id_when_the_broker_of_its_fence_topic_dies_and_loses_it_to_the_next(
    cluster: Cluster, open_bridge: Callable[..., Bridge], bridge: Bridge
) -> None:
    id = cluster.name_on(
        2, lambda name: f"persistent://public/default/{fence_prefix(cluster_of(bridge))}{encoded(name)}"
    )
    topic = topic_on(cluster, bridge, 1)
    owner = open_bridge(transactional_id=id)
    send(owner, topic, b"before")
    with cluster.killed(2):
        send(owner, topic, b"without")
        assert values(seen(bridge, topic)) == [b"before", b"without"]
    send(owner, topic, b"back")
    newer = open_bridge(transactional_id=id)
    send(newer, topic, b"newer")
    with pytest.raises(errors.Fenced):
        send(owner, topic, b"never")
    assert values(seen(bridge, topic)) == [b"before", b"without", b"back", b"newer"]


def test_reading_processing_and_publishing_go_on_while_topics_move_and_brokers_die(cluster, open_bridge, bridge):
    inputs, results = new_topic(bridge, partitions=4), new_topic(bridge, partitions=4)
    sent: list[bytes] = []
    stop = threading.Event()

    def publish(publisher: Any) -> None:
        while not stop.is_set():
            value = b"%d" % len(sent)
            publisher.send(inputs, value, key=value)
            sent.append(value)
            time.sleep(0.005)

    with open_bridge().publisher() as publisher:
        publishing = threading.Thread(target=publish, args=(publisher,))
        # Brokers that let go of a topic at a bad moment never answer who acknowledges there: that lasts one timeout.
        processing = open_bridge(timeout=25).processor(
            inputs, group="workers", each=lambda message, txn: txn.send(results, message.value), backoff=(0.05, 0.5)
        )
        with processing, open_bridge().consumer(results) as reader:
            publishing.start()
            found: list[Any] = []

            def goes_on(more: int) -> None:
                until = len(found) + more

                def reads() -> bool:
                    found.extend(values(reader.poll(timeout=0.1)))
                    return len(found) >= until

                eventually(reads, "results come")

            goes_on(100)
            for number in range(4):
                for topic in (inputs, results):
                    full = concrete(topic, number)
                    cluster.move(full, 3 - cluster.node_of(full))
                goes_on(20)
            for node in (1, 2):
                with cluster.killed(node):
                    goes_on(20)
                goes_on(20)
            stop.set()
            publishing.join()
            publisher.flush()
            goes_on(len(sent) - len(found))
    assert Counter(values(seen(bridge, inputs))) == Counter(sent)
    stored = seen(bridge, results)
    twice = {value for value, count in Counter(values(stored)).items() if count > 1}
    assert not twice, [(m.value, m.partition, m.position) for m in stored if m.value in twice]
    assert Counter(values(stored)) == Counter(sent)
    assert Counter(found) == Counter(sent)


@BOTH_NODES
def test_no_call_lasts_longer_than_its_deadline_while_a_broker_is_frozen(cluster, open_bridge, bridge, node):
    topic = topic_on(cluster, bridge, node)
    hurried = open_bridge(3 - node, timeout=3)
    send(hurried, topic, b"before")
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    token = str(txn.token)
    prepared, _ = evidence_of(token)
    cluster.move(coordinator(prepared.most), node)

    def ends(call: Callable[[], object]) -> None:
        with within(3), suppress(errors.BrokerUnavailable, errors.OutcomeUnknown, errors.TransactionAborted):
            call()

    cluster.broker.pause(node)
    try:
        ends(lambda: send(hurried, topic, b"x"))
        ends(lambda: hurried.status(token))
        ends(lambda: hurried.commit(token))
        ends(lambda: hurried.consumer(topic).close())
        ends(lambda: hurried.admin.bounds(topic))
        ends(lambda: hurried.admin.transactions())
    finally:
        cluster.broker.resume(node)
        cluster.balance()
    assert bridge.commit(token) is Outcome.COMMITTED
    assert b"prepared" in values(seen(bridge, topic))
