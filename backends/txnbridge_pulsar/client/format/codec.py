"""Encoding and decoding of the protocol-buffer messages in the schema, as dicts.

The codec is written by hand: it is small, needs no generated code, and handles invalid data safely. For any bytes
`decode` returns or raises `Malformed`, in time and memory bounded by their length.
Its tables are made from `messages.proto`, the protocol's messages in proto2 notation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Field:
    """A field of a Protocol Buffers message. `type` is the name of a scalar type or of another message."""

    label: str
    type: str
    name: str
    number: int


@dataclass
class MessageType:
    """The schema of one Protocol Buffers message: its fields in order, by name and by number."""

    name: str
    fields: tuple[Field, ...]
    by_name: dict[str, Field] = field(init=False)
    by_number: dict[int, Field] = field(init=False)
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {f.name: f for f in self.fields}
        self.by_number = {f.number: f for f in self.fields}
        self.required = frozenset(f.name for f in self.fields if f.label == "required")


def _parse(text: str) -> dict[str, MessageType]:
    types = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL):
        lines = re.findall(r"(required|optional|repeated) (\w+) (\w+) = (\d+);", body)
        fields = tuple(Field(label, type, field_name, int(number)) for label, type, field_name, number in lines)
        types[name] = MessageType(name, fields)
    return types


TYPES = _parse((files("txnbridge_pulsar.client.format") / "messages.proto").read_text("utf-8"))
# A command is one field of BaseCommand, whose number is also the command's type.
COMMANDS = {f.name: f.number for f in TYPES["BaseCommand"].fields if f.name != "type"}

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
# A message id can contain another message id, and so on; no valid message is nested deeper than this.
MAX_DEPTH = 8

Fields = dict[str, Any]


class Malformed(ValueError):
    """The bytes are not a valid Protocol Buffers message."""


def varint(number: int) -> bytes:
    """Encode a number: seven bits a byte, lowest first; a negative number as its 64-bit two's complement."""
    if 0 <= number < 128:
        return _ONE_BYTE[number]
    number &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


_ONE_BYTE = [bytes((number,)) for number in range(128)]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number encoded at offset `at`, and the offset after it. Raise `IndexError` if bytes are missing."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    number, shift = byte & 127, 7
    while shift < 70:
        at += 1
        byte = data[at]
        number |= (byte & 127) << shift
        if byte < 128:
            return number & 0xFFFFFFFFFFFFFFFF, at + 1
        shift += 7
    raise Malformed("a number has more than ten bytes")


def with_length(data: bytes) -> bytes:
    """Return `data` with its length in front: the encoded value of a field of bytes, or of a nested message."""
    return varint(len(data)) + data


def tag(type_name: str, field_name: str) -> bytes:
    """Return the encoded number and wire type of a field of a Protocol Buffers message, which precede its value."""
    return _WRITERS[type_name][field_name][0]


def encode(type_name: str, fields: Mapping[str, Any]) -> bytes:
    """Encode a Protocol Buffers message, its fields in the given order. Fields that are None are left out."""
    return _encode(_WRITERS[type_name], fields)


def decode(type_name: str, data: bytes) -> Fields:
    """Decode a Protocol Buffers message. Return the fields that are present, and skip unknown fields.

    If a field that is not `repeated` occurs several times, its last value counts. Bytes that are not UTF-8 are replaced
    in text; otherwise one invalid property would make a topic unreadable.
    """
    try:
        return _decode(TYPES[type_name], data, 0)
    except IndexError:
        raise Malformed(f"a {type_name} ends too early") from None


_Writer = tuple[bytes, "Callable[[Any], bytes]", bool]


def _encode(writers: dict[str, _Writer], fields: Mapping[str, Any]) -> bytes:
    parts: list[bytes] = []
    for name, value in fields.items():
        if value is None:
            continue
        tag, write, repeated = writers[name]
        if repeated:
            for item in value:
                parts += (tag, write(item))
        else:
            parts += (tag, write(value))
    return b"".join(parts)


