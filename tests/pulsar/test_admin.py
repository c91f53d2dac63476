"""Topics, open transactions and the doctor on a live broker."""

import re
import time
import uuid

import pytest
from txnbridge_pulsar.admin import repair
from txnbridge_pulsar.admin.admin import PulsarAdmin
from txnbridge_pulsar.admin.rest import RestRefused
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.outcome import broker_evidence
from txnbridge_pulsar.outcome.late_writes import refuse_late_writes

from tests.pulsar import writing_kit
from tests.pulsar.client_kit import admin as ask
from tests.pulsar.client_kit import batch_of, begin, everything, fresh_topic, path_of, send_for_certain, settle
from tests.pulsar.kit import SOON, Connection, open_cluster
from txnbridge import Decision, Outcome, TokenState
from txnbridge.errors import BrokerUnavailable, Fenced, InvalidOption, InvalidState, NotFound, NotSupported
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell


def soon():
    return Deadline(SOON)


@pytest.fixture
def name():
    return f"administered-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def namespace(pulsar_broker, name):
    """A namespace of this test alone: all tests together leave many topics in the common one."""
    ask(pulsar_broker, "PUT", f"namespaces/public/{name}")
    return name


@pytest.fixture
def cluster(pulsar_broker, namespace):
    url = pulsar_broker.url.replace("/default", f"/{namespace}")
    connection = Connection(url, admin_url=pulsar_broker.admin_url)
    yield open_cluster(connection)
    connection.close()


@pytest.fixture
def admin(cluster):
    return PulsarAdmin(cluster)


@pytest.fixture
def without_rest(pulsar_broker):
    connection = Connection(pulsar_broker.url)
    yield PulsarAdmin(open_cluster(connection))
    connection.close()


def named(admin, name):
    return [topic for topic in admin.topics(soon()) if topic.name == name]


def full(name, namespace=None):
    return f"persistent://public/{namespace or name}/{name}"


def test_retention_is_set_and_told(admin, name):
    admin.create_topic(name, 1, soon(), retention_seconds=90, retention_bytes=3_000_000)
    (found,) = waited_for(
        lambda: [each for each in named(admin, name) if each.retention_bytes is not None], "the policy"
    )
    assert (found.retention_seconds, found.retention_bytes) == (120.0, 3 * 1024 * 1024)  # whole units


def test_a_topic_of_one_partition_can_grow(admin, name):
    admin.create_topic(name, 1, soon())
    admin.grow_topic(name, 2, soon())
    assert named(admin, name)[0].partitions == 2
    with pytest.raises(InvalidOption, match="fewer"):
        admin.grow_topic(name, 1, soon())


def test_a_missing_topic_can_neither_grow_nor_be_deleted(admin, name):
    with pytest.raises(NotFound, match=name):
        admin.grow_topic(name, 2, soon())
    with pytest.raises(NotFound, match=name):
        admin.delete_topic(name, soon())


def test_a_topic_that_others_made_without_partitions_counts_as_one_partition(admin, client, name):
    client.create_producer(full(name), timeout=SOON)
    assert named(admin, name)[0].partitions == 1
    assert admin.create_topic(name, 1, soon()) is False
    with pytest.raises(NotSupported, match="without partitions"):
        admin.grow_topic(name, 2, soon())
    admin.delete_topic(name, soon())
    assert not named(admin, name)


def test_without_rest_a_topic_has_one_partition(without_rest, name):
    with pytest.raises(NotSupported, match="admin_url"):
        without_rest.create_topic(name, 2, soon())
    assert without_rest.create_topic(name, 1, soon()) is True
    assert named(without_rest, name)[0].partitions == 1
    assert without_rest.bounds([name], soon()).keys() == {(name, 0)}
    assert [advice.subject for advice in without_rest.check(soon())] == ["rest"]


def test_a_topic_in_use_by_a_transaction_is_not_deleted(admin, client, name):
    admin.create_topic(name, 2, soon())
    txn = begin(client, f"{full(name)}-partition-1")
    with pytest.raises(InvalidState, match=str(txn)):
        admin.delete_topic(name, soon())
    client.transactions.end(txn, False, SOON)
    admin.delete_topic(name, soon())


