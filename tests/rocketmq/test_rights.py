"""Tests of the rights that each kind of program needs where brokers control access (ACL 2.0), one by one."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_conformance.observing import eventually
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.connection import Credentials
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, as_body, fields, nothing

from tests.rocketmq.kit import BROKER, LONG, bodies, one_user
from tests.rocketmq.reading_kit import connect_to, new_topic, publish, unique
from txnbridge import Bridge, Decision, Outcome
from txnbridge.errors import AccessDenied

ROOT = Credentials("root", "s3cret-of-root")
APPLICATION = "shop"
_PROVIDER = "org.apache.rocketmq.auth.authorization.provider"
_CREATE_USER, _CREATE_ACL = 3001, 3006
_numbers = count(1)

Right = tuple[str, str]  # a resource, and what may be done with it
NOTHING: list[Right] = [("Topic:nothing", "Get")]
TOPIC, GROUP = "Topic:{topic}", "Group:{group}"
OWN = "Topic:_txnbridge-*"
HALVES, NOTES = "Topic:RMQ_SYS_TRANS_HALF_TOPIC", "Topic:RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARDED = "Topic:TRANS_CHECK_MAX_TIME_TOPIC"
READ_LOG: list[Right] = [(OWN, "Sub"), (OWN, "Get"), ("Group:txnbridge-log", "Sub")]
LOG: list[Right] = [(OWN, "Pub"), *READ_LOG]
FINISH: list[Right] = [(TOPIC, "Sub"), (HALVES, "Sub"), ("Group:txnbridge-resolver", "Sub")]
# No half was discarded here. Otherwise Sub is needed on the topic of discarded halves, and on the users' topics.
LIST: list[Right] = [
    *((topic, action) for topic in (HALVES, NOTES) for action in ("Sub", "Get")),
    (DISCARDED, "Get"),
    ("Group:CID_RMQ_SYS_TRANS", "Sub"),
    ("Group:txnbridge-listing", "Sub"),
]


@pytest.fixture(scope="module")
def rocketmq_broker(start_shared: StartRocketMQ) -> brokers.RocketMQ:
    authorization = {
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_PROVIDER}.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{_PROVIDER}.LocalAuthorizationMetadataProvider",
    }
    return start_shared(settings=one_user(ROOT) | authorization)


@pytest.fixture
def client(rocketmq_broker: brokers.RocketMQ) -> Iterator[RemotingClient]:
    """Return a client of a user who may do everything."""
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")], credentials=ROOT) as client:
        yield client


def bridge_of(broker: brokers.RocketMQ, user: Credentials) -> Bridge:
    signed = {"access_key": user.access_key, "secret_key": user.secret_key}
    return connect_to(broker.url, application=APPLICATION, create_topics=0, timeout=30, rocketmq=signed)


@pytest.fixture
def root(rocketmq_broker: brokers.RocketMQ) -> Iterator[Bridge]:
    """Return a bridge of a user who may do everything; opening it has created the bridge's own topics."""
    with bridge_of(rocketmq_broker, ROOT) as bridge:
        bridge.decisions()
        yield bridge


def new_user(client: RemotingClient, rights: list[Right]) -> Credentials:
    """Create a user with these rights only."""
    name = f"user{next(_numbers)}"
    user = {"username": name, "password": f"secret-of-{name}", "userType": "Normal"}
    client.call(BROKER, RpcRequest("", _CREATE_USER, nothing, fields(username=name), as_body(user)), LONG)
    actions: dict[str, list[str]] = {}
    for resource, action in rights:
        actions.setdefault(resource, []).append(action)
    entries = [{"resource": resource, "actions": each, "decision": "Allow"} for resource, each in actions.items()]
    policies = [{"policyType": "Custom", "entries": entries}]
    acl = as_body({"subject": f"User:{name}", "policies": policies})
    client.call(BROKER, RpcRequest("", _CREATE_ACL, nothing, fields(subject=f"User:{name}"), acl), LONG)
    return Credentials(name, user["password"])


@dataclass(frozen=True)
class Case:
    """The URL, topics and names that a program gets."""

    bridge: Bridge
    topic: str
    group: str


def write(case: Case) -> None:
    with case.bridge.transaction() as txn:
        txn.send(case.topic, b"seen")


def commit_token(case: Case) -> None:
    with case.bridge.transaction(prepare=True, hold=60) as txn:
        txn.send(case.topic, b"seen")
    assert txn.token is not None
    assert case.bridge.commit(txn.token) is Outcome.COMMITTED


def read(case: Case) -> None:
    assert [message.value for message in case.bridge.read(case.topic, 1)] == [b"there"]


def read_in_a_group(case: Case) -> None:
    with case.bridge.consumer(case.topic, case.group) as consumer:
        found = list(consumer.poll(1, timeout=30))
        assert [message.value for message in found] == [b"there"]
        with case.bridge.transaction() as txn:
            txn.ack(found)


def publish_plainly(case: Case) -> None:
    with case.bridge.publisher() as publisher:
        publisher.send(case.topic, b"seen")
        publisher.flush()


