"""What `import txnbridge` adds to the start of a process: whole processes, with and without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_most, excess, per_unit, run


def process(statement: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        def lap() -> int:
            subprocess.run([sys.executable, "-c", statement], check=True)
            return 1

        yield lap

    return contender


def measure(settings: Settings) -> None:
    report = Report(settings, "Import")
    found = alternate(settings, {"bare": process("pass"), "import": process("import txnbridge")})
    report.figure(
        "`import txnbridge` above bare Python", excess(found["import"], found["bare"], 1e3), "ms", at_most(80)
    )
    report.figure("yardstick: bare Python", per_unit(found["bare"], 1e3), "ms")


if __name__ == "__main__":
    run(measure)
