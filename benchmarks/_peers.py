"""Programs of other clients with which txnbridge is compared, each in a process, perhaps in an environment of its own.

The first part starts them and asks them. The second part is what runs there: Pulsar's client, RocketMQ's for Python,
and Quix Streams. There is no txnbridge in such an environment, so nothing outside the standard library is imported
before it is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__)


def environment(requirement: str) -> Path:
    """Return the interpreter of an environment with this library; the first call makes it with pip."""
    from txnbridge_conformance.brokers._jars import cache_folder

    folder = cache_folder() / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement], check=True)
        done.touch()
    return python


class Peer:
    """A program that runs commands: it reads lines of JSON, each a name with arguments, and answers with one line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *asked: object) -> Any:
        """Give the program a command; return its answer. Raise `RuntimeError` if the program ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer(asked[0])

    def answer(self, asked: object = "nothing yet") -> Any:
        """Return the program's next answer. Raise `RuntimeError` if the program ends instead."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with {self._process.wait()} when it was asked for {asked}")
        return json.loads(answer)


def peer(python: str | Path, program: Path, *arguments: str, home: Path) -> AbstractContextManager[Peer]:
    """Start a program in Python; see `started`."""
    # Isolated (-I): otherwise the program would import the files beside it instead of installed modules.
    return started([python, "-I", program, *arguments], home)


