from collections.abc import Iterator

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import pulsar_or_skip

from tests.pulsar.cluster_kit import Cluster


@pytest.fixture(
    scope="session",
    params=[{"version": "4.0.8"}, {"delete_unused": True}, {"nodes": 2}],
    ids=["4.0.8", "4.2.4 that deletes what nobody uses", "two brokers of 4.2.4"],
)
def pulsar_under_test(request: pytest.FixtureRequest) -> Iterator[brokers.Pulsar]:
    """The oldest version that we support; the newest with what it keeps as it comes; and two brokers of it."""
    with pulsar_or_skip(**request.param, settings={"keepAliveIntervalSeconds": "5"}) as broker:
        if isinstance(broker, brokers.PulsarCluster):
            Cluster(broker).balance()
        yield broker
