"""Tests of an administrator and of the doctor on live brokers: what they list, end, repair and report."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.brokers.plugin import StartKafka
from txnbridge_conformance.observing import seen, send, values
from txnbridge_kafka.admin.admin import KafkaAdmin, owner_of
from txnbridge_kafka.client.librdkafka import result_of
from txnbridge_kafka.client.protocol_types import TransactionDescription
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.decision_log import KafkaDecisionLog
from txnbridge_kafka.outcome import hanging_transactions
from txnbridge_kafka.outcome import transaction_state_log as state_log
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.settings.security import Access
from txnbridge_kafka.topics import KEEP_ALL

import txnbridge
from tests.failing import answer_calls, on_call
from tests.in_time import takes, within
from tests.kafka.kit import (
    FORGETFUL,
    LONG,
    Server,
    bootstrap_of,
    plain_admin,
    plain_producer,
    right,
    silent,
    stand_still,
    topics_of,
    without_epoch_bumps,
    write,
)
from tests.keeping import keeping
from txnbridge import Bridge, Outcome, errors
from txnbridge._base.events import Emitter
from txnbridge.spi import Advice, Context, Deadline, Decision, Ledger, OpenTransaction

_numbers = count(1)

Connect = Callable[..., Bridge]


class Administrator(KafkaAdmin):
    """An administrator with its cluster, for requests of the test's own."""

    def __init__(self, cluster: KafkaCluster, context: Context) -> None:
        super().__init__(cluster, context)
        self.cluster = cluster
        self.requests = cluster.requests


MakeAdmin = Callable[..., Administrator]


@pytest.fixture
def connect(kafka_broker: brokers.Broker) -> Iterator[Connect]:
    yield from keeping(lambda broker=kafka_broker, **options: txnbridge.connect(broker.url, **options))


@pytest.fixture
def bridge(connect: Connect, owner: str) -> Bridge:
    return connect(transactional_id=owner, create_topics=1)


@pytest.fixture
def topic(bridge: Bridge, unique: Callable[[str], str]) -> str:
    name = unique("topic")
    bridge.admin.create_topic(name, 2)
    return name


def settings_of(broker: Server, **changes: Any) -> KafkaSettings:
    bootstrap = bootstrap_of(broker)
    client = {"bootstrap.servers": bootstrap, "allow.auto.create.topics": "false"}
    return replace(KafkaSettings(bootstrap, client, Access(), LONG, None, "tests", 0), **changes)


def no_ledger(application: str, id: str) -> Ledger:
    """Return an empty ledger, for transactions that other tests have left open on the same broker."""
    ledger = create_autospec(Ledger, instance=True)
    ledger.entries.return_value = []
    return cast(Ledger, ledger)


@pytest.fixture
def make_admin(kafka_broker: brokers.Broker) -> Iterator[MakeAdmin]:
    """An administrator without a bridge, and so without decision logs."""
    opened: list[Requests] = []

    def make(broker: brokers.Broker | faults.Proxy = kafka_broker, **changes: Any) -> Administrator:
        settings = settings_of(broker, **changes)
        opened.append(Requests(settings))
        context = Context("tests", Emitter("tests", []), "tests", LONG, None, 0, ledger=no_ledger)
        return Administrator(KafkaCluster(settings, opened[-1], topics_of(settings), context.events), context)

    yield make
    for requests in opened:
        requests.close()


def make_topic(broker: brokers.Broker, name: str) -> str:
    topics_of(settings_of(broker)).create_internal_topic(name, Deadline(LONG))
    return name


def commit_one(broker: brokers.Broker, topic: str, value: bytes) -> None:
    producer = plain_producer(broker, f"admin-single-{next(_numbers)}")
    write(producer, topic, value)
    producer.commit_transaction(LONG)


def visible(broker: brokers.Broker, topic: str) -> list[bytes | None]:
    """Return the values that readers of committed messages see in partition 0, up to where they have to wait."""
    settings = {"bootstrap.servers": bootstrap_of(broker), "group.id": "admin-tests", "enable.partition.eof": True}
    reader = Consumer({**settings, "enable.auto.commit": False}, logger=silent)
    reader.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    try:
        while True:
            message = reader.poll(LONG)
            assert message is not None
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF
                return found
            found.append(message.value())
    finally:
        reader.close()


def listed(bridge: Bridge, id: str) -> list[OpenTransaction]:
    return [one for one in bridge.admin.transactions() if one.transactional_id == id]


