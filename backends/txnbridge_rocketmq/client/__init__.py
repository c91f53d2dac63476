"""A client of RocketMQ's remoting protocol, which brokers and name servers speak on their own ports.

It shows what the protocol says: addresses of halves, each answer's code, what may and may not have had effect. It
needs nothing but Python. What can be asked is made by functions and sent by a `Client`:

    with Client(["127.0.0.1:9876"]) as client:
        found = client.route("orders", timeout=5)
        place = found.writable[0]
        stored = client.call(place.broker, send_half(Message("orders", b"hello"), "shop", place.queue), timeout=5)
        client.call(place.broker, end(half_of("orders", "shop", stored), End.COMMIT), timeout=5)
"""

from __future__ import annotations

from txnbridge_rocketmq.client.client import Client
from txnbridge_rocketmq.client.codes import (
    DISCARDED_TOPIC,
    HALF_TOPIC,
    ROCKSDB_HALF_TOPIC,
    Answer,
    Code,
    Flag,
    Property,
)
from txnbridge_rocketmq.client.connection import Call, Connection
from txnbridge_rocketmq.client.errors import (
    CannotDecompress,
    ConnectionLost,
    NotDurable,
    ProtocolViolation,
    Refused,
    RemotingError,
    TimedOut,
    Unreachable,
)
from txnbridge_rocketmq.client.groups import Membership, Queue
from txnbridge_rocketmq.client.reading import Pulled, PullStatus
from txnbridge_rocketmq.client.records import OffsetId, Record, decode_records, unwrap
from txnbridge_rocketmq.client.requests import Request
from txnbridge_rocketmq.client.routes import Route
from txnbridge_rocketmq.client.security import Credentials
from txnbridge_rocketmq.client.sending import Check, End, Half, Message, Stored, end, half_of, send, send_half

__all__ = [
    "DISCARDED_TOPIC",
    "HALF_TOPIC",
    "ROCKSDB_HALF_TOPIC",
    "Answer",
    "Call",
    "CannotDecompress",
    "Check",
    "Client",
    "Code",
    "Connection",
    "ConnectionLost",
    "Credentials",
    "End",
    "Flag",
    "Half",
    "Membership",
    "Message",
    "NotDurable",
    "OffsetId",
    "Property",
    "ProtocolViolation",
    "PullStatus",
    "Pulled",
    "Queue",
    "Record",
    "Refused",
    "RemotingError",
    "Request",
    "Route",
    "Stored",
    "TimedOut",
    "Unreachable",
    "decode_records",
    "end",
    "half_of",
    "send",
    "send_half",
    "unwrap",
]
