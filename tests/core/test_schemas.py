"""Codecs with a schema registry: what becomes Avro and comes back, what is poison and what is not."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import pydantic
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from txnbridge import BrokerUnavailable, InvalidOption, Message, Poison, Topic, codecs
from txnbridge.spi import NO_HEADERS


class Kind(Enum):
    GIFT = "gift"
    SALE = "sale"


@dataclasses.dataclass
class Item:
    name: str
    price: float


@dataclasses.dataclass
class Order:
    id: int
    items: list[Item]
    at: datetime
    key: uuid.UUID
    kind: Kind
    weights: dict[str, int]
    note: str | None = None
    parent: Order | None = None


@dataclasses.dataclass
class Note:
    text: str | None = None


class Remark(pydantic.BaseModel):
    text: str | None = None


class Model(pydantic.BaseModel):
    id: int
    at: datetime
    kind: Kind
    note: str | None = None


NOW = datetime.now(UTC)
ORDER = Order(1, [Item("pen", 1.5)], NOW, uuid.uuid4(), Kind.SALE, {"kg": 2})


@pytest.fixture
def registry() -> SchemaRegistryClient:
    """A registry in this process; the tests of Kafka have a real one."""
    return SchemaRegistryClient.new_client({"url": f"mock://{uuid.uuid4()}"})


def message(value: bytes | None) -> Message:
    return Message("orders", 0, (7,), None, value, NO_HEADERS, 0, 1, None)


@pytest.mark.parametrize(
    "value", [ORDER, dataclasses.replace(ORDER, parent=ORDER, note="n"), Model(id=1, at=NOW, kind=Kind.GIFT)]
)
def test_dataclasses_and_models_become_avro_and_come_back(registry: SchemaRegistryClient, value: Any):
    topic = Topic("orders", codecs.avro(type(value), registry))
    encoded = topic.encode_value(value)
    assert encoded is not None and encoded[:5] == b"\0\0\0\0\1"
    assert topic.decode(message(encoded)).value == value
    assert topic.decode(message(None)).value is None


@pytest.mark.parametrize("kind", [Note, Remark])
def test_an_object_of_another_class_does_not_become_a_message_without_its_fields(registry, kind):
    topic = Topic("notes", codecs.avro(kind, registry))
    assert topic.decode(message(topic.encode_value({"text": "n"}))).value == kind(text="n")
    with pytest.raises(InvalidOption, match="notes"):
        topic.encode_value(ORDER)


def test_a_message_of_an_older_schema_is_read_and_one_that_does_not_fit_names_its_schema(registry):
    schema = '{"type": "record", "name": "Item", "fields": [{"name": "name", "type": "string"}%s]}'
    topic = Topic("orders", codecs.avro(Item, registry, schema=schema % ', {"name": "price", "type": "double"}'))
    context = SerializationContext("orders", MessageField.VALUE)
    newer = AvroSerializer(registry, schema % ', {"name": "price", "type": "double"}, {"name": "x", "type": "int"}')
    older = AvroSerializer(registry, schema % "")
    assert topic.decode(message(newer({"name": "pen", "price": 2.0, "x": 1}, context))).value == Item("pen", 2.0)
    for value, reason in (
        (older({"name": "pen"}, context), "schema 2"),
        (b"\0\0\0\0\x63secret", "schema 99: the registry does not know it"),
        (b"secret", "it has no schema id"),
    ):
        with pytest.raises(Poison, match=reason) as caught:
            topic.decode(message(value))
        assert "secret" not in str(caught.value)


def test_no_message_is_poison_while_the_registry_is_away():
    client = SchemaRegistryClient({"url": "http://127.0.0.1:9", "max.retries": 0})
    topic = Topic("orders", codecs.avro(Item, client))
    for call in (lambda: topic.encode_value(Item("pen", 1.0)), lambda: topic.decode(message(b"\0\0\0\0\1x"))):
        with pytest.raises(BrokerUnavailable):
            call()


def unknown_type() -> object:
    return codecs.avro(complex, "mock://x")


def same_name() -> object:
    other = dataclasses.make_dataclass("Item", [("name", str), ("price", float), ("floor", int)])
    return codecs.avro(dataclasses.make_dataclass("Two", [("first", Item), ("second", other)]), "mock://x")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (codecs.confluent, "takes a serializer, a deserializer"),
        (unknown_type, "give the schema"),
        (same_name, "two classes Item"),
    ],
)
def test_a_codec_that_cannot_work_is_refused(make: Callable[[], object], sentence: str):
    with pytest.raises(InvalidOption, match=sentence):
        make()
