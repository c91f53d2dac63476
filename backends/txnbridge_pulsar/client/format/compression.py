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


_PACKAGES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard", Compression.SNAPPY: "python-snappy"}


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


def check_installed(kind: Compression) -> None:
    """Raise `MissingLibrary` if the algorithm's package is missing. A producer calls this before its first message."""
    compress(kind, b"")


def _library(kind: Compression, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        package = _PACKAGES[kind]
        text = f"{kind.name} compression needs the package {package}: pip install {package}"
        raise MissingLibrary(text) from None


def _lz4_compress(data: bytes) -> bytes:
    return bytes(_library(Compression.LZ4, "lz4.block").compress(data, store_size=False))


def _lz4_decompress(data: bytes, size: int) -> bytes:
    return bytes(_library(Compression.LZ4, "lz4.block").decompress(data, uncompressed_size=size))


def _zlib_decompress(data: bytes, size: int) -> bytes:
    return zlib.decompressobj().decompress(data, size + 1)


def _zstd_compress(data: bytes) -> bytes:
    return bytes(_library(Compression.ZSTD, "zstandard").ZstdCompressor().compress(data))


def _zstd_decompress(data: bytes, size: int) -> bytes:
    # Decompress as a stream, up to the limit, whatever size the data claim.
    library = _library(Compression.ZSTD, "zstandard")
    with library.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
        return bytes(reader.read(size + 1))


def _snappy_compress(data: bytes) -> bytes:
    return bytes(_library(Compression.SNAPPY, "snappy").compress(data))


def _snappy_decompress(data: bytes, size: int) -> bytes:
    library = _library(Compression.SNAPPY, "snappy")
    if _snappy_size(data) != size:
        raise CorruptEntry("an entry is not of the size that it claims")
    return bytes(library.uncompress(data))


def _snappy_size(data: bytes) -> int:
    """Return the decompressed size that a snappy block claims. The caller checks it before decompressing, because the
    decoder allocates that many bytes at once.
    """
    return read_varint(data, 0)[0]


_compressors: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.LZ4: _lz4_compress,
    Compression.ZLIB: zlib.compress,
    Compression.ZSTD: _zstd_compress,
    Compression.SNAPPY: _snappy_compress,
}
_decompressors: dict[Compression, Callable[[bytes, int], bytes]] = {
    Compression.LZ4: _lz4_decompress,
    Compression.ZLIB: _zlib_decompress,
    Compression.ZSTD: _zstd_decompress,
    Compression.SNAPPY: _snappy_decompress,
}
