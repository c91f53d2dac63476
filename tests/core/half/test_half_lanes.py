"""Half messages in lanes: the core's own half store, on the embedded broker."""

import json
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from txnbridge_conformance.observing import eventually, seen, values
from txnbridge_conformance.plugin import NewTopic
from txnbridge_conformance.run.sales import Sales
from txnbridge_conformance.suite.half_messages import *  # noqa: F403
from txnbridge_embedded.read.reader import UngroupedReader

import txnbridge
from tests.core import half_topic_backend
from tests.core.reading_kit import SOON
from tests.failing import fail_call, note_calls, on_call
from tests.in_time import Hold
from tests.inside import broker_of, connection_of
from tests.interrupts import interrupted_everywhere
from tests.kill_walk import KillWalk
from txnbridge import Bridge, Decision, HalfMessages, HalfTransaction, Message, Outcome, connect, errors, plugins
from txnbridge._base.connection import Connection
from txnbridge._base.events import Event
from txnbridge._half import index as half_index
from txnbridge._half import lane as half_lane
from txnbridge._half.index import LaneIndex
from txnbridge._half.lane import Lane
from txnbridge._half.records import read_record
from txnbridge._half.topic_half_store import LaneGroup
from txnbridge._write.token_operations import Outcomes
from txnbridge.spi import Deadline, Half, HalfMessage
from txnbridge.testing import listening

COMMIT, ABORT, UNDECIDED = Decision.COMMIT, Decision.ABORT, Decision.UNDECIDED


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    timing = Connection.timing
    Connection.timing = replace(timing, lane_beat=0.1, lane_look=0.05, lane_takeover=0.6)
    with plugins.registered(half_topic_backend):
        yield
    Connection.timing = timing


@pytest.fixture(scope="session")
def txnbridge_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"half-topic:{tmp_path_factory.mktemp('broker')}/broker.db?lease_seconds=6&half_check_seconds=0.2"


def lanes(bridge: Bridge, group: str) -> LaneGroup:
    return connection_of(bridge).half_lanes().group(group)  # type: ignore[attr-defined, no-any-return]


def open_lane(lanes: LaneGroup, number: int, deadline: Deadline) -> Lane:
    """Open a lane of the group, whoever has it now."""
    return lanes._lane(number, listed(lanes, deadline)[number]["owner"], deadline)


def listed(lanes: LaneGroup, deadline: Deadline) -> dict[int, dict[str, Any]]:
    return lanes._listed(deadline)


def drop_lane(lanes: LaneGroup, lane: Lane) -> None:
    """Let a process forget a lane that it had open."""
    lanes._drop(lane)


def says(decision: Decision) -> Callable[..., Decision]:
    return lambda *_: decision


def sell(sales: HalfMessages, topic: str, value: bytes, decision: Decision = COMMIT) -> HalfTransaction:
    with sales.transaction(decision, timeout=5) as txn:
        txn.send(topic, value, key="k")
    return txn


def obey(txn: HalfTransaction, decision: Decision) -> Decision:
    return decision


def leave_undecided(url: str, group: str, topic: str, *values: bytes) -> None:
    """Store half messages whose work does not say what became of it, and go."""
    with connect(url, create_topics=1) as bridge:
        sales = bridge.half_messages(group, execute=obey, check=says(UNDECIDED))
        sales.close()
        for value in values:
            sell(sales, topic, value, UNDECIDED)


def test_committed_half_messages_are_published_in_order_and_undecided_ones_hold_none_back(bridge, topic, group):
    answer = [UNDECIDED]
    with bridge.half_messages(group, execute=obey, check=lambda *_: answer[0]) as sales:
        for number in range(50):
            sell(sales, topic, b"late %d" % number, UNDECIDED)
        for number in range(20):
            sell(sales, topic, b"%d" % number)
            assert values(seen(bridge, topic))[-1] == b"%d" % number
        answer[0] = COMMIT
        eventually(lambda: len(seen(bridge, topic)) == 70, "the late ones are published")
    found = values(seen(bridge, topic))
    assert found[:20] == [b"%d" % number for number in range(20)]
    assert set(found[20:]) == {b"late %d" % number for number in range(50)}


