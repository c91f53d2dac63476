"""Acknowledgement of a reader's messages, as part of the decision about a writer's transaction.

A writer uses a reader's `RocketMQAckContext` so:

    acks = context.acks(positions, deadline)          # for `Ledger.claim`
    acks = context.acks(more, deadline, so_far=acks)  # adds further messages

An acknowledgement counts with the decision that carries it, and only if no other member has moved the group's position
in the same partition since the decision log was read. Before the decision no lock is held, and nothing has to be
cleaned up (hazard H77).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from txnbridge.errors import Conflict
from txnbridge.spi import Ack, Deadline, Partition, Position
from txnbridge_rocketmq.read.partition import QueueReader
from txnbridge_rocketmq.read.start_positions import GroupPositions

OnAck = Callable[[QueueReader, int], object]


class RocketMQAckContext:
    """The messages of a reader that a transaction can acknowledge. Thread-safe, also while another thread polls."""

    def __init__(
        self,
        group: str,
        starts: GroupPositions,
        readers: Mapping[Partition, QueueReader],
        guard: threading.Lock,
        on_ack: OnAck,
        timeout: float,
    ) -> None:
        self.group = group
        self._starts = starts
        self._readers = readers
        self._guard = guard
        self._on_ack = on_ack
        self._timeout = timeout
        self.was_used = False

    def acks(
        self,
        positions: Mapping[Partition, Sequence[Position]],
        deadline: Deadline | None = None,
        *,
        so_far: Sequence[Ack] = (),
    ) -> list[Ack]:
        """Return the acks that a COMMIT claim carries for these positions, which are consecutive in each partition.

        `so_far` are the acks of the same transaction for this reader; they are part of the result. Raise `Conflict` if
        the reader has lost a partition, if another member has moved the group's position in one, or if an earlier
        transaction that acknowledges in one is still undecided.
        """
        self.was_used = True
        before = {ack.partition: ack for ack in so_far}
        with self._guard:
            readers = {partition: self._here(partition) for partition in (*before, *positions)}
        positions_in_log, read_up_to = self._starts.positions(deadline or Deadline(self._timeout))
        claimed: dict[Partition, Ack] = {}
        with self._guard:
            for partition, reader in readers.items():
                if self._readers.get(partition) is not reader:
                    raise _has_left(partition)
                earlier, given = before.get(partition), positions.get(partition)
                first = earlier.first if earlier else given[0] if given else ()
                end = reader.position_at(given[-1][0] + 1).position if given else earlier.end if earlier else ()
                at = (positions_in_log.get(partition, -1),)
                reader.claims = [claim for claim in reader.claims if claim[1] > at[0]]
                others = [claim for claim in reader.claims if earlier is None or claim[0] != earlier.first[0]]
                if at < (0,) or at > first or others or (earlier and at != earlier.first):
                    reader.overtaken = True
                    raise _moved(self.group, partition)
                claimed[partition] = Ack(self.group, partition, at, end, read_up_to)
            for partition, ack in claimed.items():
                readers[partition].claims = [(ack.first[0], ack.end[0])]
        for partition, ack in claimed.items():
            self._on_ack(readers[partition], ack.first[0])
        return list(claimed.values())

    def _here(self, partition: Partition) -> QueueReader:
        reader = self._readers.get(partition)
        if reader is None:
            raise _has_left(partition)
        return reader


def _has_left(partition: Partition) -> Conflict:
    topic, number = partition
    return Conflict(f"{topic}[{number}] left this reader after the messages were delivered; they come again")


def _moved(group: str, partition: Partition) -> Conflict:
    topic, number = partition
    return Conflict(
        f"group {group!r} does not stand in {topic}[{number}] where these messages were delivered: another member has"
        " acknowledged there, or an earlier transaction is still undecided"
    )
