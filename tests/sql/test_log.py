"""Decision logs in a database: SQLite's, and those of PostgreSQL and MariaDB where they are installed."""

import itertools
import os
import sqlite3
import sys
import threading
import uuid
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing

import pytest
import sqlalchemy as sa

import txnbridge
from tests.core.decisions.test_ledger import LedgerBackend
from tests.core.races import Through, race
from tests.core.test_fork import in_child, outlive_parent
from tests.core.toy import ToyBroker
from tests.failing import raising
from tests.in_time import takes, within
from tests.keeping import keeping
from tests.log_contract import *  # noqa: F403
from tests.log_contract import SOON, ExactTrimming, append, bounds, place_of, read
from tests.sql.outbox_programs import confuse_names
from txnbridge import Decision, TokenState, errors, plugins
from txnbridge.spi import Deadline
from txnbridge.sql import decision_log as sql_log
from txnbridge.sql._database import Database
from txnbridge.sql._database import within as run_within
from txnbridge.sql.decision_log import SqlLogs

_numbers = itertools.count(1)
_KILLED_SERVER_IS_BACK = 60.0  # it takes a second to read its log again, and some on a busy machine


@pytest.fixture
def open_logs():
    """Open databases' logs; what they hold is let go in the end."""
    yield from keeping(SqlLogs)


@pytest.fixture
def open_named(url, open_logs):
    return lambda name: open_logs(url).decision_log(name, Deadline(SOON))


@pytest.fixture
def behind(url, open_engine):
    """A connection of somebody else."""
    with open_engine(url).connect() as connection:
        yield connection


class TestTrimming(ExactTrimming):
    pass


def test_a_record_of_the_largest_size_is_stored(log):
    largest = os.urandom(900_000)
    (at,) = append(log, largest)
    assert read(log) == [(at, largest)]


def test_a_long_log_is_read_in_passing(log):
    at = append(log, *(b"%d" % number for number in range(250)))
    reading = iter(log.read(None, None, Deadline(SOON)))
    assert [next(reading) for _ in range(120)] == [(at[number], b"%d" % number) for number in range(120)]
    log.trim(at[240], Deadline(SOON))
    with pytest.raises(errors.PositionLost):
        list(reading)


def test_the_logs_of_one_database_have_one_place_and_each_database_its_own(url, open_logs, tmp_path):
    places = [open_logs(url).cluster(Deadline(SOON)) for _ in range(2)]
    assert places[0] == places[1]
    assert open_logs(f"sqlite:///{tmp_path / 'other.db'}").cluster(Deadline(SOON)) != places[0]


def test_the_callers_engine_stays_open(url, open_engine):
    engine = open_engine(url)
    logs = SqlLogs(engine)
    append(logs.decision_log("mine", Deadline(SOON)), b"0")
    logs.close()
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM txnbridge_log_records")) == 1


def test_a_log_whose_row_is_gone_says_so(log, behind):
    append(log, b"0")
    behind.execute(sa.text("DELETE FROM txnbridge_logs"))
    behind.commit()
    for ask in (lambda: append(log, b"1"), lambda: bounds(log), lambda: read(log)):
        with pytest.raises(errors.StorageFailed, match="gone"):
            ask()


def test_a_record_that_is_missing_in_between_is_not_passed_over(log, behind):
    append(log, b"0", b"1", b"2")
    behind.execute(sa.text("DELETE FROM txnbridge_log_records WHERE position = 1"))
    behind.commit()
    with pytest.raises(errors.PositionLost):
        read(log)


def test_an_append_waits_until_its_deadline_for_the_holder_of_the_lock(log, behind):
    append(log, b"0")
    behind.execute(sa.text("UPDATE txnbridge_logs SET next = next"))
    takes(0.5, errors.BrokerUnavailable, lambda deadline: log.append(b"late", deadline))
    later = threading.Timer(0.3, behind.rollback)
    later.start()
    append(log, b"1")
    later.join()
    assert [record for _, record in read(log)] == [b"0", b"1"]


def test_logs_whose_names_differ_by_case_an_accent_or_a_space_are_different_logs(open_named):
    logs = [open_named(name) for name in ("shop", "Shop", "shóp", "shop ")]
    for number, log in enumerate(logs):
        append(log, b"%d" % number)
    assert [read(log) for log in logs] == [[((0,), b"%d" % number)] for number in range(4)]


