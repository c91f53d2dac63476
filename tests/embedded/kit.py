"""The embedded broker through its contract, without the core: what these tests share."""

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from txnbridge_embedded.backend import EmbeddedBackend
from txnbridge_embedded.broker import EmbeddedBroker
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.settings import Settings, Timing
from txnbridge_embedded.write.writer import EmbeddedWriter

from tests.core.reading_kit import Listener
from txnbridge import spi
from txnbridge.errors import InvalidOption, NotFound

NO_LEDGER: Any = None  # this broker keeps its evidence itself


def open_broker(
    path: Path | str,
    *,
    timeout: float = 10,
    create_topics: int | None = 1,
    listener: Callable[[Any], object] | None = None,
    timing: Timing | None = None,
    **options: Any,
) -> EmbeddedBroker:
    """A broker on a file, as the core would open it, perhaps with other durations and sizes."""
    backend = EmbeddedBackend()
    events = spi.Emitter("test", [listener] if listener else [])
    context = spi.Context("test", events, "test", timeout, None, create_topics)
    complete = {name: option.default for name, option in backend.options.items()} | options
    with pytest.MonkeyPatch.context() as patch:
        if timing is not None:
            patch.setattr("txnbridge_embedded.backend.Settings", partial(Settings, timing=timing))
        return backend.open(
            spi.Url("embedded", (), str(path), f"embedded:{path}"), complete, context, spi.Deadline(timeout)
        )


def identity(name: str | None = None, host: str = "here pid 1") -> spi.Identity:
    return spi.Identity(name or f"anonymous-{secrets.token_hex(4)}", name is not None, "test", host)


def open_writer(
    broker: spi.Broker, name: str | None = None, host: str = "here pid 1", timeout: float = 10
) -> EmbeddedWriter:
    """A plain writer; with a name that name is opened, which fences its older owner."""
    (writer,) = broker.open_writers(identity(name, host), 1, NO_LEDGER, spi.Deadline(timeout))
    assert isinstance(writer, EmbeddedWriter)
    return writer


def open_preparing(broker: spi.Broker, name: str | None = None, host: str = "here pid 1") -> EmbeddedWriter:
    writer = broker.prepare_writer(identity(name, host), NO_LEDGER, spi.Deadline(10))
    assert isinstance(writer, EmbeddedWriter)
    return writer


_numbers = itertools.count(1)


def begin(
    writer: spi.Writer,
    topic: str = "",
    *values: bytes | None,
    timeout: float = 10,
    hold: float | None = None,
    prepare: bool = False,
) -> str:
    """Begin a transaction, send what it is to send, and return its id."""
    transaction = f"transaction-{secrets.token_hex(4)}-{next(_numbers)}"
    writer.begin(spi.Begin(transaction, spi.Deadline(timeout), prepare, hold))
    send(writer, topic, *values)
    return transaction


def send(writer: spi.Writer, topic: str, *values: bytes | None, partition: int | None = None) -> None:
    for value in values:
        writer.send(topic, value, None, None, partition, None)


def commit(writer: spi.Writer, topic: str, *values: bytes | None, partition: int | None = None) -> None:
    """One whole transaction."""
    begin(writer)
    send(writer, topic, *values, partition=partition)
    writer.commit(spi.Deadline(10))


def prepare(
    broker: spi.Broker, topic: str, *values: bytes, name: str | None = None, hold: float | None = None
) -> spi.Token:
    """One prepared transaction, whose writer is gone."""
    writer = open_preparing(broker, name)
    transaction = begin(writer, topic, *values, hold=hold, prepare=True)
    writer.prepare(spi.Deadline(10))
    token = token_of(broker, writer, transaction, prepared=True)
    writer.close()
    return token


def token_of(broker: spi.Broker, writer: spi.Writer, transaction: str, *, prepared: bool = False) -> spi.Token:
    evidence = writer.evidence()
    return spi.Token(
        "embedded", broker.cluster, transaction, evidence.how, prepared, evidence.expires_at, evidence.messages
    )


def alone(broker: spi.Broker, topic: str = "orders") -> spi.Reader:
    """A reader without a group, on a topic that is made if nobody has written to it yet."""
    with suppress(InvalidOption):  # it is there, with more partitions
        broker.admin.create_topic(topic, 1, spi.Deadline(10))
    return broker.reader(spi.Subscription((topic,)), Listener(), spi.Deadline(10))


def read(broker: spi.Broker, topic: str) -> list[spi.Message]:
    """Every committed message of a topic that can be read now, partition by partition; none if there is no topic."""
    try:
        reader = broker.reader(spi.Subscription((topic,)), Listener(), spi.Deadline(10))
    except NotFound:
        return []
    try:
        found: list[spi.Message] = []
        while any(reader.lag(spi.Deadline(10)).values()):
            found += reader.poll(1000, spi.Deadline(10))
        return sorted(found, key=lambda message: (message.partition, message.position))
    finally:
        reader.close(spi.Deadline(10))


def values(broker: spi.Broker, topic: str) -> list[Any]:
    return [message.value for message in read(broker, topic)]


def offsets(broker: spi.Broker, topic: str) -> list[int]:
    return [message.position[0] for message in read(broker, topic)]


def rows(broker: EmbeddedBroker, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query of the file itself."""
    with broker.session(spi.Deadline(10)) as connection, broker.store.reading(connection, spi.Deadline(10)):
        return connection.execute(query, parameters).fetchall()


def execute(broker: EmbeddedBroker, statement: str, *parameters: object) -> None:
    """Change the file by hand."""
    with broker.session(spi.Deadline(10)) as connection, broker.store.writing(connection, spi.Deadline(10), "a test"):
        connection.execute(statement, parameters)


@contextmanager
def busy(broker: EmbeddedBroker) -> Iterator[None]:
    """Keep the file locked against all who write."""
    connection = broker.store.connect()
    with broker.store.writing(connection, spi.Deadline(10), "being busy"):
        yield
    connection.close()


def trim(broker: EmbeddedBroker, offset: int, partition_id: int = 1) -> None:
    """Move the start of a partition, as retention does."""
    with broker.session(spi.Deadline(10)) as connection, broker.store.writing(connection, spi.Deadline(10), "trimming"):
        base = partition_id << OFFSET_BITS
        connection.execute("DELETE FROM messages WHERE id >= ? AND id < ?", (base, base + offset))
        connection.execute("UPDATE partitions SET first = ? WHERE id = ?", (offset, partition_id))


def send_stamped(broker: spi.Broker, *timestamps: int, topic: str = "orders") -> None:
    """Commit one message for each timestamp."""
    writer = open_writer(broker)
    begin(writer)
    for timestamp in timestamps:
        writer.send(topic, b"%d" % timestamp, None, None, None, timestamp)
    writer.commit(spi.Deadline(10))
