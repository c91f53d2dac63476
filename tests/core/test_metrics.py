"""Metrics: each is counted once, where it happened, and Prometheus and OpenTelemetry read the same numbers."""

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import txnbridge
from tests.conformance.broken import around
from tests.core.processor_kit import send
from tests.in_time import wait_until
from txnbridge import Bridge, Decision, Outcome, _metrics, metrics
from txnbridge.errors import OutcomeUnknown
from txnbridge.testing import next_commit


@pytest.fixture
def collected() -> Iterator[metrics.Metrics]:
    found = metrics.Metrics()
    with txnbridge.plugins.registered(found):
        yield found


@pytest.fixture
def bridge(tmp_path: Path, collected: metrics.Metrics) -> Iterator[Bridge]:
    with txnbridge.connect(f"embedded:{tmp_path}/a.db") as bridge:
        bridge.ensure_topics("orders", "shipments", "dead")
        yield bridge


def values(collected: metrics.Metrics, name: str) -> dict[str, Any]:
    """Return the samples of a metric by the values of their labels, without that of the backend."""
    families = [family for family in collected.families() if family.name == f"txnbridge_{name}"]
    return {
        ",".join(value for _, value in labels[1:]): sample for f in families for labels, sample in f.samples.items()
    }


def test_each_transaction_is_counted_once_by_its_state_at_its_end(bridge, collected):
    with bridge.transaction() as txn:
        txn.send("orders", b"1")
    with bridge.transaction() as txn:
        raise txnbridge.Abort
    with bridge.transaction(prepare=True) as prepared:
        prepared.send("orders", b"2")
    with pytest.raises(ZeroDivisionError), bridge.transaction():
        raise ZeroDivisionError
    explicit = bridge.transaction()
    explicit.abort()
    explicit.abort()
    assert values(collected, "transactions_total") == {"committed": 1, "aborted": 3, "prepared": 1}
    bridge.commit(str(prepared.token))
    assert values(collected, "resolved_total") == {"committed": 1}
    for name in ("transaction_seconds", "transaction_end_seconds"):
        (sample,) = values(collected, name).values()
        assert sum(sample[:-1]) == 5 and sample[-1] > 0


def test_a_transaction_of_unknown_outcome_is_counted_as_such(bridge, collected):
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown), bridge.transaction() as txn:
        txn.send("orders", b"1")
    assert values(collected, "transactions_total") == {"unknown": 1}


def test_transactions_of_a_group_commit_are_counted_one_by_one(tmp_path, collected):
    with txnbridge.connect(f"embedded:{tmp_path}/a.db", group_commit=True) as bridge:
        bridge.ensure_topics("orders")
        for _ in range(3):
            send(bridge, "orders", b"1")
    assert values(collected, "transactions_total") == {"committed": 3}


def test_processors_and_half_messages_are_counted(bridge, collected):
    send(bridge, "orders", b"1", b"poison", b"3")

    def ship(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
        if message.value == b"poison":
            raise txnbridge.Poison("so it is")
        txn.send("shipments", message.value)

    processor = bridge.processor("orders", group="shipping", each=ship, dead_letter="dead")
    processor.run(until_idle=True)
    assert values(collected, "processor_messages_total") == {"shipping,orders": 3}
    assert values(collected, "processor_dead_letters_total") == {"shipping,orders": 1}
    assert values(collected, "processor_lag") == {"shipping,orders": 0}
    decide = lambda *_: Decision.COMMIT  # noqa: E731
    with bridge.half_messages("sales", execute=decide, check=decide) as halves, halves.transaction() as half:
        half.send("orders", b"4")
    assert values(collected, "half_messages_total") == {"stored": 1, "committed": 1}
    bridge.close()
    assert values(collected, "processor_messages_total") == {"shipping,orders": 3}, "counters outlive their bridge"


def test_metrics_ask_the_broker_for_open_transactions_until_the_bridge_closes(
    tmp_path, collected, broken_broker, caplog
):
    fails: list[Exception] = []

    def transactions(inner: Any, *given: Any) -> Any:
        if fails:
            raise fails[0]
        return inner.transactions(*given)

    scheme = broken_broker(Administering=around(transactions=transactions))
    bridge = txnbridge.connect(f"{scheme}:{tmp_path}/a.db", timeout=0.5)
    bridge.ensure_topics("orders")
    with bridge.transaction(prepare=True, timeout=30) as txn:
        txn.send("orders", b"1")
    watch = collected.watch(bridge, every=0.05)
    wait_until(lambda: values(collected, "open_transactions") == {"open": 0, "prepared": 1})
    wait_until(lambda: values(collected, "oldest_open_transaction_seconds").get("prepared", 0) > 0.6)
    assert caplog.text.count("readers may wait for it (orders[0])") == 1
    bridge.abort(str(txn.token))
    wait_until(lambda: values(collected, "open_transactions") == {"open": 0, "prepared": 0})
    fails.append(ZeroDivisionError("of a plug-in"))
    wait_until(lambda: "open_transactions" not in {f.name.removeprefix("txnbridge_") for f in watch.families})
    bridge.close()
    assert values(collected, "open_transactions") == {}


def test_prometheus_reads_the_metrics_by_http(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.listen()
        with pytest.raises(OSError, match="in use"):
            metrics.serve(port, "127.0.0.1", registry := CollectorRegistry())
    found = metrics.serve(port, "127.0.0.1", registry)
    try:
        with txnbridge.connect(f"embedded:{tmp_path}/a.db") as bridge:
            bridge.ensure_topics("orders")
            send(bridge, "orders", b"1")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            read = [*text_string_to_metric_families(answer.read().decode())]
    finally:
        txnbridge.plugins.unregister(found)
    families = {family.name: family for family in read}
    assert len(families) == len(read)  # twice one name is no answer to Prometheus
    (sample,) = families["txnbridge_transactions"].samples
    assert sample.labels == {"backend": "embedded", "state": "committed"} and sample.value == 1
    buckets = [s.value for s in families["txnbridge_transaction_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 1


def test_the_dashboard_shows_metrics_that_exist():
    import json
    import re

    path = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
    queries = [t["expr"] for panel in json.loads(path.read_text())["panels"] for t in panel.get("targets", ())]
    shown = {name for query in queries for name in re.findall(r"txnbridge_(\w+)", query)}
    known = {
        f"{name}{suffix}"
        for name, definition in _metrics.DEFINITIONS.items()
        for suffix in (("_bucket", "_sum", "_count") if definition.kind == "histogram" else ("",))
    }
    assert queries and shown <= known
