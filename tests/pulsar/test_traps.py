"""Tests of traps in which Pulsar lets a writer lose data: first with a naive writer, then with ours.

A naive writer here is the wire client, used in the way that looks right.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers import _pulsar
from txnbridge_conformance.brokers.plugin import StartPulsar, pulsar_or_skip
from txnbridge_conformance.observing import eventually, send
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.broker import CONNECT_EVERY_SECONDS
from txnbridge_pulsar.outcome.late_writes import refuse_late_writes
from txnbridge_pulsar.write.fence import Fence
from txnbridge_pulsar.write.fence_records import FenceRecord

from tests.pulsar import writing_kit
from tests.pulsar.client_kit import SOON, admin, batch_of, begin, path_of, service
from txnbridge import Bridge, Outcome, TokenState, errors
from txnbridge.spi import Deadline
from txnbridge.testing import next_commit


@pytest.fixture(scope="module")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """A broker of these tests alone: leftovers of other tests keep the coordinator from listing open transactions."""
    with pulsar_or_skip() as broker:
        yield broker


@pytest.fixture(autouse=True)
def _nothing_is_open(request: pytest.FixtureRequest) -> None:
    """End the transactions that other tests left open: they keep brokers from refusing late writes."""
    if "client" in request.fixturenames:
        writing_kit.end_all(request.getfixturevalue("pulsar_broker"))


@pytest.fixture
def bridge(open_bridge: writing_kit.Connect) -> Bridge:
    return open_bridge(transactional_id=writing_kit.unique("owner"))


@pytest.fixture
def topic(bridge: Bridge) -> str:
    return writing_kit.new_topic(bridge)


def send_in(client: wire.PulsarClient, name: str, txn: wire.TxnId | None, *values: bytes) -> None:
    with wire.closing(client.create_producer(name, timeout=SOON, transactions=True), lambda: SOON) as producer:
        producer.send(batch_of(*values), txn, timeout=SOON).result(SOON)


def test_naive_a_late_message_takes_the_committed_ones_away(client: wire.PulsarClient, topic: str) -> None:
    name = writing_kit.concrete(topic)
    txn = begin(client, name)
    send_in(client, name, txn, b"committed")
    client.transactions.end(txn, True, SOON)
    assert writing_kit.read_all(client, name) == [b"committed"]
    send_in(client, name, txn, b"late")
    later = begin(client, name)
    send_in(client, name, later, b"next")
    client.transactions.end(later, True, SOON)
    assert writing_kit.read_all(client, name) == [b"next"]


def test_ours_gives_up_rather_than_commit_while_a_message_may_still_come(open_bridge, client, pulsar_broker):
    with faults.proxy(pulsar_broker) as proxy:
        bridge = open_bridge(writing_kit.proxied(proxy), timeout=4)
        topic = writing_kit.new_topic(bridge)
        with pytest.raises(errors.TxnBridgeError) as caught, bridge.transaction() as txn:
            txn.send(topic, b"early")
            writing_kit.flush(txn)
            held = proxy.hold(requests="SEND")
            txn.send(topic, b"late")
        assert txn.outcome is not Outcome.COMMITTED, caught.value  # None if a busy broker leaves the abort unanswered
        held.release()
        held.answered()
        send(open_bridge(), topic, b"next")
        assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"next"]
        bridge.close()


def test_naive_numbers_used_again_after_an_abort_have_the_messages_dropped(client: wire.PulsarClient, topic: str):
    name = writing_kit.concrete(topic)
    producer = client.create_producer(name, timeout=SOON, transactions=True)
    for commit in (False, True):
        txn = begin(client, name)
        assert producer.send(batch_of(b"0", b"1"), txn, sequence_id=0, timeout=SOON).result(SOON).duplicate is commit
        client.transactions.end(txn, commit, SOON)
    assert writing_kit.read_all(client, name) == []


def test_ours_never_uses_a_number_twice(bridge: Bridge, client: wire.PulsarClient, topic: str) -> None:
    for value in (b"aborted", b"kept"):
        with bridge.transaction() as txn:
            txn.send(topic, value)
            writing_kit.flush(txn)
            if value == b"aborted":
                txn.abort()
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"kept"]


def test_ours_takes_no_dropped_entry_for_a_stored_one(bridge: Bridge, client: wire.PulsarClient, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
    # A mistake of the client's, or numbers that the broker remembers of somebody else.
    writing_kit.producer_of(txn, topic)._next = 0
    with pytest.raises(errors.DeliveryFailed, match="dropped"), bridge.transaction() as txn:
        txn.send(topic, b"2")
    assert txn.outcome is Outcome.ABORTED
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]


@pytest.mark.parametrize("is_late", [False, True], ids=["committed", "after the abort, as the first on its topic"])
def test_naive_a_message_on_an_unregistered_topic_is_unseen_and_blocks_the_topic(client, topic, is_late):
    name = writing_kit.concrete(topic)
    txn = begin(client, name) if is_late else client.transactions.begin(60_000, SOON)
    steps = [lambda: send_in(client, name, txn, b"lost"), lambda: client.transactions.end(txn, not is_late, SOON)]
    for step in reversed(steps) if is_late else steps:
        step()
    assert writing_kit.read_all(client, name, patience=1) is None
    client.transactions.end_on_partition(txn, name, False, SOON)


def test_ours_refuses_late_messages_that_it_could_not_wait_for_before_an_abort(open_bridge, client, pulsar_broker):
    with faults.proxy(pulsar_broker) as proxy:
        bridge = open_bridge(writing_kit.proxied(proxy))
        topic = writing_kit.new_topic(bridge)
        send(bridge, topic, b"1")
        held = proxy.hold(requests="SEND")
        with bridge.transaction() as txn:
            txn.send_many(topic, [b"late" * 100] * 5_000)
            txn.abort()
        held.release()
        held.answered()
        assert txn.outcome is Outcome.ABORTED
        assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]
        bridge.close()


def test_ours_refuses_messages_behind_their_transaction(open_bridge: writing_kit.Connect, client: wire.PulsarClient):
    bridge = open_bridge(timeout=20)
    topic, late = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge)
    with pytest.raises(errors.TransactionAborted), bridge.transaction() as txn:
        txn.send(topic, b"in time")
        number = writing_kit.flush(txn)
        writing_kit.register(txn, late)
        client.transactions.end(number, False, SOON)
        txn.send(late, b"too late")
    for name in (topic, late):
        assert writing_kit.read_all(client, writing_kit.concrete(name)) == []


def test_a_late_write_is_refused_also_beside_acknowledgements(bridge: Bridge, client: wire.PulsarClient, topic: str):
    client.subscribe(writing_kit.concrete(topic), "group", timeout=SOON).close(SOON)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        number = writing_kit.flush(txn)
        ended = writing_kit.announced(bridge)
    with_acks = replace(ended, subscriptions=((writing_kit.concrete(topic), "group"),))
    cluster = writing_kit.cluster_of(bridge)
    eventually(lambda: refuse_late_writes(cluster, with_acks, Deadline(SOON)), "its anchor has ended")
    with pytest.raises(wire.NotAllowed, match="has been ended"):
        send_in(client, writing_kit.concrete(topic), number, b"late")
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]


def test_a_late_write_blocks_after_an_unload_only_until_the_next_transaction_ends_there(
    bridge: Bridge, client: wire.PulsarClient, topic: str, pulsar_broker: brokers.Pulsar
) -> None:
    """A broker that has a topic anew knows no more what has ended there before."""
    late = writing_kit.new_topic(bridge)
    name = writing_kit.concrete(late)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        number = writing_kit.flush(txn)
        writing_kit.register(txn, late)
        ended = writing_kit.announced(bridge)
        txn.abort()
    cluster = writing_kit.cluster_of(bridge)
    eventually(lambda: refuse_late_writes(cluster, ended, Deadline(SOON)), "its anchor has ended")
    admin(pulsar_broker, "PUT", f"{path_of(name)}/unload")
    send_in(client, name, number, b"late")
    assert writing_kit.read_all(client, name, patience=1) is None
    send(bridge, late, b"next")
    assert writing_kit.read_all(client, name) == [b"next"]


class NamedFence(Fence):
    """A naive one: whoever owns the id has the id as its name, too."""

    def _open(self, access: wire.AccessMode, deadline: Deadline) -> wire.PulsarProducer:
        return self._cluster.client.create_producer(
            self.topic, timeout=deadline.left(), access=access, connection_key=self._connection_key, name=self._name
        )


def take_from_each_other(bridge: Bridge, kind: type[Fence], turns: int) -> Iterator[Fence]:
    """Owners of one id, each taking it while the one before still sends."""
    id = writing_kit.unique("owner")
    for number in range(turns):
        fence = kind(writing_kit.cluster_of(bridge), id, str(number))
        fence.take(Deadline(SOON))
        yield fence
        notice = FenceRecord(str(number), "here" * 250, 0)
        for _ in range(300):
            fence._send(lambda notice=notice: notice, Deadline(SOON))  # type: ignore[misc]


@pytest.mark.timeout(600)
def test_naive_a_takeover_by_the_same_name_is_refused(bridge: Bridge) -> None:
    """The older owner is mostly shut out all the same."""
    with pytest.raises(errors.BrokerUnavailable, match="already connected"):
        # It is one takeover in twenty or so, and once there were 300 without.
        for _ in take_from_each_other(bridge, NamedFence, turns=2000):
            pass


def test_ours_takes_over_by_a_fresh_name_and_is_never_refused(bridge: Bridge) -> None:
    owners = list(take_from_each_other(bridge, Fence, turns=30))
    with pytest.raises(errors.Fenced):
        owners[-2].write(lambda: FenceRecord("older", "here", 0), Deadline(SOON))


def test_naive_a_fenced_producer_takes_all_that_shares_its_connection_down(client: wire.PulsarClient, topic: str):
    fence = f"persistent://public/default/{writing_kit.unique('fence')}"
    bystander = client.create_producer(writing_kit.concrete(topic), connection_key="1", timeout=SOON)
    kind = wire.AccessMode.EXCLUSIVE_WITH_FENCING
    older, _ = [client.create_producer(fence, connection_key=key, access=kind, timeout=SOON) for key in ("1", "2")]
    with pytest.raises(wire.BrokerConnectionLost):
        older.send(batch_of(b"late"), timeout=SOON).result(SOON)
    assert isinstance(bystander.lost, wire.BrokerConnectionLost)


def test_ours_has_its_fence_on_a_connection_of_its_own(open_bridge: writing_kit.Connect) -> None:
    id = writing_kit.unique("owner")
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    bystander = writing_kit.cluster_of(older).client.create_producer(writing_kit.concrete(topic), timeout=SOON)
    open_bridge(transactional_id=id)
    with pytest.raises(errors.Fenced):
        send(older, topic, b"late")
    bystander.send(batch_of(b"1"), timeout=SOON).result(SOON)
    assert bystander.generation == 0 and bystander.lost is None


def test_naive_a_plain_record_behind_an_open_marker_is_hidden_and_announcements_of_ours_are_not(bridge, client, topic):
    shared = f"persistent://public/default/{writing_kit.unique('fence')}"
    txn = begin(client, shared)
    send_in(client, shared, txn, b"marker")
    assert writing_kit.read_all(client, shared, patience=1) is None
    client.transactions.end(txn, False, SOON)
    with bridge.transaction() as open_one:
        open_one.send(topic, b"x")
        writing_kit.flush(open_one)
        assert writing_kit.fence_of(bridge).topic not in writing_kit.announced(bridge).topics
        assert writing_kit.proof_topic_of(open_one) in writing_kit.announced(bridge).topics
        assert writing_kit.read_all(client, writing_kit.proof_topic_of(open_one), patience=1) is None


def test_a_transaction_asks_for_no_more_time_than_its_own_and_the_bridge_s_limit(pulsar_broker, open_bridge):
    bridge = open_bridge(timeout=7, pulsar={"longest_transaction": 10.0})
    topic = writing_kit.new_topic(bridge)
    for seconds, most in ((5, 5_000), (600, 10_000)):
        with bridge.transaction(timeout=seconds) as txn:
            txn.send(topic, b"x")
            number = writing_kit.flush(txn)
            path = f"transactions/transactionMetadata/{number.most}/{number.least}"
            told = admin(pulsar_broker, "GET", path, version=3)
            assert most - 2_000 < told["timeoutAt"] <= most


HEADERS = ("marker-type", "txn-aborted", "txn-uncommitted")


def told_by_rest(bridge: Bridge, name: str) -> dict[wire.TxnId, list[Any]]:
    """Return what REST says of each transaction on a topic: of its message, its marker there, and itself."""
    rest, path, deadline = writing_kit.cluster_of(bridge).rest, path_of(name), Deadline(SOON)
    stats = rest.get(f"/admin/v2/{path}/internalStats", deadline)
    (ledger,) = [each["ledgerId"] for each in stats["ledgers"]]
    told: dict[wire.TxnId, list[Any]] = {}
    for entry in range(stats["currentLedgerEntries"]):
        found = rest.headers(f"/admin/v2/{path}/ledger/{ledger}/entry/{entry}", deadline)
        txn = wire.TxnId(int(found["x-pulsar-txnid-most-bits"]), int(found["x-pulsar-txnid-least-bits"]))
        told.setdefault(txn, []).append([found.get(f"x-pulsar-{what}") for what in HEADERS])
    buffered = f"/admin/v3/transactions/transactionInBufferStats/{name.removeprefix('persistent://')}"
    for txn, all_told in told.items():
        all_told.append(rest.get(f"{buffered}/{txn.most}/{txn.least}", deadline))
    return told


def test_naive_headers_call_aborted_what_was_committed_and_cleared_away_and_ours_does_not(
    bridge, client, pulsar_broker, topic, monkeypatch
):
    """A coordinator that was never told of a topic does what one does that forgets it while it is unloaded."""
    name, register = writing_kit.concrete(topic), wire.Transactions.register

    def not_that(self: Any, txn: wire.TxnId, timeout: float, topics: Any = (), subscriptions: Any = ()) -> None:
        register(self, txn, timeout, [each for each in topics if each != name], subscriptions)

    with monkeypatch.context() as patch, next_commit(bridge, Outcome.UNKNOWN):
        with pytest.raises(errors.OutcomeUnknown) as caught:
            patch.setattr(wire.Transactions, "register", not_that)
            with bridge.transaction() as txn:
                txn.send(topic, b"committed")
    token = str(caught.value.token)
    its_own, proof = writing_kit.evidence_of(token)
    ended = {commit: begin(client, name) for commit in (True, False)}
    for anchor in writing_kit.owner_of(bridge).anchors.open():
        client.transactions.end(anchor, False, SOON)
    for commit, number in ended.items():
        send_in(client, name, number, b"another")
        client.transactions.end(number, commit, SOON)
    told = told_by_rest(bridge, name)
    assert told[its_own] == told[ended[False]] == [[None, "true", "false"], ["22", "true", "false"], {"aborted": True}]
    assert told[ended[True]] == [[None, "false", "false"], ["21", "false", "false"], {"aborted": False}]
    assert bridge.status(token).state is TokenState.COMMITTED
    admin(pulsar_broker, "DELETE", f"{proof.topic.replace('://', '/')}?force=true")
    lost = bridge.status(token)
    assert (lost.state, lost.permanent) == (TokenState.UNKNOWN, True)


# Of the transaction that somebody leaves open, and how long is waited beyond it for what must not happen.
LEFT_OPEN_SECONDS = 6
MUCH_LATER_SECONDS = 20


def left_open(broker: brokers.Pulsar) -> str:
    """The topic of a transaction whose process is gone."""
    name = f"persistent://public/default/{writing_kit.unique('topic')}"
    with wire.PulsarClient(service(broker)) as client:
        send_in(client, name, begin(client, name, ttl_ms=LEFT_OPEN_SECONDS * 1000), b"left open")
    return name


@pytest.fixture
def nobody_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the starter of brokers from connecting to their coordinator, which lets the coordinator's clocks run."""
    monkeypatch.setattr(_pulsar, "load_coordinator", lambda port: None)


