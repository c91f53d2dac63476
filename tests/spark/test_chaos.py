"""Everything at once, for minutes: a pipeline whose drivers, workers, broker and transactions are not left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark_txnbridge._kept_bridges import SinkSession
from pyspark_txnbridge._write import recovery as _recovery
from pyspark_txnbridge._write.sink_options import SinkOptions
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.chaos import SECONDS, begin, say
from tests.spark import kit
from txnbridge import Bridge, TxnBridgeError

pytest.importorskip("pyspark", reason="needs PySpark")

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SETTLING = 600.0  # for a driver that nobody disturbs to publish all the rest
PARTITIONS, ROWS = 3, 60_000
SMALL, LARGE = "300", "20000"  # rows in a batch


class Driver:
    """A pipeline in a process group of its own, with all its workers."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.log = folder / f"driver-{time.monotonic_ns()}.log"
        environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": SUBMIT}
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait()

    def kill_a_worker(self, chance: random.Random) -> None:
        """One of the Python processes that run tasks, or the one in which batches are committed."""
        if workers := sorted(self._workers()):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)

    def _workers(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it may have ended
                pid = int(path.name)
                if os.getsid(pid) == self._process.pid and b"-m\0pyspark.daemon" in (path / "cmdline").read_bytes():
                    yield pid

    def ended(self, seconds: float) -> int:
        return self._process.wait(seconds)


SUBMIT = (
    "--master local[2] --conf spark.ui.enabled=false --conf spark.driver.bindAddress=127.0.0.1"
    " --conf spark.driver.host=127.0.0.1 pyspark-shell"
)


class Attack:
    """Attack one pipeline every few seconds."""

    def __init__(self, url: str, folder: Path, topics: tuple[str, str], restart: Callable[[], None] | None) -> None:
        self._url, self._folder, self._topics = url, folder, topics
        self._restart = restart
        self._chance = begin()
        self._drivers: list[Driver] = []
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        deeds = [self.kill, self.replace, self.worker, self.abort, self.recover, self.clear]
        if self._restart is not None:
            deeds.append(self.broker)
        until = time.monotonic() + SECONDS
        try:
            while time.monotonic() < until:
                self._drivers = [driver for driver in self._drivers if driver.lives]
                if not self._drivers:
                    self.done["start"] += 1
                    self._drivers.append(self.driver("--max-rows-per-batch", SMALL))
                    # Spark takes most of this to start; some die there, too.
                    time.sleep(self._chance.uniform(6, 14))
                deed = self._chance.choice(deeds)
                self.done[deed.__name__] += 1
                deed()
                time.sleep(self._chance.uniform(0, 3))
        finally:
            for driver in self._drivers:
                driver.kill()

    def driver(self, *arguments: str) -> Driver:
        source, target = self._topics
        ends = ["--from", self._url, "--from-topic", source, "--to", self._url, "--to-topic", target]
        checkpoint = ["--checkpoint", str(self._folder / "checkpoint")]
        command = [sys.executable, "-m", "pyspark_txnbridge.pipeline", *ends, *checkpoint, *arguments]
        return Driver(self._folder, command)

    # --- deeds --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self._drivers[-1].kill()

    def worker(self) -> None:
        self._drivers[-1].kill_a_worker(self._chance)

    def replace(self) -> None:
        """The driver sleeps while another one takes over, and wakes."""
        older = self._drivers[-1]
        older.send(signal.SIGSTOP)
        self._drivers.append(self.driver("--max-rows-per-batch", SMALL))
        time.sleep(self._chance.uniform(8, 15))
        older.send(signal.SIGCONT)

    def broker(self) -> None:
        assert self._restart is not None
        self._restart()

    def abort(self) -> None:
        """An administrator ends what he takes for forgotten, decided or not."""
        with self._bridge() as bridge:
            found = [each.transaction for each in bridge.admin.transactions("spark.")]
            if found:
                bridge.admin.abort(self._chance.choice(found), reason="chaos")
                self.done["aborted"] += 1

    def recover(self) -> None:
        self._by_hand(_recovery.recover)

    def clear(self) -> None:
        self._by_hand(_recovery.clear)

    def _by_hand(self, work: Callable[[SinkSession, tuple[str, str]], object]) -> None:
        options = SinkOptions.parse({"url": self._url})
        with suppress(TxnBridgeError):  # a checkpoint that is not there yet, a batch in doubt, a broker that is away
            query = _recovery.query_of(str(self._folder / "checkpoint"))
            with closing(SinkSession(options, options.application(query))) as session:
                work(session, (query, options.sink))

    @contextmanager
    def _bridge(self) -> Iterator[Bridge]:
        with suppress(TxnBridgeError), txnbridge.connect(self._url, create_topics=0) as bridge:
            yield bridge


def committed(url: str, topic: str) -> list[int]:
    """Return what a reader finds: an independent client for Kafka, else txnbridge itself."""
    if not url.startswith("kafka"):
        with txnbridge.connect(url) as bridge:
            return [int(message.value) for message in bridge.read(topic, 10 * ROWS)]
    servers = url.removeprefix("kafka://")
    settings = {"bootstrap.servers": servers, "group.id": "independent", "isolation.level": "read_committed"}
    consumer = Consumer(settings | {"enable.auto.commit": False, "enable.partition.eof": True, "log_level": 0})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: list[int] = []
    ends: set[int | None] = set()
    try:
        while len(ends) < PARTITIONS:
            for message in consumer.consume(10_000, 1):
                if message.error() is None:
                    found.append(int(message.value() or b"-1"))
                else:
                    ends.add(message.partition())
    finally:
        consumer.close()
    return found


@pytest.mark.parametrize("name", ["embedded", "kafka"])
def test_a_pipeline_loses_and_doubles_nothing(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    restart = None
    url = f"embedded:{tmp_path / 'broker.db'}"
    if name == "kafka":
        broker = request.getfixturevalue("start_kafka")()
        url = broker.url

        def restart() -> None:
            broker.kill()
            time.sleep(random.uniform(0, 3))
            broker.start()

    topics = f"in-{kit.new_run()}", f"out-{kit.new_run()}"
    with txnbridge.connect(url) as bridge:
        for topic in topics:
            bridge.admin.create_topic(topic, partitions=PARTITIONS)
        for first in range(0, ROWS, 10_000):
            with bridge.transaction() as txn:
                txn.send_many(topics[0], [b"%d" % number for number in range(first, first + 10_000)])
    attack = Attack(url, tmp_path, topics, restart)
    attack.run()
    before = len(committed(url, topics[1]))
    last = attack.driver("--max-rows-per-batch", LARGE, "--available-now")
    try:
        assert last.ended(SETTLING) == 0, last.log.read_text()[-5000:]
    finally:
        last.kill()
    eventually(lambda: len(committed(url, topics[1])) >= ROWS, "all is there")
    found = Counter(committed(url, topics[1]))
    say(f"{before} of {ROWS} rows were published under attack: {dict(attack.done)}")
    assert sorted(set(range(ROWS)) - set(found)) == []
    assert [number for number, times in found.items() if times > 1] == []
    assert kit.left_open(SinkOptions.parse({"url": url})) == []
    assert before > 0