def list_open(case: Case) -> None:
    assert [each.state for each in case.bridge.admin.transactions()] != []


def create_topic(case: Case) -> None:
    case.bridge.admin.create_topic(f"{case.topic}-new", 1)


@dataclass(frozen=True)
class Program:
    run: Callable[[Case], None]
    rights: list[Right]


Run = Callable[[Program, list[Right]], None]

PROGRAMS = [
    Program(write, [(TOPIC, "Pub"), *LOG]),
    Program(commit_token, [(TOPIC, "Pub"), *LOG, *FINISH]),
    Program(read, [(TOPIC, "Sub"), (TOPIC, "Get"), ("Group:txnbridge-reader", "Sub")]),
    Program(read_in_a_group, [(TOPIC, "Sub"), (TOPIC, "Get"), (GROUP, "Sub"), ("Group:txnbridge-reader", "Sub"), *LOG]),
    Program(publish_plainly, [(TOPIC, "Pub")]),
    Program(list_open, [*LIST, *READ_LOG]),
    Program(create_topic, [("Topic:{topic}-new", "Create"), ("Topic:{topic}-new", "Get")]),
]


@pytest.fixture
def topic(client: RemotingClient) -> str:
    """Create a topic that has a message."""
    name = new_topic(client)
    publish(client, name, b"there")
    return name


@pytest.fixture
def run(rocketmq_broker: brokers.RocketMQ, client: RemotingClient, root: Bridge, topic: str) -> Run:
    """Run a program as a user with these rights."""

    def run_as(program: Program, rights: list[Right]) -> None:
        group = unique("group")
        own = [(resource.format(topic=topic, group=group), action) for resource, action in rights]
        with bridge_of(rocketmq_broker, new_user(client, own or NOTHING)) as bridge:
            program.run(Case(bridge, topic, group))

    return run_as


def named(value: object) -> str | None:
    if isinstance(value, Program):
        return value.run.__name__
    return " ".join(value) if isinstance(value, tuple) else None


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_a_program_runs_with_the_rights_that_the_docs_list(run: Run, waiting: None, program: Program) -> None:
    run(program, program.rights)


@pytest.mark.parametrize(("program", "missing"), [(one, right) for one in PROGRAMS for right in one.rights], ids=named)
def test_a_program_without_one_of_its_rights_is_refused_with_the_name_of_the_right(
    run: Run, client: RemotingClient, waiting: None, topic: str, program: Program, missing: Right
) -> None:
    with pytest.raises(AccessDenied) as refused:
        run(program, [right for right in program.rights if right != missing])
    assert f"no permission to access {begin_of(missing)}" in str(refused.value)
    if program.run is commit_token and missing in FINISH:
        assert "is committed" in str(refused.value)
        eventually(lambda: bodies(client, topic).count(b"seen") == 1, "a bridge that may publishes it")
    else:
        assert b"seen" not in bodies(client, topic)


def begin_of(right: Right) -> str:
    """Return how the name of the resource of a right begins."""
    return right[0].partition("{")[0].rstrip("*")


@pytest.fixture
def waiting(root: Bridge, client: RemotingClient) -> Iterator[None]:
    """Return an open transaction, once it is listed."""
    with root.transaction(prepare=True, hold=300) as txn:
        txn.send(new_topic(client), b"waits")
    yield
    assert txn.token is not None
    root.abort(txn.token)


@pytest.mark.parametrize("missing", [None, *LOG, *FINISH, (TOPIC, "Pub")], ids=named)
def test_a_resolver_without_a_right_says_so_and_one_with_all_rights_finishes_its_work(
    rocketmq_broker, client, root, caplog, missing
):
    topic, group = new_topic(client), unique("halves")  # without a message in it
    undecided = lambda *_: Decision.UNDECIDED  # noqa: E731
    with root.half_messages(group, execute=undecided, check=undecided) as halves:
        with halves.transaction(timeout=2) as txn:
            txn.send(topic, b"half")
    rights = [right for right in [*LOG, *FINISH, (TOPIC, "Pub")] if right != missing]
    user = new_user(client, [(resource.format(topic=topic), action) for resource, action in rights])
    caplog.set_level(logging.INFO, "txnbridge")
    with bridge_of(rocketmq_broker, user) as bridge, bridge.resolver(group, check=lambda *_: Decision.COMMIT):
        if missing is not None:
            eventually(lambda: f"no permission to access {begin_of(missing)}" in caplog.text, "it is told")
            assert bodies(client, topic) == []
    with root.resolver(group, check=lambda *_: Decision.COMMIT):
        eventually(lambda: bodies(client, topic) == [b"half"], "it is published")


def test_the_doctor_tells_a_user_without_rights_what_it_could_not_look_at(rocketmq_broker, client, root):
    with bridge_of(rocketmq_broker, new_user(client, NOTHING)) as bridge:
        advice = {each.subject: each for each in bridge.admin.doctor()}
    assert "no permission" in advice["transactions"].text
    assert "administrator" in advice["transactions"].remedy
