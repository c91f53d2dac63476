"""Tests of rights through a bridge: each denial says what to grant, and no secret is ever shown."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually, seen, values
from txnbridge_pulsar.client import Transactions
from txnbridge_pulsar.outcome.forgotten_transactions import proof_property, release

import txnbridge
from tests.inside import broker_of
from tests.pulsar.client_kit import SOON, admin, batch_of, begin
from tests.pulsar.secured_kit import PASSWORD, Secured, token
from tests.pulsar.writing_kit import cluster_of, concrete, flush, prepare, read_all, unique, writer_of
from txnbridge import Bridge, Outcome, TokenState
from txnbridge.errors import AccessDenied
from txnbridge.spi import Deadline

Connect = Callable[..., Bridge]


@pytest.fixture
def connect(secured: Secured) -> Iterator[Connect]:
    """Bridges of whoever these options say, by TLS; with REST unless told otherwise."""
    with ExitStack() as stack:

        def connect(namespace: str = "default", rest: bool = True, id: str | None = None, **options: Any) -> Bridge:
            told = {"tls_ca": str(secured.authority.certificate), **options}
            told |= {"admin_url": secured.admin_url_tls} if rest else {}
            url = f"{secured.url_tls}/public/{namespace}"
            return stack.enter_context(txnbridge.connect(url, transactional_id=id, writers=2, pulsar=told))

        yield connect


@pytest.fixture
def superuser(connect: Connect) -> Bridge:
    return connect(token=token("admin"))


@pytest.fixture
def user(connect: Connect) -> Bridge:
    return connect(token=token("user"))


@pytest.fixture
def topic(superuser: Bridge) -> str:
    name = unique("secured")
    superuser.admin.create_topic(name, 2)
    return name


def grant(secured: Secured, namespace: str, role: str, *actions: str) -> None:
    admin(secured.broker, "POST", f"namespaces/{namespace}/permissions/{role}", list(actions))


def send(bridge: Bridge, topic: str, value: bytes = b"x") -> None:
    with bridge.transaction() as txn:
        txn.send(topic, value)


def credentials(way: str, secured: Secured, folder: Path) -> dict[str, str]:
    if way == "token":
        return {"token": token("user")}
    if way == "token file":
        file = folder / "token"
        file.write_text(token("user"))
        return {"token_file": str(file)}
    if way == "password":
        return {"user": "user", "password": PASSWORD}
    return {"tls_certificate": str(secured.admin.certificate), "tls_key": str(secured.admin.key)}


WAYS = ("token", "token file", "password", "certificate")


@pytest.mark.parametrize("way", WAYS)
def test_a_bridge_does_all_that_it_is_for_and_shows_no_secret(secured, connect, topic, tmp_path, caplog, way):
    caplog.set_level(logging.DEBUG)
    told = credentials(way, secured, tmp_path)
    bridge = connect(id=unique("owner"), **told)
    send(bridge, topic, b"1")
    with bridge.consumer(topic, "group") as consumer:
        batch = consumer.poll(1, SOON)
        with bridge.transaction() as txn:
            txn.send(topic, batch[0].value + b"2")
            txn.ack(batch)
    prepared = prepare(bridge, topic)
    assert bridge.status(prepared).state is TokenState.PREPARED
    assert [found.state for found in bridge.admin.transactions() if found.transactional_id] == ["prepared"]
    assert bridge.commit(prepared) is Outcome.COMMITTED
    assert sorted(message.value for message in seen(bridge, topic)) == [b"1", b"12", b"prepared"]
    settings = cluster_of(bridge).settings
    shown = f"{bridge!r} {settings!r} {prepared} {caplog.text}"
    secrets = [token("user"), PASSWORD, *(told[name] for name in ("token", "password") if name in told)]
    assert not [secret for secret in secrets if secret in shown]


@pytest.mark.parametrize("rest", [True, False], ids=["with rest", "without rest"])
@pytest.mark.parametrize(
    "told",
    [{"token": token("user")[:-2]}, {"token": token("user", -10)}, {"user": "user", "password": "wr0ng"}],
    ids=["wrong token", "expired token", "wrong password"],
)
def test_a_client_that_is_not_let_in_is_told_which_options_count(connect: Connect, told: dict[str, str], rest: bool):
    with pytest.raises(AccessDenied, match="look at the options token") as caught:
        connect(rest=rest, **told)
    shown = f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"
    assert not [told[name] for name in ("token", "password") if name in told and told[name] in shown]


def test_a_secret_in_the_url_is_not_shown_either(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"{secured.url_tls}/public/default?tls_ca={secured.authority.certificate}&token="
    with txnbridge.connect(url + token("user")) as bridge:
        shown = f"{bridge!r} {caplog.text}"
    wrong = token("user")[:-2]
    with pytest.raises(AccessDenied) as caught:
        txnbridge.connect(url + wrong)
    shown += f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r} {caplog.text}"
    assert wrong not in shown  # which is also how the right one begins


def test_a_user_who_may_not_look_for_coordinators_is_told_what_to_grant(connect: Connect) -> None:
    with pytest.raises(AccessDenied, match="namespaces grant-permission --role ROLE --actions consume pulsar/system"):
        connect(token=token("stranger"))


def test_a_user_who_may_not_use_our_own_topics_is_told_what_to_grant(secured: Secured, connect: Connect) -> None:
    grant(secured, "pulsar/system", "finder", "consume")
    wanted = "namespaces grant-permission --role ROLE --actions produce,consume public/default"
    with pytest.raises(AccessDenied, match=wanted):
        connect(token=token("finder"))


def publish(bridge: Bridge, topic: str) -> None:
    with bridge.publisher() as publisher:
        publisher.send(topic, b"x")


def require(bridge: Bridge, topic: str) -> None:
    """Ask as half messages do before the work."""
    broker_of(bridge).require_topic(topic, Deadline(SOON))


def consume(bridge: Bridge, topic: str) -> None:
    with bridge.consumer(topic, unique("group")) as consumer:
        consumer.poll(1, SOON)


def look(bridge: Bridge, topic: str) -> None:
    assert bridge.read(topic, 10)


@pytest.mark.parametrize(
    ("call", "has", "wants"),
    [
        (send, (), "produce,consume"),
        (send, ("consume",), "produce"),
        (publish, ("consume",), "produce"),
        (require, ("consume",), "produce"),
        (consume, ("produce",), "consume"),
        (look, ("produce",), "consume"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_a_user_who_may_not_use_a_topic_is_told_what_to_grant_and_then_can_use_it(
    secured, superuser, connect, call, has, wants
):
    namespace = unique("locked")
    admin(secured.broker, "PUT", f"namespaces/public/{namespace}")
    topic = f"persistent://public/{namespace}/orders"
    superuser.admin.create_topic(topic)
    send(superuser, topic)
    if has:
        grant(secured, f"public/{namespace}", "user", *has)
    bridge = connect(token=token("user"))
    with pytest.raises(AccessDenied, match=f"topics grant-permission --role ROLE --actions {wants} {topic}"):
        call(bridge, topic)
    path = topic.replace("://", "/")
    admin(secured.broker, "POST", f"{path}/permissions/user", wants.split(","))
    call(bridge, topic)


def test_a_user_who_is_no_administrator_is_told_that_an_administrator_is_needed(user: Bridge, topic: str) -> None:
    for call in (lambda: user.admin.create_topic(unique("new")), lambda: user.admin.delete_topic(topic)):
        with pytest.raises(AccessDenied, match="an administrator of the tenant"):
            call()
    assert {found.subject for found in user.admin.doctor() if "administrator" in found.remedy} == {"rights"}


def test_a_prepared_transaction_is_for_the_user_who_began_it_and_for_superusers(user, superuser, connect, topic):
    """A naive look takes the coordinator's answer to others for that of an end: it has the same code."""
    other = connect(token=token("other"))
    prepared = prepare(user, topic)
    for call in (other.status, other.commit, other.abort):
        with pytest.raises(AccessDenied, match="the user who began it has to do this, or a superuser"):
            call(prepared)
    assert user.status(prepared).state is TokenState.PREPARED
    assert superuser.commit(prepared) is Outcome.COMMITTED
    assert other.status(prepared).state is TokenState.COMMITTED


