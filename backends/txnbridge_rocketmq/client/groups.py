"""Requests about groups: their members, their offsets, and the broker's short locks on queues.

Each function returns the request; `RemotingClient.call` sends it and returns the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import (
    OR_ABSENT,
    RemotingCommand,
    RpcRequest,
    as_body,
    document,
    fields,
    is_absent,
    nothing,
)

# The responses to a request that the broker relays to a member: a member that does not know the request, a member that
# is not connected, and a member that does not respond.
_ANSWERS_OF_MEMBERS = OR_ABSENT | {int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED), int(ResponseCode.CONSUME_MSG_TIMEOUT)}


@dataclass(frozen=True)
class Membership:
    """The groups that a client registers with brokers: producer groups, and consumer groups with their topics.

    A broker sends the check-backs of a producer group to one of its members. When a consumer group's members change,
    the broker notifies all of them; the members themselves assign the queues.
    """

    producers: frozenset[str] = frozenset()
    consumers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The topics of each consumer group."""

    @property
    def is_empty(self) -> bool:
        return not self.producers and not self.consumers

    def without(self, other: Membership) -> Membership:
        """Return the groups that are not in the other membership."""
        consumers = {group: topics for group, topics in self.consumers.items() if group not in other.consumers}
        return Membership(self.producers - other.producers, consumers)


@dataclass(frozen=True)
class Queue:
    """One queue of a topic on one broker."""

    topic: str
    broker: str
    queue: int


def heartbeat(client_id: str, membership: Membership) -> RpcRequest[None]:
    """Register this client and its groups with a broker, for two minutes or until the connection ends."""
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in sorted(membership.producers)],
        "consumerDataSet": [_consumer(group, topics) for group, topics in sorted(membership.consumers.items())],
    }
    return RpcRequest("sending a heartbeat", RequestCode.HEART_BEAT, nothing, body=as_body(body))


def unregister(client_id: str, *, producer: str | None = None, consumer: str | None = None) -> RpcRequest[None]:
    return RpcRequest(
        f"leaving group {producer or consumer}",
        RequestCode.UNREGISTER_CLIENT,
        nothing,
        fields(clientID=client_id, producerGroup=producer, consumerGroup=consumer),
    )


def members(group: str) -> RpcRequest[list[str]]:
    """Return the client ids of a consumer group's members, in order."""

    action = f"listing the members of group {group}"

    def read(answer: RemotingCommand) -> list[str]:
        if is_absent(answer, "no consumer for this group", action):
            return []
        return sorted(map(str, document(answer).get("consumerIdList") or []))

    return RpcRequest(
        action, RequestCode.GET_CONSUMER_LIST_BY_GROUP, read, fields(consumerGroup=group), accepted=OR_ABSENT
    )


def is_asleep(group: str, client_id: str) -> RpcRequest[bool]:
    """Return whether a member is connected and does not respond: its process or its machine is suspended.

    The broker asks the member for its running info and waits ten seconds for any response. This blocks one of the
    broker's threads for requests about groups, topics and locks, so only one client should probe at a time.
    """
    return RpcRequest(
        f"asking whether a member of group {group} responds",
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        lambda answer: answer.code == ResponseCode.CONSUME_MSG_TIMEOUT,
        fields(consumerGroup=group, clientId=client_id, jstackEnable=False),
        accepted=_ANSWERS_OF_MEMBERS,
    )


def committed_offset(group: str, topic: str, queue: int) -> RpcRequest[int | None]:
    """Return a group's offset in the broker's offset store; None if the group never committed one."""
    return RpcRequest(
        f"asking for the offset of group {group} in queue {queue} of topic {topic}",
        RequestCode.QUERY_CONSUMER_OFFSET,
        lambda answer: int(answer.fields["offset"]) if answer.code == ResponseCode.SUCCESS else None,
        fields(consumerGroup=group, topic=topic, queueId=queue, setZeroIfNotFound=False),
        accepted=frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)}),
    )


def commit_offset(group: str, topic: str, queue: int, offset: int) -> RpcRequest[None]:
    """Set a group's offset in the broker's offset store, also to a lower one."""
    return RpcRequest(
        f"committing the offset of group {group} in queue {queue} of topic {topic}",
        RequestCode.UPDATE_CONSUMER_OFFSET,
        nothing,
        fields(consumerGroup=group, topic=topic, queueId=queue, commitOffset=offset),
    )


def lock(group: str, client_id: str, queues: Collection[Queue]) -> RpcRequest[set[Queue]]:
    """Lock queues for a member, or renew its locks, for a minute. Return the queues that the member has locked."""

    def read(answer: RemotingCommand) -> set[Queue]:
        held = document(answer).get("lockOKMQSet") or []
        return {Queue(each["topic"], each["brokerName"], int(each["queueId"])) for each in held}

    return RpcRequest("locking queues", RequestCode.LOCK_BATCH_MQ, read, body=_lock_body(group, client_id, queues))


def unlock(group: str, client_id: str, queues: Collection[Queue]) -> RpcRequest[None]:
    return RpcRequest(
        "unlocking queues", RequestCode.UNLOCK_BATCH_MQ, nothing, body=_lock_body(group, client_id, queues)
    )


def _lock_body(group: str, client_id: str, queues: Iterable[Queue]) -> bytes:
    wanted = [{"topic": each.topic, "brokerName": each.broker, "queueId": each.queue} for each in queues]
    return as_body({"consumerGroup": group, "clientId": client_id, "mqSet": wanted})


def _consumer(group: str, topics: Iterable[str]) -> dict[str, object]:
    return {
        "groupName": group,
        "consumeType": "CONSUME_ACTIVELY",  # the member pulls messages itself
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [
            {"topic": topic, "subString": "*", "tagsSet": [], "codeSet": [], "subVersion": 0, "expressionType": "TAG"}
            for topic in sorted(topics)
        ],
        "unitMode": False,
    }