def open_with(client, topic, *payloads):
    txn = begin(client, topic)
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    producer.send(batch_of(*payloads), txn, timeout=SOON).result(SOON)
    return txn, producer


def test_another_programs_transaction_is_listed_and_aborted(admin, client, name):
    txn, _ = open_with(client, full(name), b"never")
    (found,) = [each for each in admin.transactions(soon()) if each.transaction == str(txn)]
    assert (found.state, found.partitions, found.token) == ("open", ((name, 0),), None)
    assert found.expires_at == found.since + 60_000
    with pytest.raises(InvalidState, match="only its writer"):
        admin.end(str(txn), Decision.COMMIT, soon())
    assert admin.end(str(txn), Decision.ABORT, soon()) is Outcome.ABORTED
    with pytest.raises(NotFound):
        admin.end(str(txn), Decision.ABORT, soon())
    assert everything(client, full(name)) == []


def test_an_abort_behind_an_older_transaction_says_that_late_messages_are_not_refused_yet(admin, client, name, caplog):
    older = begin(client, fresh_topic())
    txn, _ = open_with(client, full(name), b"never")
    assert admin.end(str(txn), Decision.ABORT, soon()) is Outcome.ABORTED
    assert [r.message for r in caplog.records if "do not refuse late messages" in r.message and str(txn) in r.message]
    client.transactions.end(older, False, SOON)


def test_a_transaction_of_an_unloaded_topic_is_known_and_listed(pulsar_broker, cluster, admin, client, namespace):
    topic, unloaded = full("loaded", namespace), fresh_topic()  # which is in another namespace
    txn, _ = open_with(client, topic, b"1")
    client.transactions.register(txn, SOON, [unloaded])
    send_late(client, unloaded, txn)
    rest = cluster.rest

    def look():
        rest.get(f"/admin/v3/transactions/transactionMetadata/{txn.most}/{txn.least}", soon())

    def unload():
        ask(pulsar_broker, "PUT", f"{path_of(unloaded)}/unload")
        with pytest.raises(RestRefused, match=f"HTTP 500: Topic not found {unloaded}"):
            look()

    unload()
    (found,) = [each for each in admin.transactions(soon()) if each.transaction == str(txn)]
    assert set(found.partitions) == {("loaded", 0), (unloaded, 0)}
    unload()
    assert list(repair.held_back(cluster, soon())) == []  # its coordinator knows it
    unload()
    with pytest.raises(InvalidState, match="coordinator that knows it"):
        admin.repair(str(txn), soon())
    client.transactions.end(txn, True, SOON)
    with pytest.raises(RestRefused, match=rf"HTTP 404: .*\({txn.most},{txn.least}\)"):
        look()
    assert everything(client, topic) == [b"1"]


def prepare_half(url, admin_url, id, topic):
    """Prepare one transaction, and have another stored that is not prepared yet."""
    bridge = writing_kit.connect_to(url, admin_url, transactional_id=id, writers=2)
    with bridge.transaction(prepare=True) as whole:
        whole.send(topic, b"whole")
    half = bridge.transaction(prepare=True)
    half.send(topic, b"half")
    writing_kit.flush(half)
    tell([whole.id, half.id])
    time.sleep(600)  # it is killed long before


@pytest.mark.parametrize("owned", [True, False], ids=["of an id", "without an id"])
def test_a_transaction_that_a_dead_process_left_open_is_only_aborted_by_hand(pulsar_broker, open_bridge, client, owned):
    bridge = open_bridge()
    topic, id = writing_kit.new_topic(bridge), writing_kit.unique("owner") if owned else None
    with Child(prepare_half, pulsar_broker.url, pulsar_broker.admin_url, id, topic) as child:
        whole, half = child.told()
        child.kill()
    found = {each.transaction: each for each in bridge.admin.transactions()}
    assert (found[whole].state, found[half].state, found[half].token) == ("prepared", "open", None)
    assert (found[whole].groups, found[whole].partitions) == ((), ((topic, 0),))
    with pytest.raises(InvalidState, match="only its writer"):
        bridge.admin.commit(half)
    assert bridge.admin.abort(half) is Outcome.ABORTED
    assert bridge.status(found[whole].token).state is TokenState.PREPARED
    assert bridge.admin.commit(whole) is Outcome.COMMITTED
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"whole"]


