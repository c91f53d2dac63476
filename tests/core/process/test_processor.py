"""The processor's own logic: which error means what, how poison is found, how it stops."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import txnbridge
from tests.core.processor_kit import send, thread_of, url_of
from tests.core.toy import ToyBackend, ToyBroker, ToyReader, ToyWriter
from tests.failing import on_call, raising
from tests.in_time import wait_until, within
from txnbridge import Batch, Message, Processor, Status, TokenState, Topic, Transaction, codecs, connect, errors, spi
from txnbridge._base.service_stop import Shutdown
from txnbridge._process.processor import ProcessorSettings
from txnbridge.testing import listening

P = ("t", 0)


class Committed:
    """The messages, dead letters and acknowledgements that one transaction committed."""

    def __init__(self, writer: MemoryWriter) -> None:
        self.id = writer.id
        self.sent = [(topic, value) for topic, value, *_ in writer.sent]
        self.full = list(writer.sent)
        self.acked = [position[0] for _, told in writer.acked for found in told.values() for position in found]


class MemoryWriter(ToyWriter):
    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker.acts)
        self.broker = broker
        self.raises = broker.raises

    def begin(self, begin: spi.Begin) -> None:
        super().begin(begin)
        self.id = begin.transaction
        self.sent, self.acked = [], []
        self.broker.begun += 1

    def store(self, deadline: spi.Deadline) -> None:
        if ("out", b"large") in Committed(self).sent:
            error = errors.DeliveryFailed("larger than max.message.bytes")
            error.permanent = True
            raise error

    def commit(self, deadline: spi.Deadline) -> None:
        super().commit(deadline)
        self.broker.committed.append(Committed(self))


class MemoryReader(ToyReader):
    raises: list[BaseException]
    unassigned_polls = 0

    def poll(self, max_messages: int, deadline: spi.Deadline) -> list[Message]:
        if self.raises:
            raise self.raises.pop(0)
        if self.unassigned_polls:
            self.unassigned_polls -= 1
            return []
        found = super().poll(max_messages, deadline)
        if not found:
            time.sleep(min(0.002, deadline.left()))
        return found

    def seek(self, positions: Mapping[spi.Partition, spi.Position]) -> None:
        super().seek({p: at for p, at in positions.items() if p in self.sources})


class MemoryBroker(ToyBroker):
    """Remembers what each transaction committed; hands `values` to its first reader."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend.capabilities)
        self.values: list[Any] = []
        self.raises: dict[str, list[BaseException]] = {}
        self.poll_raises: list[BaseException] = []
        self.unassigned_polls = 0
        self.begun = 0
        self.committed: list[Committed] = []

    def open_writers(self, identity: spi.Identity, count: int, *_: Any) -> list[spi.Writer]:
        return [MemoryWriter(self) for _ in range(count)]

    def reader(
        self, subscription: spi.Subscription, listener: spi.ReaderListener, deadline: spi.Deadline
    ) -> spi.Reader:
        if "missing" in subscription.topics:
            raise errors.NotFound("there is no topic 'missing'")
        reader = MemoryReader(subscription, listener, self.acts)
        reader.raises = self.poll_raises
        reader.unassigned_polls = self.unassigned_polls
        reader.feed(*self.values)
        self.readers.append(reader)
        return reader

    @property
    def sent(self) -> list[Any]:
        """The values that were committed to the topic `out`, in order."""
        return [value for committed in self.committed for topic, value in committed.sent if topic == "out"]

    @property
    def dead(self) -> list[Any]:
        return [value for committed in self.committed for topic, value in committed.sent if topic == "dead"]

    @property
    def acked(self) -> list[int]:
        return [position for committed in self.committed for position in committed.acked]


class MemoryBackend(ToyBackend):
    def open(self, *_: Any) -> spi.Broker:
        broker = MemoryBroker(self)
        self.brokers.append(broker)
        return broker


