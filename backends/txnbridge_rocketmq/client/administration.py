"""Requests that manage a broker: its topics, groups and settings, and what it knows of producers and old halves."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge_rocketmq.client.codes import DISCARDED_TOPIC, Answer, Code
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.records import OffsetId
from txnbridge_rocketmq.client.requests import OR_ABSENT, Request, as_body, document, fields, is_absent, nothing
from txnbridge_rocketmq.client.sending import check_group, check_topic

_READ_AND_WRITE = 6


def create_topic(
    topic: str, queues: int, kind: str | None = None, attributes: Mapping[str, str] | None = None
) -> Request[None]:
    """Make a topic on this broker, or change it. `kind` is NORMAL, FIFO, DELAY, TRANSACTION, … (a broker's own check
    of gRPC clients). Name servers hear of it a moment later.
    """
    named = {**({"message.type": kind} if kind else {}), **(attributes or {})}
    return Request(
        f"creating topic {check_topic(topic)}",
        Code.UPDATE_AND_CREATE_TOPIC,
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


def delete_topic(topic: str) -> Request[None]:
    """Remove a topic from this broker. Then ask every name server to `forget_topic`, or its route stays."""
    return Request(f"deleting topic {topic}", Code.DELETE_TOPIC_IN_BROKER, nothing, fields(topic=topic))


def forget_topic(topic: str) -> Request[None]:
    """To a name server: forget where a topic is."""
    return Request(f"forgetting topic {topic}", Code.DELETE_TOPIC_IN_NAME_SERVER, nothing, fields(topic=topic))


def topic_attributes(topic: str) -> Request[dict[str, str] | None]:
    """A topic's attributes, as this broker keeps them; None if it does not have the topic."""

    def read(answer: Command) -> dict[str, str] | None:
        if answer.code == Answer.TOPIC_NOT_EXIST:
            return None
        return {str(name): str(value) for name, value in (document(answer).get("attributes") or {}).items()}

    return Request(
        f"asking for the attributes of topic {topic}",
        Code.GET_TOPIC_CONFIG,
        read,
        fields(topic=topic),
        accepted=frozenset({int(Answer.SUCCESS), int(Answer.TOPIC_NOT_EXIST)}),
    )


def create_group(group: str, orderly: bool = False, retries: int = 16) -> Request[None]:
    """Make a consumer group on this broker, or change it."""
    body = {
        "groupName": check_group(group),
        "consumeEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": orderly,
        "retryQueueNums": 1,
        "retryMaxTimes": retries,
    }
    what = f"creating group {group}"
    return Request(what, Code.UPDATE_AND_CREATE_SUBSCRIPTION_GROUP, nothing, body=as_body(body))


def delete_group(group: str) -> Request[None]:
    """Remove a consumer group from this broker, and where it has read to."""
    return Request(
        f"deleting group {group}",
        Code.DELETE_SUBSCRIPTION_GROUP,
        nothing,
        fields(groupName=group, cleanOffset=True),
    )


def broker_settings() -> Request[dict[str, str]]:
    """All settings of this broker, as they are now."""

    def read(answer: Command) -> dict[str, str]:
        lines = (line.partition("=") for line in answer.body.decode().splitlines())
        return {name: value for name, separator, value in lines if separator}

    return Request("asking for the broker's settings", Code.GET_BROKER_CONFIG, read)


def disk_ratio() -> Request[float]:
    """How full the disk with this broker's commit log is, from 0 to 1."""
    return Request(
        "asking how full the broker's disk is",
        Code.GET_BROKER_RUNTIME_INFO,
        lambda answer: float(document(answer)["table"]["commitLogDiskRatio"]),
    )


def change_broker_settings(settings: Mapping[str, str]) -> Request[None]:
    """Change settings of this broker, in its memory and in its file."""
    for name, value in settings.items():
        if "\n" in name + value or "=" in name:
            raise ValueError(f"the setting {name!r} holds a line break or an equals sign")
    body = "".join(f"{name}={value}\n" for name, value in settings.items()).encode()
    return Request("changing the broker's settings", Code.UPDATE_BROKER_CONFIG, nothing, body=body)


def producers(group: str) -> Request[list[str]]:
    """The client ids that are registered for a producer group with this broker; none if there are none."""

    what = f"listing the producers of group {group}"

    def read(answer: Command) -> list[str]:
        if is_absent(answer, "not exist", what):
            return []
        return sorted(str(each["clientId"]) for each in document(answer).get("connectionSet") or [])

    return Request(
        what,
        Code.GET_PRODUCER_CONNECTION_LIST,
        read,
        fields(producerGroup=group),
        accepted=OR_ABSENT,
    )


def resume_half(offset_id: OffsetId) -> Request[None]:
    """Let the broker ask again about a half that it had given up, found in its topic of discarded ones.

    It takes any record, also one that was ended long ago, and asks about that.
    """
    what = "resuming a discarded half"
    return Request(what, Code.RESUME_CHECK_HALF_MESSAGE, nothing, fields(topic=DISCARDED_TOPIC, msgId=offset_id))
