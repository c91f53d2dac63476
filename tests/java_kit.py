"""The brokers' own Java clients, asked from the outside: what they say is what ours is held to."""

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java
from txnbridge_conformance.brokers._kafka import fetch_kafka


def ask_java(
    folder: Path, imports: str, body: str, lines: Iterable[str] = (), fetch: Callable[[], Path] = fetch_kafka
) -> list[str]:
    """Return the output of a Java program whose `main` has that body; it has a broker's classes and reads `lines`."""
    try:
        command, jars = java(), fetch()
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a broker's Java classes: {error}")
    program = folder / "Asked.java"
    header = "".join(f"import {name};\n" for name in ["java.util.*", "java.io.*", *imports.split()])
    program.write_text(
        f"{header}public class Asked {{ public static void main(String[] a) throws Exception {{\n{body}\n}} }}\n"
    )
    run = subprocess.run(
        [command, "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", str(program)],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if run.returncode and "Module jdk.compiler not found" in run.stderr:
        pytest.skip("needs a Java with its compiler (Debian: openjdk-17-jdk-headless)")
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
