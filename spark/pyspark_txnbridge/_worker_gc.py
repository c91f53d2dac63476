"""Shortens the garbage collection that Spark orders after each call of a Python worker.

The collection looks at every object of every imported module. With the modules of Spark, pandas, Arrow and this package
that takes 50 ms, several times as long as a task with few rows.
"""

from __future__ import annotations

import gc
import os
from itertools import count

_calls = count(1)


def begin_call() -> None:
    """Let garbage collection leave out the modules and open connections that a Spark worker keeps between calls.

    Spark's workers call this at the begin of each call. The second call excludes the objects that exist then: Spark has
    just collected all garbage.
    """
    if "SPARK_REUSE_WORKER" in os.environ and next(_calls) == 2:  # only workers have this variable
        gc.freeze()
