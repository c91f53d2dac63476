"""The time that `import txnbridge` adds to the start of a process, from whole processes with and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_most, excess, per_unit, run

# An installed package has its bytecode beside it; a checkout whose Python may not write any would compile each time.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def process(statement: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        def lap() -> int:
            subprocess.run([sys.executable, "-c", statement], check=True, env=_ENVIRONMENT)
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
