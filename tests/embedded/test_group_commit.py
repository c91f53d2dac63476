"""Group commit on the embedded broker: killed and interrupted anywhere, each transaction is there as a whole or not."""

import itertools
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import txnbridge
from tests.inside import group_commit_of, writers_of
from tests.interrupts import interrupted_everywhere
from txnbridge import Bridge, Outcome, TokenState, Transaction, errors
from txnbridge.testing import next_commit

pytestmark = pytest.mark.filterwarnings("ignore:transaction .* was left unfinished:ResourceWarning")

THREADS = 3


@pytest.fixture
def bridge(path, with_timing):
    with_timing(topic_taken=60)
    with txnbridge.connect(f"embedded:{path}", group_commit=True, timeout=60) as bridge:
        bridge.ensure_topics("left", "right")
        yield bridge


def send(bridge: Bridge, name: str) -> Transaction:
    with bridge.transaction() as txn:
        for topic in ("left", "right"):
            txn.send(topic, name.encode())
    return txn


def read(bridge: Bridge) -> tuple[Counter[bytes | None], Counter[bytes | None]]:
    left, right = (Counter(m.value for m in bridge.read(topic, 1000)) for topic in ("left", "right"))
    return left, right


def send_by_threads(url: str) -> None:
    with txnbridge.connect(url, group_commit=True, timeout=60) as bridge:
        bridge.ensure_topics("left", "right")
        send(bridge, "first")  # alone, so that the topics are known
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda _: send(bridge, os.urandom(8).hex()), range(THREADS)))


def check_whole(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        left, right = read(bridge)
    assert left == right
    assert THREADS <= sum(left.values()) - left[b"first"] <= 2 * THREADS


def test_a_kill_at_any_event_leaves_each_transaction_whole_or_not_at_all(tmp_path, kill_walk):
    urls = (f"embedded:{tmp_path}/{number}.db" for number in itertools.count())
    least = {"group.commit/before", "group.commit/after", "step:store/before", "step:store/after"}
    kill_walk(send_by_threads, check_whole, lambda: next(urls), least, at_once=2)


# Where a call of a transaction takes what other threads need, too.
SHARED = "/_write/group_commit.py", "/_write/transaction.py", "/_write/writers.py"
WHERE = pytest.mark.parametrize(
    "behind_calls_in",
    [None, SHARED, pytest.param((), marks=pytest.mark.full)],
    ids=["at entries", "behind calls", "behind all calls"],
)


@WHERE
def test_a_transaction_that_is_interrupted_anywhere_has_its_true_outcome(bridge, with_timing, behind_calls_in):
    with_timing(group_idle=0.0)  # each transaction starts the thread
    sent = 0
    last: Transaction | None = None

    def act() -> None:
        nonlocal sent, last
        sent, last = sent + 1, None
        with bridge.transaction() as txn:
            last = txn
            for topic in ("left", "right"):
                txn.send(topic, b"%d" % sent)

    def recover() -> None:
        if last is not None and last.outcome is None:  # the end of the block was interrupted before it began
            last.abort()
        outcome = None if last is None else last.outcome
        if outcome is Outcome.UNKNOWN:
            assert last is not None and last.token is not None
            send(bridge, "next")  # reopens the writer, which makes it certain
            outcome = Outcome(bridge.status(last.token).state.value)
        left, right = read(bridge)
        assert left == right
        assert ((b"%d" % sent) in left) is (outcome is Outcome.COMMITTED)
        assert not writers_of(bridge).open_transactions

    send(bridge, "first")
    assert interrupted_everywhere(act, recover, behind_calls_in) > 20
    send(bridge, "last")


@WHERE
def test_a_transaction_whose_deadline_passes_before_its_batch_begins_ends_wherever_it_is_interrupted(
    bridge: Bridge, behind_calls_in: tuple[str, ...] | None
):
    last: Transaction | None = None

    def act() -> None:
        nonlocal last
        last = None
        with suppress(errors.DeadlineExceeded, errors.TransactionTimedOut), bridge.transaction(timeout=0.02) as txn:
            last = txn
            txn.send("left", b"never")

    def recover() -> None:
        if last is not None and last.outcome is None:
            last.abort()
        assert last is None or last.outcome is Outcome.ABORTED
        assert not writers_of(bridge).open_transactions

    send(bridge, "first")
    commits = group_commit_of(bridge)
    commits._role.clear()  # as if a batch took long
    commits.least_seconds = 0.0
    assert interrupted_everywhere(act, recover, behind_calls_in) > 20


@pytest.mark.parametrize(("happened", "state"), [(True, TokenState.COMMITTED), (False, TokenState.ABORTED)])
def test_a_lost_answer_is_known_later_by_the_token(bridge, happened, state):
    send(bridge, "first")
    with next_commit(bridge, Outcome.UNKNOWN, happened=happened), pytest.raises(errors.OutcomeUnknown) as caught:
        with bridge.transaction() as txn:
            txn.send("left", b"lost")
    send(bridge, "next")  # reopens the writer, which makes it certain
    assert txn.outcome is Outcome.UNKNOWN
    assert bridge.status(caught.value.token or "").state is state
    assert (b"lost" in read(bridge)[0]) is happened
