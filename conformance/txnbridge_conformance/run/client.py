"""`Client`: the recording client of one process of a run; `KillAt` and `PauseAt`, by which it attacks itself.

`ProcessorRecording` records the transactions of a processor, which begins and ends them itself.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import txnbridge
from txnbridge import Bridge, Event, HalfMessages, Message, Outcome, Transaction, errors, hookimpl
from txnbridge.errors import Abort, EvidenceLost, OutcomeUnknown, TransactionAborted, TxnBridgeError
from txnbridge_conformance.history import RecordedCall, Recorder, Result
from txnbridge_conformance.run.bodies import Bodies, dead_value, sent_as, text_of
from txnbridge_conformance.run.plan import PARTITIONS, Plan

Sends = Mapping[tuple[str, int], Sequence[str]]  # values by topic and partition, or, below 0, key
_KEYS = 2

# The deadline of half messages, and how long their local work may take, which begins before the deadline.
SALE_SECONDS, LONGEST_SALE = 4.0, 6.0
# The deadline of some transactions and half messages of one message. With so much time, RocketMQ's backend commits them
# without a decision.
SINGLE_SECONDS = 13.0

# The deadlines of spans, and how long after them the part that decides stays prepared. Processes pause for longer.
_SPAN_TIMEOUTS, _SPAN_HOLDS = (2.0, 5.0), (0.0, 5.0)
# The share of spans that pause before their end, some of them beyond their deadline.
_SPAN_PAUSE_SHARE = 0.05

_RESULTS: dict[Outcome, Result] = {Outcome.COMMITTED: "ok", Outcome.ABORTED: "fail", Outcome.UNKNOWN: "unknown"}

# Up to so many events a process opens its bridge; and for how many more it waits for one at which its kill is aimed.
_LONGEST_OPENING, _LONGEST_WAIT = 3, 300
# The target of a kill at an event that has not come yet.
_NEW = "new"
# The shares of kills that are aimed at the end of a transaction, and of those behind a request; and the events of that
# end besides those of the backend's requests.
_AIMED_SHARE, _BEHIND_SHARE = 0.85, 0.5
_ENDS = frozenset(("ack", "group.commit", "commit", "prepare", "transaction.end", "resolve", "half.store", "half.end"))
# At which events those happen, by the begins of their names, each equally often: between a decision and its answer,
# between the request for the commit and the decision, anywhere; and in processes with spans.
_AIMS = (
    ("step:commit/after", "step:decide/after", "commit/after", "group.commit/after", "half.end/after", "resolve/after"),
    ("step:store", "step:acks", "commit/before", "step:commit/before", "step:decide/before", "half.store"),
    ("",),
)
_AIMS_OF_SPANS = (("resolve", "half.end", "step:decide"), ("resolve", "half.end", "step:decide"), ("",))
# The share of events at which a process with `PauseAt` pauses, and the longest pause in seconds. In it another process
# can open a transactional id, and a short lease ends.
_PAUSE_SHARE, _LONGEST_PAUSE = 0.002, 4.0
# The same for events at which a group's member, or a process with spans, stops as a whole.
_STOP_SHARE, _LONGEST_STOP = 0.005, 8.0
# The requests that commit a transaction, by backend, and the share of them before which the role "own" pauses: all of
# the transaction is stored then, and if the other owner opens the id, the request has to fail.
_COMMITS, _COMMIT_PAUSE_SHARE = ("step:commit", "step:decide"), 0.3


class KillAt:
    """A plug-in that kills its own process at an event such as "commit/before", after `number` events have passed.

    A low `number` kills at the next event, while the bridge opens. Otherwise the event is mostly a random one of those
    at the end of transactions, such as the one between the broker's answer and the record of the commit, or the first
    event with a new name. Before the kill, the plug-in records it as a fault.
    """

    def __init__(self, number: int, client: Client) -> None:
        self._left, self._opens = number, number <= _LONGEST_OPENING
        self._client = client
        self._random = random.Random(client.random.random())  # of its own, because threads have events at any time
        self._aim = self._random.choice(_AIMS_OF_SPANS if client.process.startswith("span") else _AIMS)
        self._seen: Counter[str] = Counter()  # by name: the number of events within the end of a transaction
        self._target: str | None = None
        self._lock = threading.Lock()

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        name = f"{event.name}/{event.phase}"
        if event.name.startswith(("message.", "reader.poll")):  # most events: kills by the run hit them
            return
        with self._lock:
            self._left -= 1
            if self._left <= 0 and self._target is None:
                self._target = self._choose(name)
            is_due = name == self._target or (self._target == _NEW and name not in self._seen)
            self._seen[name] += _ends(event)
        if is_due:
            self._client.stop.wait(0.05)  # another thread may get an answer meanwhile, which then has to hold
            self._client.recorder.fault(f"kill at {name}", self._client.process, "begin")
            os.kill(os.getpid(), signal.SIGKILL)

    def _choose(self, name: str) -> str | None:
        """Return the name of the event at which to kill the process, `_NEW`, or None to choose at a later event."""
        if self._opens:
            return name
        known = sorted(each for each, count in self._seen.items() if count)
        aimed = [each for each in known if each.startswith(self._aim)]
        if not aimed and self._left > -_LONGEST_WAIT:
            return None  # the events that come first in a transaction would be chosen mostly
        behind = [each for each in aimed if each.endswith("/after")]  # the broker has done something by then
        chosen = behind if behind and self._random.random() < _BEHIND_SHARE else aimed or known or [name]
        return self._random.choice(chosen) if self._random.random() < _AIMED_SHARE else _NEW


def _ends(event: Event) -> bool:
    """Return whether an event is part of a commit or prepare, of its acknowledgements, or of a publisher's storing."""
    is_step = event.name.startswith("step:") and event.name not in ("step:spill", "step:purge")
    return event.name == "step:store" or (event.transaction is not None and (is_step or event.name in _ENDS))