def test_tables_that_confuse_names_and_engines_that_commit_each_statement_are_refused(
    url, open_logs, open_engine, careless
):
    if url.startswith("postgresql"):
        pytest.skip("PostgreSQL compares exactly")
    confuse_names(url, sql_log._logs)
    with pytest.raises(errors.InvalidOption, match="exactly"):
        open_logs(url).decision_log("shop", Deadline(SOON))
    engine = open_engine(url)
    sql_log._logs.drop(engine)
    for level, says in (("AUTOCOMMIT", "AUTOCOMMIT"), ("READ UNCOMMITTED", "READ.(UN)?COMMITTED")):
        with pytest.raises(errors.InvalidOption, match=says):
            SqlLogs(engine.execution_options(isolation_level=level)).decision_log("shop", Deadline(SOON))
    with pytest.raises(errors.InvalidOption, match="synchronous"):
        SqlLogs(careless).decision_log("any", Deadline(SOON))
    append(open_logs(url).decision_log("shop", Deadline(SOON)), b"0")


def test_a_process_that_opens_the_logs_beside_another_one_finds_its_place(url, open_logs, open_engine):
    engine = open_engine(url)
    place: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def open_first(connection, cursor, statement, *_):
        if statement.startswith("INSERT INTO txnbridge_place") and not place:
            place.append("")
            place[0] = open_logs(url).cluster(Deadline(SOON))

    assert SqlLogs(engine).cluster(Deadline(SOON)) == place[0]


@pytest.mark.parametrize("state", ["42P07", "42710", "23505"])
def test_a_table_that_another_process_makes_at_the_same_time_is_looked_for_again(tmp_path, open_engine, state):
    failures = pytest.importorskip("psycopg.errors")
    engine = open_engine(f"sqlite:///{tmp_path / 'made.db'}")
    exists = [sa.exc.DBAPIError.instance("CREATE TABLE", {}, failures.lookup(state)("it exists"), failures.Error)]

    @sa.event.listens_for(engine, "before_cursor_execute")
    def make_first(connection, cursor, statement, *_):
        if "CREATE TABLE" in statement and exists:
            raise exists.pop()

    append(SqlLogs(engine).decision_log("any", Deadline(SOON)), b"0")


def test_an_engine_whose_url_names_no_database_is_taken_unless_it_binds_connections_to_threads(tmp_path, open_engine):
    def connecting(**settings):
        return lambda: sqlite3.connect(tmp_path / "created.db", **settings)

    engine = sa.create_engine("sqlite://", creator=connecting(check_same_thread=False), poolclass=sa.NullPool)
    append(SqlLogs(engine).decision_log("any", Deadline(SOON)), b"0")
    with pytest.raises(errors.InvalidOption, match="check_same_thread"):
        SqlLogs(open_engine(engine.url, creator=connecting())).decision_log("any", Deadline(SOON))
    in_memory = sa.create_engine("sqlite://", poolclass=sa.NullPool)
    with pytest.raises(errors.InvalidOption, match="outlives"):
        SqlLogs(in_memory).decision_log("any", Deadline(SOON))


def test_a_database_that_is_not_tested_is_refused(tmp_path, open_engine):
    engine = open_engine(f"sqlite:///{tmp_path / 'other.db'}")
    engine.dialect.name = "oracle"
    with pytest.raises(errors.NotSupported, match="MariaDB and SQLite, not oracle"):
        SqlLogs(engine).decision_log("any", Deadline(SOON))


@pytest.mark.live
def test_mariadb_that_may_forget_or_shorten_what_it_confirms_is_refused(mariadb, open_logs):
    url = mariadb.new_database()
    with pytest.raises(errors.InvalidOption, match="strict sql_mode"):
        open_logs(f"{url}?sql_mode=ANSI").decision_log("any", Deadline(SOON))
    for setting, wrong, right in (("innodb_flush_log_at_trx_commit", 2, 1), ("read_only", 1, 0)):
        mariadb.run(url, f"SET GLOBAL {setting} = {wrong}")
        with pytest.raises(errors.InvalidOption, match=setting):
            open_logs(url).decision_log("any", Deadline(SOON))
        mariadb.run(url, f"SET GLOBAL {setting} = {right}")
    append(open_logs(url).decision_log("any", Deadline(SOON)), b"0")


