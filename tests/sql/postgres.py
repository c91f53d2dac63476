"""PostgreSQL for tests, in a folder of its own."""

from __future__ import annotations

import glob
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa


def _program(name: str) -> str | None:
    debians = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return debians[-1] if debians else shutil.which(name)


class Postgres:
    """A server on a free port of this machine that takes everybody for who they say they are."""

    def __init__(self) -> None:
        # Not among pytest's folders, which nobody else may look into.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="txnbridge-postgres-"))
        self._numbers = itertools.count(1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        # It refuses to run as root.
        self._user = pwd.getpwnam("postgres").pw_uid if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(folder, self._user, -1)
        initdb = [str(_program("initdb")), "-D", str(folder / "data"), "-U", "owner", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*initdb, "--no-sync"], user=self._user, check=True, capture_output=True, cwd="/")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @staticmethod
    def missing() -> str | None:
        """Why there is none."""
        try:
            import psycopg  # noqa: F401
        except ImportError:
            return "needs the package psycopg"
        if _program("initdb") is None or _program("postgres") is None:
            return "needs PostgreSQL (Debian's package postgresql)"
        try:
            pwd.getpwnam("postgres") if os.getuid() == 0 else None
        except KeyError:
            return "needs a user called postgres, because PostgreSQL does not run as root"
        return None

    def start(self) -> None:
        options = {"port": self._port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        command = [str(_program("postgres")), "-D", str(self._folder / "data"), *settings]
        deadline = time.monotonic() + 60
        while True:
            # It gives up while a process of its killed predecessor has not ended yet.
            if self._process is None or self._process.poll() is not None:
                with (self._folder / "log").open("ab") as log:
                    self._process = subprocess.Popen(command, user=self._user, stdout=log, stderr=log, cwd="/")
            try:
                self.run(self._url("postgres"), "SELECT 1")
                return
            except sa.exc.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _pids(self) -> list[int]:
        """The server's, and those of its connections."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def kill(self) -> None:
        """End the server and all its connections with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)  # so that it takes no connection that would outlive it
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def _url(self, database: str, user: str = "owner") -> str:
        return f"postgresql+psycopg://{user}@127.0.0.1:{self._port}/{database}"

    def new_database(self) -> str:
        name = f"test{next(self._numbers)}"
        self.run(self._url("postgres"), f"CREATE DATABASE {name}")
        return self._url(name)

    def guest(self, url: str) -> str:
        """The same database for one who may make nothing there."""
        make = "DO $$ BEGIN CREATE ROLE guest LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        self.run(url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC", make)
        return url.replace("owner@", "guest@")

    def run(self, url: str, *statements: str) -> None:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            for statement in statements:
                if statement.strip():
                    connection.exec_driver_sql(statement)

    def __enter__(self) -> Postgres:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        shutil.rmtree(self._folder)
