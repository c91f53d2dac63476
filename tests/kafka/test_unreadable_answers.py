"""Each answer of a broker gives an error of ours, or one after which the broker is asked again."""

import base64
import hashlib
import hmac
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, TypeVar

import pytest
from txnbridge_kafka.client.connection import AttemptError, LoginRefusedError, login
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.messages import offsets_of
from txnbridge_kafka.client.protocol_types import RetryLaterError
from txnbridge_kafka.client.request_retry import RequestRunner
from txnbridge_kafka.client.requests import Requests

from tests.kafka.test_settings import read
from txnbridge import NotSupported, TxnBridgeError
from txnbridge.spi import Deadline, Url

pytestmark = pytest.mark.offline

T = TypeVar("T")

_API_VERSIONS = 18
_KEYS = range(80)
_VERSIONS = (
    struct.pack(">hB", 0, len(_KEYS) + 1) + b"".join(struct.pack(">hhhx", key, 0, 12) for key in _KEYS) + bytes(5)
)
MEMBER = GroupMembership("g", 1, "", None)
ASKED: dict[str, Callable[[Requests, Deadline], object]] = {
    "describe": lambda requests, by: requests.describe(["id"], by),
    "end": lambda requests, by: requests.end("id", 1, 1, True, by),
    "fence": lambda requests, by: requests.fence("id", 1000, by),
    "acknowledge": lambda requests, by: requests.acknowledge("id", 1, 1, offsets_of(MEMBER, {("t", 0): 1}, {}, {}), by),
    "offsets": lambda requests, by: requests.list_offsets({("t", 0): -1}, by),
    "positions": lambda requests, by: requests.positions("g", [("t", 0)], by, decided=True),
    "topics": lambda requests, by: requests.topic_ids(["t"], by),
    "transactions": lambda requests, by: requests.transactions(by),
    "producers": lambda requests, by: requests.producers([("t", 0)], by),
    "settings": lambda requests, by: requests.configs(2, ["t"], by),
    "create": lambda requests, by: requests.create_topic("t", 1, 1, {}, by),
    "cluster": lambda requests, by: requests.cluster_id(by),
}
LATE = 1e9  # by time.monotonic()
LOGIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.username": "anna", "sasl.password": "secret"}
LOGINS = {name: {**LOGIN, "sasl.mechanism": name} for name in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")}


class Once(RequestRunner):
    """A runner that makes a request once, and returns its result."""

    def repeat(self, deadline: Deadline, what: str, attempt: Callable[[Connections], T], *_: Any, **__: Any) -> T:
        return self._once(attempt, deadline.left())


class Babbler:
    """A server that speaks Kafka's protocol only as far as to say which requests it takes."""

    def __init__(self, versions: bytes = _VERSIONS) -> None:
        self._versions = versions
        self.random = random.Random(0)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, struct.error), connection, connection.makefile("rb") as incoming:
            while True:
                (size,) = struct.unpack(">i", incoming.read(4))
                key, _, correlation = struct.unpack_from(">hhi", incoming.read(size))
                body = self._versions if key == _API_VERSIONS else self._babble()
                connection.sendall(struct.pack(">ii", 4 + len(body), correlation) + body)

    def _babble(self) -> bytes:
        """Small numbers mostly: they are lengths and codes, so that more of an answer is read before it ends."""
        size = self.random.choice((0, 3, 20, 80, 300))
        most = self.random.choice((1, 3, 255))
        return bytes(self.random.randint(0, most) for _ in range(size))

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def babbler() -> Iterator[Babbler]:
    with closing(Babbler()) as babbler:
        yield babbler


@pytest.mark.parametrize("asked", [*ASKED, *LOGINS])
def test_an_answer_that_is_none_is_an_error_that_is_understood(babbler: Babbler, asked: str) -> None:
    requests = Requests(settings := read(LOGINS.get(asked)))
    requests._runner = once = Once(settings)
    once._servers = [babbler.address]
    with closing(requests):
        for _ in range(20):
            with suppress(TxnBridgeError, RetryLaterError, AttemptError, LoginRefusedError):
                ASKED.get(asked, Requests.cluster_id)(requests, Deadline(0.15))


def test_a_broker_too_old_for_the_first_request_is_named_as_such() -> None:
    older = struct.pack(">hihhh", 35, 1, _API_VERSIONS, 0, 2)
    with closing(Babbler(older)) as broker:
        host, port = broker.address.split(":")
        url = Url("kafka", ((host, int(port)),), "", f"kafka://{broker.address}")
        with closing(Requests(read(url=url))) as requests:
            with pytest.raises(NotSupported, match="does not have version 3 of ApiVersions"):
                requests.cluster_id(Deadline(30))


def broker_says(asked: bytes, challenge: str, password: str) -> bytes:
    """Return the last word of a broker that knows a password, in SCRAM-SHA-256."""
    opening = asked.decode().removeprefix("n,,")
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), b"salt", 4096)
    signed = f"{opening},{challenge},c=biws,r={opening.partition('r=')[2]}b"
    key = hmac.digest(salted, b"Server Key", "sha256")
    return b"v=" + base64.b64encode(hmac.digest(key, signed.encode(), "sha256"))


@pytest.mark.parametrize("known", ["secret", "another"])
def test_a_broker_has_to_know_the_password_too(known: str) -> None:
    exchange = login(read(LOGINS["SCRAM-SHA-256"]).access, LATE)
    asked = next(exchange)
    challenge = f"r={asked.decode().partition('r=')[2]}b,s={base64.b64encode(b'salt').decode()},i=4096"
    assert b",p=" in exchange.send(challenge.encode())
    with pytest.raises(StopIteration if known == "secret" else ValueError):
        exchange.send(broker_says(asked, challenge, known))


@pytest.mark.parametrize(
    "challenge", ["", "r=x,s=eA==,i=4096", "r={nonce},s=eA==,i=2000000000", "r={nonce},s=eA==,i=x"]
)
def test_a_challenge_that_is_not_valid_is_refused_at_once(challenge: str) -> None:
    exchange = login(read(LOGINS["SCRAM-SHA-256"]).access, LATE)
    nonce = next(exchange).decode().partition("r=")[2]
    with pytest.raises((ValueError, LookupError)):
        exchange.send(challenge.replace("{nonce}", nonce).encode())
