"""`Connection`: the broker, settings and running calls that a bridge shares with its transactions and consumers."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from txnbridge._base.deadline import Deadline
from txnbridge._base.events import Emitter
from txnbridge._base.plugins import plugins
from txnbridge._base.timing import TIMING
from txnbridge.capabilities import Capabilities
from txnbridge.errors import BrokerUnavailable, InvalidState, NotFound
from txnbridge.spi import Broker, HalfStore, Identity

_log = logging.getLogger("txnbridge")

FORK_HELP = (
    "this bridge was opened before a fork and cannot be used in the child. Open it there: in gunicorn in the"
    " post_fork(server, worker) hook, in Celery in a worker_process_init handler, elsewhere at first use:"
    " `bridge = txnbridge.connect(url)`"
)


class Stoppable(Protocol):
    """The part of `Service` by which a bridge stops its running services."""

    def stop_by(self, deadline: Deadline) -> None: ...


class Connection:
    """One open connection to one broker, shared by a bridge and all that it opens. Any thread may use it.

    The connection refers to its bridge, so an open transaction or consumer keeps the bridge from being
    garbage-collected.
    """

    timing = TIMING

    def __init__(self, bridge: object, backend: str, identity: Identity, timeout: float) -> None:
        self.bridge = bridge
        self.backend = backend
        self.name: str = f"{backend}-{random_name(4)}"
        self.identity = identity
        self.timeout = timeout
        self.events: Emitter = Emitter(self.name, plugins.listeners(), plugins.filtered_listeners())
        self.header_makers: list[Any] = plugins.header_makers()
        self.services: set[Stoppable] = set()  # the running services
        self.processors: weakref.WeakSet[Any] = weakref.WeakSet()  # for metrics
        # Returns the bridge's half store in lanes; the bridge sets it.
        self.half_lanes: Callable[[], HalfStore] = _no_half_lanes
        self.spans: dict[frozenset[str], Any] = {}  # by the clusters over which they go
        self.opening_spans: threading.Lock = threading.Lock()
        self.closed: bool = False  # if True, new calls are refused
        self.forked: bool = False
        self._broker: Broker | None = None
        self._changed = threading.Condition()
        self._running_calls: set[object] = set()

    @property
    def broker(self) -> Broker:
        """The broker. Raise `BrokerUnavailable` until it is set: some brokers send check-backs while being opened."""
        if self._broker is None:
            raise BrokerUnavailable("this bridge is not open yet")
        return self._broker

    @broker.setter
    def broker(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def capabilities(self) -> Capabilities:
        return self.broker.capabilities

    def deadline(self, timeout: float | None = None) -> Deadline:
        """Return the deadline of a call that begins now: `timeout`, by default the bridge's, from now."""
        return Deadline(self.timeout if timeout is None else timeout)

    def require_topic(self, topic: str, use: str) -> None:
        """Raise `NotFound` for a missing topic that may not be created; `use` is the error's text about its use."""
        with self.call():
            try:
                self.broker.require_topic(topic, self.deadline())
            except NotFound as error:
                raise NotFound(f"{use} {topic!r}: {error}") from None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as a running call, for which `Bridge.close` waits. Raise `InvalidState` if closed."""
        self.check_open()
        call = object()
        try:
            with self._changed:
                if not self.closed:
                    self._running_calls.add(call)
            if call not in self._running_calls:
                raise self.refusal()
            yield
        finally:
            self._running_calls.discard(call)
            with self._changed:
                self._changed.notify_all()

    @property
    def running_calls(self) -> int:
        """The number of running calls, without calls on transactions, which `Writers.busy` counts."""
        return len(self._running_calls)

    def wait_for_call(self, seconds: float) -> None:
        """Wait until any running call has ended, at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def refuse_calls(self) -> None:
        """Refuse new calls from now on; running calls continue."""
        with self._changed:
            self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise self.refusal()

    def refusal(self) -> InvalidState:
        self.check_process()
        return InvalidState("this bridge is closed")

    def check_process(self) -> None:
        if self.forked:
            raise InvalidState(FORK_HELP)
        if _exiting.is_set() and threading.current_thread() is not threading.main_thread():
            # A daemon thread calls while the interpreter is ending. An error would end the thread with a traceback, so
            # the call waits here until the program has ended; it is refused only if the program takes longer to end.
            threading.Event().wait(self.timeout)

    def forget_parent(self) -> None:
        """Refuse all calls in a forked child, which must not use, close or garbage-collect the parent's broker."""
        self.forked = self.closed = True
        _parents.append(self._broker)


def never_ran(error: BaseException) -> bool:
    """Return whether an error says that a method was called with wrong arguments, so that the method has not run."""
    return isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None


class ConnectionUser:
    """Base of classes whose methods are calls on a bridge.

    A signal handler or listener may call `Bridge.close` during such a method. `Bridge.close` finds the method by this
    class in the thread's stack, and then does not wait for its end.
    """

    __slots__ = ("_connection",)

    _connection: Connection


def _no_half_lanes() -> HalfStore:
    raise InvalidState("this bridge is not open yet")


_exiting = threading.Event()  # set while the interpreter is ending
_parents: list[Broker | None] = []  # brokers of the parent process, kept so that this process never closes them


def exiting() -> bool:
    """Return whether the interpreter is ending, so that it starts no more threads."""
    return _exiting.is_set()


def exit_begins() -> None:
    """Note that the interpreter is ending: a daemon thread's next call waits for the end instead of failing."""
    _exiting.set()


def random_name(size: int) -> str:
    """Return `size` random bytes as hexadecimal text."""
    return os.urandom(size).hex()  # importing `secrets` would slow `import txnbridge` by a tenth


def close_logging_errors(close: Callable[..., object], *arguments: object) -> None:
    """Call `close`, and log its exception instead of raising it, so that the caller can close further objects."""
    try:
        close(*arguments)
    except Exception as error:
        _log.warning("closing: %s", str(error))  # a record that is kept would keep the error's frames