def advice(admin, subject):
    return [each for each in admin.check(soon()) if each.subject == subject]


def test_the_doctor_tells_what_the_brokers_were_told(admin):
    found = {each.subject: each.level for each in admin.check(soon())}
    assert found["copies"] == "warning"  # one bookie
    assert "transactions" not in found and "deduplication" not in found


def test_the_doctor_looks_whether_the_stores_of_groups_are_open(pulsar_broker, admin, open_bridge, namespace):
    bridge = open_bridge(pulsar_broker.url.replace("/default", f"/{namespace}"))
    bridge.ensure_topics("orders")
    with bridge.transaction() as txn:
        txn.send("orders", b"1")
    with bridge.consumer("orders", group="billing") as consumer, bridge.transaction() as txn:
        txn.ack(consumer.poll(1, timeout=SOON))
    place = f"public/{namespace}/orders-partition-0/billing"
    assert ask(pulsar_broker, "GET", f"transactions/pendingAckStats/{place}", version=3)["state"] == "Ready"
    assert not advice(admin, "group billing")


def test_the_doctor_tells_of_a_namespace_that_loses_decisions(pulsar_broker, admin, namespace):
    place = f"namespaces/public/{namespace}"
    subject = f"namespace public/{namespace}"
    assert not advice(admin, subject)
    ask(pulsar_broker, "POST", f"{place}/messageTTL", 60)
    ask(pulsar_broker, "POST", f"{place}/subscriptionExpirationTime", 1)
    evicting = {"limitSize": 1000, "policy": "consumer_backlog_eviction"}
    ask(pulsar_broker, "POST", f"{place}/backlogQuota?backlogQuotaType=destination_storage", evicting)
    found = advice(admin, subject)
    assert [each.level for each in found] == ["problem"] * 3
    told = " ".join(each.text for each in found)
    assert all(word in told for word in ("message_ttl_in_seconds is 60", "subscription_expiration", "backlog quota"))


def test_the_doctor_tells_which_topics_lose_what_nobody_has_read_yet(pulsar_broker, admin, client, namespace):
    ask(pulsar_broker, "PUT", f"persistent/public/{namespace}/grouped/partitions", 2)
    ask(pulsar_broker, "PUT", f"persistent/public/{namespace}/half-grouped/partitions", 2)
    for name in ("grouped-partition-0", "grouped-partition-1", "half-grouped-partition-0"):
        client.subscribe(full(name, namespace), "group", timeout=SOON).close(SOON)
    client.create_producer(full("unread", namespace), timeout=SOON)
    client.read(full("unread", namespace), timeout=SOON)  # a reader keeps nothing
    assert not advice(admin, f"namespace public/{namespace}")  # they keep all
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    ask(pulsar_broker, "POST", f"namespaces/public/{namespace}/retention", nothing)
    found = waited_for(lambda: advice(admin, f"namespace public/{namespace}"), "the policy")
    assert [each.level for each in found] == ["warning"]
    assert found[0].text.startswith("half-grouped, unread: their retention is 0")


def waited_for(found, what):
    """Return the answer once there is one: a policy takes a moment to be in force."""
    deadline = soon()
    while not (told := found()):
        deadline.check(what)
    return told


def test_creating_a_topic_that_keeps_no_messages_logs_a_warning(pulsar_broker, admin, namespace, caplog):
    admin.create_topic("kept", 1, soon())
    assert "retention of 0" not in caplog.text
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    ask(pulsar_broker, "POST", f"namespaces/public/{namespace}/retention", nothing)
    waited_for(lambda: admin.topics(soon())[0].retention_seconds == 0, "the policy")
    admin.create_topic("given", 1, soon(), retention_seconds=3600)
    assert "retention of 0" not in caplog.text
    admin.create_topic("dropped", 1, soon())
    assert "topic 'dropped' has a retention of 0" in caplog.text


def test_the_doctor_tells_of_messages_that_expire_on_single_topics(pulsar_broker, cluster, admin, client, namespace):
    admin.create_topic("mine", 1, soon())
    cluster.topics.internal("_txnbridge-log-mine", soon())
    for topic, seconds in (("mine", 60), ("_txnbridge-log-mine", 70)):
        ask(pulsar_broker, "POST", f"persistent/public/{namespace}/{topic}/messageTTL?messageTTL={seconds}")
        (found,) = waited_for(lambda topic=topic: advice(admin, topic), "the policy")
        assert found.level == ("warning" if topic == "mine" else "problem")
        assert f"after {seconds} s" in found.text and "remove-message-ttl" in found.remedy


