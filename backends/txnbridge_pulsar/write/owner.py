"""The owner of a transactional id, or of the random name of a bridge without a transactional id."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeliveryFailed,
    EvidenceLost,
    OutcomeUnknown,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, Identity, Ledger, LedgerValue, Writer
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.cleanup import ProofTopicCleanup
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.anchors import Anchors, end_anchors
from txnbridge_pulsar.outcome.end_delivery import EndDelivery
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.late_writes import LateWriteGuard
from txnbridge_pulsar.outcome.outcome import EndResult, coordinator_state, end
from txnbridge_pulsar.outcome.proof import remove
from txnbridge_pulsar.write.fence import Fence
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord
from txnbridge_pulsar.write.prepared import PreparedSlots, PulsarPreparedWriter
from txnbridge_pulsar.write.writer import PulsarWriter

_log = logging.getLogger("txnbridge")

# Seconds for the last steps of closing, which only save the next owner work.
_CLOSE_SECONDS = 3.0
# Seconds to wait for the answer to a begin request. A coordinator at its limit of open transactions never answers, not
# even after a transaction has ended.
_BEGIN_SECONDS = 3.0

_MIN_RETRY_SECONDS = 0.05  # with fewer seconds left, a request is not repeated


class FenceIdentity:
    """The random id (fence id) of one fence topic: it detects that the topic was deleted and created again.

    With a fence topic the names of all unresolved transactions are deleted. On a new topic of the same name the broker
    counts epochs from the start, so it does not refuse the older owner. So a transactional id has a random fence id,
    which its first fence record gets, and which all later records and the decision log repeat. A topic that was created
    again has no fence id, or another one (hazard H43).

    `ledger` is the part of the decision log for this fence topic; each cluster has its own.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._value = LedgerValue(ledger)
        self._is_disabled = False

    def follow(self, before: FenceRecord | None, deadline: Deadline) -> str:
        """Return the fence id for the newest owner's records, called while this owner holds the fence topic.

        The id is that of the decision log or of `before`, the fence topic's last record, or a new one if there is none.
        Raise `EvidenceLost` if the decision log has a fence id, and the fence topic has another one or no record.
        """
        try:
            value = self._value.read(deadline)
        except AccessDenied as error:
            self._disable_check(error)
            value = None
        known = "" if value is None else str(value["lineage"])
        recorded_id = "" if before is None else before.fence_id
        if known and recorded_id != known:
            raise self._lost()
        return known or recorded_id or secrets.token_hex(8)

    def record(self, fence_id: str, deadline: Deadline) -> None:
        """Record the fence id in the decision log, after this owner's first fence record.

        If only the log had it, the next owner could not open the id. Raise `EvidenceLost` if the log has another one.
        """
        if self._is_disabled:
            return
        try:
            recorded = self._value.update(lambda value: None if value else {"lineage": fence_id}, deadline)
        except AccessDenied as error:
            self._disable_check(error)
        else:
            if recorded is not None and str(recorded["lineage"]) != fence_id:
                raise self._lost()

    def _lost(self) -> EvidenceLost:
        return EvidenceLost(
            f"the fence topic of {self._name} was deleted, and with it the names of transactions that have not ended."
            " Stop every program that uses this id, end the transactions that `txnbridge transactions` lists, and then"
            " connect with another transactional_id"
        )

    def _disable_check(self, error: AccessDenied) -> None:
        self._is_disabled = True
        _log.warning("%s: it will not be noticed if the fence topic is deleted: %s", self._name, error)


