"""Kill walks of the tests: at each event with --full, in the gate at some."""

import random
from collections import Counter
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from txnbridge.testing import Point, _kill_and_check, crash_everywhere, listening

KillWalk = Callable[..., None]

_OTHERS = 2  # kinds of events in the gate's walks besides those named


@pytest.fixture
def kill_walk(request: pytest.FixtureRequest) -> KillWalk:
    """Return a function that kills a program, runs it again, and checks the result, as `crash_everywhere` does.

    The suite kills each protocol's program at each of its events. What is built on these protocols is killed at each
    event with --full, and in the gate at a random occurrence of each kind of event in `least`, and of a few others.
    """
    full = request.config.getoption("--full")

    def walk_and_look(
        program: Callable[[Any], object],
        check: Callable[[Any], object],
        fresh: Callable[[], Any],
        least: Set[str],
        at_once: int = 4,
        timeout: float = 60,
    ) -> None:
        walk = crash_everywhere if full else partial(_crash_at_some, least)
        points = walk(program, check, fresh=fresh, at_once=at_once, timeout=timeout)
        assert least <= {point.event for point in points}

    return walk_and_look


def _crash_at_some(
    least: Set[str],
    program: Callable[[Any], object],
    check: Callable[[Any], object],
    *,
    fresh: Callable[[], Any],
    at_once: int,
    timeout: float,
) -> list[Point]:
    seen: Counter[str] = Counter()
    with listening(lambda event: seen.update([f"{event.name}/{event.phase}"])):
        program(fresh())

    def kill_at(point: Point) -> Point | None:
        killed_at = _kill_and_check(program, check, fresh(), str(point), timeout)
        if killed_at is None and point.nth > 1:  # this time there were fewer
            return kill_at(Point(point.event, 1))
        return killed_at

    others = sorted(seen.keys() - least)
    kinds = [*sorted(least & seen.keys()), *random.sample(others, min(_OTHERS, len(others)))]
    chosen = [Point(event, random.randint(1, seen[event])) for event in kinds]
    with ThreadPoolExecutor(at_once) as pool:
        return [point for point in pool.map(kill_at, chosen) if point is not None]
