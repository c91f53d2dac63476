"""Decodes stored messages, their addresses and their properties."""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from txnbridge_rocketmq.client.errors import CannotDecompress, ProtocolViolation
from txnbridge_rocketmq.client.protocol.codes import Property, SystemFlag

# The magic number says whether the length of the topic takes one byte or two.
_SHORT_TOPIC, _LONG_TOPIC = -626843481, -626843477
_COMPRESSIONS = {0: "zlib", 1: "LZ4", 2: "ZSTD", 3: "zlib"}
# The limit for an unpacked body. Brokers accept 4 MiB by default, compressed or not; a body that unpacks to many times
# as much is an attack.
LARGEST_INFLATED = 64 << 20

_NAME_END, _VALUE_END = "\x01", "\x02"


@dataclass(frozen=True)
class OffsetId:
    """The address of a stored message: the broker's host and port, and the commit log offset."""

    host: str
    port: int
    log_offset: int

    @classmethod
    def parse(cls, text: str) -> OffsetId:
        """Return the address that a broker gives as hexadecimal text. Raise `ValueError` if malformed."""
        data = bytes.fromhex(text)
        if len(data) not in (16, 28):
            raise ValueError(f"an offset id has 32 or 56 hexadecimal digits, not {len(text)}")
        return cls.unpack(data)

    @classmethod
    def unpack(cls, data: bytes) -> OffsetId:
        """Return the address that these bytes encode: host, port and offset."""
        port, log_offset = struct.unpack(">iq", data[-12:])
        family = socket.AF_INET if len(data) == 16 else socket.AF_INET6
        return cls(socket.inet_ntop(family, data[:-12]), port, log_offset)

    def __str__(self) -> str:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return (socket.inet_pton(family, self.host) + struct.pack(">iq", self.port, self.log_offset)).hex().upper()


@dataclass(frozen=True)
class MessageExt:
    """A stored message, with all that the broker returns of it. RocketMQ has the same name for it.

    `prepared_offset` is the commit log offset of the half from which the message was published; 0 if it had none.
    `body` is the stored body, which `payload()` unpacks. Times are in milliseconds since 1970.
    """

    topic: str
    queue: int
    queue_offset: int
    offset_id: OffsetId
    system_flag: int
    born_time: int
    stored_time: int
    prepared_offset: int
    properties: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def log_offset(self) -> int:
        return self.offset_id.log_offset

    @property
    def unique_key(self) -> str | None:
        return self.properties.get(Property.UNIQUE_KEY)

    @property
    def holds_several(self) -> bool:
        """Whether the body is a batch of messages, which `unwrap` splits."""
        return bool(self.system_flag & SystemFlag.NEEDS_UNWRAPPING and self.system_flag & SystemFlag.INNER_BATCH)

    def payload(self, most: int = LARGEST_INFLATED) -> bytes:
        """Return the unpacked body. Raise `CannotDecompress` unless it is zlib or gzip and has at most `most` bytes."""
        if not self.system_flag & SystemFlag.COMPRESSED:
            return self.body
        return _inflate(self.body, (self.system_flag & SystemFlag.COMPRESSION) >> 8, most)


def decode_records(data: bytes) -> list[MessageExt]:
    """Decode consecutive records. Raise `ProtocolViolation` if a record is incomplete."""
    records, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at) if at + 4 <= len(data) else (0,)
        if not 4 < size <= len(data) - at:
            raise ProtocolViolation(f"a record of {size} bytes where {len(data) - at} are left")
        try:
            records.append(_record(data[at : at + size]))
        except (struct.error, ValueError, IndexError) as error:
            raise ProtocolViolation(f"a record that cannot be read: {type(error).__name__}") from None
        at += size
    return records