def test_half_messages_of_several_threads_share_transactions(txnbridge_url, bridge, topic, group):
    shared: list[int] = []

    def note(event: Event) -> None:
        if (event.name, event.phase) == ("group.commit", "after"):
            shared.append(len(event.data["members"]))

    wanted = [b"%d" % number for number in range(40)]
    with listening(note), connect(txnbridge_url, create_topics=1) as own, ThreadPoolExecutor(8) as pool:
        with own.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
            list(pool.map(lambda value: sell(sales, topic, value), wanted))
    assert sum(shared) > len(wanted), "those that store them, and those that end them"
    assert sorted(map(str, values(seen(bridge, topic)))) == sorted(map(str, wanted))


def test_opening_the_lane_does_not_count_against_the_first_transactions_time(bridge, topic, group):
    def slow(event: Event) -> None:
        if (event.name, event.phase) == ("half.open", "before"):
            threading.Event().wait(0.6)

    with listening(slow), bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
        with sales.transaction(COMMIT, timeout=0.5) as txn:
            txn.send(topic, b"1")
    assert txn.outcome is Outcome.COMMITTED


def test_a_check_that_hangs_keeps_no_others_from_being_published_and_nobody_takes_the_lane(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str
) -> None:
    asked, held = threading.Event(), threading.Event()
    others: list[str] = []

    def note(id: str, _: Any) -> Decision:
        others.append(id)
        return ABORT

    def hang(*_: Any) -> Decision:
        asked.set()
        held.wait(60)
        return COMMIT

    lasting = txnbridge_url.replace("lease_seconds=6", "lease_seconds=90")  # a busy machine may not renew it for 6 s
    with connect(lasting) as owner, connect(txnbridge_url) as other:
        with owner.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
            sales.close()
            with owner.resolver(group, check=hang, parallel=1), other.resolver(group, check=note):
                sell(sales, topic, b"asked about", UNDECIDED)
                assert asked.wait(60)
                sell(sales, topic, b"1")
                assert values(seen(bridge, topic)) == [b"1"]
                threading.Event().wait(1.5)
                held.set()
                eventually(lambda: values(seen(bridge, topic)) == [b"1", b"asked about"], "the other one is, too")
    assert others == []


def test_a_sender_that_loses_its_lane_keeps_its_deadline_while_another_thread_opens_the_lane_again(
    bridge, topic, group, monkeypatch
):
    hold, has_lane = Hold(), threading.Event()

    def lose(lane: half_lane.Lane, half: Half, deadline: object) -> None:
        if half.messages[0].value == b"late":
            has_lane.set()
            assert hold.asked.wait(60)
        raise errors.Fenced("the lane was opened again")

    with bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(half_lane.Lane, "store", lose)
        late = pool.submit(sell, sales, topic, b"late")
        assert has_lane.wait(60)
        monkeypatch.setattr(LaneGroup, "_topic_id", hold)
        with hold.asked_by(lambda: sell(sales, topic, b"first")), pytest.raises(errors.DeadlineExceeded):
            late.result(20)


def test_an_exception_of_a_signal_handler_keeps_no_later_call_from_ending_the_half(bridge, group):
    lane = lanes(bridge, group).own_lane(Deadline(60))

    def end() -> None:
        lane.end(Half(group, "sale/1", [], 0, 0), UNDECIDED, Deadline(1))

    assert interrupted_everywhere(end, end, ["/lane.py"])


@pytest.mark.filterwarnings("ignore:transaction .* was left unfinished:ResourceWarning")
def test_a_half_whose_end_a_signal_handler_interrupts_is_published_once(bridge, topic, group):
    own, number = lanes(bridge, group), count()

    def store() -> Half:
        value = b"%d" % next(number)
        message = HalfMessage(topic, value, None, (), None, None)
        return own.store(Half(group, f"sale/{value.decode()}", [message], 0, 0), Deadline(60))

    half = store()

    def recover() -> None:
        nonlocal half
        assert own.end(half, COMMIT, Deadline(60)) is Outcome.COMMITTED
        half = store()

    assert interrupted_everywhere(lambda: own.end(half, COMMIT, Deadline(60)), recover, ["/lane.py"])
    found = values(seen(bridge, topic))
    assert found == [b"%d" % each for each in range(len(found))]


def test_leaving_a_group_keeps_its_deadline_while_another_thread_tends_the_lanes(bridge, group, monkeypatch):
    hold = Hold()
    monkeypatch.setattr(LaneGroup, "_look", hold)
    with hold.asked_by(lambda: lanes(bridge, group).checks(1, Deadline(60))), pytest.raises(errors.DeadlineExceeded):
        lanes(bridge, group).leave(Deadline(0.1))


