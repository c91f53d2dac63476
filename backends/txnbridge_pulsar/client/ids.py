"""Ids of messages and transactions, and bit sets of the acknowledged messages in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .codec import Fields

_NOWHERE = 0xFFFFFFFFFFFFFFFF


class TxnId(NamedTuple):
    """A transaction; `most` is its coordinator. (0, 0) is valid: test for None, never for truth."""

    most: int
    least: int

    @property
    def fields(self) -> Fields:
        return {"txnid_least_bits": self.least, "txnid_most_bits": self.most}

    def __str__(self) -> str:
        return f"{self.most}:{self.least}"


class MessageId(NamedTuple):
    """The position of a message; in a batch `batch_index` of `batch_size`, else -1 of 0.

    Ids are ordered as stored in a partition. `first_chunk` is the (ledger, entry) of a chunked message's first chunk.
    """

    ledger: int
    entry: int
    partition: int = -1
    batch_index: int = -1
    batch_size: int = 0
    first_chunk: tuple[int, ...] = ()

    @property
    def whole_entry(self) -> MessageId:
        """Return the id without the batch index."""
        return MessageId(self.ledger, self.entry, self.partition)


# Where a subscription can begin, besides at a message.
EARLIEST = MessageId(-1, -1)
LATEST = MessageId((1 << 63) - 1, (1 << 63) - 1)


def message_id(fields: Fields) -> MessageId:
    """Return the id in a message of the broker; the schema requires ledger and entry."""
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
    """Return the fields for beginning at, or seeking to, an id; in a batch from the id's index on."""
    fields: Fields = {"ledger_id": id.ledger, "entry_id": id.entry}
    if id.partition >= 0:
        fields["partition"] = id.partition
    if id.batch_index >= 0:
        fields["batch_index"] = id.batch_index
        fields["ack_set"] = ack_set(id.batch_size, range(id.batch_index))
    if id.first_chunk:
        # The broker sends the whole message only from its first chunk on.
        fields["ledger_id"], fields["entry_id"] = id.first_chunk
    return fields


def individual_ack_fields(ids: Iterable[MessageId]) -> list[Fields]:
    """Return one id for each entry, with bits for the messages of its batch that these ids do not name.

    An id with a size and no index stands for the whole batch, which goes without bits, but with the size that the
    broker counts by. The bits describe this acknowledgement alone: earlier ones may be another transaction's.
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
    acks = []
    for place, acked in indexes.items():
        fields: Fields = {"ledger_id": place[0], "entry_id": place[1]}
        if acked:
            size = sizes[place]
            fields["ack_set"] = [] if len(acked) == size else ack_set(size, acked)
            fields["batch_size"] = size
        acks.append(fields)
    return acks


def cumulative_ack_fields(id: MessageId) -> Fields:
    """Return the fields that acknowledge everything up to and including an id."""
    fields: Fields = {"ledger_id": id.ledger, "entry_id": id.entry}
    if id.batch_index >= 0:
        fields["ack_set"] = ack_set(id.batch_size, range(id.batch_index + 1))
        fields["batch_size"] = id.batch_size
    return fields


def ack_set(size: int, acked: Iterable[int]) -> list[int]:
    """Return a batch's bits in 64-bit words, lowest first; 1 means *not* acknowledged. Empty if all are
    acknowledged.
    """
    bits = (1 << size) - 1
    for index in acked:
        bits &= ~(1 << index)
    if not bits:
        return []
    words = [bits >> shift & _NOWHERE for shift in range(0, size, 64)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def delivered_indexes(words: Sequence[int]) -> list[int]:
    """Return the indexes of the messages in a batch that the broker delivers: those whose bits are 1."""
    return [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
