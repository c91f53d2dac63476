"""The arithmetic behind the figures."""

import os
import time
from contextlib import contextmanager

import pytest

from benchmarks import _harness


@pytest.fixture
def settings(tmp_path):
    return _harness.Settings(rounds=3, seconds=0.001, folder=tmp_path, quick=True)


def rounds(*seconds_per_unit: float) -> list[_harness.Round]:
    return [_harness.Round([2 * seconds], 2) for seconds in seconds_per_unit]


def test_contenders_take_turns_and_every_second_round_turns_round(settings):
    begun = []

    def contender(name):
        @contextmanager
        def opened_contender():
            begun.append(name)
            yield lambda: 5

        return opened_contender

    found = _harness.alternate(settings, {"a": contender("a"), "b": contender("b")})
    assert begun == ["a", "b", "b", "a", "a", "b"]
    assert [len(found["a"]), len(found["b"])] == [3, 3]
    assert all(r.units == 5 * len(r.laps) for r in found["a"])


def test_the_first_lap_and_the_set_up_are_not_measured(settings):
    @contextmanager
    def slow_to_start():
        time.sleep(0.05)
        pauses = iter([0.05])

        def lap():
            time.sleep(next(pauses, 0))
            return 1

        yield lap

    for r in _harness.alternate(settings, {"slow to start": slow_to_start})["slow to start"]:
        assert sum(r.laps) < 0.05


def test_a_round_lasts_as_long_as_asked(tmp_path):
    @contextmanager
    def contender():
        yield lambda: 1

    settings = _harness.Settings(rounds=1, seconds=0.05, folder=tmp_path, quick=True)
    start = time.perf_counter()
    _harness.alternate(settings, {"it": contender})
    assert time.perf_counter() - start >= 0.05


def test_the_speed_is_compared_round_by_round():
    assert _harness.speed(rounds(1.0, 20.0, 4.0), rounds(2.0, 40.0, 8.0)) == _harness.Estimate(2, 2, 2)


def test_the_excess_is_a_difference_a_unit_in_the_scale_asked_for():
    found = _harness.excess(rounds(3e-6, 5e-6), rounds(1e-6, 3e-6), 1e6)
    assert [found.median, found.low, found.high] == pytest.approx([2, 2, 2])


def test_the_interval_holds_the_median_and_not_what_is_rare():
    found = _harness.estimate([1.0] * 9 + [2.0, 100.0])
    assert found.low <= found.median == 1.0 <= found.high < 100.0


def test_a_quantile_is_a_value_that_was_measured():
    values = [float(n) for n in range(1, 101)]
    assert [_harness.quantile(values, part) for part in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert _harness.quantile([7.0], 0.99) == 7
    assert _harness.lap_quantile([_harness.Round(values, 1)], 0.99, 10).median == 990


@pytest.mark.parametrize(
    ("target", "low", "high", "verdict"),
    [
        (_harness.at_least(0.7), 0.7, 0.9, "reached"),
        (_harness.at_least(0.7), 0.6, 0.8, "undecided"),
        (_harness.at_least(0.7), 0.5, 0.69, "missed"),
        (_harness.at_most(5), 4, 5, "reached"),
        (_harness.at_most(5), 4, 6, "undecided"),
        (_harness.at_most(5), 5.1, 6, "missed"),
    ],
)
def test_a_target_is_reached_only_by_the_whole_interval(target, low, high, verdict):
    assert target.verdict(_harness.Estimate((low + high) / 2, low, high)) == verdict


def test_a_row_says_figure_median_interval_target_and_verdict(settings, capsys):
    _harness.Report(settings, "Title").figure("it", _harness.Estimate(12345.6, 0.0123, 2e5), "us", _harness.at_most(3))
    assert capsys.readouterr().out.splitlines()[-1] == "| it | 12,346 us | 0.0123 to 200,000 | <= 3 us | undecided |"


def test_the_machine_is_described_without_its_name(tmp_path):
    text = _harness.machine(tmp_path)
    assert "cores" in text and "SQLite" in text
    assert os.uname().nodename not in text and str(tmp_path) not in text


def test_the_folder_of_a_run_is_gone_afterwards(tmp_path):
    with _harness.opened(_harness.make_parser(None).parse_args(["--folder", str(tmp_path)])) as settings:
        (settings.folder / "file").write_text("x")
        assert (settings.rounds, settings.seconds, settings.quick) == (10, 1.0, False)
    assert list(tmp_path.iterdir()) == []


def test_a_contender_that_fails_among_threads_ends_the_others_and_is_told():
    @contextmanager
    def broken():
        yield lambda: 1 / 0

    @contextmanager
    def sound():
        yield lambda: 1

    with pytest.raises(ZeroDivisionError):
        _harness.by_threads([sound, sound, broken, sound], 0.01)


def echo(pipe, word):
    pipe.send(word + pipe.recv())


def test_a_child_talks_through_its_pipe_and_is_waited_for():
    with _harness.child(echo, "a") as pipe:
        pipe.send("b")
        assert pipe.recv() == "ab"


def test_work_in_the_background_is_stopped_at_the_end_of_the_block_and_waited_for():
    ended = []

    with _harness.background(lambda stop: ended.append(stop.wait(10))):
        assert ended == []
    assert ended == [True]
