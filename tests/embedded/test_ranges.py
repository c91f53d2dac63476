"""Ranges of offsets hold exactly the offsets that a set would hold."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from txnbridge_embedded.client.readable_ranges import merged, ranges_of, without

offsets = st.lists(st.integers(0, 40))
ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))))


def members(found):
    return {offset for first, last in found for offset in range(first, last + 1)}


def is_proper(found):
    return all(first <= last for first, last in found) and all(
        earlier[1] + 1 < later[0] for earlier, later in pairwise(found)
    )


@given(offsets)
def test_runs_hold_the_offsets_and_nothing_else(given_offsets):
    assert members(ranges_of(given_offsets)) == set(given_offsets)
    assert is_proper(ranges_of(given_offsets))


@given(ranges)
def test_merged_ranges_hold_the_same_offsets_and_do_not_touch(given_ranges):
    assert members(merged(given_ranges)) == members(given_ranges)
    assert is_proper(merged(given_ranges))


@given(ranges, ranges)
def test_without_takes_exactly_the_holes_away(given_ranges, holes):
    left = list(without(merged(given_ranges), merged(holes)))
    assert members(left) == members(given_ranges) - members(holes)
    assert is_proper(left)
