"""A PostgreSQL of the tests' own, and databases in it."""

from __future__ import annotations

import itertools

import pytest

from tests.sql.postgres import Postgres


@pytest.fixture(scope="session")
def postgres():
    if (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.live)])
def new_database(request, tmp_path):
    """Make a database of the test's own, and return its URL."""
    numbers = itertools.count()
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path / f'database{next(numbers)}.db'}"
    return request.getfixturevalue("postgres").new_database


@pytest.fixture
def url(new_database):
    return new_database()
