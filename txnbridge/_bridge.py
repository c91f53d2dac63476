"""The bridge: one open connection to one broker, and everything that starts from it."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from txnbridge._admin import Admin
from txnbridge._consumer import Consumer, topic_list
from txnbridge._deadline import Deadline, check_times
from txnbridge._events import Emitter
from txnbridge._ledger import LazyLedger
from txnbridge._messages import Message
from txnbridge._plugins import plugins
from txnbridge._publisher import Publisher
from txnbridge._token import Outcome, Status, Token, TokenState
from txnbridge._topics import Topic, as_topic
from txnbridge._transaction import Transaction
from txnbridge._turns import Turns
from txnbridge._url import check_opening, find_backend, indirect, parse_url, resolve_options, unknown_option
from txnbridge.capabilities import Capabilities, Capability, Limits
from txnbridge.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    EvidenceLost,
    InvalidOption,
    InvalidState,
    InvalidToken,
    OutcomeUnknown,
    TxnBridgeError,
)
from txnbridge.spi import Backend, Begin, Broker, Context, Identity, Ledger, Reader, Subscription, Writer

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txnbridge._decisions import Decisions
    from txnbridge._processor import Each, OnBatch, Processor
    from txnbridge.sql import SqlLogs

_log = logging.getLogger("txnbridge")

# Between two tries to reach a broker for an answer: long enough not to burden one that is starting, short enough that a
# caller with a deadline of a second still gets several tries.
_RETRY_SECONDS = 0.1
# How often a closing bridge looks whether a call has ended that does not tell; most take milliseconds.
_LOOK_SECONDS = 0.01
# How long a closing bridge waits for polls of other threads: a poll that waits for messages has nothing to lose, and
# twice what one takes by default lets most of them end.
_POLL_SECONDS = 2.0

# How long a thread may take one transaction after the other while others wait for a writer: much longer than it takes
# to wake one of those, which also has to wait for its turn to write then.
_KEEP_SECONDS = 0.05
# How often who waits for a writer looks whether one was left behind, or the bridge is closed.
_TURN_SECONDS = 0.1

FORK_HELP = (
    "this bridge was opened before a fork and cannot be used in the child. Open it there: in gunicorn in the"
    " post_fork(server, worker) hook, in Celery in a worker_process_init handler, elsewhere at first use:"
    " `bridge = txnbridge.connect(url)`"
)


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

    `transactional_id` is the name of one running instance: opening it shuts out its older owner and ends what that
    left open. `timeout` is the deadline of each call in seconds, `hold` how long a prepared transaction may live after
    it. `writers` transactions can be open at once. A backend's own options go into the URL's query or into a mapping
    under its name, `connect(url, embedded={"durability": "normal"})`. `decision_log` keeps the decision logs elsewhere:
    on another broker, by its URL, or in a database, by SQLAlchemy's URL or an `Engine`; all who answer for one
    application name the same place.

    Raises `BackendMissing`, `InvalidOption`, `BrokerUnavailable`, `AccessDenied`.
    """
    url = url or os.environ.get("TXNBRIDGE_URL")
    if not url:
        raise InvalidOption("connect() needs a URL, such as embedded:orders.db, or TXNBRIDGE_URL set to one")
    check_opening(transactional_id, application, timeout, hold, writers, create_topics)
    address, options = parse_url(url)
    found = find_backend(address.scheme)
    for name, settings in backend.items():
        if name != found.name:
            raise unknown_option(name, [found.name, *(connect.__kwdefaults__ or ())], f"connect() to {address.scheme}:")
        if not isinstance(settings, Mapping):
            raise InvalidOption(f"{name}= is a mapping of options, not {type(settings).__name__}")
        if twice := options.keys() & settings.keys():
            raise InvalidOption(f"option {min(twice)!r} is given twice, in the URL and in {name}=")
        options |= settings
    application = application or transactional_id or "default"
    return Bridge(
        found,
        address,
        options,
        identity=Identity(
            name=transactional_id or f"anonymous-{_random(8)}",
            owned=transactional_id is not None,
            application=application,
            host=f"{os.uname().nodename} pid {os.getpid()}",
        ),
        timeout=timeout,
        hold=hold,
        writers=writers,
        create_topics=create_topics,
        elsewhere=None if decision_log is None else _place_of_logs(decision_log, application, timeout),
    )


