"""What proves that a consumer may acknowledge for its group."""

from __future__ import annotations

from txnbridge.spi import Partition


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
