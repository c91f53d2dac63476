"""`Client`: the recording client of one process of a run, and `KillAt`, by which a process kills itself."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import txnbridge
from txnbridge import Bridge, Consumer, Event, HalfMessages, Message, Outcome, TokenState, Transaction, hookimpl
from txnbridge.errors import Abort, EvidenceLost, OutcomeUnknown, TransactionAborted, TxnBridgeError
from txnbridge_conformance.history import RecordedCall, Recorder, Result
from txnbridge_conformance.run.plan import PARTITIONS, Plan

Sends = Mapping[tuple[str, int], Sequence[str]]  # values by topic and partition

_RESULTS: dict[Outcome, Result] = {Outcome.COMMITTED: "ok", Outcome.ABORTED: "fail", Outcome.UNKNOWN: "unknown"}

_FINAL = (TokenState.COMMITTED, TokenState.ABORTED)


class KillAt:
    """A plug-in that kills its process at the n-th event of txnbridge, not counting events named in `tried`.

    Before the kill, the plug-in records it as a fault. An event's name is for example "commit/before".
    """

    def __init__(self, number: int, tried: Collection[str], recorder: Recorder, process: str) -> None:
        self._left = number
        self._tried = tried
        self._recorder = recorder
        self._process = process
        self._lock = threading.Lock()

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        name = f"{event.name}/{event.phase}"
        if name in self._tried:
            return
        with self._lock:  # other threads' events wait while this one kills the process
            self._left -= 1
            if self._left == 0:
                self._recorder.fault(f"kill at {name}", self._process, "begin")
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Client:
    """Makes the calls of one process on its bridges, and records each call in the history of the process."""

    plan: Plan
    process: str
    recorder: Recorder
    random: random.Random
    stop: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _session: dict[str, str] = field(default_factory=dict)
    _assignments: dict[tuple[str, int], object] = field(default_factory=dict)  # by partition, of the last messages

    @contextmanager
    def bridge(self, **settings: Any) -> Iterator[Bridge]:
        """Open a bridge for the block, and record the opening.

        With a transactional id, later transactions are recorded with the id and with the name of this session.
        """
        wanted = {"timeout": self.plan.timeout, "hold": self.plan.hold, **self.plan.settings, **settings}
        owner = settings.get("transactional_id")
        self._session = {} if owner is None else {"owner": owner, "session": f"{self.process}/{next(self._numbers)}"}
        call = self.recorder.start("open", **self._session)
        with txnbridge.connect(self.plan.url, **wanted) as bridge:
            call.end("ok")
            yield bridge

    def values(self, count: int) -> list[str]:
        """Return new values for messages, each unique in the run."""
        return [f"{self.process}/{next(self._numbers)}" for _ in range(count)]

    def sends(self, *topics: str) -> dict[tuple[str, int], list[str]]:
        """Return new values to send, by topic and partition, for a random choice of partitions of these topics."""
        keys = [(topic, partition) for topic in topics for partition in range(PARTITIONS)]
        chosen = self.random.sample(keys, self.random.randint(1, len(keys)))
        return {key: self.values(self.random.choice((1, 1, 2, 5, 20))) for key in chosen}

    def transact(
        self,
        bridge: Bridge,
        sends: Sends,
        *,
        abort: bool = False,
        prepare: bool = False,
        ack: tuple[str, Sequence[Message]] | None = None,
        timeout: float | None = None,
        pause: float = 0.0,
    ) -> Transaction | None:
        """Run one transaction and record it. Return the transaction if it was committed or prepared, else None.

        The token of a prepared transaction is appended to the file `Plan.tokens`. `ack` is a group, and the messages to
        acknowledge for the group. The commit or prepare is requested `pause` seconds after the last message.
        """
        fields = {"deadline": timeout or self.plan.timeout, "hold": self.plan.hold, **self._session}
        call = self.recorder.start("transaction", **fields)
        if ack is not None:
            group, messages = ack
            self._note_assignments(call, messages)
            call.poll([read_of(message) for message in messages], group)
        try:
            with bridge.transaction(prepare=prepare, timeout=timeout) as txn:
                call.note(transaction=txn.id, begun=time.monotonic_ns())
                self._fill(txn, call, sends)
                if ack is not None:
                    call.ack(group, [text_of(message) for message in messages])
                    txn.ack(messages)
                if abort:
                    raise Abort
                self.stop.wait(pause)
                call.note(ending=time.monotonic_ns())
        except OutcomeUnknown as error:
            call.end("unknown", error="OutcomeUnknown", token=error.token and str(error.token))
        except TxnBridgeError as error:
            call.end("fail", error=type(error).__name__)
        else:
            if abort:
                call.end("fail", error="Abort")
            elif prepare:
                call.end("ok", outcome="prepared", token=str(txn.token))
                self._publish_token(str(txn.token), txn.id)
                return txn
            else:
                call.end("ok", outcome="committed")
                return txn
        return None

    def _note_assignments(self, call: RecordedCall, messages: Sequence[Message]) -> None:
        """Record the partitions of received messages as assigned anew if their assignment is a new one."""
        now = {(message.topic, message.partition): message.source for message in messages}
        if new := {key for key, source in now.items() if self._assignments.get(key) is not source}:
            call.assign(self._assignments.keys() - new)
            self._assignments |= now
            call.assign(self._assignments.keys())

    def _fill(self, txn: Transaction, call: RecordedCall, sends: Sends) -> None:
        for (topic, partition), values in sends.items():
            call.send(topic, partition, values)
            for value in values:
                txn.send(topic, value.encode(), partition=partition)

    def _publish_token(self, token: str, transaction: str) -> None:
        with open(self.plan.tokens, "ab", buffering=0) as file:
            file.write(f"{transaction} {token}\n".encode())

    def sell(self, halves: HalfMessages) -> None:
        """Store one set of half messages, do their local work, and record both."""
        call = self.recorder.start("half", deadline=self.plan.timeout)
        try:
            with halves.transaction(call) as txn:
                for (topic, partition), values in self.sends(self.plan.topic("sold")).items():
                    call.send(topic, partition, values)
                    for value in values:
                        txn.send(topic, value.encode(), partition=partition)
        except TransactionAborted as error:
            call.end("fail", error=type(error).__name__)
        except (TxnBridgeError, RuntimeError) as error:  # a check-back decides
            call.end("unknown", error=type(error).__name__)
        else:
            outcome = txn.outcome or Outcome.UNKNOWN
            call.end(_RESULTS[outcome], outcome=outcome.name.lower())

    def finish(self, bridge: Bridge, transaction: str, token: str, wish: str) -> bool:
        """Commit or abort a prepared transaction by its token, or ask for its status, and record the call.

        `wish` is "commit", "abort" or "status". Return whether the outcome is final, so that a second call for the same
        token cannot return another outcome.
        """
        call = self.recorder.start("status" if wish == "status" else "finish", transaction=transaction, wish=wish)
        try:
            if wish == "status":
                status = bridge.status(token)
                outcome, final = status.state.name, status.permanent or status.state in _FINAL
            else:
                outcome, final = (bridge.commit if wish == "commit" else bridge.abort)(token).name, True
        except TxnBridgeError as error:
            call.end("unknown", error=type(error).__name__)
            return isinstance(error, EvidenceLost)
        call.end("ok", outcome=outcome.lower())
        return final

    def note_assignment(self, call: RecordedCall, consumer: Consumer, known: list[object]) -> None:
        """Record the consumer's assigned partitions if they differ from `known`, and update `known`."""
        if (now := consumer.assignment) != known:
            known[:] = now
            call.assign(now)


def text_of(message: Message) -> str:
    """Return a message's value as text, the form in which a history stores values."""
    return bytes(message.value or b"").decode(errors="replace")


def read_of(message: Message) -> tuple[str, int, Sequence[int], str]:
    """Return the topic, partition, position and value of a received message, to record in a history."""
    return message.topic, message.partition, message.position, text_of(message)
