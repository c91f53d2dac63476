"""`Bridge`: one open connection to one broker, with the calls that open transactions, consumers and other objects."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from txnbridge._admin import Admin
from txnbridge._base.connection import Connection, ConnectionUser, close_logging_errors, exit_begins, random_name
from txnbridge._base.deadline import Deadline, check_times
from txnbridge._base.messages import Message
from txnbridge._base.plugins import plugins
from txnbridge._base.token import Outcome, Status, Token
from txnbridge._base.topic import Topic, as_topic
from txnbridge._base.url import check_opening, find_backend, indirect, parse_url, resolve_options, unknown_option
from txnbridge._decisions.logs import DecisionLogs, LogProvider
from txnbridge._read.consumer import Consumer
from txnbridge._read.open_consumers import Consumers
from txnbridge._write.group_commit import GroupCommit
from txnbridge._write.publisher import Publisher
from txnbridge._write.token_operations import Outcomes
from txnbridge._write.transaction import Transaction
from txnbridge._write.writers import Writers
from txnbridge.capabilities import Capabilities, Capability, Limits
from txnbridge.errors import BackendMissing, InvalidOption, NotSupported
from txnbridge.spi import Backend, Begin, Context, DecisionLog, Identity, Option

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from sqlalchemy import Engine

    from txnbridge._decisions.decisions import Decisions
    from txnbridge._half.half_messages import Execute, HalfMessages
    from txnbridge._half.resolver import Check, Resolver
    from txnbridge._half.topic_half_store import LaneStore
    from txnbridge._process.processor import Each, OnBatch, Processor, ProcessorSettings
    from txnbridge.sql import Outbox, Relay
    from txnbridge.sql.barrier import Barriers, BarrierTransaction, SessionOrEngine
    from txnbridge.sql.relay import RelaySettings

_log = logging.getLogger("txnbridge")

# The interval at which a closing bridge checks whether other threads' calls have ended; most take milliseconds.
_LOOK_SECONDS = 0.01
# The share of its timeout for which a closing bridge waits for `check` functions of half messages: they are code of the
# application, and one that hangs must leave time for aborting unfinished transactions and leaving the groups.
_CHECKS_SHARE = 0.5


# The options of `connect` that the URL may have.
_OPTIONS = {
    "create_topics": Option(int, None, "the partitions of a missing topic at its first use; 0: it is not created"),
    "group_commit": Option(bool, None, "whether small transactions of several threads share one"),
}


def connect(
    url: str | None = None,
    *,
    transactional_id: str | None = None,
    application: str | None = None,
    timeout: float = 30,
    hold: float | None = None,
    writers: int = 4,
    create_topics: int | None = None,
    decision_log: str | Engine | None = None,
    group_commit: bool | None = None,
    **backend: Mapping[str, Any],
) -> Bridge:
    """Open a bridge to the broker at `url`, by default that of the environment variable `TXNBRIDGE_URL`.

    `transactional_id` names one running instance of the program: opening the id fences its older owner and ends the
    transactions that this owner left open. `timeout` is the deadline of each call and each transaction in seconds;
    `hold` is how long a transaction may stay prepared after its deadline. At most `writers` transactions can be open at
    the broker at once. `group_commit` is whether small transactions of several threads share one transaction of the
    broker: None for the backend's default, True also for a transaction that is the only one. `create_topics` and
    `group_commit` may be in the URL's query, too; the argument counts first. A backend's own options are given there or
    as a mapping under the backend's name, such as `connect(url, embedded={"lease_seconds": 30})`. `decision_log` is
    another store for the decision logs: a broker's URL, or a database as SQLAlchemy's URL or an `Engine`; it must be
    the same in all bridges of an application.

    Raise `BackendMissing` if the backend is not installed, `InvalidOption` for a wrong argument, `BrokerUnavailable` if
    the broker does not answer, `AccessDenied` if it refuses the credentials.
    """
    _close_dropped()
    url = url or os.environ.get("TXNBRIDGE_URL")
    if not url:
        raise InvalidOption("connect() needs a URL, such as embedded:orders.db, or TXNBRIDGE_URL set to one")
    address, options = parse_url(url)
    ours, _ = resolve_options(_OPTIONS, {name: options.pop(name) for name in _OPTIONS if name in options}, "")
    create_topics = ours["create_topics"] if create_topics is None else create_topics
    group_commit = ours["group_commit"] if group_commit is None else group_commit
    check_opening(transactional_id, application, timeout, hold, writers, create_topics, group_commit)
    chosen = find_backend(address.scheme)
    for name, settings in backend.items():
        if name != chosen.name:
            raise unknown_option(
                name, [chosen.name, *(connect.__kwdefaults__ or ())], f"connect() to {address.scheme}:"
            )
        if not isinstance(settings, Mapping):
            raise InvalidOption(f"{name}= is a mapping of options, not {type(settings).__name__}")
        if twice := options.keys() & settings.keys():
            raise InvalidOption(f"option {min(twice)!r} is given twice, in the URL and in {name}=")
        options |= settings
    application = application or transactional_id or "default"
    elsewhere = None if decision_log is None else _log_provider(decision_log, application, timeout)
    try:
        return Bridge(
            chosen,
            address,
            options,
            identity=Identity(
                name=transactional_id or f"anonymous-{random_name(8)}",
                owned=transactional_id is not None,
                application=application,
                host=f"{os.uname().nodename} pid {os.getpid()}",
            ),
            timeout=timeout,
            hold=hold,
            writers=writers,
            create_topics=create_topics,
            elsewhere=elsewhere,
            group_commit=group_commit,
        )
    except BaseException:
        if elsewhere is not None:
            close_logging_errors(elsewhere.close)
        raise


def _log_provider(where: str | Engine, application: str, timeout: float) -> LogProvider:
    if isinstance(where, str):
        where = str(indirect("decision_log", where))
        if any(where.partition(":")[0] in backend.schemes for backend in plugins.backends()):
            return _OtherBroker(connect(where, application=application, timeout=timeout))
    try:
        from txnbridge.sql.decision_log import SqlLogs
    except ModuleNotFoundError as error:
        raise BackendMissing(f"decision_log= is the URL of another broker, or a database's: {error}") from error
    return SqlLogs(where)


class Bridge:
    """One open connection to one broker; any number of threads may use it. Made by `connect`."""

    def __init__(
        self,
        backend: Backend,
        url: Any,
        options: Mapping[str, Any],
        *,
        identity: Identity,
        timeout: float,
        hold: float | None,
        writers: int,
        create_topics: int | None,
        elsewhere: LogProvider | None = None,
        group_commit: bool | None = None,
    ) -> None:
        self._url = url
        self._hold = hold
        self._create_topics = create_topics
        self._count = itertools.count(1)
        self._closing = threading.Lock()
        self._let_go = True  # True if `close` has nothing to close
        self._aborted: list[str] = []  # the ids of unfinished transactions that `close` has aborted
        self._guard = threading.RLock()  # reentrant, because a signal handler may run while it is held
        self._transactions: weakref.WeakSet[Transaction] = weakref.WeakSet()
        connection = self._connection = Connection(self, backend.name, identity, float(timeout))
        self._logs = logs = DecisionLogs(connection, elsewhere)
        self._outcomes = Outcomes(connection, logs)
        self._writers = Writers(connection, writers, logs.own_ledger)
        self._consumers = Consumers(connection, self._outcomes, self._writers)
        self._barriers: Barriers | None = None
        self._half_lanes: LaneStore | None = None
        connection.half_lanes = self._open_half_lanes
        ours, clients = resolve_options(backend.options, options, backend.name, _OPTIONS)
        context = Context(
            bridge=connection.name,
            events=connection.events,
            application=identity.application,
            timeout=connection.timeout,
            hold=hold,
            create_topics=create_topics,
            own_logs=elsewhere is None,
            client_options=clients,
            ledger=logs.ledger,
        )
        deadline = connection.deadline()
        with connection.events.step("bridge.open", url=str(url)):
            try:
                backend.check_installed()
                connection.broker = backend.open(url, ours, context, deadline)
                self._group_commit = self._new_group_commit(group_commit, writers)
                if identity.owned:
                    self._writers.open(deadline)
                _live[self] = None
                self._let_go = False
            except BaseException:  # a program that retries `connect` must not leave anything open each time
                if connection._broker is not None:
                    close_logging_errors(connection._broker.close, deadline)
                logs.close()
                raise

    def _new_group_commit(self, wanted: bool | None, writers: int) -> GroupCommit | None:
        connection = self._connection
        broker = connection.broker
        if wanted and not broker.group_commit:
            text = "the transactions of several threads cannot share one on this broker (group_commit=True)"
            raise NotSupported(text)
        if not (broker.group_commit if wanted is None else wanted):
            return None
        # Up to this many open transactions none is gathered: most brokers commit those of several writers in parallel.
        beyond = 0 if wanted else 1 if broker.commits_in_turn else writers
        new_parameters = lambda: self._new_begin(None, False, None)  # noqa: E731
        return GroupCommit(connection, self._writers, self._outcomes, new_parameters, beyond)

    # --- properties -----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The broker's address, without secrets."""
        return str(self._url)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._connection.backend

    @property
    def cluster(self) -> str:
        """The id of the broker's cluster; tokens of another cluster are refused."""
        return self._connection.broker.cluster

    @property
    def transactional_id(self) -> str | None:
        """The transactional id given to `connect`; None if the bridge made up an id, which no other process has."""
        identity = self._connection.identity
        return identity.name if identity.owned else None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this broker, each native, emulated or absent."""
        return self._connection.capabilities

    @property
    def limits(self) -> Limits:
        """The broker's limits."""
        return self._connection.broker.limits

    @property
    def admin(self) -> Admin:
        """The broker's administration: topics, groups, open transactions, and the checks of `txnbridge doctor`."""
        connection = self._connection
        connection.check_open()
        return Admin(connection)

    def __repr__(self) -> str:
        return f"<Bridge to {self._url}>"

    # --- transactions ---------------------------------------------------------------------------------------------

    @overload
    def transaction(
        self,
        *,
        timeout: float | None = None,
        prepare: bool = False,
        hold: float | None = None,
        fingerprint: bool = False,
        group_commit: bool = True,
    ) -> Transaction: ...

    @overload
    def transaction(
        self, *, db: SessionOrEngine, group: str | None = None, timeout: float | None = None
    ) -> BarrierTransaction: ...

    def transaction(
        self,
        *,
        timeout: float | None = None,
        prepare: bool = False,
        hold: float | None = None,
        fingerprint: bool = False,
        group_commit: bool = True,
        db: SessionOrEngine | None = None,
        group: str | None = None,
    ) -> Transaction | BarrierTransaction:
        """Begin a transaction, for a `with` block. Wait for a free writer, at most until the transaction's deadline.

        With `prepare=True` the end of the block does not commit the transaction, but makes it durable, still invisible
        to readers: any process can commit or abort it by `txn.token` within `hold` seconds. `fingerprint=True` puts a
        checksum of the messages, independent of their order, into the token (this needs the package xxhash).
        `group_commit=False` keeps the transaction from sharing one of the broker with other threads (group commit).

        With `db=`, an `Engine`, a `Session` or a sessionmaker of SQLAlchemy, the end of the block commits a transaction
        of this database and publishes the messages, both or neither:

            with bridge.transaction(db=engine) as txn:
                txn.db.execute(...)
                txn.send("orders", ...)

        `group` is the name, by default the application's, under which any process may resolve the transaction of a dead
        one. While the bridge is open it runs a resolver for this group and database.

        Raise `DeadlineExceeded` if no writer became free, `Fenced` if the transactional id has a newer owner,
        `NotSupported` if the broker cannot do it, `BrokerUnavailable` if the broker does not answer.
        """
        self._connection.check_open()
        if db is not None:
            if prepare or hold is not None or fingerprint or not group_commit:
                text = "db= goes with timeout= and group=, not with prepare=, hold=, fingerprint=, group_commit="
                raise InvalidOption(text)
            return self._open_barriers().transaction(db, group, timeout)
        if group is not None:
            raise InvalidOption("group= is for transactions with db=")
        transaction = self._begin(timeout, prepare, hold, fingerprint, group_commit)
        self._adopt(transaction)
        return transaction

    def _begin(
        self,
        timeout: float | None,
        prepare: bool,
        hold: float | None,
        fingerprint: bool,
        group_commit: bool,
        mark: str = "",
    ) -> Transaction:
        """Begin a transaction. Until the caller gives it to `_adopt`, `close` waits for it and does not abort it."""
        connection = self._connection
        connection.check_open()
        if not type(prepare) is type(fingerprint) is type(group_commit) is bool:
            raise InvalidOption("prepare, fingerprint and group_commit are True or False")
        begin = self._new_begin(timeout, prepare, hold, mark)
        if fingerprint:
            try:
                import xxhash  # noqa: F401
            except ImportError:
                raise InvalidOption("fingerprint=True needs a package: pip install xxhash") from None
        with connection.events.step("transaction.begin", begin.transaction, prepare=prepare):
            if self._group_commit is None or not group_commit or prepare or fingerprint:
                taken = self._writers.take(begin)
            else:
                taken = self._group_commit.take(begin)
            try:
                taken.start()
            except BaseException:
                taken.give_back(sound=False)
                raise
        return Transaction(connection, taken, self._outcomes, 0 if fingerprint else None)

    def _begin_part(self, mark: str, timeout: float, hold: float) -> Transaction:
        """Begin this broker's part of a span (a transaction over several brokers); its id ends with `mark`."""
        transaction = self._begin(timeout, True, hold, False, False, mark)
        transaction._in_span = bool(self.capabilities[Capability.STATUS_LOOKUP])
        self._adopt(transaction)
        return transaction

    def _begin_from_loop(self, timeout: float | None) -> Transaction | None:
        """Begin a transaction that needs no request yet, or return None, so that an event loop may call this."""
        connection = self._connection
        observed = connection.events.wants("transaction.begin")
        if self._group_commit is None or observed or connection.closed:
            return None
        member = self._group_commit.gather(self._new_begin(timeout, False, None))
        return None if member is None else Transaction(connection, member, self._outcomes, None)

    def _adopt(self, transaction: Transaction) -> None:
        """Remember a transaction, so that `close` aborts it if it is still unfinished when the bridge is closed."""
        with self._guard:
            self._transactions.add(transaction)

    def _new_begin(self, timeout: float | None, prepare: bool, hold: float | None, mark: str = "") -> Begin:
        connection = self._connection
        timeout = connection.timeout if timeout is None else timeout
        check_times(timeout, hold)
        if hold is not None and not prepare:
            raise InvalidOption("hold= is for transactions with prepare=True")
        hold = self._hold if hold is None else hold
        if prepare:
            self.capabilities.require(Capability.PREPARE)
            most = self.limits.prepared_seconds
            if most is not None and timeout + (hold or 0) > most:
                text = f"timeout and hold are {timeout + (hold or 0):g} s together; this broker allows {most:g} s"
                raise InvalidOption(text)
        name = f"{connection.identity.name}/{connection.name[-8:]}/{next(self._count)}{mark}"
        return Begin(name, Deadline(timeout), prepare, hold, in_span=bool(mark))

    # --- tokens ---------------------------------------------------------------------------------------------------

    def commit(self, token: str | Token, timeout: float | None = None) -> Outcome:
        """Commit a prepared transaction by its token, from any process. Safe to repeat.

        `timeout` is the time for this call in seconds, by default that of the bridge. Return the true outcome: ABORTED
        if another process has aborted the transaction before. Raise `InvalidToken` for a text that is no token of this
        cluster, `InvalidState` for the token of a transaction that was not prepared, `OutcomeUnknown` if the broker
        does not answer in time, `EvidenceLost` if the outcome can never be known.
        """
        return self._outcomes.end(token, True, timeout)

    def abort(self, token: str | Token, timeout: float | None = None) -> Outcome:
        """Abort a prepared transaction by its token, from any process. It returns and raises what `commit` does."""
        return self._outcomes.end(token, False, timeout)

    def status(self, token: str | Token) -> Status:
        """Return the status of a token's transaction without ending the transaction.

        If the transaction's deadline has passed, its abort may be recorded before ABORTED is returned. Raise
        `InvalidToken` for a text that is no token of this cluster, `BrokerUnavailable` if the broker does not answer.
        """
        return self._outcomes.status(token)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ensure_topics(self, *topics: str | Topic) -> list[str]:
        """Create missing topics with their declared partitions and retention; return the created topics' names.

        `Topic("orders", codecs.json, partitions=6, retention_seconds=86_400)` declares a topic; without `partitions` it
        gets as many partitions as `connect(create_topics=…)` says, or one. An existing topic, with its retention, is
        not changed.

        Raise `InvalidOption` if a topic exists with another number of partitions than declared, `NotSupported` on a
        broker that cannot create topics, `AccessDenied` if the broker refuses to create them.
        """
        with self._connection.call():
            return self.admin._ensure(map(as_topic, topics), self._create_topics or 1)

    # --- reading, publishing, deciding ------------------------------------------------------------------------------

    def consumer(
        self,
        topics: str | Topic | Iterable[str | Topic],
        group: str | None = None,
        *,
        start: str | int | datetime = "earliest",
        sharing: str = "partition",
    ) -> Consumer:
        """Return a consumer of committed messages. Group members share the partitions; without a group all are read.

        `start` is where a group begins that has never read: "earliest", "latest" or a time in milliseconds since 1970.
        `sharing` is "partition" (each partition is read in order by one member), or, if the broker supports it,
        "message" or "key" (members share each partition message by message, or key by key).
        """
        self._connection.check_open()
        return Consumer._open(self._consumers, topics, group, start, sharing)

    def processor(
        self,
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str,
        each: Each | None = None,
        batch: OnBatch | None = None,
        to: Bridge | None = None,
        **settings: Unpack[ProcessorSettings],
    ) -> Processor:
        """Return a `Processor`, which consumes, transforms and produces exactly once; see there for the settings.

        With `to`, a bridge to another cluster, the handler's `txn` sends there, in transactions over both (`spanning`).
        """
        self._connection.check_open()
        from txnbridge._process.processor import Processor

        begin = self._begins_passes(to, settings.get("db"))
        return Processor(self._consumers, begin, inputs, group=group, each=each, batch=batch, **settings)

    def _begins_passes(self, to: Bridge | None, db: object) -> Callable[..., Any]:
        """Return the function that begins a processor's transactions, which send to the bridge `to` if it is given."""
        if to is None:
            return partial(self.transaction, group_commit=False)
        if db is not None:
            raise InvalidOption("db= and another broker do not go together: consume into the database, use an outbox")
        from txnbridge._half.span import spans_over
        from txnbridge._half.span_pass import SpanPass

        spans_over((to, self), least=2).open()  # ends what dead processes have left, also before the first pass
        return partial(SpanPass, self, to)

    def read(self, topic: str | Topic, limit: int) -> list[Message]:
        """Return the first `limit` committed messages of a topic that are readable now; read without a group."""
        if type(limit) is not int or limit < 0:
            raise InvalidOption(f"limit is how many messages to read, from 0, not {limit!r}")
        found: list[Message] = []
        with self.consumer(topic) as consumer:
            while len(found) < limit:
                # A short poll may return before the end without messages, so the lag decides whether all is read.
                if not (batch := consumer.poll(limit - len(found), timeout=0.05)) and not any(consumer.lag().values()):
                    break
                found += batch
        return found

    def half_messages(self, group: str, *, execute: Execute, check: Check) -> HalfMessages:
        """Return a sender of half messages: published if local work, such as a database's commit, succeeds.

            with bridge.half_messages("shop", execute=book, check=was_booked) as sales:
                with sales.transaction(order) as txn:          # stored at the end of the block; then book(txn, order)
                    txn.send("orders", ...)

        `execute(txn, arg)` does the work and returns a `Decision`; `raise Abort` means ABORT. If `execute` raises
        another error, or its process dies, any process of the group calls its `check(transaction_id, messages)`, which
        looks up whether the work was done. `check` may return ABORT only if the work cannot be done any more, and
        returns UNDECIDED if the outcome is not certain yet.

        Raise `NotSupported` if the broker has no half messages.
        """
        self._connection.check_open()
        from txnbridge._half.half_messages import HalfMessages

        return HalfMessages(self._connection, group, execute, check)

    def _open_half_lanes(self) -> LaneStore:
        from txnbridge._half.topic_half_store import LaneStore

        with self._guard:
            if self._half_lanes is None:
                self._half_lanes = LaneStore(self._consumers, self._logs)
            return self._half_lanes

    def resolver(
        self,
        group: str,
        *,
        check: Check | None = None,
        db: str | Engine | None = None,
        parallel: int = 4,
        check_timeout: float = 30.0,
        stop_timeout: float = 30.0,
    ) -> Resolver:
        """Return a `Resolver`, which decides half messages whose sender did not report the outcome of its work.

        For those of `half_messages` give `check`, for those of `transaction(db=…)` give `db`, the database as
        SQLAlchemy's URL or an `Engine`.
        """
        self._connection.check_open()
        from txnbridge._half.common import refuse_records_of_spans

        refuse_records_of_spans(group)
        settings: dict[str, Any] = {"parallel": parallel, "check_timeout": check_timeout, "stop_timeout": stop_timeout}
        if check is not None and db is None:
            from txnbridge._half.resolver import Resolver

            return Resolver(self._connection, group, check, **settings)
        if db is None or check is not None:
            raise InvalidOption("a resolver takes either check= or db=")
        from txnbridge.sql.barrier import BarrierResolver, BarrierTable

        with self._connection.call():
            barrier = BarrierTable.open(db, group, self._connection.deadline())
        return BarrierResolver(self._connection, barrier, **settings)

    def _open_barriers(self) -> Barriers:
        from txnbridge.sql.barrier import Barriers

        with self._guard:
            self._barriers = self._barriers or Barriers(self._connection)
            return self._barriers

    def relay(self, outbox: Outbox, database: str | Engine, **settings: Unpack[RelaySettings]) -> Relay:
        """Return a `Relay`, which publishes the rows of an outbox exactly once; see there for the settings.

            with bridge.relay(outbox, engine):
                ...  # programs send with `outbox.send(session, ...)` and commit

        `database` is an `Engine` of SQLAlchemy, or its URL. Raise `NotSupported` if the broker cannot prepare
        transactions.
        """
        self._connection.check_open()
        from txnbridge.sql.relay import Relay

        return Relay(self._connection, self, outbox, database, **settings)

    def publisher(self, name: str | None = None) -> Publisher:
        """Return a publisher, which sends messages in order and idempotently, without a transaction.

        With a `name` it can resume after a crash, by the sequences of its messages.
        """
        self._connection.check_open()
        self.capabilities.require(Capability.IDEMPOTENT_SEND)
        if name is not None:
            if not (isinstance(name, str) and name.strip()):
                raise InvalidOption("a publisher's name is non-empty text; leave it out to have none")
            self.capabilities.require(Capability.RESUME_SEQUENCE)
        connection = self._connection
        with connection.call():
            return Publisher(connection, connection.broker.publisher(name, connection.deadline()), name)

    def decisions(self, name: str | None = None) -> Decisions:
        """Open the decision log `name`, by default this application's; the first claim on an id counts."""
        connection = self._connection
        with connection.call():
            return self._logs.open(name or connection.identity.application, connection.deadline())

    # --- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, wait for running ones, abort unfinished transactions, leave all groups, and disconnect.

        Prepared transactions stay prepared. Closing takes at most the bridge's timeout: it waits so long for running
        calls, two seconds for a poll, and half of the timeout for a check of half messages. Safe to repeat; a second
        thread that calls `close` waits for the first.

        If `close` is called inside a call of this bridge on the same thread (by a signal handler or a listener), it
        only refuses new calls and returns. The interrupted call continues, and the next `close()`, at the end of the
        bridge's block or of the program, does the rest.
        """
        connection = self._connection
        if connection.forked:
            return
        deadline = connection.deadline()
        services, is_calling = Deadline(deadline.left() * _CHECKS_SHARE), self._is_calling()
        if not is_calling:  # on some brokers only a resolver publishes, and it has to make calls for that
            self._stop_services(services)
        connection.refuse_calls()
        if is_calling:  # raising here would make the program believe that the interrupted commit had failed
            _log.info("%r takes no new calls; it is let go by the next close(), after the call that runs", self)
            return
        held: list[bool] = []
        try:
            if not deadline.acquire(self._closing, held):
                _log.warning("closing: another thread has been closing %r for %g s", self, deadline.seconds)
                return
            if not self._let_go:
                self._stop_services(services)  # calls that have begun meanwhile
                self._close(deadline)
                self._let_go = True
        finally:
            if held:
                self._closing.release()
        self._warn_of_aborted()

    def _warn_of_aborted(self) -> None:
        """Warn of transactions that were left unfinished. `close` does so last: a warning may be raised as an error."""
        aborted, self._aborted = self._aborted, []
        for transaction in aborted:
            text = f"transaction {transaction} was left unfinished; it is aborted"
            warnings.warn(text, ResourceWarning, stacklevel=3)

    def _stop_services(self, deadline: Deadline) -> None:
        for service in list(self._connection.services):
            close_logging_errors(service.stop_by, deadline)

    def _close(self, deadline: Deadline) -> None:
        connection = self._connection
        with connection.events.step("bridge.close"):
            self._end_calls(deadline)
            self._consumers.close(Deadline(min(deadline.left(), connection.timing.closing_polls)), deadline)
            self._writers.close()
            if self._half_lanes is not None:
                self._half_lanes.close()
            if self._group_commit is not None:
                self._group_commit.close()
            # The broker is closed before the decision logs, to which it may append what its publishers have stored.
            close_logging_errors(connection.broker.close, deadline)
            self._logs.close()
            self._logs.close_provider()
        _live.pop(self, None)

    def _is_calling(self) -> bool:
        """Return whether this thread is inside another call of this bridge, during which `close` was called."""
        frame = sys._getframe(1).f_back  # the caller of `close`
        if frame is not None and frame.f_code is Bridge.__exit__.__code__:
            frame = frame.f_back
        while frame is not None:
            user = frame.f_locals.get("self")
            if user is self or (
                isinstance(user, ConnectionUser) and getattr(user, "_connection", 0) is self._connection
            ):
                return True
            frame = frame.f_back
        return False

    def _end_calls(self, deadline: Deadline) -> None:
        """Abort the transactions on which no call is running, and wait for running calls to end."""
        connection = self._connection
        while True:
            self._writers.clear_abandoned(deadline)
            with self._guard:
                unfinished = list(self._transactions)
            for transaction in unfinished:
                self._abort_unfinished(transaction, deadline)
            if not (self._writers.busy or self._writers.open_transactions or connection.running_calls):
                return
            if deadline.expired:
                break
            connection.wait_for_call(min(deadline.left(), _LOOK_SECONDS))
        _log.warning("closing: calls of other threads still run after %g s; they are left to them", deadline.seconds)

    def _abort_unfinished(self, transaction: Transaction, deadline: Deadline) -> None:
        try:
            aborted = transaction._end_from_outside(deadline)
        except Exception as error:
            _log.warning("closing: %s", error)
            return
        if aborted:
            self._aborted.append(transaction.id)

    def __enter__(self) -> Bridge:
        self._connection.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_let_go", True) and not self._connection.forked:
            # The next `connect` closes the bridge, because garbage collection may run while locks are held.
            _dropped.append(self)
            text = f"{self!r} was dropped without close(); it is closed by the next connect(), or when the program ends"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _forget_parent(self) -> None:
        """Refuse all calls on this bridge in the child of a fork."""
        self._connection.forget_parent()
        for transaction in list(self._transactions):
            transaction._refuse_calls()


class _OtherBroker:
    """A `LogProvider` on another broker than the bridge's, given by `connect(decision_log=…)`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def cluster(self, _: Deadline) -> str:
        return self._bridge.cluster

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        self._bridge.capabilities.require(Capability.DECISION_LOG)
        return self._bridge._connection.broker.decision_log(name, deadline)

    def close(self) -> None:
        self._bridge.close()


_live: weakref.WeakKeyDictionary[Bridge, None] = weakref.WeakKeyDictionary()  # in the order of their opening
_dropped: deque[Bridge] = deque()  # bridges that were garbage-collected without `close`


def open_bridges() -> list[Bridge]:
    """Return the bridges of this process that are open."""
    return [bridge for each in _live.keyrefs() if (bridge := each()) is not None]  # other threads may open bridges


def _close_dropped() -> None:
    with suppress(IndexError):
        while True:
            close_logging_errors(_dropped.popleft().close)


def _after_fork() -> None:
    plugins.lock = threading.RLock()  # a thread that is not in this process may have held it
    for bridge in [*open_bridges(), *_dropped]:
        bridge._forget_parent()
    _live.clear()
    _dropped.clear()


def _at_exit() -> None:
    exit_begins()
    for bridge in reversed(open_bridges()):  # that of `decision_log=` was opened before the bridge that needs it
        close_logging_errors(bridge.close)
    _close_dropped()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
