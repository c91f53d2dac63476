"""Acknowledgements: a group's offsets, committed in a transaction as by the group's member that read the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from txnbridge.errors import PositionLost
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.read.start_positions import is_another_topic, recreated_text


@dataclass(slots=True, eq=False)
class KafkaAckContext:
    """A group, and its consumer's group metadata (member id and generation), which acknowledgements send to the broker.

    The reader updates the metadata at each delivery. Metadata that is read later may be wrong: after the member was
    removed from the group, it has no member id, and the broker accepts metadata without a member id from any producer.
    Metadata that was read earlier may be refused, because the generation also changes while a partition stays assigned
    to its member.
    """

    group: str
    metadata: object = None
    topic_ids: dict[Partition, str | None] = field(default_factory=dict)  # by partition, the id of its topic, if known
    epochs: dict[Partition, int] = field(default_factory=dict)  # by partition, the highest leader epoch of a message


def check_topics(
    client: Requests, context: KafkaAckContext, offsets: Mapping[Partition, int], deadline: Deadline
) -> None:
    """Raise `PositionLost` if a topic was deleted and created again since its messages were read."""
    ids = client.topic_ids({topic for topic, _ in offsets}, deadline)
    for partition, offset in offsets.items():
        if is_another_topic(ids.get(partition[0]), context.topic_ids.get(partition)):
            raise PositionLost(recreated_text(f"the position of group {context.group!r}", partition, offset))
