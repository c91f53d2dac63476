"""Helpers for tests of writers: programs that die, and what the broker has, without the bridge."""

from typing import Any

from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import HALF_TOPIC, Property
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.write.transaction_properties import TransactionPlace, unique_key

from tests.inside import writer_of
from tests.rocketmq.kit import BROKER, LONG
from tests.rocketmq.reading_kit import connect_to
from txnbridge import Bridge, Transaction
from txnbridge.spi import Deadline
from txnbridge.testing import tell

APPLICATION = "writing-tests"


def open_bridge(url: str, **settings: Any) -> Bridge:
    """Open a bridge of the application of all writing tests: each answers the others' check-backs."""
    return connect_to(url, **{"application": APPLICATION, "timeout": 30, **settings})


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def prepare(bridge: Bridge, topic: str, *values: bytes, hold: float | None = 60) -> str:
    with bridge.transaction(prepare=True, hold=hold) as txn:
        for value in values:
            txn.send(topic, value, partition=0)
    return str(txn.token)


def flush(txn: Transaction) -> None:
    """Wait until the broker has stored all messages, and leave the transaction open."""
    writer_of(txn).flush(Deadline(txn.deadline))


def copies(client: RemotingClient, topic: str, transaction: str, number: int = 0) -> list[MessageExt]:
    """Return the half of a message and its copies, in the order in which they were stored."""
    key = unique_key(topic, TransactionPlace(transaction, number))
    return client.call(BROKER, read_requests.by_unique_key(HALF_TOPIC, key), LONG)


def times_asked(client: RemotingClient, topic: str, transaction: str) -> int:
    """Return how many check-backs the broker has sent about a half."""
    return max((int(copy.properties.get(Property.CHECKS, 0)) for copy in copies(client, topic, transaction)), default=0)


def commit_some(
    url: str,
    topics: list[str],
    count: int,
    timeout: float = 30,
    id: str | None = None,
    application: str = APPLICATION,
    decision_log: str | None = None,
) -> str:
    """Send `count` messages to each topic in turn, tell the transaction's id, and commit."""
    told = {"transactional_id": id, "timeout": timeout, "application": application, "decision_log": decision_log}
    with open_bridge(url, **told) as bridge:
        with bridge.transaction() as txn:
            for number in range(count):
                for topic in topics:
                    txn.send(topic, b"%d" % number, partition=0)
            flush(txn)
            tell(txn.id)
        return str(txn.outcome.value if txn.outcome else None)


def prepare_some(
    url: str,
    topics: list[str],
    count: int,
    hold: float,
    application: str = APPLICATION,
    decision_log: str | None = None,
) -> None:
    """Send messages as `commit_some` does, prepare, and tell the token."""
    with open_bridge(url, application=application, decision_log=decision_log) as bridge:
        with bridge.transaction(prepare=True, hold=hold) as txn:
            for number in range(count):
                for topic in topics:
                    txn.send(topic, b"%d" % number, partition=0)
        tell(str(txn.token))
        bridge.status(str(txn.token))
