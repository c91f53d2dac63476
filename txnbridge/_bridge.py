"""The bridge: one open connection to one broker, and the calls that open transactions, consumers and the rest."""

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from txnbridge._admin import Admin
from txnbridge._connection import Connection, ConnectionUser, close_logging_errors, exit_begins, random_name
from txnbridge._consumer import Consumer
from txnbridge._consumers import Consumers
from txnbridge._deadline import Deadline, check_times
from txnbridge._decision_logs import DecisionLogs, LogProvider
from txnbridge._messages import Message
from txnbridge._outcomes import Outcomes
from txnbridge._plugins import plugins
from txnbridge._publisher import Publisher
from txnbridge._token import Outcome, Status, Token
from txnbridge._topics import Topic, as_topic
from txnbridge._transaction import Transaction
from txnbridge._url import check_opening, find_backend, indirect, parse_url, resolve_options, unknown_option
from txnbridge._writers import Writers
from txnbridge.capabilities import Capabilities, Capability, Limits
from txnbridge.errors import BackendMissing, InvalidOption
from txnbridge.spi import Backend, Begin, Context, DecisionLog, Identity

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txnbridge._decisions import Decisions
    from txnbridge._half_messages import Execute, HalfMessages
    from txnbridge._processor import Each, OnBatch, Processor
    from txnbridge._resolver import Check, Resolver

_log = logging.getLogger("txnbridge")

