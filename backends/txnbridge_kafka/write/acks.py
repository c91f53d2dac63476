"""Acknowledgements: a group's positions, written in a transaction with the member's proof of group membership."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.errors import PositionLost
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.offsets import KafkaOffsets, is_another_topic, recreated_text


class KafkaAckContext:
    """The group that acknowledges, and the member's proof of group membership (its consumer group metadata).

    The proof is taken at the reader's last delivery. A later proof may be wrong: the metadata of a member that was
    removed from the group names no member, and a broker accepts such metadata from any producer. An earlier proof may
    be refused: the group's generation also changes while a partition stays assigned to its member.
    """

    __slots__ = ("group", "metadata", "topic_ids")

    def __init__(self, group: str) -> None:
        self.group = group
        self.metadata: object = None
        self.topic_ids: dict[Partition, str] = {}  # by partition, the id of its topic, if topics have ids


def check_topics(
    client: KafkaOffsets, context: KafkaAckContext, offsets: Mapping[Partition, int], deadline: Deadline
) -> None:
    """Raise `PositionLost` if a topic was deleted and created again since its messages were read."""
    ids = client.topic_ids({topic for topic, _ in offsets}, deadline)
    for partition, offset in offsets.items():
        if is_another_topic(ids.get(partition[0]), context.topic_ids.get(partition)):
            raise PositionLost(recreated_text(f"the position of group {context.group!r}", partition, offset))
