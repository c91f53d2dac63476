"""Received entries as the broker stores them, the messages in them, and the reassembly of large messages."""

from __future__ import annotations

import base64
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from txnbridge_pulsar.client.errors import CorruptEntry, PulsarError
from txnbridge_pulsar.client.format.codec import Fields, Malformed, decode, read_varint
from txnbridge_pulsar.client.format.compression import decompress
from txnbridge_pulsar.client.format.frames import split_entry
from txnbridge_pulsar.client.format.ids import MessageId, TxnId, delivered_indexes, message_id

_SIZE = struct.Struct(">I")
# The largest decompressed size of an entry; far above any broker's limit.
MAX_UNPACKED = 256 * 1024 * 1024


@dataclass(slots=True, eq=False, repr=False)
class ReceivedMessage:
    """One message of a received entry. Its key, properties and other fields are parsed when they are used."""

    entry: ReceivedEntry
    index: int
    payload: bytes
    _described: Fields

    @property
    def id(self) -> MessageId:
        """Return the message's id, with its index in a batch."""
        whole = self.entry.id
        return whole if self.index < 0 else whole._replace(batch_index=self.index, batch_size=self.entry.count)

    @property
    def value(self) -> bytes | None:
        """Return the payload; None for a tombstone."""
        return None if self._described.get("null_value") else self.payload

    @property
    def key(self) -> bytes | None:
        """Return the key's bytes, whether it was written as text or as bytes; None without a key."""
        text: str | None = self._described.get("partition_key")
        if text is None or self._described.get("null_partition_key"):
            return None
        if not self._described.get("partition_key_b64_encoded"):
            return text.encode()
        try:
            return base64.b64decode(text)
        except ValueError:  # also for text that is not ASCII
            return text.encode()

    @property
    def properties(self) -> list[tuple[str, str]]:
        return [(pair["key"], pair["value"]) for pair in self._described.get("properties", ())]

    @property
    def event_time(self) -> int | None:
        """Return the sender's event time in milliseconds since 1970; None if it is missing, 0, or above Java's."""
        time: int = self._described.get("event_time", 0)
        return time if 0 < time < 1 << 63 else None


