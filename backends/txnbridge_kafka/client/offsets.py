"""Offsets and positions of partitions, and the ids and sizes of topics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.client.responses import EARLIEST, LATEST, CommittedOffset


class KafkaOffsets:
    """Questions about offsets by raw requests (hazard H21). Any thread may ask; each ends by its deadline."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def begins(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return the first offset that retention has left."""
        return self._requests.list_offsets(dict.fromkeys(partitions, EARLIEST), deadline)

    def ends(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return the last stable offset: that of the first undecided message, or the end."""
        return self._requests.list_offsets(dict.fromkeys(partitions, LATEST), deadline)

    def since(
        self, partitions: Iterable[Partition], timestamp: int, deadline: Deadline
    ) -> dict[Partition, tuple[int, int]]:
        """Return the first offset (of a message or a marker) stamped at or after a time, else the end; and the end."""
        names = list(partitions)
        # The ends first: a message that comes between the two requests is not passed over then.
        ends = self.ends(names, deadline)
        since = self._requests.list_offsets(dict.fromkeys(names, timestamp), deadline)
        return {name: (since[name] if 0 <= since[name] < ends[name] else ends[name], ends[name]) for name in names}

    def committed(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, int | None]:
        """Return a group's positions or None; with `decided`, without those that an open transaction may change."""
        committed = self.committed_with_topics(group, partitions, deadline, decided=decided)
        return {partition: None if each is None else each.at for partition, each in committed.items()}

    def committed_with_topics(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, CommittedOffset | None]:
        """Return the same as `committed`, with the ids of the topics that the positions belong to."""
        return self._requests.positions(group, list(partitions), deadline, decided=decided)

    def topic_ids(self, topics: Iterable[str], deadline: Deadline) -> dict[str, str]:
        """Return the id of each existing topic; it is empty where topics have none."""
        return self._requests.topic_ids(topics, deadline)

    def counts(self, topics: Iterable[str], deadline: Deadline) -> dict[str, int]:
        """Return how many partitions each topic has. Raise `NotFound`."""
        return self._requests.counts(list(topics), deadline)


def is_another_topic(now: str | None, before: str | None) -> bool:
    """Return whether two ids of a topic are known, and differ."""
    return bool(now) and bool(before) and now != before


def recreated_text(owner: str, partition: Partition, at: int) -> str:
    """Return the text for a position that belongs to a topic which was deleted and created again."""
    topic, number = partition
    return (
        f"{owner} is {at} in {topic}[{number}], but the topic was deleted and made anew since, so that says nothing of"
        f" the topic that is there now. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) says where to"
        " go on in it"
    )
