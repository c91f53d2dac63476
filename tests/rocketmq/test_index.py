"""Tests of what a killed broker finds by unique key, on which all publishing by other processes depends."""

import struct
import time
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_conformance.observing import eventually
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.write.transaction_properties import TransactionPlace, unique_key

from tests.rocketmq.kit import BROKER, LONG, bodies
from tests.rocketmq.reading_kit import new_topic, publish, unique
from tests.rocketmq.writing_kit import numbered, prepare
from txnbridge import Bridge, Consumer, Outcome, TxnBridgeError
from txnbridge.errors import EvidenceLost
from txnbridge.spi import Token

_FILE_BYTES = 4 << 20
_MESSAGE_BYTES = 60_000
# When it starts, a broker reads again what it stored up to this long before the time in its checkpoint.
_READ_AGAIN_MS = 3_000


@pytest.fixture(scope="module")
def rocketmq_broker(start_shared: StartRocketMQ) -> brokers.RocketMQ:
    small = {"mappedFileSizeCommitLog": str(_FILE_BYTES), "maxMessageSize": str(2 * _MESSAGE_BYTES)}
    return start_shared(settings={**small, "messageIndexSafe": "false"})


@pytest.mark.full
def test_an_index_that_a_killed_broker_lost_holds_all_up_until_message_index_safe_is_set(
    rocketmq_broker, settings, open_bridge, client
):
    topic, group, bridge = new_topic(client), unique("group"), open_bridge()
    token = prepare(bridge, topic, *numbered(10))
    bridge.commit(token)
    assert next_values(bridge, topic, group, 4) == numbered(10)[:4]
    bridge.close()
    store_files(rocketmq_broker, client)

    rocketmq_broker.restart()
    assert not is_found(client, topic, token)
    other = open_bridge(timeout=20)
    assert [each for each in other.admin.doctor() if "-k messageIndexSafe -v true" in each.remedy]
    with pytest.raises(EvidenceLost, match="messageIndexSafe"):
        other.commit(token)
    with pytest.raises(TxnBridgeError):
        next_values(other, topic, group, 6)

    settings(messageIndexSafe="true")
    rocketmq_broker.restart()
    assert is_found(client, topic, token)
    healed = open_bridge()
    assert healed.commit(token) is Outcome.COMMITTED
    assert next_values(healed, topic, group, 6) == numbered(10)[4:]
    assert bodies(client, topic) == numbered(10)


def next_values(bridge: Bridge, topic: str, group: str, count: int) -> list[Any]:
    """Return the next values that a group reads, and acknowledge them."""
    found: list[Any] = []
    with bridge.consumer(topic, group) as consumer:
        eventually(lambda: poll_into(found, consumer, count) == count, "messages come")
        with bridge.transaction() as txn:
            txn.ack(found)
    return [message.value for message in found]


def poll_into(found: list[Any], consumer: Consumer, count: int) -> int:
    found += consumer.poll(count - len(found), timeout=1)
    return len(found)


def store_files(broker: brokers.RocketMQ, client: RemotingClient) -> None:
    """Store so much that several files are full, and that the broker will not read them again when it starts."""
    filler = new_topic(client)
    publish(client, filler, *[b"x" * _MESSAGE_BYTES] * (5 * _FILE_BYTES // _MESSAGE_BYTES))
    full_at = time.time() * 1000

    def is_noted() -> bool:
        publish(client, filler, b"more")
        noted = (broker.folder / "node-1" / "store" / "checkpoint").read_bytes()
        return bool(min(struct.unpack_from(">qq", noted)) - _READ_AGAIN_MS > full_at)

    eventually(is_noted, "the broker has noted how far it is")


def is_found(client: RemotingClient, topic: str, token: str) -> bool:
    key = unique_key(topic, TransactionPlace(Token.parse(token).transaction, 0))
    return bool(client.call(BROKER, read_requests.by_unique_key(topic, key), LONG))
