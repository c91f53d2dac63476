"""The half messages of applications: each is stored as a prepared transaction, and ended by the application's answer.

Halves of half messages have producer groups of their own, so that the broker sends their check-backs to resolvers. When
all halves of a transaction are stored, a prepare record in the decision log names them. The first decision in the log
counts. So a resolver needs nothing from the process that stored the halves, and of two decisions only one takes effect.
A half message that is a single half needs no prepare record: with its half, all of it is stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from txnbridge.errors import BrokerUnavailable, NotFound, TxnBridgeError
from txnbridge.spi import Begin, Deadline, Decision, Half, HalfMessage, HalfStore, Identity, Outcome, Token
from txnbridge_rocketmq.admin.open_halves import OpenHalves, PendingHalf, list_open, resume_check_backs
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack, HalfAddress
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.outcome import PrepareRecord, end_fresh, end_prepared, prepare_record, prepared_by
from txnbridge_rocketmq.write import half_buffer
from txnbridge_rocketmq.write.message_format import from_wire
from txnbridge_rocketmq.write.owner import RocketMQOwner
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, is_over, origin_of, place_of
from txnbridge_rocketmq.write.writer import RocketMQPreparedWriter

_log = logging.getLogger("txnbridge")

# The maximum number of transactions that wait for a resolver. Brokers repeat the check-backs of dropped ones.
_MOST_WAITING = 10_000


class RocketMQHalfStore(HalfStore):
    """Stores, resolves and lists half messages for one bridge. Safe for use by several threads."""

    def __init__(self, ender: HalfEnder) -> None:
        self._ender = ender
        self._cluster = ender.cluster
        self._timing = ender.cluster.settings.timing
        self._changed = threading.Condition()
        # By group and transaction: the newest check-back about each half.
        self._check_backs: dict[str, OrderedDict[str, dict[str, CheckBack]]] = {}
        self._being_resolved: dict[str, float] = {}  # transaction: until when its check-backs wait
        self._owners: dict[str, RocketMQOwner] = {}

    def put(self, half: Half, deadline: Deadline) -> Half:
        owner = self._owner(half)
        owner.open(deadline)
        writer = _HalfMessageWriter(owner, half, self._cluster.settings.half_group(half.group))
        writer.begin(Begin(half.transaction, deadline, True, None))
        try:
            for message in half.messages:
                writer.send(*message)
        except BaseException:
            with suppress(TxnBridgeError):  # the next check-back aborts halves that no prepare record names
                writer.abort(deadline)
            raise
        writer.prepare(deadline)
        how = {"log": dict(writer.evidence().log or {}), "prepared": writer.prepared(), "fresh": [writer.halves()]}
        return replace(half, how=how)

    def _owner(self, half: Half) -> RocketMQOwner:
        """Return the owner, unique to this process, under whose name the transaction of `half` is written."""
        name = half.transaction.rsplit("/", 2)[0]
        with self._changed:
            if name not in self._owners:
                identity = Identity(name, False, self._cluster.settings.application, "")
                ledger = self._cluster.ledger(half.transaction, {})
                self._owners[name] = RocketMQOwner(self._cluster, identity, ledger, self._ender)
            return self._owners[name]

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        log = half.how.get("log")
        if log is None:
            raise NotFound(f"the broker has no half message of transaction {half.transaction!r}")
        ledger = self._cluster.ledger(half.transaction, log)
        if decision is Decision.UNDECIDED:
            claim = ledger.decided(half.transaction, deadline, log=log)
            if claim is None:
                self._release(half.transaction)
                return Outcome.UNKNOWN
            decision = claim.decision  # the process that decided the transaction may have died before ending the halves
        token = Token("rocketmq", self._cluster.id, half.transaction, {}, True, None, len(half.messages), None, log)
        # Taken, because a repeated attempt has to look up what is published.
        fresh = half.how["fresh"].pop() if half.how.get("fresh") else None
        prepared: PrepareRecord = half.how["prepared"]
        outcome = None
        if fresh is not None:
            outcome = end_fresh(self._ender, token, decision, prepared, fresh, ledger, deadline)
        if outcome is None:
            outcome = end_prepared(self._ender, token, decision, ledger, deadline, prepared=prepared, asked=True)
        self._release(half.transaction)
        return outcome

    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        self._join(group, deadline)
        halves: list[Half] = []
        while not halves and not deadline.expired:
            taken = self._take(group, limit, deadline)
            for transaction, checks in taken:
                # Divide the time: a transaction whose broker or log is down must leave time for the others.
                patience = Deadline(self._timing.resolver_timeout / len(taken))
                try:
                    if (half := self._half(group, transaction, checks, patience)) is not None:
                        halves.append(half)
                        continue
                except TxnBridgeError as error:
                    _log.warning("half message of transaction %s cannot be resolved now: %s", transaction, error)
                self._release(transaction)
        if not halves and not self._cluster.client.is_member:
            raise BrokerUnavailable(f"no broker is reachable, so no check-backs arrive for half messages of {group!r}")
        return halves

    def _join(self, group: str, deadline: Deadline) -> None:
        with self._changed:
            if group in self._check_backs:
                return
            self._check_backs[group] = OrderedDict()
        try:
            names = [self._cluster.settings.half_group(group)]
            self._cluster.producer_groups.join(names, lambda checks: self._note_check_backs(group, checks), deadline)
        except BaseException:
            with suppress(TxnBridgeError):  # the client is no member even if this fails: brokers ask other processes
                self.leave(group, deadline)
            raise

    def leave(self, group: str, deadline: Deadline) -> None:
        with self._changed:
            left = self._check_backs.pop(group, None)
        if left is not None:
            self._cluster.producer_groups.leave([self._cluster.settings.half_group(group)], deadline)

    def _note_check_backs(self, group: str, checks: Sequence[CheckBack]) -> None:
        """Keep check-backs for the next call of `checks`. Drop the oldest if too many wait: the broker repeats them."""
        with self._changed:
            asked = self._check_backs.get(group, OrderedDict())
            for check in checks:
                if (place := place_of(check.record)) is not None and self._is_own(check.record):
                    check = replace(check, record=replace(check.record, body=b""))  # thousands of check-backs may wait
                    asked.setdefault(place.transaction, {})[check.half.unique_key] = check
                    if len(asked) > _MOST_WAITING:
                        asked.popitem(last=False)
            self._changed.notify_all()

    def _is_own(self, record: MessageExt) -> bool:
        """Return whether this application stored a half; others may store theirs in the same group (hazard H84)."""
        application, origin = self._cluster.settings.application, origin_of(record)
        return origin is not None and origin.log.get("log", application) == application

    def _take(self, group: str, limit: int, deadline: Deadline) -> list[tuple[str, list[CheckBack]]]:
        """Wait for check-backs about a group's transactions that no caller resolves now; return them by transaction."""
        with self._changed:
            while True:
                now = time.monotonic()
                self._being_resolved = {name: until for name, until in self._being_resolved.items() if until > now}
                asked = self._check_backs.get(group, OrderedDict())
                free = [item for item in asked.items() if item[0] not in self._being_resolved][:limit]
                if free or not self._changed.wait(deadline.left()):
                    break
            for transaction, _ in free:
                del asked[transaction]
                self._being_resolved[transaction] = now + self._timing.resolver_timeout
            return [(transaction, list(checks.values())) for transaction, checks in free]

    def _release(self, transaction: str) -> None:
        with self._changed:
            self._being_resolved.pop(transaction, None)

    def _half(self, group: str, transaction: str, checks: Sequence[CheckBack], deadline: Deadline) -> Half | None:
        """Return the half message of a transaction that is undecided, or committed and not completely published.

        Return None for other transactions, and abort the halves of these check-backs. A half message that was not
        completely stored is aborted after its deadline, because the application has done no work for it.
        """
        record = checks[0].record
        origin = origin_of(record)
        if origin is None:
            return None
        ledger = self._cluster.ledger(transaction, origin.log)
        # Check the deadline before reading the log: if it is past, and the log then has no prepare record, none was
        # written in time, so the application has done no work (hazard H83).
        was_over = is_over(origin.deadline, self._timing.clocks_differ)
        claim = ledger.decided(transaction, deadline, log=origin.log)
        broker = checks[0].broker or self._cluster.topics.home
        prepared = prepared_by(record, broker) or prepare_record(ledger, transaction, origin.log, deadline)
        if claim is None and prepared is None and was_over:
            claim = ledger.claim(transaction, Decision.ABORT, half_buffer.halves_as_json([]), deadline, log=origin.log)
        settled = claim is not None and claim.decision is Decision.ABORT
        if prepared is not None and not settled:
            self._ender.require_brokers(prepared.topics, deadline)
            if claim is not None or prepared.whole:
                settled = not self._ender.missing(transaction, prepared.topics, deadline)
        if settled:
            self._ender.drop([(check.broker or self._cluster.topics.home, check.half) for check in checks], deadline)
            return None
        return None if prepared is None else self._as_half(group, transaction, record, origin, prepared, deadline)

    def _as_half(
        self,
        group: str,
        transaction: str,
        record: MessageExt,
        origin: HalfOrigin,
        prepared: PrepareRecord,
        deadline: Deadline,
    ) -> Half:
        return Half(
            group,
            transaction,
            [_message(copy) for copy in self._ender.copies(transaction, prepared.topics, deadline)],
            int(time.time() * 1000),
            origin.deadline,
            checks=int(record.properties.get(Property.CHECKS, 0) or 0),
            how={"log": dict(origin.log), "prepared": prepared},
        )

    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        return [half for each in self._discarded(group, deadline) if (half := self._parked(group, each, deadline))]

    def _parked(self, group: str, parked: OpenHalves, deadline: Deadline) -> Half | None:
        """Return the half message whose halves the broker has discarded (`parked`); None if some were never stored."""
        half, origin = parked.halves[0], parked.origin
        if origin is None:
            return None
        ledger = self._cluster.ledger(parked.name, origin.log)
        prepared = prepared_by(half.record, half.broker) or prepare_record(ledger, parked.name, origin.log, deadline)
        return None if prepared is None else self._as_half(group, parked.name, half.record, origin, prepared, deadline)

    def _discarded(self, group: str, deadline: Deadline) -> Iterator[OpenHalves]:
        """Yield the half messages of a group, of all applications, for which the broker stopped its check-backs."""
        for listed in list_open(self._cluster, deadline):
            named = self._cluster.settings.group_of_halves(listed.halves[0].record.properties.get(Property.GROUP, ""))
            if listed.state == "discarded" and named is not None and named[1] == group:
                yield listed

    def resume(self, half: Half, deadline: Deadline) -> None:
        for parked in self._discarded(half.group, deadline):
            if parked.name == half.transaction:
                resume_check_backs(self._cluster, parked, deadline)
                return
        raise NotFound(f"no half message of transaction {half.transaction!r} is parked in group {half.group!r}")


