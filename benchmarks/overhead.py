"""The cost of the interface itself, and of its metrics and traces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import txnbridge
from benchmarks import _embedded, _ours
from benchmarks._harness import (
    PROCESSOR,
    Contender,
    Lap,
    Report,
    Settings,
    alternate,
    at_least,
    at_most,
    contender,
    excess,
    per_unit,
)
from tests.core.toy import ToyBackend, ToyBroker, ToyWriter
from txnbridge.spi import Broker, RawHeaders, Url, Writer

MESSAGES = 1000  # a transaction
# An installed package has its bytecode beside it; a checkout whose Python may not write any would compile each time.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class IdleWriter(ToyWriter):
    """A writer that accepts every message and does nothing with it."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None: ...

    def send_many(self, topic: str, items: Any) -> None: ...


class IdleBroker(ToyBroker):
    def open_writers(self, identity: Any, count: int, ledger: Any, deadline: Any) -> list[Writer]:
        return [IdleWriter() for _ in range(count)]


class IdleBackend(ToyBackend):
    def open(self, url: Url, options: Mapping[str, Any], context: Any, deadline: Any) -> Broker:
        return IdleBroker(self.capabilities)


@contextmanager
def transaction() -> Iterator[txnbridge.Transaction]:
    # The transaction lasts for the round, so that neither its begin nor its end is measured.
    with txnbridge.plugins.registered(IdleBackend()), txnbridge.connect("toy:", timeout=3600) as bridge:
        with bridge.transaction() as txn:
            yield txn


@contender
def sending(values: Sequence[bytes]) -> Iterator[Lap]:
    with transaction() as txn:

        def lap() -> int:
            send = txn.send
            for value in values:
                send("topic", value)
            return len(values)

        yield lap


@contender
def writing(values: Sequence[bytes]) -> Iterator[Lap]:
    writer = IdleWriter()

    def lap() -> int:
        send = writer.send
        for value in values:
            send("topic", value, None, None, None, None)
        return len(values)

    yield lap


@contender
def at_once(
    opened: Callable[[], AbstractContextManager[txnbridge.Transaction | IdleWriter]], values: Sequence[Any]
) -> Iterator[Lap]:
    with opened() as target:

        def lap() -> int:
            target.send_many("topic", values)
            return len(values)

        yield lap


@contender
def process(statement: str) -> Iterator[Lap]:
    def lap() -> int:
        subprocess.run([sys.executable, "-c", statement], check=True, env=ENVIRONMENT)
        return 1

    yield lap


def overhead(settings: Settings, broker: str) -> None:
    """Measure the time of `send` and `send_many` above the writer's own, and that of the import.

    The writer belongs to a backend that does nothing at all, so that everything measured is the interface's own:
    processor time, as nothing here waits. The import is measured by whole processes with and without it.
    """
    report = Report(settings, "Sending, above the writer's own call")
    values = _embedded.bodies(MESSAGES, 100)
    few = values[:10]
    found = alternate(
        settings,
        {
            "send": sending(values),
            "writer.send": writing(values),
            "send_many": at_once(transaction, values),
            "writer.send_many": at_once(lambda: nullcontext(IdleWriter()), values),
            "send_many of few": at_once(transaction, few),
            "writer.send_many of few": at_once(lambda: nullcontext(IdleWriter()), few),
        },
        PROCESSOR,
    )
    above = excess(found["send"], found["writer.send"], 1e6)
    report.figure("`txn.send` above `writer.send`, a message", above, "us", at_most(0.25))
    report.figure("yardstick: `writer.send` that does nothing", per_unit(found["writer.send"], 1e6), "us")
    above = excess(found["send_many"], found["writer.send_many"], 1e6)
    report.figure(f"`txn.send_many` of {MESSAGES:,} above the writer's, a message", above, "us", at_most(0.05))
    report.figure("yardstick: `writer.send_many` that does nothing", per_unit(found["writer.send_many"], 1e6), "us")
    above = excess(found["send_many of few"], found["writer.send_many of few"], 1e6)
    report.figure(f"`txn.send_many` of {len(few)} above the writer's, a message", above, "us")

    report = Report(settings, "Import")
    found = alternate(settings, {"bare": process("pass"), "import": process("import txnbridge")})
    above = excess(found["import"], found["bare"], 1e3)
    report.figure("`import txnbridge` above bare Python", above, "ms", at_most(80))
    report.figure("yardstick: bare Python", per_unit(found["bare"], 1e3), "ms")


MANY = 1000


@contextmanager
def measured() -> Iterator[None]:
    from txnbridge import metrics

    with txnbridge.plugins.registered(metrics.Metrics()):
        yield


@contextmanager
def traced(send_spans: bool = True) -> Iterator[None]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    from txnbridge import opentelemetry

    tracers = TracerProvider(shutdown_on_exit=False)
    found = opentelemetry.instrument(tracers, MeterProvider(shutdown_on_exit=False), send_spans=send_spans)
    try:
        with tracers.get_tracer("benchmark").start_as_current_span("request"):
            yield
    finally:
        found.remove()


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "off": nullcontext,
    "metrics": measured,
    "traces": traced,
    "traces without spans of sends": lambda: traced(send_spans=False),
}


@contender
def sending_while(way: str, write: Contender) -> Iterator[Lap]:
    with WAYS[way](), write() as lap:
        yield lap


def telemetry(settings: Settings, broker: str) -> None:
    """Measure transactions of one message and of many with metrics and traces, and without.

    Spans are made and sampled, and not exported: an exporter works in a thread of its own.
    """
    kit = _ours.helper(broker)
    with kit.broker(settings) as url:
        topic = kit.new_topic(url)
        report = Report(settings, "Speed with metrics and traces / without")
        for count in (1, MANY):
            values = [b"x" * 100] * count
            # On the embedded broker each round has a file of its own.
            write = _embedded.writing(settings, values) if broker == "embedded" else _ours.writing(url, topic, values)
            found = alternate(settings, {way: sending_while(way, write) for way in WAYS})
            for way in list(WAYS)[1:]:
                target = None if count == MANY and way != "metrics" else at_least(0.95)
                name = broker if broker == "embedded" else kit.NAME
                report.ratio(f"{name}, {count} messages a transaction: {way}", found[way], found["off"], target)