# How often a closing bridge looks whether a transaction's call has ended; most take milliseconds.
_LOOK_SECONDS = 0.01
# The time for which a closing bridge waits for polls of other threads: twice the default timeout of a poll, so most of
# them end by themselves; a poll that waits for messages has nothing to lose.
_POLL_SECONDS = 2.0
# The share of its time for which a closing bridge waits for checks of half messages: they are the application's, and a
# check that hangs would leave no time for aborting unfinished transactions and for leaving the groups.
_CHECKS_SHARE = 0.5


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
    **backend: Mapping[str, Any],
) -> Bridge:
    """Open a bridge. Only the URL names the broker; without one `TXNBRIDGE_URL` is read.

    `transactional_id` is the name of one running instance: opening it shuts out its older owner and ends the
    transactions that this owner left open. `timeout` is the deadline of each call in seconds, `hold` how long a
    prepared transaction may live after it. `writers` transactions can be open at once. A backend's own options go into
    the URL's query or into a mapping under its name, `connect(url, embedded={"durability": "normal"})`. `decision_log`
    is another place for the decision logs: a broker's URL, or a database as SQLAlchemy's URL or an `Engine`; all
    bridges of an application give the same.

    Raise `BackendMissing`, `InvalidOption`, `BrokerUnavailable`, `AccessDenied`.
    """
    _close_dropped()
    url = url or os.environ.get("TXNBRIDGE_URL")
    if not url:
        raise InvalidOption("connect() needs a URL, such as embedded:orders.db, or TXNBRIDGE_URL set to one")
    check_opening(transactional_id, application, timeout, hold, writers, create_topics)
    address, options = parse_url(url)
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
        from txnbridge.sql import SqlLogs
    except ModuleNotFoundError as error:
        if error.name != "sqlalchemy":
            raise
        raise BackendMissing(
            "decision_log= is the URL of another broker, or a database's, which needs SQLAlchemy: in a clone of"
            " txnbridge, pip install -e '.[sql]'"
        ) from error
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
    ) -> None:
        self._url = url
        self._hold = hold
        self._create_topics = create_topics
        self._count = itertools.count(1)
        self._closing = threading.Lock()
        self._let_go = True  # until something is open
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._transactions: weakref.WeakSet[Transaction] = weakref.WeakSet()
        connection = self._connection = Connection(self, backend.name, identity, float(timeout))
        self._logs = logs = DecisionLogs(connection, elsewhere)
        self._outcomes = Outcomes(connection, logs)
        self._writers = Writers(connection, writers, logs.own_ledger)
        self._consumers = Consumers(connection, self._outcomes, self._writers)
        ours, clients = resolve_options(backend.options, options, backend.name)
        context = Context(
            bridge=connection.name,
            events=connection.events,
            application=identity.application,
            timeout=connection.timeout,
            hold=hold,
            create_topics=create_topics,
            client_options=clients,
            ledger=logs.ledger,
        )
        deadline = connection.deadline()
        with connection.events.step("bridge.open", url=str(url)):
            try:
                connection.broker = backend.open(url, ours, context, deadline)
                try:
                    if identity.owned:
                        self._writers.open(deadline)
                except BaseException:
                    close_logging_errors(connection.broker.close, deadline)
                    raise
            except BaseException:  # a program that tries again and again would leave logs open each time
                logs.close()
                raise
        self._let_go = False
        _live.add(self)

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
        """The cluster's id; tokens of another cluster are refused."""
        return self._connection.broker.cluster

    @property
    def transactional_id(self) -> str | None:
        """The name with which it was opened; None if the bridge made up a name, which no other process can hold."""
        identity = self._connection.identity
        return identity.name if identity.owned else None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this broker: native, emulated or absent."""
        return self._connection.capabilities

    @property
    def limits(self) -> Limits:
        """The broker's limits."""
        return self._connection.broker.limits

    @property
    def admin(self) -> Admin:
        """Administration: topics, groups, open transactions, and the doctor."""
        connection = self._connection
        connection.check_open()
        return Admin(connection.broker, connection.timeout, connection.events)

    def __repr__(self) -> str:
        return f"<Bridge to {self._url}>"

    # --- transactions ---------------------------------------------------------------------------------------------

    def transaction(
        self,
        *,
        timeout: float | None = None,
        prepare: bool = False,
        hold: float | None = None,
        fingerprint: bool = False,
    ) -> Transaction:
        """Begin a transaction; use it as a block. It waits for a free writer within its deadline.

        With `prepare=True` the end of the block makes it durable and invisible, and `txn.token` names it: any process
        commits or aborts it within `hold` seconds. `fingerprint=True` puts a checksum of its messages, which does not
        depend on their order, into the token (needs the package xxhash).

        Raise `DeadlineExceeded` if no writer became free, `Fenced`, `NotSupported`, `BrokerUnavailable`.
        """
        connection = self._connection
        connection.check_open()
        begin = self._new_begin(timeout, prepare, hold)
        if fingerprint:
            _require_xxhash()
        with connection.events.step("transaction.begin", begin.transaction, prepare=prepare):
            taken = self._writers.take(begin)
            try:
                taken.start()
            except BaseException:
                taken.give_back(sound=False)
                raise
        transaction = Transaction(connection, taken, self._outcomes, 0 if fingerprint else None)
        with self._guard:
            self._transactions.add(transaction)
        return transaction

    def _new_begin(self, timeout: float | None, prepare: bool, hold: float | None) -> Begin:
        connection = self._connection
        timeout = connection.timeout if timeout is None else timeout
        check_times(timeout, hold)
        hold = self._hold if hold is None else hold
        if prepare:
            self.capabilities.require(Capability.PREPARE)
            most = self.limits.prepared_seconds
            if most is not None and timeout + (hold or 0) > most:
                raise InvalidOption(
                    f"timeout and hold are {timeout + (hold or 0):g} s together; this broker allows {most:g} s"
                )
        name = f"{connection.identity.name}/{connection.name[-8:]}/{next(self._count)}"
        return Begin(name, Deadline(timeout), prepare, hold)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def commit(self, token: str | Token) -> Outcome:
        """Commit a prepared transaction, from any process. Safe to repeat.

        Return the true outcome, also if another process has aborted it. Raise `InvalidToken`, `InvalidState` for the
        token of a transaction that was not prepared, `OutcomeUnknown` if no answer came in time, `EvidenceLost` if none
        ever will.
        """
        return self._outcomes.end(token, commit=True)

    def abort(self, token: str | Token) -> Outcome:
        """Abort a prepared transaction, from any process; the rules of `commit`."""
        return self._outcomes.end(token, commit=False)

    def status(self, token: str | Token) -> Status:
        """Return what became of a token's transaction. Raise `InvalidToken`, `BrokerUnavailable`.

        This decides nothing. It may record that a deadline has passed, before it returns ABORTED for that reason.
        """
        return self._outcomes.status(token)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ensure_topics(self, *topics: str | Topic) -> list[str]:
        """Create the missing topics as they are declared; return their names.

        `Topic("orders", codecs.json, partitions=6, retention=86_400)` declares a topic; without `partitions` it gets
        `create_topics` of them, or one. An existing topic stays as it is, its retention too.

        Raise `InvalidOption` if a topic exists with another number of partitions than declared, `NotSupported` on a
        broker that cannot create topics, `AccessDenied`.
        """
        with self._connection.call():
            return self.admin._ensure(map(as_topic, topics), self._create_topics or 1)

    # --- reading, publishing, deciding ------------------------------------------------------------------------------

    def consumer(
        self,
        topics: str | Topic | Iterable[str | Topic],
        group: str | None = None,
        *,
        start: str | int = "earliest",
        sharing: str = "partition",
    ) -> Consumer:
        """Read committed messages. Members of a group share the partitions; without a group all partitions are read.

        `start` is for a group that has never read: "earliest", "latest" or a time in milliseconds since 1970.
        `sharing` is "partition" (one member a partition, in order), "message" or "key", as far as the broker can.
        """
        self._connection.check_open()
        return Consumer.open(self._consumers, topics, group, start, sharing)

    def processor(
        self,
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str,
        each: Each | None = None,
        batch: OnBatch | None = None,
        dead_letter: str | Topic | None = None,
        poison: type[Exception] | Sequence[type[Exception]] = (),
        fatal: type[Exception] | Sequence[type[Exception]] = (),
        max_attempts: int | None = None,
        max_messages: int = 500,
        max_wait: float = 0.0,
        timeout: float | None = None,
        stop_timeout: float = 30.0,
        max_dead_letters_in_a_row: int | None = 10,
        backoff: tuple[float, float] = (0.1, 30.0),
        retry_for: float | None = None,
        start: str | int = "earliest",
    ) -> Processor:
        """Return a loop that consumes, transforms and produces exactly once; see `Processor` for its settings."""
        self._connection.check_open()
        from txnbridge._processor import Processor

        return Processor(
            self._consumers,
            self.transaction,
            inputs,
            group=group,
            each=each,
            batch=batch,
            dead_letter=dead_letter,
            poison=poison,
            fatal=fatal,
            max_attempts=max_attempts,
            max_messages=max_messages,
            max_wait=max_wait,
            timeout=timeout,
            stop_timeout=stop_timeout,
            max_dead_letters_in_a_row=max_dead_letters_in_a_row,
            backoff=backoff,
            retry_for=retry_for,
            start=start,
        )

    def read(self, topic: str | Topic, limit: int) -> list[Message]:
        """Return the first `limit` committed messages of a topic that are readable now, without a group."""
        if type(limit) is not int or limit < 0:
            raise InvalidOption(f"limit is how many messages to read, from 0, not {limit!r}")
        found: list[Message] = []
        with self.consumer(topic) as consumer:
            while len(found) < limit:
                # A short poll may return early without messages, so the lag tells when all is read.
                if not (batch := consumer.poll(limit - len(found), timeout=0.05)) and not any(consumer.lag().values()):
                    break
                found += batch
        return found

    def half_messages(self, group: str, *, execute: Execute, check: Check) -> HalfMessages:
        """Return a sender of messages that wait for local work, such as a database's commit, and follow its outcome.

            with bridge.half_messages("shop", execute=book, check=was_booked) as sales:
                with sales.transaction(order) as txn:          # stored at the end of the block; then book(txn, order)
                    txn.send("orders", ...)

        `execute(txn, arg)` does the work and returns a `Decision`; `raise Abort` is ABORT. If it raises another error,
        or its process dies, any process of the group is asked: its `check(transaction_id, messages)` looks where the
        work is stored. It answers ABORT only if the work cannot be done any more, UNDECIDED if it cannot know yet.

        Raise `NotSupported` if the broker has no half messages.
        """
        self._connection.check_open()
        from txnbridge._half_messages import HalfMessages

        return HalfMessages(self._connection, group, execute, check)

    def resolver(
        self,
        group: str,
        *,
        check: Check,
        parallel: int = 4,
        check_timeout: float = 30.0,
        stop_timeout: float = 30.0,
    ) -> Resolver:
        """Return a resolver for half messages whose sender did not tell the outcome of its work; see `Resolver`."""
        self._connection.check_open()
        from txnbridge._resolver import Resolver

        return Resolver(
            self._connection,
            group,
            check,
            parallel=parallel,
            check_timeout=check_timeout,
            stop_timeout=stop_timeout,
        )

    def publisher(self, name: str | None = None) -> Publisher:
        """Return a publisher: it sends in order and idempotently, without a transaction.

        With a name it can resume after a crash, by sequences.
        """
        self._connection.check_open()
        self.capabilities.require(Capability.IDEMPOTENT_SEND)
        if name is not None:
            self.capabilities.require(Capability.RESUME_SEQUENCE)
        connection = self._connection
        with connection.call():
            return Publisher(connection, connection.broker.publisher(name, connection.deadline()))

    def decisions(self, name: str | None = None) -> Decisions:
        """Open the decision log of this bridge's application, or of another name: the first decision for an id wins."""
        connection = self._connection
        with connection.call():
            return self._logs.open(name or connection.identity.application, connection.deadline())

    # --- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, wait for running ones, abort unfinished transactions, leave all groups, and disconnect.

        Prepared transactions live on. Closing takes no longer than the bridge's timeout. It waits that long for running
        calls, two seconds for a poll, and half of the time for a check of half messages. Safe to repeat; a second
        thread waits for the first one that closes.

        If it interrupts a call of this bridge on the same thread (in a signal handler or a listener), it refuses new
        calls and returns: that call goes on to its end, and the next `close()`, at the end of the bridge's block or of
        the program, does the rest.
        """
        connection = self._connection
        if connection.forked:
            return
        connection.refuse_calls()
        if self._is_calling():  # an exception would make the interrupted commit look as if it had failed
            _log.info("%r takes no new calls; it is let go by the next close(), after the call that runs", self)
            return
        deadline = connection.deadline()
        if not self._closing.acquire(timeout=deadline.left()):
            _log.warning("closing: another thread has been closing %r for %g s", self, deadline.seconds)
            return
        try:
            if not self._let_go:
                self._close(deadline)
                self._let_go = True
        finally:
            self._closing.release()

    def _close(self, deadline: Deadline) -> None:
        connection = self._connection
        with connection.events.step("bridge.close"):
            checks = Deadline(deadline.left() * _CHECKS_SHARE)
            for resolver in list(connection.resolvers):
                close_logging_errors(resolver.stop_by, checks)
            self._end_calls(deadline)
            self._consumers.close(Deadline(min(deadline.left(), _POLL_SECONDS)), deadline)
            self._writers.close()
            # The broker first: it records in the decision logs what its publishers have stored.
            close_logging_errors(connection.broker.close, deadline)
            self._logs.close()
            self._logs.close_provider()
        _live.discard(self)

    def _is_calling(self) -> bool:
        """Return whether `close` has interrupted another call of this bridge on this thread."""
        frame = sys._getframe(1).f_back  # the caller of `close`
        if frame is not None and frame.f_code is Bridge.__exit__.__code__:
            frame = frame.f_back
        while frame is not None:
            caller = frame.f_locals.get("self")
            if caller is self or (isinstance(caller, ConnectionUser) and caller._connection is self._connection):
                return True
            frame = frame.f_back
        return False

    def _end_calls(self, deadline: Deadline) -> None:
        """Abort the transactions on which no call runs, and wait for running calls."""
        connection = self._connection
        while True:
            self._writers.clear_abandoned(deadline)
            with self._guard:
                unfinished = list(self._transactions)
            for transaction in unfinished:
                self._abort_unfinished(transaction, deadline)
            if not self._writers.busy and not connection.running_calls:
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
            warnings.warn(
                f"transaction {transaction.id} was left unfinished; it is aborted",
                ResourceWarning,
                stacklevel=4,
            )

    def __enter__(self) -> Bridge:
        self._connection.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_let_go", True) and not self._connection.forked:
            # The next `connect` closes it: garbage is collected at any time, also while locks are held.
            _dropped.append(self)
            warnings.warn(
                f"{self!r} was dropped without close(); it is closed by the next connect(), or when the program ends",
                ResourceWarning,
                stacklevel=2,
            )

    def _forget_parent(self) -> None:
        """Refuse all calls, in the child of a fork."""
        self._connection.forget_parent()
        for transaction in list(self._transactions):
            transaction._refuse_calls()


class _OtherBroker:
    """Keeps the decision logs on another broker."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def cluster(self, _: Deadline) -> str:
        return self._bridge.cluster

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        self._bridge.capabilities.require(Capability.DECISION_LOG)
        return self._bridge._connection.broker.decision_log(name, deadline)

    def close(self) -> None:
        self._bridge.close()


def _require_xxhash() -> None:
    try:
        import xxhash  # noqa: F401
    except ImportError:
        raise InvalidOption("fingerprint=True needs a package: pip install xxhash") from None


_live: weakref.WeakSet[Bridge] = weakref.WeakSet()
_dropped: deque[Bridge] = deque()  # garbage-collected without `close`


def _close_dropped() -> None:
    with suppress(IndexError):
        while True:
            close_logging_errors(_dropped.popleft().close)


def _after_fork() -> None:
    for bridge in [*_live, *_dropped]:
        bridge._forget_parent()
    _live.clear()
    _dropped.clear()


def _at_exit() -> None:
    exit_begins()
    for bridge in list(_live):
        close_logging_errors(bridge.close)
    _close_dropped()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
