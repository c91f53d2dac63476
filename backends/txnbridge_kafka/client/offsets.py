"""Partitions' first and last offsets, groups' positions, and topics' ids and numbers of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.client.responses import EARLIEST, LATEST, CommittedOffset


class KafkaOffsets:
    """Looks up offsets, positions and topic ids by raw requests (hazard H21), from any thread, until a deadline."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def begins(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's first offset that retention has not removed."""
        return self._requests.list_offsets(dict.fromkeys(partitions, EARLIEST), deadline)

    def ends(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's last stable offset: that of its first undecided message, or the log end offset."""
        return self._requests.list_offsets(dict.fromkeys(partitions, LATEST), deadline)

    def since(
        self, partitions: Iterable[Partition], timestamp: int, deadline: Deadline
    ) -> dict[Partition, tuple[int, int]]:
        """Return, by partition, the first offset (also of a marker) stamped at or after a time, and the end offset.

        If no offset has such a timestamp, the end offset is returned twice.
        """
        names = list(partitions)
        # The ends are read first: a message that is stored between the two requests is not skipped then.
        ends = self.ends(names, deadline)
        since = self._requests.list_offsets(dict.fromkeys(names, timestamp), deadline)
        return {name: (since[name] if 0 <= since[name] < ends[name] else ends[name], ends[name]) for name in names}

    def committed(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, int | None]:
        """Return a group's position in each partition, None if it has none.

        With `decided` a partition whose position an open transaction may change is absent.
        """
        committed = self.committed_with_topics(group, partitions, deadline, decided=decided)
        return {partition: None if each is None else each.at for partition, each in committed.items()}

    def committed_with_topics(
        self, group: str, partitions: Iterable[Partition], deadline: Deadline, *, decided: bool = False
    ) -> Mapping[Partition, CommittedOffset | None]:
        """Return a group's positions as `committed` does, each with the id of the topic in which it was committed."""
        return self._requests.positions(group, list(partitions), deadline, decided=decided)

    def topic_ids(self, topics: Iterable[str], deadline: Deadline) -> dict[str, str]:
        """Return the id of each existing topic by name; empty text if the topic has no id."""
        return self._requests.topic_ids(topics, deadline)

    def counts(self, topics: Iterable[str], deadline: Deadline) -> dict[str, int]:
        """Return how many partitions each topic has. Raise `NotFound` if a topic does not exist."""
        return self._requests.counts(list(topics), deadline)


def is_another_topic(now: str | None, before: str | None) -> bool:
    """Return whether two topic ids, read under the same name, are both known and differ."""
    return bool(now) and bool(before) and now != before


def recreated_text(owner: str, partition: Partition, at: int) -> str:
    """Return the error text for a position in a topic that was deleted and created again."""
    topic, number = partition
    return (
        f"{owner} is {at} in {topic}[{number}], but the topic was deleted and made anew since, so that says nothing of"
        f" the topic that is there now. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) says where to"
        " go on in it"
    )
