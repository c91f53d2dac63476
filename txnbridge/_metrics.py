"""The metrics: definitions of what is counted and measured, their collection, and their form for Prometheus."""

from __future__ import annotations

import bisect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from txnbridge._base.events import Event
from txnbridge._base.plugins import hookimpl, plugins
from txnbridge._base.service import Service
from txnbridge._bridge import Bridge, open_bridges
from txnbridge._half.common import half_store
from txnbridge._half.resolver import Resolver
from txnbridge.capabilities import Capability
from txnbridge.errors import InvalidOption

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from txnbridge.spi import OpenTransaction

_log = logging.getLogger("txnbridge")

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]  # names and values

# The upper bounds of the histograms' buckets, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, float("inf"))


class Definition(NamedTuple):
    """The kind of a metric, and what its numbers mean."""

    kind: Kind
    text: str


DEFINITIONS = {
    "transactions_total": Definition("counter", "Transactions by state at their end; a prepared one ends by a token."),
    "transaction_seconds": Definition("histogram", "Time from the begin of a transaction to its end."),
    "transaction_end_seconds": Definition("histogram", "Time that a commit, abort or prepare takes."),
    "resolved_total": Definition("counter", "Tokens whose transactions were ended or looked up, by the outcome."),
    "half_messages_total": Definition("counter", "Half messages that were stored, ended or parked, by event."),
    "half_checks_total": Definition("counter", "Check-backs by the decision that `check` gave."),
    "processor_messages_total": Definition("counter", "Messages that a processor has processed, with dead letters."),
    "processor_transactions_total": Definition("counter", "Transactions that a processor has committed."),
    "processor_dead_letters_total": Definition("counter", "Messages that a processor has set aside as dead letters."),
    "processor_delayed_total": Definition("counter", "Messages that a processor has sent to a retry topic."),
    "processor_retries_total": Definition(
        "counter", "Failed attempts of a processor to poll and process a batch, repeated in place."
    ),
    "processor_lag": Definition("gauge", "Messages that wait in the partitions of a processor."),
    "processor_healthy": Definition("gauge", "1 while a processor gets on, otherwise 0."),
    "service_healthy": Definition("gauge", "1 while a resolver or relay gets on, otherwise 0."),
    "relay_rows_total": Definition("counter", "Rows of an outbox that a relay has published or parked."),
    "relay_lag": Definition("gauge", "Rows of an outbox that wait."),
    "open_transactions": Definition("gauge", "Transactions that are open at the broker, by state."),
    "oldest_open_transaction_seconds": Definition("gauge", "Age of the oldest open transaction at the broker."),
    "half_messages_parked": Definition("gauge", "Half messages without a decision, which somebody has to end."),
}


@dataclass(frozen=True)
class Family:
    """One metric with a sample for each combination of labels.

    The sample of a histogram is a list: the count of each bucket, and at last the sum of all values.
    """

    name: str
    samples: dict[Labels, Any] = field(default_factory=dict)

    @property
    def definition(self) -> Definition:
        """The metric's kind, and what its numbers mean."""
        return DEFINITIONS[self.name.removeprefix("txnbridge_")]

    def add(self, labels: Labels, value: float) -> None:
        """Add `value` to the sample of these labels."""
        self.samples[labels] = self.samples.get(labels, 0) + value

    def observe(self, labels: Labels, value: float) -> None:
        """Count a value in the histogram of these labels."""
        sample = self.samples.setdefault(labels, [0] * len(BUCKETS) + [0.0])
        sample[bisect.bisect_left(BUCKETS, value)] += 1
        sample[-1] += value


