"""Ranges of offsets, including first and last. A proper list of ranges is sorted, and its ranges do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[int, int]


def runs(offsets: Iterable[int]) -> list[Range]:
    """Return the given offsets as a proper list of ranges."""
    ordered = sorted(offsets)
    # The offsets are mostly one range, which is quicker to check; its length is checked first, to bound the list.
    if ordered and ordered[-1] - ordered[0] + 1 == len(ordered):
        first, last = ordered[0], ordered[-1]
        if ordered == list(range(first, last + 1)):
            return [(first, last)]
    return merged((offset, offset) for offset in ordered)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the offsets of ranges, which may overlap and be in any order, as a proper list of ranges."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges without the offsets in `holes`; both are proper lists of ranges."""
    waiting = iter(holes)
    hole = next(waiting, None)
    for first, last in ranges:
        start = first
        while hole is not None and hole[0] <= last:
            if start < hole[0]:
                yield start, hole[0] - 1
            start = max(start, hole[1] + 1)
            if hole[1] > last:
                break  # this hole may reach into the next range too
            hole = next(waiting, None)
        if start <= last:
            yield start, last
