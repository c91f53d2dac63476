"""Matches the answers of RocketMQ's remoting protocol with their requests, for the proxy."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar

from txnbridge_conformance.faults._frames import MOST_PENDING, Conversation, Request

_ANSWER, _ONE_WAY = 1, 2  # bits of a header's flag
# The kind of a frame that cannot be decoded, and of a client's answer to a request of the broker.
_UNKNOWN_KIND = -1


class RocketMQConversation(Conversation):
    """Matches answers on a RocketMQ connection by the request's number (opaque); answers come in any order.

    A frame's head is its JSON header. A request that the broker sends, such as a check-back, counts as an answered one.
    """

    # The requests that a client or a broker sends. An answer has the name of its request.
    kinds: ClassVar[Mapping[str, int]] = {
        "PULL_MESSAGE": 11,
        "QUERY_MESSAGE": 12,
        "QUERY_CONSUMER_OFFSET": 14,
        "UPDATE_CONSUMER_OFFSET": 15,
        "UPDATE_AND_CREATE_TOPIC": 17,
        "UPDATE_BROKER_CONFIG": 25,
        "GET_BROKER_CONFIG": 26,
        "SEARCH_OFFSET_BY_TIMESTAMP": 29,
        "GET_MAX_OFFSET": 30,
        "GET_MIN_OFFSET": 31,
        "VIEW_MESSAGE_BY_ID": 33,
        "HEART_BEAT": 34,
        "UNREGISTER_CLIENT": 35,
        "END_TRANSACTION": 37,
        "GET_CONSUMER_LIST_BY_GROUP": 38,
        "CHECK_TRANSACTION_STATE": 39,
        "NOTIFY_CONSUMER_IDS_CHANGED": 40,
        "LOCK_BATCH_MQ": 41,
        "UNLOCK_BATCH_MQ": 42,
        "GET_ROUTE_INFO_BY_TOPIC": 105,
        "GET_BROKER_CLUSTER_INFO": 106,
        "UPDATE_AND_CREATE_SUBSCRIPTION_GROUP": 200,
        "GET_PRODUCER_CONNECTION_LIST": 204,
        "GET_ALL_TOPIC_LIST_FROM_NAME_SERVER": 206,
        "DELETE_SUBSCRIPTION_GROUP": 207,
        "DELETE_TOPIC_IN_BROKER": 215,
        "DELETE_TOPIC_IN_NAME_SERVER": 216,
        "SEND_MESSAGE_V2": 310,
        "SEND_BATCH_MESSAGE": 320,
        "RESUME_CHECK_HALF_MESSAGE": 323,
        "GET_TOPIC_CONFIG": 351,
        "GET_SUBSCRIPTION_GROUP_CONFIG": 352,
    }
    rewritten_kinds = (105, 106)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: OrderedDict[int, Request] = OrderedDict()

    def request(self, head: bytes) -> Request:
        code, number, flag = _header(head)
        if flag & _ANSWER:
            return Request(_UNKNOWN_KIND, number)
        request = Request(code, number)
        if not flag & _ONE_WAY:
            with self._lock:
                self._pending[number] = request
                if len(self._pending) > MOST_PENDING:
                    self._pending.popitem(last=False)
        return request

    def answer(self, head: bytes) -> Request | None:
        code, number, flag = _header(head)
        if flag & _ANSWER:
            with self._lock:
                request = self._pending.pop(number, None)
        else:
            request = Request(code, number)
        if request is not None:
            request.answered.set()
        return request


def _header(head: bytes) -> tuple[int, int, int]:
    """Return the code, number and flag of a header; for other bytes, `_UNKNOWN_KIND` and the one-way flag."""
    try:
        header = json.loads(head[4:])
        return int(header["code"]), int(header["opaque"]), int(header["flag"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return _UNKNOWN_KIND, _UNKNOWN_KIND, _ONE_WAY
