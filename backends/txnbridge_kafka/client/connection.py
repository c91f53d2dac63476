"""One connection to a broker. Its requests are answered one after another; any error closes it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Generator
from typing import Any

from txnbridge.errors import TxnBridgeError
from txnbridge_kafka.client import wire
from txnbridge_kafka.settings.security import Access

# The largest answer that is accepted: a list of all transactions, with 60 bytes each, is long.
_LARGEST_ANSWER = 256 << 20
_READ_BYTES = 1 << 20
# A login that ends by itself is given up after this share of its life, before the broker closes the connection.
_LOGIN_SHARE = 0.8
# A broker that asks for more rounds than this would stop the process for seconds. Kafka's default is 4096.
_MOST_ROUNDS = 1_000_000
_NONCE_BYTES = 24
_UNSUPPORTED_VERSION = struct.pack(">h", 35)
# Errors that an answer causes which is not an answer of Kafka's protocol.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, struct.error)


class AttemptError(Exception):
    """One attempt at a request failed, and the next one may succeed."""


class NotConnectedError(AttemptError):
    """No connection was made. `nobody_listens` is true if nothing listens at the address, or nobody knows it."""

    def __init__(self, text: str, *, nobody_listens: bool = False) -> None:
        super().__init__(text)
        self.nobody_listens = nobody_listens


class NoAnswerError(AttemptError):
    """The broker did not answer a request in the time for one attempt."""


class LoginRefusedError(Exception):
    """The broker refused the login, with an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class TooOldError(Exception):
    """The broker does not support any version of a request that this client can send."""


class Connection:
    """A connection to a broker: encrypted and logged in, as the settings say. One thread at a time uses it.

    `until` is the deadline of each method, by time.monotonic(). Resolving a host name and fetching an OAuth token can
    last longer.
    """

    def __init__(self, host: str, port: int, access: Access, until: float) -> None:
        self._access = access
        self._asked = 0
        self._versions: dict[int, range] = {wire.API_VERSIONS.key: range(3, 4), wire.SASL_HANDSHAKE.key: range(1, 2)}
        self._login_ends = float("inf")
        setup_until = min(until, time.monotonic() + access.setup_seconds)
        self._socket = _connected(host, port, setup_until)
        try:
            if access.tls is not None:
                self._socket.settimeout(_left(setup_until))
                self._socket = access.tls.wrap_socket(self._socket, server_hostname=host)
            known = self.ask(api_versions(), until).api_keys
            self._versions = {each.api_key: range(each.min_version, each.max_version + 1) for each in known}
            if access.mechanism:
                self._log_in(until)
        except BaseException as error:
            self.close()
            if isinstance(error, TxnBridgeError):
                raise
            if isinstance(error, TimeoutError):
                raise NoAnswerError(f"no connection to {host}:{port} in time") from None
            if type(error) is AttemptError or isinstance(error, OSError):
                raise NotConnectedError(f"{host}:{port}: {error}") from error
            raise

    def _log_in(self, until: float) -> None:
        answer = self.ask(wire.SASL_HANDSHAKE(mechanism=self._access.mechanism), until)
        if answer.error_code:
            raise LoginRefusedError(answer.error_code)
        exchange = login(self._access, until)
        message = next(exchange)
        with contextlib.suppress(StopIteration):
            while True:
                answer = self.ask(wire.SASL_AUTHENTICATE(auth_bytes=message), until)
                if answer.error_code:
                    raise LoginRefusedError(answer.error_code)
                if answer.session_lifetime_ms > 0:
                    self._login_ends = time.monotonic() + _LOGIN_SHARE * answer.session_lifetime_ms / 1000
                message = exchange.send(answer.auth_bytes)

    @property
    def usable(self) -> bool:
        """Return whether the broker has not closed the connection, as far as is known, and the login is still valid."""
        if self._socket.fileno() < 0 or time.monotonic() > self._login_ends:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)  # nothing was asked, so there is nothing to read but the end

    def versions(self, api: wire.Api) -> list[int]:
        """Return the versions of a kind of request that this client can send and the broker supports."""
        return [each for each in api.forms if each in self._versions.get(api.key, ())]

    def ask(self, request: wire.Request, until: float) -> Any:
        """Send a request, and return the answer's fields as attributes."""
        api, values = request
        if not (versions := self.versions(api)):
            raise TooOldError(api.name)
        version = max(versions)
        self._asked += 1
        frame = api.frame(version, self._asked, self._access.client_id, values)
        until = min(until, time.monotonic() + self._access.answer_seconds)
        try:
            self._socket.settimeout(_left(until))
            self._socket.sendall(frame)
            (size,) = struct.unpack(">i", self._receive(4, until))
            if not 4 <= size <= _LARGEST_ANSWER:
                raise ValueError("this is no answer of Kafka's protocol")
            answer = self._receive(size, until)
            if api is wire.API_VERSIONS and answer[4:6] == _UNSUPPORTED_VERSION:
                raise TooOldError(f"version {version} of {api.name}")  # and the rest is an answer in version 0
            return api.answer(version, self._asked, answer)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise NoAnswerError(f"no answer to {api.name} in time") from None
            if isinstance(error, OSError):
                raise AttemptError(f"{type(error).__name__}: {error}") from error
            if isinstance(error, UNREADABLE):
                raise AttemptError(f"the broker's answer cannot be read ({type(error).__name__})") from error
            raise

    def _receive(self, size: int, until: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._socket.settimeout(_left(until))
            data = self._socket.recv(min(size - len(found), _READ_BYTES))
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            found += data
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


def api_versions() -> wire.Request:
    return wire.API_VERSIONS(client_software_name="txnbridge", client_software_version="1")


def _connected(host: str, port: int, until: float) -> socket.socket:
    """Connect to the first address of a host that accepts. Each address gets an equal share of the time."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the host's name is empty or too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise NotConnectedError(f"{host}:{port}: {reason}", nobody_listens=True) from None
    failures = list[OSError]()
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(until) / (len(addresses) - number))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failures.append(error)
    if any(isinstance(each, TimeoutError) for each in failures):
        raise NoAnswerError(f"no connection to {host}:{port} in time")
    refused = all(isinstance(each, ConnectionRefusedError) for each in failures)
    raise NotConnectedError(f"{host}:{port}: {failures[-1].strerror}", nobody_listens=refused)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def login(access: Access, until: float) -> Generator[bytes, bytes, None]:
    """Yield the messages of a SASL login by PLAIN, SCRAM or OAUTHBEARER. The broker's answer to each is sent back."""
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
