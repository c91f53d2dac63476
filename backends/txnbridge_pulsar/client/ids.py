"""Names of things on a broker: messages, transactions, and the bits that say which of a batch are acknowledged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .codec import Fields

_NOWHERE = 0xFFFFFFFFFFFFFFFF


class TxnId(NamedTuple):
    """A transaction: `most` is its coordinator. (0, 0) is a valid one: test for None, never for truth."""

    most: int
    least: int

    @property
    def fields(self) -> Fields:
        return {"txnid_least_bits": self.least, "txnid_most_bits": self.most}

    def __str__(self) -> str:
        return f"{self.most}:{self.least}"


class MessageId(NamedTuple):
    """Where a message is stored; in a batch `batch_index` of `batch_size`, else -1 of 0.

    Ordered as stored in a partition. `first_chunk` is empty but for a message in several chunks, of which it says where
    the first is: (ledger, entry).
    """

    ledger: int
    entry: int
    partition: int = -1
    batch_index: int = -1
    batch_size: int = 0
    first_chunk: tuple[int, ...] = ()

    @property
    def whole_entry(self) -> MessageId:
        """The same without the place in the batch."""
        return MessageId(self.ledger, self.entry, self.partition)


# Where a subscription can begin besides at a message.
EARLIEST = MessageId(-1, -1)
LATEST = MessageId((1 << 63) - 1, (1 << 63) - 1)


def message_id(fields: Fields) -> MessageId:
    """An id as the broker writes it. Raises nothing: both halves are required by the schema."""
    ledger, entry = fields["ledger_id"], fields["entry_id"]
    first = fields.get("first_chunk_message_id")
    return MessageId(
        -1 if ledger == _NOWHERE else ledger,
        -1 if entry == _NOWHERE else entry,
        fields.get("partition", -1),
        fields.get("batch_index", -1),
        fields.get("batch_size", 0),
        (first["ledger_id"], first["entry_id"]) if first else (),
    )


def position_fields(id: MessageId) -> Fields:
    """An id as a place to begin at or to seek to: its entry and all behind it, of a batch what is not before it."""
    fields: Fields = {"ledger_id": id.ledger, "entry_id": id.entry}
    if id.partition >= 0:
        fields["partition"] = id.partition
    if id.batch_index >= 0:
        fields["batch_index"] = id.batch_index
        fields["ack_set"] = ack_set(id.batch_size, range(id.batch_index))
    if id.first_chunk:
        # The whole message comes only from its first chunk on.
        fields["ledger_id"], fields["entry_id"] = id.first_chunk
    return fields


def individual_ack_fields(ids: Iterable[MessageId]) -> list[Fields]:
    """One id an entry, with bits for those of its batch that these ids do not name.

    An id without a place in its batch, but with the batch's size, stands for all of it. The bits say nothing of
    earlier acknowledgements, which may be another transaction's: only of this one. A batch that is acknowledged as a
    whole goes without bits, but with its size, which the broker counts by.
    """
    indexes: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for id in ids:
        place = (id.ledger, id.entry)
        indexes.setdefault(place, set())
        if id.batch_size:
            sizes[place] = id.batch_size
        if id.batch_index >= 0:
            indexes[place].add(id.batch_index)
        elif id.batch_size:
            indexes[place].update(range(id.batch_size))
    found = []
    for place, acked in indexes.items():
        fields: Fields = {"ledger_id": place[0], "entry_id": place[1]}
        if acked:
            size = sizes[place]
            fields["ack_set"] = [] if len(acked) == size else ack_set(size, acked)
            fields["batch_size"] = size
        found.append(fields)
    return found


def cumulative_ack_fields(id: MessageId) -> Fields:
    """Everything up to and including an id."""
    fields: Fields = {"ledger_id": id.ledger, "entry_id": id.entry}
    if id.batch_index >= 0:
        fields["ack_set"] = ack_set(id.batch_size, range(id.batch_index + 1))
        fields["batch_size"] = id.batch_size
    return fields


def ack_set(size: int, acked: Iterable[int]) -> list[int]:
    """64 bits a word, the lowest first, where 1 means *not* acknowledged; empty if nothing of the batch is left."""
    bits = (1 << size) - 1
    for index in acked:
        bits &= ~(1 << index)
    if not bits:
        return []
    words = [bits >> shift & _NOWHERE for shift in range(0, size, 64)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def delivered_indexes(words: Sequence[int]) -> list[int]:
    """Which of a batch the broker means to deliver: those whose bits are 1."""
    return [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
