"""Closing and exiting while others are at it: nothing is closed under its user, and nobody waits long for a lock."""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from functools import partial

import pytest
from txnbridge_conformance.observing import eventually
from txnbridge_embedded.client.store import Store

import txnbridge
from tests.core.decisions_kit import MemoryLog
from tests.embedded.test_store import hold
from tests.failing import EACH, fail_call
from tests.in_time import Hold, wait_until
from tests.inside import logs_of
from txnbridge import AccessDenied, BrokerUnavailable, DeadlineExceeded, InvalidState, _bridge
from txnbridge._bridge import open_bridges
from txnbridge.spi import Deadline
from txnbridge.testing import Child, recorded

# What the programs have in common: threads that commit until they are told that the bridge is closed.
COMMITTING = """
import gc, sys, threading, time, txnbridge

started = threading.Semaphore(0)
wrong = []

def commit_on_and_on(bridge):
    count = 0
    while True:
        with bridge.transaction() as txn:
            txn.send("orders", b"x" * 100)
            txn.send("audit", b"x")
        count += 1
        if count == 3:
            started.release()

def commit_until_closed(bridge):
    try:
        commit_on_and_on(bridge)
    except (txnbridge.InvalidState, txnbridge.TransactionAborted) as error:
        if "closed" not in str(error):
            wrong.append(error)
    except BaseException as error:
        wrong.append(error)

def start(work, **how):
    bridge = txnbridge.connect(sys.argv[1], writers=8)
    threads = [threading.Thread(target=work, args=(bridge,), **how) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    return bridge, threads
"""
CLOSE_MEANWHILE = """
for _ in range(10):
    bridge, threads = start(commit_until_closed)
    bridge.close()
    for thread in threads:
        thread.join()
sys.exit(repr(wrong) if wrong else 0)
"""
EXIT_MEANWHILE = "bridge, _ = start(commit_on_and_on, daemon=True)"


def run(program: str, url: str) -> None:
    """A program that has to end well, without a word."""
    # A transaction that is ended by closing warns its program, which is no fault of this one.
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", COMMITTING + program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def whole(url: str) -> bool:
    with txnbridge.connect(url) as bridge:
        sent = [len(bridge.read(topic, 1_000_000)) for topic in ("orders", "audit")]
    return sent[0] == sent[1] > 0


def test_closing_while_threads_commit_refuses_new_calls_and_waits_for_running_ones(path):
    run(CLOSE_MEANWHILE, f"embedded:{path}")
    assert whole(f"embedded:{path}")


def test_a_program_may_exit_while_its_daemon_threads_commit(path):
    for _ in range(6):
        run(EXIT_MEANWHILE, f"embedded:{path}")
    assert whole(f"embedded:{path}")


def test_closing_waits_for_a_poll_of_another_thread(path):
    with recorded() as events, txnbridge.connect(f"embedded:{path}") as bridge:
        consumer = bridge.consumer("orders", "shipping")
        found = []
        polling = threading.Thread(target=lambda: found.append(consumer.poll(timeout=0.5)))
        polling.start()
        wait_until(lambda: "reader.poll" in {event.name for event in [*events]})
    polling.join()
    assert [len(batch) for batch in found] == [0]
    with pytest.raises(txnbridge.InvalidState, match="closed"):
        consumer.poll()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux lists a process's descriptors")
