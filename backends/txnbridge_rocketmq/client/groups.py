"""Requests about groups: who belongs to them, how far they have read, and the broker's short locks on queues."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from txnbridge_rocketmq.client.codes import Answer, Code
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.requests import OR_ABSENT, Request, as_body, document, fields, is_absent, nothing

_SUCCESS = int(Answer.SUCCESS)
# What a member answers that does not know the question, what the broker says of one that is not connected, and of one
# that does not answer.
_ANSWERS_OF_MEMBERS = frozenset(
    map(
        int,
        (Answer.SUCCESS, Answer.REQUEST_CODE_NOT_SUPPORTED, Answer.SYSTEM_ERROR, Answer.CONSUME_MSG_TIMEOUT),
    )
)


@dataclass(frozen=True)
class Membership:
    """What a client tells brokers of itself: the groups that it sends for, and the groups that it reads in.

    A broker asks the members of a producer group what became of halves. It tells each member of a consumer group when
    others come or go, and `members` lists them; who reads which queue is up to them.
    """

    producers: frozenset[str] = frozenset()
    consumers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The topics that each group reads."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.producers and not self.consumers

    def without(self, other: Membership) -> Membership:
        """The groups that are not in the other one."""
        consumers = {group: topics for group, topics in self.consumers.items() if group not in other.consumers}
        return Membership(self.producers - other.producers, consumers)


@dataclass(frozen=True)
class Queue:
    """One queue of a topic on one broker."""

    topic: str
    broker: str
    queue: int


def heartbeat(client_id: str, membership: Membership) -> Request[None]:
    """Say that this client lives and what groups it is in. It holds for this connection, and for two minutes."""
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in sorted(membership.producers)],
        "consumerDataSet": [_consumer(group, topics) for group, topics in sorted(membership.consumers.items())],
    }
    return Request("sending a heartbeat", Code.HEART_BEAT, nothing, body=as_body(body))


def unregister(client_id: str, *, producer: str | None = None, consumer: str | None = None) -> Request[None]:
    """Leave a producer group or a consumer group."""
    return Request(
        f"leaving group {producer or consumer}",
        Code.UNREGISTER_CLIENT,
        nothing,
        fields(clientID=client_id, producerGroup=producer, consumerGroup=consumer),
    )


def members(group: str) -> Request[list[str]]:
    """The client ids in a consumer group, in order; none if nobody is in it."""

    what = f"listing the members of group {group}"

    def read(answer: Command) -> list[str]:
        if is_absent(answer, "no consumer for this group", what):
            return []
        return sorted(map(str, document(answer).get("consumerIdList") or []))

    return Request(
        what,
        Code.GET_CONSUMER_LIST_BY_GROUP,
        read,
        fields(consumerGroup=group),
        accepted=OR_ABSENT,
    )


def is_asleep(group: str, client_id: str) -> Request[bool]:
    """Whether a member does not answer although it is connected: its process is stopped, or its machine is.

    The broker asks it for news and waits ten seconds for an answer, of whatever kind; one that is not connected is not
    asleep. Meanwhile it has a thread less for requests about groups, topics and locks: let one client ask at a time.
    """
    return Request(
        f"asking whether a member of group {group} lives",
        Code.GET_CONSUMER_RUNNING_INFO,
        lambda answer: answer.code == Answer.CONSUME_MSG_TIMEOUT,
        fields(consumerGroup=group, clientId=client_id, jstackEnable=False),
        accepted=_ANSWERS_OF_MEMBERS,
    )


def committed_offset(group: str, topic: str, queue: int) -> Request[int | None]:
    """Where a group goes on reading; None if it never said."""
    return Request(
        f"asking where group {group} is in queue {queue} of topic {topic}",
        Code.QUERY_CONSUMER_OFFSET,
        lambda answer: int(answer.fields["offset"]) if answer.code == Answer.SUCCESS else None,
        fields(consumerGroup=group, topic=topic, queueId=queue, setZeroIfNotFound=False),
        accepted=frozenset({_SUCCESS, int(Answer.QUERY_NOT_FOUND)}),
    )


def commit_offset(group: str, topic: str, queue: int, offset: int) -> Request[None]:
    """Say where a group goes on reading. The last one that says so wins, also with an older offset."""
    return Request(
        f"saying where group {group} is in queue {queue} of topic {topic}",
        Code.UPDATE_CONSUMER_OFFSET,
        nothing,
        fields(consumerGroup=group, topic=topic, queueId=queue, commitOffset=offset),
    )


def lock(group: str, client_id: str, queues: Collection[Queue]) -> Request[set[Queue]]:
    """Lock queues of one broker for a member of a group, or renew that; the result is what it holds now.

    A hint only: the broker keeps locks in memory, and for a minute.
    """

    def read(answer: Command) -> set[Queue]:
        held = document(answer).get("lockOKMQSet") or []
        return {Queue(each["topic"], each["brokerName"], int(each["queueId"])) for each in held}

    return Request("locking queues", Code.LOCK_BATCH_MQ, read, body=_lock_body(group, client_id, queues))


def unlock(group: str, client_id: str, queues: Collection[Queue]) -> Request[None]:
    """Let go of queues of one broker."""
    return Request("unlocking queues", Code.UNLOCK_BATCH_MQ, nothing, body=_lock_body(group, client_id, queues))


def _lock_body(group: str, client_id: str, queues: Iterable[Queue]) -> bytes:
    wanted = [{"topic": each.topic, "brokerName": each.broker, "queueId": each.queue} for each in queues]
    return as_body({"consumerGroup": group, "clientId": client_id, "mqSet": wanted})


def _consumer(group: str, topics: Iterable[str]) -> dict[str, object]:
    return {
        "groupName": group,
        "consumeType": "CONSUME_ACTIVELY",  # it asks for messages itself
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [
            {"topic": topic, "subString": "*", "tagsSet": [], "codeSet": [], "subVersion": 0, "expressionType": "TAG"}
            for topic in sorted(topics)
        ],
        "unitMode": False,
    }
