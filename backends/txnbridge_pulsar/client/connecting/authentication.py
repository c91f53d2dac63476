"""Authentication methods. A broker asks for credentials when a client connects, and again before the credentials
expire.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Authentication(Protocol):
    """An authentication method. The client calls `data` when a broker asks for credentials; it may block briefly."""

    method: str

    def data(self) -> bytes: ...


class NoAuthentication:
    method = "none"

    def data(self) -> bytes:
        return b""


class TokenAuthentication:
    """Authentication by a token, or by a function that returns the current token."""

    method = "token"

    def __init__(self, token: str | Callable[[], str]) -> None:
        self._token = token

    def __repr__(self) -> str:
        return "TokenAuthentication(...)"

    def data(self) -> bytes:
        token = self._token() if callable(self._token) else self._token
        return token.strip().encode()


def token_file(path: str | Path) -> TokenAuthentication:
    """Return authentication by the token in a file, which is read again each time the broker asks for credentials."""
    return TokenAuthentication(lambda: Path(path).read_text())


class BasicAuthentication:
    method = "basic"

    def __init__(self, user: str, password: str) -> None:
        self._pair = f"{user}:{password}"

    def __repr__(self) -> str:
        return "BasicAuthentication(...)"

    def data(self) -> bytes:
        return self._pair.encode()


class TlsAuthentication:
    """Authentication by a client certificate, which is given to `tls_context`."""

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
    """Return a TLS context that uses these PEM files. Without `ca` the system's certificate authorities are trusted."""
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        context.load_cert_chain(str(certificate), None if key is None else str(key))
    context.check_hostname = verify_hostname and verify
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    return context
