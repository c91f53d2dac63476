"""Processes on Pulsar that decide at once on one log, or sell by half messages, and die; and so does their broker."""

import pytest

from tests.core.half.test_half_lanes import check_wherever_a_seller_dies
from tests.core.races import race
from tests.pulsar.test_decision_log import OpenLog
from txnbridge._decisions.records import decode
from txnbridge.spi import Deadline

SECONDS = 90  # a broker that was killed is back within thirty, also on a busy machine


@pytest.mark.parametrize(("races", "dying", "kills"), [(60, 0.02, 1), (1_000, 0.004, 10)], ids=["some", "a-thousand"])
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_four_processes_race_and_nobody_disagrees(start_pulsar, tmp_path, races, dying, kills):
    """The broker has its default settings, by which it drops records that no subscription needs."""
    broker = start_pulsar(delete_unused=True, settings={"brokerDeduplicationEnabled": "false"})
    log = race(OpenLog, broker.url, tmp_path, races, dying, SECONDS, broker, kills)
    if races == 1_000:
        begin = log.begin(Deadline(SECONDS))
        ((_, first),) = log.read(begin, begin, Deadline(SECONDS))
        assert decode(first).kind != "birth"  # it was trimmed under way
    log.close()


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_database_and_topics_agree_wherever_a_seller_of_half_messages_dies(txnbridge_url, tmp_path, kill_walk):
    check_wherever_a_seller_dies(txnbridge_url, tmp_path, kill_walk)
