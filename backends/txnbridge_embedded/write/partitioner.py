"""Assigns a key to a partition, by the hash of Kafka's Java client."""

from __future__ import annotations

from functools import lru_cache

_MASK = 0xFFFF_FFFF
_FACTOR = 0x5BD1_E995


def murmur2(data: bytes) -> int:
    """Return MurmurHash 2 with Kafka's seed, as an unsigned number of 32 bits."""
    length = len(data)
    state = 0x9747_B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        state = state * _FACTOR & _MASK ^ word
    if whole != length:
        state = (state ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    state = (state ^ state >> 13) * _FACTOR & _MASK
    return state ^ state >> 15


@lru_cache(maxsize=16384)  # hashing takes longer than all other work of a send, and keys repeat
def partition_of(key: bytes, partitions: int) -> int:
    """Return the number of a key's partition."""
    return (murmur2(key) & 0x7FFF_FFFF) % partitions