class PauseAt:
    """A plug-in that pauses the calling thread at random events until the run settles, and records each as a fault.

    Other processes then work between two steps of a call, which a pause from outside seldom achieves. Within the end of
    a transaction a group's member stops as a whole, at times for longer than the group waits for its heartbeats, and so
    does a process with transactions over several brokers. Events of single messages are left out, because there are
    many: the workloads themselves pause between messages.
    """

    def __init__(self, client: Client, role: str) -> None:
        self._client, self._plan = client, client.plan
        self._owns, self._stops = role == "own", role in ("copy", "process", "share", "serve", "span")
        self._random = random.Random(client.random.random())  # of its own, because threads have events at any time

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        is_commit = self._owns and event.name in _COMMITS and event.phase == "before"
        stops = self._stops and _ends(event)
        share = _COMMIT_PAUSE_SHARE if is_commit else _STOP_SHARE if stops else _PAUSE_SHARE
        if event.name != "message.send" and self._random.random() < share and not self._plan.closing.exists():
            fault = f"pause at {event.name}/{event.phase}", self._client.process
            self._client.recorder.fault(*fault, "begin")
            if stops:
                # A child continues this process with all its threads, even after the end of the run.
                command = f"sleep {self._random.uniform(0, _LONGEST_STOP):.1f}; kill -CONT {os.getpid()}"
                with subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                    os.kill(os.getpid(), signal.SIGSTOP)
            else:
                self._client.stop.wait(self._random.uniform(0, _LONGEST_PAUSE))
            self._client.recorder.fault(*fault, "end")


