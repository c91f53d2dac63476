"""The rights that docs/kafka.md lists: with them everything works, without any one what it is for is denied."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance.brokers._broker import HOST, free_ports, wait_until
from txnbridge_conformance.brokers.plugin import kafka_or_skip
from txnbridge_conformance.observing import eventually, seen, values
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.decision_log import KafkaDecisionLog
from txnbridge_kafka.outcome.transaction_state_log import recorded_decisions
from txnbridge_kafka.write.owner import KafkaOwner

import txnbridge
from tests.failing import EACH, fail_call
from tests.kafka.kit import LONG, describe, flush, kafka_names, plain_admin, right, topics_of
from tests.kafka.test_settings import PLAIN, read
from txnbridge import Bridge, Outcome, TokenState
from txnbridge._base.connection import Connection
from txnbridge.errors import AccessDenied, Fenced, NotSupported, OutcomeUnknown, TransactionAborted, TxnBridgeError
from txnbridge.spi import Capability, Deadline, Emitter, Level, Url
from txnbridge.testing import next_commit

pytestmark = pytest.mark.timeout(600)  # the first start of a version fetches it

SHORT = 3.0
USERS = 80
LISTENERS = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", "SASL": "SASL_PLAINTEXT"}
PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"


@dataclass(frozen=True)
class Right:
    """A line of the page: `name` is a name of one user in these tests, `shown` is the page's text for that name."""

    kind: str
    name: str
    operations: str
    shown: str
    prefixed: bool = False

    def binding(self, user: str, operation: str) -> Any:
        pattern = "PREFIXED" if self.prefixed else "LITERAL"
        return right(user, self.kind, self.name.format(user=user), operation, pattern)


OWNED = Right("transactional_id", "{user}.", "WRITE", "transactional ids that begin with `ID.` | Write", prefixed=True)
ANONYMOUS = Right("transactional_id", "anonymous-", "WRITE", "that begin with `anonymous-` | Write", prefixed=True)
SEND = Right("topic", "{user}-in", "WRITE", "the topic | Write")
MAKE = Right("topic", "{user}-new", "CREATE WRITE", "the topic | Create")
CONSUME = Right("topic", "{user}-in", "READ", "the topic | Read")
GROUP = Right("group", "{user}-group", "READ", "the group | Read")
# The client asks for the coordinator of a group that it never joins. Whether it says before the first message that it
# may not is a race, so that only what needs it is tested, and not its absence.
LOOK = Right("group", "txnbridge-", "DESCRIBE", "groups that begin with `txnbridge-` | Describe", prefixed=True)
EMPTY = Right("group", "_txnbridge-empty", "READ", "group `_txnbridge-empty` | Read")
LOG = Right("topic", "_txnbridge-log-{user}", "CREATE READ WRITE", "topic `_txnbridge-log-APP` | Create, Read, Write")
TRIM = Right("topic", "_txnbridge-log-{user}", "DELETE", "topic `_txnbridge-log-APP` | Delete")
REPAIR = Right("broker", "kafka-cluster", "ALTER", "the cluster | Alter")
HISTORY = Right("topic", "__transaction_state", "READ", "topic `__transaction_state` | Read")

ALL = (OWNED, ANONYMOUS, SEND, MAKE, CONSUME, GROUP, LOOK, EMPTY, LOG, TRIM, REPAIR, HISTORY)


