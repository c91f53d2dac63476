"""The assignment of partitions to a group's members, as a pure function."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping


def assign(
    members: Mapping[str, Collection[int]], partitions: Mapping[int, int], owners: Mapping[int, str]
) -> dict[int, str]:
    """Assign each partition to a member that reads its topic, as evenly as the topics allow.

    `members` has the topics of each member, `partitions` the topic of each partition, and `owners` the current owners.
    A partition stays with its owner unless a move makes the numbers more even. A partition is left out if no member
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
        """Make the numbers of partitions of two members more even; return False if no member has two more than another.

        A partition goes from one member to another, or by a chain: A gives a partition to B, and B gives one to C.
        """
        for member in sorted(self._count, key=self._count.__getitem__, reverse=True):
            chain = self._chain(member)
            if chain:
                for giver, topic, taker in chain:
                    self._move(giver, topic, taker)
                return True
        return False

    def _chain(self, fullest: str) -> list[tuple[str, int, str]]:
        """Return the shortest (giver, topic, taker) chain from `fullest` to one with at least two partitions fewer."""
        came_by: dict[str, tuple[str, int]] = {}
        waiting = deque([fullest])
        while waiting:
            giver = waiting.popleft()
            for topic, taker in self._takers(giver):
                if taker == fullest or taker in came_by:
                    continue
                came_by[taker] = giver, topic
                if self._count[taker] <= self._count[fullest] - 2:
                    return list(self._back(came_by, fullest, taker))
                waiting.append(taker)
        return []

    def _takers(self, giver: str) -> Iterator[tuple[int, str]]:
        """Yield (topic, member) for the members that could take a partition of the giver, fullest last."""
        pairs = [
            (topic, taker)
            for topic, held in sorted(self._held[giver].items())
            if held
            for taker in self._readers[topic]
        ]
        yield from sorted(pairs, key=lambda pair: self._count[pair[1]])

    @staticmethod
    def _back(came_by: Mapping[str, tuple[str, int]], first: str, last: str) -> Iterator[tuple[str, int, str]]:
        while last != first:
            giver, topic = came_by[last]
            yield giver, topic, last
            last = giver

    def _move(self, giver: str, topic: int, taker: str) -> None:
        # The giver's last partition is moved: the partitions that the giver owned before are first in the list.
        partition = self._held[giver][topic].pop()
        self._count[giver] -= 1
        self.give(partition, taker)
