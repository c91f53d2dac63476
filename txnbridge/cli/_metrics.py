"""The metrics of an application's workers, from their processes to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from txnbridge import InvalidOption
from txnbridge._metrics import Family, PrometheusCollector, merged, require_prometheus_client
from txnbridge.cli._health import Answer


def to_json(families: Iterable[Family]) -> list[Any]:
    """Return metrics in a form that can be written as JSON, for `from_json`."""
    return [[each.name, [[dict(labels), value] for labels, value in each.samples.items()]] for each in families]


def from_json(document: list[Any]) -> list[Family]:
    """Return the metrics from a document that `to_json` has made."""
    return [Family(name, {tuple(labels.items()): value for labels, value in samples}) for name, samples in document]


def of_ended(documents: Iterable[list[Any]]) -> list[Any]:
    """Return the metrics to keep of processes that have ended: the sums of their counters and histograms."""
    return to_json(each for each in merged(map(from_json, documents)) if each.definition.kind != "gauge")


def page(documents: Iterable[list[Any]]) -> Answer:
    """Return the sums of the metrics of all workers as a page for Prometheus."""
    try:
        client = require_prometheus_client()
    except InvalidOption as error:
        return Answer(501, "text/plain", f"{error}\n".encode())
    families = merged(map(from_json, documents))
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(lambda: families))
    return Answer(200, client.CONTENT_TYPE_LATEST, client.generate_latest(registry))
