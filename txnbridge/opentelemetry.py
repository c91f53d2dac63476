"""OpenTelemetry: spans of sends, ends of transactions and handlers, and metrics; needs `opentelemetry-api`.

    from txnbridge import opentelemetry

    instrumentation = opentelemetry.instrument()     # bridges opened from now on

A message carries the context of its `send` span in its header `traceparent` (W3C Trace Context), so the span of the
handler that processes it belongs to the same trace, on whatever broker and in whatever language.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry import metrics as otel
    from opentelemetry.trace import SpanKind, StatusCode
except ModuleNotFoundError as _error:
    _text = (
        "txnbridge.opentelemetry needs opentelemetry-api: in a clone of txnbridge, pip install -e '.[opentelemetry]'"
    )
    raise ModuleNotFoundError(_text, name=_error.name) from _error

from txnbridge import _metrics as metrics
from txnbridge._base.events import Event
from txnbridge._base.messages import Headers, Message
from txnbridge._base.plugins import hookimpl, plugins
from txnbridge.spi import RawHeaders

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["Instrumentation", "Tracing", "instrument"]

_NAME = "txnbridge"
_SYSTEMS = {"kafka": "kafka", "pulsar": "pulsar", "rocketmq": "rocketmq"}  # names of the semantic conventions

# The steps that have a span, each with the span's name.
_STEPS = {
    "commit": "commit",
    "abort": "abort",
    "prepare": "prepare",
    "resolve": "resolve",
    "half.store": "store half messages",
    "half.end": "end half messages",
    "half.check": "check back",
    "database.commit": "commit to database",
}
# The steps that end a processor's transaction.
_ENDS = ("commit", "abort", "database.commit")
_MOST_LINKS = 128  # the limit of OpenTelemetry's own


def instrument(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    send_spans: bool = True,
) -> Instrumentation:
    """Trace and measure all bridges that are opened from now on; by default with the global providers.

    With `send_spans=False` a message has no span of its own, but carries the context of the span in which it is sent:
    much faster where a transaction has many messages.
    """
    found = Instrumentation(tracer_provider, meter_provider, send_spans)
    plugins.register(found.tracing)
    plugins.register(found.metrics)
    return found


class Instrumentation:
    """The plug-ins that `instrument` has registered: `tracing` makes spans, the meter provider reads `metrics`."""

    def __init__(
        self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None, send_spans: bool
    ) -> None:
        self.tracing: Tracing = Tracing(trace.get_tracer(_NAME, tracer_provider=tracer_provider), send_spans)
        self.metrics: metrics.Metrics = metrics.Metrics()
        _measure(self.metrics, otel.get_meter(_NAME, meter_provider=meter_provider))

    def remove(self) -> None:
        """Neither trace nor measure bridges that are opened from now on."""
        plugins.unregister(self.tracing)
        plugins.unregister(self.metrics)


class Tracing:
    """The plug-in that makes spans, and puts their context into headers."""

    txnbridge_event_names: frozenset[str] = frozenset(_STEPS)

    def __init__(self, tracer: trace.Tracer, send_spans: bool) -> None:
        self._tracer = tracer
        self._send_spans = send_spans
        self._running = threading.local()  # the spans of the running steps of each thread

    @hookimpl
    def txnbridge_headers(self, topic: str, key: bytes | None, headers: RawHeaders) -> Mapping[str, str]:
        """Make the span of a `send`, and return the headers with its context.

        It is a child of the span in `headers`, which a message has that goes to another topic unchanged: as a dead
        letter, to a retry topic, or from an outbox.
        """
        found: dict[str, str] = {}
        if not self._send_spans:
            last: tuple[object, dict[str, str]] = self._running.__dict__.get("injected", (None, found))
            if last[0] is not (now := context.get_current()):  # a context does not change, so it is written once
                propagate.inject(found)
                last = self._running.injected = now, found
            return last[1]
        attributes = {"messaging.operation.type": "send", "messaging.destination.name": topic}
        parent = propagate.extract(Headers(headers), getter=_GETTER) if headers else None
        span = self._tracer.start_span(f"send {topic}", parent, SpanKind.PRODUCER, attributes)
        propagate.inject(found, trace.set_span_in_context(span))
        span.end()
        return found

    @hookimpl
    def txnbridge_processing(self, messages: Sequence[Message], group: str) -> AbstractContextManager[Span]:
        """Return a context manager that makes the span of a handler.

        The span of one message is a child of its `send`; that of a batch has a link to the `send` of each message.
        """
        topics = dict.fromkeys(message.topic for message in messages)
        attributes: dict[str, Any] = {
            "messaging.operation.type": "process",
            "messaging.destination.name": ",".join(topics),
            "messaging.consumer.group.name": group,
        }
        parents = [propagate.extract(message.headers, getter=_GETTER) for message in messages]
        spans = [trace.get_current_span(each).get_span_context() for each in parents]
        sources = [trace.Link(each) for each in spans if each.is_valid]
        self._running.__dict__.setdefault("sources", deque(maxlen=_MOST_LINKS)).extend(sources)
        links, parent = [], parents[0]
        if len(messages) > 1:
            attributes["messaging.batch.message_count"] = len(messages)
            links, parent = sources, context.get_current()
        return self._tracer.start_as_current_span(
            f"process {','.join(topics)}", parent, SpanKind.CONSUMER, attributes, links
        )

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        """Start a span at the begin of a step, and end it at the step's end, which comes on the same thread.

        The end of a processor's transaction has a link to the `send` of each message that was handled in it.
        """
        stack: list[Span] = self._running.__dict__.setdefault("spans", [])
        if event.phase == "before":
            backend = event.bridge.rpartition("-")[0]
            attributes = {"messaging.system": _SYSTEMS.get(backend, f"txnbridge_{backend}")}
            if event.transaction is not None:
                attributes["txnbridge.transaction"] = event.transaction
            links = self._running.__dict__.pop("sources", ()) if event.name in _ENDS else ()
            stack.append(trace.INVALID_SPAN)  # for the step's end, if no span can be started
            name = _STEPS[event.name]
            stack[-1] = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes, links=links)
        elif stack:
            span = stack.pop()
            if event.phase == "failed":
                span.set_status(StatusCode.ERROR, str(event.data["error"]))
            elif "outcome" in event.data:
                span.set_attribute("txnbridge.outcome", str(event.data["outcome"]))
            span.end()


class _HeadersGetter:
    """Reads a span's context from the headers of a message, in OpenTelemetry's way."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return [value for value in carrier.all(key) if value.isascii()] or None  # any stranger may have set it

    def keys(self, carrier: Headers) -> list[str]:
        return list(carrier)


_GETTER: Any = _HeadersGetter()


def _measure(collected: metrics.Metrics, meter: otel.Meter) -> None:
    """Let the meter read the `collected` metrics at its own intervals, and record durations as they come."""
    histograms = {}
    for name, (kind, text) in metrics.DEFINITIONS.items():
        full = f"{_NAME}.{name.removesuffix('_total')}"
        if kind == "histogram":
            histograms[name] = meter.create_histogram(full, "s", text, explicit_bucket_boundaries_advisory=_BOUNDS)
        elif kind == "counter":
            meter.create_observable_counter(full, [_reader(collected, name)], description=text)
        else:
            meter.create_observable_gauge(full, [_reader(collected, name)], description=text)
    collected.on_duration.append(lambda name, labels, seconds: histograms[name].record(seconds, dict(labels)))


_BOUNDS = metrics.BUCKETS[:-1]


def _reader(collected: metrics.Metrics, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(options: CallbackOptions) -> Iterator[Observation]:
        for family in collected.families():
            if family.name == f"{_NAME}_{name}":
                for labels, value in family.samples.items():
                    yield otel.Observation(value, dict(labels))

    return read
