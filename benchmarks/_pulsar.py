"""A real broker for the Pulsar benchmarks, and what ours stands beside: the official client, and Pulsar's program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java, log4j_option
from txnbridge_conformance.brokers._pulsar import fetch_pulsar

from benchmarks._harness import Round, Settings, Turn, unique
from benchmarks._peers import Peer, peer
from txnbridge import Bridge

# Pulsar's program for figures comes with its distribution alone, which Maven has of this version.
_PERF = "4.0.8"
# Its speed doubles in its first seconds.
_WARMING = 3.0


@contextmanager
def broker() -> Iterator[str]:
    """The URL of a fresh broker as the tests start it, or of the one that TXNBRIDGE_URL names, `admin_url` included."""
    if url := os.environ.get("TXNBRIDGE_URL"):
        yield url
        return
    with brokers.pulsar() as started:
        yield f"{started.url}?admin_url={started.admin_url}"


def service(url: str) -> str:
    """The service URL, which is all that the clients of Pulsar take."""
    return url.partition("?")[0].rsplit("/", 2)[0]


def new_topic(bridge: Bridge) -> str:
    name = unique("bench")
    bridge.admin.create_topic(name)
    return name


@contextmanager
def official(settings: Settings, url: str) -> Iterator[Peer]:
    """The official client, with its defaults but for what `_pulsar_official.py` says."""
    with peer(sys.executable, "_pulsar_official.py", service(url), home=settings.folder) as client:
        yield client


def pulsar_perf(settings: Settings, url: str, size: int, batch: int) -> Turn:
    """Pulsar's own program, in transactions of `batch` messages.

    What it says of its speed includes its start. So it runs until it has been measured: by how many messages the broker
    has got in some seconds, once Java has had time to make machine code. It has a topic of its own each time.
    """
    admin = url.partition("admin_url=")[2]
    configuration = settings.folder / "client.conf"
    configuration.touch()
    warming = 0.1 if settings.quick else _WARMING
    options = {
        "-u": service(url),
        "-r": 10_000_000,  # messages a second: as many as it can
        "-s": size,
        "-nmt": batch,
        # Without them it takes all memory.
        "-o": 20_000,
        "-p": 20_000,
    }
    command = [java(), "-Xmx1g", log4j_option(settings.folder), "-cp", f"{fetch_pulsar(_PERF)}/*"]
    command += ["org.apache.pulsar.testclient.PulsarPerfTestTool", str(configuration), "produce", "-txn"]
    command += [str(each) for option in options.items() for each in option]

    def turn() -> Round:
        topic = unique("perf")
        with subprocess.Popen([*command, topic], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
            try:
                while not _received(admin, topic):
                    if program.poll() is not None:
                        raise RuntimeError(f"pulsar-perf ended with {program.returncode} instead of writing")
                    time.sleep(0.05)
                time.sleep(warming)
                before, begin = _received(admin, topic), time.perf_counter()
                time.sleep(2 * settings.seconds)
                count, seconds = _received(admin, topic) - before, time.perf_counter() - begin
            finally:
                program.kill()  # it would go on for ever
        return Round([seconds], max(1, count))

    return turn


def _received(admin: str, topic: str) -> int:
    """How many messages a topic has got since it was loaded; 0 if it is not there yet."""
    try:
        with urllib.request.urlopen(f"{admin}/admin/v2/persistent/public/default/{topic}/stats", timeout=30) as answer:
            return int(json.load(answer)["msgInCounter"])
    except urllib.error.HTTPError:
        return 0