def test_a_half_stored_while_its_process_leaves_the_group_is_ended_by_it(bridge, topic, group, monkeypatch):
    """A thread has stored it after the other one has seen that nothing is open: the lane is given to nobody."""
    own, stored = lanes(bridge, group), list[Half]()
    own.own_lane(Deadline(SOON))
    half = Half(group, "sale/1", [HalfMessage(topic, b"1", None, ())], 0, 0)
    on_call(monkeypatch, Lane, "tend", lambda *_: stored.__iadd__([own.store(half, Deadline(SOON))]))
    own.leave(Deadline(SOON))
    assert own.end(stored[0], COMMIT, Deadline(SOON)) is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"1"]


def test_a_half_whose_parking_has_failed_is_parked_later(bridge, topic, group, monkeypatch):
    lane = lanes(bridge, group).own_lane(Deadline(SOON))
    lane.store(Half(group, "sale/1", [HalfMessage(topic, b"1", None, ())], 0, 0), Deadline(SOON))
    lane.index.undone["sale/1"].checks = broker_of(bridge).half_checks
    fail_call(monkeypatch, lane, "park", errors.BrokerUnavailable("away"))
    with pytest.raises(errors.BrokerUnavailable):
        lane.next_halves(group, 1, Deadline(SOON))
    assert lane.next_halves(group, 1, Deadline(SOON)) == []
    assert [half.transaction for half in lanes(bridge, group).parked(Deadline(SOON))] == ["sale/1"]


@pytest.mark.parametrize("call", ["__init__", "lag"])
def test_a_lane_is_read_by_the_callers_deadline(txnbridge_url, bridge, topic, group, monkeypatch, call):
    leave_undecided(txnbridge_url, group, topic, b"1")
    left = note_calls(monkeypatch, UngroupedReader, call, lambda *given: given[-1].left())
    lanes(bridge, group).late(Deadline(5))
    assert 0 < max(left) <= 5


def test_records_of_done_halves_are_removed_and_what_holds_them_back_is_stored_again(bridge, topic, group, with_timing):
    with_timing(lane_trim=0.1, lane_kept=20)
    answer = [UNDECIDED]
    with bridge.half_messages(group, execute=obey, check=lambda *_: answer[0]) as sales:
        late = sell(sales, topic, b"late", UNDECIDED)
        lane = lanes(bridge, group).topic(0)

        def begin() -> Any:
            return bridge.admin.bounds(lane)[lane, 0][0]

        first = begin()
        for number in range(30):
            sell(sales, topic, b"%d" % number)
        eventually(lambda: begin() > first, "the late one does not hold back the removal")
        answer[0] = COMMIT
        eventually(lambda: len(seen(bridge, topic)) == 31, "the late one is published")
        assert values(seen(bridge, topic)).count(b"late") == 1
        eventually(lambda: bridge.admin.bounds(lane)[lane, 0][1] == (begin()[0] + 1,), "all is removed but a beat")
    assert late.outcome is Outcome.UNKNOWN


def test_a_half_of_which_only_a_part_was_read_is_asked_about_when_it_is_due(bridge, topic, group, monkeypatch):
    """Another thread has read on behind its own heartbeat, and its poll ended within the half."""
    monkeypatch.setattr(half_index, "_POLL_RECORDS", 2)
    lane = lanes(bridge, group).own_lane(Deadline(SOON))
    lane.beat(0.0, Deadline(SOON), "mine")
    messages = [HalfMessage(topic, b"%d" % number, None, ()) for number in range(3)]
    lane.store(Half(group, "sale/1", messages, 0, 0), Deadline(SOON))
    lane.index.read_until("mine", Deadline(SOON))
    (half,) = lane.next_halves(group, 1, Deadline(SOON))
    assert [message.value for message in half.messages] == [b"0", b"1", b"2"]
    assert lanes(bridge, group).parked(Deadline(SOON)) == []


def test_a_process_without_a_resolver_removes_records_of_done_halves(bridge, topic, group, with_timing):
    with_timing(lane_trim=0.0, lane_untended=0.0)
    sales = bridge.half_messages(group, execute=obey, check=says(UNDECIDED))
    sales.close()
    for number in range(3):
        sell(sales, topic, b"%d" % number)
    assert len(bridge.read(lanes(bridge, group).topic(0), 10)) < 6


