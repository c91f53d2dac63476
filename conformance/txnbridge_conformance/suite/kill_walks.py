"""Tests by kill walks: a program is killed at each event in turn and run again, and its result must be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from txnbridge import Bridge, Capability, Outcome, TokenState
from txnbridge.testing import Child, Point, crash_everywhere
from txnbridge_conformance.faults import programs
from txnbridge_conformance.faults.programs import Case
from txnbridge_conformance.observing import seen, send, values
from txnbridge_conformance.plugin import NewTopic, needs, proves

KillWalk = Callable[..., list[Point]]


@pytest.fixture
def kill_walk(
    txnbridge_url: str, new_topic: NewTopic, unique: Callable[[str], str], side_by_side: int, tmp_path: Path
) -> KillWalk:
    """Return a function that runs a program once for each event that its bridges emit, and kills it at this event.

    `kill_walk(program, check, topics, before)` makes a new `Case` with that many topics for each event, and calls with
    it `before`, the program, which is killed, the program again, and `check`. It returns the events of the kills.
    """

    def kill_everywhere(
        program: Callable[[Case], object],
        check: Callable[[Case], object],
        topics: int,
        before: Callable[[Case], object] = lambda case: None,
    ) -> list[Point]:
        def fresh() -> Case:
            name = unique("case")
            case = Case(txnbridge_url, name, tuple(new_topic() for _ in range(topics)), str(tmp_path / name))
            before(case)
            return case

        return crash_everywhere(program, check, fresh=fresh, at_once=side_by_side)

    return kill_everywhere


def event_names(points: list[Point]) -> set[str]:
    """Return the names of the events, given as points of a kill walk, at which its program was killed."""
    return {point.event for point in points}


def test_a_plain_commit_is_whole_wherever_its_process_dies(kill_walk: KillWalk, bridge: Bridge) -> None:
    def check(case: Case) -> None:
        assert [values(seen(bridge, topic)) for topic in case.topics] == [[b"once"], [b"once"]]

    died_at = event_names(kill_walk(programs.plain_commit, check, topics=2))
    assert {"writer.open/before", "message.send/after", "commit/before", "commit/after"} <= died_at
    assert "bridge.close/after" in died_at


def test_no_message_of_an_abort_is_seen_wherever_its_process_dies(kill_walk: KillWalk, bridge: Bridge) -> None:
    def check(case: Case) -> None:
        assert [values(seen(bridge, topic)) for topic in case.topics] == [[], []]

    assert {"message.send/after", "abort/before", "abort/after"} <= event_names(
        kill_walk(programs.plain_abort, check, topics=2)
    )


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.END_OPEN, Capability.LIST_OPEN, Capability.FENCING)
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies(
    kill_walk: KillWalk, bridge: Bridge, decision: str
) -> None:
    def check(case: Case) -> None:
        expected = [b"once"] if decision == "commit" else []
        assert [values(seen(bridge, topic)) for topic in case.topics] == [expected, expected]
        state = bridge.status(case.remembered() or "").state
        assert state is (TokenState.COMMITTED if decision == "commit" else TokenState.ABORTED)

    program = programs.prepare_and_commit if decision == "commit" else programs.prepare_and_abort
    assert {"prepare/before", "prepare/after", "resolve/before", "resolve/after"} <= event_names(
        kill_walk(program, check, topics=2)
    )


@proves(Capability.ATOMIC_ACK)
@pytest.mark.parametrize("how", ["by hand", "with a processor"])
def test_a_message_is_passed_on_once_wherever_its_process_dies(kill_walk: KillWalk, bridge: Bridge, how: str) -> None:
    def check(case: Case) -> None:
        assert values(seen(bridge, case.topics[1])) == [b"1", b"2"]

    died_at = kill_walk(
        programs.consume_transform_produce if how == "by hand" else programs.process,
        check,
        topics=2,
        before=lambda case: send(bridge, case.topics[0], b"1", b"2"),
    )
    assert {"reader.poll/after", "ack/before", "ack/after", "commit/before", "commit/after"} <= event_names(died_at)


@proves(Capability.RESUME_SEQUENCE)
def test_a_sequence_is_published_once_wherever_its_process_dies(kill_walk: KillWalk, bridge: Bridge) -> None:
    def check(case: Case) -> None:
        assert values(seen(bridge, case.topics[0])) == [b"%d" % number for number in range(5)]

    died_at = event_names(kill_walk(programs.publish_by_sequence, check, topics=1))
    assert {"message.send/before", "message.send/after", "flush/before", "flush/after"} <= died_at


@pytest.mark.timeout(1200)  # the longest walk: two more processes leave a transaction before each step
@needs(Capability.FENCING, Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
def test_opening_an_id_clears_what_is_left_and_spares_what_is_prepared_wherever_it_dies(
    kill_walk: KillWalk, bridge: Bridge
) -> None:
    def leave(case: Case) -> None:
        case.remember(programs.prepare_one(case.url, case.topics[0], b"prepared", case.name, 600.0))
        with Child(programs.open_and_wait, case.url, case.topics[1], case.name, 600.0) as child:
            child.told()  # the child process is killed at the end of the `with` block

    def check(case: Case) -> None:
        assert bridge.commit(case.remembered() or "") is Outcome.COMMITTED
        assert sorted(m.value for m in seen(bridge, case.topics[0])) == [b"new", b"prepared"]
        assert values(seen(bridge, case.topics[1])) == [b"new"]

    died_at = event_names(kill_walk(programs.open_over_a_leftover, check, topics=2, before=leave))
    assert {"writer.open/before", "writer.open/after", "commit/after"} <= died_at


@proves(Capability.DECISION_LOG)
def test_a_decision_stays_what_it_is_wherever_its_process_dies(kill_walk: KillWalk, bridge: Bridge) -> None:
    def check(case: Case) -> None:
        claim = bridge.decisions(case.name).read("the order").claim
        assert claim is not None
        assert (case.remembered() or "").split() == ["asked", claim.decision.value]

    died_at = event_names(kill_walk(programs.decide, check, topics=0))
    assert {"decision.append/before", "decision.append/after"} <= died_at
