"""Writing to Pulsar in transactions, beside the official client, which has none, and beside pulsar-perf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import (
    Contender,
    Lap,
    Report,
    Settings,
    as_turn,
    at_least,
    in_turn,
    lap_quantile,
    per_unit,
    run,
    speed,
)
from benchmarks._ours import writing
from benchmarks._peers import Peer
from benchmarks._pulsar import broker, new_topic, official, pulsar_perf
from txnbridge import connect

# Bytes, messages per transaction, and the targets beside the official client and beside pulsar-perf.
SIZES = ((100, 10_000, at_least(8), at_least(1)), (1024, 1_000, None, at_least(1.2)))


def theirs(client: Peer, topic: str, size: int, count: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        def lap() -> int:
            stored = client.ask("write", topic, size, count)
            assert stored == count
            return count

        yield lap

    return contender


def measure(settings: Settings) -> None:
    with broker() as url, connect(url) as bridge, official(settings, url) as client:
        for size, batch, beside_client, beside_program in SIZES:
            values = [bytes([n % 251]) * size for n in range(batch)]
            contenders = {
                "`send_async` without transactions": theirs(client, new_topic(bridge), size, batch),
                "`send`": writing(url, new_topic(bridge), values, many=False),
                "`send_many`": writing(url, new_topic(bridge), values, many=True),
            }
            turns = {name: as_turn(contender, settings) for name, contender in contenders.items()}
            turns["pulsar-perf"] = pulsar_perf(settings, url, size, batch)
            report = Report(settings, f"Pulsar: writing, {batch:,} x {size} B a transaction")
            found = in_turn(turns, settings.rounds)
            plain, one, many, program = found
            for us, target in ((one, None), (many, beside_client)):
                report.figure(f"{us} / {plain}", speed(found[us], found[plain]), "", target)
            for us, target in ((one, None), (many, beside_program)):
                report.figure(f"{us} / {program}", speed(found[us], found[program]), "", target)
            for name, rounds in found.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")
            for us in (one, many):
                report.figure(f"{us}, a transaction, p50", lap_quantile(found[us], 0.5, 1e3), "ms")


if __name__ == "__main__":
    run(measure)
