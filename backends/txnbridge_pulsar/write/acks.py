"""Acknowledgement of a reader's messages inside a writer's transaction.

A writer gets a `PulsarAckContext` from a reader, and calls it in this order:

    pairs = context.subscriptions(partitions)            # (concrete topic, subscription) of each partition
    ...                                                  # register the pairs with the transaction first: the broker
                                                         # does not check it, and else acks stay pending for ever
    sent = context.acknowledge(txn, positions, deadline) # sends without waiting
    ...
    sent.settle(deadline)                                # before COMMIT, and before ABORT even if it raises
    ...
    sent.acknowledge_committed_entries()                 # after COMMIT, if the transaction is known to be committed

Acknowledgements are individual, and by batch index inside entries. A cumulative acknowledgement in a transaction makes
the broker skip individual ones on the same subscription, and does nothing on shared subscriptions. If an answer is
lost, the transaction can only abort: a repeated acknowledgement conflicts with the first. After the abort the broker
redelivers the acknowledged messages. An acknowledgement that arrives after the transaction's end stays pending, so the
writer waits for all answers before either end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from txnbridge.errors import Conflict, TxnBridgeError
from txnbridge.spi import Deadline, Partition, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.outcome.end_delivery import EndDelivery, Participant
from txnbridge_pulsar.read.partition import AckedMessages, PulsarPartition, query_pause

# A broker's reason to refuse an acknowledgement in a transaction, if a committed one has acknowledged the message.
_COMMITTED_REASON = "already acked before"
# The time-out of a transaction that only asks for these reasons, and the most messages in it.
_QUERY_TTL_MS = 10_000
_MAX_QUERIES = 1000


@dataclass(eq=False)
class _PartitionAcks:
    """The acknowledgements for one partition that one call sends in a transaction, and the broker's answers."""

    partition: PulsarPartition
    assignment: object
    generation: int
    txn: wire.TxnId
    ids: Sequence[wire.MessageId]
    acked: AckedMessages
    answers: list[wire.Response] = field(default_factory=list)
    given_up: list[wire.MessageId] = field(default_factory=list)
    pending: set[tuple[int, int]] = field(default_factory=set)  # entries acknowledged after a first refusal

    def note_answered(self) -> None:
        """Note that the last answer has come. Deliveries that arrive later, such as after a timeout, count."""
        self.acked.until = self.partition.consumer.arrived


@dataclass(eq=False, repr=False)
class PulsarAckContext:
    """Acknowledges messages of one reader in transactions of writers. Thread-safe, also while the reader polls."""

    _subscription: str
    _shared: bool
    _partitions: Mapping[Partition, PulsarPartition]
    _guard: threading.Lock

    def subscriptions(self, partitions: Iterable[Partition]) -> list[tuple[str, str]]:
        """Return the (topic, subscription) pairs of partitions, which the writer registers before it acknowledges.

        Raise `Conflict` if the reader has lost one of the partitions.
        """
        with self._guard:
            return [(self._partition(key).topic, self._subscription) for key in partitions]

    def acknowledge(
        self, txn: wire.TxnId, positions: Mapping[Partition, Sequence[Position]], deadline: Deadline
    ) -> SentAcks:
        """Send acknowledgements of messages in a transaction, without waiting for the answers: `SentAcks.settle` does.

        Raise `Conflict`, and send nothing, if `nack` has given back one of the messages, or if the reader has lost a
        message's partition since the message was delivered. `settle` also raises errors of sending.
        """
        with self._guard:
            partitions = {self._partition(key): given for key, given in positions.items()}
            for partition, given in partitions.items():
                partition.check_outstanding(given)
            taken = [
                _PartitionAcks(at, at.assignment, at.consumer.generation, txn, *at.acknowledge(given))
                for at, given in partitions.items()
            ]
        return SentAcks(taken, self._subscription, self._shared, self._guard, deadline)

    def _partition(self, key: Partition) -> PulsarPartition:
        partition = self._partitions.get(key)
        if partition is None or not partition.is_assigned:
            topic, number = key
            raise Conflict(f"{topic}[{number}] left this reader after it returned the messages; they come again")
        return partition


