"""Apache Kafka for tests, in a container: one node, with the default features of its version."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge_conformance.brokers._container import ANYWHERE, ContainerBroker
from txnbridge_conformance.brokers._kafka import common_settings, new_id
from txnbridge_conformance.brokers._kafka_wire import cluster
from txnbridge_conformance.brokers._ports import HOST, Route, free_ports

_IMAGE = "apache/kafka"


class KafkaContainer(ContainerBroker):
    def __init__(
        self, *, version: str, port: int | None, settings: Mapping[str, str] | None, start_timeout: float
    ) -> None:
        self.version = version
        free, listen, upstream, controller = free_ports(4)
        self._port = port or free
        self.routes = (Route(listen, upstream),)
        self._cluster = new_id()
        given = {**common_settings(version, 1), **self._addresses(controller), **(settings or {})}
        environment = {"KAFKA_" + name.upper().replace(".", "_"): value for name, value in given.items()}
        super().__init__(
            f"{_IMAGE}:{version}",
            {"CLUSTER_ID": self._cluster, **environment},
            ports=(self._port, upstream),
            start_timeout=start_timeout,
        )

    def _addresses(self, controller: int) -> dict[str, str]:
        ((listen, upstream),) = self.routes
        return {
            "node.id": "1",
            "controller.quorum.voters": f"1@localhost:{controller}",
            "listeners": f"PLAINTEXT://{ANYWHERE}:{self._port},PROXY://{ANYWHERE}:{upstream},"
            f"CONTROLLER://localhost:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self._port},PROXY://{HOST}:{listen}",
        }

    @property
    def url(self) -> str:
        return f"kafka://{HOST}:{self._port}"

    def _answers(self) -> bool:
        try:
            return cluster(self._port)[0] == self._cluster
        except OSError:
            return False
