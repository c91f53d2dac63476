"""MariaDB for tests, in a folder of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa


class MariaDB:
    """A server on a free port of this machine, whose databases compare names without regard to case."""

    def __init__(self) -> None:
        # Not among pytest's folders, which nobody else may look into.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="txnbridge-mariadb-"))
        self._numbers = itertools.count(1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._user = None  # it refuses to run as root
        if os.getuid() == 0:
            self._user = pwd.getpwnam("mysql").pw_uid
            os.chown(folder, self._user, -1)
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={folder / 'data'}", "--skip-test-db"]
        subprocess.run(install, user=self._user, check=True, capture_output=True, cwd="/")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @staticmethod
    def missing() -> str | None:
        """Why there is none."""
        if importlib.util.find_spec("pymysql") is None:
            return "needs the package PyMySQL"
        if not shutil.which("mariadb-install-db") or not shutil.which("mariadbd"):
            return "needs MariaDB (Debian's package mariadb-server)"
        try:
            pwd.getpwnam("mysql") if os.getuid() == 0 else None
        except KeyError:
            return "needs a user called mysql, because MariaDB does not run as root"
        return None

    def start(self) -> None:
        settings = {
            "datadir": self._folder / "data",
            "port": self._port,
            "bind-address": "127.0.0.1",
            "socket": self._folder / "socket",
            "pid-file": self._folder / "pid",
            "max-allowed-packet": "64M",
        }
        command = ["mariadbd", "--no-defaults", *(f"--{name}={value}" for name, value in settings.items())]
        with (self._folder / "log").open("ab") as log:
            # Everybody may log in without a password.
            self._process = subprocess.Popen(
                [*command, "--skip-grant-tables"], user=self._user, stdout=log, stderr=log, cwd="/"
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.run(self._url("mysql"), "SELECT 1")
                return
            except sa.exc.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _url(self, database: str) -> str:
        return f"mysql+pymysql://owner@127.0.0.1:{self._port}/{database}"

    def new_database(self) -> str:
        name = f"test{next(self._numbers)}"
        self.run(self._url("mysql"), f"CREATE DATABASE {name}")
        return self._url(name)

    def run(self, url: str, *statements: str) -> None:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def __enter__(self) -> MariaDB:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._folder)
