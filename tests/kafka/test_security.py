"""TLS, SASL and OAuth on a live broker: what is given once opens the door for both clients, or says what to check."""

from __future__ import annotations

import base64
import http.server
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka import admin as kafka
from txnbridge_conformance.brokers._broker import HOST, free_ports
from txnbridge_conformance.brokers.plugin import kafka_or_skip
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.errors import translate
from txnbridge_kafka.settings import KafkaSettings, security
from txnbridge_kafka.settings.security import OAuthTokens

import txnbridge
from tests.failing import EACH, answer_calls, fail_call
from tests.in_time import Hold, within
from tests.interrupts import interrupted_everywhere
from tests.kafka.certificates import Authority
from tests.kafka.kit import LONG, Lines, kafka_names, plain_admin
from tests.kafka.test_settings import OAUTH, PLAIN, SCRAM, SECRET, read
from txnbridge.errors import AccessDenied, BrokerUnavailable
from txnbridge.spi import Deadline, Url

pytestmark = pytest.mark.timeout(600)  # the first start of a version fetches it

# What a bad login is given.
SHORT = 2.0
LATE = 1e9  # by time.monotonic()
USER, PASSWORD = "anna", "the-right-one"

# Each listener with its protocol; the first two are those that every broker of ours has.
LISTENERS = {
    "PLAINTEXT": "PLAINTEXT",
    "CONTROLLER": "PLAINTEXT",
    "SASL": "SASL_PLAINTEXT",
    "OAUTH": "SASL_PLAINTEXT",
    "TLS": "SSL",
    "MTLS": "SSL",
    "BOTH": "SASL_SSL",
}


@dataclass(frozen=True)
class World:
    """A broker with a listener for each way in, and who signs its certificate."""

    ports: dict[str, int]
    ours: Authority
    foreign: Authority
    endpoint: Endpoint

    def settings(self, listener: str, told: dict[str, Any], timeout: float = LONG, host: str = HOST) -> KafkaSettings:
        return read(told, Url("kafka", ((host, self.ports[listener]),), "", ""), timeout)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("certificates")
    ours, foreign = Authority(folder, "ours"), Authority(folder, "foreign")
    ports = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
    with kafka_or_skip(container=False, port=ports["PLAINTEXT"], settings=broker_settings(ports, ours)):
        with Endpoint() as endpoint:
            add_scram_user(ports["PLAINTEXT"])
            yield World(ports, ours, foreign, endpoint)


def broker_settings(ports: dict[str, int], authority: Authority) -> dict[str, str]:
    addresses = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
    plain = f'{PLAIN} required user_{USER}="{PASSWORD}";'
    unsecured = "org.apache.kafka.common.security.oauthbearer.internals.unsecured"
    return {
        "listeners": ",".join(addresses.values()),
        "advertised.listeners": ",".join(address for name, address in addresses.items() if name != "CONTROLLER"),
        "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in LISTENERS.items()),
        "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.issue("broker").store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.certificate),
        "listener.name.mtls.ssl.client.auth": "required",
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.sasl.plain.sasl.jaas.config": plain,
        "listener.name.sasl.scram-sha-256.sasl.jaas.config": f"{SCRAM} required;",
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
        "listener.name.both.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.both.plain.sasl.jaas.config": plain,
        "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.oauth.oauthbearer.sasl.jaas.config": f"{OAUTH} required;",
        "listener.name.oauth.oauthbearer.sasl.server.callback.handler.class": f"{unsecured}"
        ".OAuthBearerUnsecuredValidatorCallbackHandler",
    }


def add_scram_user(port: int) -> None:
    scram = kafka_names
    admin = plain_admin(f"{HOST}:{port}")
    for mechanism in (scram.ScramMechanism.SCRAM_SHA_256, scram.ScramMechanism.SCRAM_SHA_512):
        info = scram.ScramCredentialInfo(mechanism, 4096)
        wanted = scram.UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
        for future in admin.alter_user_scram_credentials([wanted]).values():
            future.result(LONG)


