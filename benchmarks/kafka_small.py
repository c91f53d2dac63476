"""The smallest transactions with an acknowledgement on Kafka: one message read, passed on and acknowledged in each.

One after the other, beside the same loop by hand on the plain client, both as members of a group for the whole time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Lap, Report, Settings, a_second, alternate, at_least, run, speed, unique
from benchmarks._kafka import FETCHING, broker, new_topic, plain_consumer, plain_producer
from benchmarks._ours import fill
from txnbridge import connect

MESSAGES = 20_000  # more messages than all rounds read


@contextmanager
def by_hand(url: str, source: str, target: str) -> Iterator[Lap]:
    producer, consumer = plain_producer(url), plain_consumer(url, unique("plain"), FETCHING)
    consumer.subscribe([source])

    def lap() -> int:
        while not (messages := consumer.consume(1, 1)):
            pass
        producer.begin_transaction()
        producer.produce(target, messages[0].value())
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
        return 1

    yield lap
    consumer.close()


@contextmanager
def ours(url: str, source: str, target: str) -> Iterator[Lap]:
    with connect(url, writers=1) as bridge, bridge.consumer(source, unique("ours")) as consumer:

        def lap() -> int:
            while not (messages := consumer.poll(1, 1)):
                pass
            with bridge.transaction() as txn:
                txn.send(target, messages[0].value)
                txn.ack(messages)
            return 1

        yield lap


def measure(settings: Settings) -> None:
    with broker() as url:
        source, target = new_topic(url), new_topic(url)
        with connect(url, writers=1) as bridge:
            fill(bridge, source, 100, 1000 if settings.quick else MESSAGES, 1000)
        makers = {"by hand": by_hand, "ours": ours}
        contenders = {name: lambda make=make: make(url, source, target) for name, make in makers.items()}
        found = alternate(settings, contenders)
        report = Report(settings, "Kafka: one message read, passed on and acknowledged in a transaction")
        report.figure("ours / loop by hand", speed(found["ours"], found["by hand"]), "", at_least(1.0))
        report.figure("ours, transactions a second", a_second(found["ours"]), "", at_least(80))
        report.figure("loop by hand, transactions a second", a_second(found["by hand"]), "")


if __name__ == "__main__":
    run(measure)
