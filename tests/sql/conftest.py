"""A PostgreSQL and a MariaDB of the tests' own, and databases in them."""

from __future__ import annotations

import itertools

import pytest

from tests.sql.mariadb import MariaDB
from tests.sql.postgres import Postgres


@pytest.fixture(scope="session")
def postgres():
    if (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb():
    if (reason := MariaDB.missing()) is not None:
        pytest.skip(reason)
    with MariaDB() as server:
        yield server


@pytest.fixture(params=["sqlite", *(pytest.param(name, marks=pytest.mark.live) for name in ("postgresql", "mariadb"))])
def new_database(request, tmp_path):
    """Make a database of the test's own, and return its URL."""
    numbers = itertools.count()
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path / f'database{next(numbers)}.db'}"
    server = {"postgresql": "postgres", "mariadb": "mariadb"}[request.param]
    return request.getfixturevalue(server).new_database


@pytest.fixture
def url(new_database):
    return new_database()
