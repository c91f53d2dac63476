"""The assignment of partitions to a group's members, as a pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def assign(
    members: Mapping[str, Collection[int]], partitions: Mapping[int, int], owners: Mapping[int, str]
) -> dict[int, str]:
    """Assign each partition to a member that reads its topic, evenly: no move of one partition is more even.

    `members` has the topics of each member, `partitions` the topic of each partition, and `owners` the current owners.
    A partition stays with its owner unless its move makes the numbers more even. A partition is left out if no member
    reads its topic. The same arguments always give the same result, so any member may compute the assignment.
    """
    shares = _Shares(members, partitions)
    for partition, owner in sorted(owners.items()):
        if partition in partitions and owner in shares.readers(partitions[partition]):
            shares.give(partition, owner)
    for partition in sorted(partitions):
        if partition not in shares.owner:
            shares.give_to_least(partition)
    while shares.level():
        pass
    return shares.owner


class _Shares:
    """The partitions of each member during the computation of an assignment."""

    def __init__(self, members: Mapping[str, Collection[int]], partitions: Mapping[int, int]) -> None:
        self._partitions = partitions
        self._readers: dict[int, list[str]] = {topic: [] for topic in set(partitions.values())}
        for member in sorted(members):
            for topic in set(members[member]) & self._readers.keys():
                self._readers[topic].append(member)
        self._held: dict[str, dict[int, list[int]]] = {member: {} for member in members}  # by topic
        self._count = dict.fromkeys(sorted(members), 0)  # sorted, so that the result does not depend on the order
        self.owner: dict[int, str] = {}

    def readers(self, topic: int) -> list[str]:
        return self._readers[topic]

    def give(self, partition: int, member: str) -> None:
        self.owner[partition] = member
        self._held[member].setdefault(self._partitions[partition], []).append(partition)
        self._count[member] += 1

    def give_to_least(self, partition: int) -> None:
        readers = self._readers[self._partitions[partition]]
        if readers:
            self.give(partition, min(readers, key=self._count.__getitem__))

    def level(self) -> bool:
        """Move a partition to a member with at least two fewer; return False if no partition can be moved so."""
        for giver in sorted(self._count, key=self._count.__getitem__, reverse=True):
            for topic, held in sorted(self._held[giver].items()):
                taker = min(self._readers[topic], key=self._count.__getitem__)
                if held and self._count[taker] <= self._count[giver] - 2:
                    # The last partition is moved: those that the giver owned before are first in the list.
                    self._count[giver] -= 1
                    self.give(held.pop(), taker)
                    return True
        return False
