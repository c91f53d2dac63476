"""Helpers of the tests of the wire client, which ask a real broker beside the client itself."""

import itertools
import json
import time
import urllib.request
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from txnbridge_conformance import brokers
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.connecting.connection import BrokerConnection
from txnbridge_pulsar.client.format.outgoing_entry import Content

# Far more than anything takes, also on a busy machine.
SOON = 30.0
_numbers = itertools.count()


def fresh_topic() -> str:
    return f"persistent://public/default/wire-{uuid.uuid4().hex[:8]}-{next(_numbers)}"


def service(broker: brokers.Pulsar) -> str:
    """The service URL, without the namespace that the bridge's URL has behind it."""
    return broker.url.rsplit("/", 2)[0]


def admin(broker: brokers.Pulsar, method: str, path: str, body: Any = None, version: int = 2) -> Any:
    """Ask the broker's REST interface."""
    request = urllib.request.Request(
        f"{broker.admin_url}/admin/v{version}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SOON) as response:
        data = response.read()
    return json.loads(data) if data else None


def path_of(topic: str) -> str:
    return topic.replace("://", "/")


def batch_of(*payloads: bytes) -> wire.MessageBatch:
    batch = wire.MessageBatch()
    batch.extend(payloads)
    return batch


def mend(producer: wire.PulsarProducer, timeout: float = SOON) -> None:
    """Reopen, as often as it takes, and send what is unconfirmed once more: the same bytes in the same order."""
    while producer.lost is not None:
        producer.reopen(timeout)
        with suppress(wire.BrokerConnectionLost):  # lost again
            producer.resend(timeout)


def send_for_certain(
    producer: wire.PulsarProducer, content: Content, txn: wire.TxnId | None = None, timeout: float = SOON
) -> None:
    """Send, whatever happens to the connection."""
    while True:
        mend(producer, timeout)
        try:
            producer.send(content, txn, timeout=timeout)
        except wire.BrokerConnectionLost as error:
            if not error.may_have_had_effect:
                continue
        return


def settle(producer: wire.PulsarProducer, timeout: float = SOON) -> None:
    """Wait for every receipt, whatever happens to the connection."""
    producer.flush(timeout)
    while producer.lost is not None:
        mend(producer, timeout)
        producer.flush(timeout)


def begin(
    client: wire.PulsarClient, *topics: str, ttl_ms: int = 60_000, group: tuple[str, str] | None = None
) -> wire.TxnId:
    """Begin a transaction on topics and on a (topic, group)."""
    txn = client.transactions.begin(ttl_ms, SOON)
    client.transactions.register(txn, SOON, topics, [group] if group else [])
    return txn


def receive(consumer: wire.PulsarConsumer, messages: int) -> list[wire.ReceivedEntry]:
    """Entries until so many messages came."""
    found: list[wire.ReceivedEntry] = []
    until = time.monotonic() + SOON
    while sum(len(entry.messages()) for entry in found) < messages:
        assert time.monotonic() < until, f"only {found} came"
        found += consumer.receive(1)
    return found


def acknowledge(
    consumer: wire.PulsarConsumer, ids: list[wire.MessageId], txn: wire.TxnId | None = None, timeout: float = SOON
) -> None:
    for answer in consumer.start_acknowledge(ids, txn, timeout=timeout):
        answer.result(timeout)


def connection_of(side: wire.PulsarProducer | wire.PulsarConsumer) -> BrokerConnection:
    connection = side._connection
    assert connection is not None
    return connection


def cut(side: wire.PulsarProducer | wire.PulsarConsumer) -> None:
    """Let its connection end."""
    connection_of(side).close()


def waiting(inbox: wire.Inbox) -> Collection[Any]:
    """Return the entries that have come, and nobody has taken yet."""
    return inbox._waiting


def payloads(entries: list[wire.ReceivedEntry]) -> list[bytes]:
    return [message.payload for entry in entries for message in entry.messages()]


def everything(client: wire.PulsarClient, topic: str) -> list[bytes]:
    """Return the values that a new reader can read, up to what the broker calls the last message."""
    reader = client.read(topic, timeout=SOON)
    last = reader.last_message_id(SOON)
    found: list[wire.ReceivedEntry] = []
    until = time.monotonic() + SOON
    while last.entry >= 0 and (not found or found[-1].id[:2] < last[:2]):
        assert time.monotonic() < until, f"only {found} came, up to {last}"
        found += reader.receive(1)
    reader.close(SOON)
    return payloads(found)
