"""Kafka in every run: one node, and of each kind of promise the test that would fail first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import kafka_or_skip

from tests.first_program import check_first_program
from tests.kafka.test_acks import test_acknowledgements_alone_are_committed_and_aborted  # noqa: F401
from tests.kafka.test_forgetting import test_a_transaction_begins_when_the_last_one_is_complete  # noqa: F401
from tests.kafka.test_shield import (  # noqa: F401
    test_a_late_commit_does_nothing_to_our_next_transaction,
    test_a_late_opening_of_its_id_aborts_nothing_that_was_prepared,
    through,
)
from tests.kafka.test_takeovers import (  # noqa: F401
    halves,
    test_a_few_takeovers_leave_nothing_half_visible,
    test_an_owner_that_slept_before_it_opened_an_id_aborts_nothing_that_a_newer_one_prepared,
)
from tests.kafka.test_writing import test_a_transaction_may_last_longer_than_its_bridge_waits  # noqa: F401
from tests.smoke import *  # noqa: F403

pytestmark = pytest.mark.timeout(600)  # the first start fetches Kafka


@pytest.fixture(scope="module")
def kafka_broker() -> Iterator[brokers.Broker]:
    """Gone with this module: brokers do not run beside each other."""
    with kafka_or_skip() as broker:
        yield broker


@pytest.fixture(scope="module")
def txnbridge_url(kafka_broker: brokers.Broker) -> str:
    return kafka_broker.url


def test_the_first_program_of_the_readme_runs_on_kafka_by_its_url_alone(txnbridge_url: str, tmp_path: Path) -> None:
    check_first_program(txnbridge_url, tmp_path)
