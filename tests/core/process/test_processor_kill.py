"""Processors that die, freeze, come and go, on the embedded broker: what they did happened once."""

import sqlite3
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

import txnbridge
from tests.core.processor_kit import WITHIN_A_TRANSACTION, Fresh, numbers, thread_of, url_of, values
from tests.in_time import within
from txnbridge import Batch, DeadlineExceeded, Message, Poison, Transaction
from txnbridge._process.processor import ProcessorStats
from txnbridge.testing import Child


def feed(url: str, values: list[bytes]) -> None:
    with txnbridge.connect(url) as bridge, bridge.transaction() as txn:
        txn.send_many("in", values)


def is_poison(value: bytes) -> bool:
    return int(value) % 7 == 1


def ship(message: Message, txn: Transaction) -> None:
    txn.send("out", message.value)
    if is_poison(message.value):
        raise Poison("a test says so")


def ship_all(batch: Batch, txn: Transaction) -> None:
    for message in batch:
        ship(message, txn)


def run(url: str, **settings: Any) -> ProcessorStats:
    with txnbridge.connect(url) as bridge:
        processor = bridge.processor("in", group="g", dead_letter="dead", max_messages=2, **settings)
        processor.run(until_idle=True)
    return processor.stats


def run_each(url: str) -> ProcessorStats:
    return run(url, each=ship)


def run_batch(url: str) -> ProcessorStats:
    return run(url, batch=ship_all)


def run_side_by_side(url: str) -> ProcessorStats:
    return run(url, each=ship, concurrency=4)


def check(url: str, fed: list[bytes]) -> None:
    """Each message has its one effect."""
    with txnbridge.connect(url) as bridge:
        assert Counter(values(bridge, "out")) == Counter(v for v in fed if not is_poison(v))
        assert Counter(values(bridge, "dead")) == Counter(v for v in fed if is_poison(v))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", [run_each, pytest.param(run_batch, marks=pytest.mark.full), run_side_by_side])
def test_killed_at_any_event_and_run_again_each_message_has_its_effect_once(program, tmp_path, kill_walk):
    fed = numbers(3)
    fresh = Fresh(tmp_path, lambda url: feed(url, fed))
    kill_walk(program, lambda url: check(url, fed), fresh, least=WITHIN_A_TRANSACTION)


@pytest.mark.parametrize("point", ["reader.poll/after", "message.send/after", "ack/after", "commit/before"])
def test_a_processor_that_was_frozen_and_replaced_commits_nothing_twice(point, tmp_path):
    url, fed = url_of(tmp_path, lease_seconds=3), numbers(10)  # the successor on a busy machine keeps its partitions
    feed(url, fed)
    with Child(run_each, url, pause=point) as frozen:
        frozen.stopped()
        with Child(run_each, url) as successor:
            assert successor.result().messages == len(fed)
        frozen.resume()
        stats = frozen.result()
    assert stats.messages == 0
    assert stats.retries == 1
    assert "Conflict" in stats.last_error
    check(url, fed)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_stop_keeps_its_deadline_also_when_the_broker_does_not_answer(tmp_path, in_a_thread):
    url = url_of(tmp_path)
    feed(url, numbers(1))
    blocker = sqlite3.connect(tmp_path / "broker.db", isolation_level=None, check_same_thread=False)
    blocked = threading.Event()

    def block(message: Message, txn: Transaction) -> None:
        blocker.execute("BEGIN IMMEDIATE")
        blocked.set()
        if not in_a_thread:
            processor.stop()

    with txnbridge.connect(url, timeout=100) as bridge:
        processor = bridge.processor("in", group="g", each=block, stop_timeout=1)
        with within(1):
            if in_a_thread:
                # Or the commit has ended by the deadline, and so has the loop.
                with suppress(DeadlineExceeded), processor:
                    assert blocked.wait(20)
                thread_of(processor).join(100)  # the broker is still blocked
            else:
                with pytest.raises(DeadlineExceeded):
                    processor.run()
        blocker.execute("ROLLBACK")
        blocker.close()
    assert processor.stats.messages == 0
