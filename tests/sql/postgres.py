"""PostgreSQL for tests."""

import glob
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.sql.server import Server


def _program(name: str) -> str | None:
    debians = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return debians[-1] if debians else shutil.which(name)


class Postgres(Server):
    name, user, needs = "PostgreSQL", "postgres", ("psycopg", "psycopg")
    scheme, first_database = "postgresql+psycopg", "postgres"
    stopped_by = signal.SIGINT

    @staticmethod
    def _missing_program() -> str | None:
        there = _program("initdb") and _program("postgres")
        return None if there else "needs PostgreSQL (Debian's package postgresql)"

    def _install(self) -> Sequence[str]:
        folder = str(self._folder / "data")
        return [str(_program("initdb")), "-D", folder, "-U", "owner", "-A", "trust", "-E", "UTF8", "--no-sync"]

    def _command(self) -> Sequence[str]:
        options = {"port": self._port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(_program("postgres")), "-D", str(self._folder / "data"), *settings]

    def _pids(self) -> list[int]:
        """The server's, and those of its connections."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def _signal(self, number: int) -> None:
        for pid in self._pids():
            os.kill(pid, number)

    def kill(self) -> None:
        """End the server and all its connections with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)  # so that it takes no connection that would outlive it
        self._signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def guest(self, url: str) -> str:
        """The same database for one who may make nothing there."""
        make = "DO $$ BEGIN CREATE ROLE guest LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        self.run(url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC", make)
        return url.replace("owner@", "guest@")