def test_a_holder_whose_lane_was_opened_by_another_process_learns_how_its_half_messages_have_ended(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str
) -> None:
    """The owner was paused, say: nothing is published twice, and the owner's later half messages go on."""
    with connect(txnbridge_url, create_topics=1) as own, connect(txnbridge_url, create_topics=1) as other:

        def work(txn: HalfTransaction, end: Decision | None) -> Decision:
            lane = open_lane(lanes(other, group), 0, Deadline(SOON))
            if end is not None:
                stored = Half(group, txn.id, [], 0, 0, how=lane.how)
                assert lanes(other, group).end(stored, end, Deadline(SOON)) is not Outcome.UNKNOWN
            return COMMIT

        sales = own.half_messages(group, execute=work, check=says(UNDECIDED))
        for number, end in enumerate((None, COMMIT)):
            with sales.transaction(end, timeout=5) as txn:
                txn.send(topic, b"%d" % number)
            assert txn.outcome is Outcome.COMMITTED
        with pytest.raises(errors.TransactionAborted), sales.transaction(ABORT, timeout=5) as txn:
            txn.send(topic, b"never")
        assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == [b"0", b"1"]


def test_a_process_that_comes_back_late_is_told_that_only_its_own_records_tell(txnbridge_url, bridge, topic, group):
    with connect(txnbridge_url, create_topics=1) as own, connect(txnbridge_url, create_topics=1) as other:

        def work(txn: HalfTransaction, _: Any) -> Decision:
            mine, deadline = lanes(own, group), Deadline(SOON)
            ((number, mark),) = listed(mine, deadline).items()
            drop_lane(mine, mine.own_lane(deadline))
            with other.resolver(group, check=says(COMMIT)):
                eventually(lambda: values(seen(bridge, topic)) == [b"1"], "a resolver publishes it")
            assert lanes(other, group)._list_lane(number, mark["owner"], deadline, owner="")
            assert lanes(other, group).own_lane(deadline).topic == mine.topic(number)
            return COMMIT

        sales = own.half_messages(group, execute=work, check=says(UNDECIDED))
        sales.close()
        with pytest.raises(errors.EvidenceLost), sales.transaction(timeout=1) as txn:
            txn.send(topic, b"1")
        assert lanes(own, group).own_lane(Deadline(SOON)).topic == lanes(own, group).topic(1)
    assert values(seen(bridge, topic)) == [b"1"]


@pytest.mark.parametrize("stored", [True, False])
def test_an_end_whose_answer_is_lost_is_looked_up_and_not_repeated(bridge, topic, group, monkeypatch, stored):
    monkeypatch.setattr(Outcomes, "resolve", lambda *_: None)

    def lose(writer: Any, deadline: Any) -> None:
        (writer.commit if stored else writer.abort)(deadline)
        raise errors.OutcomeUnknown("the answer is lost")

    def work(txn: HalfTransaction, decision: Decision) -> Decision:
        lanes(bridge, group).own_lane(Deadline(SOON))._writers.commit = lose
        return decision

    with bridge.half_messages(group, execute=work, check=says(UNDECIDED)) as sales:
        sales.close()
        assert sell(sales, topic, b"1").outcome is Outcome.COMMITTED
        assert sell(sales, topic, b"2", ABORT).outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == [b"1"]


def test_two_resolvers_take_a_lane_over_and_each_half_message_is_published_once(txnbridge_url, bridge, topic, group):
    leave_undecided(txnbridge_url, group, topic, *(b"%d" % number for number in range(100)))
    with connect(txnbridge_url) as one, connect(txnbridge_url) as two:
        with one.resolver(group, check=says(COMMIT)), two.resolver(group, check=says(COMMIT)):
            eventually(lambda: len(seen(bridge, topic)) >= 100, "all are published")
    assert sorted(values(seen(bridge, topic)), key=str) == sorted((b"%d" % n for n in range(100)), key=str)


def test_the_lane_of_a_process_that_has_ended_is_used_by_the_next_one(txnbridge_url, bridge, topic, group):
    for number in range(3):
        with connect(txnbridge_url, create_topics=1) as own:
            with own.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
                sell(sales, topic, b"%d" % number)
    assert len(listed(lanes(bridge, group), Deadline(SOON))) == 1