def _place_of_logs(where: str | Engine, application: str, timeout: float) -> Bridge | SqlLogs:
    if isinstance(where, str):
        where = str(indirect("decision_log", where))
        if any(where.partition(":")[0] in backend.schemes for backend in plugins.backends()):
            return connect(where, application=application, timeout=timeout)
    from txnbridge.sql import SqlLogs

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
        elsewhere: Bridge | SqlLogs | None = None,
    ) -> None:
        self._forked = False
        self._abandoned: deque[tuple[Writer, Begin]] = deque()  # of transactions that were left unfinished
        self._closed = False  # to new calls
        self._closing = threading.Lock()
        self._let_go = False
        self._name = f"{backend.name}-{_random(4)}"
        self._events = Emitter(self._name, plugins.listeners())
        self._header_makers = plugins.header_makers()
        self._identity = identity
        self._timeout = float(timeout)
        self._hold = hold
        self._create_topics = create_topics
        self._url = url
        self._count = itertools.count(1)
        self._opening = threading.Lock()
        self._opening_log = threading.Lock()  # another one: writers may need a log while they are opened
        self._room = threading.Condition()
        self._size = writers
        self._turns = Turns(writers, _KEEP_SECONDS)  # a place for each transaction
        self._calls = 0  # other calls that run
        self._logs: dict[str, Decisions] = {}  # those that hold ledgers
        self._elsewhere = elsewhere  # what keeps the decision logs, if the broker itself does not
        self._idle: list[Writer] | None = None  # None: not opened yet
        self._doubtful: set[Writer] = set()  # to be reopened before they are used again
        self._transactions: weakref.WeakSet[Transaction] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._readers: set[Reader] = set()  # theirs, and those of consumers that were dropped without a close
        self._dropped: SimpleQueue[Reader | None] = SimpleQueue()  # for the thread that closes the latter
        self._closer: threading.Thread | None = None  # that thread
        self._commit_writer: Callable[[Writer, Deadline], None] = _commit_writer  # the testing kit loses answers here
        self._backend_name = backend.name
        ours, clients = resolve_options(backend.options, options, backend.name)
        context = Context(
            bridge=self._name,
            events=self._events,
            application=identity.application,
            timeout=self._timeout,
            hold=hold,
            create_topics=create_topics,
            client_options=clients,
            ledger=lambda application, id: LazyLedger(lambda deadline: self._log_of(application, deadline).ledger(id)),
        )
        deadline = Deadline(self._timeout)
        with self._events.step("bridge.open", url=str(url)):
            self._broker: Broker = backend.open(url, ours, context, deadline)
            try:
                if identity.owned:
                    self._open_writers(deadline)
            except BaseException:
                self._broker.close(deadline)
                raise
        _live.add(self)

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The broker's address, without secrets."""
        return str(self._url)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._backend_name

    @property
    def cluster(self) -> str:
        """The cluster's id; tokens of another one are refused."""
        return self._broker.cluster

    @property
    def transactional_id(self) -> str | None:
        """The name it was opened with; None if it made up its own, which nobody else can hold."""
        return self._identity.name if self._identity.owned else None

    @property
    def capabilities(self) -> Capabilities:
        """What this broker keeps, natively, by emulation or not at all."""
        return self._broker.capabilities

    @property
    def limits(self) -> Limits:
        """The broker's bounds."""
        return self._broker.limits

    @property
    def admin(self) -> Admin:
        """Topics, open transactions, and the doctor."""
        self._check_open()
        return Admin(self._broker, self._timeout, self._events)

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
        commits or aborts it within `hold` seconds. `fingerprint=True` puts an order-free checksum of its messages into
        the token (needs the package xxhash).

        Raises `DeadlineExceeded` if no writer became free, `Fenced`, `NotSupported`, `BrokerUnavailable`.
        """
        self._check_open()
        begin = self._new_begin(timeout, prepare, hold)
        if fingerprint:
            _require_xxhash()
        with self._events.step("transaction.begin", begin.transaction, prepare=prepare):
            writer = self._take_writer(begin)
            try:
                writer.begin(begin)
            except BaseException:
                self._return_writer(writer, begin, sound=False)
                raise
        transaction = Transaction(self, writer, begin, 0 if fingerprint else None)
        with self._room:
            self._transactions.add(transaction)
        return transaction

    def _new_begin(self, timeout: float | None, prepare: bool, hold: float | None) -> Begin:
        timeout = self._timeout if timeout is None else timeout
        check_times(timeout, hold)
        hold = self._hold if hold is None else hold
        if prepare:
            self.capabilities.require(Capability.PREPARE)
            most = self.limits.prepared_seconds
            if most is not None and timeout + (hold or 0) > most:
                raise InvalidOption(
                    f"timeout and hold are {timeout + (hold or 0):g} s together; this broker allows {most:g} s"
                )
        return Begin(f"{self._identity.name}/{self._name[-8:]}/{next(self._count)}", Deadline(timeout), prepare, hold)

    def _take_writer(self, begin: Begin) -> Writer:
        self._take_slot(begin.deadline)
        try:
            if begin.prepare:
                with self._events.step("writer.open", begin.transaction, prepare=True):
                    return self._broker.prepare_writer(self._identity, self._ledger(), begin.deadline)
            if self._idle is None:
                self._open_writers(begin.deadline)
            with self._room:
                writer = self._idle.pop() if self._idle else None
            if writer is None:
                raise self._refusal()
        except BaseException:
            self._turns.leave()
            raise
        if writer in self._doubtful:
            self._reopen(writer, begin)
        return writer

    def _take_slot(self, deadline: Deadline) -> None:
        while True:
            self._clear_abandoned()
            # In short turns, because a transaction that is left unfinished meanwhile tells nobody, nor does `close`.
            if self._turns.enter(Deadline(min(deadline.left(), _TURN_SECONDS))):
                if not self._closed:
                    return
                self._turns.leave()
            self._check_open()
            if deadline.expired:
                raise DeadlineExceeded(
                    f"all {self._size} writers of this bridge had open transactions for {deadline.seconds:g} s;"
                    " end them sooner or connect(…, writers=…) with more"
                )

    def _reopen(self, writer: Writer, begin: Begin) -> None:
        try:
            with self._events.step("writer.open", reopen=True):
                writer.reopen(begin.deadline)
        except BaseException:
            self._return_writer(writer, begin, sound=False)
            raise
        self._doubtful.discard(writer)

    def _open_writers(self, deadline: Deadline) -> None:
        """Open all writers: opening an id is one act. Without an id of its own that waits until one is needed."""
        with self._opening:
            if self._idle is None:
                with self._events.step("writer.open", count=self._size):
                    self._idle = self._broker.open_writers(self._identity, self._size, self._ledger(), deadline)

    def _give_back(self, transaction: Transaction, writer: Writer, sound: bool) -> None:
        with self._room:
            self._transactions.discard(transaction)
        self._return_writer(writer, transaction._begin, sound)

    def _return_writer(self, writer: Writer, begin: Begin, sound: bool) -> None:
        with self._room:
            idle = None if begin.prepare else self._idle
            if idle is not None:
                if not sound:
                    self._doubtful.add(writer)
                idle.append(writer)
        if idle is None:  # it was made for this transaction alone, or the bridge is closed
            _quietly(writer.close)
        self._turns.leave()

    def _clear_abandoned(self, deadline: Deadline | None = None) -> None:
        """Abort what was left unfinished; done here and not by the garbage collector, which may hold any lock."""
        while True:
            try:
                writer, begin = self._abandoned.popleft()
            except IndexError:
                return
            transaction = begin.transaction
            try:
                with self._events.step("abort", transaction, abandoned=True):
                    writer.abort(deadline or Deadline(self._timeout))
                self._return_writer(writer, begin, sound=True)
            except TxnBridgeError as error:
                _log.warning("transaction %s was left unfinished and could not be aborted: %s", transaction, error)
                self._return_writer(writer, begin, sound=False)

    def _make_token(self, writer: Writer, transaction: str, *, prepared: bool, fingerprint: int | None = None) -> Token:
        evidence = writer.evidence()
        return Token(
            broker=self._backend_name,
            cluster=self.cluster,
            transaction=transaction,
            how=evidence.how,
            prepared=prepared,
            expires_at=evidence.expires_at,
            messages=evidence.messages,
            fingerprint=fingerprint,
            log=evidence.log,
        )

    # --- tokens ---------------------------------------------------------------------------------------------------

    def commit(self, token: str | Token) -> Outcome:
        """Commit a prepared transaction, from any process. Safe to repeat.

        Returns what is true, also when somebody else has aborted it. Raises `InvalidToken`, `InvalidState` for a token
        that was never prepared, `OutcomeUnknown` if no answer came in time, `EvidenceLost` if none ever will.
        """
        return self._end(token, commit=True)

    def abort(self, token: str | Token) -> Outcome:
        """Abort a prepared transaction, from any process; the rules of `commit`."""
        return self._end(token, commit=False)

    def status(self, token: str | Token) -> Status:
        """What became of a token's transaction. Raises `InvalidToken`, `BrokerUnavailable`.

        It decides nothing. It may record what has become true by the clock: that a deadline passed, before it says so.
        """
        parsed = self._check_token(token)
        self.capabilities.require(Capability.STATUS_LOOKUP)
        with self._call(), self._events.step("status", parsed.transaction) as found:
            status = self._broker.status(parsed, self._ledger(parsed), Deadline(self._timeout))
            found["state"] = status.state.value
        return status

    def _end(self, token: str | Token, commit: bool) -> Outcome:
        parsed = self._check_token(token)
        if not parsed.prepared:
            raise InvalidState(
                f"transaction {parsed.transaction} was never prepared, so its token only tells its status;"
                " nobody but its own process could end it"
            )
        self.capabilities.require(Capability.RESOLVE_ANYWHERE)
        end = self._broker.commit if commit else self._broker.abort
        deadline = Deadline(self._timeout)
        decision = "commit" if commit else "abort"
        with self._call(), self._events.step("resolve", parsed.transaction, decision=decision) as found:
            while True:
                try:
                    outcome = end(parsed, self._ledger(parsed), deadline)
                    break
                except EvidenceLost as error:
                    error.token = str(parsed)
                    raise
                except (OutcomeUnknown, BrokerUnavailable) as error:
                    # Repeating the same decision is safe, and only an answer helps the caller.
                    if isinstance(error, OutcomeUnknown):
                        error.token = str(parsed)
                    if deadline.left() <= _RETRY_SECONDS:
                        raise
                    time.sleep(_RETRY_SECONDS)
            found["outcome"] = outcome.value
        return outcome

    def _resolve(self, token: Token | None, deadline: Deadline) -> Outcome | None:
        """The outcome of a transaction of ours whose answer was lost; None while nobody can tell.

        Raises `EvidenceLost` if nobody ever can.
        """
        if token is None or not self.capabilities[Capability.STATUS_LOOKUP]:
            return None
        with self._events.step("resolve", token.transaction, decision=None) as found:
            while True:
                try:
                    status = self._broker.status(token, self._ledger(token), deadline)
                except EvidenceLost as error:
                    error.token = str(token)
                    raise
                except (OutcomeUnknown, BrokerUnavailable, InvalidState):  # the last one: closed meanwhile
                    status = Status(TokenState.UNKNOWN)
                found["state"] = status.state.value
                if status.state is TokenState.COMMITTED:
                    return Outcome.COMMITTED
                if status.state is TokenState.ABORTED:
                    return Outcome.ABORTED
                if status.permanent:
                    raise EvidenceLost(
                        f"what would tell the outcome of transaction {token.transaction} is gone: {status.reason}",
                        token=str(token),
                    )
                if deadline.left() <= _RETRY_SECONDS:
                    return None
                time.sleep(_RETRY_SECONDS)

    def _check_token(self, token: str | Token) -> Token:
        self._check_open()
        parsed = Token.parse(token)
        if parsed.broker != self._backend_name:
            raise InvalidToken(
                f"this token belongs to a {parsed.broker} broker; this bridge speaks to {self._backend_name}"
            )
        if parsed.cluster != self.cluster:
            raise InvalidToken(f"this token belongs to cluster {parsed.cluster}; this bridge speaks to {self.cluster}")
        return parsed

    def _ledger(self, token: Token | None = None) -> Ledger:
        """What this bridge's id, or a token's, keeps in the decision log; the log is opened when it is first used."""
        if token is None:
            return LazyLedger(lambda deadline: self._log_of(None, deadline).ledger(self._identity.name))
        owner = token.transaction.rsplit("/", 2)[0]
        evidence = token.log or {}

        def find(deadline: Deadline) -> Ledger:
            place = self._place(deadline)
            if evidence.get("on") != place:
                raise InvalidToken(
                    f"the decision log of this token's transaction is kept by {evidence.get('on') or 'its own broker'},"
                    f" this bridge's by {place or 'its own broker'}: connect with the same decision_log"
                )
            return self._log_of(evidence.get("log"), deadline).ledger(owner, token.log)

        return LazyLedger(find)

    def _log_of(self, name: str | None, deadline: Deadline) -> Decisions:
        name = name or self._identity.application
        with self._opening_log:
            if name not in self._logs:
                self._logs[name] = self._open_decisions(name, deadline)
            return self._logs[name]

    def _open_decisions(self, name: str, deadline: Deadline) -> Decisions:
        from txnbridge._decisions import Decisions

        if not hasattr(self, "_broker"):  # some brokers ask about transactions as soon as they are connected
            raise BrokerUnavailable("this bridge is not open yet")
        place = self._place(deadline)
        log = self._keeper_of_logs().decision_log(name, deadline)
        return Decisions(
            log, timeout=self._timeout, events=self._events, name=name, place=place, host=self._identity.host
        )

    def _keeper_of_logs(self) -> Broker | SqlLogs:
        if isinstance(self._elsewhere, Bridge):
            return self._elsewhere._keeper_of_logs()
        if self._elsewhere is None:
            self.capabilities.require(Capability.DECISION_LOG)
        return self._elsewhere or self._broker

    def _place(self, deadline: Deadline) -> str | None:
        """What names the place of the decision logs in tokens, if it is not the broker itself."""
        if isinstance(self._elsewhere, Bridge):
            return self._elsewhere.cluster
        return None if self._elsewhere is None else self._elsewhere.cluster(deadline)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ensure_topics(self, *topics: str | Topic) -> list[str]:
        """Make those of these topics that are missing, as they are declared; the names of those that it made.

        `Topic("orders", codecs.json, partitions=6, retention=86_400)` declares one; without `partitions` it gets
        `create_topics` of them, or one. A topic that is there stays as it is, its retention too.

        Raises `InvalidOption` if one is there with another number of partitions than declared, `NotSupported` on a
        broker that cannot make topics, `AccessDenied`.
        """
        with self._call():
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
        """Read committed messages. Members of a group share the partitions; without one all are read, unacknowledged.

        `start` is where a group begins that has never read: "earliest", "latest" or a time in milliseconds since 1970.
        `sharing` is "partition" (one member a partition, in order), "message" or "key", as far as the broker can.
        """
        self._check_open()
        if sharing not in ("partition", "message", "key"):
            raise InvalidOption(f"sharing is 'partition', 'message' or 'key', not {sharing!r}")
        if start not in ("earliest", "latest") and (not isinstance(start, int) or isinstance(start, bool)):
            raise InvalidOption(f"start is 'earliest', 'latest' or milliseconds since 1970, not {start!r}")
        if sharing != "partition":
            self.capabilities.require(Capability.SHARE_MESSAGE if sharing == "message" else Capability.SHARE_KEY)
        if isinstance(start, int):
            self.capabilities.require(Capability.START_BY_TIME)
        if group is not None and (not isinstance(group, str) or not group.strip()):
            raise InvalidOption("a group's name is non-empty text")
        found = topic_list(topics)
        with self._call():
            consumer = Consumer(self, found, Subscription(tuple(t.name for t in found), group, start, sharing))
            with self._room:
                self._consumers.add(consumer)
                self._readers.add(consumer._reader)
                if self._closer is None:
                    self._close_what_is_dropped()
        return consumer

    def _close_what_is_dropped(self) -> None:
        name = f"txnbridge {self._name} dropped"
        arguments = weakref.ref(self), self._dropped
        self._closer = threading.Thread(target=_close_dropped, args=arguments, name=name, daemon=True)
        self._closer.start()
        weakref.finalize(self, self._dropped.put, None).atexit = False

    def _close_reader(self, reader: Reader, deadline: Deadline) -> None:
        with self._room:
            self._readers.discard(reader)
        reader.close(deadline)

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
        """A loop that consumes, transforms and produces exactly once; see `Processor` for its settings."""
        self._check_open()
        from txnbridge._processor import Processor

        return Processor(
            self,
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
        """The first `limit` committed messages of a topic that are readable now, without a group."""
        found: list[Message] = []
        with self.consumer(topic) as consumer:
            while len(found) < limit:
                # A poll that does not wait may come back empty early, so the broker itself says when all is read.
                if not (batch := consumer.poll(limit - len(found), timeout=0.05)) and not any(consumer.lag().values()):
                    break
                found += batch
        return found

    def publisher(self, name: str | None = None) -> Publisher:
        """Sends without a transaction: idempotent and in order. With a name it can resume after a crash by sequence."""
        self._check_open()
        self.capabilities.require(Capability.IDEMPOTENT_SEND)
        if name is not None:
            self.capabilities.require(Capability.RESUME_SEQUENCE)
        with self._call():
            return Publisher(self, self._broker.publisher(name, Deadline(self._timeout)))

    def decisions(self, name: str | None = None) -> Decisions:
        """The decision log of this bridge's application, or of another name: the first decision for an id wins."""
        with self._call():
            return self._open_decisions(name or self._identity.application, Deadline(self._timeout))

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, wait for running ones, abort what is unfinished, leave all groups, let go.

        Prepared transactions live on. It takes no longer than the bridge's timeout: a call that still runs then is left
        to its caller, and a poll after two seconds. Safe to repeat; while another thread closes it waits for that.

        From inside a call of the same thread (by a signal handler or a listener) it refuses new calls and returns: that
        call goes on to its end, and the next `close()`, at the end of the bridge's block or of the program, does the
        rest.
        """
        if self._forked:
            return
        with self._room:
            self._closed = True
        if self._is_calling():  # raising here would make a commit that is interrupted look as if it had failed
            _log.info("%r takes no new calls; it is let go by the next close(), after the call that runs", self)
            return
        deadline = Deadline(self._timeout)
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
        with self._events.step("bridge.close"):
            self._end_calls(deadline)
            polls = Deadline(min(deadline.left(), _POLL_SECONDS))
            with self._room:
                consumers = list(self._consumers)
                dropped = self._readers.difference(consumer._reader for consumer in consumers)
            for consumer in consumers:
                _quietly(lambda consumer=consumer: _close_consumer(consumer, polls, deadline))
            for reader in dropped:
                _quietly(lambda reader=reader: self._close_reader(reader, deadline))
            self._dropped.put(None)
            with self._room:
                idle, self._idle = self._idle or [], None
            for writer in idle:
                _quietly(writer.close)
            for log in self._logs.values():
                _quietly(log.close)
            self._broker.close(deadline)
            if self._elsewhere is not None:
                _quietly(self._elsewhere.close)
        _live.discard(self)

    def _is_calling(self) -> bool:
        """Whether a call of this bridge, `close` among them, runs further down on this thread's stack."""
        frame = sys._getframe(1).f_back  # the caller of `close`
        if frame is not None and frame.f_code is Bridge.__exit__.__code__:
            frame = frame.f_back
        while frame is not None:
            caller = frame.f_locals.get("self")
            if caller is self or (isinstance(caller, Transaction | Consumer | Publisher) and caller._bridge is self):
                return True
            frame = frame.f_back
        return False

    def _end_calls(self, deadline: Deadline) -> None:
        """Abort the transactions on which no call runs, and wait for the calls that do."""
        while True:
            self._clear_abandoned(deadline)
            with self._room:
                unfinished = list(self._transactions)
            for transaction in unfinished:
                self._abort_unfinished(transaction, deadline)
            with self._room:
                if not self._turns.busy and not self._calls:
                    return
                if deadline.expired:
                    break
                self._room.wait(min(deadline.left(), _LOOK_SECONDS))
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
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call that closing waits for, and that is refused once closing has begun."""
        self._check_open()
        with self._room:
            refused = self._closed
            self._calls += not refused
        if refused:
            raise self._refusal()
        try:
            yield
        finally:
            with self._room:
                self._calls -= 1
                self._room.notify_all()

    def _check_open(self) -> None:
        if self._closed or self._forked:
            raise self._refusal()

    def _refusal(self) -> InvalidState:
        self._check_process()
        return InvalidState("this bridge is closed")

    def _check_process(self) -> None:
        if self._forked:
            raise InvalidState(FORK_HELP)
        if _exiting and threading.current_thread() is not threading.main_thread():
            # A daemon thread's, whose program ends without asking it: it would only die of a refusal, and say so. It
            # ends with the program, or is refused if somebody should wait for it.
            threading.Event().wait(self._timeout)

    def _mark_forked(self) -> None:
        """In the child of a fork: nothing of the parent's may be used, closed or collected."""
        self._forked = True
        _parents.append(self._broker)
        for transaction in list(self._transactions):
            transaction._turn.clear()  # so that every call on it is refused, at no cost to `send`


