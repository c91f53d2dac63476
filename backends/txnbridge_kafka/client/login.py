"""The messages of a SASL login: PLAIN, SCRAM and OAUTHBEARER.

Each login is a generator. It yields a message for the broker, and is sent the broker's answer to it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Generator

from txnbridge_kafka.settings.security import Access

# A broker that asks for more rounds than this would stop the process for seconds. Kafka's default is 4096.
_MOST_ROUNDS = 1_000_000
_NONCE_BYTES = 24


def login(access: Access, until: float) -> Generator[bytes, bytes, None]:
    if access.tokens is not None:
        return _oauth(access.tokens.token(until), access.tokens.extensions())
    if access.mechanism == "PLAIN":
        return _plain(access.username, access.password)
    return _scram(access.mechanism.removeprefix("SCRAM-").replace("-", ""), access.username, access.password)


def _plain(username: str, password: str) -> Generator[bytes, bytes, None]:
    yield f"\0{username}\0{password}".encode()


def _oauth(token: str, extensions: dict[str, str]) -> Generator[bytes, bytes, None]:
    more = "".join(f"\x01{name}={value}" for name, value in extensions.items())
    if (yield f"n,,\x01auth=Bearer {token}{more}\x01\x01".encode()):
        yield b"\x01"  # ends a login that the broker refuses, so that its next answer is an error code


def _scram(algorithm: str, username: str, password: str) -> Generator[bytes, bytes, None]:
    def sign(key: bytes, text: bytes) -> bytes:
        return hmac.digest(key, text, algorithm)

    nonce = base64.b64encode(os.urandom(_NONCE_BYTES)).decode()
    opening = f"n={username.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    challenge = (yield f"n,,{opening}".encode()).decode()
    said = _attributes(challenge)
    rounds = int(said["i"])
    if not said["r"].startswith(nonce) or not 0 < rounds <= _MOST_ROUNDS:
        raise ValueError("the broker's challenge is not valid")
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), base64.b64decode(said["s"]), rounds)
    closing = f"c=biws,r={said['r']}"  # "biws" says that no channel is bound
    signed = f"{opening},{challenge},{closing}".encode()
    key = sign(salted, b"Client Key")
    proof = bytes(a ^ b for a, b in zip(key, sign(hashlib.new(algorithm, key).digest(), signed), strict=True))
    verdict = yield f"{closing},p={base64.b64encode(proof).decode()}".encode()
    expected = base64.b64encode(sign(sign(salted, b"Server Key"), signed)).decode()
    if not hmac.compare_digest(_attributes(verdict.decode()).get("v", ""), expected):
        raise ValueError("the broker does not know the password")


def _attributes(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