def test_transactions_that_were_dropped_before_they_prepared_leave_no_descriptor_and_plain_ones_go_on(path):
    with txnbridge.connect(f"embedded:{path}") as bridge:

        def drop(count: int) -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                for _ in range(count):
                    bridge.transaction(prepare=True).send("orders", b"dropped")
                    gc.collect(0)  # it is young; all that a test process has takes half a second
            for number in range(8):  # more than there are writers
                with bridge.transaction() as txn:
                    txn.send("orders", b"%d" % number)
            return len(os.listdir("/proc/self/fd"))

        drop(5)  # what is opened once is open
        assert drop(1) == drop(30)
        assert len(bridge.read("orders", 1000)) == 24


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux lists a process's descriptors")
@pytest.mark.parametrize("what", ["writers", "a publisher"])
def test_a_store_that_cannot_be_opened_whole_leaves_no_descriptor(path, monkeypatch, no_threads, what):
    with txnbridge.connect(f"embedded:{path}") as bridge:

        def attempt(count: int) -> int:
            for _ in range(count):
                with pytest.raises((AccessDenied, RuntimeError)):
                    bridge.transaction() if what == "writers" else bridge.publisher()
            return len(os.listdir("/proc/self/fd"))

        if what == "writers":
            fail_call(monkeypatch, Store, "connect", AccessDenied("too many open files"), EACH[2::3])
        else:
            no_threads()
        assert attempt(2) == attempt(6)  # SQLite keeps a few for its next connection


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_leaving_a_group_and_closing_do_not_wait_for_a_file_that_another_process_sits_on(path, sharing):
    bridge = txnbridge.connect(f"embedded:{path}", timeout=120)
    with bridge.transaction() as txn:
        txn.send("orders", b"1")
    consumer = bridge.consumer("orders", "shipping", sharing=sharing)
    assert consumer.poll()
    with Child(hold, path, 100) as child:
        child.told()
        before = time.monotonic()
        with pytest.raises(txnbridge.DeadlineExceeded):
            consumer.close()
        bridge.close()
        assert time.monotonic() - before < 60  # and not all of the bridge's timeout


class Kept(MemoryLog):
    """The log of a broker that drops records by age, so that a thread stays with the log; `closed` counts."""

    keeps = 3600.0
    closed = 0

    def close(self):
        self.closed += 1


def test_a_log_that_is_opened_while_its_bridge_closes_is_closed_as_well(tmp_path, broken_broker):
    log = Kept()
    hold = Hold(lambda *_: log)
    bridge = txnbridge.connect(f"{broken_broker(decision_log=hold)}:{tmp_path}/broker.db")
    asks = partial(logs_of(bridge).own_ledger().newest_opening, Deadline(30))
    with pytest.raises(InvalidState, match="closed"), hold.asked_by(asks):
        logs_of(bridge).close()
    assert log.closed == 1
    bridge.close()


def test_no_thread_waits_beyond_its_deadline_while_another_thread_opens_a_log(tmp_path, broken_broker):
    hold, opened = Hold(lambda *_: Kept()), list[str]()

    def decision_log(broker, name, deadline):
        opened.append(name)
        return hold() if len(opened) > 1 else Kept()

    bridge = txnbridge.connect(f"{broken_broker(decision_log=decision_log)}:{tmp_path}/broker.db")
    ours = logs_of(bridge).own_ledger()
    ours.newest_opening(Deadline(30))
    with hold.asked_by(partial(logs_of(bridge).ledger("theirs", "x").newest_opening, Deadline(30))):
        ours.newest_opening(Deadline(5))
        with pytest.raises(DeadlineExceeded):
            logs_of(bridge).ledger("others", "x").newest_opening(Deadline(0.1))
    bridge.close()


def test_a_bridge_that_could_not_be_opened_leaves_no_log_behind_nor_what_keeps_it(tmp_path, broken_broker):
    log, before = Kept(), set(open_bridges())

    def find_it_busy(broker, identity, count, ledger, deadline):
        ledger.newest_opening(deadline)
        raise BrokerUnavailable("not now")

    url = f"{broken_broker(open_writers=find_it_busy)}:{tmp_path}/broker.db"
    logs = f"{broken_broker(decision_log=lambda *_: log)}:{tmp_path}/logs.db"
    with pytest.raises(BrokerUnavailable):
        txnbridge.connect(url, transactional_id="billing", decision_log=logs)
    assert log.closed == 1
    assert set(open_bridges()) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux lists a process's descriptors")
def test_a_bridge_that_is_dropped_without_close_warns_and_the_next_one_closes_it(path):
    def drop() -> int:
        with pytest.warns(ResourceWarning, match="was dropped without close"):
            bridge = txnbridge.connect(f"embedded:{path}")
            bridge.publisher().send("orders", b"1")
            bridge.consumer("orders", "g").poll(1, 0)
            del bridge
            deadline = Deadline(60)
            while not _bridge._dropped:  # a thread may just be closing what its consumer read
                deadline.check("waiting for the garbage collector to find it")
                gc.collect()
        txnbridge.connect(f"embedded:{path}").close()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    drop()
    most = drop()
    eventually(lambda: drop() <= most, "each leaves something open")
