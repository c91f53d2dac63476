"""Reading from RocketMQ beside the official client's SimpleConsumer, with and without acknowledging.

A group of the official client gets each message once, so each of its rounds reads the next part of the topic. A round
of ours begins at the topic's first message.
"""

from __future__ import annotations

import time

from benchmarks._harness import Report, Round, Settings, Turn, at_least, in_turn, per_unit, run, speed, unique
from benchmarks._ours import AT_ONCE, fill
from benchmarks._peers import Peer
from benchmarks._rocketmq import broker, new_group, new_topic, official
from txnbridge import connect

SIZE = 1024
MESSAGES = 40_000
BATCH = 1_000  # written in one transaction
# Messages per round, so that it lasts a second or more: ours, the official client, and that with acknowledgements.
OURS, RECEIVED, ACKNOWLEDGED = 20_000, 3_000, 1_000
# The part of all messages that the official client's rounds read at most: at an empty queue it waits for seconds.
TAKEN = 0.8


def ours(url: str, topic: str, count: int, acknowledge: bool) -> Turn:
    """Return a turn of a new consumer, measured after its first batch; in a group it acknowledges each batch."""

    def turn() -> Round:
        group = unique("ours") if acknowledge else None
        with connect(url, writers=1, application="reading") as bridge, bridge.consumer(topic, group=group) as consumer:
            batch = consumer.poll(AT_ONCE, 10)
            first = found = len(batch)
            begin = time.perf_counter()
            while found < count:
                if acknowledge and batch:
                    with bridge.transaction() as txn:
                        txn.ack(batch)
                batch = consumer.poll(AT_ONCE, 1)
                for message in batch:
                    message.value  # noqa: B018
                found += len(batch)
            return Round([time.perf_counter() - begin], found - first)

    return turn


def theirs(client: Peer, number: int, count: int, acknowledge: bool) -> Turn:
    """Return a turn of the official client, which continues where its last turn ended."""

    def turn() -> Round:
        begin = time.perf_counter()
        client.ask("read", number, count, acknowledge)
        return Round([time.perf_counter() - begin], count)

    return turn


def measure(settings: Settings) -> None:
    count = 2 * BATCH if settings.quick else MESSAGES
    most = int(TAKEN * count / settings.rounds)
    received, acknowledged = min(RECEIVED, most), min(ACKNOWLEDGED, most)
    with broker() as address, connect(address.url) as bridge:
        topic = new_topic(bridge)
        groups = [new_group(address, topic) for _ in range(2)]
        with official(settings, address, topic, *groups) as client:
            client.ask("begin")
            fill(bridge, topic, SIZE, count, BATCH)
            report = Report(settings, f"RocketMQ: reading {SIZE} B")
            turns = {
                "without a group": ours(address.url, topic, min(OURS, count), acknowledge=False),
                "SimpleConsumer, nothing acknowledged": theirs(client, 0, received, acknowledge=False),
                "in a group, acknowledged": ours(address.url, topic, min(OURS, count), acknowledge=True),
                "SimpleConsumer, acknowledged": theirs(client, 1, acknowledged, acknowledge=True),
            }
            found = in_turn(turns, settings.rounds)
            names = list(found)
            for us, them in (names[:2], names[2:]):
                report.figure(f"{us} / {them}", speed(found[us], found[them]), "", at_least(5))
            for name, rounds in found.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
