"""`Service`: a loop that works for a bridge on a thread, such as a resolver, until it or its bridge is closed."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from contextlib import suppress
from typing import TypeVar

from txnbridge._base.connection import Connection, ConnectionUser
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.service_stop import Shutdown, StopNow
from txnbridge.errors import InvalidState

_log = logging.getLogger("txnbridge")

S = TypeVar("S", bound="Service")


class Service(ConnectionUser):
    """Base of resolvers and relays. A subclass has `_loop`, which returns soon after `_stop.asked` has become True.

    `name` names the service in log and error texts. A stop gives the loop `stop_timeout` seconds.
    """

    def __init__(self, connection: Connection, name: str, stop_timeout: float) -> None:
        check_seconds("stop_timeout", stop_timeout)
        self._connection = connection
        self._name = name
        # No wait of the loop takes longer than a second, so a stop needs no force.
        self._stop = Shutdown(stop_timeout, name, lambda _: None, lambda: None)
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def _loop(self) -> None:
        """Do the service's work until a stop is asked for, or the bridge is closed."""

    def _leave(self) -> None:
        """Tell the broker or database that this service has ended; errors are only logged."""

    @property
    def _runs(self) -> bool:
        return self._running.locked() and self._error is None and not self._connection.closed

    def run(self) -> None:
        """Work on this thread until `stop`, or on the main thread until SIGTERM or Ctrl-C.

        Errors of the broker are logged and retried; raise any other error.
        """
        self._connection.check_process()
        held: list[bool] = []
        try:
            if not Deadline(0).acquire(self._running, held):
                raise InvalidState(f"this {self._name} runs already")
            self._connection.services.add(self)
            with self._stop.by_signals(), suppress(StopNow):
                self._loop()
        finally:
            if held:
                self._connection.services.discard(self)
                try:
                    self._leave()
                finally:
                    self._running.release()

    def start(self) -> None:
        """Call `run` on a new thread."""
        self._thread = threading.Thread(target=self._run_quietly, name=f"txnbridge {self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask `run` to return after its current step. Return at once; any thread or signal handler may call this."""
        self._stop.ask()

    def close(self) -> None:
        """Stop, and wait `stop_timeout` seconds at most for the end of the thread that `start` made."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._stop.left())
            if thread.is_alive():
                _log.warning("the %s did not end within its stop_timeout; its last step runs on", self._name)

    def stop_by(self, deadline: Deadline) -> None:
        """Stop because the bridge is being closed, and wait for the end of `run` until the deadline."""
        self.stop()
        if self._running.acquire(timeout=deadline.left()):
            self._running.release()

    def __enter__(self: S) -> S:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self._error is not None and error[0] is None:
            raise self._error

    def _run_quietly(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
            _log.error("the %s has ended: %s", self._name, error)
