"""Frames: the encoding of commands on a connection, and of the entry that follows a SEND or MESSAGE command."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c as crc32c

from txnbridge_pulsar.client.errors import CorruptEntry, ProtocolError

from .codec import COMMANDS, TYPES, Fields, Malformed, decode, encode, read_varint, varint

_TWO_SIZES = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_CHECKED = struct.Struct(">HII")  # magic, checksum, size of the metadata
_CHECKSUM_MARK = b"\x0e\x01"
_BROKER_METADATA_MARK = b"\x0e\x02"

# A broker's default limit for a message, and by how much a frame may be larger: a namespace's topics are one frame.
DEFAULT_MAX_MESSAGE = 5 * 1024 * 1024
FRAME_ALLOWANCE = 64 * 1024 * 1024
# The size of the receive buffer, which grows for a larger frame.
_BUFFER = 256 * 1024

_TYPE_NAMES = {number: TYPES["BaseCommand"].by_name[name].type for name, number in COMMANDS.items()}
_NAMES = {number: name for name, number in COMMANDS.items()}
# A command begins with its type, then the one field of that number.
_PREFIXES = {name: b"\x08" + varint(number) + varint(number << 3 | 2) for name, number in COMMANDS.items()}


class Frame(NamedTuple):
    """A received frame: a command's name (empty if unknown) and fields, and the entry after the command (`tail`)."""

    name: str
    fields: Fields
    tail: bytes


def command(name: str, **fields: Any) -> bytes:
    base = _base(name, fields)
    return _TWO_SIZES.pack(4 + len(base), len(base)) + base


def send_command(fields: Fields, metadata: bytes, payload: bytes) -> bytes:
    """Return a SEND frame: the command and the entry that the broker is to store."""
    base = _base("send", fields)
    size = _SIZE.pack(len(metadata))
    checksum = crc32c.extend(crc32c.value(size + metadata), payload)
    head = _TWO_SIZES.pack(4 + len(base) + 10 + len(metadata) + len(payload), len(base))
    return b"".join((head, base, _CHECKED.pack(0x0E01, checksum, len(metadata)), metadata, payload))


def _base(name: str, fields: Fields) -> bytes:
    body = encode(TYPES["BaseCommand"].by_name[name].type, fields)
    return _PREFIXES[name] + varint(len(body)) + body


def parse(data: bytes) -> Frame:
    """Parse a frame without its leading size. Raise `ProtocolError` if the frame is invalid."""
    try:
        return _parse(data)
    except (Malformed, IndexError, struct.error) as error:
        raise ProtocolError(f"the broker sent a frame that cannot be read: {error}") from error


def _parse(data: bytes) -> Frame:
    (size,) = _SIZE.unpack_from(data)
    end = 4 + size
    if end > len(data):
        raise Malformed("the command is longer than its frame")
    number, bodies = 0, {}
    for tag, value in _fields(data[4:end]):
        if tag == 8:
            number = value
        else:
            bodies[tag] = value
    body = bodies.get(number << 3 | 2)
    name = _NAMES.get(number, "")
    if not name or body is None:
        if name or not number:
            raise Malformed("a command without its body")
        return Frame("", {}, b"")
    return Frame(name, decode(_TYPE_NAMES[number], body), data[end:])


def _fields(base: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(base):
        tag, at = read_varint(base, at)
        value: Any
        if tag & 7 == 0:
            value, at = read_varint(base, at)
        elif tag & 7 == 2:
            size, at = read_varint(base, at)
            value, at = base[at : at + size], at + size
        else:
            raise Malformed("a command has a field of an unknown kind")
        if at > len(base):
            raise Malformed("a command ends too early")
        yield tag, value


def split_entry(tail: bytes) -> tuple[Fields, bytes]:
    """Divide an entry into its metadata and its payload as stored. Raise `CorruptEntry` if the entry is invalid."""
    try:
        return _split_entry(tail)
    except (Malformed, struct.error) as error:
        raise CorruptEntry(f"an entry cannot be read: {error}") from error


def _split_entry(tail: bytes) -> tuple[Fields, bytes]:
    at = 0
    if tail[:2] == _BROKER_METADATA_MARK:
        (size,) = _SIZE.unpack_from(tail, 2)
        at = 6 + size  # the metadata that the broker has added are not needed
    if tail[at : at + 2] == _CHECKSUM_MARK:
        (checksum,) = _SIZE.unpack_from(tail, at + 2)
        at += 6
        if crc32c.value(tail[at:]) != checksum:
            raise CorruptEntry("an entry's checksum is wrong")
    (size,) = _SIZE.unpack_from(tail, at)
    end = at + 4 + size
    if end > len(tail):
        raise CorruptEntry("an entry's metadata is longer than the entry")
    return decode("MessageMetadata", tail[at + 4 : end]), tail[end:]


class FrameReader:
    """Cuts received bytes into frames, and keeps the bytes of an incomplete frame. `limit` is the largest frame.

    Receive n bytes into `space()`, then take the completed frames from `frames(n)`.
    """

    def __init__(self, limit: int = DEFAULT_MAX_MESSAGE + FRAME_ALLOWANCE) -> None:
        self.limit = limit
        self._buffer = bytearray(_BUFFER)
        self._end = 0

    def space(self) -> memoryview:
        """Return the free part of the buffer for the next bytes; it is never empty."""
        return memoryview(self._buffer)[self._end :]

    def frames(self, received: int) -> list[bytes]:
        """Return the frames, without sizes, that new bytes complete. Raise `ProtocolError` for one above the limit."""
        self._end += received
        at, frames = 0, []
        with memoryview(self._buffer) as view:
            while self._end - at >= 4:
                (size,) = _SIZE.unpack_from(view, at)
                if not 4 <= size <= self.limit:
                    raise ProtocolError(f"the broker sent a frame of {size} bytes; the limit is {self.limit}")
                if at + 4 + size > self._end:
                    break
                frames.append(bytes(view[at + 4 : at + 4 + size]))
                at += 4 + size
        self._make_room(at)
        return frames

    def _make_room(self, at: int) -> None:
        rest = self._end - at
        needed = _BUFFER
        if rest >= 4:
            needed = max(needed, 4 + _SIZE.unpack_from(self._buffer, at)[0])
        if needed > len(self._buffer) or len(self._buffer) > 4 * needed:
            larger = bytearray(needed)
            larger[:rest] = self._buffer[at : self._end]
            self._buffer = larger
        elif at:
            self._buffer[:rest] = self._buffer[at : self._end]
        self._end = rest
