"""Processes that decide at once on one log of Kafka: they are killed, lose answers, and so does their broker."""

import pytest

from tests.core.races import race
from tests.kafka.test_decision_log import open_log
from txnbridge.spi import Deadline

SECONDS = 60  # a broker that was killed is back within ten


@pytest.mark.parametrize(
    ("races", "dying", "kills"),
    [(60, 0.02, 1), pytest.param(1_000, 0.004, 10, marks=pytest.mark.full)],
    ids=["some", "a-thousand"],
)
@pytest.mark.timeout(3600)
def test_four_processes_race_and_nobody_disagrees(start_kafka, tmp_path, races, dying, kills):
    broker = start_kafka()
    log = race(open_log, broker.url, tmp_path, races, dying, SECONDS, broker, kills)
    if races == 1_000:
        begin = log.begin(Deadline(10))
        assert begin is not None
        assert begin[0] > 500  # it was trimmed under way
    log.close()
