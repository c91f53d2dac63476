"""Tests of signatures, of TLS with certificates that are checked, and that no text has a secret."""

import ssl

import pytest
from txnbridge_rocketmq.client.connection import ConnectionSettings, Credentials, RemotingConnection
from txnbridge_rocketmq.client.errors import Disconnected, ResponseTimeout, Unreachable
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand

from tests.in_time import within
from tests.kafka.certificates import Authority
from tests.rocketmq.kit import LONG, FakeBroker, Peer, becomes_true, echo

SHORT = 0.3


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def server(authority) -> ssl.SSLContext:
    certificate = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context


@pytest.fixture
def trusting(authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.certificate)


def back(peer: Peer, command: RemotingCommand) -> None:
    peer.answer(command, body=command.body)


def test_a_request_is_signed_over_its_sorted_values_and_its_body():
    signed = Credentials("user", "s3cret").sign({"topic": "orders", "b": "1", "Z": "2"}, b"body")
    assert signed["AccessKey"] == "user"
    # The names sort as AccessKey, Z, b, topic:
    # printf user21ordersbody | openssl dgst -sha1 -hmac s3cret -binary | base64
    assert signed["Signature"] == "QGZgtyTFjEEXm00yha6tZHimopg="
    assert set(signed) == {"topic", "b", "Z", "AccessKey", "Signature"}


def test_a_security_token_is_sent_and_signed():
    plain, with_token = Credentials("user", "s3cret"), Credentials("user", "s3cret", "t0ken")
    assert with_token.sign({}, b"")["SecurityToken"] == "t0ken"
    assert with_token.sign({}, b"")["Signature"] != plain.sign({}, b"")["Signature"]


def test_every_request_of_a_connection_is_signed():
    with FakeBroker() as broker:
        connection = RemotingConnection(
            broker.address, LONG, ConnectionSettings(credentials=Credentials("user", "s3cret"))
        )
        connection.submit(echo(body=b"x"), LONG)
        assert broker.peer().next().fields == Credentials("user", "s3cret").sign({}, b"x")
        connection.close()


def test_secrets_show_nowhere():
    credentials = Credentials("user", "s3cret", "t0ken")
    assert "s3cret" not in repr(credentials) and "t0ken" not in repr(credentials)
    assert "s3cret" not in repr(ConnectionSettings(credentials=credentials))


def test_large_answers_and_requests_cross_each_other_encrypted(server, trusting):
    with FakeBroker(back, tls=server) as broker:
        connection = RemotingConnection(broker.address, LONG, ConnectionSettings(tls=trusting))
        bodies = [bytes([65 + number]) * (1 << 20) for number in range(8)]
        calls = [connection.submit(echo(body=body), LONG) for body in bodies]
        assert [call.result() for call in calls] == [body.decode() for body in bodies]
        connection.close()


def test_a_certificate_that_nobody_trusts_is_refused(server):
    with FakeBroker(back, tls=server) as broker, pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        RemotingConnection(broker.address, LONG, ConnectionSettings(tls=ssl.create_default_context()))


def test_a_broker_that_never_shakes_hands_is_unreachable_in_time(trusting):
    with FakeBroker(reads=False) as broker, pytest.raises(Unreachable, match="timed out"):
        RemotingConnection(broker.address, SHORT, ConnectionSettings(tls=trusting))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_broker_that_reads_nothing_holds_nobody_past_their_time(server, trusting, encrypted):
    with FakeBroker(tls=server if encrypted else None, reads=False) as broker:
        settings = ConnectionSettings(tls=trusting if encrypted else None)
        connection = RemotingConnection(broker.address, LONG, settings)
        with within(1), pytest.raises(ResponseTimeout, match="accepted no more bytes") as caught:
            while True:
                connection.submit(echo(body=bytes(4 << 20)), 1.0)
        # A frame is partly written, so the connection is closed, and the broker never gets the whole frame.
        assert not caught.value.may_have_had_effect
        assert becomes_true(lambda: not connection.is_open)
        connection.close()


def test_the_end_of_an_encrypted_connection_ends_every_call(server, trusting):
    with FakeBroker(tls=server) as broker:
        connection = RemotingConnection(broker.address, LONG, ConnectionSettings(tls=trusting))
        call = connection.submit(echo(), LONG)
        peer = broker.peer()
        peer.next()
        peer.hang_up()
        with pytest.raises(Disconnected):
            call.result()
        connection.close()
