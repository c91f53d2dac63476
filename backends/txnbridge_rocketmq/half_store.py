"""Half messages for applications: halves of a producer group of their own, about which the broker asks that group.

What becomes of them is decided as of any prepared transaction: a record names the halves once all are stored, and the
first decision in the log counts. So a process that is asked needs no memory of it, and of two answers one counts.
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
from txnbridge.spi import (
    Begin,
    Deadline,
    Decision,
    Half,
    HalfMessage,
    HalfStore,
    Identity,
    Ledger,
    LedgerClaim,
    Outcome,
    Token,
)
from txnbridge_rocketmq.admin.open_halves import Found, ask_again, list_open
from txnbridge_rocketmq.client import Check, Property, Record
from txnbridge_rocketmq.outcome.end_transaction import Ender
from txnbridge_rocketmq.outcome.outcome import PREPARE, Prepared, end_prepared
from txnbridge_rocketmq.write.half_batch import Halves, parts_as_json, parts_from_json
from txnbridge_rocketmq.write.message_format import from_wire
from txnbridge_rocketmq.write.owner import Owner
from txnbridge_rocketmq.write.transaction_properties import Origin, is_over, mark_of, origin_of
from txnbridge_rocketmq.write.writer import PreparedWriter

_log = logging.getLogger("txnbridge")

# The broker asks about each half of a transaction, and again at each of its looks. While somebody here is at it, or for
# so long if he says nothing, all that is one question.
_LENT_SECONDS = 30.0
# Transactions that brokers have asked about and nobody has taken yet; about what is dropped here they ask again.
_REMEMBERED = 10_000


class RocketMQHalves(HalfStore):
    """Of one bridge, for all groups. Any thread may call."""

    def __init__(self, ender: Ender) -> None:
        self._ender = ender
        self._cluster = ender.cluster
        self._changed = threading.Condition()
        # By group: of each transaction the newest question about each of its halves.
        self._asked: dict[str, OrderedDict[str, dict[str, Check]]] = {}
        self._lent: dict[str, float] = {}  # transactions, until when
        self._owners: dict[str, Owner] = {}

    def put(self, half: Half, deadline: Deadline) -> Half:
        owner = self._owner(half)
        owner.open(deadline)
        writer = _HalfWriter(owner, half, self._cluster.settings.half_group(half.group))
        writer.begin(Begin(half.transaction, deadline, True, None))
        try:
            for message in half.messages:
                writer.send(*message)
        except BaseException:
            writer.give_up(deadline)
            raise
        writer.prepare(deadline)
        return replace(half, how={"log": dict(writer.evidence().log or {})})

    def _owner(self, half: Half) -> Owner:
        """Each process that stores half messages does so under a name of its own, which nobody else ever opens."""
        name = half.transaction.rsplit("/", 2)[0]
        with self._changed:
            if name not in self._owners:
                identity = Identity(name, False, self._cluster.settings.application, "")
                ledger = self._ledger(half.transaction, self._cluster.settings.application)
                self._owners[name] = Owner(self._cluster, identity, ledger, self._ender)
            return self._owners[name]

    def _ledger(self, transaction: str, application: str) -> Ledger:
        return self._cluster.context.ledger(application, transaction.rsplit("/", 2)[0])

    # --- ends -------------------------------------------------------------------------------------------------------

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        log = half.how.get("log")
        if log is None:
            raise NotFound(f"the broker has no half message of transaction {half.transaction!r}")
        ledger = self._ledger(half.transaction, str(log.get("log") or self._cluster.settings.application))
        if decision is Decision.UNDECIDED:
            claim = ledger.decided(half.transaction, deadline, log=log)
            if claim is None:
                self._give_back(half.transaction)
                return Outcome.UNKNOWN
            decision = claim.decision  # and the process that decided may not have come to end it
        token = Token("rocketmq", self._cluster.id, half.transaction, {}, True, None, len(half.messages), None, log)
        outcome = end_prepared(self._ender, token, decision, ledger, deadline)
        self._give_back(half.transaction)
        return outcome

    # --- questions --------------------------------------------------------------------------------------------------

    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        self._be_asked(group, deadline)
        found: list[Half] = []
        while not found and not deadline.expired:
            taken = self._take(group, limit, deadline)
            for transaction, checks in taken:
                # One that takes long, because a broker or a log is away, leaves time for the others.
                patience = Deadline(_LENT_SECONDS / len(taken))
                half = self._half_or_none(group, transaction, checks, patience)
                if half is not None:
                    found.append(half)
                else:
                    self._give_back(transaction)
        if not found and not self._cluster.client.is_member:
            raise BrokerUnavailable(f"no broker can be reached that could ask about half messages of {group!r}")
        return found

    def _half_or_none(self, group: str, transaction: str, checks: Sequence[Check], deadline: Deadline) -> Half | None:
        """One of which nobody can tell anything holds up no other."""
        try:
            return self._half(group, transaction, checks, deadline)
        except TxnBridgeError as error:
            _log.warning("half-message transaction %s is not asked about now: %s", transaction, error)
            return None

    def _be_asked(self, group: str, deadline: Deadline) -> None:
        with self._changed:
            if group in self._asked:
                return
            self._asked[group] = OrderedDict()
        try:
            names = self._producer_groups(group)
            self._cluster.members.answer_for(names, lambda checks: self._hear(group, checks), deadline)
        except BaseException:
            with self._changed:
                del self._asked[group]
            raise

    def _producer_groups(self, group: str) -> list[str]:
        settings = self._cluster.settings
        return [settings.half_group(group), settings.shared_half_group(group)]

    def leave(self, group: str, deadline: Deadline) -> None:
        with self._changed:
            left = self._asked.pop(group, None)
        if left is not None:
            self._cluster.members.answer_no_more(self._producer_groups(group), deadline)

    def _hear(self, group: str, checks: Sequence[Check]) -> None:
        """Note what brokers have asked meanwhile. Silence means that they ask again."""
        with self._changed:
            asked = self._asked.get(group, OrderedDict())
            for check in checks:
                if (mark := mark_of(check.record)) is not None and self._is_own(check.record):
                    check = replace(check, record=replace(check.record, body=b""))  # thousands may wait
                    asked.setdefault(mark.transaction, {})[check.half.unique_key] = check
                    if len(asked) > _REMEMBERED:
                        asked.popitem(last=False)
            self._changed.notify_all()

    def _is_own(self, record: Record) -> bool:
        """Whether a half is this application's: the shared producer group also has those of others."""
        application, origin = self._cluster.settings.application, origin_of(record)
        return origin is not None and origin.log.get("log", application) == application

    def _take(self, group: str, limit: int, deadline: Deadline) -> list[tuple[str, list[Check]]]:
        """Some that were asked about and that nobody here is at; it waits for one."""
        with self._changed:
            while True:
                now = time.monotonic()
                self._lent = {transaction: until for transaction, until in self._lent.items() if until > now}
                asked = self._asked.get(group, OrderedDict())
                free = [item for item in asked.items() if item[0] not in self._lent][:limit]
                if free or not self._changed.wait(deadline.left()):
                    break
            for transaction, _ in free:
                del asked[transaction]
                self._lent[transaction] = now + _LENT_SECONDS
            return [(transaction, list(checks.values())) for transaction, checks in free]

    def _give_back(self, transaction: str) -> None:
        with self._changed:
            self._lent.pop(transaction, None)

    def _half(self, group: str, transaction: str, checks: Sequence[Check], deadline: Deadline) -> Half | None:
        """What the application is asked about; None for what is settled, or was not wholly stored.

        For the latter no work was done. Of what is settled brokers may have made copies, about which they ask again.
        """
        record = checks[0].record
        origin = origin_of(record)
        if origin is None:
            return None
        ledger = self._ledger_in(transaction, origin)
        was_over = is_over(origin.deadline)  # before the log is read: what is noted before its end may lead to work
        claim = ledger.decided(transaction, deadline, log=origin.log)
        noted = _noted(ledger, transaction, origin, deadline)
        if claim is None and noted is None and was_over:
            claim = ledger.claim(transaction, Decision.ABORT, parts_as_json([]), deadline, log=origin.log)
        if claim is not None and not self._is_left(transaction, claim, deadline):
            home = self._cluster.topics.home
            self._ender.drop([(check.broker or home, check.half) for check in checks], deadline)
            return None
        return None if noted is None else self._shown(group, transaction, record, origin, noted, deadline)

    def _is_left(self, transaction: str, claim: LedgerClaim, deadline: Deadline) -> bool:
        """Whether somebody decided to publish, and has not come to do all of it."""
        if claim.decision is Decision.ABORT:
            return False
        return bool(self._ender.missing(transaction, parts_from_json(claim.data), deadline))

    def _shown(
        self, group: str, transaction: str, record: Record, origin: Origin, prepared: Prepared, deadline: Deadline
    ) -> Half:
        copies = self._ender.copies(transaction, prepared.parts, deadline)
        return Half(
            group,
            transaction,
            [_message(copy) for copy in copies],
            int(time.time() * 1000),
            origin.deadline,
            checks=int(record.properties.get(Property.CHECKS, 0) or 0),
            how={"log": dict(origin.log)},
        )

    def _ledger_in(self, transaction: str, origin: Origin) -> Ledger:
        return self._ledger(transaction, str(origin.log.get("log") or self._cluster.settings.application))

    # --- what nobody answered for -----------------------------------------------------------------------------------

    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        return [half for found in self._discarded(group, deadline) if (half := self._parked(group, found, deadline))]

    def _parked(self, group: str, found: Found, deadline: Deadline) -> Half | None:
        """None for what was not wholly stored: no work was done for that."""
        record, origin = found.halves[0].record, found.origin
        prepared = None if origin is None else _noted(self._ledger_in(found.name, origin), found.name, origin, deadline)
        if origin is None or prepared is None:
            return None
        return self._shown(group, found.name, record, origin, prepared, deadline)

    def _discarded(self, group: str, deadline: Deadline) -> Iterator[Found]:
        """Those of all applications: who looks after them need not be one."""
        for found in list_open(self._cluster, deadline):
            producer_group = found.halves[0].record.properties.get(Property.GROUP, "")
            named = self._cluster.settings.group_of_halves(producer_group)
            if found.state == "discarded" and named is not None and named[1] == group:
                yield found

    def resume(self, half: Half, deadline: Deadline) -> None:
        for found in self._discarded(half.group, deadline):
            if found.name == half.transaction:
                ask_again(self._cluster, found, deadline)
                return
        raise NotFound(f"no half message of transaction {half.transaction!r} is parked in group {half.group!r}")


