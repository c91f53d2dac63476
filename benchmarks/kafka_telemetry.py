"""The cost of metrics and traces in transactions of one message and of many, on the embedded broker and on Kafka.

Spans are made and sampled, and not exported: an exporter works in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks._files import fresh_bridge
from benchmarks._harness import Contender, Estimate, Lap, Report, Settings, alternate, at_least, run, speed
from benchmarks._kafka import broker, new_topic
from txnbridge import Bridge, connect, metrics, opentelemetry, plugins

MANY = 1000


@contextmanager
def off() -> Iterator[None]:
    yield


@contextmanager
def measured() -> Iterator[None]:
    with plugins.registered(metrics.Metrics()):
        yield


@contextmanager
def traced(send_spans: bool = True) -> Iterator[None]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    tracers = TracerProvider(shutdown_on_exit=False)
    found = opentelemetry.instrument(tracers, MeterProvider(shutdown_on_exit=False), send_spans=send_spans)
    try:
        with tracers.get_tracer("benchmark").start_as_current_span("request"):
            yield
    finally:
        found.remove()


WAYS = {
    "off": off,
    "metrics": measured,
    "traces": traced,
    "traces without spans of sends": lambda: traced(send_spans=False),
}


def sending(settings: Settings, url: str | None, topic: str, count: int) -> dict[str, Contender]:
    def made(way: str) -> Contender:
        @contextmanager
        def contender() -> Iterator[Lap]:
            with ExitStack() as stack:
                stack.enter_context(WAYS[way]())
                bridge: Bridge = stack.enter_context(connect(url, writers=1) if url else fresh_bridge(settings.folder))
                values = [b"x" * 100] * count

                def lap() -> int:
                    with bridge.transaction() as txn:
                        txn.send_many(topic, values)
                    return 1

                yield lap

        return contender

    return {way: made(way) for way in WAYS}


def measure(settings: Settings) -> None:
    with broker() as url:
        report = Report(settings, "Speed with metrics and traces / without")
        for name, address, topic in (("embedded", None, "topic"), ("Kafka", url, new_topic(url))):
            for count in (1, MANY):
                found = alternate(settings, sending(settings, address, topic, count))
                for way in list(WAYS)[1:]:
                    ratio: Estimate = speed(found[way], found["off"])
                    target = None if count == MANY and way != "metrics" else at_least(0.95)
                    report.figure(f"{name}, {count} messages a transaction: {way}", ratio, "", target)


if __name__ == "__main__":
    run(measure)
