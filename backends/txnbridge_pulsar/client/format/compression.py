"""Compression of entry payloads: zlib from the standard library, other algorithms if their packages are installed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from importlib import import_module
from typing import Any

from txnbridge_pulsar.client.errors import CorruptEntry, MissingLibrary

from .codec import read_varint


class Compression(IntEnum):
    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


# The module of each algorithm that is not in the standard library, and the package that has it.
_MODULES = {
    Compression.LZ4: ("lz4.block", "lz4"),
    Compression.ZSTD: ("zstandard", "zstandard"),
    Compression.SNAPPY: ("snappy", "python-snappy"),
}


def compress(kind: Compression, data: bytes) -> bytes:
    """Compress a payload. Raise `MissingLibrary` if the compression's package is not installed."""
    return data if kind is Compression.NONE else _compressors[kind](data)


def decompress(kind: int, data: bytes, size: int, limit: int) -> bytes:
    """Decompress a payload. The result must have `size` bytes, as the entry's metadata say, and at most `limit` bytes.

    Raise `CorruptEntry` for a result of any other size, `MissingLibrary` if the package is not installed. If `size` is
    above the limit, raise before decompressing.
    """
    if kind == Compression.NONE:
        return data
    if kind not in Compression._value2member_map_:
        raise CorruptEntry(f"an entry has the unknown compression {kind}")
    if size > limit:
        raise CorruptEntry(f"an entry claims {size} bytes unpacked; the limit is {limit}")
    try:
        unpacked = _decompressors[Compression(kind)](data, size)
    except MissingLibrary:
        raise
    except Exception as error:  # each library has exceptions of its own
        raise CorruptEntry(f"an entry cannot be unpacked: {type(error).__name__}") from error
    if len(unpacked) != size:
        raise CorruptEntry("an entry is not of the size that it claims")
    return unpacked


def _library(kind: Compression) -> Any:
    module, package = _MODULES[kind]
    try:
        return import_module(module)
    except ImportError:
        text = f"{kind.name} compression needs the package {package}: pip install {package}"
        raise MissingLibrary(text) from None


def _zstd_decompress(data: bytes, size: int) -> bytes:
    # Decompress as a stream, up to the limit, whatever size the data claim.
    library = _library(Compression.ZSTD)
    with library.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
        return bytes(reader.read(size + 1))


def _snappy_decompress(data: bytes, size: int) -> bytes:
    library = _library(Compression.SNAPPY)
    # Checked before decompressing, because the decoder allocates at once as many bytes as the data claim.
    if read_varint(data, 0)[0] != size:
        raise CorruptEntry("an entry is not of the size that it claims")
    return bytes(library.uncompress(data))


_compressors: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.LZ4: lambda data: _library(Compression.LZ4).compress(data, store_size=False),
    Compression.ZLIB: zlib.compress,
    Compression.ZSTD: lambda data: _library(Compression.ZSTD).ZstdCompressor().compress(data),
    Compression.SNAPPY: lambda data: _library(Compression.SNAPPY).compress(data),
}
_decompressors: dict[Compression, Callable[[bytes, int], bytes]] = {
    Compression.LZ4: lambda data, size: _library(Compression.LZ4).decompress(data, uncompressed_size=size),
    Compression.ZLIB: lambda data, size: zlib.decompressobj().decompress(data, size + 1),
    Compression.ZSTD: _zstd_decompress,
    Compression.SNAPPY: _snappy_decompress,
}
