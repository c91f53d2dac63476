"""What `txnbridge copy` does, from broker to broker, beside a loop of the official clients, and MirrorMaker 2."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import free_ports
from txnbridge_conformance.brokers._jars import Artifact, fetch, java, log4j_option, properties

from benchmarks import _kafka
from benchmarks._harness import Report, Round, Settings, Turn, at_least, background, in_turn, timed, unique
from benchmarks._ours import fill, helper
from benchmarks._pulsar import service
from txnbridge import Batch, Processor, Transaction, connect

SIZE = 100
BATCH, LARGE = 5000, 20_000  # the default of `txnbridge copy`, and a larger one

MIRROR_MAKER = "4.3.1"

# Copies a topic from one broker to a topic of another: their URLs, the two topics, and the number of messages.
Work = Callable[[str, str, str, str, int], None]


def copy(settings: Settings, broker: str) -> None:
    """Measure the copy of a topic from Kafka to Pulsar, or from Pulsar to Kafka, with connecting and joining."""
    count = BATCH if settings.quick else 40 * BATCH
    source_kind, target_kind = helper(broker), helper("pulsar" if broker == "kafka" else "kafka")
    with source_kind.broker(settings) as source:
        topic = source_kind.new_topic(source)
        fill(source, topic, SIZE, count, BATCH)
        with brokers.pulsar() if broker == "kafka" else brokers.kafka() as other:
            target = f"{other.url}?admin_url={other.admin_url}" if isinstance(other, brokers.Pulsar) else other.url

            def turn(work: Work) -> Turn:
                def copy_once() -> Round:
                    copied = target_kind.new_topic(target)
                    return timed(lambda: work(source, target, topic, copied, count), count)()

                return copy_once

            loop = turn(kafka_to_pulsar if broker == "kafka" else pulsar_to_kafka)
            turns = {"copy": turn(partial(ours, BATCH)), "large": turn(partial(ours, LARGE)), "loop": loop}
            found = in_turn(turns, settings.rounds)
            report = Report(settings, f"{broker} to {target_kind.NAME}: {count:,} x {SIZE} B")
            name = "a copy, exactly once / the official clients, at least once"
            report.ratio(name, found["copy"], found["loop"], at_least(0.7))
            report.ratio(f"the same with --batch {LARGE}", found["large"], found["loop"])
            report.rates(found, "messages")


def ours(batch: int, source_url: str, target_url: str, topic: str, target: str, count: int) -> None:
    """Copy by the processor of `txnbridge copy`, in a new group."""
    group = unique("copy")
    with connect(source_url, application=group) as source, connect(target_url, application=group) as other:
        left = count

        def move(messages: Batch, txn: Transaction) -> None:
            nonlocal left
            for message in messages:
                txn.send(
                    target,
                    message.value,
                    key=message.key,
                    headers=message.headers.items_all() or None,
                    partition=message.partition,
                    timestamp=message.timestamp,
                )
            left -= len(messages)
            if left <= 0:
                processor.stop()

        processor: Processor = source.processor(topic, group=group, batch=move, to=other, max_messages=batch)
        processor.run()
        assert processor.stats.messages == count


def kafka_to_pulsar(source: str, target: str, topic: str, copied: str, count: int) -> None:
    """Copy by a loop that waits until Pulsar has stored a batch, and then commits its positions."""
    pulsar: Any = import_module("pulsar")
    consumer = _kafka.plain_consumer(source, unique("loop"), _kafka.FETCHING)
    consumer.subscribe([topic])
    client: Any = pulsar.Client(service(target), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    sending = {"batching_enabled": True, "max_pending_messages": 10_000, "block_if_queue_full": True}
    producer = client.create_producer(copied, **sending)
    failed: list[Any] = []

    def on_receipt(result: Any, _: Any) -> None:
        if result != pulsar.Result.Ok:
            failed.append(result)

    left = count
    while left:
        messages = consumer.consume(BATCH, 1)
        for message in messages:
            producer.send_async(
                message.value(),
                on_receipt,
                partition_key=(message.key() or b"").decode() or None,
                event_timestamp=message.timestamp()[1],
            )
        producer.flush()
        assert not failed
        if messages:
            consumer.commit(asynchronous=False)
        left -= len(messages)
    consumer.close()
    client.close()


def pulsar_to_kafka(source: str, target: str, topic: str, copied: str, count: int) -> None:
    """Copy by a loop that waits until Kafka has stored a batch, and then acknowledges it."""
    pulsar: Any = import_module("pulsar")
    client: Any = pulsar.Client(service(source), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    start = pulsar.InitialPosition.Earliest
    consumer = client.subscribe(f"{topic}-partition-0", unique("loop"), initial_position=start)
    failed: list[Any] = []
    producer = _kafka.idempotent_producer(target, failed.append)
    for number in range(1, count + 1):
        message = consumer.receive(30_000)
        key = message.partition_key().encode() or None
        while True:
            try:
                producer.produce(copied, message.data(), key, timestamp=message.event_timestamp())
                break
            except BufferError:
                producer.poll(0.05)
        if number % BATCH == 0 or number == count:
            assert producer.flush(30) == 0 and not failed
            consumer.acknowledge_cumulative(message)
    client.close()


# --- Kafka to Kafka, beside MirrorMaker 2 -----------------------------------------------------------------------------


def mirror(settings: Settings, _: str) -> None:
    """Measure the copy of a topic of Kafka to another Kafka, and MirrorMaker 2, which both copy exactly once.

    Each begins anew in each round. The first fifth is not measured: MirrorMaker starts for half a minute, and its Java
    is slow at first.
    """
    count = 4 * BATCH if settings.quick else 100 * BATCH
    with _kafka.broker(settings) as source, brokers.kafka() as other:
        topic = _kafka.new_topic(source)
        fill(source, topic, SIZE, count, BATCH)
        admin = AdminClient({"bootstrap.servers": _kafka.bootstrap(other.url)})

        def by_copy(batch: int) -> Round:
            copied = _kafka.new_topic(other.url)
            with background(lambda _: ours(batch, source, other.url, topic, copied, count)):
                return last_part(admin, copied, count)

        def by_mirror_maker() -> Round:
            name = unique("from")
            with mirror_maker(settings.folder, name, source, other.url, topic):
                return last_part(admin, f"{name}.{topic}", count)

        turns: dict[str, Turn] = {
            "copy": partial(by_copy, BATCH),
            "large": partial(by_copy, LARGE),
            "MirrorMaker": by_mirror_maker,
        }
        found = in_turn(turns, settings.rounds)
        report = Report(settings, f"Kafka to Kafka: {count:,} x {SIZE} B")
        report.ratio("a copy / MirrorMaker 2", found["copy"], found["MirrorMaker"], at_least(1.0))
        report.ratio(f"the same with --batch {LARGE}", found["large"], found["MirrorMaker"])
        report.rates(found, "messages")


def last_part(admin: AdminClient, topic: str, count: int) -> Round:
    """Wait until a topic has `count` committed messages; return the time from the first fifth of them on."""
    times: list[tuple[float, int]] = []
    for wanted in (count // 5, count):
        until = time.monotonic() + 120
        while (end := committed_end(admin, topic)) < wanted:
            assert time.monotonic() < until, f"{topic} has {end} messages after two minutes"
            time.sleep(0.01)
        times.append((time.perf_counter(), end))
    (begin, already), (end_time, _) = times
    return Round([end_time - begin], count - already)


def committed_end(admin: AdminClient, topic: str) -> int:
    """Return the position behind the last committed message of a topic, 0 if there is no such topic yet."""
    if topic not in admin.list_topics(timeout=10).topics:  # asked for its end, the client would not notice it later
        return 0
    place = TopicPartition(topic, 0)
    wanted = {place: OffsetSpec.latest()}  # type: ignore[no-untyped-call]
    answer = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED)[place]
    return 0 if answer.exception() else answer.result().offset


@contextmanager
def mirror_maker(folder: Path, name: str, source: str, target: str, topic: str) -> Iterator[None]:
    """Run MirrorMaker as a process of its own, without what it does beside copying."""
    logging = Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")
    jars = fetch(
        f"mirror-maker-{MIRROR_MAKER}", [Artifact("org.apache.kafka", "connect-mirror", MIRROR_MAKER), logging]
    )
    there = name.replace("from", "to")
    flow = f"{name}->{there}"
    kinds = "offset-syncs.topic", "checkpoints.topic", "heartbeats.topic", "config.storage", "offset.storage"
    options = {
        "clusters": f"{name},{there}",
        f"{name}.bootstrap.servers": _kafka.bootstrap(source),
        f"{there}.bootstrap.servers": _kafka.bootstrap(target),
        f"{flow}.enabled": "true",
        f"{there}->{name}.enabled": "false",
        f"{flow}.topics": topic,
        f"{flow}.emit.checkpoints.enabled": "false",
        f"{flow}.sync.topic.acls.enabled": "false",
        f"{flow}.sync.topic.configs.enabled": "false",
        "emit.heartbeats.enabled": "false",
        f"{name}.consumer.isolation.level": "read_committed",
        f"{there}.exactly.once.source.support": "enabled",
        "dedicated.mode.enable.internal.rest": "true",
        "listeners": f"http://127.0.0.1:{free_ports(1)[0]}",
        "replication.factor": "1",
        **{f"{kind}.replication.factor": "1" for kind in (*kinds, "status.storage")},
    }
    (folder / f"{name}.properties").write_text(properties(options))
    command = [java(), "-Xmx1g", log4j_option(folder), "-cp", f"{jars}/*"]
    command += ["org.apache.kafka.connect.mirror.MirrorMaker", f"{folder}/{name}.properties"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()