@dataclass
class Endpoint:
    """Gives tokens that nobody signed for one client's id and secret."""

    id: str = "app"
    secret: str = PASSWORD
    answers: list[int] = field(default_factory=list)  # the HTTP status of each
    asked: list[str] = field(default_factory=list)  # the form of each request
    lives: float | None = 60.0
    breaks: bool = False
    moved: str = ""  # the URL that it redirects to

    def __enter__(self) -> Endpoint:
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["Content-Length"])).decode()
                status, answer = told.answer(str(self.headers["Authorization"]), form)
                body = json.dumps(answer).encode()
                self.send_response(302 if told.moved else status)
                self.send_header("Location", told.moved)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                told.asked.append(str(self.headers["Authorization"]))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_port}/token?tenant=1"

    def answer(self, authorization: str, form: str) -> tuple[int, dict[str, Any]]:
        right = base64.b64encode(f"{self.id}:{self.secret}".encode()).decode()
        self.asked.append(form)
        self.answers.append(503 if self.breaks else 200 if authorization == f"Basic {right}" else 401)
        if self.answers[-1] != 200:
            return self.answers[-1], {"error": "invalid_client"}
        now = time.time()
        claims = {"sub": self.id, "iat": now - 5, "exp": now + 60, "number": len(self.answers)}
        token = f"{_encoded({'alg': 'none'})}.{_encoded(claims)}."
        return 200, {"access_token": token, **({} if self.lives is None else {"expires_in": self.lives})}

    def login(self, secret: str = PASSWORD) -> dict[str, Any]:
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": self.url,
            "sasl.oauthbearer.client.id": self.id,
            "sasl.oauthbearer.client.secret": secret,
        }


