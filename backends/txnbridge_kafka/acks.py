"""What proves that a consumer may acknowledge for its group."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from txnbridge.errors import BackendMissing
from txnbridge.spi import Partition

_MARK = b"CGMDv2:"


class AckContext:
    """What acknowledgements need besides positions: the group, and its members' proof of membership.

    The proof is that of the reader's last delivery. It is not taken later than that, because a member that was thrown
    out has one that a broker accepts from anyone; and not earlier, because the group is shared out anew time and again
    while a partition stays where it is.
    """

    __slots__ = ("group", "metadata", "topic_ids")

    def __init__(self, group: str) -> None:
        self.group = group
        self.metadata: object = None
        self.topic_ids: dict[Partition, str] = {}  # of the topic that each partition is read in, where it has an id


@dataclass(frozen=True)
class Member:
    """A consumer as its group's coordinator knows it; one that is in no group has generation -1 and no name."""

    group: str
    generation: int
    name: str
    instance: str | None


def member_of(metadata: bytes) -> Member:
    """What confluent-kafka says of a consumer (`consumer_group_metadata`), which only tells itself what is in it.

    Raises `BackendMissing` for another format than that of the versions that we take.
    """
    try:
        if not metadata.startswith(_MARK):
            raise ValueError
        (generation,) = struct.unpack_from("<i", metadata, len(_MARK))
        group, name, rest = metadata[len(_MARK) + 4 :].split(b"\0", 2)
        # A byte says whether no name of an instance follows.
        instance = None if rest == b"\1" else rest[1:-1].decode()
        if instance is not None and (rest[:1], rest[-1:]) != (b"\0", b"\0"):
            raise ValueError
        return Member(group.decode(), generation, name.decode(), instance)
    except (ValueError, struct.error) as error:
        raise BackendMissing(
            "this version of confluent-kafka describes the members of a group in a way that is not known here; install"
            " the version that txnbridge asks for"
        ) from error
