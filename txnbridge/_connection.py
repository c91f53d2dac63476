"""The state that a bridge shares with its transactions, consumers and the rest: the broker, settings, running calls."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from txnbridge._deadline import Deadline
from txnbridge._events import Emitter
from txnbridge._plugins import plugins
from txnbridge.capabilities import Capabilities
from txnbridge.errors import BrokerUnavailable, InvalidState
from txnbridge.spi import Broker, Identity

_log = logging.getLogger("txnbridge")

FORK_HELP = (
    "this bridge was opened before a fork and cannot be used in the child. Open it there: in gunicorn in the"
    " post_fork(server, worker) hook, in Celery in a worker_process_init handler, elsewhere at first use:"
    " `bridge = txnbridge.connect(url)`"
)


class Stoppable(Protocol):
    """A resolver, as far as a bridge has to stop it."""

    _group: str

    def stop_by(self, deadline: Deadline) -> None: ...


class Connection:
    """One open connection to one broker. Any thread may use it.

    Whatever a bridge opens holds the bridge's connection, and so keeps the bridge alive.
    """

    def __init__(self, bridge: object, backend: str, identity: Identity, timeout: float) -> None:
        self.bridge = bridge
        self.backend = backend
        self.name = f"{backend}-{random_name(4)}"
        self.identity = identity
        self.timeout = timeout
        self.events = Emitter(self.name, plugins.listeners())
        self.header_makers = plugins.header_makers()
        self.resolvers: set[Stoppable] = set()  # those that run
        self.closed = False  # refuses new calls
        self.forked = False
        self._broker: Broker | None = None
        self._changed = threading.Condition()
        self._running_calls = 0

    @property
    def broker(self) -> Broker:
        """Raise `BrokerUnavailable` until it is set: some brokers ask about transactions while they are opened."""
        if self._broker is None:
            raise BrokerUnavailable("this bridge is not open yet")
        return self._broker

    @broker.setter
    def broker(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def capabilities(self) -> Capabilities:
        return self.broker.capabilities

    def deadline(self) -> Deadline:
        """Return the deadline of a call that begins now."""
        return Deadline(self.timeout)

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call, so that closing waits for it. Raise `InvalidState` once closing has begun."""
        self.check_open()
        with self._changed:
            refused = self.closed
            self._running_calls += not refused
        if refused:
            raise self.refusal()
        try:
            yield
        finally:
            with self._changed:
                self._running_calls -= 1
                self._changed.notify_all()

    @property
    def running_calls(self) -> int:
        """The number of running calls, without those on transactions: their writers are busy."""
        return self._running_calls

    def wait_for_call(self, seconds: float) -> None:
        """Wait until a call has ended, or for so many seconds."""
        with self._changed:
            self._changed.wait(seconds)

    def refuse_calls(self) -> None:
        """Refuse new calls from now on; running calls go on."""
        with self._changed:
            self.closed = True

    def check_open(self) -> None:
        if self.closed or self.forked:
            raise self.refusal()

    def refusal(self) -> InvalidState:
        self.check_process()
        return InvalidState("this bridge is closed")

    def check_process(self) -> None:
        if self.forked:
            raise InvalidState(FORK_HELP)
        if _exiting.is_set() and threading.current_thread() is not threading.main_thread():
            # A daemon thread calls while its program ends. A refusal would only make it die with a traceback, so it
            # waits here to end with the program; it is refused if the program waits for it longer than that.
            threading.Event().wait(self.timeout)

    def forget_parent(self) -> None:
        """Refuse calls in the child of a fork: nothing of the parent's may be used, closed or garbage-collected."""
        self.forked = True
        _parents.append(self._broker)


class ConnectionUser:
    """Base of the classes whose calls `Bridge.close` must not wait for when it interrupts them on their own thread."""

    __slots__ = ("_connection",)

    _connection: Connection


_exiting = threading.Event()  # set while the interpreter ends
_parents: list[Broker | None] = []  # brokers of the parent process, kept so that this process never closes them


def exiting() -> bool:
    """Return whether the interpreter is ending."""
    return _exiting.is_set()


def exit_begins() -> None:
    """Make calls of daemon threads wait from now on, because the interpreter is ending."""
    _exiting.set()


def random_name(size: int) -> str:
    """Return a unique name. (`secrets` would take a tenth of the time that `import txnbridge` may take.)"""
    return os.urandom(size).hex()


def close_logging_errors(close: Callable[..., object], *arguments: object) -> None:
    """Close something and log an error, so that the next thing is closed in any case."""
    try:
        close(*arguments)
    except Exception as error:
        _log.warning("closing: %s", error)
