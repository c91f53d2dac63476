"""Requests that store messages and halves, the request that ends a half, and the decoding of check-backs."""

from __future__ import annotations

import re
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from txnbridge_rocketmq.client.errors import NotDurable, ProtocolViolation
from txnbridge_rocketmq.client.protocol.codes import STORED_NOT_DURABLE, Property, RequestCode, ResponseCode, SystemFlag
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest, fields, nothing
from txnbridge_rocketmq.client.protocol.records import MessageExt, OffsetId, decode_records, pack_properties

T = TypeVar("T")

# The names that brokers accept: topics up to 127 characters, groups up to 120.
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")

# A broker with automatic topic creation copies the template topic that a request names. No broker has this one, so
# sending to a mistyped or deleted topic fails.
_TEMPLATE_TOPIC, _TEMPLATE_QUEUES = "NO-TEMPLATE", 4

_STORED = frozenset({int(ResponseCode.SUCCESS), *map(int, STORED_NOT_DURABLE)})
# Properties of delayed messages. The commit of such a half succeeds, but its message is never delivered.
_NOT_FOR_HALVES = frozenset({"DELAY", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"})


class HalfEnd(IntEnum):
    """The two ways in which END_TRANSACTION ends a half."""

    COMMIT = SystemFlag.COMMITTED
    ABORT = SystemFlag.ABORTED


@dataclass(frozen=True)
class WireMessage:
    """A message to send. Properties, keys and tags are text. The body has at least one byte, or brokers fail."""

    topic: str
    body: bytes = field(repr=False)
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    keys: Sequence[str] = field(default=(), repr=False)
    tags: str | None = None
    unique_key: str | None = None
    """The id by which the message can be looked up; random if None."""
    born_time: int | None = None
    """Milliseconds since 1970; now if None."""


@dataclass(frozen=True)
class SendResult:
    """The address of a stored message. For a half message, `queue_offset` is the offset in the half topic."""

    offset_id: OffsetId
    queue: int
    queue_offset: int
    unique_key: str


@dataclass(frozen=True)
class HalfAddress:
    """The address of a half message: the fields by which END_TRANSACTION names it, from any process."""

    topic: str
    group: str
    queue_offset: int
    """The offset in the half topic."""
    log_offset: int
    unique_key: str


@dataclass(frozen=True)
class CheckBack:
    """A check-back about a half: its address, and its message. In each round, the broker writes the half anew."""

    half: HalfAddress
    record: MessageExt
    broker: str
    """The name of the broker that sent the check-back; empty if the request does not have it."""


def send(message: WireMessage, group: str, queue: int) -> RpcRequest[SendResult]:
    """Store a message in a queue. Decoding the response raises `NotDurable` if it was not flushed or replicated."""
    return _store(message, group, queue, {}, 0)


def send_together(messages: Sequence[WireMessage], group: str, queue: int) -> RpcRequest[int]:
    """Store messages of one topic in a queue, each as a message of its own, and return the queue offset of the first.

    Their offsets count up by one. Decoding the response raises `NotDurable` if they were not flushed or replicated.
    """
    topic = messages[0].topic
    body = b"".join(_packed(message) for message in messages)

    def read(answer: RemotingCommand) -> int:
        if answer.code != ResponseCode.SUCCESS:
            raise NotDurable(answer.code, answer.remark, f"sending to topic {topic}", answer.fields["msgId"])
        return int(answer.fields["queueOffset"])

    together = WireMessage(topic, body)
    return _request(RequestCode.SEND_BATCH_MESSAGE, together, group, queue, _standard(together), 0, read)


def _packed(message: WireMessage) -> bytes:
    """Return a message encoded as a part of a batch."""
    properties = pack_properties(_properties(message)).encode()
    head = struct.pack(">iiiii", 22 + len(message.body) + len(properties), 0, 0, 0, len(message.body))
    return head + message.body + struct.pack(">H", len(properties)) + properties


def send_half(message: WireMessage, group: str, queue: int, immunity: int | None = None) -> RpcRequest[SendResult]:
    """Store a half message, which no reader sees before `end` commits it.

    For `immunity` seconds the broker sends no check-back for the half. After that time it refuses to end the half with
    `from_check=False`.
    """
    if refused := _NOT_FOR_HALVES & message.properties.keys():
        raise ValueError(f"property {sorted(refused)[0]}: a delayed message in a transaction would be lost")
    own = {Property.HALF: "true", Property.GROUP: group}
    if immunity is not None:
        own[Property.IMMUNITY] = str(immunity)
    return _store(message, group, queue, own, SystemFlag.PREPARED)


def born_now(request: RpcRequest[SendResult]) -> RpcRequest[SendResult]:
    """Return the request of `send` or `send_half` with the present time as the message's time of birth."""
    return replace(request, fields={**request.fields, "g": str(int(time.time() * 1000))})


def half_address(topic: str, group: str, stored: SendResult) -> HalfAddress:
    """Return the address of a half that `send_half` stored for this topic and producer group."""
    return HalfAddress(topic, group, stored.queue_offset, stored.offset_id.log_offset, stored.unique_key)


def end(half: HalfAddress, how: HalfEnd, from_check: bool = False) -> RpcRequest[None]:
    """Return the request that commits or aborts one half. Set `from_check` after a check-back or the immunity time.

    The request is not idempotent: a second commit publishes the message twice, and a commit after an abort publishes.
    """
    return RpcRequest(
        f"{'committing' if how is HalfEnd.COMMIT else 'aborting'} a half of topic {half.topic}",
        RequestCode.END_TRANSACTION,
        nothing,
        fields(
            topic=half.topic,
            producerGroup=half.group,
            tranStateTableOffset=half.queue_offset,
            commitLogOffset=half.log_offset,
            commitOrRollback=how,
            fromTransactionCheck=from_check,
            msgId=half.unique_key,
            transactionId=half.unique_key,
        ),
    )


def check_back_of(request: RemotingCommand) -> CheckBack:
    """Return the check-back in a broker's request CHECK_TRANSACTION_STATE. Raise `ProtocolViolation`."""
    records = decode_records(request.body)
    try:
        (record,) = records
        half = HalfAddress(
            topic=record.properties.get(Property.REAL_TOPIC, record.topic),
            group=record.properties[Property.GROUP],
            queue_offset=int(request.fields["tranStateTableOffset"]),
            log_offset=int(request.fields["commitLogOffset"]),
            unique_key=record.unique_key or request.fields["transactionId"],
        )
    except (KeyError, ValueError):
        raise ProtocolViolation("a check-back without the address of its half") from None
    return CheckBack(half, record, request.fields.get("bname", ""))


def check_topic(name: str) -> str:
    """Return the name if it is valid for a topic. Raise `ValueError`."""
    if not _TOPIC.fullmatch(name):
        raise ValueError(f"{name!r} is not a topic name: use 1 to 127 letters, digits, and %|_-")
    return name


def check_group(name: str) -> str:
    """Return the name if it is valid for a group. Raise `ValueError`."""
    if not _GROUP.fullmatch(name):
        raise ValueError(f"{name!r} is not a group name: use 1 to 120 letters, digits, and %|_-")
    return name


def _store(
    message: WireMessage, group: str, queue: int, own: Mapping[str, str], system_flag: int
) -> RpcRequest[SendResult]:
    properties = {**_properties(message), **own}

    def read(answer: RemotingCommand) -> SendResult:
        offset_id = OffsetId.parse(answer.fields["msgId"])
        if answer.code != ResponseCode.SUCCESS:
            raise NotDurable(answer.code, answer.remark, f"sending to topic {message.topic}", str(offset_id))
        key = properties[Property.UNIQUE_KEY]
        return SendResult(offset_id, int(answer.fields["queueId"]), int(answer.fields["queueOffset"]), key)

    return _request(RequestCode.SEND_MESSAGE_V2, message, group, queue, properties, system_flag, read)


def _request(
    code: RequestCode,
    message: WireMessage,
    group: str,
    queue: int,
    properties: Mapping[str, str],
    system_flag: int,
    read: Callable[[RemotingCommand], T],
) -> RpcRequest[T]:
    if not message.body:
        raise ValueError("the body of the message is empty: brokers fail on that")
    return RpcRequest(
        f"sending to topic {check_topic(message.topic)}",
        code,
        read,
        # The single-letter fields of all clients: producer group, topic, template topic and its queues, queue, system
        # flag, time of birth, flag, properties, number of redeliveries, unit mode, batch.
        fields(
            a=check_group(group),
            b=message.topic,
            c=_TEMPLATE_TOPIC,
            d=_TEMPLATE_QUEUES,
            e=queue,
            f=system_flag,
            g=message.born_time if message.born_time is not None else int(time.time() * 1000),
            h=0,
            i=pack_properties(properties),
            j=0,
            k=False,
            m=code is RequestCode.SEND_BATCH_MESSAGE,
        ),
        message.body,
        _STORED,
    )


def _properties(message: WireMessage) -> dict[str, str]:
    key = message.unique_key or uuid.uuid4().hex.upper()
    return {**message.properties, **_standard(message), Property.UNIQUE_KEY: key}


def _standard(message: WireMessage) -> dict[str, str]:
    """Return the system properties: the message's tags and keys, and that the broker waits for durability."""
    properties = {Property.WAIT: "true"}  # respond after flushing and replication, as the broker is configured
    if message.tags is not None:
        properties[Property.TAGS] = message.tags
    if message.keys:
        if any(len(key.split()) != 1 or key.strip() != key for key in message.keys):
            raise ValueError("a key is empty or contains a space: brokers separate keys by spaces")
        properties[Property.KEYS] = " ".join(message.keys)
    return properties
