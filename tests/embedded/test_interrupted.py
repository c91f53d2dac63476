"""An exception from a signal handler, such as Ctrl-C in a notebook, may come into any call at any point.

Here it comes at the entry of each function in turn. The program catches it and opens another transaction, or another
consumer: nothing may be lost, skipped or doubled, and no writer or place in a queue may stay taken.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import txnbridge
from tests.failing import raising
from tests.interrupts import Interrupted, interrupted_at, interrupted_everywhere
from txnbridge import Batch, Bridge, InvalidState, OutcomeUnknown
from txnbridge._base.token import State

pytestmark = pytest.mark.filterwarnings("ignore:transaction .* was left unfinished:ResourceWarning")


@pytest.fixture
def bridge(path) -> Iterator[Bridge]:
    with txnbridge.connect(f"embedded:{path}", writers=1, timeout=60, create_topics=2) as bridge:
        yield bridge


class Work:
    """Copies messages from one topic to another; more of them come before each step."""

    def __init__(self, bridge: Bridge, sharing: str = "partition") -> None:
        bridge.ensure_topics("in", "out")
        self.bridge = bridge
        self.open = lambda: bridge.consumer("in", "copies", sharing=sharing)
        self.consumer = self.open()
        self.reader = bridge.consumer("out")
        self.found: dict[int, list[int]] = {0: [], 1: []}
        self.sent = 0
        self.batch: Batch | None = None  # with the program
        self.feed()

    def feed(self) -> None:
        with self.bridge.transaction() as txn:
            for _ in range(4):
                txn.send("in", b"%d" % self.sent, partition=self.sent % 2)
                self.sent += 1

    def step(self) -> int:
        self.batch = batch = self.consumer.poll(3, 0)
        if batch:
            with self.bridge.transaction() as txn:
                for message in batch:
                    txn.send("out", message.value, partition=message.partition)
                txn.ack(batch)
        return len(batch)

    def prepared_step(self) -> None:
        self.batch = batch = self.consumer.poll(3, 0)
        txn = self.bridge.transaction(prepare=True)
        try:
            with txn:
                txn.ack(batch)
                for message in batch:
                    txn.send("out", message.value, partition=message.partition)
            assert txn.token is not None
            self.bridge.commit(txn.token)
        except Interrupted:
            if txn.state is State.PREPARED and txn.token is not None:
                self.bridge.commit(txn.token)
            raise

    def recover(self) -> None:
        try:
            self.consumer.positions()
        except InvalidState:  # the call that was interrupted was one on the consumer
            self.consumer = self.open()
        for message in self.batch or ():
            with suppress(InvalidState):  # it is acknowledged already, or comes again anyway
                self.consumer.nack(message)
        # A poll that does not wait may be empty although messages are there: on a busy machine looks are far apart.
        empty, until = 0, time.monotonic() + 60
        while empty < 3 or (self.missing() and time.monotonic() < until):
            try:
                empty = 0 if self.step() else empty + 1
            except OutcomeUnknown:
                # A commit was interrupted. The next transaction reopens its writer, and then it is certain.
                self.bridge.transaction().abort()
        self.check()
        self.feed()

    def missing(self) -> int:
        while batch := self.reader.poll(1000, 0):
            for message in batch:
                self.found[message.partition].append(int(message.value or b""))
        return self.sent - sum(map(len, self.found.values()))

    def check(self) -> None:
        for partition, found in self.found.items():
            assert sorted(found) == list(range(partition, self.sent, 2))


@pytest.mark.parametrize(
    ("step", "sharing", "behind_calls_in", "every"),
    [
        (Work.step, "partition", None, 5),
        (Work.prepared_step, "message", None, 5),
        *(
            pytest.param(step, sharing, where, 1, marks=pytest.mark.full)
            for step in (Work.step, Work.prepared_step)
            for sharing in ("partition", "message")
            for where in (None, ("/_read/consumer.py", "/_read/deliveries.py", "/_write/transaction.py"))
        ),
    ],
)
def test_a_program_that_is_interrupted_anywhere_works_exactly_once(bridge, step, sharing, behind_calls_in, every):
    work = Work(bridge, sharing)
    assert interrupted_everywhere(lambda: step(work), work.recover, behind_calls_in, every) * every > 50
    work.recover()


def test_messages_of_an_interrupted_prepare_come_once_more_and_not_twice(bridge, monkeypatch):
    monkeypatch.setattr("txnbridge_embedded.read.base_reader._REFRESH_SECONDS", 60)
    work = Work(bridge)
    batch = work.consumer.poll(4)

    with monkeypatch.context() as patched, suppress(Interrupted), bridge.transaction(prepare=True) as txn:
        patched.setattr("txnbridge._write.token_operations.Outcomes.token_of", raising(Interrupted))
        txn.ack(batch)
    again = [*work.consumer.poll(4, 0), *work.consumer.poll(4, 0)]
    assert len(batch) == len(again) == 4


def test_a_consumer_whose_close_is_interrupted_anywhere_is_closed_by_the_next_one(bridge: Bridge) -> None:
    bridge.ensure_topics("in")
    consumer = bridge.consumer("in", "readers")

    def recover() -> None:
        nonlocal consumer
        consumer.close()
        consumer = bridge.consumer("in", "readers")
        assert len(consumer.assignment) == 2  # nobody else holds a part

    assert interrupted_everywhere(lambda: consumer.close(), recover) > 5


def test_writers_whose_opening_is_interrupted_anywhere_are_opened_by_the_next_thread(path) -> None:
    bridge = txnbridge.connect(f"embedded:{path}", timeout=60)

    def act() -> None:
        for prepare in (False, True):
            bridge.transaction(prepare=prepare).abort()

    def recover() -> None:
        nonlocal bridge
        with ThreadPoolExecutor(1) as other:
            other.submit(act).result(60)
        bridge.close()
        bridge = txnbridge.connect(f"embedded:{path}", timeout=60)

    files = "/_write/writers.py", "/_decisions/logs.py", "/engine.py", "/follower.py", "/shared_connection.py"
    assert interrupted_everywhere(act, recover, files) > 20
    bridge.close()


def test_closing_a_bridge_waits_for_no_call_that_was_interrupted(path, caplog):
    with txnbridge.connect(f"embedded:{path}", timeout=1, create_topics=1) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send("out", b"1")
        token, where = str(txn.token), ["/_base/connection.py"]
        assert interrupted_everywhere(lambda: bridge.status(token), lambda: None, where) > 3
    assert "calls of other threads" not in caplog.text


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux lists a process's descriptors")
def test_a_bridge_whose_close_was_interrupted_is_closed_by_the_next_close(path):
    points = 0
    while True:
        bridge = txnbridge.connect(f"embedded:{path}")
        where = interrupted_at(bridge.close, points + 1, ["txnbridge_embedded/broker.py", "shared_connection.py"])
        bridge.close()
        open_files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any(str(path) in name for name in open_files), where
        if not where:
            break
        points += 1
    assert points > 10
