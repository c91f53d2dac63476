"""`run_worker`: runs an application in a process that `txnbridge run` has started, and tells it how it gets on."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress

import click

from txnbridge import App, Poison, TxnBridgeError
from txnbridge.cli._common import ExitCode, report

# The exit code of a worker that a signal has stopped.
SIGNALLED = 128 + signal.SIGTERM

# The interval at which a worker writes its status, so that a change is known soon; a line takes microseconds.
_STATUS_SECONDS = 0.25


def run_worker(app: App, status: int, alive: int) -> int:
    """Run the application until a signal; return the exit code, by which the supervisor knows what to do.

    OK: the application has stopped itself. FAILED: a function has failed for good. UNAVAILABLE: it could not start.

    Write lines of JSON to the file descriptor `status`. Stop when the other end of `alive` is closed: then the
    supervisor is dead.
    """
    os.set_inheritable(status, False)
    os.set_inheritable(alive, False)
    threading.Thread(target=_stop_with_supervisor, args=(alive,), daemon=True).start()
    threading.Thread(target=_tell, args=(app, status), daemon=True).start()
    try:
        app.run()
    except Exception as error:
        # The text of `Poison` is the application's own, which may be shown.
        shown = TxnBridgeError(str(error)) if isinstance(error, Poison) else error
        report(click.get_current_context(), shown)
        return ExitCode.FAILED if app._was_running else ExitCode.UNAVAILABLE
    return ExitCode.OK if app._stopped_itself else SIGNALLED


def _stop_with_supervisor(alive: int) -> None:
    os.read(alive, 1)  # returns at the end of the supervisor, which never writes
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(app: App, status: int) -> None:
    pause = threading.Event()
    with suppress(BrokenPipeError):
        while True:
            os.write(status, json.dumps(app._status()).encode() + b"\n")
            pause.wait(_STATUS_SECONDS)