def test_a_topic_is_created_with_its_retention(bridge, unique):
    name, plain = unique("kept"), unique("plain")
    assert bridge.admin.create_topic(name, 3, retention_seconds=90, retention_bytes=1 << 20) is True
    assert bridge.admin.create_topic(plain) is True
    found = bridge.admin.topic(name)
    assert (found.partitions, found.internal, found.retention_seconds, found.retention_bytes) == (3, False, 90, 1 << 20)
    assert bridge.admin.topic(plain).retention_bytes is None


def test_a_name_that_kafka_does_not_take_is_refused(make_admin):
    with pytest.raises(errors.InvalidOption, match="name is invalid"):
        make_admin().create_topic("no spaces", 1, Deadline(LONG))


def test_topics_of_ours_and_of_kafka_are_internal(bridge, topic, owner):
    with bridge.transaction() as txn:
        txn.send(topic, b"makes the internal ones")
    kinds = {found.name: found.internal for found in bridge.admin.topics(internal=True)}
    assert (kinds["__transaction_state"], kinds[f"_txnbridge-log-{owner}"], kinds[topic]) == (True, True, False)
    assert topic in [found.name for found in bridge.admin.topics()]
    assert "__transaction_state" not in [found.name for found in bridge.admin.topics()]


def test_a_topic_that_does_not_exist_cannot_be_deleted_or_grown(bridge, unique):
    missing = unique("missing")
    with pytest.raises(errors.NotFound, match=missing):
        bridge.admin.delete_topic(missing)
    with pytest.raises(errors.NotFound, match=missing):
        bridge.admin.grow_topic(missing, 3)


def test_partitions_become_more_and_never_fewer(bridge, topic):
    bridge.admin.grow_topic(topic, 5)
    bridge.admin.grow_topic(topic, 5)
    assert bridge.admin.topic(topic).partitions == 5
    with pytest.raises(errors.InvalidOption, match="cannot become fewer"):
        bridge.admin.grow_topic(topic, 2)


def test_a_topic_is_not_deleted_while_a_transaction_holds_messages_there(bridge, kafka_broker, topic, unique):
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    with pytest.raises(errors.InvalidState, match="in use"):
        bridge.admin.delete_topic(topic)
    bridge.commit(str(txn.token))
    id = unique("writer")
    producer = plain_producer(kafka_broker, id)
    write(producer, topic, b"open")
    with pytest.raises(errors.InvalidState, match=id):
        bridge.admin.delete_topic(topic)
    producer.commit_transaction(LONG)
    assert wait_until(lambda: not listed(bridge, id), LONG)
    bridge.admin.delete_topic(topic)
    assert wait_until(lambda: topic not in [found.name for found in bridge.admin.topics()], LONG)


def test_a_late_deletion_does_not_delete_a_topic_that_was_created_again(proxy, bridge, topic):
    hold = proxy.hold(requests="DeleteTopics")
    with txnbridge.connect(proxy.url) as through:
        deleting = threading.Thread(target=through.admin.delete_topic, args=(topic,))
        deleting.start()
        hold.wait()
        proxy.cut()
        deleting.join()
    bridge.admin.create_topic(topic)
    send(bridge, topic, b"new")
    hold.release()
    hold.answered()
    assert values(seen(bridge, topic)) == [b"new"]


def test_a_topic_is_deleted_once_what_was_just_committed_there_has_ended(bridge, topic, make_admin, monkeypatch):
    """A commit is told before the coordinator has finished it."""
    admin = make_admin()
    ending = TransactionDescription("writer.0", "PrepareCommit", 1, 0, 1, 1000, ((topic, 0),))
    answers = [[ending], [ending], []]
    monkeypatch.setattr(admin, "_unended", lambda deadline: answers.pop(0) if answers else [ending])
    admin.delete_topic(topic, Deadline(LONG))
    assert answers == []
    assert wait_until(lambda: topic not in [found.name for found in bridge.admin.topics()], LONG)

    with pytest.raises(errors.InvalidState, match="writer"):
        admin.delete_topic(topic, Deadline(0.1))


def test_a_broker_that_died_and_is_still_counted_does_not_hold_up_what_the_others_say(kafka_broker):
    topics = topics_of(settings_of(kafka_broker))
    with within(0):
        assert list(topics.broker_configs([99, 1], Deadline(100))) == ["1"]
    with pytest.raises(errors.DeadlineExceeded):
        topics.broker_configs([99], Deadline(0.5))


PASSWORD = "do-not-tell"