class SentAcks:
    """The acknowledgements that one call has sent in a transaction, and the broker's answers to them."""

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
                for last in each.answers[-1:]:
                    last.when_done(each.note_answered)
            except wire.PulsarError as error:
                self._error = self._error or error
            except BaseException:  # an interrupt: no writer has these acknowledgements, so their messages come again
                self._error = wire.BrokerConnectionLost("interrupted")
                self._note_result()
                raise

    @property
    def has_lost_partition(self) -> bool:
        """Return whether the reader has lost a partition of these messages, a likely cause of an unexpected abort."""
        used = [(each.partition, each.assignment) for each in self._sent]
        return any(at.assignment is not assignment or not at.is_assigned or at.is_leaving for at, assignment in used)

    @property
    def participants(self) -> list[Participant]:
        used = [each.partition for each in self._sent]
        return [Participant(at.topic, self._subscription, at.consumer, at.consumer.generation) for at in used]

    def drop_rest_of_entries(self) -> None:
        """On a shared subscription, drop the reader's unacknowledged messages of entries that are partly acknowledged.

        The writer calls this before an abort, after which the broker redelivers these entries whole, perhaps to another
        member. Brokers do not detect all conflicts between two members that acknowledge different messages of one entry
        (hazard H56).
        """
        if not self._shared:
            return
        with self._guard:
            for each in self._sent:
                if each.partition.assignment is each.assignment:
                    each.given_up += each.partition.give_up(each.acked.bits, delivered_again=True)
                    parts = [id for id in each.ids if id.batch_index >= 0]
                    each.partition.overcount += sum({id[:2]: id.batch_size for id in parts}.values()) - len(parts)
                    if each.partition.consumer.by_key:  # hazard H160
                        each.partition.refused += parts

    def redeliver_rest(self) -> None:
        """Have the broker redeliver the entries of which `drop_rest_of_entries` has dropped messages.

        This is needed if the transaction had already ended before the writer's abort, which then redelivers nothing.
        """
        for each in self._sent:
            if each.given_up:
                with suppress(wire.BrokerConnectionLost):
                    each.partition.consumer.redeliver(each.given_up)

    def acknowledge_committed_entries(self) -> None:
        """Acknowledge entries whole, outside of transactions and without waiting, if committed transactions have
        acknowledged all of their messages in parts.

        With `acknowledgmentAtBatchIndexLevelEnabled=false` brokers keep such entries in the backlog otherwise, because
        the transactions leave the entries' extra index unacknowledged (hazard H89). In other cases this ACK repeats
        what the broker knows, except on shared subscriptions, where nothing else removes the entry. If the consumer was
        reopened since, nothing is sent, because the subscription may have been reset and may have to deliver the
        entries again.
        """
        with self._guard:
            for each in self._sent:
                if each.partition.consumer.generation == each.generation:
                    with suppress(wire.PulsarError):
                        each.partition.consumer.acknowledge_entries(each.partition.committed(each.ids))

    def note_prepared(self) -> None:
        """Note that the transaction is prepared, or its outcome unknown: this reader may not learn that it commits."""
        with self._guard:
            for each in self._sent:
                each.partition.note_prepared(each.ids)

    def settle(self, deadline: Deadline) -> None:
        """Wait for the broker's answers to all acknowledgements; return if all are confirmed. Calls may be repeated.

        Raise `Conflict` if another transaction or member has acknowledged a message, or if the connection on which the
        messages were delivered is lost; for other refusals raise the translated error. After an error the transaction
        can only abort.
        """
        if not self._settled:
            errors = [error for each in self._sent for error in self._wait_for_answers(each, deadline)]
            self._error = self._error or (errors[0] if errors else None)
            self._note_result()
            self._settled = True
        if self._error is not None:
            raise _refusal(self._error) from self._error

    def _wait_for_answers(self, sent: _PartitionAcks, deadline: Deadline) -> Iterator[wire.PulsarError]:
        refused = False
        for answer in sent.answers:
            try:
                answer.result(deadline.left())
            except wire.PulsarError as error:
                refused = refused or isinstance(error, wire.TransactionConflict | wire.RequestTimedOut)
                yield error
        if refused and self._shared:
            self._acknowledge_one_by_one(sent, deadline)

    def _acknowledge_one_by_one(self, sent: _PartitionAcks, deadline: Deadline) -> None:
        """Acknowledge each message by itself after the broker has refused them together, or has not answered in time.

        Otherwise a shared subscription would never redeliver them: it no longer counts them as this member's. The
        transaction can only abort. Its abort then makes the broker redeliver all of these messages, except those that
        another transaction has acknowledged.
        """
        answers = []
        with suppress(wire.PulsarError):  # with the connection lost, everything is redelivered
            for id in sent.ids:
                answers += sent.partition.consumer.start_acknowledge([id], sent.txn, timeout=deadline.left())
            for id, answer in zip(sent.ids, answers, strict=True):
                with suppress(wire.TransactionConflict, wire.RequestTimedOut):
                    answer.result(deadline.left())
                    sent.pending.add(id[:2])

    def _note_result(self) -> None:
        with self._guard:
            for each in self._sent:
                if self._error is None:
                    each.partition.acknowledged(each.acked)
                else:
                    each.partition.not_acknowledged(each.acked, [id for id in each.ids if id[:2] not in each.pending])


