"""Each message is acknowledged once, none is skipped and none overtaken, whatever fails in whatever order.

A consumer of the toy backend is driven at random beside a model that knows what was handed out and what was really
committed. Each call of the backend may fail, before or after it has had its effect.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import txnbridge
from tests.core.toy import ToyBackend, ToyBroker, ToyReader, ToyWriter, connect_toy
from tests.inside import reader_of, writer_of
from txnbridge import Capability, Message, State, Status, TokenState, Topic, Transaction, codecs, errors
from txnbridge.spi import NO_HEADERS, Deadline, Partition, Position, Subscription, absent

PARTITIONS = [("t", 0), ("t", 1)]
CALLS = ["poll", "seek", "nack", "ack_context", "ack", "prepare", "commit", "abort", "status"]


class World:
    """The stored messages, those that the group has really acknowledged, and those that the program holds."""

    def __init__(self, individual: bool) -> None:
        self.individual = individual
        self.stored = dict.fromkeys(PARTITIONS, 0)
        self.first = dict.fromkeys(PARTITIONS, 0)  # retention has removed what lies before
        self.floor = dict.fromkeys(PARTITIONS, 0)  # the user has moved there: what lies before may be left out
        self.acked: dict[Partition, set[int]] = {partition: set() for partition in PARTITIONS}
        # Handed out, and not come back since; another set for each stay.
        self.given: dict[Partition, set[int]] = {partition: set() for partition in PARTITIONS}
        # Acknowledged, the stays of what was, and the floor then.
        self.prepared: dict[
            str, tuple[dict[Partition, set[int]], list[tuple[set[int], set[int]]], dict[Partition, int]]
        ] = {}
        self.failing: dict[str, bool] = {}  # the next call of that name fails; whether after its effect
        self.outcomes: dict[str, TokenState] = {}
        self.answers = True  # when asked for outcomes
        self.impatient = False  # an empty poll fails

    def call(self, name: str, effect: Callable[[], Any] = lambda: None) -> Any:
        late = self.failing.pop(name, None)
        if late is False:
            raise errors.BrokerUnavailable(f"{name} fails")
        result = effect()
        if late:
            raise errors.BrokerUnavailable(f"{name} fails when it is done")
        return result

    def commit(self, acks: Mapping[Partition, set[int]], floor: Mapping[Partition, int] | None = None) -> None:
        """Acknowledge messages; `floor` is where the user had moved when a prepared transaction did so."""
        for partition, offsets in acks.items():
            done = self.acked[partition]
            assert not offsets & done, f"{offsets & done} of {partition} were acknowledged twice"
            if not self.individual:
                passed = set(range(max(done, default=-1) + 1, max(offsets))) - offsets
                skipped = {offset for offset in passed if offset >= self.begin(partition, floor)}
                assert not skipped, f"{skipped} of {partition} were skipped by acknowledging {offsets}"
                done |= passed
            done |= offsets

    def begin(self, partition: Partition, floor: Mapping[Partition, int] | None = None) -> int:
        return max((floor or self.floor)[partition], self.first[partition])

    def hand_out(self, message: Message, ordered: bool) -> None:
        partition, (offset,) = message[:2], message.position
        assert offset not in self.acked[partition], f"{message} was acknowledged before it was handed out"
        if ordered:
            before = set(range(self.begin(partition), offset)) - self.acked[partition] - self.given[partition]
            assert not before, f"{message} overtook {before}"
        self.given[partition].add(offset)

    def leave(self, partition: Partition, floor: int) -> None:
        self.floor[partition], self.given[partition] = floor, set()


class WorldReader(ToyReader):
    def __init__(self, world: World, subscription: Subscription, listener: Any) -> None:
        super().__init__(subscription, listener)
        self.world = world
        self.coming = list(PARTITIONS)
        self.returned: dict[Partition, set[int]] = {partition: set() for partition in PARTITIONS}
        self.looking_up: set[Partition] = set()  # where the group's position is asked for, which is then decided

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        for how, partitions in self.leaving:
            (self.listener.revoking if how == "revoke" else self.listener.lost)(partitions)
            self.coming += partitions
        self.leaving = []
        for partition in self.coming:
            self.sources[partition] = self.listener.assigned(partition)
            self.next[partition] = 0
            self.returned[partition].clear()
            self.looking_up.add(partition)
            self.world.leave(partition, floor=0)
        self.coming = []
        self.world.call("poll")
        found: list[Message] = []
        for partition in self.sources:
            try:
                found += self._read(partition, max_messages - len(found))
            except errors.PositionLost:
                if not found:
                    raise
        if self.world.impatient and not found:
            raise errors.BrokerUnavailable("nothing is left")
        return found

    def _read(self, partition: Partition, count: int) -> list[Message]:
        if partition in self.looking_up and any(partition in acks for acks, _, _ in self.world.prepared.values()):
            return []
        self.looking_up.discard(partition)
        again = sorted(self.returned[partition] - self.world.acked[partition])[:count]
        self.returned[partition].difference_update(again)
        offsets = list(again)
        at = self.next[partition]
        while at < self.world.stored[partition] and len(offsets) < count:
            if at not in self.world.acked[partition]:
                if at < self.world.first[partition]:
                    if not offsets:
                        raise errors.PositionLost("retention has passed it")
                    break
                offsets.append(at)
            at += 1
        self.next[partition] = at
        source, (topic, number) = self.sources[partition], partition
        return [Message(topic, number, (o,), None, _value(o), NO_HEADERS, 0, 1, source) for o in offsets]

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        for partition, (offset,) in positions.items():
            if offset < self.world.first[partition]:
                raise errors.PositionLost("retention has passed it")

        def move() -> None:
            for partition, (offset,) in positions.items():
                self.next[partition] = offset
                self.looking_up.add(partition)
                self.returned[partition] = {each for each in self.returned[partition] if each < offset}

        self.world.call("seek", move)

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            self.world.given[partition].difference_update(offset for (offset,) in given)

        def give_back() -> None:
            for partition, given in positions.items():
                if self.world.individual:
                    self.returned[partition].update(offset for (offset,) in given)
                else:
                    self.next[partition] = min(given)[0]

        self.world.call("nack", give_back)

    def ack_context(self) -> object:
        return self.world.call("ack_context", lambda: "proof")


def _value(offset: int) -> bytes:
    return b"{" if offset % 7 == 5 else b"%d" % offset  # some cannot be decoded


class WorldWriter(ToyWriter):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def begin(self, begin: Any) -> None:
        super().begin(begin)
        self.transaction = begin.transaction
        self.acks: dict[Partition, set[int]] = {}
        self.stays: list[tuple[set[int], set[int]]] = []

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert context == "proof"
        for partition, given in positions.items():
            offsets = {offset for (offset,) in given}
            self.acks.setdefault(partition, set()).update(offsets)
            self.stays.append((self.world.given[partition], offsets))
        self.world.call("ack")

    def commit(self, deadline: Deadline) -> None:
        def publish() -> None:
            self.world.commit(self.acks)
            self.world.outcomes[self.transaction] = TokenState.COMMITTED

        try:
            self.world.call("commit", publish)
        except errors.BrokerUnavailable as error:
            if self.transaction not in self.world.outcomes:
                self.come_back()
            raise errors.OutcomeUnknown("no answer") from error

    def prepare(self, deadline: Deadline) -> None:
        def hold() -> None:
            self.world.prepared[self.transaction] = self.acks, self.stays, dict(self.world.floor)

        self.world.call("prepare", hold)

    def abort(self, deadline: Deadline) -> None:
        self.world.prepared.pop(self.transaction, None)
        self.come_back()
        self.world.call("abort")

    def come_back(self) -> None:
        self.world.outcomes[self.transaction] = TokenState.ABORTED
        for stay, offsets in self.stays:
            stay -= offsets


class WorldBroker(ToyBroker):
    world: World

    def open_writers(self, identity: Any, count: int, ledger: Any, deadline: Deadline) -> Any:
        return [WorldWriter(self.world) for _ in range(count)]

    def prepare_writer(self, *_: Any) -> WorldWriter:
        return WorldWriter(self.world)

    def reader(self, subscription: Subscription, listener: Any, deadline: Deadline) -> WorldReader:
        return WorldReader(self.world, subscription, listener)

    def status(self, token: Any, ledger: Any, deadline: Deadline) -> Status:
        known = self.world.answers and self.world.outcomes[token.transaction]
        return self.world.call("status", lambda: Status(known or TokenState.UNKNOWN))  # type: ignore[no-any-return]


class WorldBackend(ToyBackend):
    def open(self, *args: Any) -> WorldBroker:
        broker = WorldBroker(self.capabilities)
        self.brokers.append(broker)
        return broker


class Program(RuleBasedStateMachine):
    """A program that uses a consumer and one transaction at a time in every allowed way, while the world fails."""

    individual = True
    sharing = "partition"

    @initialize(counts=st.tuples(st.integers(1, 20), st.integers(0, 20)))
    def open(self, counts: tuple[int, int]) -> None:
        self.world = World(self.individual)
        self.bridge, broker = connect_toy(
            WorldBackend({} if self.individual else {Capability.INDIVIDUAL_ACK: absent("a test says so")}), timeout=0.02
        )
        assert isinstance(broker, WorldBroker)
        broker.world = self.world
        self.consumer = self.bridge.consumer(Topic("t", codecs.json), "g", sharing=self.sharing)
        self.delivered: list[Message] = []
        self.transaction: Transaction | None = None
        for partition, count in zip(PARTITIONS, counts, strict=True):
            self.world.stored[partition] = count

    # --- what the world does

    @rule(partition=st.sampled_from(PARTITIONS), count=st.integers(1, 10))
    def write(self, partition: Partition, count: int) -> None:
        self.world.stored[partition] += count

    @rule(call=st.sampled_from(CALLS), late=st.booleans())
    def fail_next(self, call: str, late: bool) -> None:
        self.world.failing[call] = late

    @rule(answers=st.booleans())
    def reach(self, answers: bool) -> None:
        self.world.answers = answers

    @rule(partition=st.sampled_from(PARTITIONS), count=st.integers(1, 3))
    def remove(self, partition: Partition, count: int) -> None:
        self.world.first[partition] = min(self.world.first[partition] + count, self.world.stored[partition])

    @rule(partition=st.sampled_from(PARTITIONS), how=st.sampled_from(["revoke", "lost"]))
    def leave(self, partition: Partition, how: str) -> None:
        """Take a partition away, which comes back with the next poll that reaches the reader."""
        if not self.reader.leaving:
            self.reader.leaving = [(how, [partition])]

    @property
    def reader(self) -> WorldReader:
        reader = reader_of(self.consumer)
        assert isinstance(reader, WorldReader)
        return reader

    # --- what the program does

    @rule(count=st.integers(1, 8))
    def poll(self, count: int) -> None:
        self.take(lambda: self.consumer.poll(count, timeout=0))

    @rule(count=st.integers(1, 8))
    def fill(self, count: int) -> None:
        self.take(lambda: next(self.consumer.batches(count, max_wait=0)), impatient=True)

    @rule(count=st.integers(1, 4))
    def iterate(self, count: int) -> None:
        messages = iter(self.consumer)
        for _ in range(count):
            self.take(lambda: [next(messages)], impatient=True)

    def take(self, read: Callable[[], Sequence[Message]], impatient: bool = False) -> bool:
        """Whether anything came."""
        self.world.impatient = impatient
        try:
            messages = read()
        except errors.Poison as poison:
            messages = [poison.message]
        except (errors.BrokerUnavailable, errors.OutcomeUnknown, errors.PositionLost, StopIteration):
            return False
        for message in messages:
            self.world.hand_out(message, self.sharing == "partition")
        self.delivered += messages
        return bool(messages)

    @rule(data=st.data(), how=st.sampled_from(["ack", "ack", "ack_up_to", "nack"]))
    def use(self, data: st.DataObject, how: str) -> None:
        """Acknowledge or give back what was delivered at some time. A refused acknowledgement changes nothing."""
        if not self.delivered:
            return
        latest = len(self.delivered) - 1
        first = latest - data.draw(st.integers(0, min(latest, 12)))
        chosen = self.delivered[first : first + data.draw(st.integers(1, 5))]
        with suppress(errors.BrokerUnavailable, errors.InvalidState, errors.Conflict):
            if how == "nack":
                self.consumer.nack(chosen)
            elif self.transaction is not None:
                self.transaction.ack(chosen) if how == "ack" else self.transaction.ack_up_to(chosen[-1])

    @precondition(lambda self: self.transaction is None)
    @rule()
    def begin(self) -> None:
        self.transaction = self.bridge.transaction()
        self.transaction._begin.deadline.at = 0  # so that only the consumer asks for lost outcomes

    @precondition(lambda self: self.transaction is not None)
    @rule(how=st.sampled_from(["commit", "commit", "abort"]))
    def end(self, how: str) -> None:
        txn, self.transaction = self.transaction, None
        assert txn is not None
        with suppress(errors.OutcomeUnknown, errors.BrokerUnavailable):
            txn.commit() if how == "commit" and txn.state is State.OPEN else txn.abort()

    @precondition(lambda self: self.transaction is not None)
    @rule()
    def drop(self) -> None:
        assert self.transaction is not None
        writer = writer_of(self.transaction)
        assert isinstance(writer, WorldWriter)
        writer.come_back()
        dropped = weakref.ref(self.transaction)
        self.transaction = None
        if dropped() is not None:  # what failed in it refers to it
            gc.collect()
        assert dropped() is None

    @rule(partition=st.sampled_from(PARTITIONS), offset=st.integers(0, 30))
    def seek(self, partition: Partition, offset: int) -> None:
        if partition not in self.reader.sources:
            return
        if self.sharing != "partition":
            self.world.failing.pop("seek", None)  # nobody knows then where the reader stands
        with suppress(errors.BrokerUnavailable, errors.OutcomeUnknown, errors.PositionLost, errors.InvalidState):
            self.consumer.seek({partition: (offset,)})
            self.world.leave(partition, floor=offset)

    # --- and in the end

    def teardown(self) -> None:
        """Everything that is left comes once nothing fails any more, is acknowledged, and nothing is missing."""
        if not hasattr(self, "world"):
            return
        self.world.failing.clear()
        self.world.answers = True
        if self.transaction is not None:
            self.transaction.abort()
        with self.bridge:
            quiet = 0
            while quiet < 3:
                for partition in PARTITIONS:
                    if self.is_lost(partition):
                        self.seek(partition, self.world.first[partition])
                quiet = 0 if self.use_all() else quiet + 1
        for partition, acked in self.world.acked.items():
            missing = set(range(self.world.begin(partition), self.world.stored[partition])) - acked
            assert not missing, f"{missing} of {partition} never came"

    def use_all(self) -> bool:
        came = self.take(lambda: self.consumer.poll(100, timeout=0))
        with self.bridge.transaction() as txn:
            for message in self.delivered:
                if not message.source.ended:
                    with suppress(errors.InvalidState):
                        txn.ack(message)
        return came

    def is_lost(self, partition: Partition) -> bool:
        """Whether the group would go on before what retention has left."""
        at = self.consumer.positions().get(partition, (0,))[0]
        return at < self.world.first[partition]


class InOrder(Program):
    """A broker that knows positions only."""

    individual = False

    @precondition(lambda self: self.transaction is None)
    @rule(count=st.integers(1, 4))
    def prepare(self, count: int) -> None:
        """Leave messages to a transaction that is decided later, by another process."""
        came = len(self.delivered)
        if not self.take(lambda: self.consumer.poll(count, timeout=0)):
            return
        txn = self.bridge.transaction(prepare=True, timeout=60)
        refused = errors.TransactionAborted, errors.InvalidState, errors.Conflict
        with suppress(errors.OutcomeUnknown, errors.BrokerUnavailable, *refused), txn:
            txn.ack(self.delivered[came:])

    @precondition(lambda self: self.world.prepared)
    @rule(commit=st.booleans())
    def decide(self, commit: bool) -> None:
        acks, stays, floor = self.world.prepared.pop(next(iter(self.world.prepared)))
        if commit:
            self.world.commit(acks, floor)
        for stay, offsets in () if commit else stays:
            stay -= offsets

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.failing.clear()
            self.use_all()  # behind what is prepared nothing comes, or the aborted messages would be skipped
            while self.world.prepared:
                self.decide(commit=False)
        super().teardown()


class Shared(Program):
    """Members share a partition message by message."""

    sharing = "message"


@pytest.mark.filterwarnings("ignore:transaction .* was left unfinished:ResourceWarning")
@pytest.mark.parametrize("program", [Program, InOrder, Shared])
def test_each_message_is_acknowledged_once_whatever_fails(program, caplog):
    caplog.set_level(logging.CRITICAL, "txnbridge")  # what is logged is kept, and with it what was dropped
    gc.freeze()  # so that a collection looks only at what the program makes, and not at all that the process has
    found = settings(stateful_step_count=40)
    run_state_machine_as_test(program, settings=found)


def test_an_abort_while_the_reader_is_behind_what_it_held_skips_nothing_in_between(tmp_path: Path) -> None:
    with txnbridge.connect(f"embedded:{tmp_path}/a.db") as bridge, bridge.consumer("t", "g") as consumer:
        with bridge.transaction() as txn:
            txn.send_many("t", [b"0", b"1", b"2", b"3", b"4"])
        one_by_one = iter(consumer)  # it fetches all
        messages = [next(one_by_one) for _ in range(4)]
        txn = bridge.transaction()
        txn.ack(messages[3])
        consumer.nack([messages[2]])
        # The reader goes back to the first message that is not acknowledged, and reads only that.
        again = consumer.poll(1, 60)
        txn.abort()
        with bridge.transaction() as txn:
            txn.ack(again)
        assert again[0].value == b"0"
        assert [consumer.poll(1, 60)[0].value for _ in range(4)] == [b"1", b"2", b"3", b"4"]
