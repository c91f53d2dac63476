"""Retries with `keep_order`: messages of a key stay in their order, on the embedded broker."""

import random
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.core.processor_kit import WITHIN_A_TRANSACTION, Fresh, send, url_of, values
from tests.failing import fail_call, note_calls
from txnbridge import Batch, Bridge, Message, Processor, Transaction
from txnbridge._base.deadline import Deadline
from txnbridge._process.origin import origin_headers
from txnbridge._process.redrive import Redrive
from txnbridge._process.retries import DONE, KEPT, PREFIX, place_of, waiting_headers
from txnbridge._process.waiting_keys import WaitingKeys
from txnbridge._read.consumer import RawConsumer
from txnbridge.errors import DeadlineExceeded, InvalidOption, NotSupported, PositionLost
from txnbridge.testing import Child

KEYS = 6
DELAYS = [0.05, 0.2]


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Bridge]:
    with txnbridge.connect(url_of(tmp_path)) as opened:
        opened.ensure_topics("in", "out", "dead")
        yield opened


def feed(bridge: Bridge, *values: str) -> None:
    """Send messages whose key is the first letter of their value."""
    with bridge.transaction() as txn:
        for value in values:
            txn.send("in", value.encode(), key=value[:1].encode())


def in_order(bridge: Bridge, each: Any, **settings: Any) -> Processor:
    """A processor that keeps the order of each key."""
    settings = {"group": "g", "retry": DELAYS, "keep_order": True, **settings}
    return bridge.processor("in", each=each, **settings)


class FailingFirst:
    """Copies messages, but fails so many times for those values."""

    def __init__(self, **times: int) -> None:
        self.left = {value.encode(): count for value, count in times.items()}

    def __call__(self, message: Message, txn: Transaction) -> None:
        txn.send("out", message.value)
        if self.left.get(message.value, 0):
            self.left[message.value] -= 1
            raise ValueError("not now")

    def batch(self, batch: Batch, txn: Transaction) -> None:
        for message in batch:
            self(message, txn)


@pytest.mark.parametrize("settings", [{}, {"concurrency": 4}, {"max_messages": 1}, {"batch": True}])
def test_messages_of_a_key_wait_behind_one_that_waits_and_others_do_not(bridge, settings):
    handler = FailingFirst(a1=4 if "batch" in settings else 2, b2=1)  # a batch is halved until its culprit is known
    feed(bridge, "a1", "b1", "a2", "b2", "c1", "a3", "b3")
    called: Any = {"each": None, "batch": handler.batch} if settings.pop("batch", False) else {"each": handler}
    with in_order(bridge, **called, **settings):
        eventually(lambda: b"c1" in values(bridge, "out"), "c1 waits for nothing")
        feed(bridge, "a4", "c2")
        eventually(lambda: len(values(bridge, "out")) == 9, "all come out")
    found = [value.decode() for value in values(bridge, "out")]
    for key in "abc":
        ordered = [value for value in found if value[0] == key]
        assert ordered == sorted(ordered)
    assert found.index("c1") < found.index("a1")


def test_the_next_owner_of_a_partition_knows_what_waits(bridge):
    feed(bridge, "a1", "b1")
    in_order(bridge, FailingFirst(a1=1), retry=[1.0]).run(until_idle=True)
    assert values(bridge, "out") == [b"b1"]
    feed(bridge, "a2", "b2")
    with in_order(bridge, FailingFirst(), retry=[1.0]):
        eventually(lambda: len(values(bridge, "out")) == 4, "all come out")
    found = values(bridge, "out")
    assert found[0] == b"b1" and found.index(b"a1") < found.index(b"a2")


def test_behind_a_dead_letter_the_next_messages_of_its_key_go_on(bridge):
    feed(bridge, "a1", "a2")
    with in_order(bridge, FailingFirst(a1=9), dead_letter="dead") as running:
        eventually(lambda: values(bridge, "out"), "a2 comes out")
    assert (values(bridge, "dead"), values(bridge, "out")) == ([b"a1"], [b"a2"])
    assert running.stats.dead_letters == 1


def test_kept_order_is_for_retries(bridge):
    with pytest.raises(InvalidOption, match="for retry="):
        in_order(bridge, FailingFirst(), retry=None)


def test_a_database_cannot_keep_the_order(bridge):
    from txnbridge.sql import Outbox

    with pytest.raises(NotSupported, match="keep_order"):
        in_order(bridge, lambda *_: None, db="sqlite:///x.db", outbox=Outbox("o"))


def fail_now_and_then(message: Message, txn: Transaction) -> None:
    time.sleep(0.001)
    txn.send("out", message.value, key=message.key)
    if random.random() < 0.1:
        raise ValueError("not now")


def serve(url: str, until_idle: bool = False) -> None:
    with txnbridge.connect(url) as bridge:
        in_order(bridge, fail_now_and_then, dead_letter="dead", max_messages=20).run(until_idle)