@pytest.fixture
def guarded(start_kafka: StartKafka) -> Iterator[tuple[brokers.Broker, faults.Proxy]]:
    """A broker that knows users by password at its proxy's listener; guest may do nothing there."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    broker = start_kafka(
        container=False,
        settings={
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXY:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.proxy.plain.sasl.jaas.config": f'{login} user_guest="{PASSWORD}";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
    )
    with faults.proxy(broker) as proxy:
        yield broker, proxy


def as_guest(proxy: faults.Proxy) -> dict[str, Any]:
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "guest", "sasl.password": PASSWORD}
    client = {"bootstrap.servers": bootstrap_of(proxy), "security.protocol": "SASL_PLAINTEXT", **login}
    return {"client": client, "access": Access(mechanism="PLAIN", username="guest", password=PASSWORD)}


def grant(broker: brokers.Broker, name: str, operations: list[str], kind: str = "topic") -> None:
    admin = plain_admin(broker)
    for done in admin.create_acls([right("guest", kind, name, each) for each in operations]).values():
        done.result(LONG)


def test_without_rights_the_error_says_what_to_create_and_grant_and_that_is_enough(guarded):
    broker, proxy = guarded
    settings = settings_of(proxy, **as_guest(proxy))
    name = "_txnbridge-log-guests"
    with pytest.raises(errors.AccessDenied) as told:
        topics_of(settings).create_internal_topic(name, Deadline(LONG))
    text = str(told.value)
    assert PASSWORD not in text
    create, acls, group = (line for line in text.splitlines() if line.startswith("  kafka-"))
    assert f"--create --topic {name} --partitions 1" in create
    config = dict(each.split("=", 1) for each in create.split(" --config ")[1:])
    assert KEEP_ALL.items() <= config.items()

    # What the two commands say, done by the administrator.
    assert topics_of(settings_of(broker)).create(name, 1, Deadline(LONG), config, 1)
    granted = [each.split(" ")[0] for each in acls.split(" --operation ")[1:]]
    grant(broker, name, [each.replace("Configs", "_configs").upper() for each in granted])
    assert "--operation Describe" in group
    grant(broker, group.split(" --group ")[1], ["DESCRIBE"], "group")

    log = KafkaDecisionLog(settings, "guests", Deadline(LONG), Emitter("tests", []), topics_of(settings))
    positions = [log.append(b"record", Deadline(LONG)) for _ in range(3)]
    assert [record for _, record in log.read(None, None, Deadline(LONG))] == [b"record"] * 3
    log.trim(positions[2], Deadline(LONG))
    assert log.begin(Deadline(LONG)) == positions[2]
    log.close()


def test_the_doctor_says_what_it_may_not_see(guarded, make_admin):
    broker, proxy = guarded
    commit_one(broker, make_topic(broker, "seen"), b"message")
    admin = make_admin(proxy, **as_guest(proxy))
    found = {(advice.level, advice.subject) for advice in admin.check(Deadline(LONG))}
    assert {("warning", "rights"), ("warning", "__transaction_state")} <= found
    grant(broker, "seen", ["DESCRIBE"])
    unread = [advice for advice in admin.check(Deadline(LONG)) if "may not read 1 " in advice.text]
    assert [advice.level for advice in unread] == ["warning"]
    grant(broker, "seen", ["READ"])
    assert not any("may not read" in advice.text for advice in admin.check(Deadline(LONG)))
    with pytest.raises(errors.AccessDenied):
        admin.end("somebodys.0", Decision.ABORT, Deadline(LONG))
    assert admin.transactions(Deadline(LONG)) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda admin, deadline: admin.create_topic("x", 1, deadline),
        lambda admin, deadline: admin.topics(deadline),
        lambda admin, deadline: admin.delete_topic("x", deadline),
        lambda admin, deadline: admin.grow_topic("x", 2, deadline),
        lambda admin, deadline: admin.transactions(deadline),
        lambda admin, deadline: admin.end("x.0", Decision.ABORT, deadline),
        lambda admin, deadline: admin.repair("x.0", deadline),
        lambda admin, deadline: admin.check(deadline),
    ],
    ids=["create", "topics", "delete", "grow", "transactions", "end", "repair", "check"],
)
def test_with_a_broker_that_stands_still_every_call_ends_by_its_deadline(kafka_broker, make_admin, call):
    admin = make_admin()
    stand_still(kafka_broker)
    try:
        takes(0.5, errors.BrokerUnavailable, lambda deadline: call(admin, deadline))
    finally:
        kafka_broker.resume()


def test_a_client_that_is_late_itself_is_an_error_of_ours():
    takes(0.2, errors.DeadlineExceeded, lambda deadline: result_of(Future(), "asking", deadline))


def test_the_owner_of_a_writers_id():
    assert [
        owner_of(id)
        for id in (
            *("a-1.a-1.p3", "a.0", "a.b.12", "a.p3", "a.0123456789abcdef.p3", "a.0123456789abcdef.3", "a.x", "a"),
            *("a.p", ".1"),
        )
    ] == ["a-1", "a", "a.b", "a", "a", "a.0123456789abcdef", "a.x", "a", "a.p", ".1"]


def test_a_prepared_transaction_of_a_bridge_without_an_id_is_listed_as_such(bridge, kafka_broker, topic):
    with txnbridge.connect(kafka_broker.url) as nameless, nameless.transaction(prepare=True) as txn:
        txn.send(topic, b"1")
    (found,) = [each for each in bridge.admin.transactions() if each.transaction == txn.id]
    assert (found.state, found.messages, str(found.token)) == ("prepared", 1, str(txn.token))
    assert bridge.admin.abort(txn.id, reason="a test says so") is Outcome.ABORTED


def test_an_open_transaction_is_listed_with_its_times_and_partitions(bridge, kafka_broker, topic, owner):
    producer = plain_producer(kafka_broker, f"{owner}.77", timeout_ms=50_000)
    assert listed(bridge, owner) == []
    write(producer, topic, b"open")
    (found,) = listed(bridge, owner)
    assert (found.transaction, found.state, found.messages, found.token) == (f"{owner}.77", "open", None, None)
    assert found.partitions == ((topic, 0),)
    assert found.since is not None and abs(found.since - time.time() * 1000) < 60_000
    assert found.expires_at == found.since + 50_000
    producer.commit_transaction(LONG)
    assert wait_until(lambda: listed(bridge, owner) == [], LONG)


def test_prepared_transactions_of_every_application_are_listed(connect, bridge, topic, unique):
    id, application = unique("other"), unique("application")
    other = connect(transactional_id=id, application=application)
    with other.transaction(prepare=True) as txn:
        txn.send(topic, b"theirs")
    (found,) = listed(bridge, id)
    assert (found.transaction, found.state, str(found.token)) == (txn.id, "prepared", str(txn.token))
    assert found.expires_at == txn.token.expires_at
    assert bridge.admin.commit(txn.id) is Outcome.COMMITTED
    assert other.abort(str(txn.token)) is Outcome.COMMITTED


@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_prepared_transaction_is_ended_by_its_writers_id_too_and_tells_the_truth_ever_after(bridge, topic, decision):
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    name = str(txn.token.how["id"])
    wanted = Outcome.COMMITTED if decision == "commit" else Outcome.ABORTED
    assert getattr(bridge.admin, decision)(name) is wanted
    assert bridge.admin.commit(name) is wanted
    assert bridge.admin.abort(name) is wanted
    assert bridge.abort(str(txn.token)) is wanted


def test_another_programs_transaction_is_listed_by_its_name_and_only_aborted(bridge, kafka_broker, topic, unique):
    id = unique("foreign")
    producer = plain_producer(kafka_broker, id)
    write(producer, topic, b"open")
    (found,) = listed(bridge, id)
    assert (found.transaction, found.state) == (id, "open")
    with pytest.raises(errors.InvalidState, match="only its writer can commit"):
        bridge.admin.commit(id)
    assert bridge.admin.abort(id) is Outcome.ABORTED
    with pytest.raises(KafkaException):
        producer.commit_transaction(LONG)
    commit_one(kafka_broker, topic, b"marker")
    assert wait_until(lambda: visible(kafka_broker, topic) == [b"marker"], LONG)


def test_an_unknown_or_ended_transaction_is_not_found(bridge, kafka_broker, topic, owner):
    for name in ("nobody", "nobody.0", "nobody.p0", "nobody/12/3"):
        with pytest.raises(errors.NotFound, match=name):
            bridge.admin.abort(name)
    producer = plain_producer(kafka_broker, f"{owner}.77")
    write(producer, topic, b"open")
    producer.commit_transaction(LONG)
    assert wait_until(lambda: listed(bridge, owner) == [], LONG)
    with pytest.raises(errors.NotFound, match="has ended"):
        bridge.admin.abort(f"{owner}.77")


def test_an_abort_that_comes_second_says_what_the_first_one_did(make_admin, kafka_broker, topic, unique, monkeypatch):
    """The writer commits after the abort has looked the transaction up and before it fences the writer."""
    admin, id = make_admin(), unique("racer")
    producer = plain_producer(kafka_broker, id)
    write(producer, topic, b"quick")
    on_call(monkeypatch, admin.requests, "fence", lambda *_: producer.commit_transaction(LONG))
    assert admin.end(id, Decision.ABORT, Deadline(LONG)) is Outcome.COMMITTED


def test_an_unreadable_log_hides_no_transaction_and_aborts_no_prepared_one(start_kafka, connect, kafka_broker, unique):
    broker = start_kafka()
    bridge = connect(broker, transactional_id="reader", create_topics=1)
    topics = topics_of(settings_of(broker))
    topics.create("data", 1, Deadline(LONG))
    topics.create("_txnbridge-log-odd", 2, Deadline(LONG))
    producer = plain_producer(broker, "odd.p0")
    write(producer, "data", b"perhaps prepared")
    with bridge.transaction(prepare=True) as txn:
        txn.send("data", b"prepared")
    assert {one.transaction: one.state for one in bridge.admin.transactions()} == {"odd.p0": "open", txn.id: "prepared"}
    with pytest.raises(errors.InvalidOption, match="_txnbridge-log-odd"):
        bridge.admin.abort("odd.p0")
    assert bridge.admin.abort(txn.id) is Outcome.ABORTED
    topics.delete("_txnbridge-log-odd", Deadline(LONG))
    assert wait_until(lambda: not topics.count("_txnbridge-log-odd", Deadline(LONG)), LONG)
    assert bridge.admin.abort("odd.p0") is Outcome.ABORTED


CARELESS = {"transaction.partition.verification.enable": "false"}


class Held:
    """A transaction that its coordinator calls ended, and that is open in a partition."""

    def __init__(self, broker: brokers.Broker, admin: Administrator, commit: bool) -> None:
        self.broker, self.admin = broker, admin
        self.id, self.topic = f"held-{next(_numbers)}.0", f"held-topic-{next(_numbers)}"
        admin.create_topic(self.topic, 1, Deadline(LONG))
        self.producer = plain_producer(broker, self.id)
        write(self.producer, self.topic, b"before")
        told = admin.requests.describe([self.id], Deadline(LONG))[self.id]
        # By the older request, which leaves the epoch as it is: the producer notices nothing and writes on.
        self.ended = admin.requests.end(self.id, told.pid, told.epoch, commit, Deadline(LONG))
        assert self.ended.code == 0
        wanted = "CompleteCommit" if commit else "CompleteAbort"
        assert wait_until(lambda: self.state() == wanted, LONG)
        self.producer.produce(self.topic, b"held", partition=0)
        assert self.producer.flush(LONG) == 0

    def state(self) -> str:
        return self.admin.requests.describe([self.id], Deadline(LONG))[self.id].state

    def visible(self) -> list[bytes | None]:
        return visible(self.broker, self.topic)


@pytest.fixture
def hold(unverified: brokers.Broker, make_admin: MakeAdmin, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Held]:
    without_epoch_bumps(monkeypatch)
    return lambda commit, broker=unverified: Held(broker, make_admin(broker), commit)


def advice_of(admin: Administrator, subject: str) -> list[Advice]:
    return [advice for advice in admin.check(Deadline(LONG)) if advice.subject == subject]


def problems(admin: Administrator, subject: str) -> list[Advice]:
    return [advice for advice in advice_of(admin, subject) if advice.level == "problem"]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_forgotten_markers_are_proven_told_and_written_as_the_coordinator_decided(hold, commit):
    one = hold(commit)
    commit_one(one.broker, one.topic, b"later")
    assert one.visible() == ([b"before"] if commit else [])  # and nothing of what came later
    (advice,) = problems(one.admin, f"transaction {one.id}")
    assert f"{one.topic}[0]" in advice.text
    assert advice.remedy.endswith(f"transactions repair {one.id} --yes --reason TEXT")
    word = "commit" if commit else "abort"
    said = one.admin.repair(one.id, Deadline(LONG))
    assert said == f"wrote the missing markers of {one.id}: {word} in {one.topic}[0]"
    kept = [b"before", b"held", b"later"] if commit else [b"later"]
    assert wait_until(lambda: one.visible() == kept, LONG)
    assert problems(one.admin, f"transaction {one.id}") == []
    assert "no missing markers" in one.admin.repair(one.id, Deadline(LONG))


@pytest.mark.full
def test_a_partition_that_has_heard_of_a_later_coordinator_takes_the_markers_too(unverified, hold, monkeypatch):
    first = hold(True)
    assert first.admin.repair(first.id, Deadline(LONG))
    unverified.restart()  # each start is a new term of the coordinator
    one = hold(True)
    (active,) = one.admin.requests.producers([(one.topic, 0)], Deadline(LONG))[one.topic, 0]
    assert active.coordinator_epoch > 0
    with monkeypatch.context() as unasked, pytest.raises(errors.BrokerUnavailable, match="52"):
        unasked.setattr(one.admin.requests, "producers", lambda *_: {})
        one.admin.requests.write_markers(active.pid, active.epoch, True, [(one.topic, 0)], Deadline(LONG))
    one.admin.repair(one.id, Deadline(LONG))
    assert wait_until(lambda: one.visible() == [b"before", b"held"], LONG)


def test_a_repair_after_which_the_writer_goes_on(hold):
    one = hold(True)
    one.admin.repair(one.id, Deadline(LONG))
    again = plain_producer(one.broker, one.id)
    write(again, one.topic, b"again")
    again.commit_transaction(LONG)
    assert wait_until(lambda: one.visible() == [b"before", b"held", b"again"], LONG)


def test_a_transaction_that_has_not_ended_is_not_repaired(bridge, kafka_broker, topic, owner):
    producer = plain_producer(kafka_broker, f"{owner}.77")
    write(producer, topic, b"open")
    with pytest.raises(errors.InvalidState, match="has not ended"):
        bridge.admin.repair(f"{owner}.77")
    producer.commit_transaction(LONG)
    with pytest.raises(errors.NotFound):
        bridge.admin.repair("nobody.0")


def test_a_writer_that_is_at_work_is_no_proof(hold, monkeypatch):
    """Between the two looks at the coordinator it begins its next transaction: that one's messages are not touched."""
    one = hold(True)
    requests = one.admin.requests
    on_call(monkeypatch, requests, "producers", lambda *_, **__: begin_again(one, requests.describe))
    with pytest.raises(errors.InvalidState, match="in use: stop its writer"):
        one.admin.repair(one.id, Deadline(LONG))
    monkeypatch.undo()
    assert one.visible() == [b"before"]


