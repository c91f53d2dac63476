"""Decodes protobuf messages without a schema, as pairs of field number and value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

Value = int | bytes
"""A field's value: a number, or the bytes of a string or of a nested message."""

_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
# The most bytes of a varint: it has 64 bits, seven in each byte.
_MOST_NUMBER_BYTES = 10


def decode(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the fields of a protobuf message in order, up to the first malformed byte."""
    at = 0
    with suppress(IndexError, ValueError):
        while at < len(data):
            key, at = _number(data, at)
            kind = key & 7
            if kind == _NUMBER:
                value, at = _number(data, at)
                yield key >> 3, value
                continue
            size, at = _number(data, at) if kind == _BYTES else (_FIXED.get(kind, len(data) + 1), at)
            if size > len(data) - at:
                return
            yield key >> 3, data[at : at + size]
            at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it. Raise `IndexError` or `ValueError` if malformed."""
    value = 0
    for position in range(_MOST_NUMBER_BYTES):
        byte = data[at + position]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value & (2**64 - 1), at + position + 1
    raise ValueError("a number of more than 64 bits")
