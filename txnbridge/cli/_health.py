"""`HealthServer`: answers the health checks of an orchestrator by HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

# Whether the answer is yes, and the JSON document that says why.
Answer = tuple[bool, dict[str, Any]]


@contextmanager
def serving(port: int, checks: dict[str, Callable[[], Answer]]) -> Iterator[int]:
    """Answer GET requests by the checks, which are given by their paths, during the block; it gets the port.

    Port 0 takes a free one. The answer yes has the status 200, no has 503.
    """

    class RequestHandler(BaseHTTPRequestHandler):
        timeout = 10  # a client that sends nothing would hold its thread for ever

        def do_GET(self) -> None:  # the name that http.server looks for
            check = checks.get(self.path.partition("?")[0])
            if check is None:
                self.send_error(404)
                return
            good, document = check()
            body = json.dumps(document).encode() + b"\n"
            self.send_response(200 if good else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a check comes every few seconds."""

    server = ThreadingHTTPServer(("", port), RequestHandler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.1,), name="txnbridge health", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
