"""Requests that store messages and that end transactions, and the broker's question what became of a half."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from txnbridge_rocketmq.client.codes import STORED_BUT, Answer, Code, Flag, Property
from txnbridge_rocketmq.client.errors import NotDurable, ProtocolViolation
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.records import OffsetId, Record, decode_records, pack_properties
from txnbridge_rocketmq.client.requests import Request, fields, nothing

# What brokers say of names: of topics up to 127 characters, of groups up to 120.
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")

# A broker that makes missing topics by itself would make them like this one, which no broker has: a mistyped or deleted
# topic is an error.
_TEMPLATE_TOPIC, _TEMPLATE_QUEUES = "NO-TEMPLATE", 4

_STORED = frozenset({int(Answer.SUCCESS), *map(int, STORED_BUT)})
# With these a half leaves the half topic for the broker's timers: its commit says success and delivers nothing.
_NOT_FOR_HALVES = frozenset({"DELAY", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"})


class End(IntEnum):
    """How a half ends."""

    COMMIT = Flag.COMMITTED
    ABORT = Flag.ABORTED


@dataclass(frozen=True)
class Message:
    """What is sent. Properties, keys and tags are text; the body has at least one byte, or brokers fail."""

    topic: str
    body: bytes = field(repr=False)
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    keys: Sequence[str] = field(default=(), repr=False)
    tags: str | None = None
    unique_key: str | None = None
    """The id by which it can be found at once; a random one if none is given."""
    flag: int = 0
    born_time: int | None = None
    """In milliseconds since 1970; now if none is given."""


@dataclass(frozen=True)
class Stored:
    """Where a message was stored. Of a half, `queue_offset` is that in the half topic."""

    offset_id: OffsetId
    queue: int
    queue_offset: int
    unique_key: str


@dataclass(frozen=True)
class Half:
    """All that is needed to end a half, from any process, at any time: the broker's name and these."""

    topic: str
    group: str
    queue_offset: int
    """In the half topic."""
    log_offset: int
    unique_key: str


@dataclass(frozen=True)
class Check:
    """The broker's question what became of a half: what to end (its newest copy), and the message itself."""

    half: Half
    record: Record
    broker: str
    """The name of the broker that asks; empty if it did not say."""

    @property
    def times(self) -> int:
        """How often was asked, this time included; 0 where the broker keeps no count."""
        return int(self.record.properties.get(Property.CHECKS, 0))


def send(message: Message, group: str, queue: int) -> Request[Stored]:
    """Store a message in a queue. The result raises `NotDurable` where it is stored less safely than asked."""
    return _store(message, group, queue, {}, 0)


def send_half(message: Message, group: str, queue: int, immunity: int | None = None) -> Request[Stored]:
    """Store a message that nobody sees before `end` commits it. `half_of` makes of the result what that needs.

    `immunity` is for how many seconds the broker does not ask about it; a later `end` that answers no check is refused.
    """
    if refused := _NOT_FOR_HALVES & message.properties.keys():
        raise ValueError(f"{sorted(refused)[0]}: a half that is to be delivered late would be lost")
    own = {Property.HALF: "true", Property.GROUP: group}
    if immunity is not None:
        own[Property.IMMUNITY] = str(immunity)
    return _store(message, group, queue, own, Flag.PREPARED)


def half_of(topic: str, group: str, stored: Stored) -> Half:
    """What `end` needs of a half that was sent with this group."""
    return Half(topic, group, stored.queue_offset, stored.offset_id.log_offset, stored.unique_key)


def end(half: Half, how: End, from_check: bool = False) -> Request[None]:
    """Commit or abort one half. `from_check` says that the broker had asked, or that its patience is over.

    Nothing about it can be repeated: a second commit publishes a second copy, and so does a commit after an abort.
    """
    return Request(
        f"{'committing' if how is End.COMMIT else 'aborting'} a half of topic {half.topic}",
        Code.END_TRANSACTION,
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


def check_of(request: Command) -> Check:
    """What a broker asks with CHECK_TRANSACTION_STATE. Raises `ProtocolViolation`."""
    records = decode_records(request.body)
    try:
        (record,) = records
        half = Half(
            topic=record.properties.get(Property.REAL_TOPIC, record.topic),
            group=record.properties[Property.GROUP],
            queue_offset=int(request.fields["tranStateTableOffset"]),
            log_offset=int(request.fields["commitLogOffset"]),
            unique_key=record.unique_key or request.fields["transactionId"],
        )
        int(record.properties.get(Property.CHECKS, 0))
    except (KeyError, ValueError):
        raise ProtocolViolation("a question about a half that lacks what it needs") from None
    return Check(half, record, request.fields.get("bname", ""))


def check_topic(name: str) -> str:
    """The name, if a topic can have it. Raises `ValueError`."""
    if not _TOPIC.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a topic: 1 to 127 of letters, digits, and %|_-")
    return name


def check_group(name: str) -> str:
    """The name, if a group can have it. Raises `ValueError`."""
    if not _GROUP.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a group: 1 to 120 of letters, digits, and %|_-")
    return name


def _store(message: Message, group: str, queue: int, own: Mapping[str, str], system_flag: int) -> Request[Stored]:
    if not message.body:
        raise ValueError("a message without any byte in its body: brokers fail on it")
    what = f"sending to topic {check_topic(message.topic)}"
    unique_key = message.unique_key or uuid.uuid4().hex.upper()

    def read(answer: Command) -> Stored:
        offset_id = OffsetId.parse(answer.fields["msgId"])
        if answer.code != Answer.SUCCESS:
            raise NotDurable(answer.code, answer.remark, what, str(offset_id))
        return Stored(offset_id, int(answer.fields["queueId"]), int(answer.fields["queueOffset"]), unique_key)

    properties = {**message.properties, **_standard(message), Property.UNIQUE_KEY: unique_key, **own}
    return Request(
        what,
        Code.SEND_MESSAGE_V2,
        read,
        # One letter each, as in all clients: producer group, topic, template topic and its queues, queue, system
        # flag, time of birth, flag, properties, times it was consumed, unit mode, batch.
        fields(
            a=check_group(group),
            b=message.topic,
            c=_TEMPLATE_TOPIC,
            d=_TEMPLATE_QUEUES,
            e=queue,
            f=system_flag,
            g=message.born_time if message.born_time is not None else int(time.time() * 1000),
            h=message.flag,
            i=pack_properties(properties),
            j=0,
            k=False,
            m=False,
        ),
        message.body,
        _STORED,
    )


def _standard(message: Message) -> dict[str, str]:
    """The properties that the fields of a message stand for."""
    found = {Property.WAIT: "true"}  # for the disk and the replicas, as far as the broker's settings ask for that
    if message.tags is not None:
        found[Property.TAGS] = message.tags
    if message.keys:
        if any(len(key.split()) != 1 or key.strip() != key for key in message.keys):
            raise ValueError("a key is empty or holds a space: brokers would split it")
        found[Property.KEYS] = " ".join(message.keys)
    return found
