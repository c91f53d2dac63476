"""Half messages on Pulsar, beside its transactions of one message."""

from __future__ import annotations

from benchmarks._half_messages import measure_on
from benchmarks._harness import Settings, run
from benchmarks._pulsar import broker


def measure(settings: Settings) -> None:
    with broker() as url:
        measure_on(settings, "Pulsar", url)


if __name__ == "__main__":
    run(measure)