@pytest.mark.parametrize("deleted", ["topic", "records"])
def test_a_lane_whose_topic_was_deleted_or_emptied_is_told_and_the_group_goes_on(
    txnbridge_url: str, bridge: Bridge, topic: str, group: str, caplog: pytest.LogCaptureFixture, deleted: str
) -> None:
    leave_undecided(txnbridge_url, group, topic, b"lost")
    lane = lanes(bridge, group).topic(0)
    if deleted == "topic":
        bridge.admin.delete_topic(lane)
    else:
        _, end = bridge.admin.bounds(lane)[lane, 0]
        broker_of(bridge).admin.trim((lane, 0), end, Deadline(SOON))
    with connect(txnbridge_url, create_topics=1) as own:
        with own.half_messages(group, execute=obey, check=says(COMMIT)) as sales:
            sell(sales, topic, b"1")
            open_lane(lanes(own, group), 0, Deadline(SOON))
    assert caplog.text.count(f"half messages in the topic {lane} are lost") == 1
    assert values(seen(bridge, topic)) == [b"1"]


def test_a_refused_half_message_is_parked_and_published_once_possible_while_others_go_on(
    txnbridge_url: str, bridge: Bridge, topic: str, new_topic: NewTopic, group: str
) -> None:
    gone = new_topic()

    def delete(txn: HalfTransaction, _: Any) -> Decision:
        bridge.admin.delete_topic(gone)
        return COMMIT

    with connect(txnbridge_url, create_topics=0) as other:
        with other.half_messages(group, execute=delete, check=says(COMMIT)) as doomed:
            with pytest.raises(errors.OutcomeUnknown, match="parked"):
                sell(doomed, gone, b"1")
        with other.half_messages(group, execute=obey, check=says(COMMIT)) as sales:
            sell(sales, topic, b"2")
            assert values(seen(bridge, topic)) == [b"2"]
            [half] = bridge.admin.parked(group)
            assert any(group in advice.remedy for advice in bridge.admin.doctor())
            bridge.admin.create_topic(gone)
            bridge.admin.resume(group, half.transaction)
            eventually(lambda: values(seen(bridge, gone)) == [b"1"], "it is published")
    assert bridge.admin.parked(group) == []


def test_half_messages_of_a_key_committed_behind_a_refused_one_wait_for_it(
    txnbridge_url: str, bridge: Bridge, topic: str, new_topic: NewTopic, group: str
) -> None:
    gone = new_topic()

    def work(txn: HalfTransaction, name: str) -> Decision:
        if name == "first":
            bridge.admin.delete_topic(gone)
        return COMMIT

    def sold(sales: HalfMessages, name: str, key: str, *more: str) -> str:
        with suppress(errors.OutcomeUnknown), sales.transaction(name) as txn:
            for each in (topic, *more):
                txn.send(each, name.encode(), key=key)
        return txn.id

    with connect(txnbridge_url, create_topics=0) as own:
        with own.half_messages(group, execute=work, check=says(COMMIT)) as sales:
            first = sold(sales, "first", "a", gone)
            waiting = [sold(sales, name, "a") for name in ("second", "third")]
            sold(sales, "other", "b")
        assert {half.transaction for half in own.admin.parked(group)} == {first, *waiting}
    with connect(txnbridge_url) as other, other.resolver(group, check=says(COMMIT)):
        bridge.admin.resume(group, waiting[0])  # it may not overtake
        eventually(lambda: len(bridge.admin.parked(group)) == 3, "it is parked again")
        bridge.admin.create_topic(gone)
        bridge.admin.resume(group, first)
        eventually(lambda: values(seen(bridge, topic)) == [b"other", b"first", b"second", b"third"], "they follow")


