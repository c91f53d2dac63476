"""A consumer's own logic: what may be acknowledged, what comes again, what happens when a partition leaves."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.core.toy import ToyBackend, ToyReader, connect_toy
from tests.failing import on_call, raising
from tests.in_time import Hold, wait_until
from txnbridge import Capability, Consumer, Message, Outcome, State, Status, TokenState, Topic, codecs, errors
from txnbridge.spi import NO_HEADERS, absent

P = ("t", 0)


class Room:
    """A bridge on the toy backend, one consumer, and its reader with five messages."""

    def __init__(self, absent_capability: Capability | None = None, **options: object) -> None:
        lacking = {absent_capability: absent("a test says so")} if absent_capability else {}
        self.bridge, self.broker = connect_toy(ToyBackend(lacking), timeout=0.5)
        self.consumer: Consumer = self.bridge.consumer("t", "g", **options)  # type: ignore[arg-type]
        self.reader: ToyReader = self.broker.readers[0]
        self.reader.feed(b"0", b"1", b"2", b"3", b"4")

    def ack(self, messages: Message | Sequence[Message], abort: bool = False) -> None:
        with self.bridge.transaction() as txn:
            txn.ack(messages)
            if abort:
                raise errors.Abort

    @property
    def acked(self) -> list[tuple[int, ...]]:
        return [p for writer in self.broker.writers for _, told in writer.acked for p in told[P]]


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    with room.bridge:
        yield room


@pytest.fixture
def in_order() -> Iterator[Room]:
    room = Room(Capability.INDIVIDUAL_ACK)
    with room.bridge:
        yield room


def values(messages: Iterable[Message]) -> list[Any]:
    return [m.value for m in messages]


def test_a_message_is_acknowledged_with_the_proof_of_its_delivery(room: Room) -> None:
    batch = room.consumer.poll(3)
    room.ack(batch)
    assert room.broker.writers[3].acked == [("generation 1", {P: [(0,), (1,), (2,)]})]
    assert values(room.consumer.poll()) == [b"3", b"4"]


def test_acknowledging_up_to_a_message_that_was_given_back_is_refused_with_those_before_it(in_order: Room) -> None:
    batch = in_order.consumer.poll()
    in_order.consumer.nack(batch[2])
    with in_order.bridge.transaction() as txn, pytest.raises(errors.InvalidState, match="comes again"):
        txn.ack_up_to(batch[4])
    assert in_order.acked == []


def test_out_of_order_is_refused_with_the_reason_where_only_positions_are_known(in_order: Room) -> None:
    batch = in_order.consumer.poll()
    with in_order.bridge.transaction() as txn:
        with pytest.raises(errors.InvalidState, match="only knows positions"):
            txn.ack(batch[1])
        with pytest.raises(errors.InvalidState, match="only knows positions"):
            txn.ack([batch[1], batch[0]])
        txn.ack(batch[:2])
        txn.ack(batch[2])
    assert in_order.acked == [(0,), (1,), (2,)]


def test_a_message_twice_in_one_acknowledgement_and_a_made_up_one_are_refused(room: Room) -> None:
    batch = room.consumer.poll()
    made_up = Message("t", 0, (0,), None, b"0", NO_HEADERS, 0, 1, None)
    for messages, reason in (([batch[1], batch[1]], "twice"), (made_up, "group")):
        with room.bridge.transaction() as txn, pytest.raises(errors.InvalidState, match=reason):
            txn.ack(messages)
    assert room.acked == []


def test_a_message_given_back_by_an_abort_cannot_be_acknowledged_before_it_came_again(room: Room) -> None:
    batch = room.consumer.poll(3)
    room.ack(batch, abort=True)
    room.consumer.pause()
    room.reader.log.clear()
    assert not room.consumer.poll()
    with room.bridge.transaction() as txn, pytest.raises(errors.InvalidState, match="comes again"):
        txn.ack(batch[0])


def test_an_abort_gives_only_its_own_messages_back_where_messages_are_shared(room: Room) -> None:
    room = Room(sharing="message")
    batch = room.consumer.poll()
    room.ack(batch[1], abort=True)
    room.consumer.poll()
    assert room.reader.nacked == [{P: [(1,)]}]
    room.ack(batch[0])


def test_one_open_transaction_at_a_time_holds_a_consumers_acknowledgements(room: Room) -> None:
    batch = room.consumer.poll()
    with room.bridge.transaction() as first, room.bridge.transaction() as second:
        first.ack(batch[0])
        with pytest.raises(errors.InvalidState, match=first.id):
            second.ack(batch[1])
    room.ack(batch[1])


def test_a_partition_that_leaves_lets_its_transaction_only_abort(room: Room) -> None:
    batch = room.consumer.poll(2)
    with pytest.raises(errors.Conflict, match=r"t\[0\] left"), room.bridge.transaction() as txn:
        txn.ack(batch[0])
        room.reader.leaving = [("revoke", [P])]
        room.consumer.poll()
        assert txn.state is State.FAILED
    assert txn.outcome is Outcome.ABORTED


def test_a_partition_that_leaves_from_inside_a_generator_of_items_lets_its_transaction_only_abort(room: Room) -> None:
    txn = room.bridge.transaction(timeout=3600)
    txn.ack(room.consumer.poll(1))
    room.reader.leaving = [("revoke", [P])]

    def items() -> Iterator[bytes]:
        yield b"1"
        room.consumer.poll()
        assert txn.state is State.FAILED
        yield b"2"

    with pytest.raises(errors.Conflict, match=r"t\[0\] left"):
        txn.send_many("out", items())
    txn.abort()


def test_an_ack_of_an_ended_assignment_is_a_conflict_also_when_the_partition_came_back(room: Room) -> None:
    batch = room.consumer.poll(2)
    room.reader.leaving, room.reader.coming = [("lost", [P])], [P]
    room.consumer.poll(1)
    with pytest.raises(errors.Conflict, match="left this consumer"), room.bridge.transaction() as txn:
        txn.ack(batch[0])
    assert txn.outcome is Outcome.ABORTED


def test_a_transaction_without_acks_of_it_is_not_disturbed_by_a_leaving_partition(room: Room) -> None:
    room.consumer.poll(2)
    with room.bridge.transaction() as txn:
        txn.send("out", b"1")
        room.reader.leaving = [("revoke", [P])]
        room.consumer.poll()
    assert txn.outcome is Outcome.COMMITTED


def unknown(room: Room, batch: Sequence[Message]) -> None:
    with room.bridge.transaction() as txn:
        pass  # opens the writers
    room.broker.writers[3].raises["commit"] = [errors.OutcomeUnknown("no answer")]
    with pytest.raises(errors.OutcomeUnknown), room.bridge.transaction() as txn:
        txn.ack(batch)


@pytest.mark.parametrize(("state", "expected"), [(TokenState.COMMITTED, [b"2"]), (TokenState.ABORTED, [b"0"])])
def test_reading_on_waits_until_an_unknown_outcome_is_known(room, state, expected):
    unknown(room, room.consumer.poll(2))
    with pytest.raises(errors.OutcomeUnknown) as caught:
        room.consumer.poll(1, timeout=0.1)
    assert caught.value.token
    room.broker.answers["status"] = [Status(state)]
    assert values(room.consumer.poll(1)) == expected


def test_a_value_that_cannot_be_decoded_is_raised_alone_and_in_its_place(room: Room) -> None:
    consumer = room.bridge.consumer(Topic("t", codecs.json), "h")
    room.broker.readers[-1].feed(b"1", b"{", b"[2]", b"{", b"3")
    assert values(consumer.poll()) == [1]
    with pytest.raises(errors.Poison) as caught:
        consumer.poll()
    assert caught.value.message.value == b"{"
    assert consumer.positions() == {P: (2,)}
    room.ack(caught.value.message)  # it was delivered, so it can be set aside
    assert values(consumer.poll(1)) == [[2]]
    with pytest.raises(errors.Poison):
        consumer.poll()
    assert values(consumer.poll()) == [3]


def test_a_message_is_decoded_again_after_its_codecs_registry_was_down(room: Room) -> None:
    class Registry:
        answers = iter([b"1", ConnectionError(), ConnectionError(), b"2", b"3"])

        def encode(self, obj: object, context: object) -> bytes:
            raise NotImplementedError

        def decode(self, data: bytes, context: object) -> object:
            if isinstance(answer := next(self.answers), Exception):
                raise answer
            return answer

    consumer = room.bridge.consumer(Topic("t", Registry()), "h")
    room.broker.readers[-1].feed(b"1", b"2", b"3")
    assert values(consumer.poll()) == [b"1"]
    with pytest.raises(errors.BrokerUnavailable, match=r"codec of t raised ConnectionError"):
        consumer.poll()
    assert values(consumer.poll()) == [b"2", b"3"]


def test_a_batch_waits_to_become_full_and_stops_before_poison(room: Room) -> None:
    consumer = room.bridge.consumer(Topic("t", codecs.json), "h")
    room.broker.readers[-1].feed(b"1", b"2", b"{", b"4")
    batches = consumer.batches(max_messages=10, max_wait=0.05)
    assert values(next(batches)) == [1, 2]
    with pytest.raises(errors.Poison):
        next(batches)
    assert values(next(consumer.batches(max_messages=1))) == [4]


def test_seeking_forgets_what_was_delivered_and_is_refused_while_acks_are_held(room: Room) -> None:
    batch = room.consumer.poll()
    with room.bridge.transaction() as txn:
        txn.ack(batch[0])
        with pytest.raises(errors.InvalidState, match=txn.id):
            room.consumer.seek({P: (0,)})
    room.consumer.seek({P: (3,)})
    assert values(room.consumer.poll()) == [b"3", b"4"]
    with room.bridge.transaction() as txn, pytest.raises(errors.InvalidState):
        txn.ack(batch[1])


def test_places_that_no_partition_has_are_refused_and_the_consumer_goes_on(room: Room) -> None:
    for partitions in ("t", ["t"], 5, [["t", 0]]):
        for call in (room.consumer.pause, room.consumer.resume):
            with pytest.raises(errors.InvalidOption, match="list of"):
                call(partitions)  # type: ignore[arg-type]
    for position in ((1 << 63,), 5, "5", (True,)):
        with pytest.raises(errors.InvalidOption, match="positions"):
            room.consumer.seek({P: position})  # type: ignore[dict-item]
    assert len(room.consumer.poll()) == 5


def test_a_nacked_message_cannot_be_acknowledged_and_goes_back_to_the_reader(room: Room) -> None:
    batch = room.consumer.poll()
    room.consumer.nack(batch[1:3])
    assert room.reader.nacked == [{P: [(1,), (2,)]}]
    with room.bridge.transaction() as txn, pytest.raises(errors.InvalidState):
        txn.ack(batch[1])
    with pytest.raises(errors.InvalidState):
        room.consumer.nack(batch[1])


def test_a_nack_gives_back_what_is_left_and_tells_what_does_not_come_again(room: Room) -> None:
    batch = room.consumer.poll()
    room.ack(batch[0])
    room.ack(batch[1], abort=True)
    with pytest.raises(errors.InvalidState, match=r"^1 messages are ack.*t\[0\] at \(0,\)"):
        room.consumer.nack([*batch[:4], batch[3]])
    assert room.reader.nacked == [{P: [(2,), (3,)]}]
    room.reader.leaving = [("revoke", [P])]
    room.consumer.poll()
    room.consumer.nack(batch[1:])
    assert room.reader.nacked[1:] == [{}]
    with room.bridge.consumer("t", "other") as other, pytest.raises(errors.InvalidState):
        other.nack(batch[4])


def test_a_program_that_never_acknowledges_is_told_so(room: Room, with_timing: Callable[..., None]) -> None:
    with_timing(unacked_messages=5)
    room.reader.feed(*(b"%d" % number for number in range(5, 12)))
    for _ in range(2):
        room.ack(room.consumer.poll(4))  # what is acknowledged does not count
    room.consumer.poll(2)
    with room.bridge.transaction():
        room.consumer.seek({P: (0,)})  # nor does what is forgotten
    room.consumer.poll(5)
    with pytest.raises(errors.InvalidState, match="5 messages were delivered to group 'g' and not acknowledged"):
        room.consumer.poll(1)


def test_closing_a_consumer_leaves_its_group_and_ends_its_deliveries(room: Room) -> None:
    batch = room.consumer.poll()
    room.consumer.close()
    room.consumer.close()
    assert "close" in room.reader.calls
    with pytest.raises(errors.InvalidState, match="closed"):
        room.consumer.poll()
    with pytest.raises(errors.Conflict), room.bridge.transaction() as txn:
        txn.ack(batch[0])


@pytest.mark.parametrize(
    ("capability", "use"),
    [
        (Capability.REDELIVERY, lambda room: room.consumer.nack([])),
        (Capability.REPLAY, lambda room: room.consumer.seek({})),
        (Capability.START_BY_TIME, lambda room: room.consumer.seek(5)),
        (Capability.START_BY_TIME, lambda room: room.bridge.consumer("t", "x", start=5)),
        (Capability.SHARE_MESSAGE, lambda room: room.bridge.consumer("t", "x", sharing="message")),
        (Capability.SHARE_KEY, lambda room: room.bridge.consumer("t", "x", sharing="key")),
        (Capability.PREPARE, lambda room: room.bridge.transaction(prepare=True)),
        (Capability.RESUME_SEQUENCE, lambda room: room.bridge.publisher("p")),
        (Capability.DECISION_LOG, lambda room: room.bridge.decisions()),
    ],
)
def test_a_capability_that_the_broker_lacks_is_refused_on_use(capability: Capability, use) -> None:
    room = Room(capability)
    with room.bridge, pytest.raises(errors.NotSupported, match="a test says so"):
        use(room)


def test_an_unknown_outcome_is_not_forgotten_when_the_next_transaction_ends(room: Room) -> None:
    batch = room.consumer.poll(3)
    unknown(room, batch[:1])
    room.ack(batch[1])
    with pytest.raises(errors.OutcomeUnknown):
        room.consumer.poll(1, timeout=0.1)
    room.broker.answers["status"] = [Status(TokenState.ABORTED)]
    assert values(room.consumer.poll(1)) == [b"0"]


def test_going_back_is_tried_again_until_it_succeeds(room: Room) -> None:
    room.ack(room.consumer.poll(3), abort=True)
    room.reader.acts["seek"] = raising(errors.BrokerUnavailable("away"))
    with pytest.raises(errors.BrokerUnavailable):
        room.consumer.poll()
    room.reader.acts.clear()
    assert values(room.consumer.poll()) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_failed_seek_that_moves_a_reader_without_a_group_skips_nothing(room: Room) -> None:
    with room.bridge.consumer("t") as consumer:
        reader = room.broker.readers[1]

        def move_and_fail() -> None:
            reader.next[P] = 3
            raise errors.BrokerUnavailable("away")

        reader.feed(b"0", b"1", b"2", b"3")
        assert values(consumer.poll(1)) == [b"0"]
        reader.acts["seek"] = move_and_fail
        with pytest.raises(errors.BrokerUnavailable):
            consumer.seek({P: (3,)})
        reader.acts.clear()
        assert consumer.positions() == {P: (1,)}
        assert values(consumer.poll()) == [b"1", b"2", b"3"]


def test_a_loop_that_is_left_has_taken_what_it_was_given_and_no_more(room: Room) -> None:
    for message in room.consumer:
        if message.value == b"1":
            break
    assert room.consumer.positions() == {P: (2,)}
    assert values(room.consumer.poll()) == [b"2", b"3", b"4"]


def test_in_a_loop_an_aborted_message_comes_again_before_the_next_one(room: Room) -> None:
    seen = []
    for message in room.consumer:
        seen.append(message.value)
        with room.bridge.transaction() as txn:
            txn.ack(message)
            if len(seen) == 2:
                raise errors.Abort
        if len(seen) == 4:
            break
    assert seen == [b"0", b"1", b"1", b"2"]


def test_the_bound_of_unacknowledged_messages_costs_no_message(room: Room, with_timing: Callable[..., None]) -> None:
    with_timing(unacked_messages=3)
    first = room.consumer.poll(500)
    assert values(first) == [b"0", b"1", b"2"]
    with pytest.raises(errors.InvalidState, match="3 messages were delivered"):
        room.consumer.poll()
    room.ack(first)
    assert values(room.consumer.poll()) == [b"3", b"4"]


def test_a_batch_is_full_with_as_many_messages_as_may_be_unacknowledged(room: Room, with_timing) -> None:
    with_timing(unacked_messages=3)
    assert values(next(room.consumer.batches(max_messages=500, max_wait=3600))) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("aborted", [True, False])
def test_a_broker_of_positions_takes_no_ack_behind_an_aborted_message_or_an_unknown_outcome(in_order, aborted):
    first, second = in_order.consumer.poll(2)
    in_order.ack(first, abort=True) if aborted else unknown(in_order, [first])
    reason = r"\(0,\) of t\[0\] was given back and comes again" if aborted else "is not known yet"
    with in_order.bridge.transaction() as txn:
        with pytest.raises(errors.InvalidState, match=reason):
            txn.ack(second)
        txn.send("out", b"1")  # a refusal, no failure


def test_a_dropped_consumer_leaves_its_group(room: Room) -> None:
    reader = room.reader
    batch = room.consumer.poll(2)
    with room.bridge.transaction() as txn:
        txn.ack(batch[0])
        del room.consumer  # the transaction holds what it read, so it stays
        txn.ack(batch[1])
        assert "close" not in reader.calls
    del txn
    wait_until(lambda: "close" in reader.calls)
    with pytest.raises(errors.Conflict, match="left this consumer"), room.bridge.transaction() as txn:
        txn.ack(batch[0])


def test_a_dropped_consumer_leaves_its_group_also_if_no_thread_could_be_started_at_its_opening(no_threads) -> None:
    refused, room = no_threads(0), Room()
    with room.bridge:
        room.bridge.consumer("t", "g")
        wait_until(lambda: refused and "close" in room.broker.readers[1].calls)


def test_a_closing_bridge_closes_what_was_dropped_and_once(room: Room) -> None:
    readers = [room.reader]
    for _ in range(20):
        room.bridge.consumer("t", "g")
        readers.append(room.broker.readers[-1])
    room.bridge.close()
    assert [reader.calls.count("close") for reader in readers] == [1] * 21


def test_a_paused_partition_delivers_nothing_that_was_fetched_before(room: Room) -> None:
    assert next(iter(room.consumer)).value == b"0"
    room.consumer.pause([P])
    assert not room.consumer.poll(timeout=0)
    room.consumer.resume([P])
    assert values(room.consumer.poll()) == [b"1", b"2", b"3", b"4"]


def test_columns_are_for_readers_without_a_group(room: Room) -> None:
    with pytest.raises(errors.InvalidState, match="without a group"):
        room.consumer.poll_columns()
    with pytest.raises(errors.InvalidOption, match="whole number from 1"):
        room.bridge.consumer("t").poll_columns(0)


@pytest.mark.parametrize("close", [lambda room: room.consumer.close(0.1), lambda room: room.bridge.close()])
def test_closing_waits_for_the_commit_of_its_acknowledgements_no_longer_than_its_own_timeout(room, close):
    hold = room.broker.acts["commit"] = Hold()
    txn = room.bridge.transaction(timeout=60)
    txn.ack(room.consumer.poll())
    with hold.asked_by(txn.commit):
        close(room)
        assert "close" in room.reader.calls
    txn.abort()


def test_a_transaction_whose_consumer_is_closed_during_a_send_cannot_commit(room):
    hold = room.broker.acts["send"] = Hold(bool)
    txn = room.bridge.transaction(timeout=60)
    txn.ack(room.consumer.poll())
    with hold.asked_by(lambda: txn.send("t", b"1")):
        room.consumer.close(0.1)
    with pytest.raises(errors.InvalidState, match="left this consumer"):
        txn.commit()
    txn.abort()


def test_a_poll_that_outlasts_its_bridge_is_the_last_one(room, with_timing):
    with_timing(closing_polls=0.0)
    hold = room.reader.acts["poll"] = Hold(bool)
    with hold.asked_by(room.consumer.poll):
        room.bridge.close()
    wait_until(lambda: room.reader.calls.count("close") == 1)
    with pytest.raises(errors.InvalidState, match="closed"):
        room.consumer.poll()


def test_a_call_is_refused_from_the_first_moment_of_another_one_on(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def meanwhile() -> None:
        monkeypatch.undo()
        with ThreadPoolExecutor() as pool:
            for poll in (room.consumer.poll, lambda: pool.submit(room.consumer.poll).result(60)):
                with pytest.raises(errors.InvalidState, match="one thread at a time"):
                    poll()
                refused.append(poll)

    on_call(monkeypatch, room.consumer._deliveries, "recover", meanwhile)
    assert values(room.consumer.poll(2)) == [b"0", b"1"]
    assert len(refused) == 2
    assert values(room.consumer.poll(2)) == [b"2", b"3"]


@pytest.mark.parametrize("left", ["leaves", "cannot leave"])
def test_an_exception_of_another_library_closes_the_consumer(room, left):
    with pytest.raises(errors.Conflict), room.bridge.transaction() as txn:
        txn.ack(room.consumer.poll(1))
        room.reader.acts["poll"] = raising(KeyboardInterrupt)
        if left != "leaves":
            room.reader.acts["close"] = raising(errors.BrokerUnavailable("away"))
        with pytest.raises(KeyboardInterrupt):
            room.consumer.poll(10)
    assert (txn.outcome, room.reader.calls.count("close")) == (Outcome.ABORTED, left == "leaves")
    with pytest.raises(errors.InvalidState, match="was interrupted in the middle of a call; open another"):
        room.consumer.poll()
    room.consumer.close()
    room.reader.acts.clear()
    assert values(room.bridge.consumer("t", "g").poll(timeout=0)) == []  # the bridge goes on


def test_a_call_with_wrong_arguments_closes_no_consumer_and_fails_no_transaction(room: Room) -> None:
    with room.bridge.transaction() as txn:
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'positions'"):
            room.consumer.seek()  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'items'"):
            txn.send_many("t")  # type: ignore[call-arg]
        room.consumer.poll(1)
    assert txn.outcome is Outcome.COMMITTED


def test_consumers_are_closed_side_by_side(room: Room) -> None:
    consumers = [room.consumer, *(room.bridge.consumer("t", "g") for _ in range(2))]
    room.broker.acts["close"] = partial(threading.Barrier(len(consumers)).wait, 60)  # one after the other never pass it
    room.bridge.close()
    wait_until(lambda: all("close" in reader.calls for reader in room.broker.readers))


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_an_invalid_timeout_is_refused_even_when_a_message_is_at_hand(room: Room, timeout: Any) -> None:
    next(iter(room.consumer))
    with pytest.raises(errors.InvalidOption, match="timeout is a number of seconds"):
        room.consumer.poll(timeout=timeout)
