"""Tests of the client with brokers that have TLS, access control, or binary headers, and with two brokers."""

import ssl

import pytest
from txnbridge_conformance.brokers import RocketMQ
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.connection import Credentials
from txnbridge_rocketmq.client.errors import ErrorResponse
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.protocol import read_requests, send_requests
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack, HalfEnd, WireMessage, end, send, send_half

from tests.kafka.certificates import Authority
from tests.rocketmq.kit import BROKER, LONG, becomes_true, bodies, one_user
from tests.rocketmq.reading_kit import connect_to

ROOT = Credentials("root", "s3cret-of-root")


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def secured(authority, start_shared):
    """Start a broker with TLS and plain connections, one user, and binary headers in its requests."""
    certificate = authority.issue("broker")
    return start_shared(
        settings=one_user(ROOT),
        system_properties={
            "tls.server.mode": "permissive",
            "tls.test.mode.enable": "false",
            "tls.server.certPath": str(certificate.certificate),
            "tls.server.keyPath": str(certificate.key),
            "rocketmq.serialize.type": "ROCKETMQ",
        },
    )


def client_of(broker: RocketMQ, **options) -> RemotingClient:
    return RemotingClient([broker.url.removeprefix("rocketmq://")], **options)


def make_topic(client: RemotingClient, name: str, broker: str = BROKER) -> None:
    client.call(broker, administration.create_topic(name, 1, "TRANSACTION"), LONG)
    assert becomes_true(lambda: client.route(name, LONG, fresh=True) is not None)


def transact(client: RemotingClient, topic: str, broker: str = BROKER) -> None:
    """Store a half, commit it, and read the message."""
    stored = client.call(broker, send_half(WireMessage(topic, b"half"), "shop", 0), LONG)
    client.call(broker, end(send_requests.half_address(topic, "shop", stored), HalfEnd.COMMIT), LONG)
    assert bodies(client, topic, broker) == [b"half"]


def test_a_client_that_signs_and_checks_the_certificate_is_served(secured, authority):
    trusting = ssl.create_default_context(cafile=authority.certificate)
    with client_of(secured, credentials=ROOT, tls=trusting) as client:
        make_topic(client, "signed")
        transact(client, "signed")
        assert client.call(BROKER, read_requests.by_unique_key("signed", "no such key"), LONG) == []


@pytest.mark.parametrize(
    "credentials", [None, Credentials("root", "wrong"), Credentials("nobody", ROOT.secret_key)], ids=str
)
def test_a_client_that_does_not_sign_or_signs_wrongly_is_refused_without_effect(secured, credentials):
    with client_of(secured, credentials=ROOT) as client:
        make_topic(client, "unsigned")
        with client_of(secured, credentials=credentials) as stranger, pytest.raises(ErrorResponse) as caught:
            stranger.call(BROKER, send(WireMessage("unsigned", b"x"), "shop", 0), LONG)
        assert not caught.value.may_have_had_effect
        assert ROOT.secret_key not in str(caught.value)
        assert client.call(BROKER, read_requests.max_offset("unsigned", 0), LONG) == 0


def test_a_check_back_in_the_binary_format_is_understood(secured):
    checks: list[CheckBack] = []
    with client_of(secured, credentials=ROOT, on_checks=checks.extend) as client:
        make_topic(client, "binary")
        client.join(Membership(frozenset({"shop"})), LONG)
        stored = client.call(BROKER, send_half(WireMessage("binary", b"half"), "shop", 0), LONG)
        assert becomes_true(lambda: checks != [])
        assert checks[0].half.unique_key == stored.unique_key
        assert checks[0].record.payload() == b"half"
        client.call(BROKER, end(checks[-1].half, HalfEnd.ABORT, from_check=True), LONG)


def test_a_bridge_signs_and_checks_the_certificate(secured, authority):
    rocketmq = {
        "access_key": ROOT.access_key,
        "secret_key": ROOT.secret_key,
        "tls": True,
        "tls_ca": str(authority.certificate),
    }
    with connect_to(secured.url, rocketmq=rocketmq) as bridge:
        bridge.admin.create_topic("bridged", 1)
        with bridge.transaction() as txn:
            txn.send("bridged", b"hello")
        assert [message.value for message in bridge.read("bridged", limit=1)] == [b"hello"]
        assert [each for each in bridge.admin.doctor() if each.level == "problem"] == []


@pytest.mark.full
def test_each_of_two_brokers_is_found_by_its_name_asks_and_may_be_gone(start_shared):
    cluster = start_shared(nodes=2)
    checks: list[CheckBack] = []
    with client_of(cluster, on_checks=checks.extend) as client:
        for topic in ("everywhere", "elsewhere"):
            cluster.create_topic(topic, queues=1)
        found = client.route("everywhere", LONG)
        assert found is not None
        assert [(each.broker, each.queue) for each in found.writable] == [("broker-1", 0), ("broker-2", 0)]
        client.join(Membership(frozenset({"both"})), LONG)
        for broker in ("broker-1", "broker-2"):
            transact(client, "everywhere", broker)
            client.call(broker, send_half(WireMessage("everywhere", broker.encode()), "both", 0), LONG)
        assert becomes_true(lambda: {check.broker for check in checks} == {"broker-1", "broker-2"})
        assert all(check.record.payload().decode() == check.broker for check in checks)
        cluster.kill(1)
        transact(client, "elsewhere", "broker-2")
        cluster.start(1)
        before = len(checks)
        assert becomes_true(lambda: "broker-1" in {check.broker for check in checks[before:]}, 60)
