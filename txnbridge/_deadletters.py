"""Dead letters: messages that were set aside as they were, with the reason in their headers."""

from __future__ import annotations

import json

from txnbridge._messages import Headers, Message
from txnbridge.errors import Poison

PREFIX = "txnbridge-dead-"
# Long enough for what a validator says about a message, short beside any broker's limit for headers.
_MAX_REASON = 1000


def reason_of(error: BaseException) -> str:
    """Why a message is poison, in one line: a `Poison` speaks for itself, other errors go with their class."""
    text = " ".join(str(error).split())
    if isinstance(error, Poison) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def dead_letter_headers(
    message: Message, group: str, error: BaseException, attempts: int
) -> list[tuple[str, bytes | None]]:
    """The headers of a dead letter: the message's own, then where it comes from and why it is here."""
    ours = {
        # It may quote the message: the message itself lies beside it.
        "reason": reason_of(error)[:_MAX_REASON],
        "topic": message.topic,
        "partition": str(message.partition),
        "position": json.dumps(message.position, separators=(",", ":")),
        "timestamp": str(message.timestamp),
        "group": group,
        "attempts": str(attempts),
    }
    return [
        *without_ours(message.headers),
        *((PREFIX + name, value.encode("utf-8", "surrogateescape")) for name, value in ours.items()),
    ]


def without_ours(headers: Headers) -> list[tuple[str, bytes | None]]:
    """The headers that the message had before it was set aside."""
    return [(name, value) for name, value in headers.raw if not name.startswith(PREFIX)]