class Metrics:
    """Collects the metrics of the bridges that are opened while it is registered as a plug-in.

    It listens to a few events of each transaction, and to none of each message.
    """

    txnbridge_event_names: frozenset[str] = frozenset(
        {"transaction.end", "abort", "resolve", "half.store", "half.end", "half.park", "half.check"}
        | {"processor.count", "relay.count"}
    )

    _lock = threading.RLock()  # of all; reentrant, because a signal handler may run while it is held

    def __init__(self) -> None:
        self._counted: dict[str, Family] = {}
        self._watched: dict[Bridge, BrokerWatch] = {}
        # Called with the name, the labels and the value of each duration, besides the histograms here.
        self.on_duration: list[Callable[[str, Labels, float], object]] = []

    def families(self) -> list[Family]:
        """Return all metrics with their present values."""
        with self._lock:
            counted = merged([self._counted.values()])  # a copy, as other threads count on
        found: dict[str, Family] = {}
        for bridge in open_bridges():
            for name, labels, value in _of_bridge(bridge):
                _family(found, name).add((("backend", bridge.backend), *labels), value)
        watches = [watch for bridge, watch in list(self._watched.items()) if not bridge._connection.closed]
        return merged([counted, found.values(), [family for watch in watches for family in watch.families]])

    def watch(self, bridge: Bridge, every: float = 30.0) -> BrokerWatch:
        """Ask a bridge's broker at intervals for what only the broker knows, such as open transactions.

        Return the service that does so until it or the bridge is closed.
        """
        watch = BrokerWatch(bridge, every)
        self._watched = {b: w for b, w in self._watched.items() if not b._connection.closed} | {bridge: watch}
        watch.start()
        return watch

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        """Count an event."""
        if event.phase == "before":
            return
        backend = ("backend", event.bridge.rpartition("-")[0])
        data = event.data
        if event.name == "transaction.end":
            self._count("transactions_total", backend, ("state", data["state"]))
            self._observe("transaction_seconds", data["seconds"], backend)
            self._observe("transaction_end_seconds", data["end_seconds"], backend)
        elif event.name == "abort" and data.get("abandoned"):
            self._count("transactions_total", backend, ("state", "aborted"))
        elif event.name == "resolve" and "outcome" in data:
            self._count("resolved_total", backend, ("outcome", data["outcome"]))
        elif event.name == "half.check" and event.phase == "after":
            self._count("half_checks_total", backend, ("decision", data.get("decision", "undecided")))
        elif event.name in _HALF_EVENTS and event.phase == "after":
            self._count("half_messages_total", backend, ("event", data.get("outcome", _HALF_EVENTS[event.name])))
        elif event.name in ("processor.count", "relay.count"):
            self._count_work(event.name, backend, dict(data))

    def _count_work(self, event: str, backend: tuple[str, str], counts: dict[str, Any]) -> None:
        if event == "processor.count":
            labels = backend, ("group", counts.pop("group")), ("topics", counts.pop("topics"))
            for name, count in counts.items():
                self._count(f"processor_{name}_total", *labels, count=count)
        else:
            service = ("service", counts.pop("service"))
            for result in counts.keys() & {"published", "parked"}:
                self._count("relay_rows_total", backend, service, ("result", result), count=counts[result])

    def _count(self, name: str, *labels: tuple[str, str], count: int = 1) -> None:
        with self._lock:
            _family(self._counted, name).add(labels, count)

    def _observe(self, name: str, seconds: float, *labels: tuple[str, str]) -> None:
        with self._lock:
            _family(self._counted, name).observe(labels, seconds)
        for told in self.on_duration:
            told(name, labels, seconds)


# A thread that is not in a forked child may have held the lock.
os.register_at_fork(after_in_child=lambda: setattr(Metrics, "_lock", threading.RLock()))
_HALF_EVENTS = {"half.store": "stored", "half.end": "unknown", "half.park": "parked"}


def _family(families: dict[str, Family], name: str) -> Family:
    if name not in families:
        families[name] = Family(f"txnbridge_{name}")
    return families[name]


def _of_bridge(bridge: Bridge) -> Iterator[tuple[str, Labels, float]]:
    """Yield the present values of a bridge's processors and services: name, labels, value."""
    for processor in list(bridge._connection.processors):
        labels = tuple(processor._names.items())
        if processor.lag is not None:
            yield "processor_lag", labels, processor.lag
        yield "processor_healthy", labels, processor.healthy
    service: Any
    for service in list(bridge._connection.services):
        if hasattr(service, "healthy"):
            yield "service_healthy", (("service", service._name),), service.healthy


