"""A PostgreSQL and a MariaDB of the tests' own, and databases in them."""

import itertools
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

import txnbridge
from tests.keeping import keeping
from tests.sql.postgres import Postgres
from tests.sql.server import MariaDB


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


@pytest.fixture
def open_engine():
    """Make engines, whose connections are closed in the end."""
    yield from keeping(sa.create_engine, lambda engine: engine.dispose())


@pytest.fixture
def fail_commits():
    """Return a function that lets databases fail to commit, so many `times`, transactions with a statement like that.

    With `happens` they commit all the same. The function returns a list of the connections that have failed.
    """
    with ExitStack() as heard:

        def listen(event, hear):
            sa.event.listen(sa.Engine, event, hear)
            heard.callback(sa.event.remove, sa.Engine, event, hear)

        def fail(error, behind="", happens=False, times=1, when=lambda connection: True):
            marked, failed = list[sa.Connection](), list[sa.Connection]()

            def mark(connection, cursor, statement, *_):
                if behind in statement:
                    marked.append(connection)

            def commit(connection):
                if connection in marked and len(failed) < times and when(connection):
                    failed.append(connection)
                    if happens:
                        connection.connection.commit()
                    raise error

            listen("before_cursor_execute", mark)
            listen("commit", commit)
            return failed

        yield fail


@pytest.fixture
def careless(tmp_path, open_engine):
    """An SQLite that does not wait for the disk."""
    engine = open_engine(f"sqlite:///{tmp_path / 'careless.db'}")
    sa.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=NORMAL"))
    return engine


@pytest.fixture
def shop(fresh):
    """A broker and a database, as the test's module makes them."""
    return fresh()


@pytest.fixture
def bridge(shop):
    with txnbridge.connect(shop.url) as bridge:
        yield bridge
