"""Requests that administrate a broker: its topics, groups, settings, producers and discarded halves.

Each function returns the request; `RemotingClient.call` sends it and returns the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC, RequestCode, ResponseCode
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
from txnbridge_rocketmq.client.protocol.records import OffsetId
from txnbridge_rocketmq.client.protocol.send_requests import check_group, check_topic

_READ_AND_WRITE = 6


def create_topic(
    topic: str, queues: int, kind: str | None = None, attributes: Mapping[str, str] | None = None
) -> RpcRequest[None]:
    """Create or change a topic on this broker. The broker registers the topic at name servers a moment later.

    `kind` is the topic's message type: NORMAL, FIFO, DELAY, TRANSACTION. Brokers check that type only for gRPC clients.
    """
    named = {**({"message.type": kind} if kind else {}), **(attributes or {})}
    return RpcRequest(
        f"creating topic {check_topic(topic)}",
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        nothing,
        fields(
            topic=topic,
            defaultTopic="TBW102",
            readQueueNums=queues,
            writeQueueNums=queues,
            perm=_READ_AND_WRITE,
            topicFilterType="SINGLE_TAG",
            topicSysFlag=0,
            order=False,
            attributes=",".join(f"+{name}={value}" for name, value in named.items()),
        ),
    )


def delete_topic(topic: str) -> RpcRequest[None]:
    """Delete a topic from this broker. Then send `forget_topic` to every name server: they keep the topic's route."""
    return RpcRequest(f"deleting topic {topic}", RequestCode.DELETE_TOPIC_IN_BROKER, nothing, fields(topic=topic))


def forget_topic(topic: str) -> RpcRequest[None]:
    """Delete a topic's route from a name server, after `delete_topic`."""
    return RpcRequest(
        f"forgetting topic {topic}", RequestCode.DELETE_TOPIC_IN_NAME_SERVER, nothing, fields(topic=topic)
    )


def topic_attributes(topic: str) -> RpcRequest[dict[str, str] | None]:
    """Return the attributes of a topic, such as its message type; None if this broker does not have the topic."""

    def read(answer: RemotingCommand) -> dict[str, str] | None:
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        return {str(name): str(value) for name, value in (document(answer).get("attributes") or {}).items()}

    return RpcRequest(
        f"asking for the attributes of topic {topic}",
        RequestCode.GET_TOPIC_CONFIG,
        read,
        fields(topic=topic),
        accepted=frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)}),
    )


def create_group(group: str, orderly: bool = False) -> RpcRequest[None]:
    """Create or change a consumer group on this broker."""
    body = {
        "groupName": check_group(group),
        "consumeEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": orderly,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
    }
    action = f"creating group {group}"
    return RpcRequest(action, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTION_GROUP, nothing, body=as_body(body))


def broker_settings() -> RpcRequest[dict[str, str]]:

    def read(answer: RemotingCommand) -> dict[str, str]:
        lines = (line.partition("=") for line in answer.body.decode().splitlines())
        return {name: value for name, separator, value in lines if separator}

    return RpcRequest("asking for the broker's settings", RequestCode.GET_BROKER_CONFIG, read)


def disk_ratio() -> RpcRequest[float]:
    """Return how full the disk with this broker's commit log is, from 0 to 1."""
    return RpcRequest(
        "asking how full the broker's disk is",
        RequestCode.GET_BROKER_RUNTIME_INFO,
        lambda answer: float(document(answer)["table"]["commitLogDiskRatio"]),
    )


@dataclass(frozen=True, order=True)
class Producer:
    """A member of a producer group, as its heartbeat describes it."""

    client_id: str
    language: str


def producers(group: str) -> RpcRequest[list[Producer]]:
    """Return the members of a producer group at this broker."""

    action = f"listing the producers of group {group}"

    def read(answer: RemotingCommand) -> list[Producer]:
        if is_absent(answer, "not exist", action):
            return []
        members = document(answer).get("connectionSet") or []
        return sorted(Producer(str(each["clientId"]), str(each.get("language", ""))) for each in members)

    return RpcRequest(
        action, RequestCode.GET_PRODUCER_CONNECTION_LIST, read, fields(producerGroup=group), accepted=OR_ABSENT
    )


def resume_half(offset_id: OffsetId) -> RpcRequest[None]:
    """Have the broker send check-backs for a discarded half again.

    `offset_id` is the address of the record in the topic of discarded halves.
    """
    action = "resuming a discarded half"
    return RpcRequest(
        action, RequestCode.RESUME_CHECK_HALF_MESSAGE, nothing, fields(topic=DISCARDED_TOPIC, msgId=offset_id)
    )
