"""Prepared transactions: each has a proof topic of its own until it is resolved."""

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
from txnbridge_pulsar.write.acks import require_whole_entries
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation
from txnbridge_pulsar.write.writer import PulsarWriter, TransactionOwner

_log = logging.getLogger("txnbridge")

# While all slots are taken, a free one is looked for this often.
_LOOK_SECONDS = 0.2
# Ask about this many unresolved transactions before another proof topic is created, which takes longer than asking.
_ASKED_FIRST = 4
# Finding out how one ended may take this long: from its coordinator, its proof, then the other evidence.
_CLEAR_SECONDS = 10.0


class PreparedSlots:
    """The proof topics of an owner's prepared transactions, by number. Any thread may call.

    A slot is used again once it is known how its last transaction ended. The coordinator's having forgotten the
    transaction does not suffice: the end of the slot's next transaction would take back a commit that has not reached
    the topic, and the token of a committed transaction would then read as aborted (hazard H51).
    """

    def __init__(self, cluster: ClusterAccess, count: int, in_doubt: InDoubt, on_end: Callable[[TxnId], None]) -> None:
        self._cluster = cluster
        self._count = count
        self._in_doubt = in_doubt
        self._report_resolved = on_end
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._unresolved: dict[int, AnnouncedTransaction] = {}
        self._unexplained: set[TxnId] = set()  # unresolved transactions of which nothing told how they ended
        self._used = 0  # all lower slots have been used by this owner

    def keep(self, announced: AnnouncedTransaction) -> None:
        """Keep the slot of an unresolved transaction taken until it is known how the transaction ended."""
        if announced.slot is not None:
            with self._lock:
                self._unresolved[announced.slot] = announced

    def release(self, slot: int) -> None:
        """Note that no writer uses the slot any more."""
        with self._lock:
            self._taken.discard(slot)

    def take(self, name: str, deadline: Deadline) -> int:
        """Take a free slot. Raise `DeadlineExceeded` if unresolved transactions hold all slots until the deadline."""
        while True:
            for asked in (0, _ASKED_FIRST):
                self._resolve(asked, deadline)
                if (slot := self._free(self._used)) is not None:
                    return slot
            if (slot := self._free(self._count)) is not None:
                return slot
            if deadline.left() <= _LOOK_SECONDS:
                raise DeadlineExceeded(self._all_taken(name))
            self._resolve(self._count, deadline)
            time.sleep(_LOOK_SECONDS)

    def _free(self, below: int) -> int | None:
        """Take the lowest free slot below a number."""
        with self._lock:
            for slot in range(below):
                if slot not in self._taken and slot not in self._unresolved:
                    self._taken.add(slot)
                    self._used = max(self._used, slot + 1)
                    return slot
        return None

    def _resolve(self, most: int, deadline: Deadline) -> None:
        """Ask how the oldest unresolved transactions ended. Those that could not be explained before take seconds each,
        so they are asked about only when all slots are taken.
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
        deadline = Deadline(min(_CLEAR_SECONDS, deadline.left()))
        try:
            if coordinator_state(self._cluster, announced.txn, announced.proof, deadline):
                return False
            if self._in_doubt.resolve(announced, deadline):
                return True
        except TxnBridgeError as error:  # a broker may be down, and other slots are free
            _log.debug("how transaction %s ended: %s", announced.transaction, error)
        with self._lock:
            self._unexplained.add(announced.txn)
        return False

    def _all_taken(self, name: str) -> str:
        with self._lock:
            oldest = next((announced.transaction for announced in self._unresolved.values()), "")
        return (
            f"all {self._count} prepared transactions that {name} may have are unresolved"
            + (f"; the oldest known is {oldest}" if oldest else "")
            + ": commit or abort some, or connect with a larger prepared_ids"
        )


class PulsarPreparedWriter(PulsarWriter):
    """Carries one transaction, which is prepared or aborted; then the writer is closed."""

    def __init__(self, cluster: ClusterAccess, owner: TransactionOwner, slots: PreparedSlots, slot: int) -> None:
        super().__init__(cluster, owner, f"{owner.name}.p{slot}", slot)
        self._slots = slots
        self._number = slot
        self._expires_at: int | None = None
        self._prepared = False

    def _presence(self, deadline: Deadline) -> ProofLocation:
        """Write a presence record that names the transaction: the proof topic served another transaction before."""
        return self._write_presence(self._begin.transaction, deadline)

    def _ttl(self, begin: Begin) -> float:
        settings = self._cluster.settings
        wanted = settings.longest_prepared if begin.hold is None else begin.deadline.left() + begin.hold
        seconds = min(wanted, settings.longest_transaction)
        self._expires_at = int((time.time() + seconds) * 1000)
        return seconds

    def _announcement(self) -> AnnouncedTransaction:
        announced = super()._announcement()
        return replace(announced, expires_at=self._expires_at, messages=self.messages if self._prepared else 0)

    def evidence(self) -> Evidence:
        topics = () if self.proof is None else (self.proof.topic, *self._sent)
        evidence = replace(self._evidence, participants=Participants(topics, tuple(self._subscriptions)))
        return Evidence(evidence.fields(), self.messages, self._expires_at)

    def prepare(self, deadline: Deadline) -> None:
        require_whole_entries(self._acks)
        self._store_or_abort(deadline)
        if self._txn is None:  # nothing was sent, but the token needs a transaction that can be committed
            self._register((), (), deadline)
            self._store_or_abort(deadline)
        self.proof = self._located_proof()
        assert self._txn is not None and self.proof is not None
        self._evidence = replace(self._evidence, proof=self.proof)
        # For a transactional id the fence topic says that the transaction is prepared, see below. For a made-up name
        # only the coordinator can say so (hazard H52); its pending-ack log of the note is never trimmed, but goes with
        # the proof topic.
        ask = coordinator_state if self._owner.owned else note_prepared
        # The transaction may have timed out before its last message arrived: brokers accept late messages silently.
        if ask(self._cluster, self._txn, self.proof, deadline) != "OPEN":
            raise self._ended_by_others(deadline)
        announced = replace(self._announcement(), prepared=True, messages=self.messages)
        try:
            with self._cluster.events.step("step:record", self._begin.transaction):
                self._owner.announce(announced, deadline)
        except BaseException:
            # The record may be stored all the same. It would spare a transaction of which nobody has the token.
            self._owner.withdraw(self._announcement())
            self._abort_quietly(deadline)
            raise
        self._prepared = True
        self._slots.keep(announced)

    def commit(self, deadline: Deadline) -> None:
        raise InvalidState("a prepared transaction is committed by its token")

    def close(self) -> None:
        if self._txn is not None and not self._prepared:
            self._slots.keep(self._announcement())  # its end failed, so its slot stays taken until it has ended
        super().close()
        self._slots.release(self._number)
