"""The rights that docs/kafka.md lists: with them everything works, without any one what it is for is denied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import admin as kafka
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.brokers._ports import HOST, free_ports
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.history import endings
from txnbridge_kafka.log import KafkaLog
from txnbridge_kafka.requests import Requests
from txnbridge_kafka.topics import Topics

import txnbridge
from tests.kafka.test_settings import PLAIN, read
from txnbridge import Outcome
from txnbridge.errors import AccessDenied
from txnbridge.spi import Deadline, Emitter, Url

pytestmark = pytest.mark.timeout(600)  # the first start of a version fetches it

LONG = 30.0
USERS = 40
LISTENERS = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", "SASL": "SASL_PLAINTEXT"}
PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"

kafka_names: Any = kafka  # which has names that its types do not know


@dataclass(frozen=True)
class Right:
    """One line of the page: `name` is of one user's things in these tests, `shown` what the page says for it."""

    kind: str
    name: str
    operations: str
    shown: str
    prefixed: bool = False

    def binding(self, user: str, operation: str) -> Any:
        pattern = kafka_names.ResourcePatternType.PREFIXED if self.prefixed else kafka_names.ResourcePatternType.LITERAL
        return kafka_names.AclBinding(
            kafka_names.ResourceType[self.kind.upper()],
            self.name.format(user=user),
            pattern,
            f"User:{user}",
            "*",
            kafka_names.AclOperation[operation],
            kafka_names.AclPermissionType.ALLOW,
        )


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
    """Somebody with some rights, and with topics of their own."""

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
        log = KafkaLog(self.settings(), self.name, Deadline(LONG), Emitter("test", ()))
        try:
            log.trim(log.append(b"x", Deadline(LONG)), Deadline(LONG))
        finally:
            log.close()

    def repair(self) -> None:
        requests = Requests(self.settings())
        try:
            # Of a producer that never was: whoever may do this is told that its transaction has no such place.
            requests.write_markers(1 << 40, 0, False, [(f"{self.name}-in", 0)], Deadline(LONG))
        finally:
            requests.close()

    def look_back(self) -> None:
        settings = self.settings()
        requests = Requests(settings)
        try:
            endings(Cluster(settings, requests, Topics(settings), Emitter("test", ())), self.name, Deadline(LONG))
        finally:
            requests.close()


@dataclass
class World:
    ports: dict[str, int]
    numbers: Iterator[int]

    def __post_init__(self) -> None:
        self.admin = kafka.AdminClient({"bootstrap.servers": f"{HOST}:{self.ports['PLAINTEXT']}"})

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
        for done in self.admin.create_acls(granted).values():
            done.result(LONG)
        of_user = kafka_names.AclBindingFilter(
            kafka_names.ResourceType.ANY,
            None,
            kafka_names.ResourcePatternType.ANY,
            f"User:{user.name}",
            None,
            kafka_names.AclOperation.ANY,
            kafka_names.AclPermissionType.ANY,
        )
        assert wait_until(lambda: len(self.admin.describe_acls(of_user).result(LONG)) == len(granted), LONG)
        return user


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
    try:
        broker = brokers.kafka(container=False, port=ports["PLAINTEXT"], settings=settings)
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a Kafka broker: {error}")
    with broker:
        yield World(ports, count())


NEEDS: dict[str, tuple[Callable[[User], None], tuple[Right, ...]]] = {
    "owner": (User.write_as_owner, (OWNED, SEND, LOG, LOOK)),
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
def test_with_the_rights_that_it_needs_and_no_others_it_works(world, what):
    do, needed = NEEDS[what]
    do(world.user(needed))


@pytest.mark.parametrize(
    ("what", "missing"),
    [(what, right) for what, (_, needed) in NEEDS.items() for right in needed if right is not LOOK],
    ids=lambda value: value if isinstance(value, str) else f"without-{value.kind}-{value.name}",
)
def test_without_any_one_of_them_it_is_denied(world, what, missing):
    do, needed = NEEDS[what]
    user = world.user([right for right in needed if right is not missing])
    with pytest.raises(AccessDenied):
        do(user)


@pytest.mark.parametrize("right", ALL, ids=lambda right: f"{right.kind}-{right.name}-{right.operations}")
def test_the_page_for_kafka_users_lists_the_right(right):
    assert right.shown in PAGE.read_text()
