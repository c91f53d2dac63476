"""Prepared transactions, and the pool of transactional ids for them.

Until a prepared transaction is ended, no other transaction uses its id. Then the id is opened again for the next.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import ceil
from typing import Any
from weakref import WeakValueDictionary

from txnbridge.errors import DeadlineExceeded, Fenced, InvalidState, TransactionTimedOut, TxnBridgeError
from txnbridge.spi import Begin, Deadline, Evidence, LedgerEntry, Token
from txnbridge_kafka.client.protocol_types import COMMITTED, OPEN, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.write.owner import PREPARE, KafkaOwner, evidence_key
from txnbridge_kafka.write.producer import LEAST_TIMEOUT_MS
from txnbridge_kafka.write.writer import KafkaWriter

_log = logging.getLogger("txnbridge")

# The interval of checks for a free id, while all ids have unresolved transactions.
_CHECK_SECONDS = 0.2
# The longest opening of an id in the background, ahead of its use.
_OPEN_AHEAD_SECONDS = 30.0
# The most ids that are opened ahead. An opening takes 25 ms, nearly all of it waiting; a short transaction takes 15 ms.
_MOST_AHEAD = 4


def prepares_for(timeout_ms: int) -> int | None:
    """Return the seconds to prepare a part of a transaction that spans brokers, from its time-out; None for others."""
    return timeout_ms % 1000 or None


def is_pool_id(id: str, name: str) -> bool:
    """Return whether a transactional id of Kafka is for prepared transactions of the bridge's transactional id `name`.

    Only its owner uses this id; another owner of `name` opens it only to abort a leftover transaction (hazard H15).
    """
    return re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{16}}\.p\d+", id) is not None


class KafkaPreparedWriter(KafkaWriter):
    """Writes one transaction, and prepares or aborts it. `close` returns the transactional id to the pool."""

    def __init__(
        self, pool: PreparedIdPool, cluster: KafkaCluster, owner: KafkaOwner, id: str, timeout_ms: int
    ) -> None:
        super().__init__(cluster, owner, id, timeout_ms)
        self._pool = pool

    def begin(self, begin: Begin) -> None:
        timeout_ms = self._pool.timeout_ms(begin)
        self._pool.open_ahead(timeout_ms)
        if timeout_ms != self.session.timeout_ms:
            # The broker takes a transaction time-out only when an id is opened.
            self.session.timeout_ms = timeout_ms
            self.session.stale = "another time-out was asked for"
        super().begin(begin)

    def open(self, deadline: Deadline) -> None:
        """Open the id. If a copy of an InitProducerId request may still be under way, open a new id instead.

        A late copy of the request would abort the transaction that is prepared under the id (hazard H17).
        """
        while True:
            try:
                super().open(deadline)
            except BaseException:
                self._take_another_id()
                raise
            if not self._producer().taint_reason():
                return
            self._take_another_id()
            deadline.check("opening an id for a prepared transaction")

    def _take_another_id(self) -> None:
        self.session.use_id(self._pool.replace_id(self.id))

    def evidence(self) -> Evidence:
        plain = super().evidence()
        if self._start is None:
            return plain
        how = {name: value for name, value in plain.how.items() if name != "asked"}
        return replace(plain, how={**how, "start": self._start}, expires_at=self._start + self.session.timeout_ms)

    def prepare(self, deadline: Deadline) -> None:
        opened = self.session.opened
        assert opened is not None
        empty = not self.messages and not self._acks
        self._store(deadline)
        if empty:
            # A transaction begins with its first partition or group, so a group is added that no consumer uses.
            group = f"{self._cluster.settings.prefix}empty"
            self._cluster.requests.add_offsets(self.id, opened.pid, opened.epoch, group, deadline)
        last = self._cluster.requests.describe([self.id], deadline).get(self.id)
        if last is None or last.state != OPEN or (last.pid, last.epoch) != (opened.pid, opened.epoch):
            self._owner.check(deadline)
            self.session.abort_from_outside(deadline)
            raise TransactionTimedOut("the transaction timed out before it was prepared")
        self._start = last.start
        with self._cluster.events.step("step:record", self._begun.transaction):
            self._record(deadline)
        self.session.drop()

    def _record(self, deadline: Deadline) -> None:
        """Record in the decision log that the transaction is prepared, so that the id's next owner does not abort it.

        If there is a newer owner already, abort the transaction and raise `Fenced`.
        """
        evidence = self.evidence()
        log = None if evidence.log is None else dict(evidence.log)
        data = {**evidence.how, "expires_at": evidence.expires_at, "messages": evidence.messages, "log": log}
        try:
            self._owner.ledger.record(PREPARE, self._begun.transaction, data, deadline)
        except Fenced:
            self.session.abort_from_outside(deadline)
            raise

    def commit(self, deadline: Deadline) -> None:
        raise InvalidState("a prepared transaction is committed by its token")

    def close(self) -> None:
        super().close()
        self._pool.release(self)


class PreparedIdPool:
    """The pool of an owner's transactional ids for prepared transactions, each of which needs an id until its end.

    One id is opened ahead in the background, with the time-out of the last transaction that began: the next transaction
    most likely asks for the same time-out, and opens the id again if not. Each time a transaction finds no open id, one
    more is opened ahead from then on. An id with an unresolved transaction is never opened.
    """

    def __init__(self, cluster: KafkaCluster, owner: KafkaOwner, timeout_ms: int, longest_ms: int) -> None:
        self._cluster = cluster
        self._owner = owner
        self._longest_ms = longest_ms // 1000 * 1000
        self._default_ms = min(max(LEAST_TIMEOUT_MS, ceil(timeout_ms / 1000) * 1000), self._longest_ms)
        self._last_ms = self._default_ms  # the time-out of the last transaction that began
        self._ids: list[str] = []
        self._numbers = count()
        # By id. A writer that an exception of a signal handler has dropped gives its id back, too.
        self._taken: WeakValueDictionary[str, KafkaPreparedWriter] = WeakValueDictionary()
        self._used: set[str] = set()  # every id that was ever taken
        self._next = 0
        self._ready: deque[KafkaPreparedWriter] = deque()
        self._lock = threading.Lock()
        self._ahead: list[threading.Thread] = []  # each opens an id
        self._wanted_ahead = 1
        self._closed = False

    def timeout_ms(self, begin: Begin) -> int:
        """Return a transaction's time-out at the broker: its deadline's seconds plus `hold`; without `hold` the pool's.

        Whole seconds let the next transaction use an id that was opened ahead. For a part of a transaction that spans
        brokers, add as many milliseconds as its process has seconds to prepare it, if other bridges can find its
        prepare record: nothing else tells them about a part whose process dies first.
        """
        if begin.hold is None:
            return self._default_ms
        seconds = max(1, ceil(begin.deadline.seconds))
        told = seconds if begin.in_span and seconds < 1000 and self._cluster.settings.common_logs else 0
        return min(max(LEAST_TIMEOUT_MS, 1000 * (seconds + ceil(begin.hold))) + told, self._longest_ms)

    def take(self, deadline: Deadline) -> KafkaPreparedWriter:
        """Return a writer with a newly opened id; wait while every id has an unresolved transaction.

        Raise `Fenced` if the owner's id has a newer owner, and `DeadlineExceeded` if no id becomes free in time.
        """
        self._owner.open_once(deadline)
        with self._lock:
            while len(self._ids) < self._owner.prepared_ids:
                self._ids.append(self._new_id())
        writer, oldest = self._take_or_open(deadline), None
        while writer is None:
            # The error at the deadline names the oldest transaction, which the caller may then end.
            oldest = self._oldest(deadline) or oldest
            if deadline.left() <= _CHECK_SECONDS:
                raise DeadlineExceeded(self._all_taken(oldest))
            time.sleep(_CHECK_SECONDS)
            try:
                writer = self._take_or_open(deadline)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(self._all_taken(oldest)) from error
        return writer

    def _take_or_open(self, deadline: Deadline) -> KafkaPreparedWriter | None:
        """Return a writer with a newly opened id; None if every id has an unresolved transaction."""
        with self._lock:
            writer = self._ready.popleft() if self._ready else None
            if writer is None and any(thread.is_alive() for thread in self._ahead):
                self._wanted_ahead = min(self._wanted_ahead + 1, _MOST_AHEAD)
        return writer or self._open_one(deadline)

    def _new_id(self) -> str:
        return f"{self._owner.name}.{self._owner.opening}.p{next(self._numbers)}"

    def replace_id(self, id: str) -> str:
        """Replace an id of the pool by a new id, and return the new id. The old id is never used again."""
        with self._lock:
            new = self._ids[self._ids.index(id)] = self._new_id()
            self._used.add(new)
            if (writer := self._taken.pop(id, None)) is not None:
                self._taken[new] = writer
        return new

    def _take_id(self, id: str) -> KafkaPreparedWriter:
        self._used.add(id)
        writer = self._taken[id] = KafkaPreparedWriter(self, self._cluster, self._owner, id, self._last_ms)
        return writer

    def release(self, writer: KafkaPreparedWriter) -> None:
        with self._lock:
            self._taken.pop(writer.id, None)

    def close(self, deadline: Deadline) -> None:
        """Close the writer whose id was opened ahead, and open no more ids."""
        with self._lock:
            self._closed = True
            ready, self._ready = list(self._ready), deque()
        for writer in ready:
            writer.close()
        for thread in self._ahead:
            thread.join(deadline.left())

    def open_ahead(self, timeout_ms: int) -> None:
        """Open ids in the background, with this time-out, unless enough are open already."""
        with self._lock:
            self._last_ms = timeout_ms
            self._ahead = [thread for thread in self._ahead if thread.is_alive()]
            missing = self._wanted_ahead - len(self._ready) - len(self._ahead)
            for _ in range(0 if self._closed else missing):
                thread = threading.Thread(target=self._open_in_background, name="txnbridge-kafka-pool", daemon=True)
                with suppress(RuntimeError):  # if this machine starts no more threads now
                    thread.start()
                    self._ahead.append(thread)

    def _open_in_background(self) -> None:
        try:
            writer = self._open_one(Deadline(_OPEN_AHEAD_SECONDS))
        except TxnBridgeError as error:
            # The next call of `take` opens an id itself, and raises the error if it still occurs.
            _log.debug("no id could be opened ahead for a prepared transaction: %s", error)
            return
        if writer is None:
            return
        with self._lock:
            if not self._closed:
                self._ready.append(writer)
                return
        writer.close()

    def _open_one(self, deadline: Deadline) -> KafkaPreparedWriter | None:
        """Open an id without an unresolved transaction, and return its writer; None if there is no such id."""
        free = self._find_free(deadline)
        if free is None:
            return None
        writer, before = free
        try:
            writer.session.previous_transaction = before
            if before is not None and before.state in ("CompleteCommit", "CompleteAbort"):
                key = evidence_key(writer.id, before.pid, f"start {before.start}")
                self._owner.record_outcome(key, before.state in COMMITTED, deadline)
            self._owner.check(deadline)
            writer.open(deadline)
        except BaseException:
            writer.close()
            raise
        return writer

    def _find_free(self, deadline: Deadline) -> tuple[KafkaPreparedWriter, TransactionDescription | None] | None:
        """Take the owner's next id without an unresolved transaction; return its writer and the id's description.

        Return None if there is none, or if the owner has as many unresolved transactions as it may have. The
        description is None if the coordinator does not know the id.
        """
        with self._lock:
            order = self._ids[self._next :] + self._ids[: self._next]
            candidates = [id for id in order if id not in self._taken]
            new = next((id for id in candidates if id not in self._used), None)
            if new is not None and len(self._used) + len(self._owner.inherited_ids) < self._owner.prepared_ids:
                # No process has opened this id before, because it contains the owner's opening.
                return self._take_id(new), None
        described = self._cluster.requests.describe([*self._ids, *self._owner.inherited_ids], deadline)
        if sum(last.state == OPEN for last in described.values()) >= self._owner.prepared_ids:
            return None
        for id in candidates:
            last = described.get(id)
            if last is not None and last.state == OPEN:
                continue
            if last is not None and last.state not in ("Empty", "CompleteCommit", "CompleteAbort", "Dead"):
                continue  # the coordinator is just ending the id's transaction
            with self._lock:
                if id in self._taken or id not in self._ids:
                    continue  # another thread has taken or replaced it meanwhile
                self._next = (self._ids.index(id) + 1) % len(self._ids)
                return self._take_id(id), last
        return None

    def _oldest(self, deadline: Deadline) -> Token | None:
        """Return the token of the oldest prepared transaction that has not ended; None if none is known."""
        try:
            described = self._cluster.requests.describe([*self._ids, *self._owner.inherited_ids], deadline).items()
            unresolved = {(id, last.pid, last.start) for id, last in described if last.state == OPEN}
            for entry in self._owner.ledger.entries(PREPARE, deadline):
                if (entry.data["id"], entry.data["pid"], entry.data["start"]) in unresolved:
                    return token_of(entry, self._cluster.requests.cluster_id(deadline))
        except TxnBridgeError as error:
            _log.debug("the oldest prepared transaction could not be looked up: %s", error)
        return None

    def _all_taken(self, oldest: Token | None) -> str:
        text = f"all {len(self._ids)} ids for prepared transactions of {self._owner.name} have unresolved ones"
        if oldest is not None:
            text += f"; the oldest is {oldest}"
        return f"{text}: commit or abort some, or connect with a larger prepared_ids"


def token_of(entry: LedgerEntry, cluster: str) -> Token:
    """Return the token of a prepared transaction, made from the record in the decision log that it is prepared."""
    data: Mapping[str, Any] = entry.data
    how = {name: data[name] for name in ("id", "pid", "epoch", "start", "opening") if name in data}
    rest = {name: data[name] for name in ("expires_at", "messages", "log")}
    return Token(broker="kafka", cluster=cluster, transaction=entry.transaction, how=how, prepared=True, **rest)
