"""Taking an id over from an owner that lives and works: what it says of each transaction is what can be seen of it."""

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest
from txnbridge_conformance.observing import seen, send, values
from txnbridge_conformance.plugin import Connect

from tests.kafka.kit import flush, requests_of, writer_of
from txnbridge import Bridge, Event, Fenced, Outcome, TransactionAborted, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge.testing import listening

# What an owner does between its two messages: a takeover meets it there, most of the time.
WORK = 0.08


@pytest.fixture
def halves(bridge: Bridge, unique) -> str:
    """A topic with two partitions: each transaction has a half in each."""
    name = str(unique("halves"))
    bridge.admin.create_topic(name, 2)
    return name


def work(bridge: Bridge, topic: str, name: str, told: dict[bytes, Outcome | None]) -> None:
    """Send one message to each partition in a transaction, again and again, until somebody else has the id."""
    for number in count():
        value = f"{name}/{number}".encode()
        try:
            txn = bridge.transaction()
        except Fenced:
            return
        with suppress(TxnBridgeError), txn:
            txn.send(topic, value, partition=0)
            flush(txn)
            time.sleep(WORK)
            txn.send(topic, value, partition=1)
        told[value] = txn.outcome


def take_over(connect: Connect, topic: str, owner: str, times: int) -> dict[bytes, Outcome | None]:
    """Let one owner after the other take the id from the working one; return each transaction's reported outcome."""
    told: dict[bytes, Outcome | None] = {}
    with ThreadPoolExecutor(times + 1) as pool:
        working: list[Future[None]] = []
        for number in range(times + 1):
            bridge = connect(transactional_id=owner, writers=1)
            working.append(pool.submit(work, bridge, topic, f"{number}", told))
            time.sleep(WORK * (1 + number % 8 / 8))  # so that each meets another moment of a transaction
        connect(transactional_id=owner, writers=1)
        for each in working:
            each.result(60)
    return told


def check(bridge: Bridge, topic: str, told: dict[bytes, Outcome | None]) -> None:
    found = Counter(values(seen(bridge, topic)))
    wrong = {value: (outcome, found[value]) for value, outcome in told.items() if (outcome, found[value]) not in TRUE}
    assert not wrong
    assert set(told.values()) == {Outcome.COMMITTED, Outcome.ABORTED}


# No connection drops here, so nothing is unknown.
TRUE = {(Outcome.COMMITTED, 2), (Outcome.ABORTED, 0)}


@pytest.mark.parametrize("times", [12, pytest.param(50, marks=pytest.mark.full)])
def test_the_outcomes_that_an_owner_reports_are_true_whenever_it_is_taken_over(connect, bridge, halves, owner, times):
    check(bridge, halves, take_over(connect, halves, owner, times))


def test_a_few_takeovers_leave_nothing_half_visible(connect: Connect, bridge: Bridge, halves: str, owner: str) -> None:
    check(bridge, halves, take_over(connect, halves, owner, 5))


def test_an_opener_that_slept_ends_no_half_of_a_newer_owner(connect: Connect, bridge: Bridge, halves: str, owner: str):
    """The opener costs the newer owner one transaction at most."""
    dead = connect(transactional_id=owner, writers=1)
    left = dead.transaction()
    left.send(halves, b"left open", partition=0)
    flush(left)
    sleeping, awake = threading.Event(), threading.Event()

    def sleep(event: Event) -> None:
        about_id = event.name in ("step:end", "step:fence", "step:open") and event.data["id"] == f"{owner}.0"
        if about_id and event.phase == "before" and not sleeping.is_set():
            sleeping.set()
            assert awake.wait(60)

    with ThreadPoolExecutor(1) as pool, listening(sleep):
        late = pool.submit(connect, transactional_id=owner, writers=1)
        assert sleeping.wait(60)
        newer = connect(transactional_id=owner, writers=1)
        with suppress(TransactionAborted), newer.transaction() as txn:
            txn.send(halves, b"newer", partition=0)
            flush(txn)
            awake.set()
            with pytest.raises(Fenced):
                late.result(60)
            txn.send(halves, b"newer", partition=1)
    check(bridge, halves, {b"newer": txn.outcome} | {b"left open": Outcome.ABORTED, b"again": again(newer, halves)})
    with pytest.raises(Fenced):
        left.commit()


def again(bridge: Bridge, topic: str) -> Outcome | None:
    with bridge.transaction() as txn:
        for partition in range(2):
            txn.send(topic, b"again", partition=partition)
    return txn.outcome


def test_an_administrators_abort_leaves_nothing_of_a_living_writer_half_visible(connect, bridge, halves, owner):
    own = connect(transactional_id=owner, writers=1)
    send(own, halves, b"before")
    with pytest.raises(TransactionAborted, match="an administrator ended the transaction; run it again"):
        with own.transaction() as txn:
            txn.send(halves, b"never", partition=0)
            flush(txn)
            assert bridge.admin.abort(writer_of(txn).id) is Outcome.ABORTED
            txn.send(halves, b"never", partition=1)
    assert txn.outcome is Outcome.ABORTED
    again(own, halves)
    assert sorted(m.value for m in seen(bridge, halves)) == [b"again", b"again", b"before"]


def test_a_commit_that_an_administrators_abort_came_too_late_for_is_told_to_both(connect, bridge, halves, owner):
    own = connect(transactional_id=owner, writers=1)
    requests = requests_of(bridge)
    describe = requests.describe
    with own.transaction() as txn:
        txn.send(halves, b"1")
        flush(txn)
        found = describe([f"{owner}.0"], Deadline(30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "describe", lambda *_: found)  # what it saw before the commit
        assert bridge.admin.abort(f"{owner}.0") is Outcome.COMMITTED
    assert txn.outcome is Outcome.COMMITTED
    again(own, halves)
    assert sorted(m.value for m in seen(bridge, halves)) == [b"1", b"again", b"again"]


def test_an_owner_that_slept_before_it_opened_an_id_aborts_nothing_that_a_newer_one_prepared(
    connect: Connect, bridge: Bridge, halves: str, owner: str
) -> None:
    tokens: list[str] = []

    def take_over(event: Event) -> None:
        if event.name == "step:open" and event.phase == "before" and ".p" in event.data["id"] and not tokens:
            tokens.append("")
            newer = connect(transactional_id=owner, writers=1)
            with newer.transaction(prepare=True) as txn:
                txn.send(halves, b"newer")
            tokens[0] = str(txn.token)

    with listening(take_over):
        older = connect(transactional_id=owner, writers=1)
        with pytest.raises(Fenced), older.transaction(prepare=True) as late:
            late.send(halves, b"never")
    assert bridge.commit(tokens[0]) is Outcome.COMMITTED
    assert values(seen(bridge, halves)) == [b"newer"]