def begin_again(one: Held, describe: Callable[..., Any]) -> None:
    """Begin a transaction as the writer would: with the same epoch, and a new group in it."""
    told = describe([one.id], Deadline(LONG))[one.id]
    one.admin.requests.add_offsets(one.id, told.pid, told.epoch, "some-group", Deadline(LONG))


def end_another(one: Held, commit: bool, again: bool) -> None:
    """End a later transaction of the id, which has touched other partitions, perhaps after a new opening."""
    requests = one.admin.requests
    if again:
        requests.fence(one.id, 60_000, Deadline(LONG))
    begin_again(one, requests.describe)
    told = requests.describe([one.id], Deadline(LONG))[one.id]
    assert requests.end(one.id, told.pid, told.epoch, commit, Deadline(LONG)).code == 0
    assert wait_until(lambda: one.state() == ("CompleteCommit" if commit else "CompleteAbort"), LONG)


def test_the_doctor_takes_no_living_writer_for_a_forgotten_one(hold, monkeypatch):
    one = hold(True)
    describe = one.admin.requests.describe
    looks = count(1)

    def meanwhile(*args: Any) -> Any:
        if next(looks) == 2:
            begin_again(one, describe)
        return describe(*args)

    survey = hanging_transactions.survey
    assert one.id in [each.description.id for each in survey(one.admin.cluster, Deadline(LONG)).hanging]
    monkeypatch.setattr(one.admin.requests, "describe", meanwhile)
    assert one.id not in [each.description.id for each in survey(one.admin.cluster, Deadline(LONG)).hanging]
    assert next(looks) == 3


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_repair_knows_the_outcome_of_a_transaction_whose_id_was_opened_again(hold, commit):
    one = hold(commit)
    one.admin.requests.fence(one.id, 60_000, Deadline(LONG))
    assert one.state() == "Empty"
    assert len(problems(one.admin, f"transaction {one.id}")) == 1
    one.admin.repair(one.id, Deadline(LONG))
    commit_one(one.broker, one.topic, b"later")
    kept = [b"before", b"held", b"later"] if commit else [b"later"]
    assert wait_until(lambda: one.visible() == kept, LONG)


