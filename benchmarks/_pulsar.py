"""A real broker for the Pulsar benchmarks, and their yardsticks: the official client, and the program pulsar-perf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java, log4j_option
from txnbridge_conformance.brokers._pulsar import fetch_pulsar
from txnbridge_pulsar.client import PulsarClient, Single, partition_name

from benchmarks._harness import Lap, Round, Settings, Turn, contender, timed, unique
from benchmarks._peers import PROGRAM, Peer, peer
from txnbridge import connect

NAME = "Pulsar"
# The version of Pulsar whose distribution, with pulsar-perf, is in Maven's repository.
_PERF = "4.0.8"
# The seconds before the measurement, in which the speed of pulsar-perf doubles.
_WARMING = 3.0
_SOON = 30.0


@contextmanager
def broker(settings: Settings) -> Iterator[str]:
    """Yield the URL, with `admin_url`, of a new broker as in the tests, or that of the variable TXNBRIDGE_URL."""
    if url := os.environ.get("TXNBRIDGE_URL"):
        yield url
        return
    with brokers.pulsar() as started:
        yield f"{started.url}?admin_url={started.admin_url}"


def service(url: str) -> str:
    """Return the service URL, without the parts that Pulsar's own clients do not take."""
    return url.partition("?")[0].rsplit("/", 2)[0]


def new_topic(url: str, partitions: int = 1) -> str:
    name = unique("bench")
    with connect(url) as bridge:
        bridge.admin.create_topic(name, partitions)
    return name


def official(settings: Settings, url: str) -> AbstractContextManager[Peer]:
    """Start the official client, with its defaults except for `SENDING`."""
    return peer(sys.executable, PROGRAM, "pulsar", service(url), home=settings.folder)


def write(client: Peer, size: int, count: int) -> Callable[[str], None]:
    """Return a function that writes to a topic with the official client."""

    def write_to(topic: str) -> None:
        stored = client.ask("write", topic, size, count)
        assert stored == count

    return write_to


@contender
def writing(client: Peer, topic: str, size: int, count: int) -> Iterator[Lap]:
    write_to = write(client, size, count)

    def lap() -> int:
        write_to(topic)
        return count

    yield lap


@contender
def reading(client: Peer, topic: str, subscription: str, count: int) -> Iterator[Lap]:
    yield lambda: int(client.ask("read", topic, subscription, count))


def passing_on(client: Peer, source: str, target: str, count: int, batch: int) -> Turn:
    """Return a turn of a loop that acknowledges once whenever `batch` messages are stored."""

    def pass_on() -> None:
        stored = client.ask("pass_on", source, target, unique("plain"), count, batch)
        assert stored == count

    return timed(pass_on, count)


@contender
def bare_requests(url: str, topic: str, size: int) -> Iterator[Lap]:
    """A lap is the least requests of a transaction of one message: begin, add the topic, send, commit."""
    partition = partition_name(topic, 0)
    with PulsarClient(service(url)) as client:
        producer = client.create_producer(partition, timeout=_SOON, transactions=True)

        def lap() -> int:
            txn = client.transactions.begin(60_000, _SOON)
            client.transactions.register(txn, _SOON, [partition])
            producer.send(Single(bytes(size)), txn, timeout=_SOON).result(_SOON)
            client.transactions.end(txn, True, _SOON)
            return 1

        yield lap


def pulsar_perf(settings: Settings, url: str, size: int, batch: int) -> Turn:
    """Return a turn of pulsar-perf, which writes transactions of `batch` messages to a new topic each time.

    The speed that the program reports includes its start. So its messages are counted at the broker for some seconds,
    after Java has compiled the program, which is then killed.
    """
    admin = url.partition("admin_url=")[2]
    configuration = settings.folder / "client.conf"
    configuration.touch()
    warming = 0.1 if settings.quick else _WARMING
    options = {
        "-u": service(url),
        "-r": 10_000_000,  # the limit of messages per second, which it never reaches
        "-s": size,
        "-nmt": batch,
        # limits of messages under way, without which it fills the memory
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
                program.kill()  # it does not end by itself
        return Round([seconds], max(1, count))

    return turn


def _received(admin: str, topic: str) -> int:
    """Return the number of messages that a topic has got since it was loaded; 0 if it does not exist yet."""
    try:
        with urllib.request.urlopen(f"{admin}/admin/v2/persistent/public/default/{topic}/stats", timeout=30) as answer:
            return int(json.load(answer)["msgInCounter"])
    except urllib.error.HTTPError:
        return 0
