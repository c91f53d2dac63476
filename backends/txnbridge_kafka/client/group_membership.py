"""A consumer's membership in its group, by which the group's coordinator checks acknowledgements."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from txnbridge.errors import BackendMissing

_MARK = b"CGMDv2:"


@dataclass(frozen=True)
class GroupMembership:
    """A consumer as its group's coordinator knows it; outside of a group the generation is -1 and the name empty."""

    group: str
    generation: int
    name: str
    instance: str | None


def membership_of(metadata: bytes) -> GroupMembership:
    """Read confluent-kafka's `consumer_group_metadata`, whose format is its own.

    Raise `BackendMissing` for another format than that of the versions that we take.
    """
    try:
        if not metadata.startswith(_MARK):
            raise ValueError
        (generation,) = struct.unpack_from("<i", metadata, len(_MARK))
        group, name, rest = metadata[len(_MARK) + 4 :].split(b"\0", 2)
        # One byte says that no group instance id follows.
        instance = None if rest == b"\1" else rest[1:-1].decode()
        if instance is not None and (rest[:1], rest[-1:]) != (b"\0", b"\0"):
            raise ValueError
        return GroupMembership(group.decode(), generation, name.decode(), instance)
    except (ValueError, struct.error) as error:
        raise BackendMissing(
            "this version of confluent-kafka describes the members of a group in a way that is not known here; install"
            " the version that txnbridge asks for"
        ) from error
