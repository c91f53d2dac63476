"""Answers health checks of an orchestrator, and requests of Prometheus, by HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple


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
