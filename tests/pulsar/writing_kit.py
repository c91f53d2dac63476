"""Helpers of the tests of the writer, which look behind the public interface and around it."""

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

from txnbridge_conformance import brokers, faults
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.open_transactions import list_open
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.outcome.outcome import TokenEvidence
from txnbridge_pulsar.write.batching import TransactionProducer
from txnbridge_pulsar.write.fence import Fence, last_fence_record
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord, ProofLocation
from txnbridge_pulsar.write.owner import PulsarOwner
from txnbridge_pulsar.write.writer import PulsarWriter

import txnbridge
from tests import inside
from tests.inside import broker_of, connection_of
from tests.pulsar.kit import SOON, Connection, open_cluster
from txnbridge import Bridge, Token, TokenState, Transaction
from txnbridge.spi import Deadline

Connect = Callable[..., Bridge]
WithTiming = Callable[..., AbstractContextManager[None]]


def connect_to(url: str, admin_url: str, **settings: Any) -> Bridge:
    """A bridge with one writer, unless told otherwise, whose topics are made as they are used."""
    options = {"admin_url": admin_url, **settings.pop("pulsar", {})}
    return txnbridge.connect(url, pulsar=options, **{"create_topics": 1, "writers": 1, "timeout": 60, **settings})


def unique(what: str) -> str:
    return f"{what}-{secrets.token_hex(4)}"


def new_topic(bridge: Bridge, partitions: int = 1) -> str:
    """A topic that nobody else uses, by the name that users have for it."""
    name = unique("written")
    cluster_of(bridge).topics.create(name, partitions, Deadline(SOON))
    return name


def cluster_of(bridge: Bridge) -> ClusterAccess:
    found: ClusterAccess = broker_of(bridge)._cluster
    return found


def owner_of(bridge: Bridge) -> PulsarOwner:
    owner = broker_of(bridge)._owners[connection_of(bridge).identity.name]
    assert isinstance(owner, PulsarOwner)
    return owner


def writer_of(txn: Transaction) -> PulsarWriter:
    writer = inside.writer_of(txn)
    assert isinstance(writer, PulsarWriter)
    return writer


def topic_producer(writer: PulsarWriter, topic: str) -> TransactionProducer:
    return writer._producers[concrete(topic)]


def producer_of(txn: Transaction, topic: str) -> wire.PulsarProducer:
    """Return the client's producer by which a transaction writes into a topic."""
    producer = topic_producer(writer_of(txn), topic)._producer
    assert producer is not None
    return producer


def register(txn: Transaction, topic: str) -> None:
    """Name a topic to the coordinator as one in which the transaction writes, and write nothing."""
    writer_of(txn)._register([concrete(topic)], [], Deadline(SOON))


def flush(txn: Transaction) -> wire.TxnId:
    """Let the broker have all of it, and the transaction stay open; its number."""
    writer = writer_of(txn)
    writer.flush(Deadline(txn.deadline))
    number = writer._txn
    assert number is not None
    return number


def announced(bridge: Bridge) -> AnnouncedTransaction:
    """Return an owner's announcement of its only transaction."""
    (found,) = under_way(bridge).values()
    return found


def under_way(bridge: Bridge) -> dict[wire.TxnId, AnnouncedTransaction]:
    """Return the transactions that an owner believes to be open, by their numbers."""
    return owner_of(bridge)._under_way


def notice_of(bridge: Bridge) -> FenceRecord:
    """Return the newest record on the fence topic of a bridge's id."""
    found = last_fence_record(cluster_of(bridge), fence_of(bridge).topic, Deadline(SOON))
    assert found is not None
    return found[1]


def fence_of(bridge: Bridge) -> Fence:
    fence = owner_of(bridge)._fence
    assert fence is not None
    return fence


def proof_topic_of(txn: Transaction) -> str:
    """The full name of the proof topic of a transaction's writer."""
    proof = writer_of(txn).proof
    assert proof is not None
    return proof.topic


def proxied(proxy: faults.Proxy) -> str:
    """A bridge's URL by way of a proxy."""
    return proxy.url.partition("?")[0]


def prepare(bridge: Bridge, topic: str, value: bytes = b"prepared") -> str:
    """Prepare a transaction with one message, and return its token."""
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, value)
    return str(txn.token)


def state_of(bridge: Bridge, token: str) -> TokenState:
    return bridge.status(token).state


def token_of(txn: Transaction, bridge: Bridge) -> Token:
    """Return the token that an error has if the answer to the commit is lost."""
    return Token("pulsar", bridge.cluster, txn.id, {**writer_of(txn).evidence().how, "a": True}, False)


def evidence_of(token: Token | str | None) -> tuple[wire.TxnId, ProofLocation]:
    """Return the broker's transaction that a token names, and where its proof is."""
    assert token is not None
    how = TokenEvidence.read(Token.parse(token).how)
    assert how.txn is not None and how.proof is not None
    return how.txn, how.proof


def end_all(broker: brokers.Pulsar) -> None:
    """Abort whatever is open: while anything older is, brokers do not learn what they may refuse."""
    with closing(Connection(broker.url, admin_url=broker.admin_url)) as connection:
        for found in list_open(open_cluster(connection), Deadline(SOON)):
            with suppress(wire.TransactionNotFound, wire.InvalidTransactionStatus):
                connection.client.transactions.end(found.txn, False, SOON)


def concrete(topic: str, partition: int | None = 0) -> str:
    """Return the full name of a partition."""
    full = wire.full_topic_name(topic)
    return full if partition is None else f"{full}-partition-{partition}"


def read_all(client: wire.PulsarClient, topic: str, patience: float = SOON) -> list[bytes | None] | None:
    """Return the values that a wire client's reader sees up to now; None if a transaction holds the topic back.

    A plain message written behind all that is there tells: once it can be read, everything before it has been.
    """
    mark = secrets.token_bytes(12)
    producer = client.create_producer(topic, timeout=SOON)
    producer.send(wire.Single(mark), timeout=SOON).result(SOON)
    producer.close(SOON)
    found: list[bytes | None] = []
    until = time.monotonic() + patience
    with wire.closing(client.read(topic, timeout=SOON), lambda: SOON) as reader:
        while mark not in found:
            if time.monotonic() > until:
                return None
            for entry in reader.receive(min(1, patience)):
                found += [message.value for message in entry.messages()]
    return [value for value in found[:-1] if value is None or len(value) != len(mark)]
