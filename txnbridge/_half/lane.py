"""`Lane`: stores half messages in a topic of ours, a lane, on brokers that have none, and publishes or drops them.

Each lane is a transactional id with a topic of the same name. A holder's transactions store halves there, and end them:
the transaction that publishes a half's messages has the record that it is done. Opening the id fences the holder before
it, so a holder that has read the lane up to a record of its own knows what is not done, and nobody else ends it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from txnbridge import errors
from txnbridge._base.connection import close_logging_errors, random_name
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision, Outcome
from txnbridge._decisions.logs import DecisionLogs
from txnbridge._half.common import RefusedHalf
from txnbridge._half.index import LaneIndex
from txnbridge._half.records import Beat, HalfDone, HalfParked, Record, Refusal, half_records, places_of
from txnbridge._read.open_consumers import Consumers
from txnbridge._write.group_commit import GroupCommit
from txnbridge._write.transaction import Transaction
from txnbridge._write.writers import Writers
from txnbridge.spi import Begin, Half, HalfMessage, Identity

_log = logging.getLogger("txnbridge")

# The pause between two check-backs doubles up to this multiple of the first pause.
_LONGEST_PAUSE_FACTOR = 8
# A transaction beyond one of these sizes may take long, so the lane's holder says before that it lives.
_LARGE_MESSAGES, _LARGE_BYTES = 1_000, 1_000_000
# The number of halves that are stored again, or whose bodies are read, at once, and the bytes of their messages.
_BATCH, _BATCH_BYTES = 500, 4_000_000
# The time until records of done halves are removed after a failure to do so.
_TRIM_AGAIN_SECONDS = 600.0

Send = tuple[str, Record, int | None, int | None]


class Lane:
    """Stores half messages in a topic of which this process is the owner (a lane), and publishes or drops them.

    Any thread may do so. One thread at a time tends the lane: it finds due check-backs and removes old records.
    """

    def __init__(
        self,
        consumers: Consumers,
        logs: DecisionLogs,
        index: LaneIndex,
        identity: Identity,
        how: Mapping[str, Any],
        keep: Callable[[str, Deadline], bool],
    ) -> None:
        connection = consumers.connection
        self.topic = identity.name
        self.how = how  # that of its halves: the lane's number, and the name that its owner has in the list of lanes
        self.index = index
        self._keep = keep  # notes in the list of lanes the nonce of a beat that stays when records are removed
        self._ending: dict[str, int] = {}  # halves that a call ends or stores again at present, with its number
        self._connection = connection
        self._outcomes = consumers.outcomes
        ledger = lambda: logs.ledger(identity.application, identity.name)  # noqa: E731
        self._writers = Writers(connection, 1, ledger, identity)
        self._numbers = itertools.count(1)
        begin = lambda: self._begin(connection.deadline())  # noqa: E731
        self._shared = GroupCommit(connection, self._writers, self._outcomes, begin, 1)
        self._changed = threading.Condition()
        self._due: list[tuple[int, str]] = []  # a heap of check-backs, and of some that are not due any more
        self._fetched: deque[tuple[str, list[HalfMessage]]] = deque()  # halves that are asked about next
        self._committed_at = time.monotonic()
        self._written = self._trimmed_at = 0  # numbers of commits: until now, and until the last removal
        self._closed = False
        self._marked: tuple[Position, set[str]] | None = None  # an end of the topic, and what was not done there
        self._trim_at = 0.0

    def open(self, deadline: Deadline) -> str:
        """Fence the topic's former owner, and read which half messages are open; return the last heartbeat's nonce."""
        with self._connection.events.step("half.open", None, lane=self.topic) as found:
            self._writers.open(deadline)
            nonce = self.read(deadline)
            found["undone"] = len(self.index.undone)
        for transaction, each in self.index.undone.items():
            self._ask_at(transaction, each.check_at)
        return nonce

    def read(self, deadline: Deadline) -> str:
        """Store a heartbeat, and read everything that was stored before it; return the heartbeat's nonce."""
        nonce = random_name(8)
        self.beat(0.0, deadline, nonce)
        self.index.read_until(nonce, deadline)
        return nonce

    def close(self) -> None:
        self._closed = True
        close_logging_errors(self.index.close)
        self._shared.close()
        self._writers.close()

    # --- transactions -----------------------------------------------------------------------------------------------

    def _begin(self, deadline: Deadline) -> Begin:
        name = f"{self.topic}/{self._connection.name[-8:]}/{next(self._numbers)}"
        return Begin(name, Deadline(deadline.left()), False, None)

    def _commit(self, sends: Iterable[Send], deadline: Deadline) -> None:
        """Send messages in one transaction under this topic's transactional id, perhaps shared with other threads."""
        deadline.check("a transaction of half messages")
        try:
            with self._transaction(self._begin(deadline)) as txn:
                for topic, record, partition, timestamp in sends:
                    txn._send_encoded(topic, *record, partition, timestamp)
        except errors.EvidenceLost as error:  # the lane's records tell
            raise errors.OutcomeUnknown(str(error)) from error
        except errors.InvalidState as error:
            if self._closed:  # another thread has dropped the lane
                raise errors.Fenced(f"{self.topic} was opened again") from error
            raise
        self._committed_at = time.monotonic()
        self._written += 1

    def _transaction(self, begin: Begin) -> Transaction:
        taken = (self._shared if self._connection.broker.group_commit else self._writers).take(begin)
        try:
            taken.start()
        except BaseException:
            taken.give_back(sound=False)
            raise
        return Transaction(self._connection, taken, self._outcomes, None)

    def _append(self, records: Iterable[Record], deadline: Deadline) -> None:
        self._commit(((self.topic, record, 0, None) for record in records), deadline)

    def beat(self, seconds: float, deadline: Deadline, nonce: str = "-") -> None:
        self._append([Beat(nonce, seconds).record()], deadline)

    def _announce(self, messages: Sequence[HalfMessage], deadline: Deadline) -> None:
        """Store how long a large transaction may take, so that no resolver takes this process for dead meanwhile."""
        size = sum(len(message.value or b"") for message in messages)
        if len(messages) > _LARGE_MESSAGES or size > _LARGE_BYTES:
            self.beat(deadline.left(), deadline)

    # --- halves -----------------------------------------------------------------------------------------------------

    def store(self, half: Half, deadline: Deadline) -> None:
        """Store the half messages of a transaction. The index keeps them unless they certainly are not stored."""
        if half.transaction in self.index.undone:  # the answer to the last call was lost
            return
        self._announce(half.messages, deadline)
        self.index.add(half)
        try:
            self._append(half_records(half), deadline)
        except BaseException as error:
            if not isinstance(error, errors.OutcomeUnknown):
                self.index.undone.pop(half.transaction, None)
            raise
        finally:
            self._ask_at(half.transaction, half.check_at)

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        """Publish or drop a transaction's half messages by a decision, unless they have ended; return the outcome."""
        id = half.transaction
        with self._alone(id, deadline):
            if (outcome := self.index.outcomes.get(id)) is not None:
                return outcome
            if decision is Decision.UNDECIDED:
                return Outcome.UNKNOWN
            if id not in self.index.undone:
                if half.how:
                    self.beat(0.0, deadline)  # only the lane's present holder can tell (hazard H154)
                    text = f"half messages of {id} have ended long ago: only its own records tell how"
                    raise errors.EvidenceLost(text)
                return Outcome.ABORTED  # it was not stored
            outcome = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
            messages = self._messages(half, deadline) if decision is Decision.COMMIT else []
            if self.index.refused and (before := self.index.waits_for(id, messages)):
                self._refuse(id, messages, f"it waits behind {before}, which is refused", deadline, before)
                raise RefusedHalf(f"the half messages of {id} are decided, and parked: they wait behind {before}")
            self._announce(messages, deadline)
            sends: list[Send] = [
                (m.topic, Record(m.value, m.key, m.headers), m.partition, m.timestamp) for m in messages
            ]
            sends.append((self.topic, HalfDone(id, outcome).record(), 0, None))
            try:
                self._commit(sends, deadline)
            except (errors.NotFound, errors.InvalidOption, errors.AccessDenied, errors.TransactionAborted) as error:
                raise self._refused(id, messages, error, deadline) from error
            self.index.end(id, outcome)
            return outcome

    @contextmanager
    def _alone(self, transaction: str, deadline: Deadline) -> Iterator[None]:
        """During the block, let no other thread end a transaction's half messages or store them again."""
        own, held = next(self._numbers), list[int]()
        try:
            with self._changed:
                while not held:
                    # One call for Python, so that no signal handler's exception comes between its two steps.
                    held.extend(filter(own.__eq__, map(self._ending.setdefault, (transaction,), (own,))))
                    if not held:
                        deadline.check(f"the end of half messages of {transaction} by another thread")
                        self._changed.wait(min(deadline.left(), 1.0))
            yield
        finally:
            if held:
                del self._ending[transaction]
                with self._changed:
                    self._changed.notify_all()

    def _messages(self, half: Half, deadline: Deadline) -> Sequence[HalfMessage]:
        if half.messages:
            return half.messages
        found = self.bodies([half.transaction], deadline)
        if half.transaction not in found:
            text = f"records of the half messages of {half.transaction} were deleted from {self.topic!r}"
            raise errors.EvidenceLost(text)
        return found[half.transaction]

    def _refused(
        self, id: str, messages: Sequence[HalfMessage], error: errors.TxnBridgeError, deadline: Deadline
    ) -> errors.TxnBridgeError:
        """Return the error for half messages that a topic refuses; if it does so for good, stop their check-backs."""
        each = self.index.undone.get(id)
        text = f"the half messages of {id} are decided, and cannot be published: {error}"
        if isinstance(error, errors.TransactionAborted):
            if not isinstance(error, errors.DeliveryFailed) or each is None or not each.checks:
                return errors.BrokerUnavailable(text)  # the caller tries again
            if each.checks < self._connection.timing.half_refusals:
                return RefusedHalf(text)  # the next check-back tries again
        self._refuse(id, messages, f"its messages are refused: {error}", deadline)
        return RefusedHalf(f"{text}. They are parked")

    def _refuse(
        self, id: str, messages: Sequence[HalfMessage], reason: str, deadline: Deadline, behind: str = ""
    ) -> None:
        refusal = Refusal(self.index.refused_since(id), places_of(messages), behind)
        self.park(id, reason, deadline, refusal)

    def park(self, id: str, reason: str, deadline: Deadline, refusal: Refusal | None = None) -> None:
        """Stop a transaction's check-backs for a `reason`, until an administrator acts; if it is "", restart them."""
        with self._connection.events.step("half.park", id, lane=self.topic, reason=reason):
            self._append([HalfParked(id, reason, refusal).record()], deadline)
        self.index.park(id, reason, refusal)
        if reason:
            _log.error("half-message transaction %s is parked: %s", id, reason)
        else:
            self._ask_at(id, 0)

    # --- check-backs ------------------------------------------------------------------------------------------------

    def _ask_at(self, transaction: str, check_at: int) -> None:
        with self._changed:
            heapq.heappush(self._due, (check_at, transaction))

    def next_halves(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        """Return the half messages of up to `limit` transactions that are due for a check-back, in one thread only."""
        if limit and not self._fetched:
            self._fetch(deadline)
        halves: list[Half] = []
        broker = self._connection.broker
        while self._fetched and len(halves) < limit:
            id, messages = self._fetched.popleft()
            each = self.index.undone.get(id)
            if each is None or each.parked:
                continue
            if each.checks >= broker.half_checks:
                self._ask_at(id, each.check_at)  # again, if the next line fails
                self.park(id, f"{each.checks} check-backs had no decision", deadline)
                continue
            pause = broker.half_check_seconds * min(1 << each.checks, _LONGEST_PAUSE_FACTOR)
            each.check_at = int((time.time() + pause) * 1000)
            each.checks += 1
            self._ask_at(id, each.check_at)
            halves.append(Half(group, id, messages, each.check_at, each.deadline_at, each.checks, self.how))
        return halves

    def _fetch(self, deadline: Deadline) -> None:
        """Read the messages whose check-back is due: those of many transactions at once, which is faster."""
        ids = self._take_due()
        try:
            found = self.bodies(ids, deadline)
            for id in ids:
                if (each := self.index.undone.get(id)) is None or id in found:
                    continue
                if each.first is None:  # the answer to its storing was lost, and it was not stored
                    self.index.undone.pop(id, None)
                else:
                    self.park(id, "its records were deleted, so it can never be published (EvidenceLost)", deadline)
        except BaseException:
            for id in ids:
                self._ask_at(id, 0)
            raise
        self._fetched.extend(found.items())

    def _take_due(self) -> list[str]:
        now, size = int(time.time() * 1000), 0
        ids: dict[str, None] = {}
        with self._changed:
            while self._due and self._due[0][0] <= now and len(ids) < _BATCH and size < _BATCH_BYTES:
                _, id = heapq.heappop(self._due)
                if (each := self.index.undone.get(id)) and not each.parked and each.check_at <= now:
                    ids[id] = None
                    size += each.size
        return list(ids)

    def bodies(self, transactions: Sequence[str], deadline: Deadline) -> dict[str, list[HalfMessage]]:
        """Return the half messages of undecided transactions, by transaction; one thread at a time calls this."""
        found = self.index.bodies(transactions, deadline)
        if rest := [id for id in transactions if id in self.index.undone and id not in found]:
            self.read(deadline)  # they were not read, or only in part
            found |= self.index.bodies(rest, deadline)
        return found

    # --- tending ----------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """True if half messages wait for a decision and are not parked: others must see that this process lives."""
        undone = self.index.undone
        return any(not each.parked for each in list(undone.values())[:_BATCH]) or len(undone) > _BATCH

    def tend(self, deadline: Deadline) -> None:
        """Store a heartbeat if it is due, and remove the records of half messages that are published or dropped."""
        now, timing = time.monotonic(), self._connection.timing
        idle = now - self._committed_at
        self.index.rest()
        if idle > timing.lane_beat and (self.waits or idle > timing.lane_free / 6):
            self.beat(0.0, deadline)
        for id, refusal in self.index.freed():
            self.park(id, "", deadline, refusal)
        self.remove_old(deadline)

    def remove_old(self, deadline: Deadline) -> None:
        """At intervals, remove the topic's records before the oldest half messages that are not published or dropped.

        Nothing is read for that if all half messages that were open at the last call are published or dropped by now.
        """
        if (now := time.monotonic()) <= self._trim_at:
            return
        self._trim_at = now + self._connection.timing.lane_trim if self._marked is not None else now
        if self._marked is None:
            if self._written != self._trimmed_at:
                _, end = self._connection.broker.admin.bounds([self.topic], deadline)[self.topic, 0]
                self._marked = (end, set(self.index.undone))
            return
        (end, ids), self._marked = self._marked, None
        if ids & self.index.undone.keys():
            self.read(deadline)
            end, kept = self.index.oldest()
            if kept > self._connection.timing.lane_kept + 4 * sum(each.parts for each in [*self.index.undone.values()]):
                self._store_again(deadline)
        else:
            self.index.skip_to(end)
        self._trim(end, deadline)

    def _trim(self, end: Position, deadline: Deadline) -> None:
        nonce = random_name(8)
        self.beat(0.0, deadline, nonce)
        self._trimmed_at = self._written
        try:
            if self._keep(nonce, deadline):
                self._connection.broker.admin.trim((self.topic, 0), end, deadline)
        except errors.TxnBridgeError as error:
            self._trim_at = time.monotonic() + _TRIM_AGAIN_SECONDS
            _log.warning("records of done half messages in %r could not be deleted: %s", self.topic, error)

    def _store_again(self, deadline: Deadline) -> None:
        """Store the oldest undecided half messages once more, behind all records, so that old ones can be removed."""
        known = sorted((each.first, id, each.size) for id, each in list(self.index.undone.items()) if each.first)
        sizes = accumulate(size for *_, size in known)
        ids = [id for (_, id, size), total in zip(known[:_BATCH], sizes, strict=False) if total - size < _BATCH_BYTES]
        for id, messages in self.bodies(ids, deadline).items():
            with self._alone(id, deadline):
                if each := self.index.undone.get(id):
                    copy = Half("", id, messages, each.check_at, each.deadline_at, each.checks)
                    refusal = self.index.refused.get(id)
                    parked = [HalfParked(id, each.parked, refusal).record()] if each.parked or refusal else []
                    self._append([*half_records(copy), *parked], deadline)


def is_lost(error: BaseException) -> bool:
    """Return whether a lane (a topic of half messages) is to be opened anew after an error, perhaps an interrupt."""
    lost = isinstance(error, errors.Fenced | errors.OutcomeUnknown | errors.PositionLost | errors.NotFound)
    kept = isinstance(error, RefusedHalf | errors.EvidenceLost)
    return (lost and not kept) or not isinstance(error, errors.TxnBridgeError)
