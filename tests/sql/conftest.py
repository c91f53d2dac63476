"""A PostgreSQL of the tests' own, and databases in it."""

from __future__ import annotations

import pytest

from tests.sql.postgres import Postgres


@pytest.fixture(scope="session")
def postgres():
    if (reason := Postgres.missing()) is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.live)])
def url(request, tmp_path):
    """Of a database of the test's own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'decisions.db'}"
    return request.getfixturevalue("postgres").new_database()
