"""The threads of one process take turns to write."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import txnbridge
from tests.in_time import Hold, wait_until
from tests.inside import broker_of
from txnbridge.spi import Deadline


def test_a_commit_that_waits_for_other_threads_until_its_deadline_says_so(path):
    with txnbridge.connect(f"embedded:{path}") as bridge:
        with bridge.transaction() as txn:
            txn.send("orders", b"0")
        store = broker_of(bridge).store
        hold = Hold()

        def write():
            with closing(store.connect()) as connection, store.writing(connection, Deadline(60), "a long write"):
                hold()

        with hold.asked_by(write), pytest.raises(txnbridge.TransactionTimedOut, match="other threads of this process"):
            with bridge.transaction(timeout=0.3) as txn:
                txn.send("orders", b"1")
        with bridge.transaction() as txn:
            txn.send("orders", b"2")
        assert [message.value for message in bridge.read("orders", 10)] == [b"0", b"2"]


def test_threads_that_commit_on_and_on_all_get_on(path):
    with txnbridge.connect(f"embedded:{path}", timeout=60) as bridge:
        stop = threading.Event()
        counts = [0] * 16

        def commit(number):
            while not stop.is_set():
                with bridge.transaction() as txn:
                    txn.send("orders", b"x")
                counts[number] += 1

        with ThreadPoolExecutor(16) as pool:
            commits = [pool.submit(commit, number) for number in range(16)]
            try:
                wait_until(lambda: min(counts) >= 20)
            finally:
                stop.set()
        assert [each.result() for each in commits] == [None] * 16
