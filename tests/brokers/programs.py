"""Programs that the launchers' tests run in processes of their own, to kill them."""

import os
import time

from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import _detached, _jars

from tests.brokers import pulsar_kit
from tests.brokers.kit import Toy, name_server_pid, port_of
from txnbridge.testing import tell


def hold_a_toy() -> None:
    with Toy() as broker:
        tell((broker.every_pid(), broker.folder))
        time.sleep(1000)


def hold_a_toy_and_fork() -> None:
    with Toy() as broker:
        fork = os.fork()
        if fork:
            tell((broker.every_pid(), broker.folder, fork))
        time.sleep(1000)


def hold_kafka() -> None:
    with brokers.kafka(container=False) as broker:
        assert isinstance(broker, brokers.ProcessBroker)
        tell((broker.pid(1), broker.folder, port_of(broker)))
        time.sleep(1000)


def hold_rocketmq() -> None:
    with brokers.rocketmq() as broker:
        processes = [broker.pid(1), name_server_pid(broker)]
        tell((processes, broker.folder, broker.url))
        time.sleep(1000)


def fetch() -> str:
    return str(_jars.fetch("toy-1", [_jars.Artifact("a", "b", "1")], bar=False))


def start_detached(never_answers: str) -> None:
    _detached.up("toy", {}, lambda folder: Toy(never_answers, folder))


def hold_pulsar() -> None:
    with brokers.pulsar(container=False) as broker:
        assert isinstance(broker, brokers.ProcessBroker)
        tell((broker.pid(1), broker.folder, pulsar_kit.port_of(broker.url)))
        time.sleep(1000)


def hold_pulsar_cluster() -> None:
    with brokers.pulsar(nodes=2) as broker:
        assert isinstance(broker, brokers.PulsarCluster)
        tell((broker.pid(1), broker.folder))
        time.sleep(1000)