def feed_numbers(url: str, count: int, partitions: int) -> None:
    with txnbridge.connect(url) as bridge:
        for topic in ("in", "g-retry-50ms", "g-retry-200ms", "out", "dead"):
            bridge.admin.create_topic(topic, partitions)
        for number in range(0, count, 50):
            with bridge.transaction() as txn:
                for each in range(number, min(count, number + 50)):
                    txn.send("in", b"%d" % each, key=b"%d" % (each % KEYS))


def check(url: str, count: int) -> None:
    with txnbridge.connect(url) as bridge:
        dead = values(bridge, "dead")
        found = bridge.read("out", limit=100_000)
    assert sorted([int(m.value) for m in found] + [int(value) for value in dead]) == list(range(count))
    by_key = defaultdict[bytes | None, list[int]](list)
    for message in found:
        by_key[message.key].append(int(message.value))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.full)])
def test_killed_at_random_while_others_take_over_the_order_of_each_key_is_kept(kills, tmp_path):
    url, count = url_of(tmp_path), kills * 50
    feed_numbers(url, count, partitions=3)
    running = [Child(serve, url), Child(serve, url)]
    for _ in range(kills):
        time.sleep(random.uniform(0.2, 0.8))
        running.pop(0).kill()
        running.append(Child(serve, url))
    with txnbridge.connect(url) as bridge:
        eventually(lambda: len(values(bridge, "out")) + len(values(bridge, "dead")) >= count, "all come out")
    for child in running:
        child.kill()
    check(url, count)


def fail_first(message: Message, txn: Transaction) -> None:
    txn.send("out", message.value, key=message.key)
    if int(message.value) % 4 == 1 and message.deliveries == 1:
        raise ValueError("not now")


