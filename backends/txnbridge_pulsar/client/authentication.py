"""Credentials, which the broker asks for at each connection, and again when they expire."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Authentication(Protocol):
    """A way to authenticate. `data` returns the current credentials; it is called each time and may block briefly."""

    method: str

    def data(self) -> bytes: ...


class NoAuthentication:
    """No credentials, for brokers without authentication."""

    method = "none"

    def data(self) -> bytes:
        return b""


class TokenAuthentication:
    """A token, or a function that returns the current token, called at each connection and when a token expires."""

    method = "token"

    def __init__(self, token: str | Callable[[], str]) -> None:
        self._token = token

    def __repr__(self) -> str:
        return "TokenAuthentication(...)"

    def data(self) -> bytes:
        token = self._token() if callable(self._token) else self._token
        return token.strip().encode()


def token_file(path: str | Path) -> TokenAuthentication:
    """Return the token of a file, which is read again whenever the broker asks."""
    return TokenAuthentication(lambda: Path(path).read_text())


class BasicAuthentication:
    """A user and a password."""

    method = "basic"

    def __init__(self, user: str, password: str) -> None:
        self._pair = f"{user}:{password}"

    def __repr__(self) -> str:
        return "BasicAuthentication(...)"

    def data(self) -> bytes:
        return self._pair.encode()


class TlsAuthentication:
    """Authentication by the connection's certificate, which is given to `tls_context`."""

    method = "tls"

    def data(self) -> bytes:
        return b""


def tls_context(
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    verify_hostname: bool = True,
    verify: bool = True,
) -> ssl.SSLContext:
    """Return the TLS context from PEM files; by default the system's authorities are trusted."""
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        context.load_cert_chain(str(certificate), None if key is None else str(key))
    context.check_hostname = verify_hostname and verify
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    return context
