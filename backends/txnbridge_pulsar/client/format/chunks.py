"""Reassembly of large messages that a producer has sent in several chunks, each an entry of its own."""

from __future__ import annotations

import threading

from .received_entries import ReceivedEntry

# The most incomplete messages that are kept: a dead sender leaves its message incomplete.
MAX_INCOMPLETE_MESSAGES = 16
# Bytes counted for a chunk besides its content: else many small chunks could take any amount of memory.
CHUNK_OVERHEAD_BYTES = 1024
# The number of dropped messages that are remembered, to report them if more of their chunks arrive.
_MAX_REMEMBERED_DROPS = 1000


class Chunks:
    """The chunks of a consumer's large messages that have not arrived whole. Their total size is limited.

    If one message alone exceeds the limit, its chunks are dropped, and the message becomes a faulty entry. If several
    messages together exceed the limit, the oldest message is dropped, because its sender may be dead. If another chunk
    of the dropped message arrives later, this chunk becomes a faulty entry. Faulty entries stay unacknowledged.

    One thread calls `add`; any thread may call `clear`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, list[ReceivedEntry]] = {}
        self._sizes: dict[str, int] = {}
        self._dropped: dict[int, None] = {}  # hashes, because names may be long

    def add(self, entry: ReceivedEntry, chunk: tuple[str, int, int], max_bytes: int) -> ReceivedEntry | None:
        """Add an entry, which is a `chunk` of a message. Return the whole message after its last chunk, else None.

        Return a faulty entry if the message cannot be completed. A chunk out of order is dropped.
        """
        with self._lock:
            return self._add(entry, chunk, max_bytes)

    def _add(self, entry: ReceivedEntry, chunk: tuple[str, int, int], max_bytes: int) -> ReceivedEntry | None:
        uuid, number, of = chunk
        if number == 0:  # a new message, or one that is redelivered from its first chunk on
            self._begin(uuid)
        earlier = self._begun.get(uuid)
        if earlier is None or len(earlier) != number:
            repeated = earlier is not None and 0 <= number < len(earlier) and earlier[number].id == entry.id
            if not repeated:
                self._forget(uuid)
            return entry if self._is_of_dropped_message(uuid, entry) else None
        size = self._sizes[uuid] + entry.size + CHUNK_OVERHEAD_BYTES
        claimed = entry.metadata.get("total_chunk_msg_size", 0) + of * CHUNK_OVERHEAD_BYTES
        if max(size, claimed) > max_bytes:
            self._forget(uuid)
            entry.refuse(f"a message in {of} chunks is larger, or claims so, than the {max_bytes} bytes that are held")
            return entry
        if number + 1 == of:
            self._forget(uuid)
            entry.join(earlier)
            return entry
        earlier.append(entry)
        self._sizes[uuid] = size
        self._make_room(max_bytes)
        return None

    def _begin(self, uuid: str) -> None:
        self._dropped.pop(hash(uuid), None)
        self._begun[uuid], self._sizes[uuid] = [], 0

    def _forget(self, uuid: str) -> None:
        self._begun.pop(uuid, None)
        self._sizes.pop(uuid, None)

    def _make_room(self, max_bytes: int) -> None:
        while len(self._begun) > MAX_INCOMPLETE_MESSAGES or sum(self._sizes.values()) > max_bytes:
            oldest = next(iter(self._begun))
            self._forget(oldest)
            self._dropped[hash(oldest)] = None
            if len(self._dropped) > _MAX_REMEMBERED_DROPS:
                del self._dropped[next(iter(self._dropped))]

    def _is_of_dropped_message(self, uuid: str, entry: ReceivedEntry) -> bool:
        """Return whether this is the first chunk since its message was dropped, and if so make it a faulty entry."""
        if hash(uuid) not in self._dropped:
            return False
        del self._dropped[hash(uuid)]
        entry.refuse("the first chunks of a message were dropped, because too many others were incomplete as well")
        return True

    @property
    def incomplete(self) -> bool:
        return bool(self._begun)

    def clear(self) -> None:
        with self._lock:
            self._begun.clear()
            self._sizes.clear()
            self._dropped.clear()