def work(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        for _ in range(2):
            in_order(bridge, fail_first).run(until_idle=True)
            time.sleep(DELAYS[0])
        with in_order(bridge, fail_first):
            eventually(lambda: len(values(bridge, "out")) == 12, "all come out")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_at_any_event_and_run_again_the_order_of_each_key_is_kept(tmp_path, kill_walk):
    def feed_and_create(url: str) -> None:
        with txnbridge.connect(url) as bridge:
            bridge.ensure_topics("out", "dead")
        feed_numbers(url, 12, partitions=1)

    kill_walk(work, lambda url: check(url, 12), Fresh(tmp_path, feed_and_create), least=WITHIN_A_TRANSACTION)


def put(bridge: Bridge, topic: str, original: Message, number: int, delay: float) -> None:
    """Send a message to a retry topic, as another member does."""
    headers = [
        *origin_headers(PREFIX, original, "g", ValueError("not now"), 1, "of another member"),
        *waiting_headers(number, delay),
        (KEPT, b""),
    ]
    send(bridge, topic, original.value, key=original.key, headers=headers)


def test_a_message_waits_behind_one_that_another_member_has_sent_to_another_retry_topic(bridge):
    feed(bridge, "b1")
    with in_order(bridge, FailingFirst(b1=2)):
        eventually(lambda: values(bridge, "out") == [b"b1"], "b1 comes out of the last retry topic")
        [first] = bridge.read("in", 1)
        a2, a3 = (first._replace(position=(at, *first.position[1:]), value=b"a%d" % at, key=b"a") for at in (2, 3))
        put(bridge, "g-retry-50ms", a2, number=1, delay=1.0)
        put(bridge, "g-retry-200ms", a3, number=0, delay=0.0)
        eventually(lambda: len(values(bridge, "out")) == 3, "all come out")
    assert values(bridge, "out") == [b"b1", b"a2", b"a3"]


def test_a_new_member_sends_a_message_where_the_earlier_one_waits_now(bridge):
    feed(bridge, "a1")
    handler = FailingFirst(a1=2)
    with in_order(bridge, handler, retry=[0.05, 2.0]):
        eventually(lambda: not handler.left[b"a1"], "a1 has failed twice")
        eventually(lambda: b"a1" in values(bridge, "g-retry-2s"), "a1 waits")
    feed(bridge, "a2")
    with in_order(bridge, handler, retry=[0.05, 2.0]):
        eventually(lambda: len(values(bridge, "out")) == 2, "both come out")
    assert values(bridge, "out") == [b"a1", b"a2"]
    assert values(bridge, "g-retry-50ms").count(b"a2") == 0


@pytest.mark.parametrize("damage", [("due", b"9" * 400), ("position", b"[1e999]"), ("position", b"[" * 100_000)])
def test_damaged_headers_of_a_waiting_message_make_it_poison(bridge, damage):
    feed(bridge, "a1")
    [first] = bridge.read("in", 1)
    name, value = damage
    headers = dict([*origin_headers(PREFIX, first, "g", ValueError(), 1, "t"), *waiting_headers(1, 0), (KEPT, b"")])
    send(bridge, "g-retry-50ms", b"odd", key=b"a", headers={**headers, PREFIX + name: value})
    in_order(bridge, FailingFirst(), dead_letter="dead").run(until_idle=True)
    assert (values(bridge, "out"), values(bridge, "dead")) == ([b"a1"], [b"odd"])


def test_a_position_that_retention_has_removed_makes_it_read_again_and_not_stop(bridge, monkeypatch):
    at_once = lambda keys, timeout: timeout == 0.0  # noqa: E731
    lost = fail_call(monkeypatch, WaitingKeys, "read", PositionLost("retention"), when=at_once)
    feed(bridge, "a1", "a2", "b1")
    with in_order(bridge, FailingFirst(a1=1), max_messages=1):
        eventually(lambda: len(values(bridge, "out")) == 3, "all come out")
    assert lost and [value for value in values(bridge, "out") if value != b"b1"] == [b"a1", b"a2"]


def test_a_note_that_is_read_long_before_its_message_is_not_forgotten(bridge, monkeypatch):
    feed(bridge, "a1")
    [first] = bridge.read("in", 1)
    put(bridge, "g-retry-50ms", first, number=1, delay=0.0)
    send(bridge, "g-retry-200ms", b"", headers={DONE: place_of(first)})
    [entry], [note] = bridge.read("g-retry-50ms", 1), bridge.read("g-retry-200ms", 1)
    keys: Any = in_order(bridge, FailingFirst())._waiting_keys
    monkeypatch.setattr(keys, "read", lambda timeout: time.sleep(0.1))
    keys.take(note)
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            keys.read_all(Deadline(0.5))
    keys.take(entry)
    assert not keys.places
    keys.close()


def test_while_the_outcome_of_an_earlier_pass_is_unknown_each_pass_reads_the_retry_topics(bridge, monkeypatch):
    readings = note_calls(monkeypatch, WaitingKeys, "read_all")
    monkeypatch.setattr(RawConsumer, "in_doubt", True)
    feed(bridge, "a1", "a2", "a3")
    with in_order(bridge, FailingFirst(), max_messages=1):
        eventually(lambda: len(values(bridge, "out")) == 3, "all come out")
    assert len(readings) >= 3


def test_a_delay_that_is_taken_out_of_the_list_holds_no_key_back(bridge):
    feed(bridge, "a1")
    handler = FailingFirst(a1=2)
    with in_order(bridge, handler):
        eventually(lambda: values(bridge, "out") == [b"a1"], "a1 comes out of the last retry topic")
    feed(bridge, "a2")
    with in_order(bridge, handler, retry=DELAYS[:1]) as running:
        eventually(lambda: values(bridge, "out") == [b"a1", b"a2"], "a2 comes out")
    assert running.stats.delayed == 0


def comes_out(bridge: Bridge, value: str) -> bool:
    return value.encode() in values(bridge, "out")


def test_in_a_topic_that_was_made_anew_the_order_of_each_key_is_kept(bridge):
    """The retry topics have notes about messages of the topic before, which stood at the same places."""
    for first, second in ("a1", "a2"), ("a3", "a4"):
        feed(bridge, first, second)
        in_order(bridge, FailingFirst(**{first: 1}), retry=[0.3], max_messages=1).run(until_idle=True)
        with in_order(bridge, FailingFirst(), retry=[0.3], max_messages=1):
            eventually(partial(comes_out, bridge, second), "both come out")
        bridge.admin.delete_topic("in")
        bridge.ensure_topics("in")
    eventually(lambda: len(values(bridge, "out")) == 4, "all come out")
    assert values(bridge, "out") == [b"a1", b"a2", b"a3", b"a4"]


@pytest.mark.parametrize("restarts", [True, False])
def test_messages_wait_behind_a_redriven_dead_letter_that_fails_again(bridge, restarts):
    handler = FailingFirst(a1=3)
    feed(bridge, "a1")
    with ExitStack() as stack:
        running = stack.enter_context(in_order(bridge, handler, retry=[0.5], dead_letter="dead"))
        eventually(lambda: running.stats.dead_letters, "it has no attempt left")
        Redrive(bridge, "dead", group="g").run()
        eventually(lambda: running.stats.delayed == 2, "it waits again")
        if restarts:
            stack.close()
            stack.enter_context(in_order(bridge, handler, retry=[0.5], dead_letter="dead"))
        feed(bridge, "a2")
        eventually(lambda: len(values(bridge, "out")) == 2, "both come out")
    assert values(bridge, "out") == [b"a1", b"a2"]


def test_a_time_that_ends_right_before_the_marker_is_sent_does_not_stop_the_loop(bridge, monkeypatch):
    slow = [1.0]

    def make_slowly() -> uuid.UUID:
        time.sleep(slow.pop() if slow else 0)
        return uuid.UUID(int=random.getrandbits(128))

    monkeypatch.setattr(uuid, "uuid4", make_slowly)
    feed(bridge, "a1")
    with in_order(bridge, FailingFirst(), timeout=0.8):
        eventually(lambda: values(bridge, "out") == [b"a1"], "the next pass has enough time")
    assert not slow
