"""Conversion of keys and headers to and from Pulsar's format, and the hash that maps a key to its partition."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from functools import lru_cache

from txnbridge.errors import NotSupported
from txnbridge.spi import RawHeaders

# A header whose value is not text is stored in base64, under its name with this prefix.
_BASE64 = "txnbridge-b64."
_CACHED_KEY_HASHES = 10_000


def key_on_wire(key: bytes | None) -> str | bytes | None:
    """Return a key to be sent, or None: as text if it is UTF-8, as other clients send text keys; otherwise as bytes."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


@lru_cache(_CACHED_KEY_HASHES)
def key_hash(key: bytes) -> int:
    """Return the hash of a key by Pulsar's Java client (`String.hashCode`), which chooses the key's partition."""
    on_wire = key_on_wire(key)
    text = on_wire if isinstance(on_wire, str) else base64.b64encode(key).decode()
    code = 0
    units = text.encode("utf-16-be")
    for at in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[at : at + 2], "big")) & 0xFFFF_FFFF
    return code & 0x7FFF_FFFF


def to_properties(headers: RawHeaders) -> list[tuple[str, str]]:
    """Return headers as message properties, in order. Raise `NotSupported` for a header without name or value."""
    return [_property(name, value) for name, value in headers]


def _property(name: str, value: bytes | None) -> tuple[str, str]:
    if value is None or not name:
        raise NotSupported(
            f"header {name!r}: Pulsar's properties need a name and a value. Leave the header out, or give it both; the"
            " value may be empty"
        )
    if not name.startswith(_BASE64):
        try:
            return name, value.decode()
        except UnicodeDecodeError:
            pass
    return _BASE64 + name, base64.b64encode(value).decode()


def to_headers(properties: Iterable[tuple[str, str]]) -> list[tuple[str, bytes | None]]:
    """Return message properties as headers in the same order."""
    return [_header(name, text) for name, text in properties]


def _header(name: str, text: str) -> tuple[str, bytes | None]:
    if name.startswith(_BASE64):
        try:
            return name[len(_BASE64) :], base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # another client's property that only begins with the prefix
    return name, text.encode()
