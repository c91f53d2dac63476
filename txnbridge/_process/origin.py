"""`Origin`: the headers that say from where, and why, a dead letter or a message that waits for a retry has come."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from txnbridge._base.messages import Headers, Message, Position
from txnbridge._process.handler import reason_of

_Kind = TypeVar("_Kind", bound="Origin")

# The longest reason in a header: enough for a validator's error text, and far below every broker's limit for headers.
_MAX_REASON = 1000
_NUMBERS = ("partition", "timestamp", "attempts", "number", "due")


@dataclass(frozen=True)
class Origin:
    """The original place of a message, the group that could not process it, and the reason."""

    topic: str
    partition: int
    position: Position
    timestamp: int
    group: str
    attempts: int
    reason: str

    @classmethod
    def read(cls: type[_Kind], headers: Headers, prefix: str) -> _Kind | None:
        """Return the contents of the headers whose names begin with `prefix`; None if one is missing or damaged."""
        try:
            return cls(**{field.name: _parsed(field.name, headers[prefix + field.name]) for field in fields(cls)})
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
            return None


def origin_headers(
    prefix: str, message: Message, group: str, error: BaseException, attempts: int, transaction: str
) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message that is set aside: its own, then those that begin with `prefix`.

    These say where it came from, why and how often it failed, and which transaction sets it aside.
    """
    ours = {
        # The reason may contain data of the message, because readers of this topic get the message anyway.
        # An error may quote broken input, with halves of characters (lone surrogates).
        "reason": reason_of(error)[:_MAX_REASON].encode("utf-8", "backslashreplace").decode(),
        "topic": message.topic,
        "partition": str(message.partition),
        "position": json.dumps(message.position, separators=(",", ":")),
        "timestamp": str(message.timestamp),
        "group": group,
        "attempts": str(attempts),
        "transaction": transaction,
    }
    return [
        *without_prefix(message.headers, prefix),
        *((prefix + name, value.encode("utf-8", "surrogateescape")) for name, value in ours.items()),
    ]


def without_prefix(headers: Headers, prefix: str) -> list[tuple[str, bytes | None]]:
    """Return the headers whose names do not begin with `prefix`."""
    return [(name, value) for name, value in headers.raw if not name.startswith(prefix)]


def _parsed(name: str, text: str) -> Any:
    if name == "position":
        return tuple(int(part) for part in json.loads(text))
    if name not in _NUMBERS:
        return text
    float(number := int(text))  # raises an OverflowError for a time with which nobody can reckon
    return number
