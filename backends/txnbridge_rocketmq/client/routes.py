"""Requests to name servers for the routes of topics, and the brokers of the cluster. A client sends them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest, document, fields

_READ, _WRITE = 4, 2  # bits of a topic's permission
# The broker id of the master among the brokers of one name.
_MASTER = "0"


@dataclass(frozen=True)
class TopicRoute:
    """The queues of a topic in order, and the address of each broker's master, by broker name."""

    topic: str
    readable: tuple[Queue, ...]
    writable: tuple[Queue, ...]
    masters: Mapping[str, str]


def route(topic: str) -> RpcRequest[TopicRoute | None]:
    """Return the route of a topic; None if the name server has none, as for up to a second after its creation."""

    def read(answer: RemotingCommand) -> TopicRoute | None:
        return _route(topic, document(answer)) if answer.code == ResponseCode.SUCCESS else None

    return RpcRequest(
        f"asking for the route of topic {topic}",
        RequestCode.GET_ROUTE_INFO_BY_TOPIC,
        read,
        # Newer name servers decide this by the version in the frame's header, with the same result.
        fields(topic=topic, acceptStandardJsonOnly=True),
        accepted=frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)}),
    )


def masters() -> RpcRequest[dict[str, str]]:
    """Return the address of the master of each broker, by broker name. Brokers without a master are left out."""

    def read(answer: RemotingCommand) -> dict[str, str]:
        # The keys of its objects, if they are numbers, may lack quotes.
        told = document(replace(answer, body=_BARE_KEY.sub(rb'\1"\2":', answer.body)))
        return _masters(told.get("brokerAddrTable", {}).values())

    return RpcRequest("asking for the cluster's brokers", RequestCode.GET_BROKER_CLUSTER_INFO, read)


def topics() -> RpcRequest[list[str]]:
    return RpcRequest(
        "listing topics",
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAME_SERVER,
        lambda answer: sorted(map(str, document(answer).get("topicList") or [])),
    )


def _route(topic: str, told: dict[str, Any]) -> TopicRoute:
    readable, writable = list[Queue](), list[Queue]()
    for data in sorted(told.get("queueDatas") or [], key=lambda data: str(data["brokerName"])):
        for count, permission, queues in (
            (data["readQueueNums"], _READ, readable),
            (data["writeQueueNums"], _WRITE, writable),
        ):
            if int(data["perm"]) & permission:
                queues += [Queue(topic, str(data["brokerName"]), number) for number in range(_number(count))]
    # A replica that acts for a master may lack messages, and none of its queues are writable.
    written, brokers = {queue.broker for queue in writable}, told.get("brokerDatas") or []
    masters = _masters(each for each in brokers if each["brokerName"] in written or not each.get("enableActingMaster"))
    return TopicRoute(topic, tuple(readable), tuple(writable), masters)


def _masters(brokers: Any) -> dict[str, str]:
    return {
        str(broker["brokerName"]): str(broker["brokerAddrs"][_MASTER])
        for broker in brokers
        if _MASTER in (broker.get("brokerAddrs") or {})
    }


def _number(count: object) -> int:
    """Return a route's number of queues. Raise `ValueError` if it is larger than any broker allows."""
    number = int(str(count))
    if not 0 <= number <= 65_536:
        raise ValueError("a topic with more queues than brokers allow")
    return number


# A numeric key without quotes, which JSON does not allow. Names and addresses of brokers contain no `{0:` or `,0:`.
_BARE_KEY = re.compile(rb"([{,])\s*(\d+)\s*:")