def _random(size: int) -> str:
    """A name that nobody else makes. (Not by `secrets`: it loads a tenth of what `import txnbridge` may cost.)"""
    return os.urandom(size).hex()


def _commit_writer(writer: Writer, deadline: Deadline) -> None:
    writer.commit(deadline)


def _quietly(call: Any) -> None:
    """At the end everything gets its chance to close; what fails is logged."""
    try:
        call()
    except Exception as error:
        _log.warning("closing: %s", error)


def _close_consumer(consumer: Consumer, polls: Deadline, deadline: Deadline) -> None:
    while True:
        try:
            return consumer.close(deadline.left())
        except InvalidState:  # another thread polls
            if polls.expired:
                raise
        time.sleep(_LOOK_SECONDS)


def _close_dropped(bridge_of: Callable[[], Bridge | None], dropped: SimpleQueue[Reader | None]) -> None:
    """In a thread: close the readers of consumers that were dropped without a close, so that others get their part."""
    while (reader := dropped.get()) is not None:
        if (bridge := bridge_of()) is not None:
            _quietly(lambda bridge=bridge, reader=reader: _close_dropped_reader(bridge, reader))
        del bridge, reader  # neither is kept while this waits


def _close_dropped_reader(bridge: Bridge, reader: Reader) -> None:
    try:
        with bridge._call():
            bridge._close_reader(reader, Deadline(bridge._timeout))
    except InvalidState:  # the bridge is being closed, and closes it
        if not bridge._closed:
            raise


def _require_xxhash() -> None:
    try:
        import xxhash  # noqa: F401
    except ImportError:
        raise InvalidOption("fingerprint=True needs a package: pip install xxhash") from None


_live: weakref.WeakSet[Bridge] = weakref.WeakSet()
_exiting = False  # the interpreter is
_parents: list[Broker] = []  # brokers of the parent process, kept so that nothing of theirs is ever closed here


def _after_fork() -> None:
    for bridge in list(_live):
        bridge._mark_forked()
    _live.clear()


def _at_exit() -> None:
    global _exiting
    _exiting = True
    for bridge in list(_live):
        _quietly(bridge.close)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
