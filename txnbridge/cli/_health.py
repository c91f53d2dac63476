"""Answers health checks of an orchestrator, and requests of Prometheus for the metrics of all workers, by HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple

from txnbridge import InvalidOption
from txnbridge._metrics import Family, PrometheusCollector, merged, require_prometheus_client


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes


def health(good: bool, document: dict[str, Any]) -> Answer:
    """Return the answer to a health check: status 200 if `good`, otherwise 503, with `document` as JSON."""
    return Answer(200 if good else 503, "application/json", json.dumps(document).encode() + b"\n")


@contextmanager
def serving(host: str, port: int, pages: dict[str, Callable[[], Answer]]) -> Iterator[int]:
    """Answer GET requests by functions, which are given by their paths, during the block; yield the port.

    `host` is a name or an address of this machine. Port 0 takes a free one. Raise `OSError` if it cannot listen there.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)

    class RequestHandler(BaseHTTPRequestHandler):
        timeout = 10  # a client that sends nothing would hold its thread for ever

        def handle(self) -> None:
            with suppress(ConnectionError):  # a check of the port alone resets the connection
                super().handle()

        def do_GET(self) -> None:  # the name of the method that http.server calls
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                self.send_error(404)
                return
            answer = page()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a check comes every few seconds."""

    class Server(ThreadingTCPServer):  # an HTTPServer would ask the DNS for this machine's name, at length
        address_family = found[0][0]
        daemon_threads = allow_reuse_address = True

    server = Server((host, port), RequestHandler)
    thread = Thread(target=server.serve_forever, args=(0.1,), name="txnbridge health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
