"""Decisions on the embedded broker's log: real processes that race, are killed, lose answers, and trim under way."""

import itertools

import pytest

import txnbridge
from tests.core.races import Through, race
from tests.embedded.kit import open_broker
from txnbridge import Decision
from txnbridge.spi import Deadline

# What kill -9 leaves behind is tested here, not a power cut; so the disk need not be waited for.
DURABILITY = "survives-process-kill-only"


class OwnLog(Through):
    """A log with a connection of its own, as another process has it."""

    def __init__(self, path: str, name: str, timeout: float) -> None:
        self._broker = open_broker(path, durability=DURABILITY)
        super().__init__(self._broker.decision_log(name, Deadline(timeout)))

    def close(self) -> None:
        self._broker.close(Deadline(30))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("races", "dying"), [(200, 0.006), pytest.param(1_000, 0.004, marks=pytest.mark.full)])
def test_four_processes_race_and_nobody_disagrees(tmp_path, races, dying):
    log = race(OwnLog, str(tmp_path / "broker.db"), tmp_path, races, dying, 30)
    begin = log.begin(Deadline(10))
    assert begin is not None and begin[0] > races / 2
    log.close()


def decide_a_batch(url: str) -> None:
    """Run a batch: open, claim with data in parts, act on the claim that counts, mark the batch as done."""
    with txnbridge.connect(url) as bridge:
        decisions = bridge.decisions("query")
        if decisions.read("batch").done_up_to is None:
            run = decisions.open("query")
            claim = decisions.claim(("batch", 0), Decision.COMMIT, {"tokens": "x" * 1_000_000}, opening=run)
            assert claim.data == {"tokens": "x" * 1_000_000}
            decisions.done("batch", 0)
        decisions.tidy()
        decisions.close()


def check_the_batch(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        decisions = bridge.decisions("query")
        assert decisions.read("batch").done_up_to == 0
        assert decisions.read(("batch", 0)).done
        decisions.close()


@pytest.mark.timeout(300)
def test_a_process_killed_at_any_step_of_deciding_leaves_what_the_next_one_finishes(tmp_path, kill_walk):
    urls = (f"embedded:{tmp_path}/{number}.db" for number in itertools.count())
    least = {"decision.append/before", "decision.append/after", "decision.read/before"}
    kill_walk(decide_a_batch, check_the_batch, lambda: next(urls), least)
