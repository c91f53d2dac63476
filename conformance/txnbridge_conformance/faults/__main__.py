"""Run any Python program and kill or pause it at an event.

    python -m txnbridge_conformance.faults kill commit/before -m txnbridge.cli send orders hello
    python -m txnbridge_conformance.faults pause commit/after/3 program.py its arguments

The process gets SIGKILL or SIGSTOP, as if from outside. A program that ends before the event exits with code 3.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress

from txnbridge import plugins
from txnbridge.testing import StopAt

_NOT_REACHED = 3


def main(how: str, where: str, program: str, *arguments: str) -> None:
    """Run a program in this process, which is killed or paused (`how`) at an event of txnbridge.

    `where` names the event, its phase, and perhaps the number of times: "commit/before", "commit/after/3".
    """
    plugins.register(StopAt(where, "kill" if how == "kill" else "pause"))
    if program == "-m":
        program, *rest = arguments
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("kill", "pause"):
        sys.exit(__doc__)
    with suppress(SystemExit):
        main(*sys.argv[1:])
    sys.exit(_NOT_REACHED)
