"""States, outcomes and tokens of transactions: by a token any process can ask for an outcome, or end a prepared one."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from txnbridge.errors import InvalidToken, UsageError


class State(Enum):
    """The states of a transaction. Each transaction is used once: it begins OPEN and ends in one of the last three."""

    OPEN = "open"  # it takes messages and acknowledgements
    FAILED = "failed"  # a message could not be stored, or an acknowledgement failed; it can only be aborted
    PREPARED = "prepared"  # it is durable and invisible; any process ends it by its token
    COMMITTING = "committing"  # the broker has been asked to commit and has not answered yet
    ABORTING = "aborting"  # the broker has been asked to abort and has not answered yet
    COMMITTED = "committed"  # the broker has said that it is committed
    ABORTED = "aborted"  # it certainly has no effect
    UNKNOWN = "unknown"  # the broker was asked to end it and no answer came; its token tells later


# The longest token: programs store tokens in database columns, headers and command lines.
MAX_TOKEN_BYTES = 4096
_PREFIX = "txb1."  # the version of the format of tokens
_READABLE = (_PREFIX,)  # a later version will add its own prefix and keep this one


class Outcome(Enum):
    """The outcome of a transaction. A program must handle all three: UNKNOWN means that no answer came yet."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Decision(Enum):
    """An application's decision about a transaction, such as the answer to a check-back.

    The decision log records only COMMIT and ABORT.
    """

    COMMIT = "commit"
    ABORT = "abort"
    UNDECIDED = "undecided"


class TokenState(Enum):
    """The present state of a token's transaction."""

    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Status:
    """The status of a token's transaction, as `bridge.status` returns it.

    `expires_at` (milliseconds since 1970) is the time at which a prepared transaction is aborted if no process ends it;
    `reason` explains the state; `permanent` is True if UNKNOWN will never change.
    """

    state: TokenState
    expires_at: int | None = None
    reason: str = ""
    permanent: bool = False


@dataclass(frozen=True)
class Token:
    """Identifies one transaction for ever. Programs store `str(token)`, which contains no secret.

    `how` is data by which the backend ends the transaction or finds the outcome. `log` says where in the decision log
    the records about the transaction begin. The token of a transaction that was not prepared (from `OutcomeUnknown`)
    can only be used for `status`.
    """

    broker: str
    cluster: str
    transaction: str
    how: Mapping[str, Any]
    prepared: bool
    expires_at: int | None = None
    messages: int = 0
    fingerprint: int | None = None
    log: Mapping[str, Any] | None = field(default=None)

    def __str__(self) -> str:
        fields = {
            "b": self.broker,
            "c": self.cluster,
            "t": self.transaction,
            "h": dict(self.how),
            "p": self.prepared,
            "e": self.expires_at,
            "n": self.messages,
            "f": self.fingerprint,
            "l": None if self.log is None else dict(self.log),
        }
        body = json.dumps({k: v for k, v in fields.items() if v is not None}, separators=(",", ":"), sort_keys=True)
        packed = body.encode()
        # By the checksum a truncated or mistyped token is recognised, and not taken for one of an unknown transaction.
        text = _PREFIX + _encode(zlib.crc32(packed).to_bytes(4, "big") + packed)
        if len(text) > MAX_TOKEN_BYTES:
            raise UsageError(f"this transaction's token would take {len(text)} bytes, more than {MAX_TOKEN_BYTES}")
        return text

    def __repr__(self) -> str:
        return f"<Token of {self.broker} transaction {self.transaction}>"

    @classmethod
    def parse(cls, text: str | Token) -> Token:
        """Return the token that a text contains. Raise `InvalidToken`, and no other error, if it contains none."""
        return text if isinstance(text, Token) else _read_fields(_unpack(text))


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _unpack(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise InvalidToken(f"a token is text, not {type(text).__name__}")
    text = text.strip()
    if not text.startswith(_READABLE):
        raise InvalidToken(f"this is not a txnbridge token (it does not begin with {_PREFIX!r})")
    if len(text) > MAX_TOKEN_BYTES:
        raise InvalidToken(f"this is not a txnbridge token: it is longer than {MAX_TOKEN_BYTES} bytes")
    try:
        body = text.split(".", 1)[1]
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        # Base64 has several texts for the same bytes; only the text that `str(token)` returns is accepted.
        if zlib.crc32(raw[4:]).to_bytes(4, "big") != raw[:4] or _encode(raw) != body:
            raise ValueError("checksum")
        fields = json.loads(raw[4:])
    except (ValueError, binascii.Error, UnicodeError, RecursionError):
        raise InvalidToken("this token is damaged: it was cut short or changed; copy it again in full") from None
    if not isinstance(fields, dict):
        raise InvalidToken("this token is damaged: it holds no fields")
    return fields


def _read_fields(fields: dict[str, Any]) -> Token:
    def take(name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = fields.get(name, default)
        if value is default and default is not ...:
            return default
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is int)
        if wrong or (kind is int and not 0 <= value < 1 << 64):
            raise InvalidToken(f"this token is damaged: field {name!r} is missing or of the wrong kind")
        return value

    return Token(
        broker=take("b", str),
        cluster=take("c", str),
        transaction=take("t", str),
        how=take("h", dict),
        prepared=take("p", bool),
        expires_at=take("e", int, None),
        messages=take("n", int, 0),
        fingerprint=take("f", int, None),
        log=take("l", dict, None),
    )