class Room:
    """A bridge to a broker with some messages in topic `t`, and what its processors waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: MemoryBackend) -> None:
        with txnbridge.plugins.registered(backend):
            self.bridge: txnbridge.Bridge = connect("toy:", timeout=2)
        broker = backend.brokers[-1]
        assert isinstance(broker, MemoryBroker)
        self.broker = broker
        self.waits: list[float] = []
        monkeypatch.setattr(Shutdown, "sleep", lambda stop, seconds: self.note_wait(seconds))

    def note_wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        assert len(self.waits) < 1000, "it tries again for ever"

    def feed(self, *values: Any) -> None:
        self.broker.values += values

    def processor(self, **settings: Any) -> Processor:
        return self.bridge.processor(settings.pop("inputs", "t"), group="g", **settings)

    def run(self, **settings: Any) -> Processor:
        processor = self.processor(**settings)
        processor.run(until_idle=True)
        return processor

    @property
    def reader(self) -> ToyReader:
        return self.broker.readers[-1]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    room = Room(monkeypatch, MemoryBackend())
    with room.bridge:
        yield room


def copy(message: Message, txn: Transaction) -> None:
    txn.send("out", message.value)


def copy_batch(batch: Batch, txn: Transaction) -> None:
    for message in batch:
        txn.send("out", message.value)


class Failing:
    """A handler that copies, and raises the errors it was given, one by one, when it meets a value."""

    def __init__(self, value: bytes, *failures: Exception) -> None:
        self.value = value
        self.errors = list(failures)
        self.seen: list[Any] = []

    def __call__(self, message: Message, txn: Transaction) -> None:
        self.seen.append(message.value)
        if message.value == self.value and self.errors:
            raise self.errors.pop(0)
        copy(message, txn)


def test_a_batch_is_no_larger_than_max_messages(room):
    room.feed(*(b"%d" % n for n in range(7)))
    seen: list[Any] = []
    room.run(batch=lambda batch, txn: seen.append(len(batch)), max_messages=3)
    assert seen == [3, 3, 1]


def test_a_batch_is_no_larger_than_what_may_be_unacknowledged(room, with_timing):
    with_timing(unacked_messages=3)
    room.feed(*(b"%d" % n for n in range(7)))
    room.run(each=copy, max_messages=500, max_wait=1)
    assert len(room.broker.sent) == 7


def test_a_batch_waits_max_wait_seconds_for_more(room):
    room.feed(b"0")
    seen: list[Any] = []
    processor = room.processor(batch=lambda batch, txn: seen.append(len(batch)), max_wait=30, max_messages=2)
    with processor:
        wait_until(lambda: bool(room.broker.readers) and not any(room.reader.lag(spi.Deadline(1)).values()))
        assert seen == []
        room.reader.feed(b"1")
        wait_until(lambda: bool(seen))
    assert seen == [2]


def test_a_batch_that_stays_small_is_processed_after_max_wait(room):
    room.feed(b"0")
    started = time.monotonic()
    room.run(batch=copy_batch, max_wait=0.2)
    assert room.broker.sent == [b"0"]
    assert time.monotonic() - started >= 0.2


def test_slow_messages_get_smaller_transactions_instead_of_a_missed_deadline(room):
    room.feed(*(b"%d" % n for n in range(4)))

    def slow(message: Message, txn: Transaction) -> None:
        time.sleep(0.3)
        copy(message, txn)

    room.run(each=slow, timeout=1.0)
    assert room.broker.sent == [b"0", b"1", b"2", b"3"]
    sizes = [len(committed.acked) for committed in room.broker.committed]
    assert sum(sizes) == 4 and max(sizes) <= 2, sizes  # on a busy machine smaller ones yet


def test_a_processor_of_slow_messages_polls_again_within_the_timeout_of_a_transaction(monkeypatch):
    handled: list[Any] = []
    handled_before: list[int] = []  # how many messages were handled before each poll

    def slow(message: Message, txn: Transaction) -> None:
        time.sleep(0.3)
        handled.append(message.value)
        copy(message, txn)

    def note(event: txnbridge.Event) -> None:
        if (event.name, event.phase) == ("reader.poll", "before"):
            handled_before.append(len(handled))

    with listening(note):
        slow_room = Room(monkeypatch, MemoryBackend())
    with slow_room.bridge:
        slow_room.feed(*(b"%d" % n for n in range(6)))
        slow_room.run(each=slow, timeout=0.5)
    assert slow_room.broker.sent == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert handled_before[0] == 0 and 0 < handled_before[1] < 6


def test_a_message_delivered_before_its_partition_left_is_not_processed(room):
    room.feed(b"0")
    seen: list[Any] = []
    note = lambda batch, txn: seen.extend(m.value for m in batch)  # noqa: E731
    with room.processor(inputs=["t", "u"], batch=note, max_wait=0.3, max_messages=2):
        wait_until(lambda: bool(room.broker.readers) and room.reader.next.get(P) == 1)
        room.reader.leaving.append(("lost", [P]))
        room.reader.feed(b"u", partition=("u", 0))
        wait_until(lambda: bool(seen))
    assert seen == [b"u"]


def test_a_processor_repeats_at_once_after_an_abort_and_backs_off_after_a_second_abort(room):
    room.feed(b"0", b"1")
    room.broker.raises["commit"] = [errors.TransactionAborted("once"), errors.TransactionAborted("a test says so")]
    processor = room.run(each=copy)
    assert room.broker.sent == [b"0", b"1"]
    assert room.waits[0] == 0.0 and 0 < room.waits[1] <= 0.2
    assert processor.stats == (2, 1, 0, 2, "TransactionAborted: a test says so", 0)
    room.feed(b"2", b"3")
    handler = Failing(b"3", errors.Abort())
    room.run(each=handler)
    assert handler.seen == [b"0", b"1", b"2", b"3"] * 2


@pytest.mark.parametrize("call", ["begin", "send", "ack", "commit"])
@pytest.mark.parametrize("error", [errors.Conflict, errors.BrokerUnavailable, errors.DeadlineExceeded])
def test_a_processor_backs_off_after_a_conflict_or_an_absent_broker_and_holds_its_place(room, call, error):
    room.feed(b"0", b"1")
    room.broker.raises[call] = [error("a test says so")]
    processor = room.run(each=copy, dead_letter="dead")
    assert room.broker.sent == [b"0", b"1"]
    assert room.broker.acked == [0, 1]
    assert len(room.waits) == 1
    assert 0 < room.waits[0] <= 0.1
    assert (processor.stats.retries, processor.stats.dead_letters) == (1, 0)


def test_a_processor_whose_polls_fail_backs_off(room):
    room.feed(b"0")
    room.broker.poll_raises += [errors.BrokerUnavailable("down"), errors.BrokerUnavailable("still down")]
    room.run(each=copy)
    assert room.broker.sent == [b"0"]
    assert len(room.waits) == 2


@pytest.mark.parametrize("call", ["begin", "send", "ack", "commit"])
@pytest.mark.parametrize("error", [errors.Fenced, errors.EvidenceLost])
def test_an_error_that_nobody_can_mend_stops_the_processor(room, call, error):
    room.feed(b"0")
    room.broker.raises[call] = [error("a test says so")]
    with pytest.raises(error):
        room.run(each=copy, dead_letter="dead", poison=Exception)
    assert room.broker.committed == []
    assert room.waits == []


@pytest.mark.parametrize(("state", "times"), [(TokenState.COMMITTED, 1), (TokenState.ABORTED, 2)])
def test_an_unknown_outcome_is_resolved_before_it_goes_on(room, state, times):
    room.feed(b"0", b"1")
    room.broker.raises["commit"] = [errors.OutcomeUnknown("no answer")]
    # More than the commit and the first poll ask for: each asks every 0.1 s, for 0.3 s.
    room.broker.answers["status"] = [Status(TokenState.UNKNOWN)] * 10 + [Status(state)]
    handler = Failing(b"")
    room.run(each=handler, max_messages=1, timeout=0.3)
    assert handler.seen == [b"0"] * times + [b"1"]
    assert room.broker.acked == ([1] if state is TokenState.COMMITTED else [0, 1])
    assert room.waits


@pytest.mark.parametrize(
    "error", [ValueError("bad"), errors.BrokerUnavailable("its own broker"), errors.NotFound("no such topic")]
)
def test_a_handler_that_fails_for_a_while_holds_its_place(room, error):
    room.feed(b"0", b"1", b"2")
    handler = Failing(b"1", *[error] * 4)
    processor = room.run(each=handler, dead_letter="dead", max_messages=1)
    assert handler.seen == [b"0"] + [b"1"] * 5 + [b"2"]
    assert room.broker.sent == [b"0", b"1", b"2"]
    assert room.broker.dead == []
    assert processor.stats.retries == 4


def test_waits_grow_to_their_bound_and_start_anew_after_a_success(room, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: high)  # jitter aside
    room.feed(b"0", b"1")
    failures = [ValueError()] * 5
    room.run(each=Failing(b"0", *failures), backoff=(0.5, 3), max_messages=1)
    assert room.waits == [0.5, 1, 2, 3, 3]
    room.waits.clear()
    room.broker.raises["commit"] = [errors.Conflict("one"), errors.Conflict("two")]
    room.run(each=Failing(b"1", ValueError()), backoff=(0.5, 3), max_messages=1)
    assert room.waits == [0.5, 1, 0.5]


def test_a_processor_stops_with_the_handlers_error_after_retry_for_seconds(room):
    room.feed(b"0")
    with pytest.raises(ValueError, match="bad"):
        room.run(each=Failing(b"0", *[ValueError("bad")] * 1000), retry_for=0)
    assert room.broker.committed == []


def test_a_processor_whose_broker_does_not_tell_the_lag_goes_on_as_long_as_it_commits(room):
    room.feed(b"0", b"1", b"2")
    room.broker.acts["lag"] = raising(errors.BrokerUnavailable("a test says so"))
    with pytest.raises(errors.BrokerUnavailable):
        room.run(each=copy, max_messages=1, retry_for=0)
    assert room.broker.sent == [b"0", b"1", b"2"] and not room.waits


@pytest.mark.parametrize(("call", "error"), [("poll", errors.PositionLost), ("ack", ZeroDivisionError)])
def test_a_lost_position_or_an_unexpected_error_outside_the_handler_stops_it(room, call, error):
    room.feed(b"0")
    raises = room.broker.poll_raises if call == "poll" else room.broker.raises.setdefault(call, [])
    raises.append(error("a test says so"))
    with pytest.raises(error):
        room.run(each=copy)


@pytest.mark.parametrize("goes_on_to_poison", [False, True])
def test_a_broker_error_that_the_handler_swallows_is_not_lost(room, goes_on_to_poison):
    room.feed(b"0")
    room.broker.raises["send"] = [errors.BrokerUnavailable("down")]

    def careless(message: Message, txn: Transaction) -> None:
        failed = bool(room.broker.raises["send"])
        with suppress(errors.BrokerUnavailable):
            copy(message, txn)
        if failed and goes_on_to_poison:
            raise errors.Poison("it could not be sent")

    processor = room.run(each=careless, dead_letter="dead")
    assert (room.broker.sent, room.broker.dead) == ([b"0"], [])
    assert processor.stats.retries == 1


@pytest.mark.parametrize(("end", "hides"), [("commit", False), ("abort", False), ("commit", True)])
def test_a_handler_that_ends_the_transaction_itself_is_refused_also_if_it_hides_that(room, end, hides):
    room.feed(b"0")

    def stubborn(message: Message, txn: Transaction) -> None:
        copy(message, txn)
        with suppress(*[errors.InvalidState] * hides):
            getattr(txn, end)()

    with pytest.raises(errors.InvalidState, match="the handler ended transaction"):
        room.run(each=stubborn)
    assert room.broker.committed == []


def test_poison_goes_to_the_dead_letters_in_the_transaction_of_its_batch(room):
    room.feed(b"0", b"1", b"2")
    processor = room.run(each=Failing(b"1", *[errors.Poison("no such customer")] * 2), dead_letter="dead")
    (committed,) = room.broker.committed
    assert committed.sent == [("out", b"0"), ("out", b"2"), ("dead", b"1")]
    assert committed.acked == [0, 1, 2]
    assert processor.stats == (3, 1, 1, 0, None, 0)
    assert room.waits == []


def test_all_poison_of_a_batch_is_found_with_one_abort(room):
    room.feed(*(b"%d" % n for n in range(9)))

    def odd(message: Message, txn: Transaction) -> None:
        if int(message.value) % 2:
            raise ValueError
        copy(message, txn)

    room.run(each=odd, dead_letter="dead", poison=ValueError)
    assert room.broker.sent == [b"0", b"2", b"4", b"6", b"8"]
    assert room.broker.dead == [b"1", b"3", b"5", b"7"]
    assert room.broker.begun == 2


def test_a_dead_letter_is_the_original_with_its_reason(room):
    room.feed(b"\xff\x00")
    reader = room.broker.reader
    headers = spi.Headers([("kind", b"new"), ("raw", b"\xff"), ("txnbridge-dead-reason", b"an older one")])

    def with_headers(*args: Any) -> spi.Reader:
        made: spi.Reader = reader(*args)
        poll = made.poll
        replaced: dict[str, Any] = {"headers": headers, "key": b"\xfe", "timestamp": 42}
        made.poll = lambda *args: [m._replace(**replaced) for m in poll(*args)]  # type: ignore[method-assign]
        return made

    room.broker.reader = with_headers
    handler = Failing(b"\xff\x00", OSError("down"), *[ValueError("bad\n  value")] * 2)
    room.run(each=handler, dead_letter=Topic("dead", codecs.json), poison=[ValueError])
    committed = room.broker.committed[0]
    ((topic, value, key, pairs, partition, timestamp),) = committed.full
    assert (topic, value, key, partition, timestamp) == ("dead", b"\xff\x00", b"\xfe", None, None)
    assert list(pairs) == [
        ("kind", b"new"),
        ("raw", b"\xff"),
        ("txnbridge-dead-reason", b"ValueError: bad value"),
        ("txnbridge-dead-topic", b"t"),
        ("txnbridge-dead-partition", b"0"),
        ("txnbridge-dead-position", b"[0]"),
        ("txnbridge-dead-timestamp", b"42"),
        ("txnbridge-dead-group", b"g"),
        ("txnbridge-dead-attempts", b"2"),
        ("txnbridge-dead-transaction", committed.id.encode()),
    ]


class Textless(ValueError):
    def __str__(self) -> str:
        raise AttributeError("it has lost its text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Textless(), b"Textless"),
        (ValueError("half \ud83d"), b"ValueError: half \\ud83d"),
        (errors.Poison(), b"Poison"),
        (ExceptionGroup("", [errors.Poison("no customer"), ValueError("late")]), b"no customer; ValueError: late"),
        (errors.InvalidOption(), b"InvalidOption"),  # a refused call may be poison if it is named
    ],
)
def test_a_reason_is_the_errors_class_and_text_and_what_is_no_valid_text_is_escaped(room, error, reason):
    room.feed(b"0")
    room.run(each=Failing(b"0", *[error] * 2), dead_letter="dead", poison=(ValueError, errors.UsageError))
    assert ("txnbridge-dead-reason", reason) in room.broker.committed[0].full[0][3]


class BatchHandler:
    """Copies a batch, unless there is poison in it, which it names or not."""

    def __init__(self, *poison: bytes, names: bool = False) -> None:
        self.poison = poison
        self.names = names
        self.seen: list[list[bytes]] = []

    def __call__(self, batch: Batch, txn: Transaction) -> None:
        self.seen.append([m.value for m in batch])
        for message in batch:
            if message.value in self.poison:
                raise errors.Poison("bad", message=message if self.names else None)
            copy(message, txn)


@pytest.mark.parametrize(
    ("poison", "parts"),
    [([5], [[0, 1, 2, 3], [4], [5], [6, 7]]), (range(8), [[number] for number in range(8)])],
    ids=["one", "all"],
)
def test_poison_in_a_batch_is_found_by_splitting_in_order(room, poison, parts):
    values = [b"%d" % n for n in range(8)]
    room.feed(*values)
    room.run(batch=BatchHandler(*[values[n] for n in poison]), dead_letter="dead")
    assert room.broker.dead == [values[n] for n in poison]
    assert room.broker.sent == [values[n] for n in range(8) if n not in poison]
    assert [committed.acked for committed in room.broker.committed] == parts


def test_poison_that_the_batch_handler_names_needs_no_splitting(room):
    room.feed(*(b"%d" % n for n in range(8)))
    handler = BatchHandler(b"5", b"6", names=True)
    room.run(batch=handler, dead_letter="dead")
    (committed,) = room.broker.committed
    assert committed.sent == [("out", b"%d" % n) for n in (0, 1, 2, 3, 4, 7)] + [("dead", b"5"), ("dead", b"6")]
    assert len(handler.seen) == 3


def test_a_failure_between_the_parts_of_a_split_batch_loses_and_doubles_nothing(room):
    room.feed(*(b"%d" % n for n in range(4)))
    room.broker.raises["commit"] = [
        errors.TransactionAborted("the first part"),
        errors.TransactionAborted("the first part again"),
    ]
    room.run(batch=BatchHandler(b"3"), dead_letter="dead")
    assert room.broker.acked == [0, 1, 2, 3]
    assert (room.broker.sent, room.broker.dead) == ([b"0", b"1", b"2"], [b"3"])


@pytest.mark.parametrize("settings", [{"each": copy}, {"batch": copy_batch}])
def test_a_message_that_cannot_be_decoded_is_set_aside_raw_and_the_rest_goes_on(room, settings):
    room.feed(b'"a"', b"{", b'"b"')
    topic = Topic("t", codecs.json)
    seen: list[Any] = []

    def note(item: Any, txn: Transaction) -> None:
        seen.extend(m.value for m in (item if isinstance(item, Batch) else [item]))

    room.run(inputs=topic, dead_letter="dead", **dict.fromkeys(settings, note))
    assert seen == ["a", "b"]
    assert room.broker.dead == [b"{"]
    assert room.broker.begun == len(room.broker.committed) == 1


def test_a_dead_letter_is_raw_also_when_it_could_be_decoded(room):
    room.feed(b'{"a": 1}')

    def refuse(message: Message, txn: Transaction) -> None:
        raise errors.Poison(f"{message.value['a']} is too little")

    room.run(inputs=Topic("t", codecs.json), each=refuse, dead_letter="dead")
    assert room.broker.dead == [b'{"a": 1}']


def test_a_registry_that_is_down_is_no_poison(room):
    room.feed(b"0")
    failures: list[Exception] = [ConnectionRefusedError("registry"), TimeoutError("registry")]

    class Registry:
        def encode(self, obj: Any, context: codecs.CodecContext) -> bytes:
            raise NotImplementedError

        def decode(self, data: bytes, context: codecs.CodecContext) -> Any:
            if failures:
                raise failures.pop(0)
            return data

    room.run(inputs=Topic("t", Registry()), each=copy, dead_letter="dead")
    assert (room.broker.sent, room.broker.dead) == ([b"0"], [])
    assert len(room.waits) == 2


@pytest.mark.parametrize("explicit", [True, False])
def test_a_broker_error_is_never_taken_for_poison(room, explicit):
    """The handler may raise another error: a good message must not become a dead letter because a broker was down."""
    room.feed(b"0")
    room.broker.raises["send"] = [errors.BrokerUnavailable("down")]
    elsewhere: list[Exception] = [errors.Conflict("of another bridge")]

    def convert(message: Message, txn: Transaction) -> None:
        try:
            copy(message, txn)
            if elsewhere:
                raise elsewhere.pop()
        except Exception as error:
            if explicit:
                raise errors.Poison("cannot be processed") from error
            raise ValueError("cannot be processed")  # noqa: B904

    room.run(each=convert, dead_letter="dead", poison=ValueError)
    assert (room.broker.sent, room.broker.dead) == ([b"0"], [])
    assert len(room.waits) == 2


def test_a_refused_output_is_poison_only_if_declared_by_name(room):
    """A wrong setting (no such topic, too small a limit) would empty the input into the dead letters otherwise."""
    room.feed(b"0")
    room.broker.raises["send"] = [errors.InvalidOption("too large")]
    room.run(each=copy, dead_letter="dead", poison=Exception)
    assert (room.broker.sent, room.broker.dead) == ([b"0"], [])
    room.broker.raises["send"] = [errors.InvalidOption("too large")]
    room.run(each=copy, dead_letter="dead", poison=(ValueError, errors.InvalidOption))
    assert (room.broker.sent, room.broker.dead) == ([b"0"], [b"0"])


def test_a_refused_output_of_many_is_poison_like_any_other(room):
    room.feed(b"0", b"bad", b"2", b"bad")
    values = Topic("out", codecs.json)

    def copy_many(message: Message, txn: Transaction) -> None:
        txn.send_many(values, [1, object() if message.value == b"bad" else 2])

    processor = room.run(each=copy_many, dead_letter="dead", poison=errors.InvalidOption)
    assert room.broker.dead == [b"bad", b"bad"]
    assert processor.stats.messages == 4


def not_two(batch: Batch, txn: Transaction) -> None:
    for message in batch:
        if message.value == 2:
            raise errors.Poison("no such customer", message=None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"each": Failing(b"2", *[errors.Poison("no such customer")] * 2)}, "no such customer"),
        ({"inputs": Topic("t", codecs.json), "batch": not_two}, "no such customer"),
        ({"inputs": Topic("t", codecs.json), "batch": lambda batch, txn: None}, "cannot be decoded"),
    ],
    ids=["each", "batch", "decoding"],
)
def test_a_processor_without_a_dead_letter_topic_stops_at_the_poison(room, settings, reason):
    room.feed(b"0", b"1", b"{" if reason == "cannot be decoded" else b"2", b"3")
    with pytest.raises(errors.Poison, match=rf"t\[0\] at \(2,\).*{reason}") as raised:
        room.run(**settings)
    assert room.broker.acked == [0, 1]
    assert raised.value.message.position == (2,)


@pytest.mark.parametrize(("max_messages", "left"), [(500, 0), (1, 4)])
def test_too_many_dead_letters_in_a_row_stop_a_processor_and_its_open_transaction_is_aborted(room, max_messages, left):
    room.feed(b"0", *[b"bad"] * 4)
    handler = Failing(b"bad", *[errors.Poison("bad")] * 100)
    with pytest.raises(errors.Poison, match="max_dead_letters_in_a_row"):
        room.run(each=handler, dead_letter="dead", max_dead_letters_in_a_row=3, max_messages=max_messages)
    assert room.broker.acked == list(range(left))
    assert len(room.broker.dead) == max(left - 1, 0)


def test_a_good_message_ends_the_row(room):
    room.feed(b"bad", b"bad", b"0", b"bad", b"bad")
    handler = Failing(b"bad", *[errors.Poison("bad")] * 100)
    room.run(each=handler, dead_letter="dead", max_dead_letters_in_a_row=2, max_messages=2)
    assert len(room.broker.dead) == 4


def test_a_dead_letter_that_cannot_be_sent_stops_it(room):
    room.feed(b"bad")
    room.broker.raises["send"] = [errors.NotFound("there is no topic 'dead'")]
    with pytest.raises(errors.NotFound):
        room.run(each=Failing(b"bad", *[errors.Poison("bad")] * 2), dead_letter="dead")
    assert room.broker.acked == []


def test_logs_and_errors_hold_no_data(room, caplog):
    caplog.set_level(logging.INFO)
    room.feed(b"secret", b"secret too")
    room.run(each=Failing(b"secret", *[ValueError("secret")] * 2), dead_letter="dead", poison=ValueError)
    processor = room.run(each=Failing(b"secret", KeyError("secret")))
    room.run(each=copy, inputs=Topic("t", codecs.json), dead_letter="dead")
    assert "KeyError at" in caplog.text
    assert "dead letter, ValueError" in caplog.text
    assert "secret" not in caplog.text + repr(processor) + str(processor.stats)


def test_an_error_of_the_handler_is_told_by_its_class_and_the_line_of_the_handler(room, caplog):
    room.feed(b"secret")

    def parse(message: Message, txn: Transaction) -> None:
        if not processor.stats.retries:
            json.loads(message.value)

    def spell(message: Message, txn: Transaction) -> None:
        if not processor.stats.retries:
            raise TypeError("secret")

    for handler, kind, line in ((parse, "JSONDecodeError", 2), (spell, "TypeError", 2)):
        caplog.clear()
        processor = room.processor(each=handler)
        processor.run(until_idle=True)
        assert f"{kind} at {__file__}:{handler.__code__.co_firstlineno + line}" in caplog.text
        assert "secret" not in caplog.text


def test_after_max_attempts_a_message_is_a_dead_letter(room):
    room.feed(b"0", b"bad", b"2")
    handler = Failing(b"bad", *[ValueError("x")] * 4)
    processor = room.run(each=handler, max_attempts=3, dead_letter="dead")
    # The first failure is behind another message, which is committed then; it does not count.
    assert handler.seen.count(b"bad") == 4
    assert (room.broker.sent, room.broker.dead) == ([b"0", b"2"], [b"bad"])
    assert (processor.stats.retries, processor.stats.messages) == (2, 3)
    assert not processor._policy._attempts


def test_a_processor_without_a_dead_letter_topic_stops_after_max_attempts(room):
    room.feed(b"bad", b"1")
    handler = Failing(b"bad", *[KeyError("x")] * 3)
    with pytest.raises(errors.Poison, match=r"3 attempts.* It holds its place in group 'g'"):
        room.run(each=handler, max_attempts=3)
    assert handler.seen == [b"bad"] * 3
    assert room.broker.acked == []


def test_messages_before_one_that_fails_are_committed_and_do_not_wait_for_it(room):
    room.feed(b"0", b"1", b"bad", b"3")
    handler = Failing(b"bad", *[KeyError("x")] * 5)
    with pytest.raises(KeyError):
        room.run(each=handler, retry_for=0.0)
    assert room.broker.sent == [b"0", b"1"]
    assert handler.seen == [b"0", b"1", b"bad", b"0", b"1", b"bad", b"bad"]


@pytest.mark.parametrize("settings", [{}, {"max_attempts": 5, "dead_letter": "dead"}])
def test_a_handler_that_fails_now_and_then_gets_on_and_sets_nothing_aside(room, settings):
    room.feed(*(b"%d" % number for number in range(200)))
    dice, calls = random.Random(1), 0

    def flaky(message: Message, txn: Transaction) -> None:
        nonlocal calls
        calls += 1
        if dice.random() < 0.1:
            raise ConnectionError
        copy(message, txn)

    room.run(each=flaky, **settings)
    assert room.broker.sent == [b"%d" % number for number in range(200)] and room.broker.dead == []
    assert calls < 1000  # twice or three times as many as messages


def test_a_handler_that_fails_now_and_then_does_not_make_the_waits_grow(room):
    room.feed(*(b"%d" % number for number in range(200)))
    failed: set[tuple[bytes, int]] = set()

    def fails_twice_at_each_tenth(message: Message, txn: Transaction) -> None:
        if message.value.endswith(b"9") and len(failed & {(message.value, 1), (message.value, 2)}) < 2:
            failed.add((message.value, 2 if (message.value, 1) in failed else 1))
            raise ConnectionError
        copy(message, txn)

    processor = room.run(each=fails_twice_at_each_tenth, backoff=(0.1, 30))
    assert room.broker.sent == [b"%d" % number for number in range(200)]
    assert processor.stats.retries > 0 and max(room.waits, default=0) <= 0.2


@pytest.mark.parametrize(
    ("failures", "dead"),
    [
        ([errors.NotFound("there is no topic 'out'")] * 5, []),
        ([errors.BrokerUnavailable("away")] * 5, []),
        ([errors.InvalidOption("too large")] * 2, [b"0"]),
    ],
)
def test_a_refused_message_is_an_attempt_and_a_missing_topic_or_an_absent_broker_is_none(room, failures, dead):
    room.feed(b"0", b"1")
    room.run(each=Failing(b"0", *failures), max_attempts=2, dead_letter="dead")
    assert (room.broker.sent, room.broker.dead) == ([b"0"] * (not dead) + [b"1"], dead)


@pytest.mark.parametrize("batch", [False, True])
def test_a_call_longer_than_the_transaction_is_a_failure_of_its_message(room, batch, monkeypatch):
    passed = 0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr("txnbridge._process.processor.time", clock)

    def slow(message: Message, txn: Transaction) -> None:
        nonlocal passed
        passed += 31 if message.value == b"slow" else 0
        copy(message, txn)

    def all_slow(messages: Batch, txn: Transaction) -> None:
        for message in messages:
            slow(message, txn)

    room.feed(b"0", b"slow", b"2")
    handler = {"batch": all_slow} if batch else {"each": slow}
    processor = room.run(**handler, timeout=30, max_attempts=2, dead_letter="dead")
    assert (room.broker.sent, room.broker.dead) == ([b"0", b"2"], [b"slow"])
    assert processor.stats.retries == 1
    [headers] = [headers for done in room.broker.committed for topic, _, _, headers, *_ in done.full if topic == "dead"]
    reason = dict(headers)["txnbridge-dead-reason"]
    assert reason.startswith(b"HandlerTooSlow: the handler took 31.") and reason.endswith(b"longer than timeout=30")


@pytest.mark.parametrize("handler", [{"each": copy}, {"batch": copy_batch}], ids=["each", "batch"])
def test_an_output_that_the_broker_refuses_late_is_a_failure_of_its_message(room, handler):
    room.feed(b"0", b"1", b"large", b"3")
    room.run(**handler, max_attempts=2, dead_letter="dead")
    assert (room.broker.sent, room.broker.dead) == ([b"0", b"1", b"3"], [b"large"])


@pytest.mark.parametrize("told_by", ["store", "send"])
@pytest.mark.parametrize("values", [(b"0", b"large", b"bad"), (b"bad", b"0", b"large")], ids=["before", "behind"])
def test_an_output_that_the_broker_refuses_late_is_found_beside_poison(room, values, told_by, monkeypatch):
    if told_by == "send":  # the next call tells of a message that was taken before
        on_call(monkeypatch, MemoryWriter, "send", lambda writer, *_: writer.store(spi.Deadline(1)))

    def handle(message: Message, txn: Transaction) -> None:
        if message.value == b"bad":
            raise errors.Poison("a test says so")
        copy(message, txn)

    room.feed(*values)
    room.run(each=handle, max_attempts=2, dead_letter="dead")
    assert room.broker.sent == [b"0"]
    assert room.broker.dead == [value for value in values if value != b"0"]


@pytest.mark.parametrize("settings", [{}, {"dead_letter": "dead", "poison": Exception, "max_attempts": 1}])
def test_a_fatal_error_of_the_handler_stops_it_at_once(room, settings):
    room.feed(b"0", b"bad")
    with pytest.raises(ZeroDivisionError):
        room.run(each=Failing(b"bad", ZeroDivisionError()), fatal=(ArithmeticError,), **settings)
    assert room.broker.committed == [] and room.waits == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"each": "copy"},
        {"each": copy, "batch": copy_batch},
        {"batch": copy_batch, "concurrency": 2},
        {"each": copy, "dead_letter": "t"},
        {"each": copy, "fatal": (KeyboardInterrupt,)},
        {"each": copy, "inputs": []},
        {"each": copy, "order": "some"},
        *({"each": copy, "poison": (wrong,)} for wrong in (errors.BrokerUnavailable, KeyboardInterrupt, "ValueError")),
        {"each": copy, "poison": 5},
        *({"each": copy, "max_attempts": wrong} for wrong in (0, 1.5, True)),
        *({"each": copy, "max_messages": wrong} for wrong in (0, "3")),
        *({"each": copy, "backoff": wrong} for wrong in ((0, 1), (2, 1), 3)),
        *({"each": copy, "concurrency": wrong} for wrong in (0, True)),
        *({"each": copy, name: 0} for name in ("timeout", "stop_timeout")),
        *({"each": copy, name: -1} for name in ("max_wait", "retry_for", "max_dead_letters_in_a_row")),
    ],
)
def test_settings_that_make_no_sense_are_refused(room, settings):
    with pytest.raises(errors.InvalidOption):
        room.processor(**settings)


async def copy_async(message: Message, txn: Transaction, more: object = None) -> None:
    copy(message, txn)


class Async:
    async def __call__(self, message: Message, txn: Transaction) -> None:
        copy(message, txn)


def copy_in_turns(batch: Batch, txn: Transaction) -> Iterator[None]:
    for message in batch:
        copy(message, txn)
        yield


@pytest.mark.parametrize(
    ("setting", "handler", "how"),
    [
        ("each", lambda m: None, r"called as f\("),
        ("each", lambda m, txn, more: None, r"called as f\("),
        ("each", lambda m, *, txn: None, r"called as f\("),
        ("batch", lambda: None, r"called as f\("),
        ("batch", Failing.__call__, r"called as f\("),
        ("each", copy_async, "a plain function"),
        ("each", functools.partial(copy_async, more=1), "a plain function"),
        ("each", Async(), "a plain function"),
        ("batch", Async().__call__, "a plain function"),
        ("batch", copy_in_turns, "a plain function"),
    ],
)
def test_a_handler_of_a_wrong_signature_or_an_async_one_is_refused_by_the_processor(room, setting, handler, how):
    with pytest.raises(errors.InvalidOption, match=f"{setting}= is {how}"):
        room.processor(**{setting: handler})


def test_a_handler_may_take_more_than_it_is_given_or_have_no_signature(room):
    room.processor(each=lambda m, txn, more=None: None)
    room.processor(each=lambda *given: None)
    room.processor(each=dict.update)


def test_the_processor_of_a_bridge_takes_what_a_processor_takes():
    own = inspect.signature(Processor).parameters.keys() - {"consumers", "begin", "inputs", "group", "each", "batch"}
    assert ProcessorSettings.__optional_keys__ == own


def test_a_processor_without_acknowledgements_in_transactions_is_refused(monkeypatch):
    room = Room(monkeypatch, MemoryBackend({txnbridge.Capability.ATOMIC_ACK: spi.absent("a test says so")}))
    with room.bridge, pytest.raises(errors.NotSupported, match="a test says so"):
        room.processor(each=copy)


def test_a_missing_topic_is_told_at_the_start(room):
    with pytest.raises(errors.NotFound):
        room.run(inputs="missing", each=copy)
    with pytest.raises(errors.NotFound), room.processor(inputs="missing", each=copy):
        pass


def test_until_idle_waits_for_its_partitions(room):
    room.feed(b"0")
    room.broker.unassigned_polls = 5
    room.run(each=copy)
    assert room.broker.sent == [b"0"]


def test_until_idle_ends_without_a_partition_after_longer_than_a_dead_member_holds_one(room, with_timing):
    with_timing(without_partition=0.2)
    room.feed(b"0")
    room.broker.unassigned_polls = 1_000_000
    room.run(each=copy)
    assert room.broker.committed == []


@pytest.mark.parametrize("unread", [0, 1])
def test_until_idle_a_member_without_a_partition_ends_when_the_group_has_nothing_left(tmp_path, unread):
    url = url_of(tmp_path)
    with connect(url) as first, connect(url) as second:
        send(first, "in", b"1")
        holder = first.consumer("in", "g")
        batch = holder.poll(timeout=20)
        processor = second.processor("in", group="g", each=copy)
        if not unread:
            with first.transaction() as txn:
                txn.ack(batch)
            processor.run(until_idle=True)
        else:
            # What the other member holds is not done, so this one waits; and a stop ends that.
            running = threading.Thread(target=processor.run, args=(True,))
            running.start()
            wait_until(lambda: processor.healthy)
            for _ in range(20):
                holder.poll(timeout=0.05)
            assert running.is_alive()
            processor.stop()
            running.join(60)
            assert not running.is_alive()
    assert processor.stats.messages == 0


def test_a_processor_tells_its_lag_its_health_and_its_counts(room):
    room.feed(b"0", b"1", b"2")
    seen: list[Any] = []

    def look(message: Message, txn: Transaction) -> None:
        seen.append((processor.healthy, processor.lag, processor.stats.messages))

    processor = room.processor(each=look, max_messages=1)
    assert (processor.healthy, processor.lag) == (False, None)
    processor.run(until_idle=True)
    assert seen[0] == (True, None, 0)
    assert seen[1] == (True, 2, 1)
    assert (processor.healthy, processor.lag, processor.stats.messages) == (False, 0, 3)


def test_a_processor_that_repeats_an_attempt_is_healthy_until_that_lasts_too_long(room, with_timing):
    room.feed(b"0", b"1")
    processor = room.processor(each=Failing(b"0", ValueError("x"), ValueError("x")), timeout=60)
    health = []

    def note_wait(seconds: float) -> None:
        health.append(processor.healthy)
        with_timing(pass_slack=-1e9)  # so it has failed for too long already

    room.note_wait = note_wait
    with processor:
        wait_until(lambda: len(health) == 2)
        with_timing(pass_slack=60.0)
        wait_until(lambda: processor.healthy and processor.stats.messages == 2)
    assert health == [True, False]
    assert processor.stats.last_error == "ValueError"


def test_a_processor_whose_attempts_all_fail_for_long_is_unhealthy_at_the_next_ones_too(tmp_path, with_timing):
    with_timing(pass_slack=0.0)
    health: list[bool] = []

    def fail(message: Message, txn: Transaction) -> None:
        health.append(processor.healthy)
        if health[-1]:
            raise ValueError

    with connect(url_of(tmp_path)) as bridge:
        send(bridge, "in", b"0")
        with bridge.processor("in", group="g", each=fail, timeout=1, backoff=(0.01, 0.02)) as processor:
            wait_until(lambda: False in health)
            wait_until(lambda: processor.healthy and processor.stats.messages == 1)


def test_a_processor_is_unhealthy_when_a_handler_hangs(room, with_timing):
    with_timing(pass_slack=0.0)
    room.feed(b"0")
    go_on = threading.Event()
    with room.processor(each=lambda message, txn: go_on.wait(20), timeout=0.2) as processor:
        wait_until(lambda: room.broker.begun == 1)
        wait_until(lambda: not processor.healthy)
        go_on.set()


@pytest.mark.parametrize("by_a_signal", [False, True])
def test_a_stop_in_a_handler_ends_the_processor_after_the_transaction(room, by_a_signal):
    room.feed(b"0", b"1", b"2")
    before = signal.getsignal(signal.SIGTERM)

    def stop(message: Message, txn: Transaction) -> None:
        os.kill(os.getpid(), signal.SIGTERM) if by_a_signal else processor.stop()
        copy(message, txn)

    processor = room.processor(each=stop)
    processor.run()
    assert (room.broker.sent, room.broker.acked) == ([b"0"], [0])
    assert "close" in room.reader.calls
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failure_while_it_stops_is_not_retried(room):
    room.feed(b"0")

    def stop_and_fail(message: Message, txn: Transaction) -> None:
        processor.stop()
        raise ValueError("bad")

    processor = room.processor(each=stop_and_fail)
    processor.run()
    assert room.broker.committed == []
    assert processor.stats.last_error == "ValueError"


def test_a_stop_before_the_start_counts_and_it_runs_once(room):
    room.feed(b"0")
    processor = room.processor(each=copy)
    processor.stop()
    processor.run()
    assert room.broker.begun == 0
    with pytest.raises(errors.InvalidState, match="runs once"):
        processor.run()


def test_a_stop_ends_the_wait_between_retries(room, monkeypatch):
    monkeypatch.undo()
    room.feed(b"0")
    processor = room.processor(each=Failing(b"0", *[ValueError("x")] * 100), backoff=(1000, 1000))
    with within(0), processor:
        wait_until(lambda: processor.stats.retries == 1)


@pytest.mark.parametrize("error", [errors.Fenced, ZeroDivisionError])
def test_the_end_of_its_block_raises_what_ended_the_loop_and_hides_no_error_of_the_block(room, caplog, error):
    room.feed(b"0")
    room.broker.raises["begin"] = [errors.Fenced("a newer owner")]
    with pytest.raises(error), room.processor(each=copy) as processor:
        wait_until(lambda: "close" in room.reader.calls)
        assert not processor.healthy
        if error is ZeroDivisionError:
            raise error
    assert error is errors.Fenced or "a newer owner" in caplog.text


class Slow:
    """A handler that takes until it is told to go on."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.go_on = threading.Event()
        self.after: list[Any] = []

    def __call__(self, message: Message, txn: Transaction) -> None:
        txn.send("out", b"before")
        self.called.set()
        assert self.go_on.wait(100)
        try:
            txn.send("out", b"after")
        except Exception as error:
            self.after.append(error)
            raise


