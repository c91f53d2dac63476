"""Reading messages of transactions from Pulsar, beside the official client's consumer; neither acknowledges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, per_unit, run, speed, unique
from benchmarks._ours import fill, reading
from benchmarks._peers import Peer
from benchmarks._pulsar import broker, new_topic, official
from txnbridge import connect

MESSAGES = 100_000
BATCH = 10_000  # written in one transaction
SIZES = (100, 1024)


def theirs(client: Peer, topic: str, count: int) -> Contender:
    subscription = unique("plain")

    @contextmanager
    def contender() -> Iterator[Lap]:
        yield lambda: int(client.ask("read", topic, subscription, count))

    return contender


def measure(settings: Settings) -> None:
    count = BATCH if settings.quick else MESSAGES
    with broker() as url, connect(url) as bridge, official(settings, url) as client:
        for size in SIZES:
            topic = new_topic(bridge)
            fill(bridge, topic, size, count, BATCH)
            report = Report(settings, f"Pulsar: reading, {size} B")
            contenders = {"the official client": theirs(client, topic, count), "ours": reading(url, topic, count)}
            found = alternate(settings, contenders)
            ratio = speed(found["ours"], found["the official client"])
            report.figure("`poll` / the official client's `receive`", ratio, "", at_least(3))
            for name, rounds in found.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
