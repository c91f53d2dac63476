"""Helpers of the tests of the backend: settings without a bridge, and a broker's own view of its topics."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from txnbridge_conformance import brokers
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest
from txnbridge_pulsar.broker import open_client
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.settings.topic_names import Namespace
from txnbridge_pulsar.topics import PulsarTopics

from txnbridge.spi import Deadline, Emitter

# Far more than anything takes, also on a busy machine.
SOON = 30.0


def url_of(broker: brokers.Pulsar, **options: object) -> str:
    """A bridge's URL, with the REST interface."""
    query = "&".join(f"{name}={value}" for name, value in {"admin_url": broker.admin_url, **options}.items())
    return f"{broker.url}?{query}"


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler], **parts: Any) -> Iterator[Any]:
    """Serve the REST interface; `parts` are attributes of the server, which its handler uses."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(parts)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Kept:
    """A ledger that keeps the newest opening."""

    def __init__(self, **data: Any) -> None:
        self.newest: Any = ("opening", data) if data else None

    def newest_opening(self, deadline: Deadline) -> Any:
        return self.newest

    def open_behind(self, before: str | None, data: Any, deadline: Deadline) -> bool:
        assert before == (self.newest[0] if self.newest else None)
        self.newest = ("opening", data)
        return True


def settings_for(url: str, **given: Any) -> PulsarSettings:
    """Return the settings that a bridge to this URL has."""
    service, _, path = url.partition("://")[2].partition("/")
    tenant, _, namespace = path.partition("?")[0].partition("/")
    defaults: dict[str, Any] = {"timeout": SOON, "hold": None, "application": "tests", "create_topics": 0}
    return PulsarSettings(f"pulsar://{service}", Namespace(tenant, namespace), **{**defaults, **given})


class Connection:
    """The shared parts of a backend, without a bridge."""

    def __init__(self, url: str, **given: Any) -> None:
        self.settings = settings_for(url, **given)
        self.client: wire.PulsarClient = open_client(self.settings)
        self.rest = Rest(self.settings)
        self.topics = PulsarTopics(self.settings, self.client, self.rest)

    def close(self) -> None:
        self.client.close()


def open_cluster(connection: Connection) -> ClusterAccess:
    """Return a cluster, as the parts of a backend get it."""
    rest, events = connection.rest, Emitter("tests", ())
    return ClusterAccess("tests", connection.settings, connection.client, connection.topics, rest, events)