@pytest.mark.parametrize("again", [False, True], ids=["same-epoch", "opened-again"])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_outcome_of_a_later_transaction_of_the_same_id_elsewhere_decides_no_repair(hold, commit, again):
    one = hold(commit)
    end_another(one, not commit, again)
    word = "commit" if commit else "abort"
    assert one.admin.repair(one.id, Deadline(LONG)).endswith(f": {word} in {one.topic}[0]")
    commit_one(one.broker, one.topic, b"later")
    kept = [b"before", b"held", b"later"] if commit else [b"later"]
    assert wait_until(lambda: one.visible() == kept, LONG)


def test_a_repair_does_not_guess_an_outcome_that_the_coordinators_log_no_longer_has(hold, monkeypatch):
    one = hold(True)
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", [])  # compaction leaves the last state only
    with pytest.raises(errors.InvalidState, match="no longer in its coordinator's log"):
        one.admin.repair(one.id, Deadline(LONG))
    assert one.visible() == [b"before"]


def check_endings(broker: brokers.Broker, admin: Administrator, unique: Callable[[str], str], step: int) -> None:
    """One commit and one abort in several topics, and what the log has of them; `step`: by how much each end raises."""
    id, topics = unique("history"), [unique("history-ä".encode().hex()) for _ in range(3)]
    for name in topics:
        admin.create_topic(name, 2, Deadline(LONG))
    producer = plain_producer(broker, id)
    producer.begin_transaction()
    for name in topics:
        producer.produce(name, b"x", partition=1)
    assert producer.flush(LONG) == 0
    told = admin.requests.describe([id], Deadline(LONG))[id]
    admin.requests.end(id, told.pid, told.epoch, True, Deadline(LONG))
    assert wait_until(partial(is_complete, admin, id), LONG)
    again = plain_producer(broker, id)
    write(again, topics[0], b"x")
    opened = admin.requests.describe([id], Deadline(LONG))[id]
    again.abort_transaction(LONG)
    committed, aborted = state_log.recorded_decisions(admin.cluster, id, Deadline(LONG))
    assert committed == state_log.RecordedDecision(
        told.pid, told.epoch + step, True, frozenset((name, 1) for name in topics)
    )
    assert aborted == state_log.RecordedDecision(opened.pid, opened.epoch, False, frozenset([(topics[0], 0)]))
    assert state_log.recorded_decisions(admin.cluster, unique("nobody"), Deadline(LONG)) == []