def test_the_doctor_tells_which_of_our_topics_lost_their_subscription(pulsar_broker, open_bridge, client, namespace):
    url, id = pulsar_broker.url.replace("/default", f"/{namespace}"), writing_kit.unique("owner")
    with open_bridge(url, transactional_id=id) as bridge:
        topic = writing_kit.new_topic(bridge)
        with bridge.transaction() as txn:
            txn.send(topic, b"x")
        names = {f"_txnbridge-fence-{id}", f"_txnbridge-marker-{id}.0"}
        assert not names & {each.subject for each in bridge.admin.doctor()}
        for name in names:
            ask(pulsar_broker, "DELETE", f"persistent/public/{namespace}/{name}/subscription/txnbridge?force=true")
        found = {each.subject: each for each in bridge.admin.doctor()}
        for name in names:
            assert found[name].level == "problem" and "create-subscription" in found[name].remedy


def test_the_doctor_tells_what_is_prepared_and_soon_aborted(pulsar_broker, open_bridge, client, namespace, with_timing):
    url = pulsar_broker.url.replace("/default", f"/{namespace}")
    bridge = open_bridge(url)
    topic = writing_kit.new_topic(bridge)
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"x")
    subject = f"transaction {txn.id}"
    assert subject not in {each.subject for each in bridge.admin.doctor()}
    with with_timing(expiry_warning_share=1):
        found = {each.subject: each for each in open_bridge(url).admin.doctor()}
    assert found[subject].level == "problem" and "is prepared, and the broker aborts it in" in found[subject].text
    assert bridge.commit(str(txn.token)) is Outcome.COMMITTED


def test_an_error_says_that_a_deleted_subscription_hides_the_transactions(pulsar_broker, admin, client, namespace):
    topic = full("read", namespace)
    client.subscribe(topic, "group", timeout=SOON).close(SOON)
    txn = begin(client, group=(topic, "group"))
    ask(pulsar_broker, "DELETE", f"persistent/public/{namespace}/read/subscription/group")
    with pytest.raises(BrokerUnavailable, match="names a subscription that was deleted"):
        admin.transactions(soon())
    assert [each.level for each in advice(admin, "open transactions")] == ["problem"]
    client.transactions.end(txn, False, SOON)
    assert not advice(admin, "open transactions")


def of_transactions(bridge):
    """Return the doctor's advice on transactions, by their names."""
    return {each.subject.removeprefix("transaction "): each for each in bridge.admin.doctor()}


def test_the_doctor_tells_what_a_killed_process_left_open_or_prepared_and_what_that_holds_back(
    pulsar_broker, open_bridge, client, namespace, with_timing
):
    url = pulsar_broker.url.replace("/default", f"/{namespace}")
    bridge = open_bridge(url)
    with with_timing(long_open_seconds=0):
        hasty = open_bridge(url)
    topic, id = writing_kit.new_topic(bridge), writing_kit.unique("owner")
    with Child(prepare_half, url, pulsar_broker.admin_url, id, topic) as child:
        whole, half = child.told()
        child.kill()
    place = f"persistent://public/{namespace}/{topic}-partition-0"
    assert writing_kit.read_all(client, place, patience=1) is None
    assert not [each for each in bridge.admin.doctor() if each.subject.startswith("transaction")]  # not for long yet
    found = of_transactions(hasty)
    for name, state in ((whole, "prepared"), (half, "open")):
        assert found[name].level == "warning"
        said = rf"of {id}\.p[01] has been {state} for \d+ s and holds back all readers of {topic}"
        assert re.fullmatch(said, found[name].text)
        assert "transactions commit (or abort) " in found[name].remedy
    assert bridge.admin.abort(half) is Outcome.ABORTED
    found = of_transactions(hasty)
    assert whole in found and half not in found
    assert bridge.admin.commit(whole) is Outcome.COMMITTED
    assert whole not in of_transactions(hasty)
    assert writing_kit.read_all(client, place) == [b"whole"]


