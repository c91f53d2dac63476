"""Acknowledgements: positions of groups, written in a transaction with a proof of membership."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.errors import PositionLost
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.offsets import KafkaOffsets, is_another_topic, recreated_text


class KafkaAckContext:
    """The group of acknowledgements, and the member's proof of membership.

    The proof is that of the reader's last delivery. A later proof would be wrong, because that of a member that was
    thrown out is one that a broker accepts from anyone. An earlier one would be refused, because the group's generation
    changes time and again while a partition stays with its member.
    """

    __slots__ = ("group", "metadata", "topic_ids")

    def __init__(self, group: str) -> None:
        self.group = group
        self.metadata: object = None
        self.topic_ids: dict[Partition, str] = {}  # of the topic that each partition is read in, where it has an id


def check_topics(
    client: KafkaOffsets, context: KafkaAckContext, offsets: Mapping[Partition, int], deadline: Deadline
) -> None:
    """Raise `PositionLost` if a topic was deleted and created again since its messages were read."""
    ids = client.topic_ids({topic for topic, _ in offsets}, deadline)
    for partition, offset in offsets.items():
        if is_another_topic(ids.get(partition[0]), context.topic_ids.get(partition)):
            raise PositionLost(recreated_text(f"the position of group {context.group!r}", partition, offset))
