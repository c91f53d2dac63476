"""Acknowledging what a reader delivered, inside a writer's transaction.

All that a writer needs of a reader:

    named = context.subscriptions(partitions)            # (concrete topic, subscription) of each
    ...                                                  # announced, and added to the transaction: the broker checks
                                                         # nothing, and what is not added stays pending for ever
    sent = context.acknowledge(txn, positions, deadline) # sends, and waits for nobody
    ...
    sent.settle(deadline)                                # before COMMIT; and before ABORT, whatever it raises

Acknowledgements are always individual, batches by index: a cumulative one in a transaction makes the broker skip
individual ones on the same subscription, and on shared subscriptions it does nothing. An answer that is lost cannot be
asked for again inside its transaction, where a repetition conflicts with itself: the transaction can only abort. What
an aborted transaction acknowledged is delivered again by the broker. One that reaches the broker behind the end of its
transaction stays pending for ever, which is why answers are waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from txnbridge.errors import Conflict, NotSupported, TxnBridgeError
from txnbridge.spi import Deadline, Partition, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.outcome.end_delivery import Participant, participant_of
from txnbridge_pulsar.read.partition import AckedMessages, PulsarPartition


@dataclass(eq=False)
class _PartitionAcks:
    """What was acknowledged of one partition."""

    partition: PulsarPartition
    assignment: object
    txn: wire.TxnId
    ids: Sequence[wire.MessageId]
    acked: AckedMessages
    answers: list[wire.Response] = field(default_factory=list)
    given_up: list[wire.MessageId] = field(default_factory=list)


class PulsarAckContext:
    """Which deliveries of a reader can be acknowledged. Any thread may call, also while another one polls."""

    def __init__(
        self, subscription: str, shared: bool, partitions: Mapping[Partition, PulsarPartition], guard: threading.Lock
    ) -> None:
        self._subscription = subscription
        self._shared = shared
        self._partitions = partitions
        self._guard = guard

    def subscriptions(self, partitions: Iterable[Partition]) -> list[tuple[str, str]]:
        """What has to be added to a transaction before these partitions are acknowledged in it.

        Raises `Conflict` for one that is not with the reader any more.
        """
        with self._guard:
            return [(self._partition(key).topic, self._subscription) for key in partitions]

    def acknowledge(
        self, txn: wire.TxnId, positions: Mapping[Partition, Sequence[Position]], deadline: Deadline
    ) -> SentAcks:
        """Send acknowledgements. Errors after the first byte has left are raised by `SentAcks.settle`.

        Raises `Conflict`, with nothing sent, for a position that is not in this reader's hands: given back, or
        delivered under an assignment that has ended.
        """
        with self._guard:
            partitions = {self._partition(key): given for key, given in positions.items()}
            for partition, given in partitions.items():
                partition.check_in_hand(given)
            taken = [
                _PartitionAcks(partition, partition.assignment, txn, *partition.acknowledge(given))
                for partition, given in partitions.items()
            ]
        return SentAcks(taken, self._subscription, self._shared, self._guard, deadline)

    def _partition(self, key: Partition) -> PulsarPartition:
        partition = self._partitions.get(key)
        if partition is None or not partition.is_here:
            topic, number = key
            raise Conflict(f"{topic}[{number}] left this reader after the messages were delivered; they come again")
        return partition


class SentAcks:
    """Acknowledgements on their way."""

    def __init__(
        self, sent: Sequence[_PartitionAcks], subscription: str, shared: bool, guard: threading.Lock, deadline: Deadline
    ) -> None:
        self._sent = sent
        self._subscription = subscription
        self._shared = shared
        self._guard = guard
        self._settled = False
        self._error: wire.PulsarError | None = None
        for each in sent:
            try:
                each.answers = each.partition.consumer.start_acknowledge(each.ids, each.txn, timeout=deadline.left())
            except wire.PulsarError as error:
                self._error = self._error or error

    @property
    def partitions_left(self) -> bool:
        """Whether an assignment under which these were delivered has ended since: why a transaction may have failed
        that the broker only says has ended.
        """
        return any(
            each.partition.assignment is not each.assignment or not each.partition.is_here or each.partition.is_leaving
            for each in self._sent
        )

    @property
    def participants(self) -> list[Participant]:
        """The subscriptions that they were sent to."""
        return [
            participant_of(each.partition.topic, self._subscription, each.partition.consumer) for each in self._sent
        ]

    def give_up_rest(self) -> None:
        """Give up what this reader has in hand of the same entries. Call it before the transaction is aborted.

        The abort makes a shared subscription deliver these entries whole once more, perhaps to another member. Where
        two members acknowledge one entry in parts, brokers do not notice all conflicts.
        """
        if not self._shared:
            return
        with self._guard:
            for each in self._sent:
                if each.partition.assignment is each.assignment:
                    each.given_up += each.partition.give_up(each.acked.bits, delivered_again=True)

    def have_rest_redelivered(self) -> None:
        """Ask for what was given up. Call it if the abort did not come about, or had come about before."""
        for each in self._sent:
            if each.given_up:
                with suppress(wire.BrokerConnectionLost):
                    each.partition.consumer.redeliver(each.given_up)

    def parts(self) -> Iterator[tuple[str, wire.MessageId]]:
        """Return the concrete topic and the id of each message that was acknowledged apart from others of its entry,
        where such entries may be delivered to another member.
        """
        if self._shared:
            yield from ((each.partition.topic, id) for each in self._sent for id in each.ids if id.batch_index >= 0)

    def settle(self, deadline: Deadline) -> None:
        """Return when the broker holds all of them for the transaction. Repeating it says the same.

        Waits for every answer that can still come, also when one of them was a "no". Raises `Conflict` if somebody
        else has acknowledged one, or the connection is gone on which they were delivered, and whatever else the broker
        says: the transaction can only abort.
        """
        if not self._settled:
            self._settled = True
            errors = [error for each in self._sent for error in self._settle(each, deadline)]
            self._error = self._error or (errors[0] if errors else None)
            self._tell()
        if self._error is not None:
            raise _refusal(self._error) from self._error

    def _settle(self, sent: _PartitionAcks, deadline: Deadline) -> Iterator[wire.PulsarError]:
        refused = False
        for answer in sent.answers:
            try:
                answer.result(deadline.left())
            except wire.PulsarError as error:
                refused = refused or isinstance(error, wire.TransactionConflict)
                yield error
        if refused and self._shared:
            self._hold_what_can_be_held(sent, deadline)

    def _hold_what_can_be_held(self, sent: _PartitionAcks, deadline: Deadline) -> None:
        """Acknowledge once more one by one, although the transaction is lost: its abort brings all these messages back,
        but for those that another transaction has.

        A shared subscription forgets that it has delivered the messages of an acknowledgement that it refused, and
        would never deliver them again.
        """
        answers = []
        with suppress(wire.PulsarError):  # with the connection everything comes again
            for id in sent.ids:
                answers += sent.partition.consumer.start_acknowledge([id], sent.txn, timeout=deadline.left())
            for answer in answers:
                with suppress(wire.TransactionConflict):
                    answer.result(deadline.left())

    def _tell(self) -> None:
        with self._guard:
            for each in self._sent:
                if self._error is None:
                    each.partition.acknowledged(each.acked)
                else:
                    each.partition.not_acknowledged(each.acked, each.ids)


def require_whole_entries(acks: Iterable[SentAcks]) -> None:
    """Raise `NotSupported` if a transaction that is to be prepared acknowledges a part of an entry in a shared group.

    Any process may abort a prepared transaction, and the members of the group do not hear of it. The broker then
    delivers the entry whole to another member, while the first one may still acknowledge the rest of it: brokers do
    not notice all conflicts between the two.
    """
    found = Counter((topic, id.ledger, id.entry, id.batch_size) for sent in acks for topic, id in sent.parts())
    for (topic, ledger, entry, size), acknowledged in found.items():
        if acknowledged < size:
            raise NotSupported(
                f"with sharing by message or key a prepared transaction acknowledges entries of the broker whole, and"
                f" this one acknowledges {acknowledged} of the {size} messages at ({ledger}, {entry}) of {topic}, which"
                " were sent as one entry. Acknowledge all of them in it (poll as many at once), or do not prepare it;"
                ' a group with sharing="partition" can, and messages that were sent with different keys are entries of'
                " their own"
            )


def _refusal(error: wire.PulsarError) -> TxnBridgeError:
    if isinstance(error, wire.TransactionConflict):
        return Conflict(f"acknowledging: another transaction holds or has acknowledged the same messages: {error}")
    if isinstance(error, wire.BrokerConnectionLost) and not isinstance(error, wire.RequestTimedOut):
        return Conflict(f"acknowledging: the connection on which they were delivered is gone: {error}")
    return translate(error, "acknowledging")
