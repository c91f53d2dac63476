"""The callbacks for a group's rebalances: partitions are assigned to this member, revoked, or lost.

The client calls them inside its `poll` or `close`, and would turn their exceptions into SystemError. So each exception
is stored, and the reader's next poll raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import TopicPartition

from txnbridge.spi import Partition, ReaderListener
from txnbridge_kafka.read.assignment import KafkaAssignment, as_text


class GroupRebalance:
    """The rebalance callbacks of a group member's client."""

    def __init__(self, assignment: KafkaAssignment, listener: ReaderListener) -> None:
        self._assignment = assignment
        self._listener = listener
        self.joins = bool(assignment.context.group)  # whether the group's first answer is awaited

    def join(self, topics: Sequence[str]) -> None:
        self._assignment.client.subscribe(
            list(topics), on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost
        )
        self._assignment.log_for_group("joining; the partitions of a dead member come only after its session time-out")

    def on_assign(self, client: Any, partitions: list[TopicPartition]) -> None:
        self.joins = False
        try:
            if not self._assignment.closed:
                for partition in _keys(partitions):
                    self._assignment.add(partition)
                self._assignment.log_for_group("given %s", as_text(_keys(partitions)) or "nothing")
            # The client fetches a partition only after the partition's first offset is found.
            (client.assign if self._assignment.eager else client.incremental_assign)([])
        except BaseException as error:
            self._assignment.errors.append(error)

    def on_revoke(self, client: object, partitions: list[TopicPartition]) -> None:
        self._assignment.log_for_group("gives up %s in a rebalance", as_text(_keys(partitions)))
        self._leave(partitions, before=self._revoking)

    def on_lost(self, client: object, partitions: list[TopicPartition]) -> None:
        names = as_text(_keys(partitions))
        self._assignment.log_for_group("lost %s: this member's session timed out at the broker", names)
        self._leave(partitions, after=self._listener.lost)

    def _leave(
        self,
        partitions: list[TopicPartition],
        before: Callable[[Sequence[Partition]], None] | None = None,
        after: Callable[[Sequence[Partition]], None] | None = None,
    ) -> None:
        assignment = self._assignment
        assignment.revocations += 1
        try:
            leaving = [key for key in _keys(partitions) if key in assignment.partitions]
            announced = [key for key in leaving if assignment.partitions[key].announced]
            if announced and before and not assignment.closed:
                self._guarded(before, announced)
            here = [key for key in leaving if key in assignment.partitions]
            assignment.stop_fetching([assignment.partitions.pop(key) for key in here])
            if assignment.eager:
                assignment.client.unassign()
            if announced and after and not assignment.closed:
                after(announced)
        except BaseException as error:
            assignment.errors.append(error)

    def _revoking(self, partitions: Sequence[Partition]) -> None:
        # The group may have a new generation, which acknowledgements must name.
        self._assignment.renew_context()
        self._listener.revoking(partitions)

    def _guarded(self, function: Callable[[Sequence[Partition]], None], partitions: Sequence[Partition]) -> None:
        try:
            function(partitions)
        except BaseException as error:
            self._assignment.errors.append(error)


def _keys(partitions: list[TopicPartition]) -> list[Partition]:
    return [(each.topic, each.partition) for each in partitions]