@contextmanager
def started(command: Sequence[str | Path], home: Path) -> Iterator[Peer]:
    """Run a program for a block, started once, so that its start does not count. `home` is for its logs."""
    env = {**os.environ, "HOME": str(home)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the program then ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


# --- in the process --------------------------------------------------------------------------------------------------

# With a full queue the producer waits instead of failing. Batches and a longer queue make it several times faster than
# its defaults: no batches, and at most 1,000 messages under way.
SENDING = {"batching_enabled": True, "max_pending_messages": 10_000, "block_if_queue_full": True}
PATIENCE_MS = 30_000


class Pulsar:
    def __init__(self, url: str) -> None:
        pulsar: Any = importlib.import_module("pulsar")
        self._library = pulsar
        self._client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        start = pulsar.InitialPosition.Earliest
        self._producer = cache(lambda topic: self._client.create_producer(topic, **SENDING))
        self._consumer = cache(lambda topic, name: self._client.subscribe(topic, name, initial_position=start))

    def write(self, topic: str, size: int, count: int) -> int:
        """Send `count` values, and wait until all are stored; return how many were."""
        producer, value, pulsar = self._producer(topic), bytes(size), self._library
        stored = 0

        def on_receipt(result: Any, _: Any) -> None:
            nonlocal stored
            stored += result == pulsar.Result.Ok

        for _ in range(count):
            producer.send_async(value, on_receipt)
        producer.flush()
        return stored

    def read(self, topic: str, subscription: str, count: int) -> int:
        """Receive the first `count` messages of a topic."""
        consumer = self._consumer(topic, subscription)
        consumer.seek(self._library.MessageId.earliest)
        for _ in range(count):
            consumer.receive(PATIENCE_MS).data()
        return count

    def pass_on(self, source: str, target: str, subscription: str, count: int, batch: int) -> int:
        """Send each message to another topic; acknowledge `batch` messages whenever their copies are stored."""
        consumer, producer, pulsar = self._consumer(source, subscription), self._producer(target), self._library
        stored = 0

        def on_receipt(result: Any, _: Any) -> None:
            nonlocal stored
            stored += result == pulsar.Result.Ok

        for number in range(1, count + 1):
            message = consumer.receive(PATIENCE_MS)
            producer.send_async(message.data(), on_receipt)
            if number % batch == 0:
                producer.flush()
                consumer.acknowledge_cumulative(message)
        consumer.close()
        return stored


# The largest number of messages per request, and the seconds for which other consumers then do not get them: longer
# than the benchmark.
AT_ONCE, HIDDEN = 32, 3600
# The seconds for which a consumer waits for messages. The proxy refuses shorter waits.
AWAIT = 5
PATIENCE = 30


class RocketMQWriter:
    def __init__(self, grpc: str, topic: str) -> None:
        rocketmq: Any = importlib.import_module("rocketmq")

        class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
            def check(self, message: Any) -> Any:
                """Return no decision: the transaction is about to be committed."""
                return rocketmq.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED

        self._topic = topic
        self._message = rocketmq.Message
        configuration = rocketmq.ClientConfiguration(grpc, rocketmq.Credentials())
        self._producer = rocketmq.Producer(configuration, (topic,), checker=Checker())
        self._producer.startup()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def write(self, flying: int, each: int, size: int) -> int:
        """Commit `each` transactions of one message by each of `flying` threads; return their number."""
        pool = self._pools.setdefault(flying, ThreadPoolExecutor(flying))
        for done in [pool.submit(self._some, each, bytes(size)) for _ in range(flying)]:
            done.result()
        return flying * each

    def _some(self, count: int, body: bytes) -> None:
        for _ in range(count):
            message = self._message()
            message.topic = self._topic
            message.body = body
            transaction = self._producer.begin_transaction()
            self._producer.send(message, transaction)
            self._commit(transaction)

    def _commit(self, transaction: Any) -> None:
        """Commit, and repeat the request if it fails: with many threads it may take longer than the client waits.

        The repetition fails if the first request was carried out. Messages that are missing in the end are found by
        counting (`tell_if_not_there`).
        """
        try:
            transaction.commit()
        except Exception:
            with suppress(Exception):
                transaction.commit()


class RocketMQReader:
    def __init__(self, grpc: str, topic: str, *groups: str) -> None:
        rocketmq: Any = importlib.import_module("rocketmq")
        configuration = rocketmq.ClientConfiguration(grpc, rocketmq.Credentials())
        subscription = {topic: rocketmq.FilterExpression("*")}
        self._consumers = [rocketmq.SimpleConsumer(configuration, group, subscription, AWAIT) for group in groups]
        for consumer in self._consumers:
            consumer.startup()

    def begin(self) -> None:
        """Receive once in each group, so that the group begins with the messages written from now on."""
        for consumer in self._consumers:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    consumer.receive(AT_ONCE, HIDDEN)
                    break
                except Exception:  # the proxy fails until it has registered the consumer
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)

    def read(self, number: int, count: int, acknowledge: bool) -> int:
        """Receive the next messages in one of the groups."""
        consumer = self._consumers[number]
        found = 0
        while found < count:
            for message in consumer.receive(min(AT_ONCE, count - found), HIDDEN):
                message.body  # noqa: B018
                if acknowledge:
                    consumer.ack(message)
                found += 1
        return found


def quix(servers: str, group: str, source: str, target: str, count: int, batch: int) -> float:
    """Send messages to another topic, exactly once; return the seconds that this took, without imports."""
    quixstreams: Any = importlib.import_module("quixstreams")
    begin = time.perf_counter()
    application = quixstreams.Application(
        broker_address=servers,
        consumer_group=group,
        processing_guarantee="exactly-once",
        auto_offset_reset="earliest",
        # Transactions end by their number of messages, and not by the clock.
        commit_every=batch,
        commit_interval=60,
        auto_create_topics=False,
        loglevel="WARNING",
    )
    taken = application.topic(source, value_deserializer="bytes", key_deserializer="bytes")
    given = application.topic(target, value_serializer="bytes", key_serializer="bytes")
    application.dataframe(taken).to_topic(given)
    application.run(count=count)
    return time.perf_counter() - begin


def main(program: str, *arguments: str) -> None:
    if program == "quix":
        print(quix(*arguments[:4], *map(int, arguments[4:])))  # type: ignore[arg-type]
        return
    client = {"pulsar": Pulsar, "rocketmq-writer": RocketMQWriter, "rocketmq-reader": RocketMQReader}[program](
        *arguments
    )
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(client, name)(*given)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
