"""The bodies of a run's messages: most are short, some are empty, missing or large. Each contains a value of a history.

A body begins with the value, up to the first `|`; the rest is padding. The value of a message without a body, or with
an empty body, is its key.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from txnbridge import Bridge, Capability

# How large bodies are, in bytes, and how often: above the second size one transaction would delay many others.
_LARGE, _VERY_LARGE = 100_000, 16_000_000
_LARGE_SHARE, _VERY_LARGE_SHARE, _EMPTY_SHARE = 0.01, 0.0005, 0.03
# The space in a message for what a client adds to its body, such as headers.
_OVERHEAD = 4096

_PADDING = "|"
# The values of dead letters have this prefix, because each value of a history belongs to one message.
_DEAD = "dead:"
# The header of a dead letter with the transaction that sent it.
_SENDER = "txnbridge-dead-transaction"


class Bodies:
    """Makes bodies of random sizes and kinds, as far as the broker of a bridge can store them."""

    def __init__(self, chance: random.Random, bridge: Bridge) -> None:
        self._chance = chance
        self._largest = min(_VERY_LARGE, (bridge.limits.message_bytes or _VERY_LARGE) - _OVERHEAD)
        self._empty: list[bytes | None] = [b""] if bridge.capabilities[Capability.EMPTY_VALUE] else []
        if bridge.capabilities[Capability.TOMBSTONES]:
            self._empty.append(None)

    def make(self, value: str) -> tuple[bytes | None, bytes | None]:
        """Return the body and the key of a message; one of them contains `value`, the message's name in the history."""
        kind = self._chance.random()
        if kind < _EMPTY_SHARE and self._empty:
            return self._chance.choice(self._empty), value.encode()
        if kind > 1 - _VERY_LARGE_SHARE:
            return self._padded(value, self._largest), None
        if kind > 1 - _LARGE_SHARE:
            return self._padded(value, min(_LARGE, self._largest)), None
        return value.encode(), None

    def _padded(self, value: str, largest: int) -> bytes:
        size = int(largest ** self._chance.uniform(0.5, 1))
        return value.encode() + _PADDING.encode() * max(0, size - len(value))


def value_of(topic: str, body: bytes | None, key: bytes | str | None, headers: Mapping[str, str]) -> str:
    """Return the name by which a history knows a message: it is in the body, or in the key without a body.

    The name of a dead letter has also the transaction that sent it.
    """
    text = body or key or b""
    value = text if isinstance(text, str) else text.decode(errors="replace")
    value = value.partition(_PADDING)[0]
    return dead_value(value, headers.get(_SENDER, "")) if topic.endswith("-dead") else value


def dead_value(value: str, transaction: str) -> str:
    """Return the name in the history of a dead letter that a transaction sends for the message with this value.

    A transaction that is aborted, and the one that repeats its work, send dead letters for the same message.
    """
    return f"{_DEAD}{value} in {transaction}"
