"""Outcomes of transactions, and tokens, by which any process can ask for an outcome or bring it about."""

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

# A token travels in database columns, headers and command lines.
MAX_TOKEN_BYTES = 4096
_PREFIX = "txb1."  # the format's version
_READABLE = (_PREFIX,)  # the version before joins this tuple once there is one


class Outcome(Enum):
    """The outcome of a transaction. There are three outcomes, never two."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Decision(Enum):
    """The application's answer when it is asked; the decision log records the first two."""

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
    """The answer to the question for a token's transaction.

    `expires_at` (milliseconds since 1970) is the time at which a prepared transaction is aborted if nobody ends it;
    `reason` explains the state; `permanent` says that UNKNOWN will never change.
    """

    state: TokenState
    expires_at: int | None = None
    reason: str = ""
    permanent: bool = False


@dataclass(frozen=True)
class Token:
    """Names one transaction for ever. Programs store `str(token)`; it holds no secret.

    `how` is the backend's own data, by which it ends the transaction or finds its outcome. The token of a transaction
    that was not prepared (it comes with `OutcomeUnknown`) answers only `status`. `log` says where in the decision log
    the evidence about the transaction begins.
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
        # The checksum tells a token that was cut or mistyped from one of a transaction that does not exist.
        text = _PREFIX + _encode(zlib.crc32(packed).to_bytes(4, "big") + packed)
        if len(text) > MAX_TOKEN_BYTES:
            raise UsageError(f"this transaction's token would take {len(text)} bytes, more than {MAX_TOKEN_BYTES}")
        return text

    def __repr__(self) -> str:
        return f"<Token of {self.broker} transaction {self.transaction}>"

    @classmethod
    def parse(cls, text: str | Token) -> Token:
        """Read a token. Raise `InvalidToken`, and never anything else, for a text that is not a token."""
        if isinstance(text, Token):
            return text
        return _read_fields(_unpack(text))


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
        # Base64 has several texts for the same bytes; only the text that we write is a token.
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