@dataclass
class Client:
    """Makes the calls of one process of a run on its bridges, and records each call in the process's history."""

    plan: Plan
    process: str
    recorder: Recorder
    random: random.Random
    stop: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _session: dict[str, str] = field(default_factory=dict)
    _bodies: Bodies = field(init=False)

    @contextmanager
    def bridge(self, **settings: Any) -> Iterator[Bridge]:
        """Open a bridge for the block, and record the opening.

        With a transactional id, later transactions are recorded with the id and with the name of this session.
        """
        wanted = {"timeout": self.plan.timeout, "hold": self.plan.hold, **self.plan.settings, **settings}
        owner = settings.get("transactional_id")
        self._session = {} if owner is None else {"owner": owner, "session": f"{self.process}/{next(self._numbers)}"}
        connect: Callable[..., Any] = txnbridge.connect
        if self.plan.raw:
            from txnbridge_conformance.run.raw.kafka import connect  # it needs Kafka's plain client
        with ExitStack() as opened:
            with self.recorded("open", deadline=wanted["timeout"], **self._session):
                bridge = opened.enter_context(connect(self.plan.url, **wanted))
            self._bodies = Bodies(self.random, bridge, self.plan.raw)
            yield bridge

    def at_second(self) -> Client:
        """Return a client like this one, in the same process and history, for the run's second broker."""
        return replace(self, plan=self.plan.at_second())

    @contextmanager
    def recorded(self, what: str, **fields: Any) -> Iterator[RecordedCall]:
        """Record the block as a call, which ends well, or, after an error of txnbridge, with an unknown result."""
        call = self.recorder.start(what, **fields)
        try:
            yield call
        except TxnBridgeError as error:
            call.end("unknown", error=type(error).__name__)
            raise
        call.end("ok")

    def values(self, count: int) -> list[str]:
        """Return new values for messages, each unique in the run."""
        return [f"{self.process}/{next(self._numbers)}" for _ in range(count)]

    def sends(self, *topics: str) -> dict[tuple[str, int], list[str]]:
        """Return new values for random partitions and keys of these topics, to be sent (see `send`)."""
        keys = [(topic, partition) for topic in topics for partition in range(-_KEYS * (not self.plan.raw), PARTITIONS)]
        chosen = self.random.sample(keys, self.random.randint(1, len(keys)))
        return {key: self.values(self.random.choice((1, 1, 2, 5, 20))) for key in chosen}

    def single(self, *topics: str) -> dict[tuple[str, int], list[str]]:
        """Return one new value to be sent, under a random one of these topics and a random partition of it."""
        return {(self.random.choice(topics), self.random.randrange(PARTITIONS)): self.values(1)}

    def start_transaction(self, **fields: Any) -> RecordedCall:
        """Record that a transaction begins, with the plan's deadline and the name of the bridge's session."""
        known = {"deadline": self.plan.timeout, "hold": self.plan.hold, **self._session}
        return self.recorder.start("transaction", **{**known, **fields})

    def transact(
        self,
        bridge: Bridge,
        sends: Sends,
        *,
        abort: bool = False,
        prepare: bool = False,
        ack: tuple[str, Sequence[Message]] | None = None,
        sharing: str = "",
        timeout: float | None = None,
        pause: float = 0.0,
        thread: int = 0,
    ) -> Transaction | None:
        """Run one transaction and record it. Return the transaction if it was committed or prepared, else None.

        `ack` is a group, and the messages to acknowledge for it; `sharing` tells how its members share partitions.
        The transaction pauses for `pause` seconds before one of its steps or before its end. `thread` is the number of
        the calling thread, if there are several.
        """
        # Some are aborted while the run goes on. A group's position waits for what its members prepare.
        hold = self.random.choice((5.0, self.plan.hold)) if prepare and ack is None else self.plan.hold
        more = {"deadline": timeout, "hold": hold, "thread": thread, "prepare": prepare, "sharing": sharing}
        call = self.start_transaction(**{name: value for name, value in more.items() if value})
        if ack is not None:
            call.poll([read_of(message) for message in ack[1]], ack[0])
        steps: list[Callable[[Transaction], None]] = [
            functools.partial(self.send, call=call, sends={key: values}) for key, values in sends.items()
        ]
        if ack is not None:
            steps.insert(self.random.randint(0, len(steps)), functools.partial(self._ack, call=call, ack=ack))
        pause_at = self.random.randint(0, len(steps))
        try:
            with bridge.transaction(prepare=prepare, timeout=timeout, hold=hold if prepare else None) as txn:
                call.note(transaction=txn.id, begun=time.monotonic_ns())
                for number, step in enumerate(steps):
                    self.stop.wait(pause if number == pause_at else 0)
                    step(txn)
                self.stop.wait(pause if pause_at == len(steps) else 0)
                if abort:
                    raise Abort
                call.note(ending=time.monotonic_ns())
        except OutcomeUnknown as error:
            call.end("unknown", error="OutcomeUnknown", token=error.token and str(error.token))
        except TxnBridgeError as error:
            call.end("fail", error=type(error).__name__)
        else:
            if not abort:
                told = {"outcome": "prepared", "token": str(txn.token)} if prepare else {"outcome": "committed"}
                call.end("ok", **told)
                return txn
            call.end("fail", error="Abort")
        return None

    def span(self, parts: Sequence[tuple[Client, Bridge, str]]) -> None:
        """Run a transaction over several brokers, chosen at random, and record it.

        `parts` are the client, the bridge and the topic of each broker.
        """
        timeout, hold = self.random.choice(_SPAN_TIMEOUTS), self.random.choice(_SPAN_HOLDS)
        failure: Exception | None = self.random.choices((None, Abort(), RuntimeError("the work failed")), (7, 1, 1))[0]
        pause = self.random.uniform(0, 1.2 * timeout) if self.random.random() < _SPAN_PAUSE_SHARE else 0.0
        steps = [
            (each, bridge, {key: sent}) for each, bridge, topic in parts for key, sent in each.sends(topic).items()
        ]
        self.random.shuffle(steps)
        # Its end is a call to each broker in turn, with the deadline of a bridge's calls.
        call = self.start_transaction(span=True, deadline=timeout + self.plan.timeout)
        try:
            with txnbridge.spanning(*(bridge for _, bridge, _ in parts), timeout=timeout, hold=hold) as span:
                call.note(begun=time.monotonic_ns())
                for client, bridge, sends in steps:
                    client.send(span.on(bridge), call, sends)
                self.stop.wait(pause)
                if failure:
                    raise failure
                call.note(ending=time.monotonic_ns())
        except OutcomeUnknown:
            call.end("unknown", error="OutcomeUnknown")
        except (TxnBridgeError, RuntimeError) as error:
            call.end("fail", error=type(error).__name__)
        else:
            call.end("fail" if failure else "ok", outcome="aborted" if failure else "committed")

    def send(self, to: Any, call: RecordedCall, sends: Sends) -> None:
        """Record values, and send each by `to.send`, with a body of a random kind; by a key for a partition below 0."""
        for (topic, partition), values in sends.items():
            call.send(topic, partition, values)
            for value in values:
                body, options = self._bodies.make(value, b"key%d" % partition if partition < 0 else None)
                to.send(topic, body, partition=None if partition < 0 else partition, **options)

    def _ack(self, txn: Transaction, call: RecordedCall, ack: tuple[str, Sequence[Message]]) -> None:
        group, messages = ack
        call.ack(group, [text_of(message) for message in messages])
        txn.ack(messages)

    def publish_token(self, txn: Transaction | None) -> None:
        """Append the token of a transaction, if it has one, to the file `Plan.tokens`, for the role "finish"."""
        if txn is not None and txn.token is not None:
            with open(self.plan.tokens, "ab", buffering=0) as file:
                file.write(f"{txn.id} {txn.token}\n".encode())

    def sell(self, halves: HalfMessages, timeout: float, sends: Sends) -> None:
        """Store the half messages of one transaction, do their local work, and record both."""
        call = self.recorder.start("half", deadline=timeout + LONGEST_SALE)
        try:
            with halves.transaction(call, timeout=timeout) as txn:
                self.send(txn, call, sends)
        except TransactionAborted as error:
            call.end("fail", error=type(error).__name__)
        except (TxnBridgeError, RuntimeError) as error:  # a check-back decides
            call.end("unknown", error=type(error).__name__)
        else:
            outcome = txn.outcome or Outcome.UNKNOWN
            call.end(_RESULTS[outcome], outcome=outcome.name.lower())

    def note_check(self, transaction: str, messages: Iterable[Message]) -> None:
        """Record a check-back: the messages that the broker showed of an undecided half-message transaction."""
        self.recorder.start("check", transaction=transaction, values=[text_of(each) for each in messages]).end("ok")

    def finish(self, bridge: Bridge, transaction: str, token: str, wish: str, **fields: float) -> bool:
        """Commit or abort a prepared transaction by its token, or ask for its status, and record the call.

        `wish` is "commit", "abort" or "status". Return whether the outcome is final, so that a second call for the same
        token cannot return another outcome.
        """
        what = "status" if wish == "status" else "finish"
        try:
            with self.recorded(what, transaction=transaction, wish=wish, **fields) as call:
                if wish == "status":
                    status = bridge.status(token)
                    outcome = status.state.name
                    final = status.permanent or outcome in ("COMMITTED", "ABORTED")
                else:
                    outcome, final = (bridge.commit if wish == "commit" else bridge.abort)(token).name, True
                call.note(outcome=outcome.lower(), final=final)
        except TxnBridgeError as error:
            return isinstance(error, EvidenceLost)
        return final


