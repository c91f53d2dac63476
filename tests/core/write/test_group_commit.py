"""Small transactions of several threads share one of the broker; each of them gets its own true outcome."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.toy import SlowWriter, ToyBackend, ToyBroker, ToyWriter, connect_toy
from tests.in_time import wait_until
from tests.inside import broker_of, group_commit_of, writers_of
from txnbridge import Bridge, Outcome, Status, TokenState, Topic, Transaction, errors
from txnbridge.spi import Deadline
from txnbridge.testing import recorded


@pytest.fixture(autouse=True)
def _known_topics(with_timing: Callable[..., None]) -> None:
    with_timing(topic_taken=float("inf"))


@contextmanager
def opened(*writers: ToyWriter, timeout: float = 60, **options: Any) -> Iterator[tuple[Bridge, ToyBroker]]:
    """A bridge that gathers every transaction, with these writers."""
    backend = ToyBackend(group_commit=True)
    given = {"group_commit": True, "writers": len(writers), **options}
    bridge, broker = connect_toy(backend, timeout=timeout, **given)
    broker.writers = list(writers)
    broker.open_writers = lambda *given: list(writers)  # type: ignore[method-assign]
    with bridge:
        yield bridge, broker


@pytest.fixture
def writer() -> ToyWriter:
    return ToyWriter()


@pytest.fixture
def slow() -> SlowWriter:
    return SlowWriter()


@pytest.fixture
def bridge(request: pytest.FixtureRequest) -> Iterator[Bridge]:
    """A bridge with the writer that the test asks for."""
    with opened(request.getfixturevalue("slow" if "slow" in request.fixturenames else "writer")) as (bridge, _):
        yield bridge


@pytest.fixture
def broker(bridge: Bridge) -> ToyBroker:
    return broker_of(bridge)  # type: ignore[no-any-return]


def work(bridge: Bridge, value: bytes, end: Callable[[Transaction], object] = lambda txn: None) -> Transaction:
    with suppress(errors.TxnBridgeError), bridge.transaction() as txn:
        txn.send("t", value)
        end(txn)
    return txn


def values(writer: ToyWriter) -> list[bytes]:
    return [sent[1] for sent in writer.sent]


def joined(bridge: Bridge) -> int:
    """Return how many transactions wait for the next batch."""
    return group_commit_of(bridge)._joined.qsize()


@contextmanager
def side_by_side(bridge: Bridge, writer: SlowWriter, *values: bytes) -> Iterator[Sequence[Future[Transaction]]]:
    """One batch is on its way, and one transaction for each value has joined the next one, in this order."""
    with ThreadPoolExecutor(len(values) + 1) as pool:
        pool.submit(work, bridge, b"first")
        try:
            assert writer.begun.wait(60)
            members = []
            for number, value in enumerate(values, 1):
                members.append(pool.submit(work, bridge, value))
                wait_until(lambda number=number: joined(bridge) == number)  # type: ignore[misc]
            yield members
        finally:
            writer.may_end.set()


def outcomes(members: Sequence[Future[Transaction]]) -> list[Outcome | None]:
    return [member.result(60).outcome for member in members]


def test_transactions_that_commit_during_a_commit_share_the_next_one_in_their_order() -> None:
    writer = SlowWriter()
    with recorded() as events, opened(writer) as (bridge, _):
        with side_by_side(bridge, writer, b"1", b"2", b"3") as members:
            pass
        assert outcomes(members) == [Outcome.COMMITTED] * 3
    assert values(writer) == [b"first", b"1", b"2", b"3"]
    assert writer.calls == ["begin", "send", "commit", "begin", "send", "send", "send", "commit", "close"]
    shared = [event for event in events if (event.name, event.phase) == ("group.commit", "after")]
    ids = [member.result().id for member in members]
    assert [event.data["members"] for event in shared][1:] == [ids]
    assert {event.transaction for event in events if event.name == "commit"} >= set(ids)
    assert shared[1].transaction not in ids


def test_the_abort_of_a_gathered_transaction_makes_no_call_to_the_broker(bridge: Bridge, writer: ToyWriter) -> None:
    assert work(bridge, b"never", Transaction.abort).outcome is Outcome.ABORTED
    assert writer.calls == []
    assert work(bridge, b"1").outcome is Outcome.COMMITTED
    assert values(writer) == [b"1"]


@pytest.mark.parametrize(
    "error", [errors.Conflict("taken"), errors.DeliveryFailed("too large"), errors.BrokerUnavailable("no")]
)
def test_only_the_guilty_member_fails(error: Exception) -> None:
    class Picky(SlowWriter):
        def commit(self, deadline: Deadline) -> None:
            super().commit(deadline)
            if b"guilty" in values(self)[-self.messages :]:
                raise error

    writer = Picky()
    with opened(writer) as (bridge, _):
        with side_by_side(bridge, writer, b"1", b"guilty", b"2") as members:
            pass
        assert outcomes(members) == [Outcome.COMMITTED, Outcome.ABORTED, Outcome.COMMITTED]


def test_a_lost_answer_is_unknown_for_all_with_a_token_that_tells() -> None:
    writer = SlowWriter()
    with opened(writer, timeout=3) as (bridge, broker):
        with side_by_side(bridge, writer, b"1", b"2") as members:
            writer.raises["commit"] = [errors.OutcomeUnknown("no answer"), errors.OutcomeUnknown("no answer")]
        assert outcomes(members) == [Outcome.UNKNOWN] * 2
        tokens = {str(member.result().token) for member in members}
        broker.answers["status"] = [Status(TokenState.COMMITTED)]
        (token,) = tokens
        assert bridge.status(token).state is TokenState.COMMITTED
        for end in (bridge.commit, bridge.abort):
            with pytest.raises(errors.InvalidState, match="never prepared"):
                end(token)


def test_a_lost_answer_is_looked_up_by_each_member(bridge: Bridge, broker: ToyBroker, slow: SlowWriter) -> None:
    with side_by_side(bridge, slow, b"1", b"2") as members:
        slow.raises["commit"] = [errors.OutcomeUnknown("no answer"), errors.OutcomeUnknown("no answer")]
        broker.answers["status"] = [Status(TokenState.COMMITTED)] * 3
    assert outcomes(members) == [Outcome.COMMITTED] * 2
    assert values(slow) == [b"first", b"1", b"2"]  # once


def test_all_members_of_an_owner_that_was_replaced_are_fenced(bridge: Bridge, slow: SlowWriter) -> None:
    with side_by_side(bridge, slow, b"1", b"2") as members:
        slow.raises["commit"] = [errors.Fenced("newer owner"), errors.Fenced("newer owner")]
    assert outcomes(members) == [Outcome.ABORTED] * 2
    assert slow.calls.count("commit") == 2  # nobody has tried alone


def test_a_gathered_transaction_that_times_out_before_its_commit_calls_no_broker(bridge: Bridge, writer: ToyWriter):
    with pytest.raises(errors.TransactionTimedOut), bridge.transaction(timeout=0.01) as txn:
        txn.send("t", b"late")
        time.sleep(0.02)
    assert (txn.outcome, writer.calls) == (Outcome.ABORTED, [])


def test_a_member_that_times_out_before_its_batch_begins_leaves_the_others_alone(bridge, slow):
    group_commit_of(bridge).least_seconds = 0
    with side_by_side(bridge, slow, b"1") as members:
        with pytest.raises(errors.DeadlineExceeded), bridge.transaction(timeout=0.2) as txn:
            txn.send("t", b"late")
    assert (txn.outcome, outcomes(members)) == (Outcome.ABORTED, [Outcome.COMMITTED])
    assert values(slow) == [b"first", b"1"]


def test_closing_waits_for_members_of_a_batch_and_aborts_gathered_transactions(bridge: Bridge, slow: SlowWriter):
    gathered = bridge.transaction()
    gathered.send("t", b"never")
    with side_by_side(bridge, slow, b"1", b"2") as members:
        with pytest.warns(ResourceWarning, match="left unfinished"), ThreadPoolExecutor() as pool:
            closing = pool.submit(bridge.close)
            wait_until(lambda: gathered.outcome)
            slow.may_end.set()
            closing.result(60)
    assert outcomes(members) == [Outcome.COMMITTED] * 2
    assert (gathered.outcome, values(slow)) == (Outcome.ABORTED, [b"first", b"1", b"2"])


@contextmanager
def interrupted_when(condition: Callable[[], object], then: Callable[[], object]) -> Iterator[None]:
    """A signal handler raises in this thread once the condition is true."""

    def interrupt() -> None:
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        then()

    before = signal.signal(signal.SIGUSR1, lambda *_: 1 / 0)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(ZeroDivisionError):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_that_interrupts_the_wait_for_a_batch_withdraws_the_member(bridge, slow):
    with side_by_side(bridge, slow, b"1") as members:
        with interrupted_when(lambda: joined(bridge) == 2, lambda: None), bridge.transaction() as txn:
            txn.send("t", b"never")
        assert txn.outcome is Outcome.ABORTED
    assert outcomes(members) == [Outcome.COMMITTED]
    assert values(slow) == [b"first", b"1"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.COMMITTED),
        (errors.OutcomeUnknown("no answer"), Outcome.UNKNOWN),
        (errors.DeliveryFailed("refused"), Outcome.ABORTED),
    ],
)
def test_a_member_whose_batch_is_on_its_way_has_its_true_outcome_after_an_interrupt(bridge, slow, error, outcome):
    slow.raises["commit"] = [error] if error else []
    with interrupted_when(slow.begun.is_set, slow.may_end.set), bridge.transaction() as txn:
        txn.send("t", b"1")
    assert txn.outcome is outcome
    assert (txn.token is not None) is (outcome is Outcome.UNKNOWN)


def test_a_message_that_send_refuses_is_refused_at_once(bridge: Bridge, writer: ToyWriter, with_timing) -> None:
    with_timing(topic_taken=0.0)
    writer.raises["send"] = [errors.NotFound("no such topic")]
    with bridge.transaction() as txn:
        with pytest.raises(errors.NotFound):
            txn.send("nowhere", b"1")
        txn.send("t", b"2")
    assert (txn.outcome, values(writer)) == (Outcome.COMMITTED, [b"2"])


@pytest.mark.parametrize(
    "grow",
    [
        lambda txn: txn.send_many("t", [b"x"] * 1000),
        lambda txn: txn.send_many("t", iter([b"x"] * 1000)),
        lambda txn: [txn.send("t", b"x") for _ in range(1000)],
        lambda txn: txn.send("t", bytes(100_000)),
    ],
)
def test_a_transaction_that_grows_gets_a_writer_of_its_own(bridge, writer, grow):
    topic = Topic("t", SimpleNamespace(encode=lambda value, _: value))  # its codec has no hash
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        assert writer.calls == []
        grow(txn)
        assert writer.calls[:2] == ["begin", "send"]
        txn.send_many("t", [b"x"])
        txn.send(topic, b"last")
    assert txn.outcome is Outcome.COMMITTED
    assert values(writer)[0] == b"1" and values(writer)[-1] == b"last"


def test_an_acknowledgement_is_never_shared(bridge: Bridge, broker: ToyBroker, writer: ToyWriter) -> None:
    consumer = bridge.consumer("in", "g")
    broker.readers[0].feed(b"1", partition=("in", 0))
    with bridge.transaction() as txn:
        txn.send("t", b"1")
        txn.ack(consumer.poll())
    assert writer.calls == ["begin", "send", "ack", "commit"]


def test_few_transactions_have_writers_of_their_own() -> None:
    one, two = ToyWriter(), ToyWriter()
    with opened(one, two, group_commit=None, writers=2) as (bridge, _):
        with bridge.transaction() as first, bridge.transaction() as second:
            assert sorted([*one.calls, *two.calls]) == ["begin", "begin"]
            gathered = bridge.transaction()
            with pytest.raises(errors.DeadlineExceeded):
                bridge.transaction(group_commit=False, timeout=0.05)
            second.abort()
            gathered.commit()
    assert [txn.outcome for txn in (first, second, gathered)] == [Outcome.COMMITTED, Outcome.ABORTED, Outcome.COMMITTED]


def test_an_unfinished_gathered_transaction_is_forgotten(bridge: Bridge, writer: ToyWriter) -> None:
    txns = [bridge.transaction(), bridge.transaction(group_commit=False)]
    txns[0].send("t", b"never")
    with pytest.warns(ResourceWarning, match="left unfinished"):
        txns.clear()
        gc.collect()
    with bridge.transaction():
        assert len(writers_of(bridge).open_transactions) == 1
        assert writer.calls == ["begin", "abort"]


def test_the_thread_ends_when_it_is_idle_or_its_bridge_is_closed(with_timing: Callable[..., None]) -> None:
    before = threading.enumerate()

    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if "group commit" in each.name and each not in before]

    with opened(ToyWriter()) as (bridge, _):
        work(bridge, b"1")
        assert len(threads()) == 1
    wait_until(lambda: not threads())
    with_timing(group_idle=0.01)
    with opened(ToyWriter()) as (bridge, _):
        for _ in range(2):
            assert work(bridge, b"1").outcome is Outcome.COMMITTED
            wait_until(lambda: not threads())


def test_without_threads_each_commits_alone(bridge: Bridge, writer: ToyWriter, no_threads) -> None:
    no_threads()
    assert work(bridge, b"1").outcome is Outcome.COMMITTED
    assert values(writer) == [b"1"]


def test_group_commit_is_refused_where_it_is_not_proven() -> None:
    with pytest.raises(errors.NotSupported, match="group_commit"):
        connect_toy(group_commit=True)
    with pytest.raises(errors.InvalidOption, match="group_commit"):
        connect_toy(group_commit="yes")
    bridge, _ = connect_toy(writers=1)
    with bridge, bridge.transaction(), pytest.raises(errors.DeadlineExceeded):  # there is no writer for another one
        bridge.transaction(timeout=0.05)
