"""Opening a transactional id: who owns it, what the newer owner ends, and what the older one can still do: nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually, send
from txnbridge_pulsar.client import AccessMode, PulsarClient, Single, TxnId

from tests.inside import connection_of
from tests.pulsar import writing_kit
from tests.pulsar.client_kit import SOON, admin, cut, path_of
from tests.pulsar.test_traps import _nothing_is_open  # noqa: F401
from txnbridge import Bridge, EvidenceLost, Fenced, Transaction


@pytest.fixture
def id() -> str:
    return writing_kit.unique("owner")


def send_late(bridge: Bridge, topic: str, number: TxnId) -> None:
    """Send as an owner does that was paused between two steps, when it wakes up."""
    producer = writing_kit.cluster_of(bridge).client.create_producer(
        writing_kit.concrete(topic), timeout=SOON, transactions=True
    )
    try:
        producer.send(Single(b"late"), number, timeout=SOON).result(SOON)
    finally:
        producer.close(SOON)


def cut_fence(bridge: Bridge) -> None:
    producer = writing_kit.fence_of(bridge)._producer
    assert producer is not None
    cut(producer)


def leave_open(bridge: Bridge, topic: str) -> tuple[Transaction, TxnId]:
    """A transaction that has named a second topic, and sent nothing there yet."""
    txn = bridge.transaction()
    txn.send(topic, b"left open")
    return txn, writing_kit.flush(txn)


def abandon(txn: Transaction) -> None:
    with pytest.raises(Fenced):
        txn.commit()


def test_the_older_owner_is_told_which_host_fenced_it(open_bridge: writing_kit.Connect, id: str) -> None:
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    newer = open_bridge(transactional_id=id)
    with pytest.raises(Fenced) as caught:
        send(older, topic, b"zombie")
    assert caught.value.newer == connection_of(newer).identity.host


@pytest.mark.parametrize("where", ["in its transaction", "in a topic that it had only named"])
def test_a_message_that_the_older_owner_sends_after_the_takeover_is_refused(open_bridge, client, id, where):
    older = open_bridge(transactional_id=id)
    topic, named = writing_kit.new_topic(older), writing_kit.new_topic(older)
    txn, number = leave_open(older, topic)
    writing_kit.register(txn, named)
    open_bridge(transactional_id=id)
    with pytest.raises(Exception, match="has been ended"):
        send_late(older, topic if where == "in its transaction" else named, number)
    abandon(txn)
    assert (
        writing_kit.read_all(client, writing_kit.concrete(topic)),
        writing_kit.read_all(client, writing_kit.concrete(named)),
    ) == ([], [])


def test_an_opener_that_only_aborts_leaves_the_topic_to_a_late_message(open_bridge, client, id, monkeypatch):
    """The broken variant of the test before: nothing says that the topic is blocked, and it is."""
    monkeypatch.setattr("txnbridge_pulsar.outcome.late_writes.refuse_late_writes", lambda *asked: True)
    older = open_bridge(transactional_id=id)
    topic, named = writing_kit.new_topic(older), writing_kit.new_topic(older)
    txn, number = leave_open(older, topic)
    writing_kit.register(txn, named)
    open_bridge(transactional_id=id)
    send_late(older, named, number)
    assert writing_kit.read_all(client, writing_kit.concrete(named), patience=1) is None
    client.transactions.end_on_partition(number, writing_kit.concrete(named), False, SOON)
    abandon(txn)


def test_while_an_older_transaction_is_open_topics_are_at_risk_and_later_they_are_not(open_bridge, client, id):
    coordinator = 0
    oldest = client.transactions.begin(60_000, SOON, coordinator)
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    txn, number = leave_open(older, topic)
    newer = open_bridge(transactional_id=id)
    assert [found.txn for found in writing_kit.owner_of(newer).late_write_guard.at_risk] == [number]
    send(newer, topic, b"1")
    assert [found.txn for found in writing_kit.notice_of(newer).at_risk] == [number]
    client.transactions.end(oldest, False, SOON)
    eventually(lambda: not writing_kit.owner_of(newer).late_write_guard.at_risk, "what comes late is refused")
    with pytest.raises(Exception, match="has been ended"):
        send_late(older, topic, number)
    abandon(txn)
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]


def test_an_owner_whose_connection_ended_goes_on(open_bridge, client, id):
    bridge = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(bridge)
    for value in (b"1", b"2"):
        cut_fence(bridge)
        send(bridge, topic, value)
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1", b"2"]


def test_an_owner_that_was_shut_out_does_not_take_the_id_back_when_its_connection_ends(open_bridge, client, id):
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    cut_fence(older)
    newer = open_bridge(transactional_id=id)
    newer.close()  # so that nobody holds the topic
    for _ in range(2):
        with pytest.raises(Fenced):
            send(older, topic, b"zombie")
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == []


def test_a_naive_owner_takes_the_id_back(open_bridge: writing_kit.Connect, client: PulsarClient, id: str) -> None:
    """The broken variant: who reconnects without saying what it was shuts the newer owner out."""
    open_bridge(transactional_id=id)
    newer = open_bridge(transactional_id=id)
    naive = client.create_producer(
        writing_kit.fence_of(newer).topic,
        timeout=SOON,
        access=AccessMode.EXCLUSIVE_WITH_FENCING,
        connection_key=writing_kit.unique("naive"),
    )
    naive.close(SOON)
    topic = writing_kit.new_topic(open_bridge())
    with pytest.raises(Fenced):
        send(newer, topic, b"x")


def test_an_owner_whose_fence_topic_was_recreated_is_fenced_by_the_record_of_the_newer_one(
    pulsar_broker: brokers.Pulsar, open_bridge: writing_kit.Connect, id: str
) -> None:
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    admin(pulsar_broker, "DELETE", f"{path_of(writing_kit.fence_of(older).topic)}?force=true")
    # By a log that knows nothing of the older one; with the first epoch again, which the older one has, too.
    newer = open_bridge(transactional_id=id, application=writing_kit.unique("other"))
    newer.close()
    with pytest.raises(Fenced):
        send(older, topic, b"zombie")


def test_an_owner_whose_fence_topic_was_deleted_is_told_so_and_stops(pulsar_broker, open_bridge, id):
    owner = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(owner)
    admin(pulsar_broker, "DELETE", f"{path_of(writing_kit.fence_of(owner).topic)}?force=true")
    for _ in range(2):
        with pytest.raises(Fenced, match="was deleted"):
            send(owner, topic, b"x")


def test_an_id_whose_fence_topic_was_deleted_is_not_opened_again(pulsar_broker, open_bridge, client, id):
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    txn, _ = leave_open(older, topic)  # nobody who opens the id would find it
    deleted = f"{path_of(writing_kit.fence_of(older).topic)}?force=true"
    admin(pulsar_broker, "DELETE", deleted)
    for _ in range(2):
        with pytest.raises(EvidenceLost, match="another transactional_id"):
            open_bridge(transactional_id=id)
    open_bridge(transactional_id=id, application=writing_kit.unique("other")).close()  # whose log has never heard of it
    with pytest.raises(EvidenceLost, match="another transactional_id"):
        open_bridge(transactional_id=id)
    other = open_bridge(transactional_id=writing_kit.unique("owner"))
    txn.abort()
    send(other, topic, b"1")
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1"]


def test_only_one_of_many_that_open_an_id_at_once_is_the_owner(pulsar_broker, open_bridge, client, id):
    def race(number: int) -> Bridge | None:
        try:
            return writing_kit.connect_to(pulsar_broker.url, pulsar_broker.admin_url, transactional_id=id)
        except Fenced:
            return None

    topic = writing_kit.new_topic(open_bridge())
    with ThreadPoolExecutor(4) as pool:
        racers = [found for found in pool.map(race, range(4)) if found is not None]
    committed = []
    for number, racer in enumerate(racers):
        try:
            send(racer, topic, b"%d" % number)
            committed.append(b"%d" % number)
        except Fenced:
            pass
    for racer in racers:
        racer.close()
    assert len(committed) == 1
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == committed


def test_several_naive_owners_that_open_at_once_write(client: PulsarClient) -> None:
    """The broken variant: the broker gives all that fence at the same moment the same epoch."""
    for _ in range(20):
        topic = f"persistent://public/default/{writing_kit.unique('fence')}"
        client.create_producer(topic, timeout=SOON).close(SOON)

        def fence(number: int, topic: str = topic) -> object:
            return client.create_producer(
                topic, timeout=SOON, access=AccessMode.EXCLUSIVE_WITH_FENCING, connection_key=f"{topic} {number}"
            )

        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(fence, range(2))
        if one.topic_epoch == two.topic_epoch:  # type: ignore[attr-defined]
            break
    for each in (one, two):
        each.send(Single(b"mine"), timeout=SOON).result(SOON)  # type: ignore[attr-defined]