def test_an_id_is_not_opened_by_a_user_who_cannot_end_what_its_older_owner_has_open(connect, superuser, topic):
    id = unique("owner")
    older = connect(id=id, token=token("user"))
    txn = older.transaction()
    txn.send(topic, b"open")
    flush(txn)
    with pytest.raises(AccessDenied, match="the user who began it has to do this, or a superuser"):
        connect(id=id, token=token("other"))
    send(connect(id=id, token=token("user")), topic, b"newer")
    with pytest.raises(txnbridge.Fenced):
        txn.commit()
    assert values(seen(superuser, topic)) == [b"newer"]


@pytest.mark.parametrize("role", ["user", "admin"])
def test_superusers_end_a_transaction_on_a_forgotten_topic_and_others_are_told_what_to_run(
    secured, superuser, connect, topic, role, monkeypatch, caplog
):
    """See the tests of unloading: a coordinator that was never told of a topic does what one does that forgets it."""
    whole, register, end = concrete(topic), Transactions.register, Transactions.end

    def not_that(self: Any, txn: Any, timeout: float, topics: Sequence[str] = (), subscriptions: Any = ()) -> None:
        register(self, txn, timeout, [each for each in topics if each != whole], subscriptions)

    def unloading(*told: Any) -> None:
        end(*told)
        admin(secured.broker, "PUT", f"{whole.replace('://', '/')}/unload")

    monkeypatch.setattr(Transactions, "register", not_that)
    monkeypatch.setattr(Transactions, "end", unloading)
    with connect(token=token(role)) as bridge, bridge.transaction() as txn:
        txn.send(topic, b"1", partition=0)
        number = flush(txn)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [f"{number}" in error and "transactions repair" in error for error in errors] == [True] * (role == "user")
    if role == "user":
        assert superuser.admin.repair(str(number)).startswith(f"committed {number} on {topic}")
    assert values(seen(superuser, topic)) == [b"1"]


