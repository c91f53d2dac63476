"""The writer: sends the half messages of one transaction at a time, decides it in the decision log, and ends them."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from txnbridge import errors
from txnbridge.spi import (
    Ack,
    Begin,
    Deadline,
    Decision,
    Evidence,
    Ledger,
    LedgerClaim,
    Outcome,
    Partition,
    Position,
    Raw,
    RawHeaders,
    Token,
    Writer,
    encode_item,
)
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, PublishedMessageMissing
from txnbridge_rocketmq.outcome.outcome import PREPARE, PrepareRecord, end_prepared, publish_exclusively
from txnbridge_rocketmq.write import half_buffer
from txnbridge_rocketmq.write.acks import RocketMQAckContext
from txnbridge_rocketmq.write.message_format import choose_queue, ordering_key, to_wire
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, TransactionPlace, properties, unique_key

_log = logging.getLogger("txnbridge")

# The least time for an abort, so that an expired transaction is still aborted in the decision log.
_LEAST_ABORT_SECONDS = 2.0


class WriterOwner(Protocol):
    """The attributes and methods of `RocketMQOwner` that its writers use."""

    cluster: RocketMQCluster
    ledger: Ledger
    ender: HalfEnder
    owned: bool
    opening: str | None

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if another process has opened the transactional id after this owner."""


