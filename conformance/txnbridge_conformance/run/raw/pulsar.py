"""Pulsar through its Java client, for `--through raw`: Pulsar's Python client has no transactions."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from txnbridge_conformance.brokers import java_with_pulsar
from txnbridge_conformance.run.plan import PARTITIONS, Plan

_HERE = Path(__file__).parent


def become_java(plan: Plan, process: str) -> NoReturn:
    """Replace this process by the Java program that does the work of the role "write"."""
    java, *options, classpath = java_with_pulsar()
    classes = tempfile.mkdtemp(dir=plan.folder)
    jars = ":".join(map(str, Path(classpath).parent.glob("*.jar")))  # only Java itself knows the pattern `*`
    compiler = [java, "-m", "jdk.compiler/com.sun.tools.javac.Main", "-cp", jars, "-d", classes]
    subprocess.run([*compiler, *map(str, _HERE.glob("*.java"))], check=True)
    history = Path(plan.folder) / f"{process}.jsonl"
    address = f"pulsar://{urlsplit(plan.url).netloc}"
    seed = str(zlib.crc32(f"{plan.seed} {process}".encode()))
    arguments = [str(history), process, address, str(int(plan.timeout * 1000)), seed]
    topics = plan.named("left"), plan.named("right")
    os.execvp(java, [java, *options, f"{classpath}:{classes}", "RawPulsar", *arguments, str(PARTITIONS), *topics])
