"""This process as the owner of a transactional id, or of a name that it made up for itself."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from txnbridge.errors import BrokerUnavailable, DeliveryFailed, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Identity, Ledger, Writer
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.cleanup import ProofTopicCleanup
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import EndDelivery
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.late_writes import LateWriteGuard
from txnbridge_pulsar.outcome.outcome import EndResult, coordinator_state, end
from txnbridge_pulsar.outcome.proof import remove
from txnbridge_pulsar.write.fence import Fence
from txnbridge_pulsar.write.fence_identity import FenceIdentity
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord
from txnbridge_pulsar.write.prepared import PreparedSlots, PulsarPreparedWriter
from txnbridge_pulsar.write.writer import PulsarWriter

_log = logging.getLogger("txnbridge")

# An owner that goes spends so long on what only helps the next one, which can do without.
_COURTESY_SECONDS = 3.0
# A coordinator that has as many transactions as it may never answers a request for another, nor when one has ended.
_BEGIN_SECONDS = 3.0
# Half of what an entry can hold as Pulsar comes: the next owner says all of it again, and what is at risk besides.
_MOST_NOTICE_BYTES = 2_500_000
_PAUSE = 0.05  # with less left nothing is begun any more


class PulsarOwner:
    """Opens the id, announces its transactions on the fence topic, and knows when it is the owner no more.

    A name that the bridge made up for itself has no fence topic: no other process can hold it, and transactions that
    its process leaves open end by their own deadlines.
    """

    def __init__(self, cluster: ClusterAccess, identity: Identity, fence_ledger: Ledger) -> None:
        self.name = identity.name
        self.owned = identity.owned
        self.opening = secrets.token_hex(8)
        self.end_delivery = EndDelivery(cluster)
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
        self._coordinators = 0
        self._turn = itertools.count(secrets.randbelow(1000))
        self._writers: list[PulsarWriter] = []
        self._slots = PreparedSlots(cluster, cluster.settings.prepared_ids, self.in_doubt, self.forget)
        self._cleanup = ProofTopicCleanup(cluster, identity.name)

    # --- opening --------------------------------------------------------------------------------------------------

    def open_writers(self, count: int, deadline: Deadline) -> Sequence[Writer]:
        """Fence every older owner, end its transactions that are not prepared, and be ready to write."""
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
            self._under_way = {found.txn: found for found in left}
        # With all transactions that were left, so that the next owner finds them too, should this one die on the way.
        with self._cluster.events.step("step:announce", opening=self.opening):
            fence.write(lambda: self._fence_record(at_risk), deadline)
        self._fence_identity.record(self._fence_id, deadline)
        self._has_announced = True
        # Transactions that their coordinators have forgotten come first, and late messages are shut out when all are
        # looked at: any end on a topic takes back a commit that has not arrived there.
        in_order = sorted(left, key=lambda found: self._is_open(found, deadline))
        ended = [found for found in in_order if self._clear(found, "" if before is None else before.host, deadline)]
        self._refuse_late_writes(ended, deadline)
        for found in at_risk:
            self.late_write_guard.add(found, deadline)
        if self.late_write_guard.at_risk:  # else the transactions stand there as under way until the next announcement
            fence.write(self._fence_record, deadline)

    def _refuse_late_writes(self, ended: Sequence[AnnouncedTransaction], deadline: Deadline) -> None:
        """Have late messages refused: the older owner may be about to send, also in a transaction that it has ended
        itself, or that has timed out.
        """
        for found in ended:
            self.late_write_guard.add(found, deadline)
            self.forget(found.txn)

    def _is_open(self, found: AnnouncedTransaction, deadline: Deadline) -> bool:
        if found.prepared:
            return False
        try:
            return bool(coordinator_state(self._cluster, found.txn, found.proof, deadline))
        except BrokerUnavailable:
            return True  # only the order depends on it

    def _clear(self, found: AnnouncedTransaction, host: str, deadline: Deadline) -> bool:
        """End a transaction of an older owner, unless it is prepared.

        Whether it has ended, and it is known how, so that late messages of it can be shut out.
        """
        if found.prepared:
            is_unresolved = bool(coordinator_state(self._cluster, found.txn, found.proof, deadline))
            if is_unresolved or not self._resolve(found, host, deadline):
                self._slots.keep(found)
            else:
                self.forget(found.txn)
            return False
        try:
            with self._cluster.events.step("step:end", found.transaction, decision="abort"):
                ended = end(self._cluster, found.txn, False, found.topics, deadline)
        except OutcomeUnknown as error:
            raise BrokerUnavailable(f"opening {self.name}: {error}") from error
        if ended is not EndResult.ABORTED and not self._resolve(found, host, deadline):
            return False
        if ended is EndResult.ABORTED:
            _log.warning(
                "%s: an older owner (%s) had transaction %s open: it is alive, or died in it. It is shut out now, and"
                " the transaction is aborted",
                *(self.name, host, found.transaction),
            )
        return True

    def _resolve(self, found: AnnouncedTransaction, host: str, deadline: Deadline) -> bool:
        """Whether it can be told how a transaction ended that its coordinator has forgotten."""
        if self.in_doubt.resolve(found, deadline):
            return True
        _log.error(
            "%s: nobody can tell how transaction %s (%s) of an older owner (%s) ended. Nothing is sent to its topics"
            " until that is known; look at what `txnbridge doctor` says of them",
            *(self.name, found.transaction, found.txn, host),
        )
        return False

    def prepare_writer(self, deadline: Deadline) -> Writer:
        """A writer for one transaction. Raises `DeadlineExceeded` if too many are unresolved."""
        return PulsarPreparedWriter(self._cluster, self, self._slots, self._slots.take(self.name, deadline))

    # --- transactions ---------------------------------------------------------------------------------------------

    def new_transaction(self, seconds: Callable[[], float], deadline: Deadline) -> TxnId:
        """Begin at each coordinator in turn. If an answer is lost, a transaction is left that has touched nothing, and
        that ends by itself.

        `seconds` is how long it may be open, asked before each try: the time that earlier tries have taken is gone.
        """
        transactions = self._cluster.client.transactions
        with translated("beginning a transaction"):
            self._coordinators = self._coordinators or transactions.coordinators(deadline.left())
            while True:
                patience = min(deadline.left(), _BEGIN_SECONDS)
                ttl_ms = max(1, int(seconds() * 1000))
                try:
                    return transactions.begin(ttl_ms, patience, next(self._turn) % self._coordinators)
                except wire.PulsarError as error:
                    # A coordinator without a broker counts as retriable: another broker takes it up within seconds.
                    if not (error.retriable or isinstance(error, wire.RequestTimedOut)) or deadline.left() <= _PAUSE:
                        raise

    def require_no_doubt(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Raises `BrokerUnavailable` while one of these topics may hold a commit that our next end would take back."""
        self._refuse_late_writes(self.in_doubt.require(topics, deadline), deadline)

    def announce(self, found: AnnouncedTransaction, deadline: Deadline) -> None:
        """Return when the next owner of the id would find the transaction.

        Raises `Fenced` if there is a newer owner already, and `DeliveryFailed`, with nothing announced, if one record
        cannot hold all unresolved transactions.
        """
        with self._lock:
            before = self._under_way.get(found.txn)
            self._under_way[found.txn] = found
        if self._fence is None:
            return
        try:
            self._require_room()
            with self._cluster.events.step("step:announce", found.transaction, prepared=found.prepared):
                self._fence.write(self._fence_record, deadline)
        except DeliveryFailed:
            with self._lock:
                self._under_way.pop(found.txn, None)
                if before is not None:
                    self._under_way[found.txn] = before
            raise

    def _require_room(self) -> None:
        record = self._fence_record()
        size = len(record.pack())
        if size > _MOST_NOTICE_BYTES:
            raise DeliveryFailed(
                f"the topics of all {len(record.under_way)} transactions of {self.name} that have not ended make a"
                f" record of {size} bytes, and it can have {_MOST_NOTICE_BYTES}: write to fewer topics in one"
                " transaction, or commit or abort prepared ones first (`txnbridge transactions` lists them)"
            )

    def _fence_record(self, at_risk: Sequence[AnnouncedTransaction] = ()) -> FenceRecord:
        with self._lock:
            under_way = tuple(self._under_way.values())
        now = int(time.time() * 1000)
        at_risk = (*at_risk, *self.late_write_guard.at_risk)
        return FenceRecord(self.opening, self._host, now, under_way, at_risk, self._fence_id)

    def withdraw(self, found: AnnouncedTransaction) -> None:
        """Announce a transaction from the next announcement on as one that is not prepared after all."""
        with self._lock:
            self._under_way[found.txn] = found

    def forget(self, txn: TxnId) -> None:
        """Announce an ended transaction no more. Until the next announcement, a newer owner asks about it once."""
        with self._lock:
            self._under_way.pop(txn, None)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if there is a newer owner."""
        if self._fence is not None:
            self._fence.check(deadline)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Let go of the id. Prepared transactions live on, and the next owner finds them on the fence topic."""
        self.late_write_guard.close(deadline)
        self._cleanup.close()
        deadline = Deadline(min(deadline.left(), _COURTESY_SECONDS))
        self.end_delivery.close(deadline)
        try:
            if self._fence is None:
                for writer in self._writers:
                    self._remove(writer, deadline)
            elif self._has_announced:
                with self._lock:
                    clean = all(found.prepared for found in self._under_way.values())
                if clean:
                    self._fence.write(self._fence_record, deadline)
        except TxnBridgeError as error:
            _log.debug("closing %s: %s", self.name, error)
        finally:
            if self._fence is not None:
                self._fence.close(deadline)

    def _remove(self, writer: PulsarWriter, deadline: Deadline) -> None:
        """Remove the marker topic of a made-up name, unless a token waits for an outcome that only the topic tells."""
        if writer.proof is not None and not writer.unknown:
            remove(self._cluster, writer.proof.topic, deadline)
