"""The hunt: starts the processes of a run, attacks them, ends what they left open, and reads everything back."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import txnbridge
from txnbridge import Bridge, Capability
from txnbridge.errors import TxnBridgeError
from txnbridge_conformance import faults
from txnbridge_conformance.brokers import Broker
from txnbridge_conformance.faults import Proxy
from txnbridge_conformance.history import RecordedCall, Recorder
from txnbridge_conformance.run import official_readers as official
from txnbridge_conformance.run.client import Client, read_of
from txnbridge_conformance.run.faults import AdminFaults, BrokerFaults, ClientFaults, Faults, Injected, NetworkFaults
from txnbridge_conformance.run.plan import WORKLOADS, Plan
from txnbridge_conformance.run.processes import Process
from txnbridge_conformance.run.settling import ALL, Settling, delete_topics

# The share of the time without faults at its end, in which processes recover and copiers catch up.
_QUIET_SHARE = 0.25
# Before that, periods with faults and without take turns: groups whose members die all the time would process nothing.
_ATTACK_SECONDS, _REST_SECONDS = 20.0, 10.0
# The time in which a reader reads a whole topic.
_READING_SECONDS = 300.0
# The longest time, behind that of the work, for each later part of a run, which is long after all its deadlines.
_PART_SECONDS = 900.0
# The share of processes that kill themselves, if they start while the run attacks, of roles whose transactions have
# several parts and of others; and after how many events: the first ones are those of an opening.
_KILLED_SHARE, _OTHERS_KILLED_SHARE = 0.9, 0.4
_OF_SEVERAL_PARTS = frozenset({"write", "own", "publish", "copy", "process", "share", "sell", "span", "serve"})
_KILL_AT = (2, 10, 10, 10, 20, 20, 20, 30, 30, 40)

Progress = Callable[[str], None]


class Hunt:
    """Runs one plan: attacks processes and reads all back. Call `work`, `settle`, `read_back`, inside of `topics`."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        broker: Broker | None,
        proxy: Proxy | None,
        clients: bool,
        more: Collection[Faults] = (),
    ) -> None:
        self._plan = plan
        self._through = plan.at(proxy.url) if proxy else None
        self._progress = progress
        self._clients = clients  # whether processes and their transactions are attacked
        self._random = random.Random(plan.seed)
        self._recorder = Recorder(Path(plan.folder) / "run.jsonl", "run", f"txnbridge {txnbridge.__version__}")
        self._client = Client(replace(plan, raw=False), "run", self._recorder, self._random)
        self._processes: list[Process] = []
        self._faults: list[Faults] = [ClientFaults(self._processes)] if clients else []
        if proxy:
            self._faults.append(NetworkFaults(proxy, urlsplit(plan.url).scheme))
        if broker:
            self._faults.append(BrokerFaults(broker))
        self._faults.extend(more)
        # With the time at which each is healed, and its source.
        self._injected: list[tuple[float, Faults, Injected]] = []
        self.deeds: Counter[str] = Counter()
        self._attacking = clients  # whether new processes may kill themselves
        self._roles: dict[str, int] = {}  # with the number of processes

    @contextmanager
    def topics(self) -> Iterator[Bridge]:
        """Create the run's topics and yield a bridge. End faults and processes, and delete the topics, at the end."""
        with self._client.bridge() as bridge, ExitStack() as stack:
            self._roles = self._plan.roles(bridge.capabilities)
            for client, topics in self._places():
                stack.enter_context(self._created(client, topics))
            stack.callback(self._end)
            yield bridge

    def _places(self) -> list[tuple[Client, Sequence[str]]]:
        """Return the clients of the run's broker and, if it has a second one, of that, each with the topics there."""
        places: list[tuple[Client, Sequence[str]]] = [(self._client, self._plan.all_topics)]
        return [*places, (self._client.at_second(), self._plan.spanned[1:])] if "span" in self._roles else places

    @contextmanager
    def _created(self, client: Client, topics: Sequence[str]) -> Iterator[None]:
        with client.bridge() as bridge:
            try:
                for topic in topics:
                    bridge.admin.create_topic(topic, self._plan.partitions(topic))
                yield
            finally:
                delete_topics(bridge, self._plan.prefix)

    def work(self, bridge: Bridge) -> None:
        """Start the processes, and let them work for `Plan.seconds`. Inject faults, except in the last quarter."""
        declares = self._start(bridge)
        begin = time.monotonic()
        faults_until = begin + self._plan.seconds * (1 - _QUIET_SHARE)
        while (now := time.monotonic()) < begin + self._plan.seconds:
            self._heal(now)
            attacks = now < faults_until and (now - begin) % (_ATTACK_SECONDS + _REST_SECONDS) < _ATTACK_SECONDS
            self._attacking = self._clients and attacks
            if attacks:
                self._attack(now)
            else:
                self._heal(math.inf)
            self._replace_dead()
            deeds = ", ".join(f"{count} {name}" for name, count in self.deeds.items()) or "no faults yet"
            self._progress(f"{now - begin:.0f} of {self._plan.seconds:g} s: {deeds}")
            time.sleep(self._random.uniform(0.1, 0.6))
        self._heal(math.inf)
        with suppress(TxnBridgeError):  # a right may be missing; Kafka has some of its topics only now
            declares.end("ok", settings=[f"{each.subject}: {each.text}" for each in bridge.admin.doctor()])

    def _start(self, bridge: Bridge) -> RecordedCall:
        absent = [each.value for each in Capability if not bridge.capabilities[each]]
        workloads = [each for each in self._plan.workloads if WORKLOADS[each][0] in self._roles]
        product = f"{bridge.capabilities.broker} {self._plan.version}".strip()
        about = {"product": product, "url": bridge.url, "cluster": bridge.cluster, "host": socket.gethostname()}
        about |= {"begun": datetime.now(UTC).isoformat(" ", "seconds"), "duration": f"{self._plan.seconds:g} s"}
        about |= {"txnbridge": txnbridge.__version__}
        declared = {"absent": absent, "about": about, "workloads": workloads}
        call = self._recorder.start("declares", **declared, kills=self._clients and not self._plan.raw)
        if self._clients and bridge.capabilities[Capability.END_OPEN]:
            self._faults.append(AdminFaults(bridge, self._plan.topics))
        for role, count in self._roles.items():
            for number in range(count):
                # With a proxy one process of each role goes through it; the others reach the broker directly.
                plan = replace(self._plan, url=self._through) if self._through and number == 0 else self._plan
                self._processes.append(Process(plan, role, number, self._next_kill, self._complain))
        return call

    def _attack(self, now: float) -> None:
        if not self._faults:
            return
        self._faults.append(self._faults.pop(0))  # each source of faults has its turn
        source = self._faults[0]
        lasts = source.one_at_a_time and any(each is source for _, each, _ in self._injected)
        if not lasts and (injected := source.inject(self._random)):
            self._recorder.fault(injected.kind, injected.target, "begin")
            self.deeds[injected.kind] += 1
            self._injected.append((now + injected.seconds, source, injected))

    def _heal(self, now: float) -> None:
        """End the faults that are due at the time `now`, and record their ends: each one's, even if another's fails."""
        with ExitStack() as stack:
            for each in [each for each in self._injected if each[0] <= now]:
                stack.callback(self._end_fault, each)

    def _end_fault(self, each: tuple[float, Faults, Injected]) -> None:
        each[2].heal()
        self._injected.remove(each)  # not before: one whose heal is interrupted is healed at the end
        self._recorder.fault(each[2].kind, each[2].target, "end")

    def _replace_dead(self) -> None:
        for process in self._processes:
            process.replace_dead()

    def _complain(self, process: str, what: str) -> None:
        """Record in the history that a process crashed or did not stop."""
        self._recorder.start("process", name=process).end("fail", error=what)

    def _next_kill(self, role: str) -> int:
        """Return after how many events a new process of this role kills itself, or 0 if it does not."""
        share = _KILLED_SHARE if role in _OF_SEVERAL_PARTS else _OTHERS_KILLED_SHARE
        number = self._random.choice(_KILL_AT) if self._attacking and self._random.random() < share else 0
        return number * 2 if role == "span" else number  # whose transactions have more events

    def within_limit(self, part: Callable[[], object], what: str, seconds: float) -> None:
        """Run a part of the run. Record a hang if it stands still for longer than `seconds`, and leave it to itself."""
        ended: Future[object] = Future()

        def work() -> None:
            try:
                ended.set_result(part())
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            ended.result(seconds)
        except TimeoutError:
            if ended.done():
                raise
            call = self._recorder.start("settle", condition=f"{what} has not ended")
            call.end("fail", error=f"the run gave up after {seconds:g} s")

    def settle(self) -> None:
        """Stop the processes, and end each transaction that they left open or prepared."""
        self._progress("stopping")
        with self._client.bridge(timeout=_READING_SECONDS) as bridge:
            Settling(self._client, bridge, self._roles, self._stop, self._replace_dead, self._plan.raw).settle()

    def _stop(self, roles: Collection[str]) -> None:
        for process in [each for each in self._processes if each.role in roles]:
            process.stop()
            self._processes.remove(process)

    def read_back(self) -> None:
        """Read every topic from the start with a fresh reader, and record all messages."""
        self._progress("reading everything back")
        for client, topic in [(client, topic) for client, topics in self._places() for topic in topics]:
            with suppress(TxnBridgeError), client.recorded("read", topics=[topic]) as call:
                with client.bridge(timeout=_READING_SECONDS) as bridge:
                    call.poll([read_of(message) for message in bridge.read(topic, ALL)])

    def read_back_officially(self) -> None:
        """Read every topic in a child process with the broker's official client, if that client is installed."""
        if (name := official.name_of(self._plan)) is None:
            return
        self._progress(f"reading everything back with {name}")
        recorder = Recorder(Path(self._plan.folder) / "official.jsonl", "official", name)
        plan = self._plan.to_json().encode()
        for topic in self._plan.all_topics:
            call = recorder.start("read", topics=[topic])
            command = [sys.executable, "-m", official.__name__, topic]
            try:
                done = subprocess.run(command, input=plan, capture_output=True, timeout=_READING_SECONDS, check=True)
            except subprocess.SubprocessError as error:
                call.end("unknown", error=type(error).__name__)
            else:
                call.poll(json.loads(line) for line in done.stdout.splitlines())
                call.end("ok")
        recorder.close()

    def _end(self) -> None:
        """Heal the faults that last after an error, and kill the processes."""
        try:
            self._heal(math.inf)
        finally:
            while self._processes:
                self._processes.pop().kill()  # a part that was left to itself does not start it again

    def close(self) -> None:
        self._recorder.close()


def hunt(
    plan: Plan, progress: Progress, broker: Broker | None, kinds: Collection[str], more: Collection[Faults] = ()
) -> None:
    """Run a plan to its end. The histories of all processes are then in the folder of the plan.

    `kinds` selects the faults. "client" attacks the run's processes and transactions. "network" puts a proxy between
    some processes and the broker. "broker" attacks the broker's nodes. The last two need `broker`, a broker that was
    started for this run. `more` are further sources of faults. SIGTERM interrupts the run as Ctrl-C does.
    """
    os.makedirs(plan.folder, exist_ok=True)
    if broker:
        plan = replace(plan, version=f"{broker.version}, nodes: {len(broker.nodes)}")
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        proxy = stack.enter_context(faults.proxy(broker)) if broker and "network" in kinds else None
        running = Hunt(plan, progress, broker if "broker" in kinds else None, proxy, "client" in kinds, more)
        stack.callback(running.close)
        bridge = stack.enter_context(running.topics())
        running.work(bridge)
        seconds = _PART_SECONDS + plan.seconds
        running.within_limit(running.settle, "the end of open transactions", seconds)
        running.within_limit(running.read_back, "the reading of all topics", seconds)
        running.within_limit(running.read_back_officially, "the reading by the official client", seconds)
