"""Repeats idempotent requests. The only module of the client that knows the bridge's errors and deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.errors import translate

T = TypeVar("T")

# The wait before a request is repeated.
_RETRY_PAUSE_SECONDS = 0.05
# The number of requests that are sent at once. A broker is no faster with more.
MOST_AT_ONCE = 256
# The same for look-ups by key. Each of their responses holds a whole message, of up to 4 MiB by default.
_MOST_LOOK_UPS_AT_ONCE = 32


def retry(
    attempt: Callable[[], T],
    action: str,
    deadline: Deadline,
    to_error: Callable[[RemotingError, str], TxnBridgeError] = translate,
) -> T:
    """Call `attempt`, which must be idempotent, until it succeeds, fails for good, or the deadline passes.

    Raise the error that `to_error` returns for the client's error, or `DeadlineExceeded` at the deadline.
    """
    while True:
        try:
            return attempt()
        except RemotingError as error:
            refused = to_error(error, action)
            if type(refused) not in (BrokerUnavailable, DeadlineExceeded):
                raise refused from error
            if deadline.left() <= _RETRY_PAUSE_SECONDS:
                raise DeadlineExceeded(f"{refused}; repeated for {deadline.seconds:g} s") from error
        time.sleep(_RETRY_PAUSE_SECONDS)


def retry_call(client: RemotingClient, broker: str, request: RpcRequest[T], action: str, deadline: Deadline) -> T:
    """Send one request with `retry` and return the decoded response."""
    return retry(lambda: client.call(broker, request, deadline.left()), action, deadline)


def look_up_by_key(
    client: RemotingClient, wanted: Sequence[tuple[str, str, str]], action: str, deadline: Deadline, body: bool = False
) -> list[MessageExt | None]:
    """Return the newest message for each (broker, topic, unique key); None if the broker has no such message.

    Raise `EvidenceLost` if too many newer messages have keys with the same hash, so that the broker does not find it.
    """
    found: list[MessageExt | None] = []
    for at in range(0, len(wanted), _MOST_LOOK_UPS_AT_ONCE):
        chunk = wanted[at : at + _MOST_LOOK_UPS_AT_ONCE]
        asked = [(broker, read_requests.newest_by_unique_key(topic, key, body=body)) for broker, topic, key in chunk]
        answers = client.call_all(asked, deadline.left())
        for each, (broker, request), answer in zip(chunk, asked, answers, strict=True):
            if isinstance(answer, RemotingError):
                answer = retry_call(client, broker, request, action, deadline)
            found.append(_look_further(client, each, action, deadline, body) if answer.may_have_more else answer.record)
    return found


def _look_further(
    client: RemotingClient, wanted: tuple[str, str, str], action: str, deadline: Deadline, body: bool
) -> MessageExt | None:
    """Return the newest message with one key, None if there is none: look among more and more index entries."""
    broker, topic, key = wanted
    count = 1
    while count < read_requests.MOST_LOOKED_UP:
        count *= 2
        request = read_requests.newest_by_unique_key(topic, key, count, body)
        answer = retry_call(client, broker, request, action, deadline)
        if not answer.may_have_more:
            return answer.record
    raise EvidenceLost(
        f"{action}: the {count} newest messages that broker {broker} finds by the key {key} in topic {topic} have"
        " other keys with the same hash; whether there is a message with this key is not known"
    )
