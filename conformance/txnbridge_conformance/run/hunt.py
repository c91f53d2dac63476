"""The hunt: starts the processes of a run, attacks them, ends what they left open, and reads everything back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import txnbridge
from txnbridge import Bridge, Capability, Decision
from txnbridge.errors import NotFound, TxnBridgeError
from txnbridge_conformance.history import Recorder, read_history
from txnbridge_conformance.run.client import Client, read_of, text_of
from txnbridge_conformance.run.plan import PARTITIONS, ROLES, Plan
from txnbridge_conformance.run.sales import Sales

# The share of the time without faults at its end, in which processes recover and copiers catch up.
_QUIET_SHARE = 0.25
# The longest time for which the hunt waits for open transactions and for the copiers after the work.
_SETTLING_SECONDS = 60.0
# Roles whose processes stop first: the others still have their messages to read and their tokens to finish.
_SOURCES = ("write", "own", "feed", "sell")

Progress = Callable[[str], None]


class RunFailed(Exception):
    """Raised if a run cannot go on; the text says why and what to do."""


class Process:
    """A process of the run, which is started again under a new name whenever it dies."""

    def __init__(self, plan: Plan, role: str, number: int) -> None:
        self._plan = plan
        self.role = role
        self._name = f"{role}{number}"
        self._starts = 0
        self.paused = False
        self.kill_at = 0
        self.start()

    @property
    def name(self) -> str:
        return f"{self._name}-{self._starts}"

    def start(self) -> None:
        self._starts += 1
        command = [sys.executable, "-m", "txnbridge_conformance.run.client", self._plan.to_json()]
        self._errors = Path(self._plan.folder) / f"{self.name}.err"
        with open(self._errors, "wb") as errors:
            arguments = [*command, self.role, self.name, str(self.kill_at)]
            self._process = subprocess.Popen(arguments, stderr=errors, stdin=subprocess.DEVNULL)

    def replace_dead(self) -> bool:
        """Start the process again if it was killed; return whether it was. Raise `RunFailed` if it ended by itself."""
        code = self._process.poll()
        if code is None:
            return False
        if code != -signal.SIGKILL:
            raise RunFailed(f"process {self.name} ended with {code}: {self._last_error()}")
        self.start()
        return True

    def _last_error(self) -> str:
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-15:]) or "it said nothing"

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self, timeout: float) -> None:
        """Ask the process to end, and wait; kill it if it takes longer. A call that it was in is then unknown."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