@pytest.mark.parametrize(
    ("database", "error", "match"),
    [
        ("sqlite+aiosqlite:///some.db", errors.InvalidOption, "synchronous driver"),
        ("sqlite://", errors.InvalidOption, "outlives"),
        ("sqlite:///:memory:", errors.InvalidOption, "outlives"),
        ("nosuchdatabase://host/name", errors.BackendMissing, "driver"),
        ("no url", errors.InvalidOption, "sqlite:"),
    ],
)
def test_a_database_that_cannot_be_is_refused(database, error, match):
    with pytest.raises(error, match=match):
        SqlLogs(database)


def test_a_name_that_is_too_long_is_refused(url, open_logs):
    with pytest.raises(errors.InvalidOption, match="255"):
        open_logs(url).decision_log("x" * 256, Deadline(SOON))


@pytest.mark.live
def test_postgresql_that_does_not_wait_for_the_disk_is_refused(postgres, open_logs):
    url = postgres.new_database()
    with pytest.raises(errors.InvalidOption, match="synchronous_commit"):
        open_logs(f"{url}?options=-csynchronous_commit%3Doff").decision_log("any", Deadline(SOON))


def test_our_own_error_of_a_missing_right_is_not_taken_for_one_of_a_socket(tmp_path):
    with pytest.raises(errors.AccessDenied, match=r"^make the tables$"):
        refuse = raising(errors.AccessDenied("make the tables"))
        Database(f"sqlite:///{tmp_path}/a.db", "a test").ask("opening", refuse, Deadline(SOON))


