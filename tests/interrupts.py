"""Exceptions from signal handlers, such as Ctrl-C in a notebook, which may come into any call at any point.

Here one comes at the entry of one function of txnbridge, or behind one call that such a function makes: Python runs
signal handlers there. The program catches it, and opens another transaction, or another consumer.
"""

import dis
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import txnbridge
from txnbridge import Bridge, InvalidState, Message

_SECONDS = 12  # of polls that are interrupted


class Interrupted(BaseException):
    """Raised by the signal handler."""


def interrupted_everywhere(
    act: Callable[[], Any], recover: Callable[[], Any], behind_calls_in: Sequence[str] | None = None, every: int = 1
) -> int:
    """Run `act`, interrupted at its first function entry, and `recover`; then at the second, to the last; how many.

    With `behind_calls_in` it is interrupted behind each call in these files instead, with () in all files. `every` is
    the distance of the points, of which the first is another one in each run.
    """
    number = random.randint(1, every)
    count = 0
    while where := interrupted_at(act, number, behind_calls_in):
        number, count = number + every, count + 1
        try:
            recover()
        except BaseException as error:
            raise AssertionError(f"wrong after an interrupt at {where}") from error
    return count


def interrupted_at(act: Callable[[], Any], number: int, behind_calls_in: Sequence[str] | None = None) -> str:
    """Run it, interrupted at one such point; where that is, or nothing if there are not so many."""
    left = number
    where = ""

    def count(frame: FrameType) -> None:
        nonlocal left, where
        left -= 1
        if not left:
            sys.settrace(None)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise Interrupted(where)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if "txnbridge" not in name or _is_finalizing(frame):
            return None
        if behind_calls_in is None:
            return count(frame)
        if behind_calls_in and not name.endswith(tuple(behind_calls_in)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last = ""  # the name of the instruction before the next one

        def trace_instructions(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal last
            before, last = last, dis.opname[frame.f_code.co_code[frame.f_lasti]] if event == "opcode" else ""
            if before.startswith("CALL") and left > 0:
                count(frame)
            return trace_instructions

        return trace_instructions

    sys.settrace(trace)
    try:
        act()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
    return where


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether this is called by the garbage collector, where Python itself swallows whatever is raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class Reading:
    """Reads a topic of two partitions, into which more messages come before each step."""

    def __init__(self, bridge: Bridge, topic: str, sharing: str) -> None:
        bridge.ensure_topics(topic)
        self.bridge = bridge
        self.topic = topic
        self.sharing = sharing
        self.consumer = bridge.consumer(topic, "readers", sharing=sharing)
        self.sent = 0
        self.seen: list[int] = []
        self.polled: Sequence[Message] = ()

    def feed(self) -> None:
        with self.bridge.transaction() as txn:
            for _ in range(6):
                txn.send(self.topic, b"%d" % self.sent, partition=self.sent % 2)
                self.sent += 1

    def poll(self, count: int, timeout: float) -> None:
        self.polled = ()
        self.polled = self.consumer.poll(count, timeout)

    def take(self) -> None:
        if self.polled:
            with self.bridge.transaction() as txn:
                txn.ack(self.polled)
        self.seen += [int(message.value or b"") for message in self.polled]

    def read_all(self, where: str = "no point") -> None:
        self.take()
        try:
            self.consumer.positions()
        except InvalidState:  # the interrupted consumer is closed
            self.consumer = self.bridge.consumer(self.topic, "readers", sharing=self.sharing)
        until = time.monotonic() + 60
        while len(self.seen) < self.sent:
            missing = self.sent - len(self.seen)
            assert time.monotonic() < until, f"{missing} messages are missing after an interrupt at {where}"
            self.poll(4, 0.1)
            self.take()
        for partition in (0, 1):
            found = [number for number in self.seen if number % 2 == partition]
            assert self.sharing == "partition" or found.sort() is None
            assert found == list(range(partition, self.sent, 2)), f"wrong after an interrupt at {where}"


def check_that_interrupted_polls_lose_nothing(url: str, sharing: str = "partition") -> None:
    """Interrupt `poll` at the first function entry, the second, and ever further apart; in between, read everything."""
    with txnbridge.connect(url, create_topics=2, timeout=60) as bridge:
        reading = Reading(bridge, f"interrupted-{uuid.uuid4().hex[:8]}", sharing)
        reading.feed()
        reading.read_all()
        until, number, interrupts = time.monotonic() + _SECONDS, 1, 0
        while time.monotonic() < until:
            reading.feed()
            where = interrupted_at(lambda: reading.poll(3, 10), number)
            interrupts += bool(where)
            reading.read_all(where)
            number = number + 1 + number // 8 if where else 1
        assert interrupts > 8
        reading.consumer.close()


def test_the_messages_of_an_interrupted_poll_come_to_the_next_consumer(txnbridge_url: str) -> None:
    """A room of tests imports this test for its broker."""
    check_that_interrupted_polls_lose_nothing(txnbridge_url)