class PulsarOwner:
    """Owner of a transactional id: opens the id, names its transactions on the fence topic, notices a newer owner.

    The owner of a bridge without a transactional id has a random name and no fence topic: no other process can use this
    name, and transactions that a dead process leaves open time out.
    """

    def __init__(self, cluster: ClusterAccess, identity: Identity, fence_ledger: Ledger) -> None:
        self.name = identity.name
        self.owned = identity.owned
        self.opening = secrets.token_hex(8)
        self.anchors = Anchors(cluster)
        self.end_delivery = EndDelivery(cluster, self.anchors)
        self.in_doubt = InDoubt(cluster)
        self.late_write_guard = LateWriteGuard(cluster, self.end_delivery, self.in_doubt)
        self._cluster = cluster
        self._host = identity.host
        self._fence = Fence(cluster, identity.name, self.opening) if identity.owned else None
        self._fence_identity = FenceIdentity(identity.name, fence_ledger)
        self._fence_id = ""
        self._has_announced = False
        self._under_way: dict[TxnId, AnnouncedTransaction] = {}
        self._lock = threading.Lock()
        self._writers: list[PulsarWriter] = []
        self._slots = PreparedSlots(cluster, cluster.settings.prepared_ids, self.in_doubt, self.forget)
        self._cleanup = ProofTopicCleanup(cluster, identity.name)

    def open_writers(self, count: int, deadline: Deadline) -> Sequence[Writer]:
        """Fence the older owners of the id, and end their transactions that are not prepared. Return new writers."""
        if self._fence is not None:
            self._open(self._fence, deadline)
        self._cleanup.start()
        self._writers = [PulsarWriter(self._cluster, self, f"{self.name}.{number}") for number in range(count)]
        return self._writers

    def _open(self, fence: Fence, deadline: Deadline) -> None:
        before = fence.take(deadline)
        self._fence_id = self._fence_identity.follow(before, deadline)
        left: Sequence[AnnouncedTransaction] = () if before is None else before.under_way
        at_risk: Sequence[AnnouncedTransaction] = () if before is None else before.at_risk
        with self._lock:
            self._under_way = {announced.txn: announced for announced in left}
        # The first record repeats all transactions that older owners left open: the next owner has to find them if this
        # process dies now (hazard H38).
        with self._cluster.events.step("step:announce", opening=self.opening):
            fence.write(lambda: self._fence_record(at_risk), deadline)
        self._fence_identity.record(self._fence_id, deadline)
        self._has_announced = True
        # Transactions that their coordinators have forgotten come first, and brokers are made to refuse late messages
        # only after all outcomes were looked for. Both steps end transactions, and any end on a topic takes back a
        # commit that has not reached the topic (hazard H50).
        in_order = sorted(left, key=lambda announced: self._is_left_open(announced, deadline))
        host = "" if before is None else before.host
        ended = [announced for announced in in_order if self._end_left_open(announced, host, deadline)]
        if before is not None and not self.in_doubt.is_any:
            end_anchors(self._cluster, before.anchors, deadline)
        self._refuse_late_writes(ended, deadline)
        for announced in at_risk:
            self.late_write_guard.add(announced, deadline)
        if self.late_write_guard.at_risk:  # else the first record, which names them as under way, is enough
            fence.write(self._fence_record, deadline)

    def _refuse_late_writes(self, ended: Sequence[AnnouncedTransaction], deadline: Deadline) -> None:
        """Have brokers refuse late messages of ended transactions: an older owner may still send some (hazard H44).

        The older owner may do so even if the transaction has timed out, or if the older owner itself has ended it.
        """
        for announced in ended:
            self.late_write_guard.add(announced, deadline)
            self.forget(announced.txn)

    def _is_left_open(self, announced: AnnouncedTransaction, deadline: Deadline) -> bool:
        if announced.prepared:
            return False
        try:
            return bool(coordinator_state(self._cluster, announced.txn, announced.proof, deadline))
        except BrokerUnavailable:
            return True  # only the order of resolving depends on this result

    def _end_left_open(self, announced: AnnouncedTransaction, host: str, deadline: Deadline) -> bool:
        """End a transaction that an older owner, on `host`, has announced, unless the transaction is prepared.

        Return whether the transaction has ended and its outcome is known. Only then may brokers be made to refuse the
        transaction's late messages.
        """
        if announced.prepared:
            is_unresolved = bool(coordinator_state(self._cluster, announced.txn, announced.proof, deadline))
            if is_unresolved or not self._resolve(announced, host, deadline):
                self._slots.keep(announced)
            else:
                self.forget(announced.txn)
            return False
        try:
            with self._cluster.events.step("step:end", announced.transaction, decision="abort"):
                ended = end(self._cluster, announced.txn, False, announced.topics, deadline)
        except OutcomeUnknown as error:
            raise BrokerUnavailable(f"opening {self.name}: {error}") from error
        if ended is not EndResult.ABORTED and not self._resolve(announced, host, deadline):
            return False
        if ended is EndResult.ABORTED:
            _log.warning(
                "%s: transaction %s of an older owner (%s) was open and is aborted. The older owner has died, or is"
                " fenced now",
                *(self.name, announced.transaction, host),
            )
        return True

    def _resolve(self, announced: AnnouncedTransaction, host: str, deadline: Deadline) -> bool:
        """Find the outcome of a transaction that its coordinator has forgotten; return whether the outcome is known.

        If the transaction was committed, deliver the commit to all its participants again.
        """
        if self.in_doubt.resolve(announced, deadline):
            return True
        _log.error(
            "%s: the outcome of transaction %s (%s) of an older owner (%s) is not known yet. Nothing is sent to its"
            " topics until it is known; `txnbridge doctor` says what to do",
            *(self.name, announced.transaction, announced.txn, host),
        )
        return False

    def prepare_writer(self, deadline: Deadline) -> Writer:
        """Return a writer for one prepared transaction. Raise `DeadlineExceeded` if no proof topic becomes free."""
        return PulsarPreparedWriter(self._cluster, self, self._slots, self._slots.take(self.name, deadline))

    def new_transaction(self, seconds: Callable[[], float], deadline: Deadline, alone: bool = False) -> TxnId:
        """Begin a transaction behind an anchor, and another one if the answer is lost; the first then times out.

        `seconds` is called before each request, and returns the transaction's timeout in seconds. Transactions share
        anchors unless they are `alone`.
        """
        anchored = True
        with translated("beginning a transaction"):
            while True:
                patience = min(deadline.left(), _BEGIN_SECONDS)
                try:
                    if anchored:
                        return self.anchors.begin(seconds, patience, alone)
                    return self._cluster.client.transactions.begin(max(1, int(seconds() * 1000)), patience)
                except wire.PulsarError as error:
                    self.end_delivery.watch()  # the anchor may have no user left
                    anchored = not isinstance(error, wire.RequestTimedOut)  # there may be room for one only
                    # A coordinator without a broker counts as retriable: another broker takes it over within seconds.
                    may_succeed = error.retriable or isinstance(error, wire.RequestTimedOut)
                    if not may_succeed or deadline.left() <= _MIN_RETRY_SECONDS:
                        raise

    def require_no_doubt(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Raise `BrokerUnavailable` if a transaction in doubt used one of these topics.

        If it was committed, the end of another transaction on the topic could take its commit back.
        """
        self._refuse_late_writes(self.in_doubt.require(topics, deadline), deadline)

    def announce(self, announced: AnnouncedTransaction, deadline: Deadline) -> None:
        """Name a transaction on the fence topic, where the next owner finds it. Raise `Fenced` for a newer owner.

        Raise `DeliveryFailed`, and announce nothing, if all unresolved transactions do not fit in one fence record.
        """
        with self._lock:
            before = self._under_way.get(announced.txn)
            self._under_way[announced.txn] = announced
        if self._fence is None:
            return
        try:
            self._require_room()
            with self._cluster.events.step("step:announce", announced.transaction, prepared=announced.prepared):
                self._fence.write(self._fence_record, deadline)
        except DeliveryFailed:
            with self._lock:
                self._under_way.pop(announced.txn, None)
                if before is not None:
                    self._under_way[announced.txn] = before
            raise

    def _require_room(self) -> None:
        record = self._fence_record()
        size = len(record.pack())
        if size > (limit := self._cluster.settings.timing.max_fence_record_bytes):
            raise DeliveryFailed(
                f"the fence record of the {len(record.under_way)} transactions of {self.name} that have not ended would"
                f" have {size} bytes; the limit is {limit}. Write to fewer topics in one transaction, or end prepared"
                " ones first (`txnbridge transactions` lists them)"
            )

    def _fence_record(self, at_risk: Sequence[AnnouncedTransaction] = ()) -> FenceRecord:
        missed = {each.txn: each for each in self.end_delivery.missed_commits()}
        with self._lock:
            under_way = tuple({**missed, **self._under_way}.values())
        now = int(time.time() * 1000)
        at_risk = (*at_risk, *self.late_write_guard.at_risk)
        anchors = self.anchors.open(each.txn for each in under_way if each.prepared)  # those are ended by their tokens
        return FenceRecord(self.opening, self._host, now, under_way, at_risk, self._fence_id, anchors)

    def mark_not_prepared(self, announced: AnnouncedTransaction) -> None:
        """List a transaction as not prepared in the next record on the fence topic, before its writer aborts it.

        The writer calls this if it could not announce the transaction as prepared.
        """
        with self._lock:
            self._under_way[announced.txn] = announced

    def forget(self, txn: TxnId) -> None:
        """Leave a transaction that has ended out of the next record on the fence topic.

        If this owner dies before it writes that record, the next owner finds the outcome again, which does no harm.
        """
        with self._lock:
            self._under_way.pop(txn, None)
        self.anchors.ended(txn)
        self.end_delivery.watch()

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if the transactional id has a newer owner."""
        if self._fence is not None:
            self._fence.check(deadline)

    def close(self, deadline: Deadline) -> None:
        """Give up the transactional id. The next owner finds the prepared transactions on the fence topic."""
        self.late_write_guard.close(deadline)
        self._cleanup.close()
        deadline = Deadline(min(deadline.left(), _CLOSE_SECONDS))
        self.end_delivery.close(deadline)
        try:
            if self._fence is None:
                for writer in self._writers:
                    # Nobody needs the proof topic of a bridge without an id, unless a token or a missed end needs it.
                    if writer.proof is not None and not (writer.unknown or self.end_delivery.has_given_up):
                        remove(self._cluster, writer.proof.topic, deadline)
            elif self._has_announced:
                with self._lock:
                    clean = all(announced.prepared for announced in self._under_way.values())
                if clean:
                    self._fence.write(self._fence_record, deadline)
        except TxnBridgeError as error:
            _log.debug("closing %s: %s", self.name, error)
        finally:
            if self._fence is not None:
                self._fence.close(deadline)
