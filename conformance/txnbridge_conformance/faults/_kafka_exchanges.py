"""Matches the answers of Kafka's protocol with their requests, for the proxy."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

from txnbridge_conformance.faults._frames import MOST_PENDING, Conversation, Request

API_VERSIONS = 18
# Stands for a request that the broker is said not to know.
_UNKNOWN_REQUEST = 10_000


def with_versions(answer: bytes, version: int, highest: Mapping[int, int | None]) -> bytes:
    """Return an answer to ApiVersions with these highest versions of requests, where lower; None removes a request."""
    changed = bytearray(answer)
    if struct.unpack_from(">h", answer, 8) != (0,):
        return answer  # an error
    # The number of entries is a byte more than theirs from version 3 on, as the lists of brokers are shorter than 127.
    count, at, size = (answer[10] - 1, 11, 7) if version >= 3 else (*struct.unpack_from(">i", answer, 10), 14, 6)
    for each in range(at, at + count * size, size):
        key, _, most = struct.unpack_from(">hhh", answer, each)
        if (limit := highest.get(key, most)) is None:
            struct.pack_into(">h", changed, each, _UNKNOWN_REQUEST)
        else:
            struct.pack_into(">h", changed, each + 4, min(limit, most))
    return bytes(changed)


class KafkaConversation(Conversation):
    """Matches answers on a Kafka connection: they come in the order of requests; some requests have no answer."""

    # The requests that a test can hold by name; it can hold others by their API key.
    kinds: ClassVar[Mapping[str, int]] = {
        "Produce": 0,
        "Fetch": 1,
        "ListOffsets": 2,
        "Metadata": 3,
        "OffsetCommit": 8,
        "OffsetFetch": 9,
        "FindCoordinator": 10,
        "JoinGroup": 11,
        "Heartbeat": 12,
        "LeaveGroup": 13,
        "SyncGroup": 14,
        "DescribeGroups": 15,
        "ApiVersions": 18,
        "CreateTopics": 19,
        "DeleteTopics": 20,
        "InitProducerId": 22,
        "AddPartitionsToTxn": 24,
        "AddOffsetsToTxn": 25,
        "EndTxn": 26,
        "WriteTxnMarkers": 27,
        "TxnOffsetCommit": 28,
        "DescribeProducers": 61,
        "DescribeTransactions": 65,
        "ListTransactions": 66,
        "ConsumerGroupHeartbeat": 68,
    }
    request_head = 8
    answer_head = 4

    def __init__(self) -> None:
        self._pending: deque[Request] = deque(maxlen=MOST_PENDING)

    def request(self, head: bytes) -> Request:
        kind, version, correlation_id = struct.unpack(">hhi", head)
        request = Request(kind, correlation_id, version)
        self._pending.append(request)
        return request

    def answer(self, head: bytes) -> Request | None:
        (correlation_id,) = struct.unpack(">i", head)
        if not any(request.correlation_id == correlation_id for request in list(self._pending)):
            return None
        while (request := self._pending.popleft()).correlation_id != correlation_id:
            pass  # this older request has no answer
        request.answered.set()
        return request
