"""Group commit on a live broker: each of many threads is told the true outcome of its transaction.

A test module imports the tests and brings `committing`: the broker, and its request that ends a transaction.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from txnbridge_conformance import faults
from txnbridge_conformance.observing import eventually, seen

import txnbridge
from txnbridge import Bridge, Outcome, TokenState, Transaction, TxnBridgeError
from txnbridge.testing import recorded

THREADS = 16

Done = list[tuple[bytes, Transaction]]  # the value that each transaction has sent


def work(bridge: Bridge, topics: list[str], goes_on: Callable[[], bool], thread: int) -> Done:
    """Send one message to each topic in transaction after transaction; return what was done."""
    done: Done = []
    while goes_on():
        value = b"%d/%d" % (thread, len(done))
        try:
            with bridge.transaction() as txn:
                done.append((value, txn))
                for topic in topics:
                    txn.send(topic, value)
        except TxnBridgeError:
            time.sleep(0.1)
    return done


def outcome(bridge: Bridge, txn: Transaction) -> Outcome:
    """Return the outcome, once the broker tells it if it is unknown."""
    if txn.outcome is not Outcome.UNKNOWN:
        assert txn.outcome is not None
        return txn.outcome
    token = str(txn.token)
    eventually(lambda: bridge.status(token).state is not TokenState.UNKNOWN, "the outcome is known")
    return Outcome(bridge.status(token).state.value)


def check(bridge: Bridge, topics: list[str], done: Done) -> None:
    committed = sorted(value for value, txn in done if outcome(bridge, txn) is Outcome.COMMITTED)
    assert len(committed) > 1
    for topic in topics:
        assert sorted(message.value for message in seen(bridge, topic)) == committed


def test_transactions_that_share_are_whole_while_the_broker_is_killed(committing, connect, bridge, new_topic):
    """The broker is killed twice under transactions of many threads of one bridge."""
    broker, topics = committing[0], [new_topic(), new_topic()]
    stop = threading.Event()
    with recorded() as events:
        through = connect(timeout=15)
        with ThreadPoolExecutor(THREADS) as pool:
            working = [
                pool.submit(work, through, topics, lambda: not stop.is_set(), thread) for thread in range(THREADS)
            ]
            try:
                for _ in range(2):
                    time.sleep(1.5)
                    broker.restart()
                time.sleep(2)
            finally:
                stop.set()
            check(bridge, topics, [each for thread in working for each in thread.result(60)])
    assert max([len(event.data["members"]) for event in events if event.name == "group.commit"]) > 1


def test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member(committing, bridge, topic):
    """The answers to all commits that a bridge requests for two seconds are lost."""
    broker, answer = committing
    with faults.proxy(broker) as proxy, txnbridge.connect(proxy.url, timeout=4, group_commit=True) as through:
        done = work(through, [topic], iter([True, True, False]).__next__, THREADS)
        hold = proxy.hold(answers=answer, count=None)
        until = time.monotonic() + 2
        with ThreadPoolExecutor(THREADS) as pool:
            threads = pool.map(
                lambda thread: work(through, [topic], lambda: time.monotonic() < until, thread), range(THREADS)
            )
            done += [each for thread in threads for each in thread]
        hold.drop()
        check(bridge, [topic], done)