@pytest.mark.parametrize("decision", [COMMIT, ABORT])
def test_a_parked_half_is_ended_by_an_administrator(txnbridge_url, bridge, topic, group, decision, monkeypatch):
    behind_a_trim = errors.PositionLost("the half's holder has just removed old records")
    with connect(f"{txnbridge_url}&half_checks=2", create_topics=1) as asking:
        with asking.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:
            with sales.transaction(UNDECIDED, timeout=2) as txn:
                txn.send(topic, b"1")
            eventually(lambda: bridge.admin.parked(group) != [], "it is parked")
            [half] = bridge.admin.parked(group)
            assert (half.transaction, [message.value for message in half.messages]) == (txn.id, [b"1"])
            fail_call(monkeypatch, LaneIndex, "read_all", behind_a_trim)
            assert bridge.admin.parked(group) == [half]
            bridge.admin.end_parked(group, txn.id, decision)
            assert bridge.admin.parked(group) == []
            sell(sales, topic, b"2")
    assert values(seen(bridge, topic)) == ([b"1", b"2"] if decision is COMMIT else [b"2"])


class Shop(NamedTuple):
    """The place where a shop sells: a broker, the beginning of its topics' names, and its database file."""

    url: str
    name: str
    books: Path
    decisions: tuple[Decision, ...]


def shop(shop: Shop) -> None:
    """Sell, and wait until all that was sold, also by an earlier run that was killed, is published."""
    Connection.timing = replace(Connection.timing, lane_beat=0.2, lane_look=0.1, lane_takeover=1.0)
    books = Sales(shop.books)
    with connect(shop.url, create_topics=1, application=shop.name) as bridge:
        check = lambda id, _: books.decide(id, ABORT)  # noqa: E731
        with bridge.half_messages(shop.name, execute=lambda txn, d: books.decide(txn.id, d), check=check) as sales:
            for decision in shop.decisions:
                with sales.transaction(decision, timeout=5) as txn:
                    txn.send(f"{shop.name}-orders", txn.id.encode())
                    txn.send(f"{shop.name}-audit", txn.id.encode())
            eventually(lambda: sold(bridge, f"{shop.name}-audit") >= committed(books), "all is published")


def committed(books: Sales) -> set[str]:
    return {id for id, decision in books.all().items() if decision is COMMIT}


def sold(bridge: Bridge, topic: str) -> set[str]:
    return {str(message.value, "ascii") for message in bridge.read(topic, 1000)}


def agrees(shop: Shop) -> None:
    """Check that the database and both topics have the same sales, each once."""
    with connect(shop.url, create_topics=1, application=shop.name) as bridge:
        for topic in (f"{shop.name}-orders", f"{shop.name}-audit"):
            found = [str(message.value, "ascii") for message in bridge.read(topic, 1000)]
            assert sorted(found) == sorted(committed(Sales(shop.books)))


def check_wherever_a_seller_dies(
    url: str, folder: Path, kill_walk: KillWalk, decisions: tuple[Decision, ...] = (COMMIT, ABORT, COMMIT)
) -> None:
    def fresh() -> Shop:
        name = f"shop-{uuid.uuid4().hex[:8]}"
        return Shop(url.replace("NAME", name), name, folder / f"{name}.db", decisions)

    least = {"half.store/before", "half.store/after", "half.end/before", "half.end/after"}
    least |= set() if url.startswith("embedded:") else {"half.open/after"}
    kill_walk(shop, agrees, fresh=fresh, least=least, at_once=2, timeout=120)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_database_and_topics_agree_wherever_a_seller_dies(tmp_path: Path, kill_walk: KillWalk) -> None:
    url = f"half-topic:{tmp_path}/NAME.broker?lease_seconds=1.5&half_check_seconds=0.2"
    check_wherever_a_seller_dies(url, tmp_path, kill_walk)


def test_foreign_and_damaged_records_are_no_halves_and_newer_ones_are_refused() -> None:
    source = random.Random(1)
    fields = {"kind": "half", "transaction": "t", "part": [0, 1], "times": [0, 0, 0], "to": ["x", None, None]}
    whole = json.dumps({"v": 2, **fields}).encode()
    assert read_record(_message(0, (("txnbridge-half", whole),))) is not None
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            data[source.randrange(8, len(data))] = source.randrange(256)
        for header in (bytes(data), whole[: source.randrange(len(whole))], source.randbytes(20)):
            read_record(_message(0, (("txnbridge-half", header),)))
    assert read_record(_message(0, (("other", b"{}"),))) is None
    with pytest.raises(errors.NotSupported, match="newer version"):
        read_record(_message(0, (("txnbridge-half", b'{"v": 3}'),)))


def _message(position: int, headers: Any) -> Message:
    return Message("half", 0, (position,), None, b"1", txnbridge.Headers(headers), 0, 1, None)