@pytest.mark.live
def test_without_the_right_to_make_tables_the_error_prints_them_and_with_them_it_works(postgres, open_logs):
    url = postgres.new_database()
    guest = postgres.guest(url)
    with pytest.raises(errors.AccessDenied, match="CREATE TABLE") as refused:
        open_logs(guest).decision_log("any", Deadline(SOON))
    made = str(refused.value).partition("delete on them:")[2]
    postgres.run(url, *made.split(";"))
    tables = "txnbridge_logs, txnbridge_log_records, txnbridge_place"
    with pytest.raises(errors.AccessDenied):
        open_logs(guest).decision_log("any", Deadline(SOON))
    postgres.run(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO guest")
    log = open_logs(guest).decision_log("any", Deadline(SOON))
    append(log, b"0", b"1")
    log.trim((1,), Deadline(SOON))
    assert read(log) == [((1,), b"1")]


@pytest.mark.live
def test_no_secret_is_shown(postgres, open_logs):
    url = postgres.new_database().replace("://", "://someone:s3cr3t@", 1)
    logs = open_logs(url)
    with pytest.raises(errors.BrokerUnavailable) as refused:
        logs.decision_log("any", Deadline(1))
    assert "s3cr3t" not in f"{logs!r} {refused.value} {refused.value.__cause__!r}"


def test_a_call_that_waits_for_a_silent_database_notices_that_its_deadline_got_nearer():
    deadline, said = Deadline(600), threading.Event()
    threading.Timer(0.2, deadline.shorten, [0.0]).start()
    try:
        with within(0), pytest.raises(FutureTimeout):
            run_within(deadline, said.wait)
    finally:
        said.set()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # 3.12 warns of forks in threaded programs
def test_a_free_thread_is_used_again_but_not_one_that_still_waits_nor_one_of_a_parent_process():
    said = threading.Event()
    thread = run_within(Deadline(SOON), threading.get_ident)
    assert run_within(Deadline(SOON), threading.get_ident) == thread
    with pytest.raises(FutureTimeout):
        run_within(Deadline(0), said.wait)
    assert run_within(Deadline(SOON), threading.get_ident) != thread
    said.set()
    assert in_child(lambda: run_within(Deadline(SOON), threading.get_ident)) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_its_records_when_its_parent_closes_a_log_in_sqlites_wal_mode(tmp_path, open_logs):
    def child():
        log = open_logs(url).decision_log("app", Deadline(SOON))
        yield
        append(log, b"1")

    url = f"sqlite:///{tmp_path}/log.db"
    with closing(sqlite3.connect(f"{tmp_path}/log.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    logs = open_logs(url)
    logs.decision_log("app", Deadline(SOON))
    assert outlive_parent(child, logs.close) == 0
    assert [record for _, record in read(open_logs(url).decision_log("app", Deadline(SOON)))] == [b"1"]


@pytest.mark.live
def test_no_call_hangs_beyond_its_deadline_while_the_server_hangs(postgres, open_logs):
    url = postgres.new_database()
    log = open_logs(url).decision_log("paused", Deadline(SOON))
    (first,) = append(log, b"0")
    postgres.pause()
    try:
        takes(0.5, errors.DeadlineExceeded, lambda deadline: log.append(b"late", deadline))
        takes(0.5, errors.DeadlineExceeded, log.end)
        takes(0.5, errors.DeadlineExceeded, lambda deadline: list(log.read(None, None, deadline)))
        takes(0.5, errors.DeadlineExceeded, lambda deadline: log.trim(first, deadline))
        takes(0.5, errors.DeadlineExceeded, lambda deadline: open_logs(url).decision_log("other", deadline))
    finally:
        postgres.resume()
    # What nobody waited for any more was not committed behind their back.
    append(log, b"1")
    assert [record for _, record in read(log)] == [b"0", b"1"]


@pytest.mark.live
@pytest.mark.parametrize("name", ["postgres", "mariadb"])
def test_a_log_outlives_kill_9_of_its_server(request, open_logs, name):
    server = request.getfixturevalue(name)
    log = open_logs(server.new_database()).decision_log("killed", Deadline(SOON))
    told = append(log, *(b"%d" % number for number in range(20)))
    server.kill()
    with pytest.raises(errors.BrokerUnavailable):
        log.append(b"while it is gone", Deadline(0.5))
    server.start()
    (last,) = append(log, b"20")
    assert read(log) == [*((at, b"%d" % number) for number, at in enumerate(told)), (last, b"20")]


def test_a_commit_that_sqlite_refuses_leaves_no_transaction_open(tmp_path, open_engine):
    engine = open_engine(f"sqlite:///{tmp_path / 'read.db'}", connect_args={"timeout": 0.1})
    log = SqlLogs(engine).decision_log("read", Deadline(SOON))
    with engine.connect() as reader:
        reader.exec_driver_sql("BEGIN")
        assert reader.scalar(sa.text("SELECT next FROM txnbridge_logs")) == 0
        with pytest.raises(errors.OutcomeUnknown, match="lost"):  # SQLite commits when nobody reads
            log.append(b"0", Deadline(SOON))
        assert bounds(log) == (None, None)
    append(log, b"1")
    assert [record for _, record in read(log)] == [b"1"]


def test_a_commit_whose_answer_is_lost_is_unknown_and_may_be_repeated(url, open_engine):
    engine = open_engine(url)
    log = SqlLogs(engine).decision_log("lost", Deadline(SOON))
    lost = iter([True])

    @sa.event.listens_for(engine, "commit")
    def lose(connection):
        if next(lost, False):
            connection.connection.commit()
            raise sa.exc.OperationalError("COMMIT", {}, ConnectionError("gone"))

    with pytest.raises(errors.OutcomeUnknown):
        log.append(b"0", Deadline(SOON))
    append(log, b"0")
    assert [record for _, record in read(log)] == [b"0", b"0"]


class OwnLog(Through):
    """A log with connections of its own, as another process has it."""

    def __init__(self, url: str, name: str, timeout: float) -> None:
        self._logs = SqlLogs(url)
        super().__init__(self._logs.decision_log(name, Deadline(timeout)))

    def close(self) -> None:
        self._logs.close()


@pytest.mark.parametrize(
    ("count", "dying"), [(60, 0.02), pytest.param(1_000, 0.004, marks=pytest.mark.full)], ids=["some", "a-thousand"]
)
@pytest.mark.timeout(1200)
def test_four_processes_race_and_nobody_disagrees(url, tmp_path, count, dying):
    race(OwnLog, url, tmp_path, count, dying, SOON).close()


@pytest.mark.live
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_four_processes_race_and_nobody_disagrees_although_their_server_is_killed(postgres, tmp_path):
    race(OwnLog, postgres.new_database(), tmp_path, 1_000, 0.004, _KILLED_SERVER_IS_BACK, postgres, kills=10).close()


@pytest.fixture
def connect(tmp_path):
    yield from keeping(lambda broker="broker.db", **how: txnbridge.connect(f"embedded:{tmp_path / broker}", **how))


def test_a_bridges_decisions_are_in_the_database_that_it_was_told(url, connect, behind):
    with_sql = connect(decision_log=url, application="billing")
    assert with_sql.decisions().claim(("run", 1), Decision.COMMIT).mine
    assert behind.scalar(sa.text("SELECT name FROM txnbridge_logs")) == "billing"
    again = connect(decision_log=url, application="billing").decisions().claim(("run", 1), Decision.ABORT)
    assert again.decision is Decision.COMMIT
    assert connect(application="billing").decisions().read(("run", 1)).claim is None


@pytest.fixture(
    params=["embedded", *(pytest.param(name, marks=pytest.mark.full) for name in ("kafka", "pulsar", "rocketmq"))]
)
def other(request, tmp_path):
    return place_of(request.param, request, tmp_path)


def test_a_bridges_decisions_may_be_on_another_broker(connect, other):
    name = f"elsewhere-{uuid.uuid4().hex[:8]}"
    connect(decision_log=other, application=name).decisions().claim(("run", 1), Decision.COMMIT)
    with txnbridge.connect(other, application=name) as there:
        assert there.decisions().read(("run", 1)).claim
    assert connect(application=name).decisions().read(("run", 1)).claim is None
    again = connect(decision_log=other, application=name).decisions().claim(("run", 1), Decision.ABORT)
    assert not again.mine and again.decision is Decision.COMMIT


def test_the_place_of_the_decisions_may_come_from_the_environment(connect, tmp_path, monkeypatch):
    monkeypatch.setenv("DECISIONS", f"sqlite:///{tmp_path / 'decisions.db'}")
    connect(decision_log="env:DECISIONS").decisions().claim(("run", 1), Decision.COMMIT)
    assert (tmp_path / "decisions.db").exists()


def test_a_token_is_refused_by_a_bridge_that_keeps_its_decisions_elsewhere(url, tmp_path):
    with plugins.registered(LedgerBackend()):

        def status(token, **how):
            with txnbridge.connect("toy:", **how) as bridge:
                return bridge.status(token).state

        with txnbridge.connect("toy:", transactional_id="billing", decision_log=url) as bridge:
            with bridge.transaction(prepare=True) as txn:
                pass
        assert status(txn.token, decision_log=url) is TokenState.PREPARED
        for how in ({}, {"decision_log": f"sqlite:///{tmp_path / 'another.db'}"}):
            with pytest.raises(errors.InvalidToken, match="connect with the same decision_log"):
                status(txn.token, **how)
        with txnbridge.connect("toy:", transactional_id="shipping") as bridge:
            with bridge.transaction(prepare=True) as txn:
                pass
        with pytest.raises(errors.InvalidToken, match="its own broker"):
            status(txn.token, decision_log=url)


def test_an_id_in_a_log_elsewhere_belongs_to_one_cluster(url):
    """Fencing, a group's start and the lanes of half messages would otherwise be told of another cluster's."""
    backend = LedgerBackend()

    def connect(**how):
        return txnbridge.connect("toy:", transactional_id="billing", **how)

    with plugins.registered(backend):
        with connect(decision_log=url) as bridge, pytest.MonkeyPatch.context() as patched:
            patched.setattr(ToyBroker, "cluster", property(lambda _: "another", lambda *_: None), raising=False)
            with pytest.raises(errors.InvalidOption, match="billing belongs to cluster toy-cluster"):
                connect(decision_log=url)
            connect(decision_log=url, application="shipping").close()
            with bridge.transaction(prepare=True):
                pass
        connect(decision_log=url).close()


def test_the_error_without_sqlalchemy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    for name in [name for name in sys.modules if name.startswith("txnbridge.sql")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(errors.BackendMissing, match=r"pip install -e '\.\[sql\]'"):
        txnbridge.connect(f"embedded:{tmp_path}/orders.db", decision_log=f"sqlite:///{tmp_path}/decisions.db")