def test_the_doctor_tells_what_an_older_open_transaction_puts_at_risk(pulsar_broker, open_bridge, client, namespace):
    writing_kit.end_all(pulsar_broker)
    url, id = pulsar_broker.url.replace("/default", f"/{namespace}"), writing_kit.unique("owner")
    older = open_bridge(url, transactional_id=id)
    topic = writing_kit.new_topic(older)
    oldest = client.transactions.begin(60_000, SOON, 0)
    txn = older.transaction()
    txn.send(topic, b"never")
    number = writing_kit.flush(txn)
    newer = open_bridge(url, transactional_id=id)

    def told():
        return [each for each in newer.admin.doctor() if each.subject == f"transaction {txn.id}"]

    (found,) = told()
    assert found.level == "warning" and f"would hold back all readers of {topic}" in found.text
    assert f"transaction {oldest}" in found.text and str(oldest) in found.remedy
    assert number.most == oldest.most and number > oldest
    client.transactions.end(oldest, False, SOON)
    assert not told()
    with pytest.raises(Fenced):
        txn.commit()


def send_late(client, topic, txn, value=b"late"):
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    send_for_certain(producer, batch_of(value), txn)  # also where its topic was unloaded a moment ago
    settle(producer)
    producer.close(SOON)


def held(admin):
    """Return the doctor's advice on topics that are held back, by their names."""
    return {each.subject: each for each in admin.check(soon()) if "no coordinator knows" in each.text}


def test_committed_messages_stay_when_a_topic_held_back_by_a_late_message_is_repaired(admin, client, namespace):
    topic, other = full("held", namespace), full("other", namespace)
    txn, _ = open_with(client, topic, b"early")
    assert not held(admin)  # its coordinator knows it
    client.transactions.end(txn, True, SOON)
    for each in (topic, other):
        send_late(client, each, txn)
    send_late(client, topic, None, b"plain")
    found = held(admin)
    assert set(found) == {topic, other}
    assert found[topic].level == "problem" and f"transactions repair {txn} --yes --reason TEXT" in found[topic].remedy
    assert admin.repair(str(txn), soon()).startswith(f"committed {txn} on held, other: its commit marker is on held")
    assert not held(admin)
    assert everything(client, topic) == [b"early", b"late", b"plain"]
    later, _ = open_with(client, topic, b"later")  # which would sweep away what is still open
    client.transactions.end(later, True, SOON)
    assert everything(client, topic) == [b"early", b"late", b"plain", b"later"]
    with pytest.raises(NotFound, match=str(txn)):
        admin.repair(str(txn), soon())


def test_a_repair_commits_a_committed_transaction_on_a_topic_where_it_was_not_registered(admin, client, namespace):
    registered, missed = full("registered", namespace), full("missed", namespace)
    txn, _ = open_with(client, registered, b"1")
    send_late(client, missed, txn, b"2")
    client.transactions.end(txn, True, SOON)
    send_late(client, missed, None, b"plain")
    assert set(held(admin)) == {missed}
    done = admin.repair(str(txn), soon())
    assert done.startswith(f"committed {txn} on missed: a message of it can be read on registered")
    assert everything(client, missed) == [b"2", b"plain"]


def test_a_repair_commits_a_transaction_whose_only_message_came_after_its_commit(admin, client, namespace):
    topic = full("late", namespace)
    send_late(client, topic, None, b"before")
    txn = begin(client, topic)
    client.transactions.end(txn, True, SOON)
    send_late(client, topic, None, b"between")
    send_late(client, topic, txn)
    assert set(held(admin)) == {topic}
    assert admin.repair(str(txn), soon()).startswith(f"committed {txn} on late: its commit marker is on")
    assert everything(client, topic) == [b"before", b"between", b"late"]


ORPHANS = ["aborted", "never begun", "of no coordinator"]


def orphan(client, topic, kind):
    """A transaction that holds back a topic, and of which nothing tells how it ended."""
    txn = TxnId(7, 1) if kind == "of no coordinator" else begin(client, topic)
    if kind != "of no coordinator":
        client.transactions.end(txn, False, SOON)
    if kind == "never begun":
        txn = TxnId(txn.most, txn.least + 1_000_000)
    send_late(client, topic, txn)
    send_late(client, topic, None, b"plain")
    return txn


