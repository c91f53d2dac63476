"""Members of a shared group acknowledge parts of one entry in transactions, in every order, at a model of the broker.

The model compares acknowledgements as brokers of 4.2.4 do, seen with raw ACK commands on real ones: test_acks.py has
the same sequences.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from txnbridge_pulsar.client import EARLIEST, MessageBatch, PulsarConsumer, ReceivedEntry, SubscriptionType, TxnId
from txnbridge_pulsar.client.connecting.connection import Response
from txnbridge_pulsar.client.consumer import ConsumerOptions
from txnbridge_pulsar.client.errors import RequestTimedOut, server_error
from txnbridge_pulsar.client.format.codec import encode
from txnbridge_pulsar.client.format.frames import parse, send_command
from txnbridge_pulsar.client.format.ids import ack_set
from txnbridge_pulsar.read.partition import BEGIN, PulsarPartition
from txnbridge_pulsar.read.subscriptions import mode_of
from txnbridge_pulsar.write.acks import PulsarAckContext, SentAcks, finish_entries

from tests.failing import raising
from txnbridge import TxnBridgeError
from txnbridge.errors import Conflict
from txnbridge.spi import Deadline, Subscription

pytestmark = pytest.mark.offline

SIZE, ALL = 3, (0, 1, 2)
KEY, SOON = ("t", 0), Deadline(3600)


def made_entry() -> bytes:
    batch = MessageBatch()
    batch.extend([b"%d" % index for index in ALL])
    described = {"producer_name": "p", "sequence_id": 1, "publish_time": 1, **batch.metadata()}
    return parse(
        send_command({"producer_id": 1, "sequence_id": 1}, encode("MessageMetadata", described), batch.body())[4:]
    ).tail


ENTRY = made_entry()


class Broker:
    """One entry of a shared subscription, and the transactions that acknowledge it.

    Bits are 1 for indexes that are not acknowledged. `cursor` has the bits of committed transactions, and `pending`
    those of all transactions, with the batch size of the last one; its bits are None if an entry is pending whole.
    """

    closed = False

    def __init__(self) -> None:
        self.cursor: int | None = None
        self.pending: tuple[int | None, int] | None = None
        self.is_deleted = False
        self.records: dict[int, int | None] = {}
        self.deliveries = self.asked = self.redelivered = 0
        self.transactions = self
        self._numbers = itertools.count(1)

    # --- what the client asks for

    def begin(self, *_: Any) -> TxnId:
        return TxnId(0, next(self._numbers))

    def register(self, *_: Any, **__: Any) -> None:
        pass

    def request(self, name: str, _: Any, message_id: Any, txnid_least_bits: int, **__: Any) -> Response:
        (fields,) = message_id
        self.asked += 1
        bits = sum((word & (1 << 64) - 1) << 64 * at for at, word in enumerate(fields["ack_set"]))
        response = Response(lambda: None, name, "ack_response")
        answer = self._acknowledge(txnid_least_bits, bits if fields["ack_set"] else None, fields["batch_size"])
        response.resolve({} if answer is None else answer)
        return response

    def _acknowledge(self, txn: int, bits: int | None, size: int) -> Any:
        if self.is_deleted:
            return server_error(23, "already acked before.")
        if bits is None:
            if self.pending is not None:
                return server_error(23, "in pending ack status.")
            self.pending = None, size
        else:
            compared = bits | max(1 << size, 1 << 64 * words(bits)) - (1 << size)
            if self.cursor is not None and overlap(compared, self.cursor):
                return server_error(23, "already acked before.")
            if self.pending is None:
                self.pending = bits, size
            elif (held := self.pending[0]) is None:
                self.records[txn] = bits  # a null pointer follows
                return RequestTimedOut("no answer")
            elif overlap(held, compared):
                return server_error(23, "in pending ack status.")
            else:
                self.pending = held & bits, size
            if (own := self.records.get(txn)) is not None:
                bits &= own
        self.records[txn] = bits
        return None

    def post(self, frame: bytes) -> None:
        command = parse(frame[4:])
        self.redelivered += command.name == "redeliver"
        if command.name == "ack":
            assert "ack_set" not in command.fields["message_id"][0] and "txnid_least_bits" not in command.fields
            self._delete()

    def end(self, txn: TxnId, commit: bool, *_: Any) -> None:
        if txn.least not in self.records:
            return
        bits = self.records[txn.least]
        if not commit and bits is not None and self.pending is not None and self.pending[0] is None:
            return  # the abort fails, and is repeated later
        del self.records[txn.least]
        if not commit:
            if bits is None or self.pending is None:
                self.pending = None
            else:
                held, size = self.pending
                assert held is not None
                held |= bits ^ (1 << size) - 1
                self.pending = None if held.bit_count() == size else (held, size)
        elif bits is None:
            self._delete()
        elif not self.is_deleted:
            self.cursor = bits if self.cursor is None else self.cursor & bits
            if not self.cursor:
                self._delete()

    def _delete(self) -> None:
        self.is_deleted, self.pending = True, None

    # --- what it delivers

    def deliver(self, member: Member) -> None:
        bits = (1 << SIZE + 1) - 1 if self.cursor is None else self.cursor
        if self.pending is not None:
            bits &= self.pending[0] or 0
        if bits and not self.is_deleted:
            is_whole = self.cursor is None and self.pending is None
            left_out = [index for index in range(SIZE + 1) if not bits >> index & 1]
            member.receive([] if is_whole else ack_set(SIZE + 1, left_out), self.deliveries)
            self.deliveries += 1


def words(bits: int) -> int:
    return -(-bits.bit_length() // 64)


def overlap(one: int, other: int) -> bool:
    """Return whether the bits overlap, as `isAckSetOverlap` does: zero words at the end do not count."""
    return bool((one ^ (1 << 64 * words(one)) - 1) & (other ^ (1 << 64 * words(other)) - 1))


class Member:
    """A reader's partition and its acknowledgements; `done` are the messages that its transactions have committed."""

    def __init__(self, broker: Broker, type: SubscriptionType = SubscriptionType.SHARED) -> None:
        self.broker = broker
        inbox: Any = SimpleNamespace(wake=lambda: None)
        options = ConsumerOptions("g", type, EARLIEST, True, None, 0, "", True)
        self.consumer = PulsarConsumer(None, None, "t", options, inbox)  # type: ignore[arg-type]
        self.consumer._connection, self.consumer.lost = broker, None  # type: ignore[assignment]
        self.partition = PulsarPartition(KEY, "t", self.consumer, True, 100)
        self.partition.arrive(None, BEGIN)
        self.guard = threading.Lock()
        self.context = PulsarAckContext("g", True, {KEY: self.partition}, self.guard)
        self.done: list[int] = []
        self.opened: tuple[TxnId, SentAcks, list[int]] | None = None

    def receive(self, index_words: list[int], redeliveries: int) -> None:
        position = {"ledger_id": 7, "entry_id": 8}
        fields = {"message_id": position, "ack_set": index_words, "redelivery_count": redeliveries}
        self.partition.put(ReceivedEntry(self.consumer, self.consumer.generation, fields, ENTRY))
        while self.partition.ready:
            self.partition.take(SIZE)

    def acknowledge(self, part: Iterable[int]) -> None:
        held = self.partition._outstanding.get((7, 8), 0)
        mine = [index for index in part if held >> index & 1]
        if mine:
            txn = self.broker.begin()
            sent = self.context.acknowledge(txn, {KEY: [(7, 8, index) for index in mine]}, SOON)
            with suppress(TxnBridgeError):
                sent.settle(SOON)
            self.opened = txn, sent, mine

    def check_unfinished(self) -> None:
        for entry_id, (size, unknown, *_) in self.partition.unfinished.items():
            self.partition.unfinished[entry_id] = size, unknown, 0, 0.0
        self.finish_entries()

    def finish_entries(self) -> None:
        nowhere: Any = SimpleNamespace(ended=lambda *_: None)
        finish_entries(cast(Any, self.broker), nowhere, "g", self.partition, self.guard, SOON)

    def end(self, commit: bool, next_member: Member, is_told: bool = True) -> None:
        if self.opened is None:
            return
        (txn, sent, mine), self.opened = self.opened, None
        if commit and sent._error is None:
            self.broker.end(txn, True)
            self.done += mine
            sent.acknowledge_committed_entries()
        else:
            self.broker.end(txn, False)
            if is_told:
                sent.drop_rest_of_entries()
                self.partition.give_up([(7, 8)], delivered_again=False)
            self.partition.refused.clear()
            self.broker.deliver(next_member)
            self.partition._acked.clear()  # every delivery before the abort has arrived


