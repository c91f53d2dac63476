"""Partitions' first and last offsets, groups' committed offsets, and topics' ids and numbers of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.protocol_types import EARLIEST, LATEST, CommittedOffset
from txnbridge_kafka.client.requests import Requests


class KafkaOffsets:
    """Looks up offsets and topic ids by raw requests, from any thread, until a deadline.

    It does not use confluent-kafka's admin client, which may crash the process (hazard H21).
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def begins(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's first offset that retention has not removed."""
        return self._requests.list_offsets(dict.fromkeys(partitions, EARLIEST), deadline)

    def ends(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's last stable offset, below which every transaction has ended."""
        return self._requests.list_offsets(dict.fromkeys(partitions, LATEST), deadline)

    def since(
        self, partitions: Iterable[Partition], timestamp: int, deadline: Deadline
    ) -> dict[Partition, tuple[int, int]]:
        """Return, by partition, the first offset with a timestamp at or after a time, and the last stable offset.

        The first offset may be that of a control marker. If no offset has such a timestamp, the last stable offset is
        returned in place of the first offset.
        """
        names = list(partitions)
        # The ends are read first, so that a message stored between the two requests is not skipped.
        ends = self.ends(names, deadline)
        since = self._requests.list_offsets(dict.fromkeys(names, timestamp), deadline)
        return {name: (since[name] if 0 <= since[name] < ends[name] else ends[name], ends[name]) for name in names}

    def committed(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, int | None]:
        """Return a group's committed offset in each partition; None if there is none.

        With `decided` a partition is absent while an open transaction may change its committed offset.
        """
        committed = self.committed_with_topics(group, partitions, deadline, decided=decided)
        return {partition: None if each is None else each.at for partition, each in committed.items()}

    def committed_with_topics(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, CommittedOffset | None]:
        """Return a group's committed offsets like `committed`, each with its topic's id at the time of the commit."""
        return self._requests.positions(group, list(partitions), deadline, decided=decided)

    def topic_ids(self, topics: Iterable[str], deadline: Deadline) -> dict[str, str]:
        return self._requests.topic_ids(topics, deadline)

    def counts(self, topics: Iterable[str], deadline: Deadline) -> dict[str, int]:
        return self._requests.counts(list(topics), deadline)


def is_another_topic(now: str | None, before: str | None) -> bool:
    """Return whether a topic was deleted and created again, by its ids now and before. Unknown ids prove nothing."""
    return bool(now) and bool(before) and now != before


def recreated_text(name: str, partition: Partition, at: int) -> str:
    """Return the error text for an offset (`name` says whose) in a topic that was deleted and created again."""
    topic, number = partition
    return (
        f"{name} is {at} in {topic}[{number}], but the topic was deleted and created again since, so that offset means"
        " nothing in the new topic. Nothing was skipped. Choose where to continue in the new topic by"
        f" seek({{({topic!r}, {number}): (offset,)}})"
    )
