"""A real broker for the RocketMQ benchmarks, and their yardsticks, the official clients for Python and Java."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java
from txnbridge_conformance.brokers._rocketmq import fetch_rocketmq
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient

from benchmarks._harness import Lap, Settings, Turn, contender, timed, unique
from benchmarks._peers import PROGRAM, Peer, environment, peer, started
from txnbridge import Bridge, connect

OFFICIAL = "rocketmq-python-client==5.1.2"
NAME = "RocketMQ"
QUEUES = 4  # of a topic; the default of RocketMQ's tools
_SOON = 30.0


class Address(NamedTuple):
    """The addresses of a broker: a URL for txnbridge, and host:port of the proxy for the official client."""

    url: str
    grpc: str


@contextmanager
def broker(settings: Mapping[str, str] | None = None) -> Iterator[Address]:
    """Yield the address of a new broker as in the tests, or that of TXNBRIDGE_URL and TXNBRIDGE_GRPC ("host:port")."""
    if url := os.environ.get("TXNBRIDGE_URL"):
        yield Address(url, os.environ["TXNBRIDGE_GRPC"])
        return
    with brokers.rocketmq(settings=settings) as node:
        yield Address(node.url, node.grpc_address())


def new_topic(url: str, queues: int = QUEUES) -> str:
    name = unique("bench")
    with connect(url) as bridge:
        bridge.admin.create_topic(name, queues)
    return name


def new_group(address: Address, topic: str) -> str:
    """Create a group for the official client, which cannot read in a group that does not exist; return its name."""
    name = unique("bench")
    with RemotingClient([address.url.removeprefix("rocketmq://")]) as client:
        route = client.route(topic, _SOON)
        assert route is not None
        client.call(route.readable[0].broker, administration.create_group(name), _SOON)
    return name


def official(settings: Settings, address: Address, topic: str, *groups: str) -> AbstractContextManager[Peer]:
    """Start the official client for Python, which writes to this topic, or reads it in these groups."""
    program = "rocketmq-reader" if groups else "rocketmq-writer"
    return peer(environment(OFFICIAL), PROGRAM, program, address.grpc, topic, *groups, home=settings.folder)


def official_java(settings: Settings, address: Address, topic: str) -> AbstractContextManager[Peer]:
    """Start a writer with the official client for Java, which needs no proxy, as ours."""
    names = address.url.removeprefix("rocketmq://")
    program = Path(__file__).with_name("RocketMQWriter.java")
    return started([java(), "-cp", f"{fetch_rocketmq()}/*", program, names, topic], settings.folder)


@contender
def writing(client: Peer, flying: int, each: int, size: int) -> Iterator[Lap]:
    """A lap is `each` transactions of one message by each of `flying` threads of an official client."""
    yield lambda: int(client.ask("write", flying, each, size))


def reading(client: Peer, number: int, count: int, acknowledge: bool) -> Turn:
    """Return a turn of the official client, which continues in a group where its last turn ended."""
    return timed(lambda: client.ask("read", number, count, acknowledge), count)


def tell_if_not_there(bridge: Bridge, topic: str, committed: int) -> None:
    """Print to stderr if a topic does not have as many messages as were committed: then its figures do not count."""
    until = time.monotonic() + 10
    while (there := _messages(bridge, topic)) != committed:
        if time.monotonic() > until:
            print(f"{topic} has {there:,} messages, and {committed:,} were committed", file=sys.stderr)
            return
        time.sleep(0.1)


def _messages(bridge: Bridge, topic: str) -> int:
    """A queue's offsets have no gaps."""
    return sum(end[0] - first[0] for first, end in bridge.admin.bounds(topic).values())
