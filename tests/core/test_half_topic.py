"""Half messages in half topics: the core's own half store, on the embedded broker."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually, seen, values
from txnbridge_conformance.plugin import NewTopic
from txnbridge_conformance.run.sales import Sales
from txnbridge_conformance.suite.half_messages import *  # noqa: F403

from tests.core import half_topic_backend
from txnbridge import Bridge, Decision, HalfMessages, HalfTransaction, Headers, Message, Outcome, connect, plugins
from txnbridge import _half_topic as half_topic
from txnbridge._events import Event
from txnbridge._half_records import HalfPart, StoredHalf, read_record
from txnbridge._half_topic import GroupTopic, HalfTopicStore, half_topic_name
from txnbridge._half_window import PartitionWindow, Scanned
from txnbridge.spi import HalfMessage
from txnbridge.testing import crash_everywhere, listening

COMMIT, ABORT, UNDECIDED = Decision.COMMIT, Decision.ABORT, Decision.UNDECIDED


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    with plugins.registered(half_topic_backend):
        yield


@pytest.fixture(scope="session")
def txnbridge_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"half-topic:{tmp_path_factory.mktemp('broker')}/broker.db?lease_seconds=6&half_check_seconds=0.2"


@pytest.fixture
def topic_store(bridge: Bridge, group: str) -> GroupTopic:
    store = bridge._connection.half_topics()
    assert isinstance(store, HalfTopicStore)
    return store._topic(group)


def says(decision: Decision) -> Callable[..., Decision]:
    return lambda *_: decision


def sell(sales: HalfMessages, topic: str, value: bytes, decision: Decision = Decision.COMMIT) -> HalfTransaction:
    with sales.transaction(decision, timeout=5) as txn:
        txn.send(topic, value, key="k")
    return txn


def obey(txn: HalfTransaction, decision: Decision) -> Decision:
    return decision


# --- order and backlog ----------------------------------------------------------------------------------------------


def test_undecided_halves_hold_nothing_back_and_are_published_once(bridge: Bridge, topic: str, group: str) -> None:
    answer = [UNDECIDED]
    with bridge.half_messages(group, execute=obey, check=lambda *_: answer[0]) as sales:
        for number in range(100):
            sell(sales, topic, b"late %d" % number, UNDECIDED)
        for number in range(20):
            sell(sales, topic, b"%d" % number)
        eventually(lambda: len(seen(bridge, topic)) == 20, "the committed ones are published")
        assert set(values(seen(bridge, topic))) == {b"%d" % number for number in range(20)}
        answer[0] = COMMIT
        eventually(lambda: len(seen(bridge, topic)) == 120, "the late ones are published")
    assert set(values(seen(bridge, topic))[20:]) == {b"late %d" % number for number in range(100)}


def test_a_backlog_comes_back_from_a_delay_partition_at_a_limited_rate(
    bridge: Bridge, topic: str, group: str, with_timing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_timing(half_second_copy=0.0, half_active=0.0)
    monkeypatch.setattr(half_topic, "_FIRST_BACK", 20)
    monkeypatch.setattr(half_topic, "_FASTEST_BACK", 20)
    monkeypatch.setattr(half_topic, "_FIRST_DELAY", 0.5)
    handle, back = GroupTopic._handle, []

    def note(self: GroupTopic, window: PartitionWindow, batch: Any) -> None:
        handle(self, window, batch)
        if window.number > 0:
            back.append((time.monotonic(), len(batch)))

    monkeypatch.setattr(GroupTopic, "_handle", note)
    answer = [UNDECIDED]
    began = time.monotonic()
    with bridge.half_messages(group, execute=obey, check=lambda *_: answer[0]) as sales:
        for number in range(100):
            sell(sales, topic, b"late %d" % number, UNDECIDED)
        sell(sales, topic, b"behind")
        eventually(lambda: len(back) > 4, "some come back")
        answer[0] = COMMIT
        eventually(lambda: len(seen(bridge, topic)) == 101, "all are published")
    assert sum(count for _, count in back) >= 50
    for at, _ in back:
        come = sum(count for then, count in back if then <= at)
        assert come <= 20 * (1 + at - began) + 5


def test_a_half_that_was_moved_is_published_at_once_and_in_order(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str, with_timing: Callable[..., None]
) -> None:
    """The copy in the delay partition is dropped when it is looked at: the claim names the other one."""
    with_timing(half_second_copy=0.0, half_active=0.0)
    passes: list[Mapping[str, Any]] = []

    def note(event: Event) -> None:
        if (event.name, event.phase) == ("half.publish", "after"):
            passes.append(event.data)

    def work(txn: HalfTransaction, fast: HalfMessages | None) -> Decision:
        if fast is not None:
            sell(fast, topic, b"fast")
            eventually(lambda: b"fast" in values(seen(bridge, topic)), "what was sent later is published")
        return COMMIT

    with listening(note), connect(txnbridge_url, create_topics=1) as own:
        with own.half_messages(group, execute=obey, check=says(UNDECIDED)) as fast:
            with own.half_messages(group, execute=work, check=says(UNDECIDED)) as slow:
                with slow.transaction(fast) as txn:
                    txn.send(topic, b"slow", key="k")
                with slow.transaction(None) as txn:
                    txn.send(topic, b"behind", key="k")
            eventually(lambda: len(seen(bridge, topic)) == 3, "all are published")
            assert any(each["moved"] for each in passes)
            eventually(lambda: any(each["dropped"] for each in passes), "the copy that was moved is dropped")
    assert values(seen(bridge, topic)) == [b"fast", b"slow", b"behind"]


def test_a_check_that_hangs_does_not_keep_others_from_being_published(bridge: Bridge, topic: str, group: str) -> None:
    asked, held = threading.Event(), threading.Event()

    def hang(*_: Any) -> Decision:
        asked.set()
        held.wait(60)
        return COMMIT

    with bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
        sales.close()
        with bridge.resolver(group, check=hang, parallel=1):
            with sales.transaction(UNDECIDED, timeout=0.5) as txn:
                txn.send(topic, b"asked about")
            assert asked.wait(60)
            sell(sales, topic, b"1")
            eventually(lambda: values(seen(bridge, topic)) == [b"1"], "it is published")
            held.set()
            eventually(lambda: values(seen(bridge, topic)) == [b"1", b"asked about"], "the other one is, too")


def test_of_two_processes_one_publishes_what_both_decide(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str
) -> None:
    with connect(txnbridge_url, create_topics=1) as first, connect(txnbridge_url, create_topics=1) as second:
        with (
            first.half_messages(group, execute=obey, check=says(UNDECIDED)) as one,
            second.half_messages(group, execute=obey, check=says(UNDECIDED)) as other,
        ):
            for number in range(20):
                sell(other if number % 2 else one, topic, b"%d" % number)
            eventually(lambda: len(seen(bridge, topic)) == 20, "all are published")
            stores = [each._connection.half_topics()._topic(group) for each in (first, second)]  # type: ignore[attr-defined]
            eventually(lambda: all(store.decided.empty() for store in stores), "both have forgotten their decisions")
    assert sorted(map(str, values(seen(bridge, topic)))) == sorted(str(b"%d" % number) for number in range(20))


@pytest.mark.parametrize("closed", ["sales", "bridge"])
def test_what_a_process_has_committed_is_published_before_it_leaves(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str, closed: str
) -> None:
    publishing, closing = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        """Keep the resolver at its first half until it is told to stop, and its request for check-backs has ended."""
        if (event.name, event.phase) == ("half.publish", "before") and not publishing.is_set():
            publishing.set()
            assert closing.wait(60)
            time.sleep(1.5)

    with listening(hold), connect(txnbridge_url, create_topics=1) as own:
        sales = own.half_messages(group, execute=obey, check=says(UNDECIDED))
        sell(sales, topic, b"1")
        assert publishing.wait(60)
        sell(sales, topic, b"2")
        closing.set()
        (sales if closed == "sales" else own).close()
    assert values(seen(bridge, topic)) == [b"1", b"2"]


def test_half_messages_of_several_threads_are_stored_in_one_transaction(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str
) -> None:
    shared: list[int] = []

    def note(event: Event) -> None:
        if (event.name, event.phase) == ("group.commit", "after"):
            shared.append(len(event.data["members"]))

    wanted = [b"%d" % number for number in range(40)]
    with listening(note), connect(txnbridge_url, create_topics=1) as own, ThreadPoolExecutor(8) as pool:
        with own.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
            list(pool.map(lambda value: sell(sales, topic, value), wanted))
    assert max(shared, default=1) > 1
    assert sorted(map(str, values(seen(bridge, topic)))) == sorted(map(str, wanted))


# --- faults -----------------------------------------------------------------------------------------------------------


def test_nothing_is_published_again_after_the_groups_positions_were_lost(
    bridge: Bridge, topic: str, group: str, topic_store: GroupTopic
) -> None:
    with bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
        for number in range(5):
            sell(sales, topic, b"%d" % number)
            eventually(lambda wanted=number + 1: len(seen(bridge, topic)) == wanted, "it is published")  # type: ignore[misc]
    bridge.admin.reset_group(topic_store._name, "earliest")
    with bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
        sell(sales, topic, b"new")
    assert values(seen(bridge, topic)) == [b"0", b"1", b"2", b"3", b"4", b"new"]


def test_what_cannot_be_published_is_parked_and_published_once_it_can_be(
    txnbridge_url: str, bridge: Bridge, topic: str, new_topic: NewTopic, group: str
) -> None:
    gone = new_topic()

    def delete(txn: HalfTransaction, _: Any) -> Decision:
        bridge.admin.delete_topic(gone)
        return COMMIT

    with connect(txnbridge_url, create_topics=0) as other:
        with other.half_messages(group, execute=delete, check=says(UNDECIDED)) as doomed:
            txn = sell(doomed, gone, b"1")
            eventually(lambda: bridge.admin.parked(group) != [], "it is parked")
        with other.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
            sell(sales, topic, b"2")
            eventually(lambda: values(seen(bridge, topic)) == [b"2"], "others are published")
            assert any(group in advice.remedy for advice in bridge.admin.check())
            bridge.admin.create_topic(gone)
            bridge.admin.resume(group, txn.id)
            eventually(lambda: values(seen(bridge, gone)) == [b"1"], "it is published")
    assert bridge.admin.parked(group) == []


@pytest.mark.parametrize("decision", [COMMIT, ABORT])
def test_a_parked_half_is_ended_by_an_administrator(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str, decision: Decision, with_timing: Callable[..., None]
) -> None:
    with_timing(parked_look=0.5)
    with (
        connect(f"{txnbridge_url}&half_checks=2", create_topics=1) as asking,
        asking.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales,
    ):
        with sales.transaction(UNDECIDED, timeout=0.5) as txn:
            txn.send(topic, b"1")
        eventually(lambda: bridge.admin.parked(group) != [], "it is parked")
        [half] = bridge.admin.parked(group)
        assert (half.transaction, [message.value for message in half.messages]) == (txn.id, [b"1"])
        bridge.admin.end_parked(group, txn.id, decision)
        assert bridge.admin.parked(group) == []
        sell(sales, topic, b"2")
        wanted = ["b'1'", "b'2'"] if decision is COMMIT else ["b'2'"]
        eventually(lambda: sorted(map(str, values(seen(bridge, topic)))) == wanted, "it is ended")


@pytest.mark.parametrize("second_copy", [0.0, 60.0])
def test_the_evidence_of_a_half_that_stays_undecided_is_renewed(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str, with_timing: Callable[..., None], second_copy: float
) -> None:
    """Its owner, whose copy has the older evidence, follows the claims to the newest; so do readers of that copy."""
    with_timing(half_evidence=0.0, half_active=0.0, half_second_copy=second_copy)
    renewed = threading.Event()

    def note(event: Event) -> None:
        if event.name == "half.publish" and event.phase == "after" and event.data["moved"]:
            renewed.set()

    def work(txn: HalfTransaction, fast: HalfMessages) -> Decision:
        sell(fast, topic, b"fast")
        assert renewed.wait(60)
        return COMMIT

    with (
        listening(note),
        connect(txnbridge_url, create_topics=1) as resolving,
        connect(txnbridge_url, create_topics=1) as own,
    ):
        with resolving.half_messages(group, execute=obey, check=says(UNDECIDED)) as fast:
            slow = own.half_messages(group, execute=work, check=says(UNDECIDED))
            slow.close()  # only the other bridge, which has other evidence, moves halves
            with slow.transaction(fast) as txn:
                txn.send(topic, b"slow")
            eventually(lambda: len(seen(bridge, topic)) == 2, "both are published")
            places = _places(own, group)
    assert txn.outcome is Outcome.COMMITTED
    assert set(values(seen(bridge, topic))) == {b"fast", b"slow"}
    assert len(places) == 2


def _places(bridge: Bridge, group: str) -> set[str]:
    """Return the places in the decision log that the records of a half topic name for the slow half."""
    found: set[str] = set()
    for message in bridge.read("_txnbridge-" + half_topic_name("default", group), 100):
        match read_record(message):
            case HalfPart(half) if half.messages[0].value == b"slow":
                found.add(str(half.log))
    return found


def shop(url: str) -> None:
    """Sell three times, and wait until all that was sold, also by an earlier run that was killed, is published."""
    books = Sales(_books_of(url))
    with connect(url, create_topics=1) as bridge:
        check = lambda id, _: books.decide(id, ABORT)  # noqa: E731
        with bridge.half_messages("shop", execute=lambda txn, d: books.decide(txn.id, d), check=check) as sales:
            for decision in (COMMIT, ABORT, COMMIT):
                with sales.transaction(decision, timeout=2) as txn:
                    txn.send("orders", txn.id.encode())
                    txn.send("audit", txn.id.encode())
            eventually(lambda: sold(bridge, "audit") >= committed(books), "all is published")


def _books_of(url: str) -> Path:
    return Path(url.partition(":")[2].partition("?")[0]).with_name("books.db")


def committed(books: Sales) -> set[str]:
    return {id for id, decision in books.all().items() if decision is COMMIT}


def sold(bridge: Bridge, topic: str) -> set[str]:
    return {str(message.value, "ascii") for message in bridge.read(topic, 1000)}


def agrees(url: str) -> None:
    """Check that the database and both topics have the same sales, each once."""
    with connect(url, create_topics=1) as bridge:
        for topic in ("orders", "audit"):
            found = [str(message.value, "ascii") for message in bridge.read(topic, 1000)]
            assert sorted(found) == sorted(committed(Sales(_books_of(url))))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_database_and_topics_agree_wherever_a_seller_dies(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())

    def fresh() -> str:
        folder = next(folders)
        folder.mkdir()
        return f"half-topic:{folder}/broker.db?lease_seconds=1.5&half_check_seconds=0.2"

    points = crash_everywhere(shop, agrees, fresh=fresh, timeout=120, at_once=2)
    walked = {point.event.partition("/")[0] for point in points}
    assert {"half.store", "half.end", "half.publish", "decision.append", "commit"} <= walked


# --- records ----------------------------------------------------------------------------------------------------------


def test_foreign_and_damaged_records_are_no_halves() -> None:
    source = random.Random(1)
    whole = json.dumps(
        {"v": 1, "kind": "half", "transaction": "t", "copy": "c", "log": {}, "number": 0, "of": 1}
    ).encode()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            data[source.randrange(len(data))] = source.randrange(256)
        for header in (bytes(data), whole[: source.randrange(len(whole))], source.randbytes(20)):
            read_record(_message(0, (("txnbridge-half", header),)))
    assert read_record(_message(0, (("other", b"{}"),))) is None


def test_a_window_acknowledges_what_is_handled_and_nothing_else() -> None:
    """Records of random halves are interleaved; at each step some halves are handled."""
    for seed in range(200):
        source = random.Random(seed)
        halves = [_half(f"h{number}", source.randint(1, 4)) for number in range(10)]
        left = [list(half.records()) for half in halves]
        window = PartitionWindow(0, None, Scanned(()))
        handled: set[str] = set()
        owner: list[str] = []
        acknowledged = -1
        while any(left) or window.waiting:
            if any(left) and source.random() < 0.7:
                number = source.choice([number for number, records in enumerate(left) if records])
                record = left[number].pop(0)
                owner.append(halves[number].copy)
                window.add(_message(len(owner) - 1, record.headers), 0.0)
                continue
            batch = window.closed(window.waiting[: source.randint(1, 10)])
            if batch:
                last = window.last_record(batch)
                handled |= {each.half.copy for each in batch}
                window.acknowledged(batch, last)
                acknowledged = last.position[0]
                assert set(owner[: acknowledged + 1]) <= handled
            elif not any(left):
                raise AssertionError("complete halves can be handled")
        assert acknowledged == len(owner) - 1


def _half(copy: str, messages: int) -> StoredHalf:
    content = [HalfMessage("orders", b"1", None, ()) for _ in range(messages)]
    return StoredHalf("t" + copy, copy, {"at": [1], "id": "x"}, 0, 0, 0, 0, 0, 0, content)


def _message(position: int, headers: Any) -> Message:
    return Message("half", 0, (position,), None, b"1", Headers(headers), 0, 1, None)