class RocketMQWriter(Writer):
    """Writer of transactions: sends halves, records the decision in the log, and has the broker publish the halves.

    A decision cannot be undone: halves that this process does not publish, others publish after a check-back.
    """

    def __init__(self, owner: WriterOwner, number: int) -> None:
        self._owner = owner
        self._number = number
        self._unpublished: tuple[str, Sequence[half_buffer.HalfCount]] | None = None  # committed before
        self._cluster = owner.cluster
        self._round_robin = itertools.count(secrets.randbelow(1 << 16))
        self._begun = Begin("", Deadline(0), False, None)
        self._forget()

    def _forget(self) -> None:
        self._halves = half_buffer.HalfBuffer(self._cluster.client, self._cluster.settings.producer_group)
        self._acks: dict[RocketMQAckContext, list[Ack]] = {}
        self._direct = False  # whether an END without a decision in the log may have been sent
        self.messages = 0

    # --- one transaction ----------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        if self._unpublished is not None:  # now, because a next owner publishes only the last commit of each writer
            try:
                publish_exclusively(self._owner.ender, *self._unpublished, begin.deadline)
            except errors.EvidenceLost as error:  # no later attempt can succeed
                _log.warning("transaction %s is committed, and cannot be published: %s", self._unpublished[0], error)
            self._unpublished = None
        self._forget()
        self._begun = begin
        self._seconds = self._lifetime(begin)
        self._expires_at = int((time.time() + self._seconds) * 1000)
        self._origin = HalfOrigin(self._owner.ledger.begin(begin.deadline), self._expires_at, self._owner.opening)

    def _lifetime(self, begin: Begin) -> float:
        """Return the seconds from now in which no other process may abort the transaction."""
        return begin.deadline.left()

    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        if self.messages >= (most := self._cluster.settings.timing.transaction_messages):
            raise errors.InvalidOption(
                f"a transaction on RocketMQ has at most {most} messages, which are ended one by one; commit more often"
            )
        deadline = self._begun.deadline
        deadline.check("the transaction")
        written = self._written_topic(topic, partition, deadline)
        place = TransactionPlace(self._begun.transaction, written.count)
        own = properties(place, self._origin)
        message = to_wire(topic, value, key, headers, timestamp, own=own, unique_key=unique_key(topic, place))
        key = ordering_key(message, key)
        number = partition if partition is not None else choose_queue(key, len(written.queues), self._round_robin)
        self._halves.take(written, written.queues[number], message, deadline)
        self.messages += 1

    def _written_topic(self, topic: str, partition: int | None, deadline: Deadline) -> half_buffer.WrittenTopic:
        """Return the transaction's `WrittenTopic` for a topic, after a look-up of the topic at its first message.

        Raise `InvalidOption` if the transaction's timeout is longer than the time for which brokers send check-backs.
        """
        written = self._halves.written.get(topic)
        if written is None or (partition is not None and not 0 <= partition < len(written.queues)):
            queues = self._cluster.topics.require(topic, partition, deadline)
            if written is None:
                settings = self._cluster.brokers.config(queues[0].broker, deadline)
                if self._seconds > settings.longest_transaction:
                    raise errors.InvalidOption(
                        f"a transaction to {topic} may take {self._seconds:.0f} s here, and"
                        f" {settings.longest_transaction:g} s are allowed: broker {settings.name} discards halves"
                        f" after {settings.discarded_after:g} s (transactionCheckMax x transactionCheckInterval),"
                        " and must send check-backs before. Use a shorter timeout, or change the broker's settings"
                    )
                written = self._halves.written[topic] = half_buffer.WrittenTopic(queues, settings)
            written.queues = queues
        return written

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        for item in items:
            value, key, headers = (item, None, None) if item.__class__ is bytes else encode_item(item)
            self.send(topic, value, key, headers, None, None)

    def separate(self) -> None:
        self._halves.series += 1

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, RocketMQAckContext)
        deadline = self._begun.deadline
        deadline.check("the transaction")
        self._acks[context] = context.acks(positions, deadline, so_far=self._acks.get(context, ()))

    def flush(self, deadline: Deadline) -> None:
        """Wait until all messages sent so far are stored. Raise `DeliveryFailed` or `AccessDenied` if that fails."""
        with self._cluster.context.events.step("step:store", self._begun.transaction, messages=self.messages):
            self._halves.flush(deadline)

    def evidence(self) -> Evidence:
        how = half_buffer.halves_as_json(self._halves.topics) if self._direct else {}
        return Evidence(how, self.messages, self._expires_at, self._origin.log)

    # --- ending -------------------------------------------------------------------------------------------------------

    def commit(self, deadline: Deadline) -> None:
        self._store(deadline)
        if not (self.messages or self._acks):
            return
        self._direct = self._needs_no_decision()
        # From before the decision on, this process answers no check-backs about these halves.
        all_published = False
        with self._owner.ender.as_owner(self._begun.transaction), suppress(PublishedMessageMissing):
            all_published = self._publish(deadline) if self._direct else self._decide_and_publish(deadline)
        if not all_published and self._direct:
            self._decide_after_look_up(deadline)
        elif not all_published:
            self._publish_after_look_up(deadline)

    def _needs_no_decision(self) -> bool:
        """Return whether the broker's commit of the only half can commit the transaction, without a record in the log.

        The broker accepts this request within the immunity time only, so the half must be fresh. No other process ends
        the half before the deadline, which is later, and whoever ends it looks first whether the message is published
        (hazard H102). Therefore the broker must be one that finds messages, also after it was killed.
        """
        if self.messages != 1 or self._acks or self._owner.owned:
            return False
        (written,) = (each for each in self._halves.written.values() if each.count)
        immune = half_buffer.immunity(written.settings)
        in_time = self._expires_at / 1000 - time.time() > immune + half_buffer.DIRECT_SLACK_SECONDS
        return in_time and self._halves.age < immune / 2 and self._owner.ender.finds_published(written.settings)

    def _publish(self, deadline: Deadline) -> bool:
        """Commit the halves directly, without a look-up. Return whether all messages are published."""
        with self._cluster.context.events.step("step:publish", self._begun.transaction):
            return self._owner.ender.publish_fresh(self._begun.transaction, self._halves.stored(), deadline)

    def _decide_after_look_up(self, deadline: Deadline) -> None:
        """Commit in the log after a direct commit that was refused or not answered, unless the message is published.

        Raise `TransactionAborted`, or `OutcomeUnknown` if that fails.
        """
        try:
            outcome = self._end_direct(Decision.COMMIT, deadline)
        except errors.OutcomeUnknown:
            raise
        except errors.TxnBridgeError as error:
            raise errors.OutcomeUnknown(f"the broker may have published the message: {error}") from error
        if outcome is Outcome.ABORTED:
            raise errors.TransactionAborted("another process aborted the transaction; run it again")

    def _end_direct(self, decision: Decision, deadline: Deadline) -> Outcome:
        """End a transaction of one half by `decision`, unless its direct commit published it; return the outcome."""
        token = Token("rocketmq", self._cluster.id, self._begun.transaction, {}, False, log=self._origin.log)
        single = PrepareRecord(self._halves.topics, (), self._expires_at, whole=True)
        return end_prepared(self._owner.ender, token, decision, self._owner.ledger, deadline, prepared=single)

    def _decide_and_publish(self, deadline: Deadline) -> bool:
        """Record the decision to commit in the decision log, and have the brokers publish the halves.

        Return whether all messages are published; otherwise the caller looks up which are.
        """
        try:
            claim = self._claim(Decision.COMMIT, deadline, self._all_acks())
        except (errors.Conflict, errors.Fenced):
            self._abort_quietly(deadline)
            raise
        if claim.decision is Decision.ABORT:
            self._drop(deadline)
            if self._begun.deadline.expired or time.time() * 1000 >= self._expires_at:
                raise errors.TransactionTimedOut(
                    "the transaction was aborted because its deadline was past; run it again"
                )
            raise errors.TransactionAborted("another process aborted the transaction; run it again")
        try:
            return self._publish(deadline)
        except PublishedMessageMissing as error:
            raise self._unpublished_error(error) from error

    def _unpublished_error(self, error: errors.TxnBridgeError) -> errors.OutcomeUnknown:
        """Return the error for a committed transaction that may be unpublished. The next `begin` publishes it."""
        self._unpublished = self._begun.transaction, self._halves.topics
        return errors.OutcomeUnknown(
            "it is committed, and may not be published yet; after the broker's check-back any bridge of its application"
            f" publishes it: {error}"
        )

    def _all_acks(self) -> list[Ack]:
        return [ack for acks in self._acks.values() for ack in acks]

    def _claim(self, decision: Decision, deadline: Deadline, acks: Sequence[Ack] = ()) -> LedgerClaim:
        halves, transaction = half_buffer.halves_as_json(self._halves.topics), self._begun.transaction
        data = {**halves, "writer": self._number}
        with self._cluster.context.events.step("step:decide", transaction, decision=decision.value) as step:
            claim = self._owner.ledger.claim(transaction, decision, data, deadline, log=self._origin.log, acks=acks)
            step["decided"] = claim.decision.value
        return claim

    def _publish_after_look_up(self, deadline: Deadline) -> None:
        """Publish the committed messages whose END_TRANSACTION had no sure answer; first look up which are published.

        Raise `OutcomeUnknown` if that fails, or `EvidenceLost` if halves are gone.
        """
        try:
            publish_exclusively(self._owner.ender, self._begun.transaction, self._halves.topics, deadline)
        except errors.EvidenceLost:
            raise
        except errors.TxnBridgeError as error:
            raise self._unpublished_error(error) from error

    def _store(self, deadline: Deadline) -> None:
        """Wait until every half is stored. If that fails, abort the transaction and raise the error."""
        deadline.check("the transaction")
        try:
            self.flush(deadline)
        except (errors.DeliveryFailed, errors.AccessDenied):
            self._abort_quietly(deadline)
            raise

    def _abort_quietly(self, deadline: Deadline) -> None:
        """Abort a transaction that cannot commit, and log errors: if this fails, a check-back aborts it later."""
        try:
            self.abort(deadline)
        except errors.TxnBridgeError as error:
            _log.debug("transaction %s is aborted after its deadline: %s", self._begun.transaction, error)

    def abort(self, deadline: Deadline) -> None:
        deadline = max(deadline, Deadline(_LEAST_ABORT_SECONDS), key=Deadline.left)
        if not (self.messages or self._acks):
            return
        try:
            claim = self._claim(Decision.ABORT, deadline)
        except errors.BrokerUnavailable as error:
            raise errors.OutcomeUnknown(f"it is aborted after its deadline: {error}") from error
        if claim.decision is Decision.COMMIT:
            raise errors.InvalidState("the transaction is committed: an earlier call of commit succeeded")
        self._drop(deadline)

    def _drop(self, deadline: Deadline) -> None:
        deadline = max(deadline, Deadline(_LEAST_ABORT_SECONDS), key=Deadline.left)
        with self._cluster.context.events.step("step:drop", self._begun.transaction):
            self._owner.ender.drop([(q.broker, half) for q, each in self._halves.stored() for half in each], deadline)

    # --- reopening and closing ----------------------------------------------------------------------------------------

    def reopen(self, deadline: Deadline) -> None:
        """Make the writer usable after an error. If the last transaction is committed, `begin` publishes it later."""
        self._owner.check(deadline)
        self._settle(deadline)
        self._forget()

    def _settle(self, deadline: Deadline) -> None:
        """Write an ABORT claim for the previous transaction to the decision log, and carry out the claim that counts.

        This writer's COMMIT claim counts if it is in the log already, and not if it is written later (hazard H73).
        """
        if not (self.messages or self._acks):
            return
        transaction = self._begun.transaction
        try:
            if self._direct:  # looks up the message first
                self._end_direct(Decision.ABORT, deadline)
                return
            claim = self._claim(Decision.ABORT, deadline)
        except errors.EvidenceLost as error:
            _log.warning("the outcome of transaction %s is lost: %s", transaction, error)
        except errors.OutcomeUnknown as error:
            raise errors.BrokerUnavailable(
                f"the outcome of transaction {transaction} is not known yet: {error}"
            ) from error
        else:
            if claim.decision is Decision.COMMIT:
                self._unpublished = transaction, half_buffer.halves_from_json(claim.data)
            else:
                self._drop(deadline)

    def close(self) -> None:
        """Do nothing: the broker sends check-backs for halves that were not ended."""


