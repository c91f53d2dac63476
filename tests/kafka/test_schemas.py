"""Messages with schemas of a real registry: an official producer's, and those that nobody can read."""

import dataclasses
import gc
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from txnbridge_conformance.brokers import _broker, _jars

from tests.in_time import wait_until
from tests.kafka.kit import bootstrap_of
from txnbridge import Topic, codecs

# The registry's clients leave their sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dataclasses.dataclass
class Order:
    id: int
    note: str | None = None


class Registry:
    """Apicurio's registry, in memory, which answers as Confluent's does."""

    def __init__(self) -> None:
        self._port = _broker.free_ports(1)[0]
        self.url = f"http://{_broker.HOST}:{self._port}/apis/ccompat/v7"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        archive = _jars.Artifact("io.apicurio", "apicurio-registry-app", "2.6.13.Final")
        folder = _jars.fetch_from_archive("apicurio-registry-2.6.13", archive, "**/*.jar", classifier="all")
        jar = next(Path(folder).glob("*-runner.jar"))
        settings = [f"-Dquarkus.http.port={self._port}", f"-Dquarkus.http.host={_broker.HOST}"]
        command = [_jars.java(), "-Xmx256m", *settings, "-jar", str(jar)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            with closing(urllib.request.urlopen(f"{self.url}/subjects", timeout=60)) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    try:
        found.start()
        yield found
    finally:
        found.kill()
    for each in gc.get_objects():
        if type(each) is SchemaRegistryClient:
            each.close()  # else its sockets may be collected in a later module


def test_avro_is_read_as_a_dataclass_and_waits_while_the_registry_is_away(bridge, registry, unique):
    orders = Topic(unique("orders"), codecs.avro(Order, registry.url))
    bridge.ensure_topics(orders, "lost")
    with bridge.transaction() as txn:
        txn.send(orders, Order(1, "first"))
        txn.send(orders.name, b"\0\0\0\0\x63x", key=b"unknown")
    registry.send(signal.SIGSTOP)
    found: list[Order] = []
    client = SchemaRegistryClient({"url": registry.url, "max.retries": 0, "timeout": 2})
    readable = Topic(orders.name, codecs.avro(Order, client))
    processor = bridge.processor(
        readable, group=unique("g"), each=lambda message, _: found.append(message.value), dead_letter="lost"
    )
    with processor:
        wait_until(lambda: processor.stats.retries > 1)
        assert processor.stats.dead_letters == 0 and not found
        registry.send(signal.SIGCONT)
        wait_until(lambda: processor.stats.messages == 2)
    assert found == [Order(1, "first")]
    (dead,) = bridge.read("lost", 60)
    assert "schema 99: the registry does not know it" in str(dict(dead.headers))


def test_an_official_producer_and_a_bridge_read_each_other(bridge, registry, unique, kafka_broker):
    client = SchemaRegistryClient({"url": registry.url})
    schema = '{"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}'
    codec = codecs.confluent(JSONSerializer(schema, client), JSONDeserializer(schema))
    topic = Topic(unique("orders"), codec)
    bridge.ensure_topics(topic)
    producer = Producer({"bootstrap.servers": bootstrap_of(kafka_broker)})
    producer.produce(
        topic.name, JSONSerializer(schema, client)({"id": 1}, SerializationContext(topic.name, MessageField.VALUE))
    )
    assert producer.flush(60) == 0
    with bridge.transaction() as txn:
        txn.send(topic, {"id": 2})
    with bridge.consumer(topic) as reader:
        assert [next(iter(reader)).value for _ in range(2)] == [{"id": 1}, {"id": 2}]