def finish_entries(
    client: wire.PulsarClient,
    end_delivery: EndDelivery,
    subscription: str,
    partition: PulsarPartition,
    guard: threading.Lock,
    deadline: Deadline,
) -> None:
    """Acknowledge entries of a shared subscription whole, outside of transactions, if all their messages are committed.

    The messages of such an entry were acknowledged by several members, and none knows whether all of their transactions
    are committed. An ACK that removes the entry too early would take an aborted transaction's messages from the group.
    So each message is acknowledged once more, in a transaction that is aborted: the broker refuses that with one reason
    for messages of committed transactions, and with another one for pending messages. If it accepts an acknowledgement,
    the message's transaction was aborted, and the entry comes again. After a question in vain only one message of the
    entry is asked about. Raise the errors of `PulsarClient`; then nothing has changed, and the transaction times out.
    """
    with guard:
        consumer, generation = partition.consumer, partition.consumer.generation
        unfinished = {key: each for key, each in partition.unfinished.items() if each[3] <= time.monotonic()}
    if not unfinished:
        return
    txn = client.transactions.begin(_QUERY_TTL_MS, deadline.left())
    client.transactions.register(txn, deadline.left(), subscriptions=[(partition.topic, subscription)])
    indexes = [
        (entry_id, wire.MessageId(*entry_id, -1, index, size))
        for entry_id, (size, unknown, vain, _) in unfinished.items()
        for index in range(size)
        if (unknown & -unknown if vain else unknown) >> index & 1
    ][:_MAX_QUERIES]
    asked = [(key, id, consumer.start_acknowledge([id], txn, timeout=deadline.left())) for key, id in indexes]
    aborted = set()
    for entry_id, id, answers in asked:
        size, unknown, vain, due = unfinished[entry_id]
        try:
            answers[0].result(deadline.left())
            aborted.add(entry_id)
        except wire.TransactionConflict as error:
            if _COMMITTED_REASON in str(error):
                unfinished[entry_id] = size, unknown & ~(1 << id.batch_index), vain, due
    client.transactions.end(txn, False, deadline.left())
    end_delivery.ended(txn, False, [Participant(partition.topic, subscription, consumer, generation)], deadline)
    queried = {entry_id for entry_id, _ in indexes}
    with guard:
        if consumer.generation != generation or partition.consumer is not consumer:
            return
        # Else the broker takes these entries for this member's, and may hold their keys back (hazard H160).
        held = [key for key in queried & partition.unfinished.keys() if consumer.by_key and unfinished[key][1]]
        consumer.redeliver([wire.MessageId(*key) for key in held])
        for entry_id, (size, unknown, vain, due) in unfinished.items():
            before = partition.unfinished.pop(entry_id, None)
            if before is not None and not unknown:
                consumer.acknowledge_entries([wire.MessageId(*entry_id)])
                partition.finished(entry_id)
            elif before is not None and entry_id not in aborted:
                if entry_id in queried:
                    vain = vain + 1 if unknown == before[1] else 0
                    due = time.monotonic() + query_pause(vain)
                partition.unfinished[entry_id] = size, unknown, vain, due


def _refusal(error: wire.PulsarError) -> TxnBridgeError:
    if isinstance(error, wire.TransactionConflict):
        return Conflict(f"acknowledging: another transaction holds or has acknowledged the same messages: {error}")
    if isinstance(error, wire.BrokerConnectionLost) and not isinstance(error, wire.RequestTimedOut):
        return Conflict(f"acknowledging: the connection on which the messages were delivered is lost: {error}")
    return translate(error, "acknowledging")
