"""Messages as Pulsar has them: keys and headers as text, and which partition a key goes to."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from functools import lru_cache

from txnbridge.errors import NotSupported
from txnbridge.spi import RawHeaders

# A header whose value is not text is kept in base64 under this and its name.
_BASE64 = "txnbridge-b64."
_KEYS_REMEMBERED = 10_000


def wire_key(key: bytes | None) -> str | bytes | None:
    """A key as it goes out: as text if it is text, as other clients write it, else as bytes."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


@lru_cache(_KEYS_REMEMBERED)
def key_hash(key: bytes) -> int:
    """What Pulsar's Java client takes modulo the number of partitions: the hash that Java has for text."""
    found = wire_key(key)
    text = found if isinstance(found, str) else base64.b64encode(key).decode()
    code = 0
    units = text.encode("utf-16-be")
    for at in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[at : at + 2], "big")) & 0xFFFF_FFFF
    return code & 0x7FFF_FFFF


def to_properties(headers: RawHeaders) -> list[tuple[str, str]]:
    """Headers as properties, one to one and in order."""
    return [_property(name, value) for name, value in headers]


def _property(name: str, value: bytes | None) -> tuple[str, str]:
    if value is None or not name:
        raise NotSupported(
            f"header {name!r}: Pulsar's properties are text with a name. Leave a header out that has no value, or give"
            " it an empty one; give one without a name a name"
        )
    if not name.startswith(_BASE64):
        try:
            return name, value.decode()
        except UnicodeDecodeError:
            pass
    return _BASE64 + name, base64.b64encode(value).decode()


def to_headers(properties: Iterable[tuple[str, str]]) -> list[tuple[str, bytes | None]]:
    """The other way round."""
    return [_header(name, text) for name, text in properties]


def _header(name: str, text: str) -> tuple[str, bytes | None]:
    if name.startswith(_BASE64):
        try:
            return name[len(_BASE64) :], base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # another client's own property
    return name, text.encode()