class ReceivedEntry:
    """A received entry, with its metadata parsed. Its messages are parsed by `messages`.

    An unreadable entry has a `fault`, which `messages` raises: the caller decides what to do with the entry. If a
    message was sent in several chunks, `parts` are the ids of all its chunks, also of ones that were sent twice.
    `comes_again` says that the consumer has to go back: drop the entry.
    """

    __slots__ = (
        *("_index_words", "_payload", "_skipped", "arrival", "comes_again", "consumer", "fault", "generation", "id"),
        *("metadata", "parts", "redeliveries", "size"),
    )

    def __init__(self, consumer: object | None, generation: int, fields: Fields, tail: bytes) -> None:
        self.consumer = consumer
        self.generation = generation
        self.arrival = 0  # number of the entry since the consumer was opened
        self.id = message_id(fields["message_id"])
        self.comes_again = False
        self.redeliveries: int = fields.get("redelivery_count", 0)
        self.size = len(tail)
        self.fault: PulsarError | None = None
        self.parts: tuple[MessageId, ...] = ()
        self._index_words: list[int] = fields.get("ack_set", [])
        self._skipped = 0
        try:
            self.metadata, self._payload = split_entry(tail)
        except CorruptEntry as error:
            self.metadata, self._payload = {}, b""
            self.refuse(str(error))

    @property
    def is_batch(self) -> bool:
        return "num_messages_in_batch" in self.metadata

    @property
    def count(self) -> int:
        """Return the number of messages in the entry, including messages that this delivery leaves out."""
        return max(1, int(self.metadata.get("num_messages_in_batch", 1)))

    @property
    def permits(self) -> int:
        """Return how many permits the broker has used up for the entry."""
        return max(1, len(delivered_indexes(self._index_words))) if self._index_words else self.count

    @property
    def left_out(self) -> int:
        """Return the messages of a batch that this delivery leaves out: bit i is set for message i.

        They are acknowledged, also by a transaction that is still open. (The broker's own bits are set for the others.)
        """
        if not self._index_words or not self.is_batch:  # the size of an unreadable batch is not known
            return 0
        return (1 << self.count) - 1 & ~sum(1 << index for index in delivered_indexes(self._index_words))

    @property
    def is_acknowledged(self) -> bool:
        """Return whether all messages of a batch are acknowledged, also by transactions that are still open."""
        return bool(self._index_words) and self.left_out == (1 << self.count) - 1

    @property
    def txn(self) -> TxnId | None:
        if "txnid_least_bits" not in self.metadata or "txnid_most_bits" not in self.metadata:
            return None
        return TxnId(self.metadata["txnid_most_bits"], self.metadata["txnid_least_bits"])

    @property
    def is_marker(self) -> bool:
        """Return whether the entry is a control marker, which has no messages."""
        return "marker_type" in self.metadata

    @property
    def publish_time(self) -> int:
        """Return the sender's time of sending, in milliseconds since 1970."""
        return min(int(self.metadata.get("publish_time", 0)), (1 << 63) - 1)

    @property
    def chunk(self) -> tuple[str, int, int] | None:
        """Return the message's uuid, this chunk's number and the number of all chunks; None if it is no chunk."""
        chunks = self.metadata.get("num_chunks_from_msg", 0)
        if chunks < 2 or self.parts:
            return None
        return self.metadata.get("uuid", ""), self.metadata.get("chunk_id", 0), chunks

    def refuse(self, why: str) -> None:
        """Mark the entry as unreadable."""
        self.fault = CorruptEntry(f"{why} ({self.id.ledger}:{self.id.entry})")

    def join(self, earlier: list[ReceivedEntry]) -> None:
        """Join this last chunk with the `earlier` ones into the whole message. Set `fault` if its size is wrong."""
        first = earlier[0].id
        self.parts = (*_ids(earlier), self.id)
        self.id = self.id._replace(first_chunk=(first.ledger, first.entry))
        self._payload = b"".join([*(chunk._payload for chunk in earlier), self._payload])
        self.size = sum((chunk.size for chunk in earlier), self.size)
        if len(self._payload) != self.metadata.get("total_chunk_msg_size", len(self._payload)):
            self.fault = CorruptEntry(f"the chunks of a message are not of its size ({first.ledger}:{first.entry})")

    def messages(self) -> list[ReceivedMessage]:
        """Return the messages that the broker delivers with this entry. Messages of a batch that are already
        acknowledged are left out.

        Raise `CorruptEntry`, or `MissingLibrary` if a compression's package is not installed.
        """
        return [ReceivedMessage(self, *record) for record in self.records()]

    def records(self) -> list[tuple[int, bytes, Fields]]:
        """Return the messages that the broker delivers with this entry, as tuples: the index in the batch, the payload,
        and the message's own metadata. `ReceivedMessage` reads these metadata, which are mostly empty.
        """
        if self.fault is not None:
            raise self.fault
        payload = self._unpacked()
        if not self.is_batch:
            return [(-1, payload, self.metadata)]
        try:
            records = self._alike(payload) or self._batched(payload)
        except (Malformed, IndexError, struct.error) as error:
            raise CorruptEntry(f"a batch cannot be read ({self.id.ledger}:{self.id.entry})") from error
        if self._index_words:
            wanted = set(delivered_indexes(self._index_words))
            records = [record for record in records if record[0] in wanted]
        return [record for record in records if record[0] >= self._skipped] if self._skipped else records

    def skip(self, messages: int) -> None:
        """Leave out this many messages at the start of the batch."""
        self._skipped = messages

    def _unpacked(self) -> bytes:
        if self.metadata.get("encryption_keys"):
            raise CorruptEntry(f"an entry is encrypted ({self.id.ledger}:{self.id.entry})")
        kind, size = self.metadata.get("compression", 0), self.metadata.get("uncompressed_size", 0)
        return decompress(kind, self._payload, size, MAX_UNPACKED)

    def _alike(self, payload: bytes) -> list[tuple[int, bytes, Fields]]:
        """Return a batch's messages if all have the same size and no metadata, else an empty list.

        Each message has its index, its payload and no fields. `payload` is that of the batch, decompressed. Most
        batches are of this kind, and such a batch is read in few steps.
        """
        count, step = self.count, len(payload) // self.count
        if payload[4:5] != b"\x18" or step * count != len(payload):
            return []
        length, start = read_varint(payload, 5)
        if start != 4 + _SIZE.unpack_from(payload)[0] or start + length != step:
            return []
        if any(payload[at::step] != payload[at : at + 1] * count for at in range(start)):
            return []
        nothing: Fields = {}
        # An empty last message begins where the batch ends.
        starts = range(start, len(payload) + 1, step)
        return [(index, payload[at : at + length], nothing) for index, at in enumerate(starts)]

    def _batched(self, payload: bytes) -> list[tuple[int, bytes, Fields]]:
        records: list[tuple[int, bytes, Fields]] = []
        at, head = 0, b""
        length = 0
        fields: Fields = {}
        for index in range(self.count):
            # Consecutive messages of equal size and metadata have equal heads, which are parsed once.
            if head and payload.startswith(head, at):
                start = at + len(head)
            else:
                (size,) = _SIZE.unpack_from(payload, at)
                start = at + 4 + size
                head = payload[at:start]
                length, fields = _described(head[4:])
            at = start + length
            if length < 0 or at > len(payload):
                raise Malformed("a message is longer than its batch")
            if not fields.get("compacted_out"):
                records.append((index, payload[start:at], fields))
        return records


