"""A broker that asks who everybody is, and what they may do."""

import base64
import hashlib
import hmac
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import free_ports
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_pulsar.client import Authentication, PulsarClient, tls_context

from tests.kafka.certificates import Authority, Certificate
from tests.pulsar.client_kit import admin

KEY = b"a key of at least thirty-two bytes for tests"
PASSWORD = "a-password"
ROLES = "org.apache.pulsar.broker.authentication.AuthenticationProvider"


def token(role: str, seconds: float = 3600) -> str:
    """A JSON web token that the broker takes."""

    def part(value: Any) -> bytes:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    signed = part({"alg": "HS256"}) + b"." + part({"sub": role, "exp": int(time.time() + seconds)})
    return (signed + b"." + part(hmac.new(KEY, signed, hashlib.sha256).digest())).decode()


@dataclass
class Secured:
    """A broker that wants to know who we are, and what is needed to get in."""

    broker: brokers.Pulsar
    url: str
    url_tls: str
    admin_url_tls: str
    authority: Authority
    admin: Certificate

    def client(self, authentication: Authentication) -> PulsarClient:
        return PulsarClient(self.url_tls, authentication=authentication, tls=tls_context(self.authority.certificate))


def settings(folder: Path, server: Certificate, authority: Authority, port: int, tls: int, web: int) -> dict[str, str]:
    passwords = folder / "passwords"
    made = subprocess.run(["openssl", "passwd", "-apr1", PASSWORD], capture_output=True, text=True, check=True)
    passwords.write_text(f"user:{made.stdout}")
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authenticationProviders": f"{ROLES}Token,{ROLES}Basic,{ROLES}Tls",
        "authenticationRefreshCheckSeconds": "1",
        "tokenSecretKey": f"data:;base64,{base64.b64encode(KEY).decode()}",
        "basicAuthConf": f"file://{passwords}",
        # The test of whether it has started comes without credentials.
        "anonymousUserRole": "starter",
        "superUserRoles": "admin,starter",
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"token:{token('admin')}",
        "brokerServicePortTls": str(tls),
        "webServicePortTls": str(web),
        "tlsCertificateFilePath": str(server.certificate),
        "tlsKeyFilePath": str(server.key),
        "tlsTrustCertsFilePath": str(authority.certificate),
        "bindAddresses": "",
        "advertisedListeners": f"internal:pulsar://127.0.0.1:{port},internal:pulsar+ssl://127.0.0.1:{tls}",
    }


@contextmanager
def start_secured(folder: Path) -> Iterator[Secured]:
    """Start a broker with `user` and `other`, who may use public/default, and the superuser `admin`."""
    authority = Authority(folder, "authority")
    port, tls, web = free_ports(3)
    configured = settings(folder, authority.issue("server"), authority, port, tls, web)
    with pulsar_or_skip(port=port, settings=configured) as broker:
        for user in ("user", "other"):
            admin(broker, "POST", f"namespaces/public/default/permissions/{user}", ["produce", "consume"])
            # Coordinators are looked up like the partitions of a topic there.
            admin(broker, "POST", f"namespaces/pulsar/system/permissions/{user}", ["consume"])
        yield Secured(
            broker,
            f"pulsar://127.0.0.1:{port}",
            f"pulsar+ssl://127.0.0.1:{tls}",
            f"https://127.0.0.1:{web}",
            authority,
            authority.issue("admin"),
        )