def test_the_coordinators_log_tells_every_decision_and_its_partitions(kafka_broker, make_admin, unique):
    check_endings(kafka_broker, make_admin(), unique, 1)


@pytest.mark.full
def test_the_older_log_of_kafka_3_9_tells_every_decision_and_its_partitions(start_kafka, make_admin, unique):
    broker = start_kafka(version="3.9.2")
    check_endings(broker, make_admin(broker), unique, 0)


@pytest.mark.parametrize(
    "record",
    [
        "0000 0000000000000007 0003 0000ea60 02 00000001 0001 74 00000002 00000000 00000001"
        " 0000000000000009 0000000000000008",
        # version 1: lengths are varints, and each structure ends with its tagged fields
        "0001 0000000000000007 0003 0000ea60 02 02 02 74 03 00000000 00000001 00"
        " 0000000000000009 0000000000000008 01 00 08 0000000000000006",
    ],
)
def test_a_record_of_the_coordinators_log_is_read_in_both_versions(record):
    read = state_log.parsed_state_record(bytes.fromhex(record))
    assert read == state_log.StateRecord(7, 3, 2, frozenset([("t", 0), ("t", 1)]), 8)


def test_a_record_of_another_form_is_not_guessed_at():
    with pytest.raises(errors.StorageFailed, match="__transaction_state"):
        state_log.parsed_state_record(b"\0\1" + bytes(14) + b"\2" + b"\xff" * 4)


