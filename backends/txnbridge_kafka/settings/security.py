"""The TLS and SASL settings in librdkafka's names: checked, completed, and translated for raw requests."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import os
import re
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import AccessDenied, BrokerUnavailable, InvalidOption
from txnbridge.spi import Deadline
from txnbridge_kafka.settings.names import COMMON

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PASSWORDS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_OAUTH = "OAUTHBEARER"
KERBEROS = "Kerberos is not supported: the client's wheels are built without it"
_SECRETS = ("sasl.password", "sasl.oauthbearer.client.secret", "ssl.key.password", "ssl.key.pem")
_ENDPOINT = "sasl.oauthbearer.token.endpoint.url"
_PASSWORD_NEEDS = ("sasl.username", "sasl.password")
_OAUTH_NEEDS = (_ENDPOINT, "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret")


def secrets(client: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the secret settings, such as passwords. They are removed from errors' texts."""
    yield from (client[name] for name in _SECRETS if client.get(name))


def complete(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the security protocol and the SASL mechanism added.

    Raise `InvalidOption` for a setting without effect: an unused password, for example, weakens security unnoticed.
    """
    settings = {**given, "security.protocol": given.get("security.protocol", "PLAINTEXT").upper()}
    protocol = settings["security.protocol"]
    if protocol not in _PROTOCOLS:
        raise InvalidOption(f"'security.protocol' is one of {', '.join(_PROTOCOLS)}")
    for name in sorted(settings.keys() & COMMON):  # the client refuses any other name as unknown
        if name.startswith("ssl.") and not protocol.endswith("SSL"):
            raise InvalidOption(f"{name!r} has no effect without security.protocol=SSL or SASL_SSL")
        if name.startswith("sasl.") and not protocol.startswith("SASL"):
            raise InvalidOption(f"{name!r} has no effect without security.protocol=SASL_SSL or SASL_PLAINTEXT")
    if protocol.startswith("SASL"):
        settings.update(_sasl(settings))
    return settings


def _sasl(settings: Mapping[str, str]) -> dict[str, str]:
    mechanism = settings.get("sasl.mechanism", "").upper()
    if mechanism not in (*_PASSWORDS, _OAUTH):
        raise InvalidOption(f"'sasl.mechanism' is one of {', '.join((*_PASSWORDS, _OAUTH))}; {KERBEROS}")
    for name in _OAUTH_NEEDS if mechanism == _OAUTH else _PASSWORD_NEEDS:
        if not settings.get(name):
            raise InvalidOption(f"sasl.mechanism={mechanism} needs {name!r}")
    if mechanism == _OAUTH and not settings[_ENDPOINT].startswith(("https://", "http://")):
        raise InvalidOption(f"{_ENDPOINT!r} is a URL with https:// or http://")
    return {"sasl.mechanism": mechanism} | ({"sasl.oauthbearer.method": "oidc"} if mechanism == _OAUTH else {})


def advice(client: Mapping[str, str]) -> str:
    """Return the advice for the error of a failed connection: the settings that must match the broker's listener."""
    protocol, checks = client["security.protocol"], []
    if protocol.startswith("SASL"):
        checks += list(_OAUTH_NEEDS if client["sasl.mechanism"] == _OAUTH else _PASSWORD_NEEDS)
    if protocol.endswith("SSL"):
        checks += ["ssl.ca.location", "ssl.certificate.location"]
    listener = f"that the URL's port is a listener for {protocol}"
    mechanism = f" with {client['sasl.mechanism']}" if protocol.startswith("SASL") else ""
    return f"check {listener}{mechanism}" + (f", and {', '.join(checks)}" if checks else "")


@dataclass(frozen=True)
class Access:
    """The settings of connections for raw requests: time limits, TLS, and login."""

    client_id: str = "txnbridge"
    answer_seconds: float = 60
    setup_seconds: float = 30
    tls: ssl.SSLContext | None = None
    mechanism: str = ""  # of SASL; "" without a login
    username: str = ""
    password: str = field(default="", repr=False)
    tokens: OAuthTokens | None = None


def access(client: Mapping[str, str]) -> Access:
    """Return the TLS and login settings for raw requests, from settings with librdkafka's names."""
    with _naming_option("socket.timeout.ms, or socket.connection.setup.timeout.ms,"):
        patience, setup = (int(client[f"socket.{name}.ms"]) / 1000 for name in ("timeout", "connection.setup.timeout"))
    mechanism = client["sasl.mechanism"] if client["security.protocol"].startswith("SASL") else ""
    return Access(
        client_id=client["client.id"],
        answer_seconds=patience,
        setup_seconds=setup,
        tls=ssl_context(client) if client["security.protocol"].endswith("SSL") else None,
        mechanism=mechanism,
        username=client.get("sasl.username", "") if mechanism else "",
        password=client.get("sasl.password", "") if mechanism else "",
        tokens=OAuthTokens(client, patience) if mechanism == _OAUTH else None,
    )


def ssl_context(client: Mapping[str, str]) -> ssl.SSLContext:
    """Return a TLS context with librdkafka's checks. Raise `InvalidOption` for an unusable file or cipher."""
    context = _tls_context(client, "ssl.ca")
    if client.get("enable.ssl.certificate.verification", "true").lower() in ("false", "f", "0"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif client.get("ssl.endpoint.identification.algorithm") == "none":
        context.check_hostname = False
    if "ssl.crl.location" in client:
        with _naming_option("ssl.crl.location"):
            context.load_verify_locations(client["ssl.crl.location"])
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if "ssl.cipher.suites" in client:
        with _naming_option("ssl.cipher.suites"):
            context.set_ciphers(client["ssl.cipher.suites"])
    with contextlib.ExitStack() as files:
        certificate = _file(client, "ssl.certificate", files)
        key = _file(client, "ssl.key", files)
        if certificate and key:
            password = client.get("ssl.key.password", "")  # without it OpenSSL would ask for a password at the terminal
            with _naming_option("the certificate and key under 'ssl.certificate…' and 'ssl.key…'"):
                context.load_cert_chain(certificate, key, lambda: password)
        elif certificate or key:
            raise InvalidOption("a client certificate needs both: ssl.certificate.location (or .pem) and ssl.key.…")
    return context


def _tls_context(client: Mapping[str, str], option: str) -> ssl.SSLContext:
    """Return a TLS context that trusts an option's certificate authorities, or the system's if it is not set."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # some systems' OpenSSL would still accept an older version
    location, pem = client.get(f"{option}.location"), client.get(f"{option}.pem")
    if pem:
        with _naming_option(f"{option}.pem"):
            context.load_verify_locations(cadata=pem)
    elif location and location != "probe":  # librdkafka's value for the system's authorities
        with _naming_option(f"{option}.location"):
            if os.path.isdir(location):
                context.load_verify_locations(capath=location)
            else:
                context.load_verify_locations(cafile=location)
    else:
        context.load_default_certs()
    return context


def _file(client: Mapping[str, str], option: str, files: contextlib.ExitStack) -> str | None:
    """Return the path of an option's file, or None. PEM text is written to a temporary file, which `files` removes."""
    pem = client.get(f"{option}.pem")
    if pem is None:
        return client.get(f"{option}.location")
    file = files.enter_context(tempfile.NamedTemporaryFile("w"))  # readable by this user only
    file.write(pem)
    file.flush()
    return file.name


@contextlib.contextmanager
def _naming_option(option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # also ssl.SSLError
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InvalidOption(f"{option} cannot be used: {reason}") from None


# An OAuth token is renewed after this share of its lifetime, as by Kafka's Java client and librdkafka.
_RENEWED_SHARE = 0.8


def _lifetime(told: Any) -> float:
    """Return a token's lifetime in seconds; 0, with which each connection gets a new token, if it is not well told."""
    try:
        seconds = float(told)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if seconds < math.inf else 0.0


class OAuthTokens:
    """Fetches OAuth tokens for raw requests from the token endpoint, by client credentials, as librdkafka does."""

    def __init__(self, client: Mapping[str, str], timeout: float) -> None:
        self._url = client[_ENDPOINT]
        self._credentials = f"{client['sasl.oauthbearer.client.id']}:{client['sasl.oauthbearer.client.secret']}"
        self._scope = client.get("sasl.oauthbearer.scope")
        self._extensions = client.get("sasl.oauthbearer.extensions", "")
        self._tls = _tls_context(client, "https.ca")
        self._timeout = timeout
        self._lock = threading.Lock()
        self._token = ""
        self._renew_at = self._expires_at = 0.0  # by time.monotonic()

    def token(self, until: float) -> str:
        """Return a valid OAuth token. Raise `AccessDenied` if the token endpoint refuses.

        Raise `TimeoutError` if another thread is fetching one at the time `until` of time.monotonic().
        """
        held: list[bool] = []
        try:
            if not Deadline(max(0.0, until - time.monotonic())).acquire(self._lock, held):
                raise TimeoutError("another thread fetches an OAuth token")
            now = time.monotonic()
            if now >= self._renew_at:
                try:
                    answer = self._fetch(min(self._timeout, max(0.001, until - now) / (1 + (now < self._expires_at))))
                except BrokerUnavailable:
                    if now >= self._expires_at:
                        raise
                    self._renew_at = min(now + self._timeout, self._expires_at)  # half of the time is left to log in
                else:
                    self._token, life = str(answer["access_token"]), _lifetime(answer.get("expires_in"))
                    self._renew_at, self._expires_at = now + _RENEWED_SHARE * life, now + life
            return self._token
        finally:
            if held:
                self._lock.release()

    def extensions(self) -> dict[str, str]:
        """Return the SASL extensions, which are sent to the broker with the token."""
        return dict(pair.split("=", 1) for pair in self._extensions.split(",") if "=" in pair)

    def _fetch(self, timeout: float) -> dict[str, Any]:
        form = {"grant_type": "client_credentials", **({"scope": self._scope} if self._scope else {})}
        data, basic = urllib.parse.urlencode(form).encode(), base64.b64encode(self._credentials.encode()).decode()
        request = urllib.request.Request(self._url, data, {"Accept": "application/json"})
        request.add_unredirected_header("Authorization", f"Basic {basic}")
        where = f"the token endpoint {re.sub('//[^/]*@', '//', self._url.partition('?')[0])}"  # without a password
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._tls) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (400, 401, 403):
                hint = "check sasl.oauthbearer.client.id, .client.secret and .scope"
                raise AccessDenied(f"{where} gave no token (HTTP {error.code}): {hint}") from None
            raise BrokerUnavailable(f"{where} answered with HTTP {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BrokerUnavailable(f"{where} gave no token: {type(error).__name__}") from error
        if not isinstance(answer, dict) or "access_token" not in answer:
            raise BrokerUnavailable(f"{where} answered without an access_token")
        return answer

    def __reduce__(self) -> Any:
        raise TypeError("OAuthTokens hold secrets and cannot be pickled")
