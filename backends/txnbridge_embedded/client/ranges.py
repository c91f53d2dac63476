"""Ranges of offsets, including first and last. A list of ranges is normal if it is sorted and no two ranges touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[int, int]


def ranges_of(offsets: Iterable[int]) -> list[Range]:
    """Return offsets as ranges (first, last), sorted, of which no two overlap or touch."""
    ordered = sorted(offsets)
    # Mostly the offsets are one range, which is checked first, because it is quicker.
    if ordered and ordered[-1] - ordered[0] + 1 == len(ordered):
        first, last = ordered[0], ordered[-1]
        if ordered == list(range(first, last + 1)):
            return [(first, last)]
    return merged((offset, offset) for offset in ordered)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges sorted, with ranges that overlap or touch merged into one."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges without the offsets in `holes`. Both have to be sorted, and merged as by `merged`."""
    waiting = iter(holes)
    hole = next(waiting, None)
    for first, last in ranges:
        start = first
        while hole is not None and hole[0] <= last:
            if start < hole[0]:
                yield start, hole[0] - 1
            start = max(start, hole[1] + 1)
            if hole[1] > last:
                break  # this hole may also overlap the next range
            hole = next(waiting, None)
        if start <= last:
            yield start, last
