"""The demo's story on a Pulsar that is there."""

import pytest

from tests.brokers.demo_kit import test_every_claim_holds_on_a_broker_of_yours_and_its_topics_are_gone_afterwards  # noqa: F401

pytestmark = pytest.mark.full
