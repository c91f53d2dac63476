"""Sends single remoting requests to RocketMQ: lists brokers, and creates topics and groups in milliseconds."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from txnbridge_conformance.brokers._ports import HOST

_CREATE_TOPIC, _ROUTE, _CLUSTER, _CREATE_GROUP, _SETTINGS = 17, 105, 106, 200, 26
_NO_SUCH_TOPIC = 17
_BINARY = 1  # the kind of a binary header
# The largest answer that is read. An answer has kilobytes: a peer that sends more than this is no RocketMQ.
_MOST_BYTES = 1 << 20


class RemotingAnswer(NamedTuple):
    """An answer of RocketMQ's remoting protocol; code 0 is success."""

    code: int
    remark: str
    body: bytes


def ask(port: int, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"") -> RemotingAnswer:
    """Send one remoting request to a port, and return its answer. Raise `OSError` if no valid answer comes."""
    header = {
        "code": code,
        "language": "OTHER",
        "version": 485,
        "opaque": 1,
        "flag": 0,
        "extFields": {name: str(value) for name, value in (fields or {}).items()},
        "serializeTypeCurrentRPC": "JSON",
    }
    head = json.dumps(header).encode()
    with socket.create_connection((HOST, port), 5) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
        with connection.makefile("rb") as answer:
            (size,) = struct.unpack(">i", _exactly(answer.read(4), 4))
            if not 4 <= size <= _MOST_BYTES:
                raise _foreign(port)
            return _parse(port, _exactly(answer.read(size), size))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise OSError("the broker hung up")
    return data


def _parse(port: int, frame: bytes) -> RemotingAnswer:
    kind, size = frame[0], int.from_bytes(frame[1:4], "big")
    header, body = frame[4 : 4 + size], frame[4 + size :]
    if kind == _BINARY:  # a broker may be set to binary headers, which begin with the code
        return RemotingAnswer(int.from_bytes(header[:2], "big"), "", body)
    try:
        fields = json.loads(header)
        return RemotingAnswer(int(fields["code"]), fields.get("remark") or "", body)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _foreign(port) from None


def _foreign(port: int) -> OSError:
    return OSError(f"port {port} does not speak RocketMQ's protocol")


def brokers(name_server: int) -> dict[str, dict[str, str]]:
    """Return the masters' addresses by cluster and broker name. Raise `OSError` if the name server does not answer."""
    body = ask(name_server, _CLUSTER).body
    try:
        # The name server writes numeric keys without quotes.
        entries = json.loads(re.sub(rb"([{,])\s*(\d+)\s*:", rb'\1"\2":', body))["brokerAddrTable"].values()
        masters: dict[str, dict[str, str]] = {}
        for broker in entries:
            if master := broker["brokerAddrs"].get("0"):
                masters.setdefault(broker["cluster"], {})[broker["brokerName"]] = master
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _foreign(name_server) from None
    return masters


def is_serving(port: int) -> bool:
    """Return whether a broker answers a request. An error counts too, because the broker may ask for credentials."""
    try:
        ask(port, _SETTINGS)
    except OSError:
        return False
    return True


def create_topic(port: int, topic: str, queues: int, kind: str) -> None:
    """Create a topic on a broker. Raise `OSError` with the broker's message if it refuses."""
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": "false",
        "attributes": f"+message.type={kind}",
    }
    _successful(ask(port, _CREATE_TOPIC, fields))


def create_group(port: int, group: str, orderly: bool) -> None:
    """Create a consumer group on a broker. Raise `OSError` with the broker's message if it refuses."""
    body: dict[str, Any] = {
        "groupName": group,
        "consumeEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": orderly,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
    }
    _successful(ask(port, _CREATE_GROUP, body=json.dumps(body).encode()))


def brokers_with(name_server: int, topic: str) -> int:
    """Return the number of brokers in a topic's route. Raise `OSError` if the name server does not answer."""
    answer = ask(name_server, _ROUTE, {"topic": topic, "acceptStandardJsonOnly": "true"})
    return 0 if answer.code == _NO_SUCH_TOPIC else len(json.loads(_successful(answer).body)["queueDatas"])


def _successful(answer: RemotingAnswer) -> RemotingAnswer:
    if answer.code:
        raise OSError(f"RocketMQ refused ({answer.code}): {answer.remark}")
    return answer
