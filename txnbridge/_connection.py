"""What all that starts from one bridge shares: its broker and its settings, and whether either may still be used."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from txnbridge._deadline import Deadline
from txnbridge._events import Emitter
from txnbridge._plugins import plugins
from txnbridge.capabilities import Capabilities
from txnbridge.errors import BrokerUnavailable, InvalidState
from txnbridge.spi import Broker, Identity

if TYPE_CHECKING:
    from txnbridge._bridge import Bridge
    from txnbridge._consumers import Consumers
    from txnbridge._outcomes import Outcomes
    from txnbridge._resolver import Resolver
    from txnbridge._writers import Writers

_log = logging.getLogger("txnbridge")

FORK_HELP = (
    "this bridge was opened before a fork and cannot be used in the child. Open it there: in gunicorn in the"
    " post_fork(server, worker) hook, in Celery in a worker_process_init handler, elsewhere at first use:"
    " `bridge = txnbridge.connect(url)`"
)


class Connection:
    """One open connection to one broker. Any thread may use it; what it opens keeps it, and by it the bridge."""

    # What it opens comes back to these.
    writers: Writers
    outcomes: Outcomes
    consumers: Consumers

    def __init__(self, bridge: Bridge, backend: str, identity: Identity, timeout: float) -> None:
        self.bridge = bridge
        self.backend = backend
        self.name = f"{backend}-{random_name(4)}"
        self.identity = identity
        self.timeout = timeout
        self.events = Emitter(self.name, plugins.listeners())
        self.header_makers = plugins.header_makers()
        self.resolvers: set[Resolver] = set()  # those that run
        self.closed = False  # to new calls
        self.forked = False
        self._broker: Broker | None = None
        self._changed = threading.Condition()
        self._calls = 0  # those that run

    @property
    def broker(self) -> Broker:
        """Raises `BrokerUnavailable`: some brokers ask about transactions as soon as they are connected."""
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
        """That of a call that begins now."""
        return Deadline(self.timeout)

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that closing waits for, and that is refused once closing has begun."""
        self.check_open()
        with self._changed:
            refused = self.closed
            self._calls += not refused
        if refused:
            raise self.refusal()
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @property
    def calls(self) -> int:
        """How many run; those that only a writer knows of are not counted."""
        return self._calls

    def wait_for_call(self, seconds: float) -> None:
        """Until one has ended, or for so long."""
        with self._changed:
            self._changed.wait(seconds)

    def refuse_calls(self) -> None:
        """From now on, for good; those that run go on."""
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
            # A daemon thread's, whose program ends without asking it: it would only die of a refusal, and say so. It
            # ends with the program, or is refused if somebody should wait for it.
            threading.Event().wait(self.timeout)

    def forget_parent(self) -> None:
        """In the child of a fork: nothing of the parent's may be used, closed or collected."""
        self.forked = True
        _parents.append(self._broker)


_exiting = threading.Event()  # the interpreter is
_parents: list[Broker | None] = []  # brokers of the parent process, kept so that nothing of theirs is ever closed here


def exiting() -> bool:
    """Whether the interpreter ends."""
    return _exiting.is_set()


def exit_begins() -> None:
    """The interpreter ends: what daemon threads call from now on waits for that."""
    _exiting.set()


def random_name(size: int) -> str:
    """A name that nobody else makes. (Not by `secrets`: it loads a tenth of what `import txnbridge` may cost.)"""
    return os.urandom(size).hex()


def close_logging_errors(close: Callable[..., object], *arguments: object) -> None:
    """At the end everything gets its chance to close; what fails is logged."""
    try:
        close(*arguments)
    except Exception as error:
        _log.warning("closing: %s", error)