@pytest.mark.parametrize("kind", ORPHANS)
def test_a_transaction_without_proof_of_a_commit_is_aborted_only_on_request(admin, client, namespace, kind):
    topic = full("held", namespace)
    admin.create_topic("empty", 1, soon())
    txn = orphan(client, topic, kind)
    with pytest.raises(InvalidState, match=f"transactions abort {txn} --yes"):
        admin.repair(str(txn), soon())
    assert set(held(admin)) == {topic}
    assert admin.end(str(txn), Decision.ABORT, soon()) is Outcome.ABORTED
    assert not held(admin)
    assert everything(client, topic) == [b"plain"]


def test_a_transaction_without_proof_of_a_commit_is_committed_on_request(admin, client, namespace):
    topic = full("held", namespace)
    txn = orphan(client, topic, "never begun")
    assert admin.end(str(txn), Decision.COMMIT, soon()) is Outcome.COMMITTED
    assert everything(client, topic) == [b"late", b"plain"]
    with pytest.raises(NotFound, match=str(txn)):
        admin.end(str(txn), Decision.ABORT, soon())


def test_an_abort_of_a_committed_transaction_answers_that_it_is_committed(admin, client, namespace):
    registered, missed = full("registered", namespace), full("missed", namespace)
    txn, _ = open_with(client, registered, b"1")
    send_late(client, missed, txn, b"2")
    client.transactions.end(txn, True, SOON)
    assert admin.end(str(txn), Decision.ABORT, soon()) is Outcome.COMMITTED
    assert everything(client, missed) == [b"2"]


@pytest.mark.parametrize(("hours", "found"), [(-4, False), (0, True), (4, False)])
def test_a_repair_reads_the_messages_from_about_the_time_of_its_transaction(cluster, client, namespace, hours, found):
    """No message is waited for where none came since."""
    topic = full("idle", namespace)
    send_late(client, topic, None, b"1")
    txn, _ = open_with(client, topic, b"2")
    client.transactions.end(txn, True, SOON)
    about = int((time.time() + hours * 3600) * 1000)
    assert broker_evidence._can_be_read(cluster, topic, txn, about, soon()) is found


def test_the_late_write_canary_is_never_reported_as_held_back(pulsar_broker, admin, open_bridge, client, namespace):
    bridge = open_bridge(pulsar_broker.url.replace("/default", f"/{namespace}"))
    older = begin(client, full("older", namespace))  # as long as it is open, late messages are not refused
    with bridge.transaction() as txn:
        txn.send(writing_kit.new_topic(bridge), b"1")
        writing_kit.flush(txn)
        ended = writing_kit.announced(bridge)
    assert not refuse_late_writes(writing_kit.cluster_of(bridge), ended, soon())
    assert not held(admin)
    with pytest.raises(NotFound):
        admin.repair(str(ended.txn), soon())
    client.transactions.end(older, False, SOON)


def test_a_repair_does_not_touch_a_transaction_that_its_coordinator_knows(admin, client, namespace):
    topic = full("open", namespace)
    txn, _ = open_with(client, topic, b"1")
    with pytest.raises(InvalidState, match=f"transactions abort {txn}"):
        admin.repair(str(txn), soon())
    client.transactions.end(txn, True, SOON)
    assert everything(client, topic) == [b"1"]


def test_a_repair_wants_the_number_of_a_transaction_that_holds_something_back(admin, without_rest):
    with pytest.raises(InvalidOption, match="0:15"):
        admin.repair("billing/1/2", soon())
    with pytest.raises(NotFound, match="0:99999999"):
        admin.repair("0:99999999", soon())
    with pytest.raises(NotSupported, match="admin_url"):
        without_rest.repair("0:1", soon())


def test_a_held_back_topic_is_found_also_where_a_new_ledger_begins(pulsar_broker, admin, client, namespace):
    topic = full("rolled", namespace)
    txn, _ = open_with(client, topic, b"1")
    client.transactions.end(txn, True, SOON)
    ask(pulsar_broker, "PUT", f"persistent/public/{namespace}/rolled/unload")
    send_late(client, topic, txn)
    assert set(held(admin)) == {topic}
    assert admin.repair(str(txn), soon()).startswith("committed")
    assert everything(client, topic) == [b"1", b"late"]