class Hunt:
    """One run: `work`, `settle` and `read_back`, in this order."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._random = random.Random(plan.seed)
        self._recorder = Recorder(Path(plan.folder) / "run.jsonl", "run", f"txnbridge {txnbridge.__version__}")
        self._client = Client(plan, "run", self._recorder, self._random)
        self._processes: list[Process] = []
        self.deeds: Counter[str] = Counter()
        self._next_point: Counter[str] = Counter()
        self._sells = False  # whether the broker has half messages

    # --- work ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def topics(self) -> Iterator[Bridge]:
        """Create the run's topics; delete them at the end of the block."""
        with self._client.bridge() as bridge:
            for topic in self._plan.topics:
                bridge.admin.create_topic(topic, PARTITIONS)
            try:
                yield bridge
            finally:
                for topic in self._plan.topics:
                    with suppress(TxnBridgeError):
                        bridge.admin.delete_topic(topic)

    def work(self, bridge: Bridge) -> None:
        """Let the processes work for the plan's time, and attack them for the first part of it."""
        begin = time.monotonic()
        faults_until = begin + self._plan.seconds * (1 - _QUIET_SHARE)
        self._sells = bool(bridge.capabilities[Capability.HALF_MESSAGES])
        for role, count in ROLES.items():
            if role == "sell" and not self._sells:
                continue
            self._processes += [Process(self._plan, role, number) for number in range(count)]
        while (now := time.monotonic()) < begin + self._plan.seconds:
            if now < faults_until:
                self._attack()
            self._replace_dead()
            self._progress(f"{now - begin:.0f} of {self._plan.seconds:g} s: {_counted(self.deeds)}")
            time.sleep(self._random.uniform(0.1, 0.6))
        for process in self._processes:
            self._resume(process)

    def _replace_dead(self) -> None:
        for process in self._processes:
            if self._random.random() < 0.5:
                process.kill_at = self._next_point[process.role] + 1
            else:
                process.kill_at = 0
            if process.replace_dead() and process.kill_at:
                self._next_point[process.role] += 1

    def _attack(self) -> None:
        process = self._random.choice(self._processes)
        match self._random.choice(("kill", "pause", "pause", "resume", "resume", "leave")):
            case "kill":
                self._recorder.fault("kill", process.name, "begin")
                process.kill()
                self.deeds["kills"] += 1
            case "pause" if not process.paused:
                self._recorder.fault("pause", process.name, "begin")
                process.signal(signal.SIGSTOP)
                process.paused = True
                self.deeds["pauses"] += 1
            case "resume":
                for paused in [each for each in self._processes if each.paused][:1]:
                    self._resume(paused)
            case "leave" if not process.paused:
                self._recorder.fault("restart", process.name, "begin")
                process.stop(self._plan.timeout * 2)
                process.start()
                self.deeds["restarts"] += 1

    def _resume(self, process: Process) -> None:
        if process.paused:
            process.signal(signal.SIGCONT)
            process.paused = False
            self._recorder.fault("pause", process.name, "end")

    # --- settling -----------------------------------------------------------------------------------------------------

    def settle(self, bridge: Bridge) -> None:
        """Stop the processes, and end each transaction that they left open or prepared."""
        self._progress("stopping")
        for process in self._processes:
            process.kill_at = 0
        self._stop(_SOURCES)
        self._stop(("finish",))
        self._finish_all(bridge)
        if self._sells:
            self._publish_sales(bridge)
        self._await(lambda: self._nothing_open(bridge), "transactions of the run are still open")
        call = self._recorder.start("drained", group=self._plan.group, topics=[self._plan.topic("source")])
        drained = self._await(lambda: not self._lag(bridge), "the copiers have not read everything")
        self._stop(("copy", "watch"))
        self._await(lambda: self._nothing_open(bridge), "transactions of the copiers are still open")
        call.end("ok" if drained else "unknown")

    def _stop(self, roles: tuple[str, ...]) -> None:
        for process in [each for each in self._processes if each.role in roles]:
            process.stop(self._plan.timeout * 2)
            self._processes.remove(process)

    def _finish_all(self, bridge: Bridge) -> None:
        """Ask for each outcome that is unknown, and abort what is still prepared."""
        history = read_history([self._plan.folder])
        known = {each.transaction for each in history.operations if each.outcome in ("committed", "aborted")}
        for operation in history.operations:
            token = operation.fields.get("token")
            if token and operation.transaction and operation.transaction not in known:
                wish = self._random.choice(("commit", "abort")) if operation.outcome == "prepared" else "status"
                self._await(
                    lambda operation=operation, token=token, wish=wish: self._client.finish(  # type: ignore[misc]
                        bridge, operation.transaction, token, wish
                    ),
                    f"transaction {operation.transaction} gives no outcome",
                )

    def _publish_sales(self, bridge: Bridge) -> None:
        """Answer check-backs until all half messages are published whose local work was done; record all decisions."""
        sales = Sales(self._plan.sales)
        with bridge.resolver(self._plan.sellers, check=lambda id, messages: sales.decide(id, Decision.ABORT)):
            self._await(lambda: self._sold(bridge) >= self._wanted(sales), "half messages are not published")
        for transaction, decision in sales.all().items():
            call = self._recorder.start("decided", transaction=transaction)
            call.end("ok", outcome="committed" if decision is Decision.COMMIT else "aborted")

    def _sold(self, bridge: Bridge) -> set[str]:
        return {text_of(message) for message in bridge.read(self._plan.topic("sold"), 100_000_000)}

    def _wanted(self, sales: Sales) -> set[str]:
        """Return the values of all half messages whose local work was done."""
        history, decisions = read_history([self._plan.folder]), sales.all()
        return {
            value
            for order, _, values in history.sends
            if history.operations[order].what == "half"
            and decisions.get(history.operations[order].transaction or "") is Decision.COMMIT
            for value in values
        }

    def _nothing_open(self, bridge: Bridge) -> bool:
        """Return whether no transaction on the run's topics is open, as far as the broker can list them."""
        if not bridge.capabilities[Capability.LIST_OPEN]:
            return True
        topics = {topic for each in bridge.admin.transactions() for topic, _ in each.partitions}
        return topics.isdisjoint(self._plan.topics)

    def _lag(self, bridge: Bridge) -> int:
        try:
            return sum(bridge.admin.group(self._plan.group).lag.values())
        except NotFound:
            return 1

    def _await(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait until a condition is true; after the settling time record in the history that it is not."""
        call = self._recorder.start("settle", condition=what)
        until = time.monotonic() + _SETTLING_SECONDS
        while time.monotonic() < until:
            for process in self._processes:
                process.replace_dead()
            with suppress(TxnBridgeError):
                if condition():
                    call.end("ok")
                    return True
            time.sleep(0.2)
        call.end("fail")
        return False

    # --- reading back -------------------------------------------------------------------------------------------------

    def read_back(self) -> None:
        """Read every topic from the start with a fresh reader, and record all messages."""
        self._progress("reading everything back")
        for topic in self._plan.topics:
            call = self._recorder.start("read", topics=[topic])
            try:
                with self._client.bridge() as bridge:
                    call.poll([read_of(message) for message in bridge.read(topic, 100_000_000)])
            except TxnBridgeError as error:
                call.end("unknown", error=type(error).__name__)
            else:
                call.end("ok")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._recorder.close()


def hunt(plan: Plan, progress: Progress) -> None:
    """Run a plan to its end; its histories are then in the plan's folder."""
    os.makedirs(plan.folder, exist_ok=True)
    with ExitStack() as stack:
        running = Hunt(plan, progress)
        stack.callback(running.close)
        bridge = stack.enter_context(running.topics())
        running.work(bridge)
        running.settle(bridge)
        running.read_back()


def _counted(deeds: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in deeds.items()) or "no faults yet"
