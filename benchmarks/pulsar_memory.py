"""Whether memory stays flat while many messages are written to Pulsar and read from it; see `memory`."""

from __future__ import annotations

from benchmarks._harness import Settings, run
from benchmarks._pulsar import broker
from benchmarks.memory import measure_on


def measure(settings: Settings) -> None:
    with broker() as url:
        measure_on("Pulsar: memory", settings, {"small": url, "one": url})


if __name__ == "__main__":
    run(measure)
