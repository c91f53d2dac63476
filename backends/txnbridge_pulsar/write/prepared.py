"""Writers of prepared transactions. Each such transaction has a proof topic of its own until its outcome is known."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from txnbridge.errors import DeadlineExceeded, InvalidState, TxnBridgeError
from txnbridge.spi import Begin, Deadline, Evidence
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.outcome.end_delivery import Participants
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.outcome import coordinator_state, note_prepared
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation
from txnbridge_pulsar.write.writer import PulsarWriter, TransactionOwner

_log = logging.getLogger("txnbridge")

# Seconds between two searches for a free slot while all slots are taken.
_RETRY_SECONDS = 0.2
# Ask for the outcomes of this many unresolved transactions before another proof topic is created, which takes longer.
_RESOLVED_BEFORE_NEW_SLOT = 4
# Seconds for finding the outcome of one transaction: from its coordinator, its proof message, then other evidence.
_RESOLVE_SECONDS = 10.0


class PreparedSlots:
    """Gives each prepared transaction of an owner a proof topic of its own, by its number (slot). Thread-safe.

    A slot is used again once the outcome of its last transaction is known. It is not enough that the coordinator has
    forgotten this transaction: if its commit has not reached the proof topic, the end of the slot's next transaction
    would drop the proof message, and the committed transaction would read as aborted (hazard H51).
    """

    def __init__(self, cluster: ClusterAccess, count: int, in_doubt: InDoubt, on_end: Callable[[TxnId], None]) -> None:
        self._cluster = cluster
        self._count = count
        self._in_doubt = in_doubt
        self._report_resolved = on_end
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._unresolved: dict[int, AnnouncedTransaction] = {}
        self._unexplained: set[TxnId] = set()  # unresolved transactions without any evidence of their outcomes
        self._used = 0  # this owner has used all slots below this number

    def keep(self, announced: AnnouncedTransaction) -> None:
        """Let no other transaction use an unresolved transaction's slot until the outcome of the latter is known."""
        if announced.slot is not None:
            with self._lock:
                self._unresolved[announced.slot] = announced

    def release(self, slot: int) -> None:
        """Note that the writer that used the slot's proof topic has finished with it."""
        with self._lock:
            self._taken.discard(slot)

    def take(self, name: str, deadline: Deadline) -> int:
        """Take a free slot and return its number. Raise `DeadlineExceeded` if none becomes free in time."""
        while True:
            for asked in (0, _RESOLVED_BEFORE_NEW_SLOT):
                self._resolve(asked, deadline)
                if (slot := self._free(self._used)) is not None:
                    return slot
            if (slot := self._free(self._count)) is not None:
                return slot
            if deadline.left() <= _RETRY_SECONDS:
                raise DeadlineExceeded(self._all_taken(name))
            self._resolve(self._count, deadline)
            time.sleep(_RETRY_SECONDS)

    def _free(self, below: int) -> int | None:
        """Take the lowest free slot below the number `below`, and return its number; None if none is free."""
        with self._lock:
            for slot in range(below):
                if slot not in self._taken and slot not in self._unresolved:
                    self._taken.add(slot)
                    self._used = max(self._used, slot + 1)
                    return slot
        return None

    def _resolve(self, most: int, deadline: Deadline) -> None:
        """Find the outcomes of the `most` oldest unresolved transactions, and free the slots of those that are known.

        This takes seconds for a transaction without evidence of its outcome. So a transaction that an earlier call
        could not resolve is tried again only when `most` is the number of all slots.
        """
        with self._lock:
            asked = [announced for slot, announced in self._unresolved.items() if slot not in self._taken]
            if most < self._count:
                asked = [announced for announced in asked if announced.txn not in self._unexplained][:most]
        for announced in asked:
            if self._is_resolved(announced, deadline):
                with self._lock:
                    self._unexplained.discard(announced.txn)
                    if announced.slot is not None and self._unresolved.get(announced.slot) is announced:
                        del self._unresolved[announced.slot]
                self._report_resolved(announced.txn)

    def _is_resolved(self, announced: AnnouncedTransaction, deadline: Deadline) -> bool:
        deadline = Deadline(min(_RESOLVE_SECONDS, deadline.left()))
        try:
            if coordinator_state(self._cluster, announced.txn, announced.proof, deadline):
                return False
            if self._in_doubt.resolve(announced, deadline):
                return True
        except TxnBridgeError as error:  # a broker may be down, but other slots may be free
            _log.debug("the outcome of transaction %s is not known: %s", announced.transaction, error)
        with self._lock:
            self._unexplained.add(announced.txn)
        return False

    def _all_taken(self, name: str) -> str:
        with self._lock:
            oldest = next((announced.transaction for announced in self._unresolved.values()), "")
        return (
            f"{name} has {self._count} prepared transactions that have not ended, and may not have more"
            + (f"; the oldest known is {oldest}" if oldest else "")
            + ": commit or abort some, or connect with a larger prepared_ids"
        )


