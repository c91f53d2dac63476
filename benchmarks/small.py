"""The smallest transactions with an acknowledgement on Kafka: one message read, passed on and acknowledged in each.

One after the other, beside the same loop by hand on the plain client, both as members of a group for the whole time.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import _kafka
from benchmarks._harness import Lap, Report, Settings, alternate, at_least, contender, unique
from benchmarks._ours import fill
from txnbridge import connect

MESSAGES = 20_000  # more messages than all rounds read


@contender
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


def measure(settings: Settings, broker: str) -> None:
    with _kafka.broker(settings) as url:
        source, target = _kafka.new_topic(url), _kafka.new_topic(url)
        fill(url, source, 100, 1000 if settings.quick else MESSAGES, 1000)
        contenders = {"by hand": _kafka.passing_on_one(url, source, target), "ours": ours(url, source, target)}
        found = alternate(settings, contenders)
        report = Report(settings, "Kafka: one message read, passed on and acknowledged in a transaction")
        report.ratio("ours / loop by hand", found["ours"], found["by hand"], at_least(1.0))
        report.rate("ours, transactions a second", found["ours"], at_least(80))
        report.rate("loop by hand, transactions a second", found["by hand"])