def run(parts: Sequence[Iterable[int]], order: Iterable[int], aborting: int, is_told: bool, copies: int) -> None:
    broker = Broker()
    members = [Member(broker) for _ in parts]
    broker.deliveries = copies - 1
    for member in members[:copies]:
        broker.deliver(member)
    begun: set[int] = set()
    for number in order:
        if number in begun:
            members[number].end(number != aborting, members[number - 1], is_told)
            for member in members:
                member.check_unfinished()
        else:
            begun.add(number)
            members[number].acknowledge(parts[number])
    for _ in ALL:  # members acknowledge what they have, and entries come again when a member leaves
        for txn in list(broker.records):  # an abort that had failed is repeated
            broker.end(TxnId(0, txn), False)
        for number, member in enumerate(members):
            member.acknowledge(ALL)
            member.end(True, members[number - 1])
            member.check_unfinished()
        broker.deliver(members[0])
    assert sorted(index for member in members for index in member.done) == list(ALL), (parts, order)
    assert broker.is_deleted, (parts, order)


ORDERS = [order for order in sorted(set(itertools.permutations([0, 0, 1, 1, 2, 2]))) if order[0] == 0]
PARTS = [(0,), (1, 2), ALL]


@pytest.mark.parametrize(
    ("aborting", "is_told", "copies"), [(-1, True, 3), (0, True, 1), (0, False, 1), (0, False, 3), (1, True, 3)]
)
def test_each_message_is_committed_once_in_every_order_of_three_members(aborting: int, is_told: bool, copies: int):
    """With "unseen" another process aborts the transaction, and the member is not told."""
    for parts in itertools.product(PARTS, repeat=3):
        for order in ORDERS:
            run(parts, order, aborting, is_told, copies)


