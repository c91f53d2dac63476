"""Tests of processes that decide in one log at the same time while they and the broker are killed."""

import pytest

from tests.core.races import race
from tests.rocketmq.test_decision_log import OpenLog

SECONDS = 90  # a killed broker restarts within twenty seconds, also on a busy machine


@pytest.mark.parametrize(
    ("races", "dying", "kills"),
    [(20, 0.02, 1), pytest.param(1_000, 0.004, 10, marks=pytest.mark.full)],
    ids=["some", "a-thousand"],
)
@pytest.mark.timeout(3600)
def test_four_processes_race_and_nobody_disagrees(rocketmq_broker, tmp_path, races, dying, kills):
    race(OpenLog, rocketmq_broker.url, tmp_path, races, dying, SECONDS, rocketmq_broker, kills).close()
