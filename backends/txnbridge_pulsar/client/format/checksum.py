"""CRC-32C, the checksum of every entry: computed by a C library if one is installed, else in Python.

The Python version folds the data as one big number, because Python shifts and xors big numbers in C. This is about a
hundred times as fast as a table lookup for each byte.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Protocol


class Checksum(Protocol):
    """A function that returns the checksum of data. `before` is the checksum of the bytes that precede the data."""

    def __call__(self, data: bytes, before: int = 0, /) -> int: ...


POLYNOMIAL = 0x82F63B78  # Castagnoli, lowest bit first
_ALL_ONES = 0xFFFFFFFF
# Data below this size is not folded, because a table lookup for each byte is faster.
_MIN_FOLDED_BITS = 512  # bits
# Bits by which the rest of each fold is longer, so that the products with a 32-bit remainder need no right shift.
_FOLD_SPARE_BITS = 64  # bits


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ POLYNOMIAL * (number & 1)
        table.append(number)
    return table


_TABLE = _table()


def _by_table(state: int, data: bytes) -> int:
    for byte in data:
        state = _TABLE[(state ^ byte) & 255] ^ state >> 8
    return state


@lru_cache(maxsize=64)
def _remainder(exponent: int) -> tuple[int, ...]:
    """Return x to the exponent (at least 39) modulo CRC-32C's polynomial, as the powers of x in the remainder."""
    # One set bit followed by n bits leaves x^(n + 32) as the state; each further bit raises the power.
    state = _by_table(0, b"\x01" + bytes((exponent - 39) // 8))
    for _ in range((exponent - 39) % 8):
        state = state >> 1 ^ POLYNOMIAL * (state & 1)
    return tuple(31 - bit for bit in range(32) if state >> bit & 1)


def crc32c_in_python(data: bytes, before: int = 0) -> int:
    start = before ^ _ALL_ONES
    if len(data) * 8 <= 2 * _MIN_FOLDED_BITS:
        return _by_table(start, data) ^ _ALL_ONES
    # Bit i of the number is the i-th bit of the data, and the highest power of x comes first.
    bits, number = len(data) * 8, int.from_bytes(data, "little") ^ start
    keep = 1 << (bits - 1).bit_length()
    while keep > _MIN_FOLDED_BITS:
        keep >>= 1
        rest = keep + _FOLD_SPARE_BITS
        if bits <= rest:
            continue
        cut = bits - rest
        head = number & (1 << cut) - 1
        number >>= cut
        for power in _remainder(rest):
            number ^= head << rest - cut - power
        bits = rest
    return _by_table(0, number.to_bytes(bits // 8, "little")) ^ _ALL_ONES


def _fastest() -> Checksum:
    with suppress(ImportError):
        library = import_module("google_crc32c")
        if library.implementation == "c":  # the one without its C library is slower than `crc32c_in_python`
            extend = library.extend
            return lambda data, before=0: int(extend(before, data))
    return crc32c_in_python


crc32c = _fastest()
