"""Acknowledgement of a reader's messages, as part of a writer's transaction.

A writer uses a reader's `RocketMQAckContext` so:

    acks = context.acks(positions, deadline)          # for `Ledger.claim`
    acks = context.acks(more, deadline, so_far=acks)  # adds further messages

The COMMIT claim of the transaction carries the acknowledgements. They count only if no other member has moved the
group's position in the same partition since the decision log was read for them. Before the claim no lock is held, and
after an abort nothing has to be cleaned up (hazard H77).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from txnbridge.errors import Conflict
from txnbridge.spi import Ack, Deadline, Partition, Position
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.read.partition import QueueReader
from txnbridge_rocketmq.read.start_positions import GroupPositions

OnAck = Callable[[Mapping[Queue, int], Deadline], object]


@dataclass(eq=False, repr=False)
class RocketMQAckContext:
    """Makes the acknowledgements of one reader's messages. Thread-safe, also while another thread polls the reader."""

    group: str
    _starts: GroupPositions
    _readers: Mapping[Partition, QueueReader]
    _guard: threading.Lock
    _on_ack: OnAck
    was_used: bool = False

    def acks(
        self, positions: Mapping[Partition, Sequence[Position]], deadline: Deadline, *, so_far: Sequence[Ack] = ()
    ) -> list[Ack]:
        """Return what a decision to commit acknowledges: `so_far`, and the messages at these consecutive positions.

        `so_far` are acks of the same transaction, from earlier calls. Raise `Conflict` if the reader has lost a
        partition, if another member has moved the group's position there, or if an earlier transaction that
        acknowledges messages there is still undecided.
        """
        self.was_used = True
        before = {ack.partition: ack for ack in so_far}
        with self._guard:
            readers = {partition: self._here(partition) for partition in (*before, *positions)}
        positions_in_log, read_up_to = self._starts.positions(deadline)
        held = self._starts.held(deadline)
        claimed: dict[Partition, Ack] = {}
        with self._guard:
            for partition, reader in readers.items():
                if self._readers.get(partition) is not reader:
                    raise _has_left(partition)
                earlier, given = before.get(partition), positions.get(partition)
                first = earlier.first if earlier else given[0] if given else ()
                end = reader.position_at(given[-1][0] + 1).position if given else earlier.end if earlier else ()
                at = (positions_in_log.get(partition, -1),)
                reader.undecided_acks = [acked for acked in reader.undecided_acks if acked[1] > at[0]]
                others = [acked for acked in reader.undecided_acks if earlier is None or acked[0] != earlier.first[0]]
                if at < (0,) or at > first or others or partition in held or (earlier and at != earlier.first):
                    reader.overtaken = True
                    raise _moved(self.group, partition)
                claimed[partition] = Ack(self.group, partition, at, end, read_up_to)
            for partition, ack in claimed.items():
                readers[partition].undecided_acks = [(ack.first[0], ack.end[0])]
        self._on_ack({readers[partition].queue: ack.first[0] for partition, ack in claimed.items()}, deadline)
        return list(claimed.values())

    def require_held(self, acks: Sequence[Ack], transaction: str, deadline: Deadline) -> None:
        """Raise `Conflict` if another acknowledgement came before the prepare record of the transaction of `acks`.

        After that record, no acknowledgement by another transaction counts on the partitions of `acks`.
        """
        positions, _ = self._starts.positions(deadline)
        held = self._starts.held(deadline)
        for ack in acks:
            holder = held.get(ack.partition)
            if holder is None or holder.transaction != transaction or positions.get(ack.partition) != ack.first[0]:
                raise _moved(self.group, ack.partition)

    def _here(self, partition: Partition) -> QueueReader:
        reader = self._readers.get(partition)
        if reader is None:
            raise _has_left(partition)
        return reader


def _has_left(partition: Partition) -> Conflict:
    topic, number = partition
    return Conflict(
        f"{topic}[{number}] is no longer assigned to this reader; its messages will be delivered to another one"
    )


def _moved(group: str, partition: Partition) -> Conflict:
    topic, number = partition
    return Conflict(
        f"the position of group {group!r} in {topic}[{number}] is not where these messages begin: another member has"
        " acknowledged there, or an earlier transaction is still undecided"
    )