@pytest.mark.full
@pytest.mark.usefixtures("nobody_connects")
def test_naive_after_a_restart_an_open_transaction_outlives_its_time_until_a_bridge_opens(start_pulsar: StartPulsar):
    broker = start_pulsar()
    name = left_open(broker)
    broker.restart()
    with wire.PulsarClient(service(broker)) as client:
        assert writing_kit.read_all(client, name, patience=LEFT_OPEN_SECONDS + MUCH_LATER_SECONDS) is None
        with writing_kit.connect_to(broker.url, broker.admin_url):  # sooner than its watch has its first turn
            assert writing_kit.read_all(client, name, patience=CONNECT_EVERY_SECONDS / 2) == []


@pytest.mark.full
@pytest.mark.usefixtures("nobody_connects")
def test_after_a_restart_the_time_of_dead_processes_runs_because_an_idle_bridge_connects(start_pulsar: StartPulsar):
    broker = start_pulsar()
    with writing_kit.connect_to(broker.url, broker.admin_url):
        name = left_open(broker)
        broker.restart()
        with wire.PulsarClient(service(broker)) as client:
            assert writing_kit.read_all(client, name, patience=LEFT_OPEN_SECONDS + MUCH_LATER_SECONDS) == []


@pytest.mark.full
def test_a_transaction_goes_on_through_a_kill_of_the_broker(start_pulsar: StartPulsar) -> None:
    broker = start_pulsar()
    values = [b"%d" % number for number in range(20_000)]
    id = writing_kit.unique("owner")
    with writing_kit.connect_to(broker.url, broker.admin_url, transactional_id=id, timeout=120) as bridge:
        topic = writing_kit.new_topic(bridge)
        with bridge.transaction(prepare=True) as prepared:
            prepared.send(topic, b"prepared")
        with bridge.transaction() as txn:
            txn.send_many(topic, values[:10_000])
            writing_kit.flush(txn)
            broker.restart()
            txn.send_many(topic, values[10_000:])
        assert txn.outcome is Outcome.COMMITTED
        assert bridge.commit(str(prepared.token)) is Outcome.COMMITTED
        with wire.PulsarClient(service(broker)) as client:
            assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"prepared", *values]