@pytest.mark.full
def test_an_open_transaction_of_a_producer_that_nobody_knows_is_a_problem(hold, start_kafka):
    one = hold(True, start_kafka(container=False, settings={**CARELESS, **FORGETFUL}))
    pid = one.ended.pid
    assert wait_until(lambda: not one.admin.requests.describe([one.id], Deadline(LONG)), LONG)
    (advice,) = problems(one.admin, f"producer {pid}")
    assert f"{one.topic}[0]" in advice.text
    with pytest.raises(errors.NotFound):
        one.admin.repair(one.id, Deadline(LONG))


# How often a broker is killed right after a commit: about every second time it forgets the markers.
ATTEMPTS = 12


def forget_markers(broker: brokers.Broker, admin: Administrator) -> tuple[str, str] | None:
    """Kill a broker right after a commit, until it comes back without the markers: the writer's id and the topic."""
    for attempt in range(ATTEMPTS):
        id, topic = f"killed-{attempt}.0", f"killed-topic-{attempt}"
        admin.create_topic(topic, 1, Deadline(LONG))
        producer = plain_producer(broker, id)
        write(producer, topic, *(b"%d" % number for number in range(300)))
        producer.commit_transaction(LONG)
        broker.restart()
        assert admin.requests.describe([id], Deadline(LONG))[id].state in ("PrepareCommit", "CompleteCommit")
        assert wait_until(partial(is_complete, admin, id), LONG)
        if problems(admin, f"transaction {id}"):
            return id, topic
    return None


def is_complete(admin: Administrator, id: str) -> bool:
    return admin.requests.describe([id], Deadline(LONG))[id].state == "CompleteCommit"


