"""Requests that may be carried out twice: sent until they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_rocketmq import remoting
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.remoting import Call, Request

T = TypeVar("T")

# A broker that has just started refuses for a moment.
_PAUSE = 0.05
# Requests under way at once; a broker is no faster with more.
AT_ONCE = 256


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


def ask_all(client: remoting.Client, asked: Sequence[tuple[str, Request[T]]], what: str, deadline: Deadline) -> list[T]:
    """The answers to many requests, in their order; as `again`."""
    found: list[T] = []
    for at in range(0, len(asked), AT_ONCE):
        chunk = asked[at : at + AT_ONCE]
        calls = [_submitted(client, broker, request, deadline) for broker, request in chunk]
        for (broker, request), call in zip(chunk, calls, strict=True):
            try:
                if call is None:
                    raise remoting.Unreachable("not sent")
                found.append(call.result())
            except remoting.RemotingError:
                found.append(ask(client, broker, request, what, deadline))
    return found


def _submitted(client: remoting.Client, broker: str, request: Request[T], deadline: Deadline) -> Call[T] | None:
    try:
        return client.submit(broker, request, deadline.left())
    except remoting.RemotingError:
        return None
