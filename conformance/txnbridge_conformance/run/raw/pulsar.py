"""Pulsar through its Java client, for `--through raw`: Pulsar's Python client has no transactions."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from txnbridge_conformance.brokers import java_with_pulsar
from txnbridge_conformance.history import host
from txnbridge_conformance.run.plan import PARTITIONS, Plan

_PROGRAM = Path(__file__).with_name("RawPulsar.java")


def become_java(plan: Plan, process: str) -> NoReturn:
    """Replace this process by the Java program that does the work of the role "write"."""
    command = [*java_with_pulsar(), str(_PROGRAM)]
    history = Path(plan.folder) / f"{process}.jsonl"
    address = f"pulsar://{urlsplit(plan.url).netloc}"
    seed = str(zlib.crc32(f"{plan.seed} {process}".encode()))
    arguments = [str(history), process, address, str(int(plan.timeout * 1000)), seed, host()]
    os.execvp(command[0], [*command, *arguments, str(PARTITIONS), plan.named("left"), plan.named("right")])
