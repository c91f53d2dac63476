"""Ids of messages and transactions, and the bit sets that name messages of a batch in acknowledgements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .codec import Fields

_UINT64_MAX = 0xFFFFFFFFFFFFFFFF


class TxnId(NamedTuple):
    """A transaction's id; `most` is its coordinator's number. (0, 0) is valid, so compare with None, not by truth."""

    most: int
    least: int

    @property
    def fields(self) -> Fields:
        return {"txnid_least_bits": self.least, "txnid_most_bits": self.most}

    def __str__(self) -> str:
        return f"{self.most}:{self.least}"


class MessageId(NamedTuple):
    """The position of a message in a topic: BookKeeper ledger, entry, and its index in a batch.

    A message of a batch has a `batch_index` and `batch_size`, others have -1 and 0. Ids are ordered as messages are
    stored in a partition. `first_chunk` is the (ledger, entry) of a chunked message's first chunk.
    """

    ledger: int
    entry: int
    partition: int = -1
    batch_index: int = -1
    batch_size: int = 0
    first_chunk: tuple[int, ...] = ()


# The places, besides a message, at which a subscription can begin.
EARLIEST = MessageId(-1, -1)
LATEST = MessageId((1 << 63) - 1, (1 << 63) - 1)


def message_id(fields: Fields) -> MessageId:
    """Return the `MessageId` in a broker's MessageIdData."""
    ledger, entry = fields["ledger_id"], fields["entry_id"]
    first = fields.get("first_chunk_message_id")
    return MessageId(
        -1 if ledger == _UINT64_MAX else ledger,
        -1 if entry == _UINT64_MAX else entry,
        fields.get("partition", -1),
        fields.get("batch_index", -1),
        fields.get("batch_size", 0),
        (first["ledger_id"], first["entry_id"]) if first else (),
    )


def position_fields(id: MessageId) -> Fields:
    """Return the MessageIdData of a position to start at or seek to; with a batch index, of that message in a batch."""
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


def individual_ack_fields(ids: Iterable[MessageId], extra_index: bool = False) -> list[Fields]:
    """Return MessageIdData for ACK commands, one for each entry. If only some messages of a batch are acknowledged,
    bits name the messages that stay unacknowledged. With `extra_index` a batch whose messages are named one by one has
    one more index after its last message, which stays unacknowledged (hazard H89).

    An id that has a batch size and no index means the whole batch. Such an id is sent without bits, but with the batch
    size, because the broker counts by that size. The bits describe only this acknowledgement, because earlier
    acknowledgements may belong to another transaction.
    """
    indexes, sizes = dict[tuple[int, int], set[int]](), dict[tuple[int, int], int]()
    whole = set()
    for id in ids:
        entry = (id.ledger, id.entry)
        indexes.setdefault(entry, set())
        if id.batch_size:
            sizes[entry] = id.batch_size
        if id.batch_index >= 0:
            indexes[entry].add(id.batch_index)
        elif id.batch_size:
            indexes[entry].update(range(id.batch_size))
            whole.add(entry)
    acks = []
    for entry, acked in indexes.items():
        fields: Fields = {"ledger_id": entry[0], "entry_id": entry[1]}
        if acked:
            is_whole = entry in whole if extra_index else len(acked) == sizes[entry]
            size = sizes[entry] + (extra_index and not is_whole)
            fields["ack_set"] = [] if is_whole else ack_set(size, acked)
            fields["batch_size"] = size
        acks.append(fields)
    return acks


def extra_index_ack_fields(id: MessageId, size: int) -> Fields:
    """Return the MessageIdData that acknowledges none of a batch's messages, but the index that a group adds to each
    batch, so that the broker does not take the batch for acknowledged before the group does.
    """
    return {"ledger_id": id.ledger, "entry_id": id.entry, "ack_set": ack_set(size, ())}


def cumulative_ack_fields(id: MessageId) -> Fields:
    """Return the MessageIdData that acknowledges all messages up to and including an id."""
    fields: Fields = {"ledger_id": id.ledger, "entry_id": id.entry}
    if id.batch_index >= 0:
        fields["ack_set"] = ack_set(id.batch_size, range(id.batch_index + 1))
        fields["batch_size"] = id.batch_size
    return fields


def ack_set(size: int, acked: Iterable[int]) -> list[int]:
    """Return the bits of a batch of `size` messages as 64-bit words, lowest first; none if all are `acked`.

    A bit is 1 if its message is *not* acknowledged.
    """
    bits = (1 << size) - 1
    for index in acked:
        bits &= ~(1 << index)
    if not bits:
        return []
    words = [bits >> shift & _UINT64_MAX for shift in range(0, size, 64)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def delivered_indexes(words: Sequence[int]) -> list[int]:
    """Return the batch indexes of the messages that the broker delivers: those whose bits are 1."""
    return [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
