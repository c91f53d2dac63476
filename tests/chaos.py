"""Settings of the tests with random faults: how long they last, and the seed of their faults."""

import faulthandler
import os
import random
import sys

SECONDS = float(os.environ.get("TXNBRIDGE_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("TXNBRIDGE_CHAOS_SEED", str(random.randrange(10**6))))
SETTLING = 240.0  # for what is left to do when nothing fails any more


def say(text: str) -> None:
    """Print a line that is shown with `pytest -s`, or when the test fails."""
    sys.stderr.write(f"{text}\n")


def begin() -> random.Random:
    """Print the seed, and return the source of random numbers that it begins."""
    # What pytest would dump of all threads after five minutes reads their frames while they run, and may crash.
    faulthandler.cancel_dump_traceback_later()
    say(f"TXNBRIDGE_CHAOS_SEED={SEED}")
    return random.Random(SEED)
