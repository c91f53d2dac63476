"""The format of headers in the file: a JSON list of pairs, with each value's bytes as Latin-1 characters."""

from __future__ import annotations

import json

from txnbridge.errors import StorageFailed
from txnbridge.spi import NO_HEADERS, Headers, RawHeaders


def pack(headers: RawHeaders | None) -> str | None:
    """Return headers as text for the file; None if there are none."""
    if not headers:
        return None
    # The JSON is pure ASCII, because SQLite's UTF-8 cannot store the lone surrogates that a name may have.
    pairs = [(name, None if value is None else value.decode("latin-1")) for name, value in headers]
    return json.dumps(pairs, separators=(",", ":"))


def unpack_raw(text: str | None) -> list[tuple[str, bytes | None]]:
    """Return the pairs of name and value from stored headers. Raise `StorageFailed` if they are damaged."""
    if not text:
        return []
    try:
        return [(str(name), None if value is None else value.encode("latin-1")) for name, value in json.loads(text)]
    except (ValueError, TypeError, AttributeError, RecursionError):  # the error's text would quote the headers
        raise StorageFailed("the headers of a message are damaged: restore a copy of the file") from None


def unpack(text: str | None) -> Headers:
    """Return `Headers` from stored headers. Raise `StorageFailed` if they are damaged."""
    return Headers(unpack_raw(text)) if text else NO_HEADERS
