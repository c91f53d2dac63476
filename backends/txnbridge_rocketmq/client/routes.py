"""Where topics and brokers are, as name servers tell it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge_rocketmq.client.codes import Answer, Code
from txnbridge_rocketmq.client.frames import Command
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.requests import Request, document, fields

_READ, _WRITE = 4, 2  # bits of a topic's permission
# Of the brokers of one name the master has this id.
_MASTER = "0"


@dataclass(frozen=True)
class Route:
    """Where a topic is: its queues in order, and the address of each broker's master."""

    topic: str
    readable: tuple[Queue, ...]
    writable: tuple[Queue, ...]
    masters: Mapping[str, str]


def route(topic: str) -> Request[Route | None]:
    """Where a topic is, None if the name server does not know it (it may take a second to hear of a new one)."""

    def read(answer: Command) -> Route | None:
        return _route(topic, document(answer)) if answer.code == Answer.SUCCESS else None

    return Request(
        f"asking where topic {topic} is",
        Code.GET_ROUTE_INFO_BY_TOPIC,
        read,
        # Newer name servers go by the version in the header, which says the same.
        fields(topic=topic, acceptStandardJsonOnly=True),
        accepted=frozenset({int(Answer.SUCCESS), int(Answer.TOPIC_NOT_EXIST)}),
    )


def masters() -> Request[dict[str, str]]:
    """The address of the master of each broker in the cluster, by the broker's name; not of those without one."""

    def read(answer: Command) -> dict[str, str]:
        return _masters(_lenient(answer.body).get("brokerAddrTable", {}).values())

    return Request("asking for the cluster's brokers", Code.GET_BROKER_CLUSTER_INFO, read)


def topics() -> Request[list[str]]:
    """The names of all topics that the name server knows."""
    return Request(
        "listing topics",
        Code.GET_ALL_TOPIC_LIST_FROM_NAME_SERVER,
        lambda answer: sorted(map(str, document(answer).get("topicList") or [])),
    )


def _route(topic: str, told: dict[str, Any]) -> Route:
    readable: list[Queue] = []
    writable: list[Queue] = []
    for data in sorted(told.get("queueDatas") or [], key=lambda data: str(data["brokerName"])):
        for count, permission, queues in (
            (data["readQueueNums"], _READ, readable),
            (data["writeQueueNums"], _WRITE, writable),
        ):
            if int(data["perm"]) & permission:
                queues += [Queue(topic, str(data["brokerName"]), number) for number in range(_number(count))]
    return Route(topic, tuple(readable), tuple(writable), _masters(told.get("brokerDatas") or []))


def _masters(brokers: Any) -> dict[str, str]:
    return {
        str(broker["brokerName"]): str(broker["brokerAddrs"][_MASTER])
        for broker in brokers
        if _MASTER in (broker.get("brokerAddrs") or {})
    }


def _number(count: object) -> int:
    """Not more queues than there are in any broker: the list of them is made in memory."""
    number = int(str(count))
    if not 0 <= number <= 65_536:
        raise ValueError("a topic with an unlikely number of queues")
    return number


# A number as a key without quotes, which JSON does not know. Brokers' names and addresses hold no `{0:` or `,0:`.
_BARE_KEY = re.compile(rb"([{,])\s*(\d+)\s*:")


def _lenient(body: bytes) -> dict[str, Any]:
    """The object in a body whose numeric keys may lack quotes, as name servers write this one."""
    read = json.loads(_BARE_KEY.sub(rb'\1"\2":', body))
    if not isinstance(read, dict):
        raise TypeError("not an object")
    return read
