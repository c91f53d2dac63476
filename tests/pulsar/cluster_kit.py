"""Two brokers of one cluster: which of them serves what, and moving that from one to the other."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from txnbridge_conformance import brokers
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of
from txnbridge_pulsar.client.transactions import ASSIGN_TOPIC

from tests.pulsar.kit import SOON, settings_for
from tests.pulsar.writing_kit import concrete, unique
from txnbridge.spi import Deadline

_PAUSE = 0.05
NAMESPACES = ("public/default", "pulsar/system")


class Cluster:
    """Two brokers, each with half of the bundles of topics. Whoever kills one brings it back by `balance`."""

    def __init__(self, broker: brokers.PulsarCluster) -> None:
        self.broker = broker
        self.admin_url = f"http://{','.join(broker.web_address(node) for node in broker.nodes)}"
        self._rest = Rest(settings_for(broker.url, admin_url=self.admin_url))

    def url_of(self, node: int) -> str:
        """The URL of one node alone."""
        return f"pulsar://{self.broker.address(node)}/public/default"

    def node_of(self, topic: str) -> int:
        """The node that serves a concrete topic, by its full name."""
        found = self._ask("GET", f"/lookup/v2/topic/persistent/{path_of(topic)}")
        return next(n for n in self.broker.nodes if self.broker.address(n) == urlsplit(found["brokerUrl"]).netloc)

    def move(self, topic: str, node: int) -> None:
        """Have a node serve a topic, and all that is in its bundle.

        Of several clients that look it up at once all but the first may be sent to another node: then it goes again.
        """
        bundle = self._rest.exchange("GET", f"/lookup/v2/topic/persistent/{path_of(topic)}/bundle", Deadline(SOON))[1]
        namespace = topic.removeprefix("persistent://").rpartition("/")[0]
        until = Deadline(SOON)
        while self.node_of(topic) != node:
            until.check(f"moving {topic} to node {node}")
            self._unload(namespace, bundle.decode().strip('"'), node)

    def balance(self) -> None:
        """Let both run, and each serve half of everything."""
        self.broker.start()
        for namespace in NAMESPACES:
            edges = self._ask("GET", f"/admin/v2/namespaces/{namespace}/bundles")["boundaries"]
            for number, (first, end) in enumerate(itertools.pairwise(edges)):
                self._unload(namespace, f"{first}_{end}", self.broker.nodes[number % 2])
        for number in range(brokers.PulsarCluster.coordinators):
            self.move(coordinator(number), self.broker.nodes[number % 2])

    @contextmanager
    def killed(self, node: int) -> Iterator[None]:
        """Inside, a node is dead, from a SIGKILL on."""
        self.broker.kill(node)
        try:
            yield
        finally:
            self.balance()

    def name_on(self, node: int, called: Callable[[str], str] = concrete) -> str:
        """A name that nobody else uses, of which the topic that is called after it lies on a node."""
        while True:
            name = unique("placed")
            if self.node_of(called(name)) == node:
                return name

    def _unload(self, namespace: str, bundle: str, node: int) -> None:
        broker = self.broker.web_address(node)
        self._ask("PUT", f"/admin/v2/namespaces/{namespace}/{bundle}/unload?destinationBroker={broker}")

    def _ask(self, method: str, path: str) -> Any:
        """Again where a bundle is on its way from one node to the other."""
        until = Deadline(SOON)
        while True:
            try:
                return self._rest.ask(method, path, until)
            except RestRefused as refused:
                if refused.status < 500 or until.expired:
                    raise
            time.sleep(_PAUSE)


def coordinator(number: int) -> str:
    """The topic whose broker has a transaction coordinator."""
    return f"{ASSIGN_TOPIC}-partition-{number}"