def read_of(message: Message) -> tuple[str, int, Sequence[int], str]:
    """Return the topic, partition, position and value of a received message, to record in a history."""
    return message.topic, message.partition, message.position, text_of(message)


class ProcessorRecording:
    """Records the transactions of one processor as a plug-in, by txnbridge's events, and by the processor's handler.

    Register it before the bridge of the processor is opened. The handler calls `handle` for each of its messages. The
    processor reads in `group`, and sends poison messages to the topic `dead_letters`.
    """

    def __init__(self, client: Client, group: str, dead_letters: str) -> None:
        self._client = client
        self._group = group
        self._dead_letters = dead_letters
        self._call: RecordedCall | None = None  # the open transaction
        self._polled: dict[object, Message] = {}  # messages since the last poll that the handler was called with
        self._poison: list[Message] = []  # those of `_polled` that are poison, in the same order
        self._dead = 0  # the number of dead letters in the open transaction

    def handle(self, message: Message, poison: bool) -> RecordedCall:
        """Note that the handler was called with a message; return the record of the open transaction's call."""
        # After a poison message the batch is processed again without it: the handler gets the others a second time.
        self._polled.setdefault(message[:3], message)
        if poison:
            self._poison.append(message)
        assert self._call is not None
        return self._call

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        match event.name, event.phase:
            case "reader.poll", "before":
                self._polled.clear()
                self._poison.clear()
            case "transaction.begin", "before":
                self._end("unknown")  # one whose end no event told
                self._call = self._client.start_transaction(transaction=event.transaction)
                self._dead = 0
            case ("transaction.begin", "after") | ("commit", "before") if self._call is not None:
                self._call.note(**{"ending" if event.name == "commit" else "begun": time.monotonic_ns()})
            case "message.send", "before" if event.data["topic"] == self._dead_letters:
                self._note_dead_letter(event)
            case "ack", "before":
                self._note_acknowledged(event)
            case "commit", "after":
                self._end("ok")
                del self._poison[: self._dead]
            case "commit", "failed":
                unknown = issubclass(getattr(errors, event.data["error"], errors.OutcomeUnknown), errors.OutcomeUnknown)
                self._end("unknown" if unknown else "fail", event.data["error"])
            case ("abort", "before") | ("transaction.begin", "failed"):
                self._end("fail")

    def _note_dead_letter(self, event: Event) -> None:
        assert self._call is not None and event.transaction is not None
        self._call.send(self._dead_letters, 0, [dead_value(sent_as(self._poison[self._dead]), event.transaction)])
        self._dead += 1

    def _note_acknowledged(self, event: Event) -> None:
        """Record that the open transaction acknowledges messages, and sends a dead letter for each that is poison."""
        assert self._call is not None
        messages = [self._polled.pop(key) for key in list(self._polled)[: event.data["messages"]]]
        while any(message in messages for message in self._poison[self._dead :]):
            self._note_dead_letter(event)
        self._call.poll([read_of(message) for message in messages], self._group)
        self._call.ack(self._group, [text_of(message) for message in messages])

    def _end(self, result: Result, error: str | None = None) -> None:
        if self._call is not None:
            self._call.end(result, error=error)
            self._call = None