def _ids(chunks: Iterable[ReceivedEntry]) -> list[MessageId]:
    return [*dict.fromkeys(id for chunk in chunks for id in (*chunk.parts, chunk.id))]


def _described(data: bytes) -> tuple[int, Fields]:
    """Parse the metadata of a message in a batch. Return the size of the message's payload, and the metadata."""
    # Most messages have only the required size field.
    if data[:1] == b"\x18":
        length, end = read_varint(data, 1)
        if end == len(data) and length >> 31 == 0:
            return length, {}
    fields = decode("SingleMessageMetadata", data)
    return fields["payload_size"], fields


# The most incomplete messages that are kept: a dead sender leaves its message incomplete.
MAX_INCOMPLETE_MESSAGES = 16
# Chunks without those before them whose ids are kept.
_MAX_STRAYS = 1000
# Bytes counted for a chunk besides its content: else many small chunks could take any amount of memory.
CHUNK_OVERHEAD_BYTES = 1024
# The number of messages that are remembered: more chunks of them may arrive.
_MAX_REMEMBERED = 10_000


class Chunks:
    """The chunks, each an entry, of a consumer's large messages that have not arrived whole. Their size is limited.

    If one message alone exceeds the limit, its chunks are dropped, and the message becomes a faulty entry. If several
    messages together exceed the limit, the oldest message is dropped, because its sender may be dead. If another chunk
    of the dropped message arrives later, this chunk becomes a faulty entry. Faulty entries stay unacknowledged.

    Chunks that arrive without those before them are left out: `take` returns their ids, too. Copies of a chunk, which
    senders store after lost receipts, become its `parts`, to be acknowledged as well; copies after the whole message
    are in `later`. Chunks before the entry `wanted` only complete messages of which later chunks arrive. Only one
    thread may call the methods.
    """

    def __init__(self, wanted: tuple[int, ...] = (), goes_back: bool | None = None) -> None:
        self.goes_back = goes_back  # whether the consumer may have begun after the first chunks; None for a group
        # The first chunk that arrived without those before it, and how many chunks its message has; not for a group.
        self.stray: tuple[MessageId, int] | None = None
        self._wanted = wanted
        self._begun: dict[str, list[ReceivedEntry]] = {}
        self._sizes: dict[str, int] = {}
        # Whether a message was dropped and this is not reported yet; by hashes, because names may be long.
        self._known: dict[int, bool] = {}
        # The last chunks of whole messages, by hashes of what all their chunks have in common.
        self.ends: dict[int, MessageId] = {}
        # Strays that are no first chunks, and copies. They are useless once all messages before them are acknowledged.
        self.later: deque[MessageId] = deque(maxlen=_MAX_STRAYS)
        self._strays: deque[tuple[MessageId, int, int]] = deque(maxlen=_MAX_STRAYS)  # with arrivals and redeliveries
        self._rounds = deque([0] * 8, 8)  # how many entries were taken before the last calls of `take`

    def add(self, entry: ReceivedEntry, chunk: tuple[str, int, int], max_bytes: int) -> ReceivedEntry | None:
        """Add an entry, which is a `chunk` of a message. Return the whole message after its last chunk, else None.

        Return a faulty entry if the message cannot be completed. A chunk out of order is dropped.
        """
        uuid, number, of = chunk
        is_wanted = entry.id[:2] >= self._wanted
        kind = hash((uuid, of, entry.publish_time, entry.metadata.get("total_chunk_msg_size")))
        self.later += [entry.id] if self.ends.get(kind, entry.id) < entry.id else []
        if number == 0:  # a new message, or one that is sent again or redelivered from its first chunk on
            entry.parts = tuple(_ids(self._begun.get(uuid, ())))
            self._begin(uuid)
        earlier = self._begun.get(uuid)
        if earlier is None or len(earlier) != number:
            if earlier is not None and 0 <= number < len(earlier):
                earlier[number].parts = (*{*earlier[number].parts, entry.id},)
            else:
                lost = [*(earlier or ()), entry]
                self._strays += [(id, entry.arrival, each.redeliveries) for each in lost for id in _ids([each])]
                self._forget(uuid)
            if earlier is None:
                self.later.append(entry.id)
            if is_wanted and hash(uuid) not in self._known and self.goes_back is not None:
                self.stray = self.stray or (entry.id, of)
                self._remember(uuid, is_dropped=False)
            return entry if is_wanted and self._is_of_dropped_message(uuid, entry) else None
        size = self._sizes[uuid] + entry.size + CHUNK_OVERHEAD_BYTES
        claimed = entry.metadata.get("total_chunk_msg_size", 0) + of * CHUNK_OVERHEAD_BYTES
        if max(size, claimed) > max_bytes:
            self._forget(uuid)
            if not is_wanted:
                self._remember(uuid, is_dropped=True)
                return None
            entry.refuse(f"a message in {of} chunks is larger, or claims so, than the {max_bytes} bytes that are held")
            return entry
        if number + 1 == of:
            self._end(uuid, kind, entry.id)
            entry.join(earlier)
            return entry
        earlier.append(entry)
        self._sizes[uuid] = size
        self._make_room(max_bytes)
        return None

    def _begin(self, uuid: str) -> None:
        self._remember(uuid, is_dropped=False)
        self._begun[uuid], self._sizes[uuid] = [], 0

    def _remember(self, uuid: str, is_dropped: bool) -> None:
        self._known.pop(hash(uuid), None)
        self._known[hash(uuid)] = is_dropped
        if len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def _forget(self, uuid: str) -> None:
        self._begun.pop(uuid, None)
        self._sizes.pop(uuid, None)

    def _end(self, uuid: str, kind: int, id: MessageId) -> None:
        self._forget(uuid)
        self.ends.setdefault(kind, id)
        if len(self.ends) > _MAX_REMEMBERED:
            del self.ends[next(iter(self.ends))]

    def _make_room(self, max_bytes: int) -> None:
        while len(self._begun) > MAX_INCOMPLETE_MESSAGES or sum(self._sizes.values()) > max_bytes:
            oldest = next(iter(self._begun))
            self._forget(oldest)
            self._remember(oldest, is_dropped=True)

    def _is_of_dropped_message(self, uuid: str, entry: ReceivedEntry) -> bool:
        """Return whether this is the first chunk since its message was dropped, and if so make it a faulty entry."""
        if not self._known.get(hash(uuid)):
            return False
        self._known[hash(uuid)] = False
        entry.refuse("the first chunks of a message were dropped: it is too large, or too many others are incomplete")
        return True

    def take(self, taken: int, every: bool) -> list[MessageId]:
        """Forget incomplete messages, and return the ids of their chunks, to be delivered again.

        `taken` is how many entries of the consumer were taken. Unless `every` message is meant, one is kept if a chunk
        of it was taken since the last call, or since the last 2, 4 or 8 calls, the more often it was delivered again:
        so its chunks are kept for long enough in the end, however slowly they arrive.
        """
        self._rounds.extend([taken] * (8 if every else 0))
        ids = [id for id, *known in self._strays if self._is_idle(*known)]
        self._strays = deque((each for each in self._strays if not self._is_idle(*each[1:])), _MAX_STRAYS)
        for uuid, chunks in list(self._begun.items()):
            if self._is_idle(chunks[-1].arrival, chunks[0].redeliveries):
                ids += _ids(chunks)
                self._forget(uuid)
        self._rounds.append(taken)
        return ids

    def _is_idle(self, arrival: int, redeliveries: int) -> bool:
        return arrival <= self._rounds[-1 << min(redeliveries, 3)]

    @property
    def incomplete(self) -> bool:
        return bool(self._begun)