def _record(data: bytes) -> MessageExt:
    _size, magic, _crc, queue, _flag, queue_offset, log_offset, system_flag, born = struct.unpack_from(
        ">iiiiiqqiq", data
    )
    at = 48 + (20 if system_flag & SystemFlag.BORN_IPV6 else 8)
    (stored,) = struct.unpack_from(">q", data, at)
    host, at = _part(data, at + 8, 20 if system_flag & SystemFlag.STORED_IPV6 else 8)
    _reconsumed, prepared, body_size = struct.unpack_from(">iqi", data, at)
    body, at = _part(data, at + 16, body_size)
    if magic not in (_SHORT_TOPIC, _LONG_TOPIC):
        raise ValueError("an unknown magic number")
    width = 1 if magic == _SHORT_TOPIC else 2
    topic, at = _part(data, at + width, int.from_bytes(_part(data, at, width)[0], "big"))
    properties, _ = _part(data, at + 2, int.from_bytes(_part(data, at, 2)[0], "big"))
    return MessageExt(
        topic=_text(topic),
        queue=queue,
        queue_offset=queue_offset,
        offset_id=OffsetId.unpack(host + struct.pack(">q", log_offset)),
        system_flag=system_flag,
        born_time=born,
        stored_time=stored,
        prepared_offset=prepared,
        properties=unpack_properties(_text(properties)),
        body=body,
    )


def unwrap(record: MessageExt) -> Iterator[MessageExt]:
    """Yield the messages of a batch (`holds_several`), each with its own queue offset. Raise `ProtocolViolation`."""
    data, at, number = record.payload(), 0, 0
    while at < len(data):
        try:
            size, _magic, _crc, _flag, body_size = struct.unpack_from(">iiiii", data, at)
            body, end = _part(data, at + 20, body_size)
            properties, end = _part(data, end + 2, int.from_bytes(_part(data, end, 2)[0], "big"))
            if end != at + size:
                raise ValueError("lengths that do not agree")
        except (struct.error, ValueError) as error:
            raise ProtocolViolation(f"a batch that cannot be read: {type(error).__name__}") from None
        yield replace(
            record,
            queue_offset=record.queue_offset + number,
            system_flag=record.system_flag
            & ~(SystemFlag.NEEDS_UNWRAPPING | SystemFlag.INNER_BATCH | SystemFlag.COMPRESSED),
            properties=unpack_properties(_text(properties)),
            body=body,
        )
        at, number = end, number + 1


def _part(data: bytes, begin: int, size: int) -> tuple[bytes, int]:
    end = begin + size
    if size < 0 or end > len(data):
        raise ValueError("a field that ends after the record")
    return data[begin:end], end


def _text(data: bytes) -> str:
    # Other clients may have stored text that is not UTF-8. The message must stay readable.
    return data.decode("utf-8", "surrogateescape")


def _inflate(body: bytes, kind: int, most: int) -> bytes:
    if _COMPRESSIONS.get(kind) != "zlib":
        name = _COMPRESSIONS.get(kind, f"the unknown kind {kind}")
        raise CannotDecompress(f"the body is compressed with {name}, which this client does not read")
    # A gRPC proxy marks a gzip body like one of an old producer, which is zlib. This inflates both.
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        data = inflater.decompress(body, most)
    except zlib.error:
        raise CannotDecompress("the body is marked as compressed, but is neither zlib nor gzip data") from None
    if not inflater.eof:
        raise CannotDecompress(f"the body is cut off, or unpacks to more than {most} bytes")
    return data


def pack_properties(properties: Mapping[str, str]) -> str:
    """Return the properties as one text. Raise `ValueError` for a property that the broker would drop or break."""
    for name, value in properties.items():
        if not name or not value:
            raise ValueError(f"the property {name!r} is empty; brokers drop such properties")
        text = name + value
        if _NAME_END in text or _VALUE_END in text:
            raise ValueError(f"the property {name!r} holds a separator of properties (U+0001 or U+0002)")
        text.encode()
    return "".join(f"{name}{_NAME_END}{value}{_VALUE_END}" for name, value in properties.items())


def unpack_properties(text: str) -> dict[str, str]:
    """Decode the text of `pack_properties`. Leave out pairs without a name, as brokers do."""
    pairs = (pair.partition(_NAME_END) for pair in text.split(_VALUE_END))
    return {name: value for name, separator, value in pairs if name and separator}
