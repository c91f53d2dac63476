"""The program of one process of a run: `python -m txnbridge_conformance.run.program ROLE PROCESS N < PLAN`.

The process works until SIGTERM, and records each call in its history. With N above 0 the process kills itself after N
events of txnbridge. Half of the other processes pause at random events.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import txnbridge
from txnbridge import plugins
from txnbridge.errors import InvalidOption, TxnBridgeError
from txnbridge_conformance.history import Recorder
from txnbridge_conformance.run.client import Client, KillAt, PauseAt
from txnbridge_conformance.run.plan import Plan
from txnbridge_conformance.run.processes import end_with
from txnbridge_conformance.run.raw import rocketmq as raw_rocketmq
from txnbridge_conformance.run.workloads import WORK

# The plain clients of raw runs, by the scheme of the broker's URL.
CLIENTS = {"kafka": "confluent_kafka", "rocketmq": "rocketmq-python-client"}


def main(role: str, process: str, number: str) -> None:
    plan = Plan.from_json(sys.stdin.read())
    end_with(plan.run)
    plan.register_plugins()
    plugins.backends()  # imported now, so that a busy machine does not import within the deadline of the first opening
    if plan.raw and urlsplit(plan.url).scheme == "pulsar":
        from txnbridge_conformance.run.raw import pulsar as raw_pulsar  # it imports all that starts brokers

        raw_pulsar.become_java(plan, process)
    client_name = CLIENTS[urlsplit(plan.url).scheme] if plan.raw else f"txnbridge {txnbridge.__version__}"
    recorder = Recorder(Path(plan.folder) / f"{process}.jsonl", process, client_name)
    with closing(recorder):
        client = Client(plan, process, recorder, random.Random(f"{plan.seed} {process}"))
        _stop_by_signal(client)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the shell reaches the run, which ends its processes
        if int(number):
            plugins.register(KillAt(int(number), client), "kill-at")
        elif client.random.random() < 0.5:  # not always: with a listener, the quick way of sending is not taken
            plugins.register(PauseAt(client, role), "pause-at")
        work = raw_rocketmq.sell if plan.raw and role == "sell" else WORK[role]
        while not client.stop.is_set():
            try:
                work(client)
            except InvalidOption:  # no role gives a wrong one: this is a defect, and ends the process
                raise
            except TxnBridgeError:  # fenced, or the broker is away: begin again with a new bridge
                client.stop.wait(0.2)


def _stop_by_signal(client: Client) -> None:
    """Let SIGTERM set the client's event `stop`.

    Another thread sets it, woken through a pipe. A signal handler runs on the main thread, perhaps inside of
    `stop.wait`, which holds the lock that `stop.set` takes; and the system may give the signal to another thread, so
    that no handler runs while the main thread waits.
    """
    woken, waker = os.pipe()
    os.set_blocking(waker, False)

    def stop() -> None:
        os.read(woken, 1)
        client.stop.set()

    threading.Thread(target=stop, daemon=True).start()
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGTERM, lambda *_: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
