"""Metrics of all bridges of this process: transactions, half messages, processors, resolvers and relays.

    from txnbridge import metrics

    metrics.serve(9090)                    # Prometheus reads http://this-host:9090/metrics

Call it before bridges are opened. `txnbridge run --health-port` does so for an application. `PrometheusCollector` puts
the metrics into a registry of your own, and `txnbridge.opentelemetry` gives them to OpenTelemetry.
"""

from txnbridge._metrics import Metrics, PrometheusCollector, serve

__all__ = ["Metrics", "PrometheusCollector", "serve"]