def test_a_wait_for_answers_that_was_interrupted_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    first, second = Member(broker), Member(broker)
    for member in (first, second):
        broker.deliver(member)
    first.acknowledge([0])
    first.end(True, second)
    sent = second.context.acknowledge(broker.begin(), {KEY: [(7, 8, 0)]}, SOON)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Response, "result", raising(KeyboardInterrupt()))
        sent.settle(SOON)
    with pytest.raises(Conflict):
        sent.settle(SOON)


def test_an_entry_that_a_prepared_transaction_holds_is_asked_about_ever_less_often_although_it_comes_again():
    broker, waits = Broker(), list[float]()
    member = Member(broker)
    broker.deliveries = 1
    broker.deliver(member)
    member.acknowledge(ALL)
    assert member.opened is not None
    member.opened[1].note_prepared()
    for _ in range(8):
        [(size, unknown, vain, due)] = member.partition.unfinished.values()
        waits.append(due - time.monotonic())
        member.partition.unfinished[7, 8] = size, unknown, vain, 0.0
        asked = broker.asked
        member.finish_entries()
        assert broker.asked - asked == (SIZE if vain == 0 else 1)
        broker.deliver(member)
    assert waits[0] < 4 and waits[-1] > 40
    member.broker.end(member.opened[0], True)
    member.check_unfinished()
    assert broker.is_deleted


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("sharing", ["message", "key"])
def test_only_for_its_keys_a_member_asks_for_entries_that_an_abort_brings_again(sharing: str, is_whole: bool):
    """A request that the broker gets after it has delivered such an entry gives the entry to one more member."""
    broker, group = Broker(), mode_of(cast(Any, None), Subscription(("t",), "g", sharing=sharing), cast(Any, None), "")
    member = Member(broker, SubscriptionType.KEY_SHARED if sharing == "key" else SubscriptionType.SHARED)
    broker.deliver(member)
    member.acknowledge(ALL if is_whole else (0,))
    assert member.opened is not None
    member.opened[1].drop_rest_of_entries()
    broker.end(member.opened[0], False)
    group.nack(member.partition, [(7, 8, index) for index in (ALL if is_whole else (0,))])
    assert broker.redelivered == (sharing == "key" and not is_whole)
