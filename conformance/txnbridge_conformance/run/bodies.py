"""The messages of a run: most bodies are short, some are empty, missing or large; some have a key, header or timestamp.

A body begins with a value of a history, `~`, a digest of the rest of the message and `|`, and ends with padding. A
message without a body, or with an empty body, has value and digest in its key, and the value in a header, too.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from txnbridge import Bridge, Capability, Message
from txnbridge_conformance.history import CHANGED

# How large bodies are, in bytes, and how often: above the second size one transaction would delay many others.
_LARGE, _VERY_LARGE = 100_000, 16_000_000
_LARGE_SHARE, _VERY_LARGE_SHARE, _EMPTY_SHARE = 0.01, 0.0005, 0.03
# The share of messages with a key, a header and a timestamp, and the age of the oldest timestamp in milliseconds.
_MORE_SHARE, _OLDEST_MS = 0.2, 3_600_000
# The space in a message for what a client adds to its body, such as headers.
_OVERHEAD = 4096

_PADDING, _DIGEST = "|", "~"
# Headers: of some messages; with the timestamp that the sender has chosen; with the value of a message without a body.
_HEADER, _TIME, _VALUE = "run-header", "run-timestamp", "run-value"
# The values of dead letters have this prefix, because each value of a history belongs to one message.
_DEAD = "dead:"
# The header of a dead letter with the transaction that sent it.
_SENDER = "txnbridge-dead-transaction"
_Pairs = Sequence[tuple[str, str | None]]


class Bodies:
    """Makes bodies of random sizes and kinds, as far as the broker of a bridge can store them."""

    def __init__(self, chance: random.Random, bridge: Bridge, plain: bool) -> None:
        """With `plain`, messages have neither headers nor timestamps, and mostly no key."""
        self._chance = chance
        self._plain, self._can = plain, bridge.capabilities
        self._largest = min(_VERY_LARGE, (bridge.limits.message_bytes or _VERY_LARGE) - _OVERHEAD)
        self._empty: list[bytes | None] = [b""] if bridge.capabilities[Capability.EMPTY_VALUE] else []
        if bridge.capabilities[Capability.TOMBSTONES]:
            self._empty.append(None)

    def make(self, value: str, key: bytes | None) -> tuple[bytes | None, dict[str, Any]]:
        """Return body and options of a message; its name in the history, `value`, is in the body if `key` is given."""
        kind = self._chance.random()
        headers: list[tuple[str, str | None]] = []
        options: dict[str, Any] = {}
        if not self._plain and self._chance.random() < _MORE_SHARE:
            options["headers"] = headers
            headers += [(_HEADER, f"of {value}")] * (2 if self._can[Capability.REPEATED_HEADERS] else 1)
            if self._can[Capability.TIMESTAMPS]:
                options["timestamp"] = int(time.time() * 1000) - self._chance.randrange(_OLDEST_MS)
                headers.append((_TIME, str(options["timestamp"])))
        if key is None and kind < _EMPTY_SHARE and self._empty:
            body = self._chance.choice(self._empty)
            if not self._plain:
                options["headers"] = [*headers, (_VALUE, value)]
            return body, {**options, "key": _named(value, body, None, options.get("headers", ()), b"")}
        key = key or (f"key/{value}".encode() if headers else None)
        largest = self._largest if kind > 1 - _VERY_LARGE_SHARE else min(_LARGE, self._largest)
        size = int(largest ** self._chance.uniform(0.5, 1)) if kind > 1 - _LARGE_SHARE else 0
        padding = _PADDING.encode() * max(0, size - len(value))
        return _named(value, b"", key, headers, padding), {**options, "key": key}


def _named(value: str, body: bytes | None, key: bytes | None, headers: _Pairs, padding: bytes) -> bytes:
    """Return a message's body: its value (its name in the history), a digest of the other parameters, the padding."""
    return f"{value}{_DIGEST}{_digest(body, key, headers, padding)}".encode() + padding


def _digest(body: bytes | None, key: bytes | None, headers: _Pairs, padding: bytes) -> str:
    mine = [(name, text) for wanted in (_HEADER, _TIME, _VALUE) for name, text in headers if name == wanted]
    return f"{zlib.crc32(repr((body, key, mine)).encode() + padding):08x}"


def text_of(message: Message) -> str:
    """Return the value by which a history names a received message, behind `CHANGED` if it is not as it was sent."""
    body, headers = message.value, message.headers
    key = (message.key.encode() if isinstance(message.key, str) else message.key) or None
    value = value_of(message.topic, body, key, headers)
    name, _, _ = (text := body or key or b"").partition(_PADDING.encode())
    digest = name.partition(_DIGEST.encode())[2].decode(errors="replace")
    known = _digest(b"" if body else body, key if body else None, headers.items_all(), text[len(name) :])
    # A dead letter is younger than its original.
    timely = _TIME not in headers or value.startswith(_DEAD) or headers[_TIME] == str(message.timestamp)
    return value if timely and (digest == known or not (digest or _VALUE in headers)) else CHANGED + value


def sent_as(message: Message) -> str:
    """Return the value by which a history names the sending of a received message, which may have changed since."""
    return text_of(message).removeprefix(CHANGED)


def value_of(topic: str, body: bytes | None, key: bytes | str | None, headers: Mapping[str, str]) -> str:
    """Return the name by which a history knows a message: it is in the body, or without a body in a header and the key.

    The name of a dead letter has also the transaction that sent it.
    """
    text = headers.get(_VALUE) or body or key or b""
    value = text if isinstance(text, str) else text.decode(errors="replace")
    value = value.partition(_PADDING)[0].partition(_DIGEST)[0]
    return dead_value(value, headers.get(_SENDER, "")) if topic.endswith("-dead") else value


def dead_value(value: str, transaction: str) -> str:
    """Return the name in the history of a dead letter that a transaction sends for the message with this value.

    A transaction that is aborted, and the one that repeats its work, send dead letters for the same message.
    """
    return f"{_DEAD}{value} in {transaction}"