@dataclass(frozen=True)
class User:
    """A user with some rights, and with topics of their own."""

    name: str
    port: int

    @property
    def told(self) -> dict[str, str]:
        login = {"sasl.username": self.name, "sasl.password": self.name}
        return {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", **login}

    def connect(self, **options: Any) -> txnbridge.Bridge:
        url = f"kafka://{HOST}:{self.port}"
        return txnbridge.connect(url, kafka=self.told, application=self.name, timeout=LONG, **options)

    def settings(self) -> Any:
        return read(self.told, Url("kafka", ((HOST, self.port),), "", ""))

    # What a right is for.

    def write_as_owner(self) -> None:
        with self.connect(transactional_id=self.name) as bridge:
            with bridge.transaction() as txn:
                txn.send(f"{self.name}-in", b"1")
            assert txn.outcome is Outcome.COMMITTED

    def write(self) -> None:
        with self.connect() as bridge, bridge.transaction() as txn:
            txn.send(f"{self.name}-in", b"2")

    def publish(self) -> None:
        with self.connect() as bridge, bridge.publisher() as publisher:
            publisher.send(f"{self.name}-in", b"3")

    def make(self) -> None:
        with self.connect(create_topics=1) as bridge, bridge.transaction() as txn:
            txn.send(f"{self.name}-new", b"4")

    def consume(self) -> None:
        with self.connect() as bridge, bridge.consumer(f"{self.name}-in", f"{self.name}-group") as consumer:
            batch = consumer.poll(10, LONG)
            assert batch
            with bridge.transaction() as txn:
                txn.ack(batch)

    def process(self) -> None:
        """Run a processor, whose output is its next input, for one pass under the user's transactional id."""

        def pass_on(message, txn):
            txn.send(f"{self.name}-in", message.value + b"'")
            processor.stop()

        with self.connect(transactional_id=self.name) as bridge:
            processor = bridge.processor(f"{self.name}-in", group=f"{self.name}-group", each=pass_on, max_messages=1)
            processor.run()

    def look(self) -> None:
        with self.connect() as bridge, bridge.consumer(f"{self.name}-in") as consumer:
            assert consumer.poll(10, LONG)

    def prepare(self) -> None:
        with self.connect(transactional_id=self.name) as bridge, bridge.transaction(prepare=True) as txn:
            txn.send(f"{self.name}-in", b"5")
        with self.connect() as bridge:
            assert bridge.commit(str(txn.token)) is Outcome.COMMITTED

    def prepare_nothing(self) -> None:
        with self.connect(transactional_id=self.name) as bridge:
            with bridge.transaction(prepare=True) as txn:
                pass
            assert bridge.commit(str(txn.token)) is Outcome.COMMITTED

    def trim(self) -> None:
        settings = self.settings()
        log = KafkaDecisionLog(settings, self.name, Deadline(LONG), Emitter("test", ()), topics_of(settings))
        with closing(log):
            log.trim(log.append(b"x", Deadline(LONG)), Deadline(LONG))

    def repair(self) -> None:
        with closing(Requests(self.settings())) as requests:
            # Of a producer that never was: whoever may do this is told that its transaction has no such place.
            requests.write_markers(1 << 40, 0, False, [(f"{self.name}-in", 0)], Deadline(LONG))

    def look_back(self) -> None:
        settings = self.settings()
        with closing(Requests(settings)) as requests:
            recorded_decisions(
                KafkaCluster(settings, requests, topics_of(settings), Emitter("test", ())), self.name, Deadline(LONG)
            )


@dataclass
class World:
    ports: dict[str, int]
    numbers: Iterator[int]

    def __post_init__(self) -> None:
        self.admin = plain_admin(f"{HOST}:{self.ports['PLAINTEXT']}")

    def connect(self, user: User, **options: Any) -> Bridge:
        """A bridge of an administrator, in a user's application."""
        url = f"kafka://{HOST}:{self.ports['PLAINTEXT']}"
        return txnbridge.connect(url, application=user.name, timeout=LONG, **options)

    def user(self, rights: Sequence[Right]) -> User:
        """A new one, with a topic that has a message, and exactly these rights."""
        user = User(f"u{next(self.numbers)}", self.ports["SASL"])
        for made in self.admin.create_topics([kafka_names.NewTopic(f"{user.name}-in", 1, 1)]).values():
            made.result(LONG)
        with txnbridge.connect(f"kafka://{HOST}:{self.ports['PLAINTEXT']}") as bridge, bridge.transaction() as txn:
            txn.send(f"{user.name}-in", b"0")
        granted = [right.binding(user.name, operation) for right in rights for operation in right.operations.split()]
        if not granted:
            return user
        self.grant(granted)
        kinds = ("ResourceType", "ResourcePatternType", "AclOperation", "AclPermissionType")
        kind, pattern, operation, permission = (getattr(kafka_names, name).ANY for name in kinds)
        whose = f"User:{user.name}"
        of_user = kafka_names.AclBindingFilter(kind, None, pattern, whose, None, operation, permission)
        assert wait_until(lambda: len(self.admin.describe_acls(of_user).result(LONG)) == len(granted), LONG)
        return user

    def grant(self, bindings: list[Any]) -> None:
        for done in self.admin.create_acls(bindings).values():
            done.result(LONG)

    def take(self, bindings: Sequence[Any]) -> None:
        names = ("restype", "name", "resource_pattern_type", "principal", "host", "operation", "permission_type")
        taken = [kafka_names.AclBindingFilter(*(getattr(each, name) for name in names)) for each in bindings]
        for done in self.admin.delete_acls(taken).values():
            assert done.result(LONG)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    ports = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
    addresses = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
    users = " ".join(f'user_u{number}="u{number}"' for number in range(USERS))
    settings = {
        "listeners": ",".join(addresses.values()),
        "advertised.listeners": ",".join(address for name, address in addresses.items() if name != "CONTROLLER"),
        "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in LISTENERS.items()),
        "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": f"{PLAIN} required {users};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with kafka_or_skip(container=False, port=ports["PLAINTEXT"], settings=settings):
        yield World(ports, count())


NEEDS: dict[str, tuple[Callable[[User], None], tuple[Right, ...]]] = {
    "owner": (User.write_as_owner, (OWNED, SEND)),
    "anonymous": (User.write, (ANONYMOUS, SEND)),
    "publisher": (User.publish, (SEND,)),
    "new-topic": (User.make, (ANONYMOUS, MAKE)),
    "group": (User.consume, (ANONYMOUS, CONSUME, GROUP)),
    "no-group": (User.look, (CONSUME, LOOK)),
    "prepare": (User.prepare, (OWNED, SEND, LOG, LOOK)),
    "prepare-nothing": (User.prepare_nothing, (OWNED, LOG, LOOK, EMPTY)),
    "trim": (User.trim, (LOG, TRIM)),
    "repair": (User.repair, (CONSUME, REPAIR)),
    "history": (User.look_back, (HISTORY, LOOK)),
}


@pytest.mark.parametrize("what", NEEDS)
def test_a_task_works_with_the_rights_that_it_needs_and_no_others(world, what):
    do, needed = NEEDS[what]
    do(world.user(needed))


@pytest.mark.parametrize(
    ("what", "missing"),
    [(what, right) for what, (_, needed) in NEEDS.items() for right in needed if right is not LOOK],
    ids=lambda value: value if isinstance(value, str) else f"without-{value.kind}-{value.name}",
)
def test_a_task_without_any_one_of_its_rights_is_denied(world, what, missing):
    do, needed = NEEDS[what]
    user = world.user([right for right in needed if right is not missing])
    with pytest.raises((AccessDenied, NotSupported)) as caught:
        do(user)
    if isinstance(caught.value, NotSupported):  # of an owner that goes on without its log
        assert missing is LOG and GRANT in str(caught.value)


def test_a_processor_with_the_documented_rights_works_again_after_a_restart(world, caplog):
    user = world.user([OWNED, SEND, CONSUME, GROUP, LOG, LOOK])
    user.process()
    with caplog.at_level(logging.WARNING, "txnbridge"):
        user.process()
    with world.connect(user) as bridge:
        assert values(seen(bridge, f"{user.name}-in")) == [b"0", b"0'", b"0''"]
    (told,) = [record.getMessage() for record in caplog.records if "__consumer_offsets" in record.getMessage()]
    assert "hanging transactions cannot be looked for" in told


def test_a_topic_that_fits_a_pattern_and_may_not_be_read_is_left_out_until_the_right_is_granted(world, monkeypatch):
    monkeypatch.setattr(Connection, "timing", replace(Connection.timing, pattern_look=0.2))
    user = world.user([OWNED, CONSUME, GROUP, LOG, LOOK])
    own, of_strangers = f"{user.name}-in", f"{user.name}-in-2"
    shown = [replace(CONSUME, name=of_strangers).binding(user.name, "DESCRIBE")]
    granted = [replace(CONSUME, name=of_strangers).binding(user.name, "READ")]
    handled: list[bytes] = []
    for made in world.admin.create_topics([kafka_names.NewTopic(of_strangers, 1, 1)]).values():
        made.result(LONG)
    world.grant(shown)
    with user.connect(transactional_id=user.name) as bridge, world.connect(user) as others:

        def is_handled(topic: str, value: bytes) -> bool:
            with others.transaction() as txn:
                txn.send(topic, value)
            return bool(wait_until(lambda: value in handled, LONG))

        with bridge.processor(f"{own}*", group=f"{user.name}-group", each=lambda m, txn: handled.append(m.value)):
            assert is_handled(own, b"1")
            world.grant(granted)
            assert is_handled(of_strangers, b"2")
            world.take(granted)
            assert is_handled(own, b"3")


GRANT = "kafka-acls.sh"
# Whether the log is there, and what of it is granted.
LOGLESS = {"not-there": (False, ""), "not-seen": (True, ""), "not-written": (True, "READ"), "not-read": (True, "WRITE")}


@dataclass
class Logless:
    """Bridges of one user that may not use its log as it should, and an administrator's."""

    user: User
    world: World
    opened: list[Bridge]

    @property
    def topic(self) -> str:
        return f"{self.user.name}-in"

    def open(self, **options: Any) -> Bridge:
        self.opened.append(self.user.connect(**{"transactional_id": self.user.name, **options}))
        return self.opened[-1]

    def administrator(self, **options: Any) -> Bridge:
        self.opened.append(self.world.connect(self.user, **options))
        return self.opened[-1]

    def sent(self) -> list[object]:
        """Return the committed values behind the one that was there."""
        with self.administrator().consumer(self.topic) as consumer:
            found: list[object] = []
            while not found or any(consumer.lag().values()):
                found += values(consumer.poll(100, 1.0))
        return found[1:]


@pytest.fixture
def logless(world: World) -> Iterator[Callable[[str], Logless]]:
    opened: list[Bridge] = []

    def make(case: str = "not-seen") -> Logless:
        there, granted = LOGLESS[case]
        some = Right("topic", "_txnbridge-log-{user}", granted, "")
        user = world.user([OWNED, ANONYMOUS, SEND, LOOK, *([some] if granted else [])])
        if there:
            world.connect(user, transactional_id="somebody").close()
        return Logless(user, world, opened)

    yield make
    for bridge in reversed(opened):
        bridge.close()


def send(bridge: Bridge, topic: str, *sent: bytes) -> None:
    with bridge.transaction() as txn:
        txn.send_many(topic, sent)


@pytest.mark.parametrize("case", LOGLESS)
def test_without_its_log_an_owner_goes_on_and_says_once_what_is_weaker(logless, case, caplog):
    world = logless(case)
    with caplog.at_level(logging.WARNING, "txnbridge"):
        bridge = world.open()
        send(bridge, world.topic, b"1")
        with bridge.transaction() as txn:
            txn.send(world.topic, b"never")
            txn.abort()
        send(bridge, world.topic, b"2")
    assert world.sent() == [b"1", b"2"]
    (told,) = [record.getMessage() for record in caplog.records if "decision log" in record.getMessage()]
    assert f"{world.user.name} was opened without its decision log" in told
    assert f"_txnbridge-log-{world.user.name}" in told and GRANT in told


@pytest.mark.parametrize("case", LOGLESS)
def test_a_capability_that_needs_the_decision_log_is_absent_by_name(logless, case):
    bridge = logless(case).open()
    assert bridge.capabilities[Capability.PREPARE].level is Level.ABSENT
    with pytest.raises(NotSupported, match="prepare") as caught:
        bridge.transaction(prepare=True)
    assert GRANT in str(caught.value)
    for weaker in (Capability.FENCING, Capability.STATUS_LOOKUP):
        assert "without the decision log" in bridge.capabilities[weaker].note


def test_the_older_of_two_owners_without_the_log_is_fenced_and_does_not_take_the_id_back(logless):
    world = logless()
    older = world.open(writers=2)
    send(older, world.topic, b"0")
    newer = world.open(writers=2)
    for number in range(3):
        with pytest.raises(Fenced):
            send(older, world.topic, b"zombie")
        send(newer, world.topic, b"%d" % (number + 1))
    assert world.sent() == [b"0", b"1", b"2", b"3"]


def test_an_older_owner_that_has_the_log_takes_the_id_back_and_one_of_both_is_left(logless):
    world = logless()
    older = world.administrator(transactional_id=world.user.name, writers=1)
    newer = world.open(writers=1)
    send(newer, world.topic, b"1")
    send(older, world.topic, b"2")  # the log names nobody newer
    for _ in range(2):
        with pytest.raises(Fenced):
            send(newer, world.topic, b"zombie")
    send(older, world.topic, b"3")
    assert world.sent() == [b"1", b"2", b"3"]


def test_an_owner_without_the_log_fences_one_that_has_it_and_that_has_more_writers(logless):
    world = logless()
    older = world.administrator(transactional_id=world.user.name, writers=3)
    left = [older.transaction() for _ in range(3)]
    for txn in left:
        txn.send_many(world.topic, [b"left open" * 2_000] * 100)
        flush(txn)
    newer = world.open(writers=1)
    found = describe(newer, *(f"{world.user.name}.{number}" for number in range(3)))
    assert [each.state for each in found.values()] == ["Empty"] * 3
    for txn in left:
        with pytest.raises(TransactionAborted):
            txn.commit()
    send(newer, world.topic, b"1")
    assert world.sent() == [b"1"]


def test_a_commit_that_was_refused_because_the_id_has_a_newer_owner_is_told_as_aborted(logless):
    """One request was made, and refused: no log has to tell that it was not carried out."""
    world = logless()
    older = world.open(writers=1)
    txn = older.transaction(timeout=SHORT)
    txn.send(world.topic, b"never")
    flush(txn)
    world.open(writers=1)
    with pytest.raises(Fenced):
        txn.commit()
    assert txn.outcome is Outcome.ABORTED
    with pytest.raises(Fenced):
        send(older, world.topic, b"zombie")
    assert world.sent() == []


def test_a_prepared_transaction_is_spared_by_an_owner_without_the_log_which_may_end_it(logless):
    world = logless()
    with world.administrator(transactional_id=world.user.name).transaction(prepare=True) as txn:
        txn.send(world.topic, b"prepared")
    bridge = world.open()
    assert bridge.status(str(txn.token)).state is TokenState.PREPARED
    assert bridge.commit(str(txn.token)) is Outcome.COMMITTED
    assert world.sent() == [b"prepared"]


def test_an_owner_without_the_log_whose_writer_must_be_replaced_goes_on(logless):
    world = logless()
    bridge = world.open(writers=1)
    send(bridge, world.topic, b"0")
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown) as caught:
        send(bridge, world.topic, b"1")
    assert bridge.status(str(caught.value.token)).state is TokenState.COMMITTED
    send(bridge, world.topic, b"2")  # by a writer that was opened anew
    assert world.sent() == [b"0", b"1", b"2"]


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No owner may use its log."""
    fail_call(monkeypatch, KafkaOwner, "open", AccessDenied("this user may not use the log"), EACH)


@pytest.mark.usefixtures("denied")
@pytest.mark.parametrize("kind", ["AddPartitionsToTxn", "Produce"])
def test_an_owner_without_the_log_knows_its_own_openings(proxy, connect, topic, owner, kind):
    """An abort leaves messages unacknowledged, for which the client would open the id anew by itself."""
    with txnbridge.connect(proxy.url, transactional_id=owner, writers=1, timeout=2 * SHORT) as bridge:
        send(bridge, topic, b"0")
        hold = proxy.hold(requests=kind, count=None)
        with bridge.transaction() as txn:
            txn.send(topic, b"never")
            txn.abort()
        hold.release()
        send(bridge, topic, b"1")
    assert values(seen(connect(), topic)) == [b"0", b"1"]


@pytest.mark.usefixtures("denied")
def test_without_the_log_a_transaction_whose_time_is_over_stops_its_owner(txnbridge_url, connect, topic, owner):
    with txnbridge.connect(txnbridge_url, transactional_id=owner, writers=1, timeout=1.5) as slow:
        with pytest.raises(TxnBridgeError), slow.transaction() as txn:
            txn.send(topic, b"never")
            flush(txn)
            eventually(lambda: describe(slow, f"{owner}.0")[f"{owner}.0"].state == "CompleteAbort", "its time is over")
        with pytest.raises(Fenced, match="its transaction timed out"):
            slow.transaction()
    assert values(seen(connect(), topic)) == []


@pytest.mark.parametrize("logged", [False, True], ids=["without-log", "with-log"])
def test_an_outcome_that_only_the_log_could_tell_is_unknown_and_never_taken_for_aborted(logless, logged):
    """A time-out raises an epoch by one: an opening that nobody recorded must not look like it."""
    world = logless()
    older = (world.administrator if logged else world.open)(transactional_id=world.user.name, writers=1)
    with next_commit(older, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown) as caught:
        send(older, world.topic, b"1")
    token = str(caught.value.token)
    newer = world.open(writers=1)
    with newer.transaction() as txn:
        txn.send(world.topic, b"never")
        flush(txn)
        txn.abort()
    status = newer.status(token)
    assert (status.state, status.permanent) == (TokenState.UNKNOWN, False)
    assert "the decision log" in status.reason and GRANT in status.reason
    for asked in (older, world.administrator(), world.administrator(transactional_id=world.user.name)):
        may_look = logged or asked is not older  # into the coordinator's log
        assert asked.status(token).state is (TokenState.COMMITTED if may_look else TokenState.UNKNOWN)
    assert world.sent() == [b"1"]


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "anonymous"])
def test_a_writer_that_was_opened_again_without_the_log_leaves_nothing_to_be_taken_for_aborted(logless, owned):
    world = logless()
    bridge = world.open(writers=1, **({} if owned else {"transactional_id": None}))
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown) as caught:
        send(bridge, world.topic, b"1")
    with bridge.transaction() as txn:
        txn.send(world.topic, b"never")
        flush(txn)
        txn.abort()
    token = str(caught.value.token)
    assert bridge.status(token).state is TokenState.UNKNOWN
    for options in ({}, {"transactional_id": world.user.name}):  # who may look into the coordinator's log
        assert world.administrator(**options).status(token).state is TokenState.COMMITTED


def test_the_outcome_of_a_prepared_transaction_known_only_to_the_log_is_denied_by_name(logless):
    world = logless()
    owner = world.administrator(transactional_id=world.user.name, kafka={"prepared_ids": 1})
    for end in (owner.commit, owner.abort):  # the second has the id that the first one had
        with owner.transaction(prepare=True) as txn:
            txn.send(world.topic, b"prepared")
        token = str(txn.token)
        end(token)
        if end == owner.commit:
            first = token
    bridge = world.open()
    for end in (bridge.commit, bridge.abort):
        with pytest.raises(AccessDenied, match=GRANT):
            end(first)


@pytest.mark.parametrize("right", ALL, ids=lambda right: f"{right.kind}-{right.name}-{right.operations}")
def test_the_page_for_kafka_users_lists_the_right(right):
    assert right.shown in PAGE.read_text()