def test_a_repair_needs_a_superuser(user: Bridge, superuser: Bridge, topic: str) -> None:
    client, name = cluster_of(user).client, concrete(topic)
    txn = begin(client, name)
    client.transactions.end(txn, True, SOON)
    producer = client.create_producer(name, timeout=SOON, transactions=True)
    producer.send(batch_of(b"late"), txn, timeout=SOON).result(SOON)
    with pytest.raises(AccessDenied, match="a superuser of the cluster has to do it"):
        user.admin.repair(str(txn))
    assert superuser.admin.repair(str(txn)).startswith(f"committed {txn}")
    assert read_all(cluster_of(superuser).client, name) == [b"late"]


def test_a_reader_without_rights_gets_past_a_late_message_of_what_was_aborted(user: Bridge, topic: str) -> None:
    cluster, name = cluster_of(user), concrete(topic)
    with pytest.raises(KeyError), user.transaction() as txn:
        txn.send(topic, b"never", partition=1)
        number, proof = flush(txn), writer_of(txn).proof
        raise KeyError
    assert proof is not None
    late = batch_of(b"late")
    late.properties = proof_property(proof)
    producer = cluster.client.create_producer(name, timeout=SOON, transactions=True)
    producer.send(late, number, timeout=SOON).result(SOON)
    assert read_all(cluster.client, name, patience=1) is None

    def is_past() -> bool:
        release(cluster, name, Deadline(SOON))
        return read_all(cluster.client, name, patience=1) == []

    eventually(is_past, "its anchor has ended")
