"""The cost of metrics and traces in transactions of one message and of many.

Spans are made and sampled, and not exported: an exporter works in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from benchmarks import _embedded
from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, contender
from benchmarks._ours import helper, writing
from txnbridge import metrics, opentelemetry, plugins

MANY = 1000


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


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "off": nullcontext,
    "metrics": measured,
    "traces": traced,
    "traces without spans of sends": lambda: traced(send_spans=False),
}


@contender
def sending(way: str, write: Contender) -> Iterator[Lap]:
    with WAYS[way](), write() as lap:
        yield lap


def measure(settings: Settings, broker: str) -> None:
    kit = helper(broker)
    with kit.broker(settings) as url:
        topic = kit.new_topic(url)
        report = Report(settings, "Speed with metrics and traces / without")
        for count in (1, MANY):
            values = [b"x" * 100] * count
            # On the embedded broker each round has a file of its own.
            write = _embedded.writing(settings, values) if broker == "embedded" else writing(url, topic, values)
            found = alternate(settings, {way: sending(way, write) for way in WAYS})
            for way in list(WAYS)[1:]:
                target = None if count == MANY and way != "metrics" else at_least(0.95)
                name = broker if broker == "embedded" else kit.NAME
                report.ratio(f"{name}, {count} messages a transaction: {way}", found[way], found["off"], target)
