"""The faults that a run injects. Each begins, lasts for a random time, and is then undone (healed)."""

from __future__ import annotations

import functools
import random
import shlex
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

from txnbridge import Bridge
from txnbridge.errors import TxnBridgeError
from txnbridge_conformance.brokers import Broker
from txnbridge_conformance.faults import Proxy
from txnbridge_conformance.run.processes import Process, RunFailed

# The longest time that a hook command may take, for example to start a broker.
_HOOK_SECONDS = 120.0

# Requests whose loss or delay decides over transactions, by the scheme of the broker's URL.
_REQUESTS = {
    "kafka": "InitProducerId AddPartitionsToTxn AddOffsetsToTxn TxnOffsetCommit Produce EndTxn FindCoordinator",
    "pulsar": "PRODUCER SEND ACK LOOKUP NEW_TXN ADD_PARTITION_TO_TXN ADD_SUBSCRIPTION_TO_TXN END_TXN",
    "rocketmq": """SEND_MESSAGE_V2 SEND_BATCH_MESSAGE END_TRANSACTION CHECK_TRANSACTION_STATE PULL_MESSAGE QUERY_MESSAGE
        LOCK_BATCH_MQ GET_ROUTE_INFO_BY_TOPIC""",
}


class Injected(NamedTuple):
    """A fault that has begun: its kind and target, and `heal`, which ends it and is to be called after `seconds`."""

    kind: str
    target: str
    seconds: float = 0
    heal: Callable[[], object] = lambda: None


class Faults(ABC):
    """A source of random faults in one part of the system, such as the network."""

    one_at_a_time: ClassVar = True  # whether a fault has to be healed before the next one begins

    @abstractmethod
    def inject(self, chance: random.Random) -> Injected | None:
        """Begin a fault chosen by `chance`, and return it. Return None if this call began no fault."""


class ClientFaults(Faults):
    """Kills, pauses and restarts processes of the run."""

    one_at_a_time = False

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def inject(self, chance: random.Random) -> Injected | None:
        process = chance.choice(self._processes)
        if process.paused:
            return None
        match chance.choice(("kill", "pause", "pause", "restart")):
            case "kill":
                process.kill()
                return Injected("kill", process.name)
            case "pause":
                process.pause()
                # Some pauses are longer than the deadline of the process's transactions, which then expire.
                return Injected("pause", process.name, chance.uniform(0, chance.choice((3, 12))), process.resume)
            case _ if not any(each.paused for each in self._processes):  # whose locks might keep it from ending
                name = process.name
                process.stop()
                process.start()
                return Injected("restart", name)
        return None


class AdminFaults(Faults):
    """Aborts open and prepared transactions of the run, as an administrator."""

    def __init__(self, bridge: Bridge, topics: Collection[str]) -> None:
        self._admin = bridge.admin
        self._topics = topics

    def inject(self, chance: random.Random) -> Injected | None:
        transaction = None
        with suppress(TxnBridgeError):  # it may have ended meanwhile, or the broker is away
            found = [
                each.transaction
                for each in (self._admin.transactions() if chance.random() > 0.7 else ())
                if not {topic for topic, _ in each.partitions}.isdisjoint(self._topics)
            ]
            if found:
                transaction = chance.choice(found)
                self._admin.abort(transaction, reason="conformance run")
        # An abort without an answer may have taken effect.
        return Injected("administrator's abort", transaction) if transaction else None


class NetworkFaults(Faults):
    """Cuts and delays connections through a proxy, and holds back requests or answers of one kind."""

    def __init__(self, proxy: Proxy, scheme: str) -> None:
        self._proxy = proxy
        self._requests = _REQUESTS[scheme].split()

    def inject(self, chance: random.Random) -> Injected:
        kind = chance.choice(self._requests)
        name = chance.choice(("cut", "cut after", "delay", "hold requests", "hold answers", "hold and cut"))
        seconds = chance.uniform(0, 5)
        later = threading.Timer(seconds / 3, self._proxy.cut)
        match name:
            case "cut":
                self._proxy.cut()
            case "cut after":
                self._proxy.cut_after(**{chance.choice(("requests", "answers")): chance.randrange(3000)})
            case "delay":
                self._proxy.delay(chance.uniform(0, 0.5))
            case "hold requests":
                self._proxy.hold(requests=kind)
            case "hold and cut":
                # The client connects again and continues; the request arrives at the end, in a later transaction.
                self._proxy.hold(requests=kind)
                later.start()
            case _:
                self._proxy.hold(answers=kind)
        late = chance.random() < 0.5
        label = f"{name} {kind}" if name.startswith("hold") else name
        return Injected(label, "network", seconds, lambda: self._heal(late, later))

    def _heal(self, late: bool, later: threading.Timer) -> None:
        later.cancel()
        if late:
            self._proxy.cut()  # held frames then arrive after their client has disconnected
        self._proxy.delay(0)
        self._proxy.cut_after()
        self._proxy.release()


class BrokerFaults(Faults):
    """Kills, stops and pauses nodes of the broker, one node at a time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def inject(self, chance: random.Random) -> Injected | None:
        # A broker takes seconds to start, so it is attacked less often than processes.
        if chance.random() < 0.8:
            return None
        node = chance.choice(self._broker.nodes)
        verb, longest = chance.choice((("kill", 3), ("kill", 3), ("stop", 3), ("pause", 8)))
        getattr(self._broker, verb)(node)
        heal = functools.partial(self._heal, node, verb == "pause")
        return Injected(f"broker {verb}", f"node {node}", chance.uniform(0, longest), heal)

    def _heal(self, node: int, paused: bool) -> None:
        heal = self._broker.resume if paused else self._broker.start
        try:
            heal(node)
        except TxnBridgeError:  # a slow machine; without its broker a run says nothing about it
            heal(node)


class HookFaults(Faults):
    """Calls a command of the user's, which begins and heals faults of a system that the run did not start.

    It is called as `COMMAND inject KIND TARGET`, and later as `COMMAND heal KIND TARGET`. `targets` are the pairs of
    kind and target that the command knows. A fault of a run that is killed is healed by a process that it leaves.
    """

    def __init__(self, command: str, targets: Sequence[tuple[str, str]]) -> None:
        self._command = shlex.split(command)
        self._targets = targets

    def inject(self, chance: random.Random) -> Injected:
        kind, target = chance.choice(self._targets)
        # If the run is killed, this process reads the end of its pipe instead of a line.
        command = ["sh", "-c", 'read _ || exec "$@"', "sh", *self._command, "heal", kind, target]
        waiting = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        heal = functools.partial(self._heal, kind, target, waiting)
        try:
            self._call("inject", kind, target)
        except BaseException:  # an interrupt, too
            heal()  # the command may have done a part
            raise
        return Injected(kind, target, chance.uniform(0, 8), heal)

    def _heal(self, kind: str, target: str, waiting: subprocess.Popen[bytes]) -> None:
        try:
            self._call("heal", kind, target)
        finally:
            if waiting.poll() is None:
                waiting.communicate(b"\n")

    def _call(self, what: str, kind: str, target: str) -> None:
        command = [*self._command, what, kind, target]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_HOOK_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunFailed(f"the hook did not run: {error}") from error
        if done.returncode:
            raise RunFailed(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
