"""Certificates for tests, made by the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def openssl(*arguments: object) -> None:
    command = shutil.which("openssl")
    if command is None:
        pytest.skip("needs the openssl command")
    run = subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr


@dataclass(frozen=True)
class Certificate:
    """A key and its certificate, apart and as the one file that Java calls a PEM store."""

    key: Path
    certificate: Path
    store: Path


class Authority:
    """An authority that signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key, self.certificate = folder / f"{name}.key", folder / f"{name}.pem"
        made = ["-x509", "-days", "2", "-nodes", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate]
        openssl("req", *_KEY, *made)

    def issue(self, name: str, password: str = "") -> Certificate:
        """A certificate for this name and for 127.0.0.1, whose key is under a password if there is one."""
        key, request, certificate, store, extensions = (
            self._folder / f"{name}.{kind}" for kind in ("key", "csr", "crt", "store.pem", "ext")
        )
        sealed = ["-passout", f"pass:{password}"] if password else ["-nodes"]
        openssl("req", *_KEY, *sealed, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        signer = ["-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", "2"]
        openssl("x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", certificate)
        store.write_text(key.read_text() + certificate.read_text())
        return Certificate(key, certificate, store)
