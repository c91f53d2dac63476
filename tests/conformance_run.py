"""A conformance run as a test: the same command that users call, on a broker of the tests or on one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECONDS = float(os.environ.get("TXNBRIDGE_CHAOS_SECONDS", "300"))


def assert_kept(url: str, folder: Path, seconds: float) -> None:
    """Run the hunt against a URL, or a broker that it starts; fail with the report unless all promises are kept."""
    command = [sys.executable, "-m", "txnbridge.cli", "conformance", "run", url, "--out", str(folder / "run")]
    done = subprocess.run([*command, "--time", str(seconds)], capture_output=True, text=True, timeout=seconds + 900)
    assert done.returncode == 0, done.stderr + done.stdout
