"""Database servers for tests: each on a free port of this machine, in a folder of its own."""

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import sqlalchemy as sa


class Server:
    """A server that takes everybody for who they say they are."""

    name: ClassVar[str]
    user: ClassVar[str]  # as whom it runs, because it refuses to run as root
    needs: ClassVar[tuple[str, str]]  # its driver's module and package
    scheme: ClassVar[str]
    first_database: ClassVar[str]
    stopped_by: ClassVar[int]

    def __init__(self) -> None:
        # Not among pytest's folders, which nobody else may look into.
        self._folder = Path(tempfile.mkdtemp(prefix=f"txnbridge-{self.user}-"))
        self._numbers = itertools.count(1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._user = pwd.getpwnam(self.user).pw_uid if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(self._folder, self._user, -1)
        subprocess.run(self._install(), user=self._user, check=True, capture_output=True, cwd="/")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _install(self) -> Sequence[str]:
        raise NotImplementedError

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    @staticmethod
    def _missing_program() -> str | None:
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Why there is none."""
        module, package = cls.needs
        if importlib.util.find_spec(module) is None:
            return f"needs the package {package}"
        try:
            pwd.getpwnam(cls.user) if os.getuid() == 0 else None
        except KeyError:
            return f"needs a user called {cls.user}, because {cls.name} does not run as root"
        return cls._missing_program()

    def start(self) -> None:
        deadline = time.monotonic() + 180  # a killed one may recover for a minute
        while True:
            # It gives up while a process of its killed predecessor has not ended yet.
            if self._process is None or self._process.poll() is not None:
                with (self._folder / "log").open("ab") as log:
                    self._process = subprocess.Popen(self._command(), user=self._user, stdout=log, stderr=log, cwd="/")
            try:
                self.run(self._url(self.first_database), "SELECT 1")
                return
            except sa.exc.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _url(self, database: str) -> str:
        return f"{self.scheme}://owner@127.0.0.1:{self._port}/{database}"

    def new_database(self) -> str:
        name = f"test{next(self._numbers)}"
        self.run(self._url(self.first_database), f"CREATE DATABASE {name}")
        return self._url(name)

    def run(self, url: str, *statements: str) -> None:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            for statement in filter(str.strip, statements):
                connection.exec_driver_sql(statement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.send_signal(self.stopped_by)
        self._process.wait(60)
        shutil.rmtree(self._folder)


class MariaDB(Server):
    """A MariaDB server, whose databases compare names without regard to case."""

    name, user, needs = "MariaDB", "mysql", ("pymysql", "PyMySQL")
    scheme, first_database = "mysql+pymysql", "mysql"
    stopped_by = signal.SIGTERM

    @staticmethod
    def _missing_program() -> str | None:
        there = shutil.which("mariadb-install-db") and shutil.which("mariadbd")
        return None if there else "needs MariaDB (Debian's package mariadb-server)"

    def _install(self) -> Sequence[str]:
        return ["mariadb-install-db", "--no-defaults", f"--datadir={self._folder / 'data'}", "--skip-test-db"]

    def _command(self) -> Sequence[str]:
        settings = {
            "datadir": self._folder / "data",
            "port": self._port,
            "bind-address": "127.0.0.1",
            "socket": self._folder / "socket",
            "pid-file": self._folder / "pid",
            "max-allowed-packet": "64M",
        }
        given = [f"--{name}={value}" for name, value in settings.items()]
        return ["mariadbd", "--no-defaults", *given, "--skip-grant-tables"]  # nobody needs a password
