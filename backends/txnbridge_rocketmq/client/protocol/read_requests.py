"""Requests that read: the messages and bounds of a queue, offsets by time, and messages by key or address.

Each function returns the request; `RemotingClient.call` sends it and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import (
    OR_ABSENT,
    RemotingCommand,
    RpcRequest,
    document,
    fields,
    is_absent,
)
from txnbridge_rocketmq.client.protocol.records import MessageExt, decode_records

T = TypeVar("T")

# The maximum number of messages that a broker returns for one pull, with its default settings.
PULL_MOST = 32
# The maximum number of messages that a broker returns for one look-up by key (`maxMsgsNumBatch`).
MOST_LOOKED_UP = 64

_SUSPEND, _SUBSCRIPTION = 2, 4  # bits of a pull's flag
_QUERIED = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})
# The end of a look-up's time range. Brokers compare it with the store time by their own clock, which may be ahead of
# ours, so it is the last possible time.
_NO_END = (1 << 63) - 1


class PullStatus(IntEnum):
    """The kind of a broker's answer to a pull: messages, no messages at present, or an offset outside of the queue."""

    FOUND = ResponseCode.SUCCESS
    NOTHING_NEW = ResponseCode.PULL_NOT_FOUND
    AGAIN = ResponseCode.PULL_RETRY_IMMEDIATELY
    """There is no message at this offset; there may be more at `next_offset`."""
    OUT_OF_RANGE = ResponseCode.PULL_OFFSET_MOVED
    """The offset is before the queue's first offset or after its end; `next_offset` is inside the queue."""


@dataclass(frozen=True)
class PullResult:
    """The messages that a pull returned, and the queue's first offset and end offset at that time."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: list[MessageExt] = field(repr=False)


def pull(
    topic: str, queue: int, offset: int, group: str, count: int = PULL_MOST, wait: float = 0.0
) -> RpcRequest[PullResult]:
    """Read up to `count` messages of a queue from an offset on. The group need not exist.

    With `wait`, the broker holds the response back until a message arrives: for `wait` seconds, and up to five more.
    """

    def read(answer: RemotingCommand) -> PullResult:
        return PullResult(
            PullStatus(answer.code),
            int(answer.fields["nextBeginOffset"]),
            int(answer.fields["minOffset"]),
            int(answer.fields["maxOffset"]),
            decode_records(answer.body) if answer.code == ResponseCode.SUCCESS else [],
        )

    return RpcRequest(
        f"reading queue {queue} of topic {topic} at {offset}",
        RequestCode.PULL_MESSAGE,
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
        accepted=frozenset(map(int, PullStatus)),
    )


def min_offset(topic: str, queue: int) -> RpcRequest[int]:
    """Return the offset of the first message that the queue still has."""
    return _offset("first offset", RequestCode.GET_MIN_OFFSET, topic, queue)


def max_offset(topic: str, queue: int) -> RpcRequest[int]:
    """Return the offset after the last message that readers see. A stored message becomes visible a moment later."""
    return _offset("end", RequestCode.GET_MAX_OFFSET, topic, queue, committed=True)


def offset_at(topic: str, queue: int, timestamp: int) -> RpcRequest[int]:
    """Return the offset of the first message stored at or after a time (ms since 1970), or the queue's end."""
    return _offset("offset by time", RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, topic, queue, timestamp=timestamp)


def log_offset_at(topic: str, queue: int, offset: int) -> RpcRequest[int | None]:
    """Return the commit log offset of the message at an offset of a queue; None if the queue has no message there."""
    action = f"looking up offset {offset} of queue {queue} of topic {topic}"

    def read(answer: RemotingCommand) -> int | None:
        if is_absent(answer, "is not exist", action) or not answer.body:
            return None
        entries = document(answer).get("queueData")
        return int(entries[0]["physicOffset"]) if entries else None

    asked = fields(topic=topic, queueId=queue, index=offset, count=1)
    return RpcRequest(action, RequestCode.QUERY_CONSUME_QUEUE, read, asked, accepted=OR_ABSENT)


def by_unique_key(topic: str, unique_key: str) -> RpcRequest[list[MessageExt]]:
    """Return the messages of a topic with this unique key, with their bodies, in the order of storing.

    If there are more than 32 (`defaultQueryMaxNum`), the broker returns the newest ones.
    """
    return _look_up(topic, unique_key, 32, lambda records, count: records, _UNIQUE_KEY_QUERY=True)


@dataclass(frozen=True)
class NewestByKey:
    """The result of a look-up by unique key: the newest message with this key, if the broker found one.

    `record` is None if no message with this key is among the index entries that the broker examined.
    """

    record: MessageExt | None
    may_have_more: bool
    """Whether the index may have older entries, among which the message may be."""


def newest_by_unique_key(topic: str, unique_key: str, count: int = 1, body: bool = False) -> RpcRequest[NewestByKey]:
    """Return the newest message of a topic with this unique key, if it is among the `count` newest index entries.

    The index stores a hash of four bytes for each key, so the newest entries may be of messages with other keys. If the
    result has `may_have_more`, repeat the request with a larger `count`, up to `MOST_LOOKED_UP`.
    """

    def read(records: list[MessageExt], offered: int) -> NewestByKey:
        if not records:
            return NewestByKey(None, offered >= count)
        return NewestByKey(records[-1] if body else replace(records[-1], body=b""), False)

    return _look_up(topic, unique_key, count, read)


def _look_up(
    topic: str, unique_key: str, count: int, read: Callable[[list[MessageExt], int], T], **more: object
) -> RpcRequest[T]:
    """Return a request for at most `count` messages of a topic with a unique key; `more` are fields of the request.

    `read` makes the result from two arguments: the messages with exactly this key, oldest first, and the number of all
    messages that the broker returned, including messages with other keys.
    """

    def decode(answer: RemotingCommand) -> T:
        offered = decode_records(answer.body) if answer.code != ResponseCode.QUERY_NOT_FOUND else []
        matching = [each for each in offered if (each.topic, each.unique_key) == (topic, unique_key)]
        return read(sorted(matching, key=lambda record: record.log_offset), len(offered))

    asked = fields(topic=topic, key=unique_key, maxNum=count, beginTimestamp=0, endTimestamp=_NO_END, **more)
    return RpcRequest(
        f"looking up a message of topic {topic}", RequestCode.QUERY_MESSAGE, decode, asked, accepted=_QUERIED
    )


def _offset(name: str, code: RequestCode, topic: str, queue: int, **more: object) -> RpcRequest[int]:
    action = f"asking for the {name} of queue {queue} of topic {topic}"
    return RpcRequest(
        action, code, lambda answer: int(answer.fields["offset"]), fields(topic=topic, queueId=queue, **more)
    )