class _HalfWriter(PreparedWriter):
    """Prepares the messages of one half. They may wait as long as the broker keeps what it has stored."""

    def __init__(self, owner: Owner, half: Half, group: str) -> None:
        self._half = half
        self._group = group
        super().__init__(owner, 0)

    def _forget(self) -> None:
        super()._forget()
        self._halves = Halves(self._cluster.client, self._group)

    def _lifetime(self, begin: Begin) -> float:
        return begin.deadline.left()

    def begin(self, begin: Begin) -> None:
        super().begin(begin)
        home = self._cluster.brokers.known(self._cluster.topics.home, begin.deadline)
        self._expires_at = int((time.time() + home.kept) * 1000)
        self._origin = replace(self._origin, deadline=self._half.deadline_at)

    def give_up(self, deadline: Deadline) -> None:
        """Nothing of it is to be published, ever."""
        with suppress(TxnBridgeError):  # no record names these halves, so they are dropped when the broker asks
            self.abort(deadline)


def _noted(ledger: Ledger, transaction: str, origin: Origin, deadline: Deadline) -> Prepared | None:
    """What the record says that stands in the log once all halves are stored."""
    for entry in ledger.find(transaction, deadline, log=origin.log):
        if entry.kind == PREPARE:
            return Prepared.from_json(entry.data)
    return None


def _message(record: Record) -> HalfMessage:
    topic = record.properties.get(Property.REAL_TOPIC, record.topic)
    number = record.properties.get("REAL_QID", "0")
    message = from_wire(record, topic, int(number) if number.isdigit() else 0)
    return HalfMessage(topic, message.value, message.key, message.headers.raw, message.partition, message.timestamp)