class BrokerWatch(Service):
    """Measures at intervals a broker's open transactions, the lag of relays, and half messages without check-backs."""

    def __init__(self, bridge: Bridge, every: float) -> None:
        if not every > 0:
            raise InvalidOption(f"every= is the seconds between two questions to the broker, not {every!r}")
        super().__init__(bridge._connection, "watch of metrics", stop_timeout=1.0)
        self._bridge = bridge
        self._every = every
        self._warned = False  # of the oldest open transaction
        self.families: list[Family] = []

    def _loop(self) -> None:
        while not self._stop.asked and not self._connection.closed:
            found: dict[str, Family] = {}
            backend = ("backend", self._bridge.backend)
            for ask in (self._ask_transactions, self._ask_services):
                with suppress(Exception):  # a metric that cannot be asked for is missing until it can
                    for name, label, value in ask():
                        _family(found, name).add((backend, label), value)
            self.families = list(found.values())
            self._stop.sleep(self._every)

    def _ask_transactions(self) -> Iterator[tuple[str, tuple[str, str], float]]:
        if self._connection.capabilities[Capability.LIST_OPEN]:
            transactions = self._bridge.admin.transactions()
            for state in ("open", "prepared"):
                yield "open_transactions", ("state", state), 0
            for transaction in transactions:
                yield "open_transactions", ("state", transaction.state), 1
            since = {each.since: each for each in transactions if each.since is not None}
            for state in ("open", "prepared"):
                begun = min((at for at, each in since.items() if each.state == state), default=None)
                yield "oldest_open_transaction_seconds", ("state", state), 0.0 if begun is None else _age(begun)
            self._warn(since[min(since)] if since else None)

    def _warn(self, oldest: OpenTransaction | None) -> None:
        """Warn once if the oldest open transaction is older than the bridge's timeout."""
        age = 0.0 if oldest is None else _age(oldest.since or 0)
        if oldest is None or age <= self._connection.timeout:
            self._warned = False
        elif not self._warned:
            self._warned = True
            where = ", ".join(f"{topic}[{number}]" for topic, number in oldest.partitions[:8])
            text = "transaction %s of %s has been open for %.0f s, and readers may wait for it (%s): see `txnbridge"
            _log.warning(text + " transactions list`", oldest.transaction, oldest.owner or "a stranger", age, where)

    def _ask_services(self) -> Iterator[tuple[str, tuple[str, str], float]]:
        groups = set()
        service: Any
        for service in list(self._connection.services):
            if hasattr(type(service), "lag"):  # a relay, whose class is in a module that needs SQLAlchemy
                yield "relay_lag", ("service", service._name), service.lag
            if isinstance(service, Resolver):
                groups.add(service._group)
        for group in groups:
            parked = half_store(self._connection).parked(group, self._connection.deadline())
            yield "half_messages_parked", ("group", group), len(parked)


def _age(since: int) -> float:
    return max(0.0, time.time() - since / 1000)


def merged(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """Return the metrics of several processes as one list: each sample is the sum over the processes."""
    whole: dict[str, Family] = {}
    for family in (each for part in parts for each in part):
        samples = whole.setdefault(family.name, Family(family.name)).samples
        for labels, value in family.samples.items():
            known = samples.get(labels)
            if isinstance(value, list):
                samples[labels] = [a + b for a, b in zip(known or [0] * len(value), value, strict=True)]
            else:
                samples[labels] = (known or 0) + value
    return list(whole.values())


class PrometheusCollector:
    """A collector for a registry of `prometheus_client`: `REGISTRY.register(PrometheusCollector(metrics.families))`."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as those of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for family in self._families():
            kind, text = family.definition
            made: Any = kinds[kind](family.name, text, labels=[name for name, _ in next(iter(family.samples), ())])
            for labels, value in family.samples.items():
                sample = (list(_cumulated(value)), value[-1]) if kind == "histogram" else (value,)
                made.add_metric([label for _, label in labels], *sample)
            yield made

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering the collector does not collect."""
        return []


def _cumulated(sample: list[float]) -> Iterator[tuple[str, float]]:
    for bound, total in zip(BUCKETS, accumulate(sample[:-1]), strict=True):
        yield ("+Inf" if bound == float("inf") else str(bound)), total


def serve(port: int, host: str = "0.0.0.0", registry: CollectorRegistry | None = None) -> Metrics:
    """Collect the metrics of bridges opened from now on, and answer Prometheus by HTTP at `/metrics`.

    With `registry`, one of `prometheus_client`, the answer also includes its other metrics. Raise `InvalidOption` if
    the package `prometheus-client` is missing.
    """
    client = require_prometheus_client()
    found = Metrics()
    registry = client.CollectorRegistry() if registry is None else registry
    client.start_http_server(port, addr=host, registry=registry)  # raises an error if the port is taken
    registry.register(PrometheusCollector(found.families))
    plugins.register(found)
    return found


def require_prometheus_client() -> Any:
    """Return the module `prometheus_client`. Raise `InvalidOption` if it is not installed."""
    try:
        import prometheus_client
    except ImportError:
        raise InvalidOption("metrics for Prometheus need a package: pip install prometheus-client") from None
    return prometheus_client