@pytest.mark.full
def test_a_commit_that_a_killed_broker_forgot_is_found_and_mended_and_nothing_is_lost(start_kafka, make_admin):
    broker = start_kafka(container=False)
    admin = make_admin(broker)
    found = forget_markers(broker, admin)
    if found is None:
        pytest.skip(f"the broker forgot no markers in {ATTEMPTS} kills")
    id, topic = found
    assert visible(broker, topic) == []
    assert admin.requests.describe([id], Deadline(LONG))[id].state == "CompleteCommit"
    assert admin.transactions(Deadline(LONG)) == []
    assert admin.repair(id, Deadline(LONG)).endswith(f"{id}: commit in {topic}[0]")
    assert wait_until(lambda: visible(broker, topic) == [b"%d" % number for number in range(300)], LONG)
    assert problems(admin, f"transaction {id}") == []
    # The id goes on, and an abort of its next transaction takes nothing of it away.
    producer = plain_producer(broker, id)
    write(producer, topic, b"aborted")
    producer.abort_transaction(LONG)
    commit_one(broker, topic, b"marker")
    assert wait_until(lambda: visible(broker, topic)[-1] == b"marker", LONG)
    assert len(visible(broker, topic)) == 301


def test_topics_with_one_copy_are_a_warning(make_admin, bridge, topic, owner):
    with bridge.transaction() as txn:
        txn.send(topic, b"makes the internal ones")
    for name in ("__transaction_state", f"_txnbridge-log-{owner}"):
        (advice,) = advice_of(make_admin(), name)
        assert (advice.level, advice.text.startswith("has 1 copy")) == ("warning", True)
        assert advice.remedy


def test_a_leader_that_may_lack_records_is_a_warning(make_admin, unique):
    name = f"_txnbridge-log-{unique('unclean')}"
    admin = make_admin()
    topics_of(admin.cluster.settings).create(name, 1, Deadline(LONG), {"unclean.leader.election.enable": "true"})
    assert any("may become leader" in advice.text for advice in advice_of(admin, name))
    admin.delete_topic(name, Deadline(LONG))


def test_the_clusters_transaction_version_is_told(make_admin, start_kafka):
    (newest,) = advice_of(make_admin(), "transaction.version")
    assert newest.level == "ok"
    older = start_kafka(container=False, transaction_version=1)
    (advice,) = advice_of(make_admin(older), "transaction.version")
    assert (advice.level, "upgrade" in advice.remedy) == ("warning", True)


def test_a_time_that_the_brokers_do_not_allow_is_a_problem(make_admin):
    assert advice_of(make_admin(), "broker 1") == []
    (advice,) = advice_of(make_admin(timeout=600.0, hold=600.0), "broker 1")
    assert advice.level == "problem"
    assert "900 s" in advice.text and "1200 s" in advice.text


def test_transactions_open_for_long_are_a_warning_and_fresh_ones_are_not(make_admin, kafka_broker, topic, unique):
    id = unique("slow")
    producer = plain_producer(kafka_broker, id)
    write(producer, topic, b"open")
    subject = f"transaction {id}"
    assert advice_of(make_admin(), subject) == []
    # For a bridge whose transactions take no time, this one is old already.
    assert wait_until(lambda: bool(advice_of(make_admin(timeout=0.5), subject)), LONG)
    (advice,) = advice_of(make_admin(timeout=0.5), subject)
    assert (advice.level, advice.remedy) == ("warning", f"txnbridge transactions abort {id} --yes --reason TEXT")
    producer.abort_transaction(LONG)


def test_a_prepared_transaction_is_a_warning_with_the_command_that_ends_it(bridge, topic):
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    (advice,) = [one for one in bridge.admin.doctor() if one.subject == f"transaction {txn.id}"]
    remedy = f"txnbridge transactions commit (or abort) {txn.id} --yes --reason TEXT"
    assert (advice.level, advice.remedy) == ("warning", remedy)
    bridge.abort(str(txn.token))


def test_the_doctor_says_that_all_markers_are_written(make_admin, bridge, topic):
    with bridge.transaction() as txn:
        txn.send(topic, b"well")
    assert wait_until(lambda: [one.level for one in advice_of(make_admin(), "markers")] == ["ok"], LONG)


@pytest.mark.full
def test_on_three_nodes_topics_are_safe_and_known_everywhere(start_kafka, make_admin, connect):
    broker = start_kafka(nodes=3)
    admin = make_admin(broker)
    for number in range(5):
        assert admin.create_topic(f"everywhere-{number}", 6, Deadline(LONG))
        assert admin.requests.partitions_everywhere(f"everywhere-{number}", Deadline(LONG)) == 6
    bridge = connect(broker, transactional_id="three", create_topics=3)
    with bridge.transaction() as txn:
        txn.send("everywhere-0", b"makes the internal ones")
    for name in ("__transaction_state", "_txnbridge-log-three"):
        assert [advice.level for advice in advice_of(admin, name)] == ["ok"]
    assert [advice.level for advice in admin.check(Deadline(LONG))] == ["ok"] * len(admin.check(Deadline(LONG)))
