"""Programs of the tests of spans, which run in processes of their own."""

import time
from contextlib import suppress
from typing import NamedTuple

import txnbridge
from txnbridge import BrokerUnavailable, Conflict, OutcomeUnknown, TransactionAborted
from txnbridge.testing.child_processes import tell


class Pair(NamedTuple):
    """The addresses of two brokers, and the names of the topics: `source` on the first, `target` on both.

    `timeout` is that of a span, after which the parts of a dead process are ended.
    """

    first: str
    second: str
    source: str
    target: str
    timeout: float = 1.5


def copy_all(pair: Pair, messages: int = 4) -> None:
    """Copy the first broker's messages to both brokers, two in each span, until all of them are there."""
    with (
        txnbridge.connect(pair.first, timeout=20) as first,
        txnbridge.connect(pair.second, timeout=20) as second,
        first.consumer(pair.source, f"g-{pair.source}") as consumer,
    ):
        with txnbridge.spanning(first, second):
            pass  # from now on this process ends what an earlier one has left
        until = time.monotonic() + 160  # RocketMQ keeps the locks of a dead member for a minute
        while time.monotonic() < until and min(len(each.read(pair.target, 9)) for each in (first, second)) < messages:
            with suppress(TransactionAborted, Conflict, OutcomeUnknown, BrokerUnavailable):
                copy(first, second, consumer.poll(2, 0.5), pair)


def copy(first: txnbridge.Bridge, second: txnbridge.Bridge, batch: txnbridge.Batch, pair: Pair) -> None:
    if not batch:
        return
    with txnbridge.spanning(first, second, timeout=pair.timeout) as span:
        span.on(first).ack(batch)
        for bridge in (first, second):
            span.on(bridge).send_many(pair.target, [message.value for message in batch])


def send_one(urls: list[str]) -> None:
    with txnbridge.connect(urls[0]) as first, txnbridge.connect(urls[1]) as second:
        with txnbridge.spanning(first, second, timeout=2) as span:
            for bridge in (first, second):
                span.on(bridge).send("t", b"1")


def send_and_wait(here: str, there: str, topic: str) -> None:
    """Send a message in a span, and leave the span open."""
    with txnbridge.connect(here) as first, txnbridge.connect(there) as second:
        with txnbridge.spanning(first, second, timeout=5) as span:
            span.on(second).send(topic, b"lost")
            tell("sent")
            time.sleep(60)
