"""The writers of a bridge: so many transactions can be open at once, each with one of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from txnbridge._connection import Connection, close_quietly
from txnbridge._deadline import Deadline
from txnbridge._turns import Turns
from txnbridge.errors import DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Begin, Ledger, Writer

_log = logging.getLogger("txnbridge")

# How long a thread may take one transaction after the other while others wait for a writer: much longer than it takes
# to wake one of those, which also has to wait for its turn to write then.
_KEEP_SECONDS = 0.05
# How often who waits for a writer looks whether one was left behind, or the bridge is closed.
_TURN_SECONDS = 0.1


class Writers:
    """A transaction takes one and gives it back, or leaves it behind; on any thread."""

    def __init__(self, connection: Connection, size: int, ledger: Callable[[], Ledger]) -> None:
        self._connection = connection
        self._size = size
        self._ledger = ledger  # what the bridge's id keeps in the decision log
        self._turns = Turns(size, _KEEP_SECONDS)  # a place for each transaction
        self._opening = threading.Lock()
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._idle: list[Writer] | None = None  # None: not opened yet, or closed
        self._doubtful: set[Writer] = set()  # to be reopened before they are used again
        self._abandoned: deque[tuple[Writer, Begin]] = deque()  # of transactions that were left unfinished
        self.commit: Callable[[Writer, Deadline], None] = _commit  # the testing kit loses answers here

    @property
    def busy(self) -> int:
        """How many are taken."""
        return self._turns.busy

    def open(self, deadline: Deadline) -> None:
        """Open all of them: opening an id is one act. Without an id of its own that waits until one is needed."""
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

    def take(self, begin: Begin) -> Writer:
        """One that is free, or gets free within the transaction's deadline. A prepared transaction gets a new one."""
        connection = self._connection
        self._take_place(begin.deadline)
        try:
            if begin.prepare:
                with connection.events.step("writer.open", begin.transaction, prepare=True):
                    return connection.broker.prepare_writer(connection.identity, self._ledger(), begin.deadline)
            if self._idle is None:
                self.open(begin.deadline)
            with self._guard:
                writer = self._idle.pop() if self._idle else None
            if writer is None:
                raise connection.refusal()
        except BaseException:
            self._turns.leave()
            raise
        if writer in self._doubtful:
            self._reopen(writer, begin)
        return writer

    def _take_place(self, deadline: Deadline) -> None:
        while True:
            self.clear_abandoned()
            # In short turns, because a transaction that is left unfinished meanwhile tells nobody, nor does `close`.
            if self._turns.enter(Deadline(min(deadline.left(), _TURN_SECONDS))):
                if not self._connection.closed:
                    return
                self._turns.leave()
            self._connection.check_open()
            if deadline.expired:
                raise DeadlineExceeded(
                    f"all {self._size} writers of this bridge had open transactions for {deadline.seconds:g} s;"
                    " end them sooner or connect(…, writers=…) with more"
                )

    def _reopen(self, writer: Writer, begin: Begin) -> None:
        try:
            with self._connection.events.step("writer.open", reopen=True):
                writer.reopen(begin.deadline)
        except BaseException:
            self.give_back(writer, begin, sound=False)
            raise
        self._doubtful.discard(writer)

    def give_back(self, writer: Writer, begin: Begin, sound: bool) -> None:
        """After its transaction has ended; `sound` if it is known how."""
        with self._guard:
            idle = None if begin.prepare else self._idle
            if idle is not None:
                if not sound:
                    self._doubtful.add(writer)
                idle.append(writer)
        if idle is None:  # it was made for this transaction alone, or the bridge is closed
            close_quietly(writer.close)
        self._turns.leave()

    def leave_behind(self, writer: Writer, begin: Begin) -> None:
        """Its transaction was dropped unfinished. (Called by the garbage collector: no lock is taken here.)"""
        self._abandoned.append((writer, begin))

    def clear_abandoned(self, deadline: Deadline | None = None) -> None:
        """Abort what was left unfinished; done here and not by the garbage collector, which may hold any lock."""
        connection = self._connection
        while True:
            try:
                writer, begin = self._abandoned.popleft()
            except IndexError:
                return
            transaction = begin.transaction
            try:
                with connection.events.step("abort", transaction, abandoned=True):
                    writer.abort(deadline or connection.deadline())
                self.give_back(writer, begin, sound=True)
            except TxnBridgeError as error:
                _log.warning("transaction %s was left unfinished and could not be aborted: %s", transaction, error)
                self.give_back(writer, begin, sound=False)

    def close(self) -> None:
        """Those that are free; one that is given back later is closed then."""
        with self._guard:
            idle, self._idle = self._idle or [], None
        for writer in idle:
            close_quietly(writer.close)


def _commit(writer: Writer, deadline: Deadline) -> None:
    writer.commit(deadline)
