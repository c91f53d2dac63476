"""The demo's story on each real broker that the suite can start."""

import pytest

from tests.brokers.demo_kit import check_every_claim, play
from txnbridge import plugins

pytestmark = pytest.mark.timeout(600)  # the first start fetches the broker


@pytest.mark.full
@pytest.mark.parametrize("broker", sorted(plugins.brokers()))
def test_every_claim_holds_on_a_broker_that_is_started_for_it(broker: str) -> None:
    check_every_claim(broker)


def test_a_broker_that_cannot_be_started_is_named_with_those_that_can() -> None:
    run = play("nosuch")
    assert run.returncode == 2
    assert "known: kafka, pulsar" in run.stderr
