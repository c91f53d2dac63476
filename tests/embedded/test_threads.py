"""The threads of one process take turns to write."""

import threading
import time

import pytest

import txnbridge
from tests.inside import broker_of
from txnbridge.spi import Deadline


def test_a_commit_that_waits_for_other_threads_until_its_deadline_says_so(path):
    with txnbridge.connect(f"embedded:{path}") as bridge:
        with bridge.transaction() as txn:
            txn.send("orders", b"0")
        store = broker_of(bridge).store
        writes, may_end = threading.Event(), threading.Event()

        def write():
            connection = store.connect()
            with store.writing(connection, Deadline(60), "a long write"):
                writes.set()
                may_end.wait(60)
            connection.close()

        thread = threading.Thread(target=write)
        thread.start()
        assert writes.wait(60)
        with pytest.raises(txnbridge.TransactionTimedOut, match="other threads of this process"):
            with bridge.transaction(timeout=0.3) as txn:
                txn.send("orders", b"1")
        may_end.set()
        thread.join()
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

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while min(counts) < 20:
            assert time.monotonic() < deadline, counts
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
