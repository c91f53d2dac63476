"""Encodes and decodes requests and responses as frames in the stream of a connection.

A frame is the length of the rest (4 bytes, big endian), the header's serialization type (1 byte), the header's length
(3 bytes), the header and a body. Headers are written as JSON, which every version reads and which Python writes faster
than the binary type. Both types are read, because servers write the type that their own settings name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from txnbridge_rocketmq.client.errors import ErrorResponse, ProtocolViolation
from txnbridge_rocketmq.client.protocol.codes import ResponseCode

ANSWER, ONE_WAY = 1, 2  # bits of the header's flag

# The language and version that the client announces. Name servers respond to this version in standard JSON.
_LANGUAGE, _VERSION = "OTHER", 485
_JSON, _BINARY = 0, 1
# The largest frame that brokers accept.
LARGEST_FRAME = 16 << 20
# The largest frame that the client accepts: a look-up by key may return 64 messages of 4 MiB, with 64 KiB of metadata
# each. The first bytes of other protocols (HTTP, TLS) read as a larger length.
LARGEST_ANSWER = 64 * ((4 << 20) + (64 << 10))
# The largest header. It holds a message's properties, which are limited to 32 KB.
_LARGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class RemotingCommand:
    """A decoded frame: a request, or the response to the request with the same `opaque`."""

    code: int
    opaque: int = 0
    flag: int = 0
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    remark: str = ""
    body: bytes = field(default=b"", repr=False)

    @property
    def is_answer(self) -> bool:
        return bool(self.flag & ANSWER)

    @property
    def wants_answer(self) -> bool:
        return not self.flag & (ANSWER | ONE_WAY)


def encode(command: RemotingCommand) -> bytes:
    """Return the command as a frame. Raise `ValueError` if the frame is larger than brokers accept."""
    header: dict[str, Any] = {
        "code": command.code,
        "language": _LANGUAGE,
        "version": _VERSION,
        "opaque": command.opaque,
        "flag": command.flag,
        "extFields": dict(command.fields),
        "serializeTypeCurrentRPC": "JSON",
    }
    if command.remark:
        header["remark"] = command.remark
    head = json.dumps(header, separators=(",", ":")).encode()
    length = 4 + len(head) + len(command.body)
    if length > LARGEST_FRAME:
        raise ValueError(f"a request of {length} bytes is more than the {LARGEST_FRAME} that a broker takes")
    return struct.pack(">ii", length, _JSON << 24 | len(head)) + head + command.body


class FrameDecoder:
    """Splits a stream into commands. It buffers at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[RemotingCommand]:
        """Yield the commands that these bytes complete. After `ProtocolViolation` the stream cannot be read further."""
        self._buffer += data
        while (end := self._end()) is not None:
            frame = bytes(memoryview(self._buffer)[4:end])
            del self._buffer[:end]
            yield decode(frame)

    def _end(self) -> int | None:
        """Return the end of the first frame in the buffer, None if the frame is incomplete."""
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack_from(">i", self._buffer)
        if not 4 <= length <= LARGEST_ANSWER:
            raise ProtocolViolation(f"the peer announced a frame of {length} bytes; this is not RocketMQ's protocol")
        end = 4 + int(length)
        return end if len(self._buffer) >= end else None


def decode(frame: bytes) -> RemotingCommand:
    """Return the request or response in a frame, given without its length field. Raise `ProtocolViolation`."""
    (word,) = struct.unpack_from(">I", frame)
    kind, size = word >> 24, word & 0xFFFFFF
    if size > min(_LARGEST_HEADER, len(frame) - 4):
        raise ProtocolViolation(f"a header of {size} bytes in a frame of {len(frame)}")
    header, body = frame[4 : 4 + size], frame[4 + size :]
    try:
        if kind == _JSON:
            return _from_json(header, body)
        if kind == _BINARY:
            return _from_binary(header, body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise ProtocolViolation(f"a header that cannot be read: {type(error).__name__}") from None
    raise ProtocolViolation(f"a header of the unknown kind {kind}")


def _from_json(header: bytes, body: bytes) -> RemotingCommand:
    read = json.loads(header)
    code, opaque, flag = read["code"], read["opaque"], read["flag"]
    if not (type(code) is type(opaque) is type(flag) is int):
        raise TypeError("not numbers")
    # A field without a value is null in JSON.
    fields = {name: str(value) for name, value in (read.get("extFields") or {}).items() if value is not None}
    return RemotingCommand(code, opaque, flag, fields, str(read.get("remark") or ""), body)


def _from_binary(header: bytes, body: bytes) -> RemotingCommand:
    code, _language, _version, opaque, flag = struct.unpack_from(">hBhii", header)
    remark, at = _text(header, 13, ">i")
    (size,) = struct.unpack_from(">i", header, at)
    at, end = at + 4, at + 4 + size
    if size < 0 or end > len(header):
        raise ValueError("fields that end after the header")
    fields: dict[str, str] = {}
    while at < end:
        name, at = _text(header, at, ">h")
        fields[name], at = _text(header, at, ">i")
    return RemotingCommand(code, opaque, flag, fields, remark, body)


def _text(data: bytes, at: int, size_format: str) -> tuple[str, int]:
    (size,) = struct.unpack_from(size_format, data, at)
    begin = at + struct.calcsize(size_format)
    end = begin + size
    if size < 0 or end > len(data):
        raise ValueError("a text that ends after the header")
    return data[begin:end].decode(), end


T = TypeVar("T")

_SUCCESS = frozenset({int(ResponseCode.SUCCESS)})
# The accepted codes of requests whose `read` calls `is_absent`.
OR_ABSENT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.SYSTEM_ERROR)})


@dataclass(frozen=True)
class RpcRequest(Generic[T]):
    """One request. `action` names it in errors; `read` decodes a response whose code is in `accepted` to the result."""

    action: str
    code: int
    read: Callable[[RemotingCommand], T] = field(repr=False)
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)
    accepted: frozenset[int] = field(default=_SUCCESS, repr=False)

    def result(self, answer: RemotingCommand) -> T:
        """Decode a response. Raise `ErrorResponse`, or `ProtocolViolation` if the response cannot be decoded."""
        if answer.code not in self.accepted:
            raise ErrorResponse(answer.code, answer.remark, self.action)
        try:
            return self.read(answer)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, struct.error) as error:
            raise ProtocolViolation(
                f"{self.action}: the answer cannot be read: {type(error).__name__}", may_have_had_effect=True
            ) from None


def fields(**given: object) -> dict[str, str]:
    """Return the header fields of a request as text, without fields whose value is None."""
    return {name: text(value) for name, value in given.items() if value is not None}


def text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


def as_body(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def document(answer: RemotingCommand) -> dict[str, Any]:
    read = json.loads(answer.body)
    if not isinstance(read, dict):
        raise TypeError("not an object")
    return read


def is_absent(answer: RemotingCommand, words: str, action: str) -> bool:
    """Return whether the broker answered, by SYSTEM_ERROR with these words, that the requested object is missing.

    Return False for a success. Raise `ErrorResponse` for another error.
    """
    if answer.code == ResponseCode.SUCCESS:
        return False
    if words in answer.remark:
        return True
    raise ErrorResponse(answer.code, answer.remark, action)


def nothing(answer: RemotingCommand) -> None:
    """Decode a response without contents: the `read` function of requests that only succeed or fail."""