def _message_writer(type_name: str) -> Callable[[Any], bytes]:
    def write(fields: Mapping[str, Any]) -> bytes:
        return with_length(_encode(_WRITERS[type_name], fields))

    return write


def _writer(field: Field) -> _Writer:
    match field.type:
        case "string":
            write: Callable[[Any], bytes] = lambda text: with_length(text.encode())  # noqa: E731
        case "bytes":
            write = with_length
        case scalar if scalar not in TYPES:
            write = varint
        case _:
            write = _message_writer(field.type)
    wire_type = _VARINT if write is varint else _BYTES
    return varint(field.number << 3 | wire_type), write, field.label == "repeated"


_WRITERS = {type.name: {field.name: _writer(field) for field in type.fields} for type in TYPES.values()}


# The decoding of one field: its name, the function that converts its number or bytes (None for a nested message), the
# name of its type, and whether it is repeated.
_FieldReader = tuple[str, "Callable[[Any], Any] | None", str, bool]


def _decode(type: MessageType, data: bytes, depth: int) -> Fields:
    if depth > MAX_DEPTH:
        raise Malformed(f"a {type.name} is nested too deep")
    fields: Fields = {}
    readers = _FIELD_READERS[type.name]
    at, end = 0, len(data)
    while at < end:
        tag, at = read_varint(data, at)
        value, at = _value(data, at, tag & 7)
        reader = readers.get(tag)
        if reader is None:
            _store_packed(fields, type, tag, value)
            continue
        name, read, of, repeated = reader
        value = _decode(TYPES[of], value, depth + 1) if read is None else read(value)
        if repeated:
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    if not type.required <= fields.keys():
        raise Malformed(f"a {type.name} lacks {', '.join(sorted(type.required - fields.keys()))}")
    return fields


def _value(data: bytes, at: int, wire_type: int) -> tuple[Any, int]:
    """Return the value at offset `at`, and the offset after the value. The field's tag precedes the value, and has the
    `wire_type`. Raise `IndexError` if bytes are missing.
    """
    if wire_type == _VARINT:
        return read_varint(data, at)
    if wire_type == _BYTES:
        length, at = read_varint(data, at)
        end = at + length
        value = data[at:end]
    elif wire_type in _FIXED:
        value, end = b"", at + _FIXED[wire_type]
    else:
        raise Malformed("a field is of an unknown kind")
    if end > len(data):
        raise IndexError(end)
    return value, end


def _store_packed(fields: Fields, type: MessageType, tag: int, value: Any) -> None:
    """Store a field whose wire type is not the schema's: numbers of a repeated field may be packed into one value. Skip
    the field if the schema does not have it.
    """
    field = type.by_number.get(tag >> 3)
    if field is None:
        return
    read = _READERS.get(field.type)
    if field.label != "repeated" or tag & 7 != _BYTES or read is None:
        raise Malformed(f"{field.name} is not of its type")
    fields.setdefault(field.name, []).extend(read(number) for number in _packed(value))


def _packed(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = read_varint(data, at)
        numbers.append(number)
    return numbers


def _signed32(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


_READERS: dict[str, Callable[[Any], Any]] = {
    "uint64": int,
    "int64": lambda number: number - (1 << 64) if number >> 63 else number,
    "uint32": lambda number: number & 0xFFFFFFFF,
    "int32": _signed32,
    "bool": bool,
    "string": lambda data: data.decode("utf-8", "replace"),
    "bytes": bytes,
}
_FIELD_READERS: dict[str, dict[int, _FieldReader]] = {
    type.name: {
        read_varint(_WRITERS[type.name][field.name][0], 0)[0]: (
            field.name,
            _READERS.get(field.type),
            field.type,
            field.label == "repeated",
        )
        for field in type.fields
    }
    for type in TYPES.values()
}