class PulsarPreparedWriter(PulsarWriter):
    """Writer of a single transaction, which is prepared or aborted. After that the writer is closed."""

    _alone = True

    def __init__(self, cluster: ClusterAccess, owner: TransactionOwner, slots: PreparedSlots, slot: int) -> None:
        super().__init__(cluster, owner, f"{owner.name}.p{slot}")
        self._slots = slots
        self._slot = slot
        self._expires_at: int | None = None
        self._prepared = False

    def _presence(self, deadline: Deadline) -> ProofLocation:
        """Store a record that names the transaction on its proof topic (presence record); return its location."""
        return self._write_presence(self._begin.transaction, deadline)

    def _ttl(self, begin: Begin) -> float:
        settings = self._cluster.settings
        wanted = settings.longest_prepared if begin.hold is None else begin.deadline.left() + begin.hold
        seconds = min(wanted, settings.longest_transaction)
        self._expires_at = int((time.time() + seconds) * 1000)
        return seconds

    def _announcement(self) -> AnnouncedTransaction:
        announced = super()._announcement()
        messages = self.messages if self._prepared else 0
        return replace(announced, slot=self._slot, expires_at=self._expires_at, messages=messages)

    def evidence(self) -> Evidence:
        topics = () if self.proof is None else (self.proof.topic, *self._sent)
        evidence = replace(self._evidence, participants=Participants(topics, tuple(self._subscriptions)))
        return Evidence(evidence.fields(), self.messages, self._expires_at)

    def prepare(self, deadline: Deadline) -> None:
        self._store_or_abort(deadline)
        if self._txn is None:  # nothing was sent, but the token needs a transaction that can be committed
            self._register((), (), deadline)
            self._store_or_abort(deadline)
        self.proof = self._located_proof()
        assert self._txn is not None and self.proof is not None
        self._evidence = replace(self._evidence, proof=self.proof)
        # With a transactional id, the fence record below says that the transaction is prepared. Without one only the
        # coordinator can say so (hazard H52). The note has a pending-ack log, which is never trimmed, but is deleted
        # with the proof topic.
        ask = coordinator_state if self._owner.owned else note_prepared
        # The transaction may have timed out before its last message arrived: brokers accept late messages silently.
        if ask(self._cluster, self._txn, self.proof, deadline) != "OPEN":
            raise self._clean_up_after_foreign_end(deadline)
        announced = replace(self._announcement(), prepared=True, messages=self.messages)
        try:
            with self._cluster.events.step("step:record", self._begin.transaction):
                self._owner.announce(announced, deadline)
        except BaseException:
            # The fence record may be stored although the call failed. Because of it the next owner would not abort the
            # transaction, although nobody has its token.
            self._owner.mark_not_prepared(self._announcement())
            self._abort_quietly(deadline)
            raise
        self._prepared = True
        anchor = self._owner.anchors.hand_over(self._txn)
        self._evidence = replace(self._evidence, anchor=None if anchor is None else anchor.least)
        self._slots.keep(announced)
        for sent in self._acks:
            sent.note_prepared()

    def commit(self, deadline: Deadline) -> None:
        raise InvalidState("a prepared transaction is committed by its token")

    def close(self) -> None:
        if self._txn is not None and not self._prepared:
            self._slots.keep(self._announcement())  # the abort failed: keep the slot until the transaction ends
        super().close()
        self._slots.release(self._slot)
