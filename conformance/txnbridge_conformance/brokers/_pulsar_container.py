"""Apache Pulsar standalone for tests, in a container."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge_conformance.brokers._container import ANYWHERE, ContainerBroker
from txnbridge_conformance.brokers._ports import Route, free_ports
from txnbridge_conformance.brokers._pulsar import Pulsar, addresses, common_settings, is_ready

_IMAGE = "apachepulsar/pulsar"
# The image's own script writes settings from the environment into the configuration.
_COMMAND = (
    "sh -c 'bin/apply-config-from-env.py conf/standalone.conf &&"
    " exec bin/pulsar standalone --no-functions-worker --no-stream-storage'"
)


class PulsarContainer(Pulsar, ContainerBroker):
    def __init__(
        self,
        *,
        version: str,
        store: str,
        delete_unused: bool,
        port: int | None,
        settings: Mapping[str, str] | None,
        start_timeout: float,
    ) -> None:
        self.version = version
        free, self._web, listen, upstream = free_ports(4)
        self._port = port or free
        self.routes = (Route(listen, upstream),)
        own = addresses(ANYWHERE, self._port, self._web, self.routes[0])
        given = {**common_settings(store, delete_unused), **own, **(settings or {})}
        super().__init__(
            f"{_IMAGE}:{version}",
            {
                "PULSAR_STANDALONE_USE_ZOOKEEPER": "1" if store == "zookeeper" else "0",
                **{f"PULSAR_PREFIX_{name}": value for name, value in given.items()},
            },
            ports=(self._port, upstream, self._web),
            start_timeout=start_timeout,
            command=_COMMAND,
        )

    def _answers(self) -> bool:
        try:
            return is_ready(self._port, self._web)
        except OSError:
            return False
