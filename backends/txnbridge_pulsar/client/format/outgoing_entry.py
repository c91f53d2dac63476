"""The content of an entry to send: one message, or a batch of messages.

Brokers work by entries, so messages in a batch cost little: a thousand messages of 100 bytes are sent about a hundred
times as fast in one batch.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .codec import Fields, tag, varint, with_length

Properties = Sequence[tuple[str, str]]


def key_fields(key: bytes | str | None) -> Fields:
    """Return the metadata fields of a key: text unchanged, bytes in base64 with a flag."""
    if key is None:
        return {}
    if isinstance(key, str):
        return {"partition_key": key}
    return {"partition_key": _base64(key).decode(), "partition_key_b64_encoded": True}


def _base64(key: bytes) -> bytes:
    return b2a_base64(key, newline=False)


def _encodable(properties: Properties) -> list[Fields]:
    return [{"key": name, "value": value} for name, value in properties]


@dataclass(frozen=True, slots=True)
class Single:
    """One message as an entry of its own. A payload of None is a tombstone."""

    payload: bytes | None
    key: bytes | str | None = None
    properties: Properties = ()
    event_time: int | None = None  # milliseconds since 1970

    def __repr__(self) -> str:
        return f"Single({len(self.payload or b'')} bytes)"

    @property
    def count(self) -> int:
        return 1

    def body(self) -> bytes:
        """Return the payload, not compressed."""
        return self.payload or b""

    def metadata(self) -> Fields:
        """Return the fields that the message adds to the entry's metadata."""
        return {
            "properties": _encodable(self.properties),
            **key_fields(self.key),
            "event_time": self.event_time,
            "null_value": True if self.payload is None else None,
        }


class MessageBatch:
    """Messages in one entry: the broker stores all of them or none, in the same transaction.

    Append messages until `size` or `count` suffices, then send the batch once. The broker routes the entry by the key
    of its first message, so on a key-shared subscription all messages of a batch must have the same key.

    `properties` are the entry's own. Only administrators see them: clients read the properties of each message.
    """

    __slots__ = ("_first", "_heads", "_parts", "count", "properties", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.properties: Properties = ()
        self._parts: list[bytes] = []
        self._heads: dict[int, bytes] = {}
        self._first: Fields = {}

    def append(
        self,
        payload: bytes | None,
        key: bytes | str | None = None,
        properties: Properties = (),
        event_time: int | None = None,
    ) -> None:
        """Add one message. A payload of None is a tombstone."""
        if not self.count:
            self._first = key_fields(key)
        if key is None and not properties and event_time is None and payload is not None:
            head = self._heads.get(len(payload)) or self._head(len(payload))
        else:
            head = _head(payload, key, properties, event_time)
            payload = payload or b""
        self._parts += (head, payload)
        self.size += len(head) + len(payload)
        self.count += 1

    def extend(self, payloads: Iterable[bytes]) -> None:
        """Add messages without metadata. This is the fastest way, above all for payloads of equal size."""
        payloads = payloads if isinstance(payloads, (list, tuple)) else list(payloads)
        lengths = set(map(len, payloads))
        heads = {length: self._heads.get(length) or self._head(length) for length in lengths}
        if len(heads) == 1:
            (head,) = heads.values()
            joined = head + head.join(payloads)
        else:
            joined = b"".join([part for payload in payloads for part in (heads[len(payload)], payload)])
        self._parts.append(joined)
        self.size += len(joined)
        self.count += len(payloads)

    def body(self) -> bytes:
        return b"".join(self._parts)

    def metadata(self) -> Fields:
        return {**self._first, "properties": _encodable(self.properties), "num_messages_in_batch": self.count}

    def _head(self, length: int) -> bytes:
        described = _PAYLOAD_SIZE + varint(length)
        head = self._heads[length] = len(described).to_bytes(4, "big") + described
        return head


Content = Single | MessageBatch

_KIND = "SingleMessageMetadata"
_PROPERTY, _NAME, _VALUE = tag(_KIND, "properties"), tag("KeyValue", "key"), tag("KeyValue", "value")
_KEY, _PAYLOAD_SIZE, _EVENT_TIME = (tag(_KIND, name) for name in ("partition_key", "payload_size", "event_time"))
_KEY_IS_BASE64, _NULL = tag(_KIND, "partition_key_b64_encoded") + b"\x01", tag(_KIND, "null_value") + b"\x01"


def _head(payload: bytes | None, key: bytes | str | None, properties: Properties, event_time: int | None) -> bytes:
    """Return the encoded metadata of a message in a batch. `encode` is not used, because this runs for each message."""
    parts: list[bytes] = []
    for name, value in properties:
        pair = _NAME + with_length(name.encode()) + _VALUE + with_length(value.encode())
        parts += (_PROPERTY, with_length(pair))
    if key is not None:
        parts += (_KEY, with_length(key.encode() if isinstance(key, str) else _base64(key)))
    parts += (_PAYLOAD_SIZE, varint(len(payload or b"")))
    if event_time is not None:
        parts += (_EVENT_TIME, varint(event_time))
    if isinstance(key, bytes):
        parts.append(_KEY_IS_BASE64)
    if payload is None:
        parts.append(_NULL)
    described = b"".join(parts)
    return len(described).to_bytes(4, "big") + described
