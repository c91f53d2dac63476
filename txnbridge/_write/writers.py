"""The pool of a bridge's writers. Each open transaction uses one, so its size bounds the open transactions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from txnbridge._base.connection import Connection, close_logging_errors
from txnbridge._base.deadline import Deadline
from txnbridge._base.fair_semaphore import FairSemaphore, Place
from txnbridge._base.token import State, Token
from txnbridge.errors import DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Begin, Identity, Ledger, RawHeaders, Writer

_log = logging.getLogger("txnbridge")

# The time for which a thread may run one transaction after the other while other threads wait for a writer: much longer
# than waking a thread takes. If a transaction takes longer, as on a remote broker, the thread runs only this one.
_KEEP_SECONDS = 0.02


class KeptMessage(NamedTuple):
    """A message of a transaction that is kept in memory until its commit."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: RawHeaders | None
    partition: int | None
    timestamp: int | None


class Writers:
    """Lends a writer to each transaction until its end, in the order in which the threads asked."""

    def __init__(
        self, connection: Connection, size: int, ledger: Callable[[], Ledger], identity: Identity | None = None
    ) -> None:
        self._connection = connection
        self._size = size
        self._ledger = ledger  # returns the ledger of the transactional id
        self._identity = identity or connection.identity
        self._turns = FairSemaphore(size, _KEEP_SECONDS)  # one place for each open transaction
        self._opening = threading.Lock()
        self._guard = threading.RLock()  # reentrant, because a signal handler may run while it is held
        self._idle: list[Writer] | None = None  # None: not opened yet, or closed
        self._doubtful: set[Writer] = set()  # writers that must be reopened before the next transaction
        self._closed = False
        self._abandoned: deque[TakenWriter] = deque()  # writers of transactions that were garbage-collected unfinished
        self.commit: Callable[[Writer, Deadline], None] = _commit  # replaced by the testing kit, which loses answers
        # The ids of transactions that have not ended, with those that wait for a writer. One call on a set is atomic.
        self.open_transactions: set[str] = set()

    @property
    def busy(self) -> int:
        """The number of writers in use."""
        return self._turns.busy

    @property
    def loses_answers(self) -> bool:
        """Return whether a test has set the outcome of this bridge's next commit (`txnbridge.testing.next_commit`)."""
        return self.commit is not _commit

    def open(self, deadline: Deadline) -> None:
        """Open all writers at once, because opening the transactional id fences its older owner.

        A bridge without a given transactional id calls this only at its first transaction.
        """
        connection = self._connection
        held: list[bool] = []
        try:
            if not deadline.acquire(self._opening, held):
                raise DeadlineExceeded(f"another thread opened the writers for longer than {deadline.seconds:g} s")
            if self._idle is None:
                with connection.events.step("writer.open", count=self._size):
                    self._idle = connection.broker.open_writers(self._identity, self._size, self._ledger(), deadline)
        finally:
            if held:
                self._opening.release()

    def take(self, begin: Begin, *, running: bool = False) -> TakenWriter:
        """Wait for a free writer until the transaction's deadline, and take it.

        A transaction that will be prepared gets a new writer of its own. With `running`, the call is part of a running
        call, so it is not refused because the bridge is being closed.
        """
        place = self._turns.place()
        taken = TakenWriter(self, begin, place)
        try:
            self.open_transactions.add(begin.transaction)
            self._wait_for_place(place, begin.deadline, running)
            self._choose(taken)
        except BaseException:
            taken.give_back(sound=False)
            raise
        return taken

    def _choose(self, taken: TakenWriter) -> None:
        connection = self._connection
        begin = taken.parameters
        if self._closed:
            raise connection.refusal()
        if begin.prepare:
            with connection.events.step("writer.open", begin.transaction, prepare=True):
                taken.writer = connection.broker.prepare_writer(self._identity, self._ledger(), begin.deadline)
            return
        if self._idle is None:
            self.open(begin.deadline)
        with self._guard:
            if not self._idle:
                raise connection.refusal()
            taken.writer = self._idle[-1]
            self._idle.pop()  # directly after, so that no exception from a signal handler comes between the two lines
        if taken.writer in self._doubtful:
            with connection.events.step("writer.open", reopen=True):
                taken.writer.reopen(begin.deadline)
            self._doubtful.discard(taken.writer)

    def _wait_for_place(self, place: Place, deadline: Deadline, running: bool) -> None:
        while True:
            self.clear_abandoned(deadline)
            # Wait in short steps: neither a transaction's garbage collection nor `close` wakes this thread.
            entered = place.enter(Deadline(min(deadline.left(), self._connection.timing.writer_checks)))
            if not running:
                self._connection.check_open()
            if entered:
                return
            if deadline.expired:
                text = f"all {self._size} writers of this bridge had open transactions for {deadline.seconds:g} s;"
                raise DeadlineExceeded(text + " end them sooner or connect(…, writers=…) with more")

    def _give_back(self, taken: TakenWriter, sound: bool, began: bool) -> None:
        """Return a writer to the pool, or close it if it was for preparing or the pool is closed; release the place."""
        writer = taken.writer
        if writer is not None:
            with self._guard:
                idle = None if taken.parameters.prepare else self._idle
                if idle is not None:
                    if not sound:
                        self._doubtful.add(writer)
                    at = len(idle) if began else 0  # while this one can begin nothing, the other writers go on
                    taken.writer = None  # directly before, so that no signal handler's exception comes between
                    idle.insert(at, writer)
            if idle is None:  # the writer was made for this transaction alone, or the bridge is closed
                close_logging_errors(writer.close)
                taken.writer = None
        if taken.place is not None:
            taken.place.leave()

    def _leave_behind(self, taken: TakenWriter) -> None:
        """Keep the writer of a transaction whose object is garbage-collected, so that a later call can abort it.

        The garbage collector calls this, so it takes no lock.
        """
        left = TakenWriter(self, taken.parameters, taken.place)
        left.writer, left.open = taken.writer, taken.open
        self._abandoned.append(left)

    @property
    def has_abandoned(self) -> bool:
        """Return whether there are transactions to abort whose objects were garbage-collected before their end."""
        return bool(self._abandoned)

    def clear_abandoned(self, deadline: Deadline) -> None:
        """Abort transactions whose objects were garbage-collected; the collector could not, as it must take no lock."""
        while True:
            try:
                taken = self._abandoned.popleft()
            except IndexError:
                return
            transaction = taken.parameters.transaction
            sound = False
            try:
                if taken.open and taken.writer is not None:
                    with self._connection.events.step("abort", transaction, abandoned=True):
                        taken.writer.abort(deadline)
                    sound = True
            except TxnBridgeError as error:
                _log.warning("transaction %s was left unfinished and could not be aborted: %s", transaction, error)
            finally:
                taken.give_back(sound)

    def close(self) -> None:
        """Close the free writers; a writer that is still in use is closed when it is given back."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle or [], None
        for writer in idle:
            close_logging_errors(writer.close)


class TakenWriter:
    """A writer that is lent to one transaction, and the transaction's place in the pool.

    If an exception from a signal handler keeps the writer from being given back, `__del__` gives it back.
    """

    __slots__ = ("_writers", "open", "parameters", "place", "token", "writer")

    def __init__(self, writers: Writers, parameters: Begin, place: Place | None) -> None:
        self._writers = writers
        self.parameters: Begin = parameters
        self.place: Place | None = place
        self.writer: Writer | None = None
        # True from the transaction's begin until a request to end it is sent, None before.
        self.open: bool | None = None
        self.token: Token | None = None  # that of the shared transaction, if the outcome of a group commit is unknown

    @property
    def interface(self) -> Writer:
        """The writer whose methods the transaction calls: the broker's, or one that keeps messages for group commit."""
        assert self.writer is not None
        return self.writer

    def start(self) -> None:
        """Begin the transaction on its writer."""
        self.interface.begin(self.parameters)
        self.open = True

    def keep(self, message: KeptMessage) -> bool:
        """Keep a message in memory until the commit, if the writer can; return whether it does."""
        return False

    def join_from_loop(self, on_end: Callable[[], object]) -> bool:
        """Begin the commit without waiting, and call `on_end` at its end; return False if only `commit` can do it."""
        return False

    def withdraw(self) -> bool:
        """Take back a commit that `join_from_loop` began, so nothing is committed; return False if it is too late."""
        return False

    @property
    def is_committed(self) -> bool:
        """Return whether the commit that `join_from_loop` has begun is done, so that `commit` needs memory only."""
        return False

    def commit(self, deadline: Deadline) -> None:
        """Commit the transaction on its writer."""
        assert self.writer is not None
        self._writers.commit(self.writer, deadline)

    def state_after_interrupt(self) -> State:
        """Return the transaction's state after an exception interrupted the request to end it."""
        return State.UNKNOWN

    def give_back(self, sound: bool) -> None:
        """Return the writer to the pool, so that the next waiting thread can use it. Safe to repeat.

        `sound` is True if the transaction's outcome is known; otherwise the writer is reopened before its next use.
        """
        began, self.open = self.open is not None, False
        self._writers._give_back(self, sound, began)
        self._writers.open_transactions.discard(self.parameters.transaction)

    def __del__(self) -> None:
        if getattr(self, "writer", None) is not None:
            self._writers._leave_behind(self)


def _commit(writer: Writer, deadline: Deadline) -> None:
    writer.commit(deadline)