def _encoded(claims: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


def by_confluent(settings: KafkaSettings, seconds: float, lines: Lines) -> str:
    """The cluster's id as confluent-kafka learns it; what goes wrong on the way is in its log."""
    client = kafka.AdminClient(dict(settings.client), logger=lines)
    try:
        return str(client.list_topics(timeout=seconds).cluster_id)
    except KafkaException as error:
        raise translate(error, "asking for the cluster") from error
    finally:
        client.poll(0)


def by_requests(settings: KafkaSettings, seconds: float, lines: Lines) -> str:
    requests = Requests(settings)
    try:
        return requests.cluster_id(Deadline(seconds))
    except (AccessDenied, BrokerUnavailable) as error:
        lines.append(str(error))
        raise
    finally:
        requests.close()


Ask = Callable[[KafkaSettings, float, Lines], str]


@pytest.fixture(params=[by_confluent, by_requests], ids=lambda ask: ask.__name__.removeprefix("by_"))
def ask(request) -> Ask:
    asker: Ask = request.param
    return asker


def with_password(mechanism: str, protocol: str = "SASL_PLAINTEXT", password: str = PASSWORD) -> dict[str, Any]:
    login = {"sasl.mechanism": mechanism, "sasl.username": USER, "sasl.password": password}
    return {"security.protocol": protocol, **login}


def with_jaas(mechanism: str, module: str) -> dict[str, Any]:
    line = f'{module} required username="{USER}" password="{PASSWORD}";'
    return {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism, "sasl.jaas.config": line}


def trusting(authority: Authority) -> dict[str, Any]:
    return {"security.protocol": "SSL", "ssl.ca.location": authority.certificate}


def showing(authority: Authority, password: str = "") -> dict[str, Any]:
    mine = authority.issue("client", password)
    store = {"ssl.keystore.type": "PEM", "ssl.keystore.location": mine.store}
    return {**trusting(authority), **store, **({"ssl.key.password": password} if password else {})}


GOOD: dict[str, tuple[str, Callable[[World], dict[str, Any]]]] = {
    "plain": ("SASL", lambda _: with_password("PLAIN")),
    "scram-256": ("SASL", lambda _: with_password("SCRAM-SHA-256")),
    "scram-512-jaas": ("SASL", lambda _: with_jaas("SCRAM-SHA-512", SCRAM)),
    "tls": ("TLS", lambda world: trusting(world.ours)),
    "tls-unchecked": ("TLS", lambda _: {"security.protocol": "SSL", "enable.ssl.certificate.verification": False}),
    "mtls": ("MTLS", lambda world: showing(world.ours)),
    "mtls-sealed-key": ("MTLS", lambda world: showing(world.ours, SECRET)),
    "sasl-over-tls": ("BOTH", lambda world: {**trusting(world.ours), **with_password("PLAIN", "SASL_SSL")}),
    "oauth": ("OAUTH", lambda world: world.endpoint.login()),
}


@pytest.mark.parametrize("way", GOOD)
def test_credentials_given_once_admit_both_clients(world, ask, way):
    listener, tell = GOOD[way]
    expected = by_requests(world.settings("PLAINTEXT", {}), LONG, Lines())
    assert ask(world.settings(listener, tell(world)), LONG, Lines()) == expected


@dataclass(frozen=True)
class Bad:
    """A way in that stays shut, and what each client says then."""

    listener: str
    tell: Callable[[World], dict[str, Any]]
    log: str  # of confluent-kafka's client
    error: str  # of our own requests
    full: bool = False


BAD = {
    "wrong-password-plain": Bad(
        "SASL",
        lambda _: with_password("PLAIN", password=SECRET),
        "Authentication failed: Invalid username or password",
        "check .* listener for SASL_PLAINTEXT with PLAIN, and sasl.username, sasl.password",
    ),
    "wrong-password-scram": Bad(
        "SASL",
        lambda _: with_password("SCRAM-SHA-512", password=SECRET),
        "invalid credentials with SASL mechanism SCRAM-SHA-512",
        "check .* with SCRAM-SHA-512, and sasl.username, sasl.password",
    ),
    "unknown-authority": Bad(
        "TLS",
        lambda world: trusting(world.foreign),
        "verify that ssl.ca.location is correctly configured",
        "certificate verify failed.*check .* listener for SSL, and ssl.ca.location",
    ),
    "no-certificate-shown": Bad(
        "MTLS",
        lambda world: trusting(world.ours),
        "bad certificate|certificate required",
        "check .* listener for SSL, and ssl.ca.location, ssl.certificate.location",
    ),
    "wrong-secret-oauth": Bad(
        "OAUTH",
        lambda world: world.endpoint.login(SECRET),
        r"Failed to retrieve OIDC token.*\(401\)",
        r"/token gave no token \(HTTP 401\): check sasl.oauthbearer.client.id, .client.secret and .scope",
    ),
    "foreign-certificate-shown": Bad(
        "MTLS",
        lambda world: {**showing(world.foreign), **trusting(world.ours)},
        "unknown ca|bad certificate|certificate required|certificate unknown",
        "check .* ssl.certificate.location",
        full=True,
    ),
    "other-mechanism": Bad(
        "BOTH",
        lambda world: {**trusting(world.ours), **with_password("SCRAM-SHA-256", "SASL_SSL")},
        "Unsupported SASL mechanism: broker's supported mechanisms: PLAIN",
        "check .* listener for SASL_SSL with SCRAM-SHA-256",
        full=True,
    ),
    "plaintext-to-tls": Bad(
        "TLS", lambda _: {}, "Disconnected|SSL", "check that the URL's port is a listener for PLAINTEXT", full=True
    ),
    "tls-to-plaintext": Bad(
        "PLAINTEXT",
        lambda world: trusting(world.ours),
        "connecting to a PLAINTEXT broker listener",
        "check that the URL's port is a listener for SSL",
        full=True,
    ),
    "login-at-a-listener-without": Bad(
        "PLAINTEXT",
        lambda _: with_password("PLAIN"),
        "not valid in current SASL state",
        "check that the URL's port is a listener for SASL_PLAINTEXT with PLAIN",
        full=True,
    ),
}


@pytest.mark.parametrize("way", [pytest.param(n, marks=[pytest.mark.full] if b.full else []) for n, b in BAD.items()])
def test_a_refused_login_is_told_within_the_deadline_with_what_to_check(world, ask, way):
    bad, lines = BAD[way], Lines()
    settings = world.settings(bad.listener, bad.tell(world), SHORT)
    with within(SHORT), pytest.raises((AccessDenied, BrokerUnavailable)) as caught:
        ask(settings, SHORT, lines)
    told = "\n".join(lines)
    assert re.search(bad.log if ask is by_confluent else bad.error, told), told
    assert SECRET not in told + str(caught.value)


@pytest.mark.parametrize("told", [{}, {"ssl.endpoint.identification.algorithm": ""}], ids=["checked", "given-up"])
def test_a_certificate_for_another_name_is_refused_unless_names_are_not_compared(world, ask, told):
    settings = world.settings("TLS", {**trusting(world.ours), **told}, SHORT, host="localhost")
    if told:
        assert ask(settings, LONG, Lines())
    else:
        with pytest.raises(BrokerUnavailable):
            ask(settings, SHORT, Lines())


def test_a_bridge_works_over_tls_with_a_login(world):
    told = {**trusting(world.ours), **with_password("PLAIN", "SASL_SSL")}
    url = f"kafka://{HOST}:{world.ports['BOTH']}"
    with txnbridge.connect(url, transactional_id="secure", create_topics=1, kafka=told) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send("secure", b"1")
        assert bridge.commit(str(txn.token)) is txnbridge.Outcome.COMMITTED
        assert next(iter(bridge.consumer("secure"))).value == b"1"


def test_a_bridge_with_a_wrong_password_does_not_open_and_says_what_to_check(world):
    url = f"kafka://{HOST}:{world.ports['SASL']}"
    with pytest.raises((AccessDenied, BrokerUnavailable), match=r"check .*sasl\.username, sasl\.password") as caught:
        txnbridge.connect(url, timeout=SHORT, kafka=with_password("PLAIN", password=SECRET))
    assert SECRET not in str(caught.value)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as started:
        yield started


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return the clock that the holder of tokens gets for time.monotonic()."""
    now = [1000.0]
    monkeypatch.setattr(security, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def tokens(endpoint: Endpoint, **told: Any) -> OAuthTokens:
    provider = read({**endpoint.login(), **told}).access.tokens
    assert isinstance(provider, OAuthTokens)
    return provider


def test_a_token_is_used_until_most_of_its_life_has_passed(endpoint, clock):
    provider = tokens(endpoint)
    first = provider.token(LATE)
    clock[0] += 47
    assert provider.token(LATE) == first
    clock[0] += 1
    assert provider.token(LATE) != first
    assert endpoint.answers == [200, 200]


def test_while_the_endpoint_is_away_a_token_is_used_until_it_dies(endpoint, clock):
    provider = tokens(endpoint)
    first = provider.token(LATE)
    endpoint.breaks = True
    clock[0] += 59
    assert provider.token(LATE) == first
    clock[0] += 1
    with pytest.raises(BrokerUnavailable, match="HTTP 503"):
        provider.token(LATE)


def test_a_silent_endpoint_leaves_time_to_log_in_by_the_last_token_and_delays_no_other(endpoint, clock, monkeypatch):
    provider = tokens(endpoint)
    first = provider.token(LATE)
    clock[0] += 48
    failed = fail_call(monkeypatch, OAuthTokens, "_fetch", BrokerUnavailable("no answer"), EACH)
    assert [provider.token(clock[0] + 1) for _ in range(2)] == [first, first]
    assert failed == [(provider, 0.5)]


@pytest.mark.parametrize("lives", [None, "soon", math.nan, [], 10**400], ids=lambda told: str(told)[:4])
def test_a_token_whose_life_is_not_told_is_used_once(endpoint, lives):
    endpoint.lives = lives
    provider = tokens(endpoint)
    assert provider.token(LATE) != provider.token(LATE)


def test_the_scope_is_asked_for(endpoint):
    tokens(endpoint, **{"sasl.oauthbearer.scope": "read write"}).token(LATE)
    assert endpoint.asked == ["grant_type=client_credentials&scope=read+write"]


def test_many_threads_ask_for_one_token(endpoint):
    with ThreadPoolExecutor(8) as pool:
        found = {*pool.map(tokens(endpoint).token, [LATE] * 8)}
    assert (len(found), endpoint.answers) == (1, [200])


def test_a_thread_that_waits_for_anothers_token_keeps_its_deadline(endpoint, monkeypatch):
    hold = Hold()
    monkeypatch.setattr(OAuthTokens, "_fetch", hold)
    provider = tokens(endpoint)
    with hold.asked_by(lambda: provider.token(LATE)), pytest.raises(TimeoutError):
        provider.token(time.monotonic() + 0.1)


def test_an_exception_of_a_signal_handler_keeps_no_later_login_from_its_token(endpoint, monkeypatch):
    answer_calls(monkeypatch, OAuthTokens, "_fetch", {"access_token": "token"})
    provider = tokens(endpoint)

    def ask() -> None:
        provider.token(time.monotonic() + 5)

    assert interrupted_everywhere(ask, ask, ["security.py", "deadline.py"])


def test_an_endpoint_that_refuses_says_what_to_check_and_shows_no_secret(endpoint):
    provider = tokens(endpoint, **{"sasl.oauthbearer.client.secret": SECRET})
    with pytest.raises(AccessDenied, match=r"/token gave no token \(HTTP 401\): check .*client\.secret") as caught:
        provider.token(LATE)
    assert SECRET not in str(caught.value)
    assert "tenant" not in str(caught.value)  # a query may hold a secret too


def test_a_redirect_does_not_take_the_secret_to_another_host(endpoint):
    with Endpoint() as other:
        endpoint.moved = other.url
        with pytest.raises(BrokerUnavailable):
            tokens(endpoint).token(LATE)
    assert (len(endpoint.asked), other.asked) == (1, ["None"])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_endpoint_that_is_not_there_is_told_without_its_password(endpoint, scheme):
    provider = tokens(endpoint, **{"sasl.oauthbearer.token.endpoint.url": f"{scheme}://me:{SECRET}@127.0.0.1:1/token"})
    with pytest.raises(BrokerUnavailable, match=f"the token endpoint {scheme}://127.0.0.1:1/token gave no token"):
        provider.token(LATE)


def test_an_answer_without_a_token_is_told(endpoint):
    endpoint.answer = lambda *_: (200, {"token": "x"})
    with pytest.raises(BrokerUnavailable, match="answered without an access_token"):
        tokens(endpoint).token(LATE)