@pytest.mark.full
def test_fence_and_proof_topics_outlive_the_inactivity_for_which_a_naive_topic_is_deleted(start_pulsar: StartPulsar):
    broker = start_pulsar(delete_unused=True, settings={"brokerDeleteInactiveTopicsFrequencySeconds": "1"})
    id = writing_kit.unique("owner")
    with writing_kit.connect_to(broker.url, broker.admin_url, transactional_id=id) as bridge:
        topic = writing_kit.new_topic(bridge)
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"1")
        assert bridge.commit(str(txn.token)) is Outcome.COMMITTED
        fence = writing_kit.fence_of(bridge).topic
    with wire.PulsarClient(service(broker)) as client, writing_kit.connect_to(broker.url, broker.admin_url) as onlooker:
        naive = f"persistent://public/default/{writing_kit.unique('naive')}"
        send_in(client, naive, None, b"a record of the greatest importance")
        topics = writing_kit.cluster_of(onlooker).topics
        eventually(lambda: not topics.existing(naive, Deadline(SOON)), "the naive topic is deleted")
        assert topics.existing(fence, Deadline(SOON))
        assert onlooker.status(str(txn.token)).state is TokenState.COMMITTED


@pytest.mark.full
def test_committed_messages_that_no_subscription_needs_are_lost_and_the_doctor_warns(start_pulsar: StartPulsar) -> None:
    """The broker keeps or deletes messages: a subscription keeps them, and nothing that a writer does."""
    broker = start_pulsar(delete_unused=True, settings={"brokerDeduplicationEnabled": "false"})
    values = [b"%d" % number for number in range(1_000)]
    with writing_kit.connect_to(broker.url, broker.admin_url) as bridge:
        unread, grouped = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge)
        naive = f"persistent://public/default/{writing_kit.unique('naive')}"
        with wire.PulsarClient(service(broker)) as client:
            client.subscribe(writing_kit.concrete(grouped), "group", timeout=SOON, start=wire.EARLIEST).close(SOON)
            number = begin(client, naive)
            send_in(client, naive, number, *values)
        with bridge.transaction() as txn:
            for topic in (unread, grouped):
                txn.send_many(topic, values)
            writing_kit.flush(txn)
            broker.restart()
        assert txn.outcome is Outcome.COMMITTED
        with wire.PulsarClient(service(broker)) as client:
            client.create_producer(naive, timeout=SOON).close(SOON)  # whoever uses a topic has it loaded
            for name in (naive, writing_kit.concrete(unread), writing_kit.concrete(grouped)):
                admin(broker, "POST", f"{path_of(name)}/trim")  # as brokers do by themselves every two minutes
            client.transactions.end(number, True, SOON)
            for name in (naive, writing_kit.concrete(unread)):
                eventually(lambda name=name: writing_kit.read_all(client, name) == [], "it is deleted")  # type: ignore[misc]
            assert writing_kit.read_all(client, writing_kit.concrete(grouped)) == values
        (warned,) = [each for each in bridge.admin.doctor() if "retention is 0" in each.text]
        assert unread in warned.text and grouped not in warned.text


@pytest.mark.full
def test_a_coordinator_that_has_enough_never_answers_a_naive_request_and_ours_asks_again(start_pulsar: StartPulsar):
    broker = start_pulsar(settings={"maxActiveTransactionsPerCoordinator": "1"})
    with wire.PulsarClient(service(broker)) as client, writing_kit.connect_to(broker.url, broker.admin_url) as bridge:
        topic = writing_kit.new_topic(bridge)
        first = client.transactions.begin(60_000, SOON)
        with pytest.raises(errors.DeadlineExceeded), bridge.transaction(timeout=0.5) as txn:
            txn.send(topic, b"never")
        with ThreadPoolExecutor(2) as pool:
            naive = pool.submit(client.transactions.begin, 60_000, SOON)
            ours = pool.submit(send, bridge, topic, b"1")
            time.sleep(1)  # both have asked
            client.transactions.end(first, False, SOON)
            ours.result(SOON)
            with pytest.raises(wire.RequestTimedOut):
                naive.result()
        assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]
