"""Transactions that are prepared: each with a marker topic of its own until it is resolved."""

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

# While all marker topics are taken: how often to look whether one is free.
_LOOK_SECONDS = 0.2
# So many unresolved transactions are asked about before another topic is made, which takes longer than all of that.
_ASKED_FIRST = 4
# So long is looked how one of them ended: its coordinator is asked, then its marker, and then whatever else tells.
_CLEAR_SECONDS = 10.0


class PreparedSlots:
    """The marker topics of an owner's prepared transactions, by number. Any thread may call.

    One is used again when its marker topic tells how its last transaction ended. That the coordinator has forgotten
    the transaction does not suffice: the end of the next one there would take back a commit that the topic has not yet
    been told of, and the token of a committed transaction would tell that it was aborted.
    """

    def __init__(
        self, cluster: ClusterAccess, count: int, in_doubt: InDoubt, resolved: Callable[[TxnId], None]
    ) -> None:
        self._cluster = cluster
        self._count = count
        self._in_doubt = in_doubt
        self._told_resolved = resolved
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._unresolved: dict[int, AnnouncedTransaction] = {}
        self._hidden: set[TxnId] = set()  # of those: nobody has told how they ended
        self._used = 0  # all below have been used by this owner

    def keep(self, found: AnnouncedTransaction) -> None:
        """An unresolved transaction holds this slot until it is known how it ended."""
        if found.slot is not None:
            with self._lock:
                self._unresolved[found.slot] = found

    def release(self, slot: int) -> None:
        """No writer uses it any more."""
        with self._lock:
            self._taken.discard(slot)

    def take(self, name: str, deadline: Deadline) -> int:
        """A free slot. Raises `DeadlineExceeded` if all hold unresolved transactions for so long."""
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
        """The lowest free one, marked as taken."""
        with self._lock:
            for slot in range(below):
                if slot not in self._taken and slot not in self._unresolved:
                    self._taken.add(slot)
                    self._used = max(self._used, slot + 1)
                    return slot
        return None

    def _resolve(self, most: int, deadline: Deadline) -> None:
        """Ask about the oldest unresolved ones whether they have ended; about those of which nobody could tell, which
        takes seconds each, only when all slots are taken.
        """
        with self._lock:
            asked = [found for slot, found in self._unresolved.items() if slot not in self._taken]
            if most < self._count:
                asked = [found for found in asked if found.txn not in self._hidden][:most]
        for found in asked:
            if self._is_resolved(found, deadline):
                with self._lock:
                    self._hidden.discard(found.txn)
                    if found.slot is not None and self._unresolved.get(found.slot) is found:
                        del self._unresolved[found.slot]
                self._told_resolved(found.txn)

    def _is_resolved(self, found: AnnouncedTransaction, deadline: Deadline) -> bool:
        deadline = Deadline(min(_CLEAR_SECONDS, deadline.left()))
        try:
            if coordinator_state(self._cluster, found.txn, found.proof, deadline):
                return False
            if self._in_doubt.resolve(found, deadline):
                return True
        except TxnBridgeError as error:  # a broker may be away, and other slots are free
            _log.debug("how transaction %s ended: %s", found.transaction, error)
        with self._lock:
            self._hidden.add(found.txn)
        return False

    def _all_taken(self, name: str) -> str:
        with self._lock:
            oldest = next((found.transaction for found in self._unresolved.values()), "")
        return (
            f"all {self._count} prepared transactions that {name} may have are unresolved"
            + (f"; the oldest known is {oldest}" if oldest else "")
            + ": commit or abort some, or connect with a larger prepared_ids"
        )


class PulsarPreparedWriter(PulsarWriter):
    """Carries one transaction, which is prepared or aborted, and is then let go of."""

    def __init__(self, cluster: ClusterAccess, owner: TransactionOwner, slots: PreparedSlots, slot: int) -> None:
        super().__init__(cluster, owner, f"{owner.name}.p{slot}", slot)
        self._slots = slots
        self._number = slot
        self._expires_at: int | None = None
        self._prepared = False

    def _presence(self, deadline: Deadline) -> ProofLocation:
        """A record for each transaction, because its topic was another's before; it names the transaction behind it."""
        return self._write_presence(self._begin.transaction, deadline)

    def _ttl(self, begin: Begin) -> float:
        settings = self._cluster.settings
        wanted = settings.longest_prepared if begin.hold is None else begin.deadline.left() + begin.hold
        found = min(wanted, settings.longest_transaction)
        self._expires_at = int((time.time() + found) * 1000)
        return found

    def _announcement(self) -> AnnouncedTransaction:
        found = super()._announcement()
        return replace(found, expires_at=self._expires_at, messages=self.messages if self._prepared else 0)

    def evidence(self) -> Evidence:
        topics = () if self.proof is None else (self.proof.topic, *self._sent)
        evidence = replace(self._evidence, participants=Participants(topics, tuple(self._subscriptions)))
        return Evidence(evidence.fields(), self.messages, self._expires_at)

    def prepare(self, deadline: Deadline) -> None:
        require_whole_entries(self._acks)
        self._store(deadline)
        if self._txn is None:  # nothing was sent, and yet there has to be something that can be committed
            self._cover((), (), deadline)
            self._store(deadline)
        self.proof = self._located()
        assert self._txn is not None and self.proof is not None
        self._evidence = replace(self._evidence, proof=self.proof)
        # The owner of an id announces below that it is prepared. Of a name that was made up only the coordinator can
        # tell; the broker's log of the note is never emptied, but goes with the name's marker topic.
        ask = coordinator_state if self._owner.owned else note_prepared
        # Its time may have been over before the last message came: the broker takes late messages without a word.
        if ask(self._cluster, self._txn, self.proof, deadline) != "OPEN":
            raise self._ended_by_others(deadline)
        found = replace(self._announcement(), prepared=True, messages=self.messages)
        try:
            with self._cluster.events.step("step:record", self._begin.transaction):
                self._owner.announce(found, deadline)
        except BaseException:
            # The record may be stored all the same, and would spare a transaction that nobody has a token of.
            self._owner.withdraw(self._announcement())
            self._abort_quietly(deadline)
            raise
        self._prepared = True
        self._slots.keep(found)

    def commit(self, deadline: Deadline) -> None:
        raise InvalidState("a prepared transaction is committed by its token")

    def close(self) -> None:
        if self._txn is not None and not self._prepared:
            self._slots.keep(self._announcement())  # it could not be ended: its topic is not free before it has
        super().close()
        self._slots.release(self._number)
