"""`WorkerProcess`: a process of an application that `txnbridge run` has started and looks after.

Two pipes connect it with its supervisor. On the one it writes its status, a line of JSON several times a second, and
its metrics in some of the lines. On the other it reads what to do: `STOP`, `ABORT`, or the end of the pipe, which is
the end of the supervisor.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from contextlib import suppress

import click

from txnbridge import App, InvalidState, NotFound, Poison, TxnBridgeError, UsageError, plugins
from txnbridge.cli._common import ExitCode, report
from txnbridge.cli._health import to_json
from txnbridge.cli._object_loading import show_traceback
from txnbridge.metrics import Metrics

# The supervisor does not stop a worker by a signal: a service manager that sends SIGTERM to all processes of a service
# would then have sent the first one, and a second one aborts.
STOP, ABORT = b"s", b"a"
# The exit code of a worker that a signal or its supervisor has stopped.
STOPPED = 128 + signal.SIGTERM

# The interval at which a worker writes its status, so that a change is known soon; a line takes microseconds.
_STATUS_SECONDS = 0.25
_START_SECONDS = 0.05
# Metrics are longer, and are read every few seconds at most: every fourth line of the status has them.
_TURNS_A_METRIC = 4


class WorkerProcess:
    """This process as a worker.

    `given` is the text `STATUS,ORDERS,NUMBER,METRICS,ALONE`: its two pipes, its number from 1 on, whether it is to tell
    its metrics, and whether it is the only worker, 1 or 0.
    """

    def __init__(self, given: str) -> None:
        self._status, self._orders, self._number, measure, alone = map(int, given.split(","))
        self.log_prefix = "" if alone else f"worker {self._number}: "
        self._metrics = Metrics() if measure else None
        self._watches = False
        self._app: App | None = None
        os.set_inheritable(self._status, False)
        os.set_inheritable(self._orders, False)
        threading.Thread(target=self._obey, name="txnbridge orders", daemon=True).start()

    def run(self, app: App) -> int:
        """Run the application until it is stopped; return the exit code, by which the supervisor knows what to do.

        OK: the application has stopped itself. FAILED: a function has failed for good. UNAVAILABLE: it could not start
        now. USAGE: it can never start, because it is used wrongly.
        """
        self._app = app
        if self._metrics is not None:
            plugins.register(self._metrics)
        threading.Thread(target=self._tell, args=(app,), name="txnbridge status", daemon=True).start()
        try:
            app.run()
        except Exception as error:
            # The text of `Poison` is the application's own, which may be shown.
            shown = TxnBridgeError(str(error)) if isinstance(error, Poison) else error
            if not app._was_running and not isinstance(error, TxnBridgeError):
                show_traceback(error)  # of a lifespan
            report(click.get_current_context(), shown)
            return ExitCode.FAILED if app._was_running else start_code(error)
        return ExitCode.OK if app._stopped_itself else STOPPED

    def _tell(self, app: App) -> None:
        with suppress(BrokenPipeError):
            for turn in itertools.count():
                status = app._status()
                if self._metrics is not None and turn % _TURNS_A_METRIC == 0:
                    status["metrics"] = to_json(self._metrics.families())
                self._write(json.dumps(status).encode() + b"\n")
                # The first worker alone measures the broker, because every worker would get the same numbers.
                if self._metrics is not None and self._number == 1 and not self._watches and app._running:
                    with suppress(InvalidState):  # the application has just ended
                        self._metrics.watch(app.bridge)
                        self._watches = True
                time.sleep(_STATUS_SECONDS)

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._status, line) :]

    def _obey(self) -> None:
        order = STOP
        while order:
            order = os.read(self._orders, 1)
            if self._app is None:
                os._exit(STOPPED)  # while it imports the application, nothing is under way
            while self._app._stop is None:
                time.sleep(_START_SECONDS)
            if order == ABORT:
                self._abort(self._app)
            else:
                self._app._stop_all()

    def _abort(self, app: App) -> None:
        """Send this process stop signals, until it has got two in all: with the second the application aborts."""
        stop = app._stop  # the main thread may be closing the application
        if stop is not None and stop.signalled is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_START_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)


def start_code(error: Exception) -> ExitCode:
    """Return the exit code of an application that could not start: USAGE if it never can, else UNAVAILABLE."""
    # A missing topic is no fault of the application: it may be created while the service manager tries again.
    refused = isinstance(error, UsageError) and not isinstance(error, NotFound)
    return ExitCode.USAGE if refused else ExitCode.UNAVAILABLE
