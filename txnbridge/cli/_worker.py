"""`WorkerProcess`: a process of an application that `txnbridge run` has started and looks after.

Two pipes connect it with its supervisor. On the one it writes its status, a line of JSON several times a second. On the
other it reads what to do: `STOP`, `ABORT`, or the end of the pipe, which is the end of the supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress

import click

from txnbridge import App, Poison, TxnBridgeError
from txnbridge.cli._common import ExitCode, report

# The supervisor does not stop a worker by a signal: a service manager that sends SIGTERM to all processes of a service
# would then have sent the first one, and a second one aborts.
STOP, ABORT = b"s", b"a"
# The exit code of a worker that a signal or its supervisor has stopped.
STOPPED = 128 + signal.SIGTERM

# The interval at which a worker writes its status, so that a change is known soon; a line takes microseconds.
_STATUS_SECONDS = 0.25
_START_SECONDS = 0.05


class WorkerProcess:
    """This process as a worker. `pipes` are the file descriptors of its status and its orders, as text."""

    def __init__(self, pipes: str) -> None:
        status, _, orders = pipes.partition(",")
        self._status, self._orders = int(status), int(orders)
        self._app: App | None = None
        os.set_inheritable(self._status, False)
        os.set_inheritable(self._orders, False)
        threading.Thread(target=self._obey, name="txnbridge orders", daemon=True).start()

    def run(self, app: App) -> int:
        """Run the application until it is stopped; return the exit code, by which the supervisor knows what to do.

        OK: the application has stopped itself. FAILED: a function has failed for good. UNAVAILABLE: it could not start.
        """
        self._app = app
        threading.Thread(target=self._tell, args=(app,), name="txnbridge status", daemon=True).start()
        try:
            app.run()
        except Exception as error:
            # The text of `Poison` is the application's own, which may be shown.
            shown = TxnBridgeError(str(error)) if isinstance(error, Poison) else error
            report(click.get_current_context(), shown)
            return ExitCode.FAILED if app._was_running else ExitCode.UNAVAILABLE
        return ExitCode.OK if app._stopped_itself else STOPPED

    def _tell(self, app: App) -> None:
        with suppress(BrokenPipeError):
            while True:
                os.write(self._status, json.dumps(app._status()).encode() + b"\n")
                time.sleep(_STATUS_SECONDS)

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
        """Send this process the signals after which the application aborts: two, or the second one."""
        if app._stop is not None and app._stop.signalled is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_START_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