class RocketMQPreparedWriter(RocketMQWriter):
    """Writer of a single transaction, which is prepared (durable, undecided, ended later by its token) or aborted."""

    def _lifetime(self, begin: Begin) -> float:
        if begin.hold is not None:
            return begin.deadline.left() + begin.hold
        home = self._cluster.brokers.config(self._cluster.topics.home, begin.deadline)
        return min(home.longest_transaction, home.retention)

    def prepare(self, deadline: Deadline) -> None:
        self._store(deadline)
        transaction = self._begun.transaction
        prepared = PrepareRecord(self._halves.topics, self._all_acks(), self._expires_at)
        try:
            with self._cluster.context.events.step("step:record", transaction):
                self._owner.ledger.record(PREPARE, transaction, prepared.as_json(self._origin.log), deadline)
                claim = self._owner.ledger.decided(transaction, deadline, log=self._origin.log)
                if claim is not None and claim.decision is Decision.ABORT:
                    raise errors.TransactionAborted("another process aborted the transaction; run it again")
                for context, acks in self._acks.items():
                    context.require_held(acks, transaction, deadline)
        except BaseException:
            # The prepare record may be stored although the call failed, but the caller gets no token to end it.
            self._abort_quietly(deadline)
            raise

    def commit(self, deadline: Deadline) -> None:
        raise errors.InvalidState("a prepared transaction is committed by its token")