class _HalfMessageWriter(RocketMQPreparedWriter):
    """The writer of one half message. The decision about it may come as long as the broker keeps the message."""

    def __init__(self, owner: RocketMQOwner, half: Half, group: str) -> None:
        self._half = half
        self._group = group
        super().__init__(owner, 0)

    def _forget(self) -> None:
        super()._forget()
        self._halves = half_buffer.HalfBuffer(self._cluster.client, self._group)

    def _lifetime(self, begin: Begin) -> float:
        return begin.deadline.left()

    def begin(self, begin: Begin) -> None:
        super().begin(begin)
        home = self._cluster.brokers.config(self._cluster.topics.home, begin.deadline)
        self._expires_at = int((time.time() + home.retention) * 1000)
        longest = half_buffer.immunity(home) + half_buffer.DIRECT_SLACK_SECONDS
        is_whole = len(self._half.messages) == 1 and self._half.deadline_at / 1000 - time.time() > longest
        whole_until = self._expires_at if is_whole else None
        self._origin = replace(self._origin, deadline=self._half.deadline_at, whole_until=whole_until)

    def prepare(self, deadline: Deadline) -> None:
        if self._origin.whole_until is None:
            super().prepare(deadline)
        else:
            self._store(deadline)

    def prepared(self) -> PrepareRecord:
        return PrepareRecord(self._halves.topics, (), self._expires_at, whole=self._origin.whole_until is not None)

    def halves(self) -> Sequence[tuple[Queue, Sequence[HalfAddress]]]:
        return self._halves.stored()


def _message(record: MessageExt) -> HalfMessage:
    topic, number = PendingHalf("", record).partition
    message = from_wire(record, topic, number)
    return HalfMessage(topic, message.value, message.key, message.headers.raw, message.partition, message.timestamp)
