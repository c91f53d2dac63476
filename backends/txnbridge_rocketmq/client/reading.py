"""Requests that read: from a queue by offset, a queue's bounds, one message by its key or its address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from txnbridge_rocketmq.client.codes import Answer, Code
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.records import Record, decode_records
from txnbridge_rocketmq.client.requests import OR_ABSENT, Request, document, fields, is_absent

T = TypeVar("T")

# Brokers give so many at most whatever is asked for, with their settings as they come.
PULL_MOST = 32
# The same for look-ups by key (`maxMsgsNumBatch`).
MOST_LOOKED_UP = 64

_SUSPEND, _SUBSCRIPTION = 2, 4  # bits of a pull's flag
_PULLED = frozenset(
    map(int, (Answer.SUCCESS, Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED))
)
_QUERIED = frozenset({int(Answer.SUCCESS), int(Answer.QUERY_NOT_FOUND)})
# Messages are looked up by when they were stored, by the broker's clock, and that may be ahead of ours: up to the last
# time that there is.
_NO_END = (1 << 63) - 1


class PullStatus(IntEnum):
    """What a pull found."""

    FOUND = Answer.SUCCESS
    NOTHING_NEW = Answer.PULL_NOT_FOUND
    AGAIN = Answer.PULL_RETRY_IMMEDIATELY
    """Nothing here, perhaps more at `next_offset`."""
    OUT_OF_RANGE = Answer.PULL_OFFSET_MOVED
    """The offset is before the queue's first or behind its end; `next_offset` is one that is not."""


@dataclass(frozen=True)
class Pulled:
    """What a pull brought, and the queue's bounds at that time: its first offset, and the one behind its last."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: list[Record] = field(repr=False)


def pull(topic: str, queue: int, offset: int, group: str, count: int = PULL_MOST, wait: float = 0.0) -> Request[Pulled]:
    """Read a queue from an offset on. The group need not exist.

    With `wait` the broker holds the answer back until there is a message, up to five seconds longer than that: the
    call needs a time that allows for it.
    """

    def read(answer: Command) -> Pulled:
        return Pulled(
            PullStatus(answer.code),
            int(answer.fields["nextBeginOffset"]),
            int(answer.fields["minOffset"]),
            int(answer.fields["maxOffset"]),
            decode_records(answer.body) if answer.code == Answer.SUCCESS else [],
        )

    return Request(
        f"reading queue {queue} of topic {topic} at {offset}",
        Code.PULL_MESSAGE,
        read,
        fields(
            consumerGroup=group,
            topic=topic,
            queueId=queue,
            queueOffset=offset,
            maxMsgNums=count,
            sysFlag=_SUBSCRIPTION | (_SUSPEND if wait else 0),
            commitOffset=0,
            suspendTimeoutMillis=int(wait * 1000),
            subscription="*",
            subVersion=0,
            expressionType="TAG",
        ),
        accepted=_PULLED,
    )


def min_offset(topic: str, queue: int) -> Request[int]:
    """The offset of the first message that a queue still has."""
    return _offset("first offset", Code.GET_MIN_OFFSET, topic, queue)


def max_offset(topic: str, queue: int) -> Request[int]:
    """The offset that a queue's next message will have, as far as readers see: a stored one counts a moment later."""
    return _offset("end", Code.GET_MAX_OFFSET, topic, queue, committed=True)


def offset_at(topic: str, queue: int, timestamp: int) -> Request[int]:
    """The offset of the first message stored at or after a time (milliseconds since 1970), or the queue's end."""
    return _offset("offset by time", Code.SEARCH_OFFSET_BY_TIMESTAMP, topic, queue, timestamp=timestamp)


def log_offset_at(topic: str, queue: int, offset: int) -> Request[int | None]:
    """The place in the commit log of the message at an offset, by the queue's index, without reading the message.

    None where the queue has no such message.
    """
    what = f"looking up offset {offset} of queue {queue} of topic {topic}"

    def read(answer: Command) -> int | None:
        if is_absent(answer, "is not exist", what) or not answer.body:
            return None
        entries = document(answer).get("queueData")
        return int(entries[0]["physicOffset"]) if entries else None

    asked = fields(topic=topic, queueId=queue, index=offset, count=1)
    return Request(what, Code.QUERY_CONSUME_QUEUE, read, asked, accepted=OR_ABSENT)


def by_unique_key(topic: str, unique_key: str) -> Request[list[Record]]:
    """The messages of a topic with this unique key, in the order in which they were stored.

    Of many the newest: a broker gives as many as it is set to (`defaultQueryMaxNum`, 32), whatever is asked for. They
    come in one answer with their bodies, so this is for messages of which there are few.
    """
    return _look_up(topic, unique_key, 32, lambda records, count: records, _UNIQUE_KEY_QUERY=True)


@dataclass(frozen=True)
class Newest:
    """The newest message with a unique key, None where the broker's answer held none."""

    record: Record | None
    may_have_more: bool
    """Whether older entries of the broker's index were left out, among which the message may be."""


def newest_by_unique_key(topic: str, unique_key: str, count: int = 1, body: bool = False) -> Request[Newest]:
    """Look for the newest message of a topic with this unique key among the `count` newest that its index offers.

    The index knows keys by a hash of four bytes, so that the newest entry may be another message's: then ask again for
    more. Brokers give `MOST_LOOKED_UP` at most. Without `body` the record comes without its body.
    """

    def read(records: list[Record], found: int) -> Newest:
        if not records:
            return Newest(None, found >= count)
        return Newest(records[-1] if body else replace(records[-1], body=b""), False)

    return _look_up(topic, unique_key, count, read)


def _look_up(
    topic: str, unique_key: str, count: int, read: Callable[[list[Record], int], T], **more: object
) -> Request[T]:
    """`read` gets the messages with this key, the oldest first, and how many the broker's index has offered."""

    def decode(answer: Command) -> T:
        offered = decode_records(answer.body) if answer.code != Answer.QUERY_NOT_FOUND else []
        found = [each for each in offered if (each.topic, each.unique_key) == (topic, unique_key)]
        return read(sorted(found, key=lambda record: record.log_offset), len(offered))

    asked = fields(topic=topic, key=unique_key, maxNum=count, beginTimestamp=0, endTimestamp=_NO_END, **more)
    return Request(f"looking up a message of topic {topic}", Code.QUERY_MESSAGE, decode, asked, accepted=_QUERIED)


def at_log_offset(topic: str, log_offset: int) -> Request[Record]:
    """The message at a place of the commit log, whatever it is.

    The result raises `Refused` with SYSTEM_ERROR where no message begins.
    """

    def read(answer: Command) -> Record:
        (record,) = decode_records(answer.body)
        return record

    what = f"reading a message of topic {topic} by its address"
    return Request(what, Code.VIEW_MESSAGE_BY_ID, read, fields(topic=topic, offset=log_offset))


def _offset(name: str, code: Code, topic: str, queue: int, **more: object) -> Request[int]:
    what = f"asking for the {name} of queue {queue} of topic {topic}"
    return Request(what, code, lambda answer: int(answer.fields["offset"]), fields(topic=topic, queueId=queue, **more))
