"""Puts messages together that were sent in several entries."""

from __future__ import annotations

import threading

from .incoming import ReceivedEntry

# A dead sender leaves its message incomplete; this many are waited for at once.
MOST_AT_ONCE = 16
# The cost of a chunk besides its bytes: else many small ones could take any amount of memory.
CHUNK_BYTES = 1024
# How many dropped messages are remembered, to report them if more of their chunks come.
_REMEMBERED = 1000


class Chunks:
    """The incomplete messages of one consumer, limited in bytes over all of them.

    A message over the limit becomes a faulty entry, and none of it is kept. If several do not fit together, the oldest
    is dropped, as its sender may be dead; its next chunk, if one comes, becomes a faulty entry. Faulty entries stay
    unacknowledged.

    One thread adds; any thread may clear.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, list[ReceivedEntry]] = {}
        self._sizes: dict[str, int] = {}
        self._dropped: dict[int, None] = {}  # hashes, because names may be long

    def add(self, entry: ReceivedEntry, chunk: tuple[str, int, int], max_bytes: int) -> ReceivedEntry | None:
        """Return the whole message at its last chunk, a faulty entry, or None. A chunk out of order is dropped."""
        with self._lock:
            return self._add(entry, chunk, max_bytes)

    def _add(self, entry: ReceivedEntry, chunk: tuple[str, int, int], max_bytes: int) -> ReceivedEntry | None:
        uuid, number, of = chunk
        if number == 0:  # perhaps redelivered from the start
            self._begin(uuid)
        earlier = self._begun.get(uuid)
        if earlier is None or len(earlier) != number:
            repeated = earlier is not None and 0 <= number < len(earlier) and earlier[number].id == entry.id
            if not repeated:
                self._forget(uuid)
            return entry if self._is_of_dropped_message(uuid, entry) else None
        size = self._sizes[uuid] + entry.size + CHUNK_BYTES
        claimed = entry.metadata.get("total_chunk_msg_size", 0) + of * CHUNK_BYTES
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
        while len(self._begun) > MOST_AT_ONCE or sum(self._sizes.values()) > max_bytes:
            oldest = next(iter(self._begun))
            self._forget(oldest)
            self._dropped[hash(oldest)] = None
            if len(self._dropped) > _REMEMBERED:
                del self._dropped[next(iter(self._dropped))]

    def _is_of_dropped_message(self, uuid: str, entry: ReceivedEntry) -> bool:
        """Return whether the chunk is of a dropped message; True once for each message."""
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
