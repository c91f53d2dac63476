"""Tests of brokers in containers, with an engine of a few lines that records its requests."""

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._container import KafkaContainer, PulsarContainer, engine_answers

from tests.brokers.kit import port_attempts
from txnbridge.errors import BackendMissing

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("testcontainers"), reason="needs testcontainers")


class Engine(ThreadingHTTPServer):
    """Answers success to all requests, and records what it is asked to create and to do."""

    daemon_threads = False  # so that closing the server waits for its threads

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: dict[str, Any] = {}
        self.done: list[str] = []
        self.status = "created"

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, document: object, code: int = 200) -> None:
        body = b"OK" if self.path.endswith("/_ping") else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer(None)

    def do_GET(self) -> None:
        if self.path.endswith("/version"):
            self.answer({"ApiVersion": "1.45", "MinAPIVersion": "1.24", "Version": "1", "Os": "linux", "Arch": "amd64"})
        elif "/containers/" in self.path:
            self.answer(
                {"Id": "c1", "Name": "/c1", "State": {"Status": self.server.status}, "Image": "i1", "Config": {}}
            )
        else:
            self.answer({"Id": "i1", "RepoTags": []} if "/images/" in self.path else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "/containers/create" in self.path:
            self.server.created = json.loads(body)
            self.answer({"Id": "c1", "Warnings": []}, 201)
            return
        found = re.search(r"/containers/c1/(\w+)", self.path)
        if found:
            self.server.done.append(found[1])
            states = {"start": "running", "unpause": "running", "pause": "paused", "kill": "exited", "stop": "exited"}
            self.server.status = states.get(found[1], self.server.status)
        self.answer({"StatusCode": 0})

    def do_DELETE(self) -> None:
        self.server.done.append("remove")
        self.answer({})


@pytest.fixture
def engine(monkeypatch) -> Iterator[Engine]:
    from testcontainers.core.config import testcontainers_config

    with Engine() as engine:
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        # Ryuk removes containers of killed test runs, and would be a container itself.
        monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
        yield engine
        engine.shutdown()
        thread.join()


@pytest.fixture
def answering(monkeypatch) -> None:
    """Pretend that the broker in the container answers."""
    for kind in (KafkaContainer, PulsarContainer):
        monkeypatch.setattr(kind, "_answers", lambda self: True)


@pytest.mark.usefixtures("answering")
def test_an_engine_that_answers_is_asked_for_one_node_of_kafka(engine):
    with brokers.kafka(settings={"log.retention.ms": "1000"}) as broker:
        assert isinstance(broker, KafkaContainer)
        port = int(broker.url.rpartition(":")[2])
        ((listen, upstream),) = broker.routes
    assert engine.created["Image"] == "apache/kafka:4.4.0"
    bound = engine.created["HostConfig"]["PortBindings"]
    assert bound == {f"{p}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(p)}] for p in (port, upstream)}
    given = dict(line.split("=", 1) for line in engine.created["Env"])
    assert given["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://127.0.0.1:{port},PROXY://127.0.0.1:{listen}"
    assert given["KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR"] == "1"
    assert given["KAFKA_LOG_RETENTION_MS"] == "1000"
    assert engine.done == ["start", "remove"]


@pytest.mark.usefixtures("answering")
def test_an_engine_that_answers_is_asked_for_pulsar(engine):
    with brokers.pulsar(settings={"maxMessageSize": "1000"}, delete_unused=True) as broker:
        assert isinstance(broker, PulsarContainer)
        port = int(broker.url.removeprefix("pulsar://127.0.0.1:").removesuffix("/public/default"))
        web = int(broker.admin_url.removeprefix("http://127.0.0.1:"))
        ((listen, upstream),) = broker.routes
    assert engine.created["Image"] == "apachepulsar/pulsar:4.2.4"
    assert engine.created["Cmd"][:2] == ["sh", "-c"] and "bin/pulsar standalone" in engine.created["Cmd"][2]
    bound = engine.created["HostConfig"]["PortBindings"]
    assert bound == {f"{p}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(p)}] for p in (port, upstream, web)}
    given = dict(line.split("=", 1) for line in engine.created["Env"])
    told = f"internal:pulsar://127.0.0.1:{port},proxy:pulsar://127.0.0.1:{listen}"
    assert given["PULSAR_PREFIX_advertisedListeners"] == told
    assert given["PULSAR_PREFIX_bindAddresses"] == f"proxy:pulsar://0.0.0.0:{upstream}"
    assert given["PULSAR_PREFIX_maxMessageSize"] == "1000"
    assert given["PULSAR_STANDALONE_USE_ZOOKEEPER"] == "1"
    assert "PULSAR_PREFIX_brokerDeleteInactiveTopicsEnabled" not in given
    assert engine.done == ["start", "remove"]


@pytest.mark.usefixtures("answering")
def test_each_call_to_a_broker_becomes_a_call_to_the_engine(engine):
    with brokers.kafka(container=True) as broker:
        broker.pause()
        broker.resume()
        broker.restart()
        broker.stop()
        broker.start()
    assert engine.done == ["start", "pause", "unpause", "kill", "wait", "start", "stop", "start", "remove"]


@pytest.mark.parametrize("start", [brokers.kafka, brokers.pulsar])
def test_a_container_that_does_not_answer_is_removed(engine, start):
    with pytest.raises(brokers.CannotStart, match=r"did not answer within 0\.1 s"):
        start(container=True, start_timeout=0.1)
    assert engine.done[-1] == "remove"


def test_options_that_a_container_cannot_offer_start_processes(engine, monkeypatch):
    port_attempts(monkeypatch, brokers, "KafkaProcess", 0)
    for options in ({"nodes": 3}, {"transaction_version": 1}, {"container": False}):
        assert str(brokers.kafka(**options)) == "started"


@pytest.mark.parametrize("engine", ["unix:///no/such/socket", "tcp://127.0.0.1:1"])
def test_an_address_without_an_engine_is_no_engine_that_answers(monkeypatch, engine):
    monkeypatch.setenv("DOCKER_HOST", engine)
    assert not engine_answers()


def test_the_error_without_testcontainers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "testcontainers", None)
    assert not engine_answers()
    monkeypatch.setitem(sys.modules, "testcontainers.core.container", None)
    with pytest.raises(BackendMissing, match=r"pip install -e '\.\[brokers\]'"):
        brokers.kafka(container=True)