def test_a_stop_lets_the_handler_finish_in_time(room):
    room.feed(b"0")
    slow = Slow()
    with room.processor(each=slow, stop_timeout=20):
        assert slow.called.wait(20)
        threading.Timer(0.2, slow.go_on.set).start()
    assert room.broker.sent == [b"before", b"after"]


def test_in_a_thread_a_handler_that_does_not_end_loses_its_transaction_at_the_deadline(room):
    room.feed(b"0")
    slow = Slow()
    processor = room.processor(each=slow, stop_timeout=0.5)
    with within(0.5), pytest.raises(errors.DeadlineExceeded, match=r"did not end within 0\.5 s"), processor:
        assert slow.called.wait(20)
    assert "close" in room.reader.calls  # its partitions are free already
    slow.go_on.set()
    wait_until(lambda: not thread_of(processor).is_alive())
    assert isinstance(slow.after[0], errors.InvalidState)
    assert room.broker.committed == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_aborts_at_once(room, number, code):
    room.feed(b"0")

    def ask_twice(message: Message, txn: Transaction) -> None:
        copy(message, txn)
        os.kill(os.getpid(), number)
        with suppress(Exception):
            os.kill(os.getpid(), number)
            time.sleep(30)

    with pytest.raises(SystemExit) as raised:
        room.processor(each=ask_twice).run()
    assert raised.value.code == code
    assert room.broker.committed == []
    assert "close" in room.reader.calls


@pytest.mark.parametrize("swallows", [False, True])
def test_on_the_main_thread_a_handler_that_does_not_end_is_interrupted_at_the_deadline(room, swallows):
    room.feed(b"0")

    def hang(message: Message, txn: Transaction) -> None:
        copy(message, txn)
        processor.stop()
        with suppress(*[BaseException] * swallows):
            time.sleep(100)

    processor = room.processor(each=hang, stop_timeout=0.5)
    with within(0.5), pytest.raises(errors.DeadlineExceeded, match=r"did not end within 0\.5 s"):
        processor.run()
    assert room.broker.committed == []
