"""Authentication methods. A broker asks for credentials when a client connects, and again before they expire."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Authentication:
    """An authentication method. The client calls `data` when a broker asks for credentials; it may block briefly."""

    method: str
    data: Callable[[], bytes] = field(default=bytes, repr=False)


NO_AUTHENTICATION = Authentication("none")
# Authentication by a client certificate, which is given to `tls_context`.
TLS_AUTHENTICATION = Authentication("tls")


def token_authentication(token: str | Callable[[], str]) -> Authentication:
    """Return authentication by a token, or by a function that returns the current token."""
    return Authentication("token", lambda: (token() if callable(token) else token).strip().encode())


def token_file(path: str | Path) -> Authentication:
    """Return authentication by the token in a file, which is read again each time the broker asks for credentials."""
    return token_authentication(Path(path).read_text)


def basic_authentication(user: str, password: str) -> Authentication:
    return Authentication("basic", f"{user}:{password}".encode)


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
