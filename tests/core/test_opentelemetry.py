"""Traces: one order is one trace from its send to the last handler, through headers that any program understands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import txnbridge
from tests.core.processor_kit import send
from tests.failing import raising
from txnbridge import Bridge, opentelemetry
from txnbridge._base.events import Emitter
from txnbridge.testing import next_commit


class Traced:
    """An instrumented bridge, and what was exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.tracer = self.tracers.get_tracer("test")
        self.bridge: Bridge

    def send(self) -> None:
        send(self.bridge, "orders", b"1")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found

    def metrics(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced()
    instrumentation = opentelemetry.instrument(traced.tracers, traced.meters)
    try:
        with txnbridge.connect(f"embedded:{tmp_path}/a.db") as traced.bridge:
            traced.bridge.ensure_topics("orders", "shipments", "dead")
            yield traced
    finally:
        instrumentation.remove()
        traced.tracers.shutdown()
        traced.meters.shutdown()


def test_one_trace_leads_from_a_request_through_the_broker_to_what_its_handler_sends(traced):
    with traced.tracer.start_as_current_span("request"), traced.bridge.transaction() as txn:
        txn.send("orders", b"1")
    traced.bridge.processor("orders", group="g", each=lambda message, txn: txn.send("shipments", message.value)).run(
        until_idle=True
    )
    request, sent, processed = (traced.span(name) for name in ("request", "send orders", "process orders"))
    shipped = traced.span("send shipments")
    assert [span.parent.span_id for span in (sent, processed, shipped)] == [
        span.context.span_id for span in (request, sent, processed)
    ]
    assert shipped.context.trace_id == request.context.trace_id
    commits = traced.spans("commit")
    assert commits[0].parent.span_id == request.context.span_id
    assert commits[0].attributes["txnbridge.transaction"] == txn.id
    assert [link.context.span_id for link in commits[1].links] == [sent.context.span_id]
    (message,) = traced.bridge.read("shipments", 1)
    expected = f"00-{shipped.context.trace_id:032x}-{shipped.context.span_id:016x}-"
    assert message.headers["traceparent"].startswith(expected)


def test_without_spans_of_sends_a_message_belongs_to_the_span_in_which_it_is_sent(tmp_path):
    traced = Traced()
    instrumentation = opentelemetry.instrument(traced.tracers, traced.meters, send_spans=False)
    with txnbridge.connect(f"embedded:{tmp_path}/a.db") as bridge:
        instrumentation.remove()
        with traced.tracer.start_as_current_span("request") as request, bridge.transaction() as txn:
            txn.send_many("orders", [b"1", b"2"])
        parents = {message.headers["traceparent"] for message in bridge.read("orders", 2)}
    assert [f"{request.get_span_context().span_id:016x}" in parent for parent in parents] == [True]
    assert traced.spans("send orders") == []


def test_the_span_of_a_batch_has_a_link_to_each_message(traced):
    for _ in range(2):
        traced.send()
    traced.bridge.processor("orders", group="g", batch=lambda batch, txn: None).run(until_idle=True)
    links = {link.context.span_id for link in traced.span("process orders").links}
    assert links == {span.context.span_id for span in traced.spans("send orders")}


def test_a_handler_that_fails_has_a_span_with_its_error_and_the_dead_letter_keeps_its_trace(traced):
    send(traced.bridge, "orders", b"1", headers={"kind": "new", "baggage": b"of a stranger: \xff"})

    refuse = raising(txnbridge.Poison("so it is"))
    traced.bridge.processor("orders", group="g", each=refuse, dead_letter="dead").run(until_idle=True)
    failed = traced.span("process orders")
    assert failed.status.status_code is StatusCode.ERROR and failed.events[0].name == "exception"
    (dead,) = traced.bridge.read("dead", 1)
    assert traced.span("send dead").parent.span_id == failed.parent.span_id
    (parent,) = dead.headers.all("traceparent")
    assert parent.startswith(f"00-{failed.context.trace_id:032x}-{failed.parent.span_id:016x}-")


def test_a_step_that_fails_has_a_span_with_the_class_of_its_error(traced):
    with next_commit(traced.bridge, txnbridge.Outcome.ABORTED), pytest.raises(txnbridge.TransactionAborted):
        traced.send()
    status = traced.span("commit").status
    assert (status.status_code, status.description) == (StatusCode.ERROR, "TransactionAborted")


def test_a_span_that_cannot_be_started_leaves_the_span_around_it_open():
    tracing = opentelemetry.Tracing(Mock(start_span=Mock(side_effect=[outer := Mock(), ZeroDivisionError])), True)
    events = Emitter("embedded-1", (tracing.txnbridge_event,))
    with events.step("commit"):
        with events.step("resolve"):
            pass
        outer.end.assert_not_called()


def test_a_plug_in_that_fails_around_a_handler_is_not_felt(traced, caplog):
    class Failing:
        @txnbridge.hookimpl
        def txnbridge_processing(self, messages: object, group: str) -> Any:
            raise ZeroDivisionError

    traced.send()
    with txnbridge.plugins.registered(Failing()):
        processor = traced.bridge.processor("orders", group="g", each=lambda message, txn: None)
    processor.run(until_idle=True)
    assert processor.stats.messages == 1 and processor.stats.retries == 0
    assert "a plug-in failed before the handler" in caplog.text


def test_metrics_reach_the_meter(traced):
    traced.send()
    found = traced.metrics()
    (committed,) = found["txnbridge.transactions"]
    assert dict(committed.attributes) == {"backend": "embedded", "state": "committed"} and committed.value == 1
    (duration,) = found["txnbridge.transaction_seconds"]
    assert duration.count == 1 and duration.sum > 0
