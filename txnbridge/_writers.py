"""The writers of a bridge. Each open transaction has one, so their number bounds the open transactions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from txnbridge._connection import Connection, close_logging_errors
from txnbridge._deadline import Deadline
from txnbridge._fair_semaphore import FairSemaphore, Place
from txnbridge.errors import DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Begin, Ledger, Writer

_log = logging.getLogger("txnbridge")

# The time for which a thread may run one transaction after the other while others wait for a writer: much longer than
# it takes to wake a thread. A transaction that takes longer, as on a broker over the network, is alone in its turn.
_KEEP_SECONDS = 0.02
# How often a thread that waits for a writer looks whether a transaction was dropped, or the bridge is closed.
_TURN_SECONDS = 0.1


class Writers:
    """Gives a writer to each transaction, on any thread, and takes it back."""

    def __init__(self, connection: Connection, size: int, ledger: Callable[[], Ledger]) -> None:
        self._connection = connection
        self._size = size
        self._ledger = ledger  # returns the ledger of the bridge's id
        self._turns = FairSemaphore(size, _KEEP_SECONDS)  # a place for each transaction
        self._opening = threading.Lock()
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._idle: list[Writer] | None = None  # None: not opened yet, or closed
        self._doubtful: set[Writer] = set()  # must be reopened before they are used again
        self._abandoned: deque[TakenWriter] = deque()  # of transactions that were dropped unfinished
        self.commit: Callable[[Writer, Deadline], None] = _commit  # replaced by the testing kit, which loses answers

    @property
    def busy(self) -> int:
        """The number of writers in use."""
        return self._turns.busy

    def open(self, deadline: Deadline) -> None:
        """Open all writers, because opening an id is one act; without an id, at the first transaction."""
        connection = self._connection
        if not self._opening.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(f"another thread opened the writers for longer than {deadline.seconds:g} s")
        try:
            if self._idle is None:
                with connection.events.step("writer.open", count=self._size):
                    self._idle = connection.broker.open_writers(
                        connection.identity, self._size, self._ledger(), deadline
                    )
        finally:
            self._opening.release()

    def take(self, begin: Begin) -> TakenWriter:
        """Return a writer that is free within the transaction's deadline. A prepared transaction gets a new one."""
        taken = TakenWriter(self, begin, self._turns.place())
        try:
            self._wait_for_place(taken.place, begin.deadline)
            self._choose(taken)
        except BaseException:
            taken.give_back(sound=False)
            raise
        return taken

    def _choose(self, taken: TakenWriter) -> None:
        connection = self._connection
        begin = taken.begin
        if begin.prepare:
            with connection.events.step("writer.open", begin.transaction, prepare=True):
                taken.writer = connection.broker.prepare_writer(connection.identity, self._ledger(), begin.deadline)
            return
        if self._idle is None:
            self.open(begin.deadline)
        with self._guard:
            if not self._idle:
                raise connection.refusal()
            taken.writer = self._idle[-1]
            self._idle.pop()  # right behind, so that no exception from a signal handler comes between
        if taken.writer in self._doubtful:
            with connection.events.step("writer.open", reopen=True):
                taken.writer.reopen(begin.deadline)
            self._doubtful.discard(taken.writer)

    def _wait_for_place(self, place: Place, deadline: Deadline) -> None:
        while True:
            self.clear_abandoned()
            # Wait in short turns: neither a transaction that is dropped meanwhile nor `close` wakes this thread.
            entered = place.enter(Deadline(min(deadline.left(), _TURN_SECONDS)))
            self._connection.check_open()
            if entered:
                return
            if deadline.expired:
                raise DeadlineExceeded(
                    f"all {self._size} writers of this bridge had open transactions for {deadline.seconds:g} s;"
                    " end them sooner or connect(…, writers=…) with more"
                )

    def _give_back(self, taken: TakenWriter, sound: bool) -> None:
        """Free the writer, if there is one, and then its place."""
        writer = taken.writer
        if writer is not None:
            with self._guard:
                idle = None if taken.begin.prepare else self._idle
                if idle is not None:
                    if not sound:
                        self._doubtful.add(writer)
                    taken.writer = None  # right before, so that no exception from a signal handler comes between
                    idle.append(writer)
            if idle is None:  # the writer was made for this transaction alone, or the bridge is closed
                close_logging_errors(writer.close)
                taken.writer = None
        taken.place.leave()

    def _leave_behind(self, taken: TakenWriter) -> None:
        """Keep the writer of a dropped transaction. (The garbage collector calls this, so it takes no lock.)"""
        left = TakenWriter(self, taken.begin, taken.place)
        left.writer, left.open = taken.writer, taken.open
        self._abandoned.append(left)

    def clear_abandoned(self, deadline: Deadline | None = None) -> None:
        """Abort transactions that were dropped unfinished. The garbage collector cannot: it may hold any lock."""
        connection = self._connection
        while True:
            try:
                taken = self._abandoned.popleft()
            except IndexError:
                return
            transaction = taken.begin.transaction
            sound = False
            try:
                if taken.open and taken.writer is not None:
                    with connection.events.step("abort", transaction, abandoned=True):
                        taken.writer.abort(deadline or connection.deadline())
                    sound = True
            except TxnBridgeError as error:
                _log.warning("transaction %s was left unfinished and could not be aborted: %s", transaction, error)
            finally:
                taken.give_back(sound)

    def close(self) -> None:
        """Close the free writers; one that is given back later is closed then."""
        with self._guard:
            idle, self._idle = self._idle or [], None
        for writer in idle:
            close_logging_errors(writer.close)


class TakenWriter:
    """A transaction's place among the writers, and its writer.

    If an exception from a signal handler keeps it from being given back, `__del__` does so.
    """

    __slots__ = ("_writers", "begin", "open", "place", "writer")

    def __init__(self, writers: Writers, begin: Begin, place: Place) -> None:
        self._writers = writers
        self.begin = begin
        self.place = place
        self.writer: Writer | None = None
        self.open = False  # the transaction has begun, and is not known to have ended

    def start(self) -> None:
        """Begin the transaction."""
        assert self.writer is not None
        self.writer.begin(self.begin)
        self.open = True

    def commit(self, deadline: Deadline) -> None:
        """Commit the transaction."""
        assert self.writer is not None
        self._writers.commit(self.writer, deadline)

    def give_back(self, sound: bool) -> None:
        """Give the writer and the place back; `sound` if the transaction's outcome is known. Safe to repeat."""
        self.open = False
        self._writers._give_back(self, sound)

    def __del__(self) -> None:
        if getattr(self, "writer", None) is not None:
            self._writers._leave_behind(self)


def _commit(writer: Writer, deadline: Deadline) -> None:
    writer.commit(deadline)
