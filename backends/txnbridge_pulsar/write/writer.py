"""The writer: sends messages and acknowledgements in one transaction at a time, on connections of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from txnbridge import errors
from txnbridge.spi import Begin, Deadline, Evidence, Outcome, Partition, Position, Raw, RawHeaders, Writer, encode_item
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.capabilities import LIMITS
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.outcome.anchors import Anchors
from txnbridge_pulsar.outcome.end_delivery import EndDelivery, Participant
from txnbridge_pulsar.outcome.forgotten_transactions import proof_property
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.late_writes import LateWriteGuard
from txnbridge_pulsar.outcome.outcome import EndResult, TokenEvidence, coordinator_state, end, outcome_by_proof
from txnbridge_pulsar.outcome.proof import PROOF, ProofRecord, proof_topic, write_presence
from txnbridge_pulsar.write.acks import PulsarAckContext, SentAcks
from txnbridge_pulsar.write.batching import (
    ENTRY_BYTES,
    NotBareValue,
    PendingReceipts,
    TopicBatcher,
    TransactionProducer,
    not_stored,
)
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation
from txnbridge_pulsar.write.message_format import key_hash, key_on_wire, to_properties

_log = logging.getLogger("txnbridge")

# An abort has at least these seconds, also after the transaction's deadline, so that an expired transaction ends.
_MIN_ABORT_SECONDS = 2.0
# Seconds that an abort waits for the receipts of entries that were sent. An entry that arrives after the abort may
# block its topic, unless the broker is made to refuse the entry.
_ABORT_SETTLE_SECONDS = 0.5

# With more producers that the last transaction did not use, all are closed: a program may send to ever new topics.
_MAX_IDLE_PRODUCERS = 1000
# The most partitions of the last transaction that are registered in advance, with the next one's first topic.
_MAX_REGISTERED_IN_ADVANCE = 16
_MAX_MESSAGE_BYTES = LIMITS.message_bytes or 0
_MAX_TIMESTAMP = (1 << 63) - 1


class TransactionOwner(Protocol):
    """The methods of `PulsarOwner`, the owner of a transactional id, that its writers call."""

    name: str
    owned: bool
    opening: str
    anchors: Anchors
    end_delivery: EndDelivery
    in_doubt: InDoubt
    late_write_guard: LateWriteGuard

    def new_transaction(self, seconds: Callable[[], float], deadline: Deadline, alone: bool = False) -> wire.TxnId: ...
    def require_no_doubt(self, topics: Sequence[str], deadline: Deadline) -> None: ...
    def announce(self, announced: AnnouncedTransaction, deadline: Deadline) -> None: ...
    def mark_not_prepared(self, announced: AnnouncedTransaction) -> None: ...
    def forget(self, txn: wire.TxnId) -> None: ...
    def check(self, deadline: Deadline) -> None: ...


class PulsarWriter(Writer):
    """Writer of transactions: registers topics, sends messages, and requests the commit once all of them are stored.

    The broker does not check this order: a message that arrives after the commit makes committed messages disappear
    (hazard H34).
    """

    not_taken = (NotBareValue, KeyError, TypeError)
    _alone = False  # whether each transaction has an anchor of its own

    def __init__(self, cluster: ClusterAccess, owner: TransactionOwner, name: str) -> None:
        self.name = name
        self.proof: ProofLocation | None = None
        self.unknown = False  # whether only the proof topic may show the outcome of a token that exists
        self.quick: dict[Any, Callable[..., object]] = {}
        self._cluster = cluster
        self._owner = owner
        self._connection_key = f"writer {owner.opening} {name}"
        self._batchers: dict[str, TopicBatcher] = {}
        self._producers: dict[str, TransactionProducer] = {}
        self._mixed = cluster.settings.mix_keys
        self._since_presence = 0
        self._presence_at = 0.0
        self._turn = 0
        self._last: tuple[str, ...] = ()  # the topics of the last transaction
        self.begin(Begin("", Deadline(0), False, None))

    def _forget(self) -> None:
        """Clear the fields about the current transaction, so that the writer has none."""
        self._txn: wire.TxnId | None = None
        self._announced: dict[str, None] = {}  # topics named on the fence topic, in order, the proof topic first
        self._registered: set[str] = set()  # announced topics that the coordinator knows
        self._sent: dict[str, None] = {}  # registered topics that entries were sent to
        self._subscriptions: dict[tuple[str, str], None] = {}  # pairs named on the fence topic
        self._acked_on: set[tuple[str, str]] = set()  # subscriptions that the coordinator knows
        self._receipts = PendingReceipts()
        self._acks: list[SentAcks] = []
        self._batchers.clear()
        self.quick.clear()

    # --- one transaction ------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        """Start a transaction in this writer only; the coordinator begins it before its first entry or ack is sent."""
        if len(self._producers) - len(self._last) > _MAX_IDLE_PRODUCERS:
            self._hang_up()
        self._begin = begin
        self._forget()
        self._evidence = TokenEvidence(None, None, False)
        self.messages = 0

    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        batcher = self._batcher(topic, partition)
        size = self._check(value, key, headers, timestamp)
        number = partition
        if number is None and key is not None:
            number = key_hash(key) % len(batcher.concrete)
        buffer = batcher.buffer(number)
        key_out = key_on_wire(key)
        if not buffer.fits(key_out, size):
            batcher.send(buffer)
            buffer = batcher.buffer(number)
        properties = to_properties(headers) if headers else []
        if buffer.add(value, key_out, properties, timestamp, size):
            batcher.send(buffer)
        self.messages += 1

    def _check(self, value: bytes | None, key: bytes | None, headers: RawHeaders | None, timestamp: int | None) -> int:
        """Return a message's size in bytes. Raise `InvalidOption` for a wrong size, header name or timestamp."""
        size = len(value or b"") + len(key or b"")
        for name, content in headers or ():
            try:
                size += len(name.encode()) + len(content or b"")
            except UnicodeEncodeError:
                raise errors.InvalidOption("a header's name must be text that can be written as UTF-8") from None
        if size > _MAX_MESSAGE_BYTES:
            raise errors.InvalidOption(f"a message of {size} bytes is above the limit of {_MAX_MESSAGE_BYTES} bytes")
        if timestamp is not None and not 0 < timestamp <= _MAX_TIMESTAMP:
            raise errors.InvalidOption(f"a timestamp is a number of milliseconds since 1970 above 0, not {timestamp}")
        return size

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        batcher = self._batcher(topic, None)
        if isinstance(items, list | tuple) and set(map(type, items)) == {bytes}:
            done = batcher.take_many(items)
            self.messages += done
            items = items[done:]
        for item in items:
            if item.__class__ is bytes and len(item) <= ENTRY_BYTES:
                batcher.take(topic, item, None)
                self.messages += 1
            else:
                self.send(topic, *encode_item(item), None, None)

    def _batcher(self, topic: str, partition: int | None) -> TopicBatcher:
        """Return the object that collects the transaction's messages for a topic. Raise `NotFound` if it is missing."""
        batcher = self._batchers.get(topic)
        if batcher is None or (partition is not None and not 0 <= partition < len(batcher.concrete)):
            concrete = self._cluster.topics.require(topic, partition, self._begin.deadline)
            if batcher is None:
                self._turn += 1
                batcher = self._batchers[topic] = TopicBatcher(concrete, self._turn, self._mixed, self._send_entry)
                self.quick[topic] = batcher.take
            batcher.concrete = concrete
        return batcher

    # --- sending entries ------------------------------------------------------------------------------------------

    def _send_entry(self, concrete: str, batch: wire.MessageBatch) -> None:
        deadline = self._begin.deadline
        deadline.check("the transaction")
        try:
            self._recover_lost(deadline)
            self._register((concrete,), (), deadline)
            assert self._txn is not None and self.proof is not None
            if concrete not in self._sent:
                batch.properties = proof_property(self.proof)
                self._sent[concrete] = None
            self._producer(concrete).send(batch, self._txn, self._receipts, deadline)
        except errors.UsageError as error:
            # Messages that `send` accepted before are lost with this entry, so the transaction can only be aborted.
            raise errors.DeliveryFailed(str(error)) from (error.__cause__ or error)

    def _register(self, topics: Sequence[str], subscriptions: Sequence[tuple[str, str]], deadline: Deadline) -> None:
        """Name topics and subscriptions on the fence topic, then register them with the transaction at the coordinator.

        The transaction's first call also begins it at the coordinator, and sends the proof message. Messages to a
        topic, and acknowledgements on a subscription, are sent only after this call (hazards H37, H38).
        """
        if self._txn is None:
            self._open(topics, deadline)
        wanted = [topic for topic in topics if topic not in self._registered]
        pairs = [pair for pair in subscriptions if pair not in self._acked_on]
        first = not self._registered
        if not (wanted or pairs or first):
            return
        assert self._txn is not None and self.proof is not None
        self._owner.require_no_doubt([*self._announced, *wanted, *(topic for topic, _ in pairs)], deadline)
        for topic in wanted:
            self._producer(topic).ready(deadline)
        self._announce(wanted, pairs, deadline)
        named = list(self._announced) if first else wanted
        try:
            with self._cluster.events.step("step:register", self._begin.transaction, topics=len(named)):
                self._cluster.client.transactions.register(self._txn, deadline.left(), named, pairs)
        except (wire.TransactionNotFound, wire.InvalidTransactionStatus) as error:
            raise self._clean_up_after_foreign_end(deadline) from error
        except wire.PulsarError as error:
            raise translate(error, "registering topics with a transaction") from error
        self._registered.update(named)
        self._acked_on.update(pairs)
        if first:
            message = wire.Single(ProofRecord(PROOF, transaction=self._begin.transaction).pack())
            self._producer(self.proof.topic).send(message, self._txn, self._receipts, deadline)

    def _announce(self, topics: Sequence[str], subscriptions: Sequence[tuple[str, str]], deadline: Deadline) -> None:
        before = self._announced, self._subscriptions
        self._announced = {**self._announced, **dict.fromkeys(topics)}
        self._subscriptions = {**self._subscriptions, **dict.fromkeys(subscriptions)}
        try:
            self._owner.announce(self._announcement(), deadline)
        except errors.DeliveryFailed:  # the transactions do not fit into one fence record
            self._announced, self._subscriptions = before
            raise

    def _open(self, topics: Sequence[str], deadline: Deadline) -> None:
        self.proof = self._presence(deadline)
        with self._cluster.events.step("step:begin", self._begin.transaction):
            self._txn = self._owner.new_transaction(lambda: self._ttl(self._begin), deadline, self._alone)
        self._evidence = TokenEvidence(self._txn, self.proof, False)
        # Only topics with an open producer: the others may have been terminated since the last transaction.
        last = tuple(topic for topic in self._last if topic in self._producers and self._producers[topic].is_open)
        is_right = len(last) <= _MAX_REGISTERED_IN_ADVANCE and not self._owner.in_doubt.touching(last)
        guessed = last if is_right else ()
        self._announced.update(dict.fromkeys((self.proof.topic, *topics, *guessed)))

    def _ttl(self, begin: Begin) -> float:
        """Return the seconds after which the coordinator is to abort the transaction."""
        return min(begin.deadline.left(), self._cluster.settings.longest_transaction)

    def _presence(self, deadline: Deadline) -> ProofLocation:
        self._since_presence += 1
        timing = self._cluster.settings.timing
        is_old = time.monotonic() - self._presence_at > timing.presence_seconds
        if self.proof is None or is_old or self._since_presence > timing.transactions_per_presence:
            self.proof, self._since_presence, self._presence_at = None, 1, time.monotonic()
            return self._write_presence("", deadline)
        return self.proof

    def _write_presence(self, transaction: str, deadline: Deadline) -> ProofLocation:
        name = self.name
        while self._owner.in_doubt.touching([topic := proof_topic(self._cluster, name, deadline)]):
            name += "+"
        self._producer(topic).open(deadline)  # the cleanup deletes no topic with a producer
        self._cluster.topics.keep(topic, deadline)  # the cleanup may have deleted the topic before
        return write_presence(self._cluster, topic, transaction, self._owner.owned, deadline)

    def _announcement(self) -> AnnouncedTransaction:
        assert self._txn is not None and self.proof is not None
        topics, subscriptions = tuple(self._announced), tuple(self._subscriptions)
        return AnnouncedTransaction(self._begin.transaction, self._txn, topics, subscriptions, self.proof)

    def _producer(self, concrete: str) -> TransactionProducer:
        producer = self._producers.get(concrete)
        if producer is None:
            producer = self._producers[concrete] = TransactionProducer(self._cluster, concrete, self._connection_key)
        return producer

    def _recover_lost(self, deadline: Deadline) -> None:
        """Resend entries of lost connections. Raise `DeliveryFailed` if one was refused, or might be stored twice."""
        if (failure := self._receipts.failure) is not None:
            has_ended = isinstance(failure, wire.NotAllowed) and self._has_ended(deadline)
            raise (self._clean_up_after_foreign_end(deadline) if has_ended else not_stored(failure)) from failure
        for producer, error in list(self._receipts.lost.items()):
            if not self._receipts.wait(deadline, producer) or not producer.recover(self._receipts, deadline):
                raise not_stored(error) from error

    def _has_ended(self, deadline: Deadline) -> bool:
        assert self._txn is not None and self.proof is not None
        return not coordinator_state(self._cluster, self._txn, self.proof, deadline)

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, PulsarAckContext)
        deadline = self._begin.deadline
        deadline.check("the transaction")
        self._register((), context.subscriptions(positions), deadline)
        assert self._txn is not None
        self._acks.append(context.acknowledge(self._txn, positions, deadline))

    def flush(self, deadline: Deadline) -> None:
        """Send all collected messages, and wait until the transaction's messages and acknowledgements are stored.

        Raise `DeliveryFailed` if a message cannot be stored, `DeadlineExceeded` if receipts are missing at the
        deadline.
        """
        waiting = [concrete for batcher in self._batchers.values() for concrete in batcher.waiting()]
        if waiting:
            self._register(waiting, (), deadline)
        for batcher in self._batchers.values():
            batcher.flush()
        while True:
            if not self._receipts.wait(deadline):
                raise errors.DeadlineExceeded(f"messages were not stored within {deadline.seconds:g} s")
            if self._receipts.settled and self._receipts.failure is None:
                break
            self._recover_lost(deadline)
        for sent in self._acks:
            sent.settle(deadline)

    def evidence(self) -> Evidence:
        return Evidence(self._evidence.fields(), self.messages)

    # --- ending ---------------------------------------------------------------------------------------------------

    def commit(self, deadline: Deadline) -> None:
        self._store_or_abort(deadline)
        participants = self._participants(deadline)
        deadline.check("the transaction")
        self._evidence = TokenEvidence(self._evidence.txn, self._located_proof(), True)
        if self._txn is None:
            return  # nothing was sent or acknowledged
        try:
            with self._cluster.events.step("step:commit", self._begin.transaction) as event:
                ended = end(self._cluster, self._txn, True, tuple(self._announced), deadline)
                event["ended"] = ended.name
            # Only its writer commits a transaction that is not prepared, so one that had ended before our request
            # arrived was aborted. If the answer to an earlier request was lost, the proof topic has the outcome.
            earlier = ended is not EndResult.COMMITTED
            if earlier and (ended is not EndResult.UNCLEAR or self._by_proof(deadline) is Outcome.ABORTED):
                raise self._clean_up_after_foreign_end(deadline)
            self._owner.end_delivery.ended(self._txn, True, participants, deadline, self._announcement())
        except (errors.TransactionAborted, errors.Fenced):
            raise
        except BaseException:  # also KeyboardInterrupt: the caller gets a token in any case
            self.unknown = True
            for sent in self._acks:  # the transaction may have been aborted, or committed
                sent.drop_rest_of_entries()
                sent.note_prepared()
            raise
        for sent in self._acks:
            sent.acknowledge_committed_entries()
        self._finish()

    def _participants(self, deadline: Deadline) -> list[Participant]:
        """Return the topics and subscriptions that the transaction's end has to reach.

        First wait until the commits and aborts of earlier transactions have reached topics that were unloaded.
        """
        if self._txn is None:
            return []
        proof = () if self.proof is None else (self.proof.topic,)
        used = [producer.participant for topic in (*proof, *self._sent) if (producer := self._producers.get(topic))]
        participants = [each for each in used if each] + [each for sent in self._acks for each in sent.participants]
        self._owner.end_delivery.settle({participant.topic for participant in participants}, deadline)
        return participants

    def _located_proof(self) -> ProofLocation | None:
        """Return where the transaction's proof is; None if none was sent. Its position is known after all is stored."""
        proof = self._evidence.proof
        return None if proof is None else replace(proof, at=self._producer(proof.topic).last)

    def _by_proof(self, deadline: Deadline) -> Outcome:
        """Return the outcome of the requested commit by the transaction's proof message.

        If the proof topic cannot be read, raise `OutcomeUnknown` and no other error: callers take any other error to
        mean that the transaction was not committed.
        """
        assert self._txn is not None and self._evidence.proof is not None
        self.unknown = True
        try:
            return outcome_by_proof(self._cluster, self._txn, self._evidence.proof, deadline)
        except errors.OutcomeUnknown:
            raise
        except errors.TxnBridgeError as error:
            raise errors.OutcomeUnknown(f"the outcome cannot be read: {error}") from error

    def _store_or_abort(self, deadline: Deadline) -> None:
        """Wait until all messages and acknowledgements are stored; if that fails, abort, and raise the error."""
        if deadline.expired and (acks := self._acks):
            self._abort_quietly(deadline)
            # Check this after the abort: a process that was suspended learns only then which partitions it has lost.
            if any(sent.has_lost_partition for sent in acks):
                raise _lost_partition_error()
        deadline.check("the transaction")
        try:
            self.flush(deadline)
        except (errors.TransactionAborted, errors.Fenced, errors.UsageError) as error:
            self._abort_quietly(deadline)
            if isinstance(error, errors.UsageError):
                raise errors.DeliveryFailed(str(error)) from (error.__cause__ or error)
            raise

    def _abort_quietly(self, deadline: Deadline) -> None:
        """Abort after an error, and only log an error of the abort, so that the caller can raise the first one.

        The commit was never requested, so the transaction cannot be committed.
        """
        try:
            self.abort(deadline)
        except errors.TxnBridgeError as error:
            _log.debug("transaction %s stays open until it times out: %s", self._begin.transaction, error)

    def _clean_up_after_foreign_end(self, deadline: Deadline) -> errors.TxnBridgeError:
        """Clean up after a transaction whose end another process or the coordinator has requested.

        Return the error that names the likely cause: a newer owner, lost partitions, a timeout, or an abort by another
        process.
        """
        if deadline.left() < _MIN_ABORT_SECONDS:
            deadline = Deadline(_MIN_ABORT_SECONDS)
        left = any(sent.has_lost_partition for sent in self._acks)
        if not self._settle(Deadline(min(_ABORT_SETTLE_SECONDS, deadline.left()))):
            self._hang_up()
        for sent in self._acks:
            sent.drop_rest_of_entries()
        self._redeliver_rest()
        self._refuse_late_writes(deadline)  # messages may have arrived after the transaction's end
        self._finish()
        try:
            self._owner.check(deadline)
        except errors.Fenced as fenced:
            return fenced
        except errors.TxnBridgeError as unheard:
            _log.debug("whether %s has a newer owner is not known yet: %s", self.name, unheard)
        if left:
            return _lost_partition_error()
        if self._begin.deadline.expired:
            return errors.TransactionTimedOut("the transaction was aborted because it timed out; run it again")
        return errors.TransactionAborted("the broker or an administrator ended the transaction; run it again")

    def _refuse_late_writes(self, deadline: Deadline) -> None:
        if self._txn is not None and self._registered:
            self._owner.late_write_guard.add(self._announcement(), deadline)

    def abort(self, deadline: Deadline) -> None:
        if deadline.left() < _MIN_ABORT_SECONDS:
            deadline = Deadline(_MIN_ABORT_SECONDS)
        self._batchers.clear()
        self.quick.clear()
        if self._txn is None:
            return
        settled = self._settle(Deadline(min(_ABORT_SETTLE_SECONDS, deadline.left())))
        if not settled:
            self._hang_up()
        for sent in self._acks:
            sent.drop_rest_of_entries()
        participants = self._participants(deadline)
        with self._cluster.events.step("step:end", self._begin.transaction, decision="abort"):
            try:
                ended = end(self._cluster, self._txn, False, tuple(self._announced), deadline)
            except errors.BrokerUnavailable as error:
                raise errors.OutcomeUnknown(f"the transaction is aborted when it times out: {error}") from error
        if ended is EndResult.ABORTED:
            self._owner.end_delivery.ended(self._txn, False, participants, deadline)
        else:
            self._redeliver_rest()
            if self._evidence.asked and self._by_proof(deadline) is Outcome.COMMITTED:
                raise errors.OutcomeUnknown("the commit that was requested before has committed the transaction")
        if not settled or ended is not EndResult.ABORTED:
            self._refuse_late_writes(deadline)
        self._finish()

    def _redeliver_rest(self) -> None:
        for sent in self._acks:
            sent.redeliver_rest()

    def _settle(self, deadline: Deadline) -> bool:
        """Wait for the receipts and for the answers to acknowledgements; return whether all are known.

        If all are known, nothing of the transaction can still reach a broker.
        """
        settled = self._receipts.wait(deadline) and self._receipts.settled
        for sent in self._acks:
            try:
                sent.settle(deadline)
            except errors.TxnBridgeError as error:
                _log.debug("acknowledging in a transaction that is aborted: %s", error)
                # A request without an answer may still arrive; a refused request has arrived.
                settled = settled and not isinstance(error.__cause__, wire.BrokerConnectionLost)
        return settled

    def _finish(self) -> None:
        """Clear the fields about the ended transaction, and leave it out of the next record on the fence topic."""
        if self._txn is not None:
            self._owner.forget(self._txn)
            self._last = tuple(self._sent)
        self._forget()

    # --- the writer itself ----------------------------------------------------------------------------------------

    def reopen(self, deadline: Deadline) -> None:
        self._hang_up()
        if self._txn is not None:
            try:
                # The transaction has to end, by commit or abort, before this writer begins the next one.
                ended = end(self._cluster, self._txn, False, tuple(self._announced), deadline)
            except errors.OutcomeUnknown as error:
                raise errors.BrokerUnavailable(f"ending the previous transaction: {error}") from error
            if ended is not EndResult.ABORTED:
                self._redeliver_rest()
            aborted = ended is EndResult.ABORTED or not self._registered
            if aborted or self._owner.in_doubt.resolve(self._announcement(), deadline):
                self._refuse_late_writes(deadline)
                self._finish()
            else:
                self._forget()  # the owner names the transaction on the fence topic until its outcome is known
        self._owner.check(deadline)
        self.proof = None  # a new presence record will say that all earlier transactions have ended

    def _hang_up(self) -> None:
        """Close this writer's connections. Messages that were already sent may still arrive at brokers."""
        self._owner.end_delivery.wait_for_unload_notices()
        self._cluster.client.hang_up(self._connection_key)
        self._producers.clear()

    def close(self) -> None:
        """Close this writer's connections. An open transaction times out, or is aborted by the id's next owner."""
        self._hang_up()


def _lost_partition_error() -> errors.Conflict:
    return errors.Conflict("the reader lost partitions whose messages the transaction acknowledges; they come again")
