"""Requests that may be carried out twice: sent until they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Call, Record, Request, reading
from txnbridge_rocketmq.errors import translate

T = TypeVar("T")

# A broker that has just started refuses for a moment.
_PAUSE = 0.05
# Requests under way at once; a broker is no faster with more.
AT_ONCE = 256
# Each answer to a look-up holds a whole message, of 4 MiB at most as brokers come.
_LOOKED_UP_AT_ONCE = 32


def again(
    attempt: Callable[[], T],
    what: str,
    deadline: Deadline,
    words: Callable[[remoting.RemotingError, str], TxnBridgeError] = translate,
) -> T:
    """Do what may be done twice until it succeeds, fails for good, or the deadline comes.

    Raises what `words` makes of the remoting client's error, and `DeadlineExceeded`.
    """
    while True:
        try:
            return attempt()
        except remoting.RemotingError as error:
            refused = words(error, what)
            if type(refused) not in (BrokerUnavailable, DeadlineExceeded):
                raise refused from error
            if deadline.left() <= _PAUSE:
                raise DeadlineExceeded(f"{refused}; so it was for {deadline.seconds:g} s") from error
        time.sleep(_PAUSE)


def ask(client: remoting.Client, broker: str, request: Request[T], what: str, deadline: Deadline) -> T:
    """The answer to one request; as `again`."""
    return again(lambda: client.call(broker, request, deadline.left()), what, deadline)


def ask_all(
    client: remoting.Client,
    asked: Sequence[tuple[str, Request[T]]],
    what: str,
    deadline: Deadline,
    at_once: int = AT_ONCE,
) -> list[T]:
    """The answers to many requests, in their order; as `again`."""
    found: list[T] = []
    for at in range(0, len(asked), at_once):
        chunk = asked[at : at + at_once]
        calls = [_submitted(client, broker, request, deadline) for broker, request in chunk]
        for (broker, request), call in zip(chunk, calls, strict=True):
            try:
                if call is None:
                    raise remoting.Unreachable("not sent")
                found.append(call.result())
            except remoting.RemotingError:
                found.append(ask(client, broker, request, what, deadline))
    return found


def look_up(
    client: remoting.Client,
    wanted: Sequence[tuple[str, str, str]],
    what: str,
    deadline: Deadline,
    body: bool = False,
) -> list[Record | None]:
    """The newest message for each broker, topic and unique key, None where there is none; as `again`.

    Raises `EvidenceLost` where the broker's index cannot tell.
    """
    asked = [(broker, reading.newest_by_unique_key(topic, key, body=body)) for broker, topic, key in wanted]
    answers = ask_all(client, asked, what, deadline, _LOOKED_UP_AT_ONCE)
    return [
        _look_further(client, each, what, deadline, body) if answer.may_have_more else answer.record
        for each, answer in zip(wanted, answers, strict=True)
    ]


def _look_further(
    client: remoting.Client, wanted: tuple[str, str, str], what: str, deadline: Deadline, body: bool
) -> Record | None:
    """Look behind newer messages whose keys have the same hash as the wanted one."""
    broker, topic, key = wanted
    count = 1
    while count < reading.MOST_LOOKED_UP:
        count *= 2
        answer = ask(client, broker, reading.newest_by_unique_key(topic, key, count, body), what, deadline)
        if not answer.may_have_more:
            return answer.record
    raise EvidenceLost(
        f"{what}: the {count} newest messages that broker {broker} finds by the key {key} in topic {topic} are others,"
        " whose keys have the same hash; whether there is one with this key, it does not tell"
    )


def _submitted(client: remoting.Client, broker: str, request: Request[T], deadline: Deadline) -> Call[T] | None:
    try:
        return client.submit(broker, request, deadline.left())
    except remoting.RemotingError:
        return None
