"""Ends halves by END_TRANSACTION: directly by their owner while they are fresh, by other processes after a look-up.

A broker publishes a half each time it receives a commit, and keeps no record of that. Therefore a process that may not
be the first to commit looks the message up by its unique key, and commits a half only if its message is not published
(hazard H62). The commit names the newest copy: a broker writes a half again in each round of check-backs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, NamedTuple, TypeVar

from txnbridge.errors import AccessDenied, BrokerUnavailable, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client import groups
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import HALF_TOPIC, ROCKSDB_HALF_TOPIC, Property, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import HalfAddress, HalfEnd, end
from txnbridge_rocketmq.client.retry import MOST_AT_ONCE, look_up_by_key, retry_call
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings import RocketMQTiming
from txnbridge_rocketmq.settings.broker_config import BrokerConfig
from txnbridge_rocketmq.write.half_buffer import HalfCount
from txnbridge_rocketmq.write.transaction_properties import TransactionPlace, unique_key

T = TypeVar("T")

_log = logging.getLogger("txnbridge")

# The group of the locks that keep two resolvers from publishing the same transaction at once. The locks are hints: a
# broker forgets them a minute after the last renewal, and when it restarts (hazard H64).
_LOCK_GROUP = "txnbridge-resolver"
# Timeout of requests about locks for which no caller waits. A call may connect for them after its deadline.
_LOCK_REQUEST_SECONDS = 1.0
_REAL_QUEUE_PROPERTY = "REAL_QID"

# The number of settled and of lost transactions that are remembered: brokers send a check-back for each half of them,
# and for some halves that their owner has just ended.
_MOST_REMEMBERED = 10_000
# For this long, a transaction is known to be settled. Later a broker that has failed may have lost what was published,
# and asks about the half that it still has: then the message is looked up, and published again if it is gone.
_SETTLED_SECONDS = 10.0


def remember(known: OrderedDict[str, float], transaction: str) -> None:
    """Add a transaction with the present time, and drop the oldest one if there are too many."""
    known[transaction] = time.monotonic()
    if len(known) > _MOST_REMEMBERED:
        known.popitem(last=False)


class PublishedMessageMissing(BrokerUnavailable):
    """Raised if a look-up does not find a message although the broker answered that it published the message."""


class LockHolder(Enum):
    """The holder of the lock under which a transaction is published. Others publish it only if the holder stalls."""

    CALLER = "the calling thread"
    OTHER_THREAD = "another thread of this process"
    OTHER_PROCESS = "another process, which may have died less than a minute ago"


@dataclass
class EndSequence:
    """Halves of one queue that are still to be committed, one after another, which keeps their messages' order."""

    queue: Queue
    halves: deque[HalfAddress]
    stopped: RemotingError | None = None  # the error after which no more halves of the sequence are committed


@dataclass
class HalfEnder:
    """Commits and aborts half messages (halves) at the brokers, for one bridge. Safe for use by several threads."""

    cluster: RocketMQCluster
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _being_ended: dict[str, int] = field(default_factory=dict)  # with the number of the call that does so
    _numbers: Iterator[int] = field(default_factory=count)
    _verified_brokers: set[str] = field(default_factory=set)  # a look-up found a message that they published
    _believed_brokers: set[str] = field(default_factory=set)  # this user may not look up what they publish
    _settled: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _doubtful: dict[str, set[str]] = field(default_factory=dict)  # by transaction: brokers that did not answer a commit

    @property
    def _timing(self) -> RocketMQTiming:
        return self.cluster.settings.timing

    def require_brokers(self, topics: Sequence[HalfCount], deadline: Deadline) -> None:
        """Raise `BrokerUnavailable` if a broker of these topics is down, so that other transactions need not wait."""
        if away := {each.broker for each in topics}.difference(self.cluster.brokers.names(deadline)):
            raise BrokerUnavailable(f"the name server knows no master of broker {', '.join(sorted(away))}")

    # --- settled transactions -----------------------------------------------------------------------------------------

    def has_settled(self, transaction: str) -> bool:
        """Return whether a transaction was found, a few seconds ago, to be aborted or completely published."""
        return time.monotonic() < self._settled.get(transaction, -math.inf) + _SETTLED_SECONDS

    def remember_settled(self, transaction: str) -> None:
        with self._lock:
            remember(self._settled, transaction)

    # --- locks --------------------------------------------------------------------------------------------------------

    @contextmanager
    def exclusively(self, transaction: str, deadline: Deadline) -> Iterator[LockHolder]:
        """Lock a transaction's publishing in the block, unless another has the lock; yield the holder of the lock."""
        with self.as_owner(transaction) as mine:
            if not mine:
                yield LockHolder.OTHER_THREAD
                return
            try:
                yield LockHolder.CALLER if self._locked(transaction, deadline) else LockHolder.OTHER_PROCESS
            finally:
                self._send_lock_request(self._lock_of(transaction), groups.unlock)

    @contextmanager
    def as_owner(self, transaction: str) -> Iterator[bool]:
        """Mark a transaction as being ended by this call in the block; yield False if another call has done so."""
        own, held = next(self._numbers), list[int]()
        try:
            # One call for Python, so that no signal handler's exception comes between its two steps.
            held.extend(filter(own.__eq__, map(self._being_ended.setdefault, (transaction,), (own,))))
            yield bool(held)
        finally:
            if held:
                del self._being_ended[transaction]

    def _locked(self, transaction: str, deadline: Deadline) -> bool:
        queue = self._lock_of(transaction)
        request = groups.lock(_LOCK_GROUP, self.cluster.client.client_id, [queue])
        return queue in retry_call(self.cluster.client, queue.broker, request, "locking a transaction", deadline)

    def _send_lock_request(self, queue: Queue, action: Callable[[str, str, Sequence[Queue]], RpcRequest[Any]]) -> None:
        """Send the lock or unlock request that `action` makes for a queue, without waiting for the response."""
        try:
            self.cluster.client.submit(
                queue.broker, action(_LOCK_GROUP, self.cluster.client.client_id, [queue]), _LOCK_REQUEST_SECONDS
            )
        except RemotingError as error:
            _log.debug("a request about a lock was not sent: %s", error)

    def _lock_of(self, transaction: str) -> Queue:
        """Return the queue whose lock stands for a transaction: a queue of a topic that does not exist."""
        name = hashlib.sha256(transaction.encode()).hexdigest()[:32]
        return Queue(f"{self.cluster.settings.prefix}lock-{name}", self.cluster.topics.home, 0)

    # --- ending without a look-up: owners, aborts ---------------------------------------------------------------------

    def publish_fresh(
        self, transaction: str, halves: Sequence[tuple[Queue, Sequence[HalfAddress]]], deadline: Deadline
    ) -> bool:
        """Commit halves of this process without a look-up, each list in order. Return whether all are published.

        During the immunity time of the halves no other process ends them; later, the broker refuses this direct commit.
        If the result is False, the caller must look up the messages before another commit (hazard H60). Raise
        `PublishedMessageMissing` if the broker only says that it has published them.
        """
        sequences = [EndSequence(queue, deque(addresses)) for queue, addresses in halves]
        try:
            self._commit_halves(sequences, False, deadline)
            self._wait_until_expired(transaction, sequences, deadline)
            if any(sequence.stopped for sequence in sequences):
                return False
            self._confirm_published(halves, deadline)
        except PublishedMessageMissing:
            raise
        except TxnBridgeError:
            return False
        self.remember_settled(transaction)
        return True

    def _confirm_published(self, halves: Iterable[tuple[Queue, Sequence[HalfAddress]]], deadline: Deadline) -> None:
        """Check that brokers publish: look up one published message on each broker, once in the life of the bridge.

        Raise `PublishedMessageMissing` if a message is not found: proxies answer END_TRANSACTION and do nothing
        (hazard H74).
        """
        published: dict[str, _Expected] = {}
        for queue, addresses in halves:
            if queue.broker in self._verified_brokers | self._believed_brokers:
                continue
            # Without a message index no message can be looked up.
            if self.cluster.brokers.config(queue.broker, deadline).is_on("messageIndexEnable", True):
                published[queue.broker] = _Expected(addresses[0].topic, queue.broker, 0, addresses[0].unique_key)
        try:
            self._wait_for(list(published.values()), deadline)
        except AccessDenied as error:
            self._believed_brokers.update(published)
            _log.warning("this user may not look messages up, so brokers are trusted to publish: %s", error)

    def finds_published(self, settings: BrokerConfig) -> bool:
        """Return whether look-ups certainly find what this broker has published, also after it was killed."""
        return settings.name in self._verified_brokers and settings.is_on("messageIndexSafe")

    def drop(self, halves: Iterable[tuple[str, HalfAddress]], deadline: Deadline) -> None:
        """Abort these halves, each on the broker named with it. A failed abort is left to the broker's check-back."""
        waiting = deque(halves)
        while waiting:
            chunk = [waiting.popleft() for _ in range(min(MOST_AT_ONCE, len(waiting)))]
            asked = [(broker, end(half, HalfEnd.ABORT, from_check=True)) for broker, half in chunk]
            found = self.cluster.client.call_all(asked, deadline.left())
            failed = [error for error in found if isinstance(error, RemotingError)]
            for error in failed:
                _log.debug("a half stays until the broker's check-back: %s", error)
            if any(not error.may_have_had_effect for error in failed):
                return

    def _commit_halves(
        self, sequences: Sequence[EndSequence], from_check: bool, deadline: Deadline, until: float = math.inf
    ) -> None:
        """Commit the halves of all sequences; send no commit after `until`. With `from_check` it answers a check-back.

        A sequence stops at the first commit whose outcome is uncertain, or that a repetition cannot make succeed.
        """
        going = [sequence for sequence in sequences if sequence.halves]
        while going and time.monotonic() < until:
            some = going[:MOST_AT_ONCE]
            asked = [(each.queue.broker, end(each.halves[0], HalfEnd.COMMIT, from_check)) for each in some]
            failed = False
            errors = self.cluster.client.call_all(asked, deadline.left())
            for sequence, error in zip(some, errors, strict=True):
                if error is None:
                    sequence.halves.popleft()
                else:
                    failed = True
                    self._stop(sequence, error, deadline)
            going = [each for each in going[len(some) :] + some if each.halves and each.stopped is None]
            if failed and going:
                time.sleep(self._timing.end_pause)

    def _stop(self, sequence: EndSequence, error: RemotingError, deadline: Deadline) -> None:
        """Stop committing a sequence after a failed request, unless the request had no effect and may be repeated."""
        illegal = isinstance(error, ErrorResponse) and error.code == ResponseCode.ILLEGAL_OPERATION
        passing = not error.may_have_had_effect and not illegal and type(translate(error, "")) is BrokerUnavailable
        if not passing or deadline.left() <= self._timing.end_pause:
            sequence.stopped = error

    # --- publishing after a look-up -----------------------------------------------------------------------------------

    def publish(
        self, transaction: str, topics: Sequence[HalfCount], deadline: Deadline, *, first: bool = False
    ) -> None:
        """Publish every message of a committed transaction that is not published yet.

        `topics` has the number of the transaction's messages in each topic. With `first` the caller has just decided
        the transaction. Another process may have published it since (hazard H64), so the messages are looked up, but
        without a wait for the index: an earlier holder of the lock has found its messages there. Raise
        `BrokerUnavailable`, `AccessDenied` if the user may not publish, or `EvidenceLost` if a message is not published
        and its half is gone.
        """
        self._wait_until_expired(transaction, (), deadline)
        missing = _expected(transaction, topics)
        if not first and (missing := self._unpublished(missing, deadline)):
            # Another process may have committed a half just now, and the index does not have the message yet.
            time.sleep(min(self._timing.index_delay, deadline.left()))
        missing.sort(key=lambda each: each.number)  # publish all topics in parallel
        at_once = most = self._timing.published_at_once
        while missing:
            some, others = missing[:at_once], missing[at_once:]
            left = self._publish_some(transaction, some, deadline)
            # If some of them were not published, look fewer up: their look-up was too old before all were committed.
            at_once = max(1, at_once // 2) if left else min(at_once + at_once // 8 + 1, most)
            stuck = {(each.broker, each.topic) for each in left}  # others go first, in their order
            missing = sorted(left + others, key=lambda each: (each.broker, each.topic) in stuck)
            if missing:
                deadline.check("publishing a transaction")
                self._send_lock_request(self._lock_of(transaction), groups.lock)  # once more, to keep the lock

    def _publish_some(self, transaction: str, missing: Sequence[_Expected], deadline: Deadline) -> list[_Expected]:
        """Look some messages up, commit the halves of unpublished ones, and return the messages still not published."""
        sequences = self._sequences(missing, deadline)
        looked = time.monotonic()
        left = {each.key for each in self._still_missing(missing, deadline)}
        for sequence in sequences:
            sequence.halves = deque(half for half in sequence.halves if half.unique_key in left)
        self._commit_halves(sequences, True, deadline, looked + self._timing.look_up_valid)
        _require_rights(sequences)
        self._wait_until_expired(transaction, sequences, deadline)
        left = {half.unique_key for sequence in sequences for half in sequence.halves}
        self._wait_for([each for each in missing if each.key not in left], deadline)
        return self._unpublished([each for each in missing if each.key in left], deadline)

    def _still_missing(self, missing: Sequence[_Expected], deadline: Deadline) -> Sequence[_Expected]:
        """Return those messages that look-ups do not find; look up again while other processes publish some of them."""
        while len(left := self._unpublished(missing, deadline)) < len(missing):
            deadline.check("waiting for another process that publishes the same transaction")
            time.sleep(min(self._timing.index_delay, deadline.left()))
            missing = left
        return left

    def missing(self, transaction: str, topics: Sequence[HalfCount], deadline: Deadline) -> int:
        """Return how many of a transaction's messages are not found by a look-up in their topics."""
        return len(self._unpublished(_expected(transaction, topics), deadline))

    def unpublished(self, transaction: str, topics: Sequence[HalfCount], age: float, deadline: Deadline) -> int:
        """Return how many messages of a committed transaction are not published, and still have a half.

        The transaction was decided `age` seconds ago. Soon after a decision, the broker's index may lack published
        messages, so the look-up is repeated. A message that has no half any more counts as published: retention may
        have dropped both.
        """
        until = Deadline(min(max(0.0, self._timing.index_timeout - age), deadline.left() / 2))
        wanted = _expected(transaction, topics)
        while waiting := self._copies(wanted := self._unpublished(wanted, deadline), deadline):
            if until.expired:
                break
            time.sleep(self._timing.publish_look_up_pause)
        return len(waiting)

    def withdraw(self, transaction: str, topics: Sequence[HalfCount], deadline: Deadline) -> None:
        """Abort every half of an aborted transaction on the brokers that are up; others send check-backs later."""
        copies = self._copies(_expected(transaction, topics), deadline)
        self.drop([(each.broker, address_of_copy(record)) for each, record in copies.items()], deadline)

    def copies(self, transaction: str, topics: Sequence[HalfCount], deadline: Deadline) -> list[MessageExt]:
        """Return the newest copy of each half of a transaction, with the body. Halves that are gone are left out."""
        wanted = _expected(transaction, topics)
        copies = self._copies(wanted, deadline, bodies=True)
        return [copies[each] for each in wanted if each in copies]

    def _unpublished(self, wanted: Sequence[_Expected], deadline: Deadline) -> list[_Expected]:
        """Return the messages among `wanted` that a look-up does not find in their topics."""
        asked = [(each.broker, each.topic, each.key) for each in wanted]
        published = look_up_by_key(self.cluster.client, asked, "looking for what is published", deadline)
        return [each for each, record in zip(wanted, published, strict=True) if record is None]

    def _copies(
        self, wanted: Sequence[_Expected], deadline: Deadline, bodies: bool = False
    ) -> dict[_Expected, MessageExt]:
        """Return the newest copy of the half of each message, without messages whose half is gone."""
        copies: dict[_Expected, MessageExt] = {}
        for topic in (HALF_TOPIC, ROCKSDB_HALF_TOPIC):
            left = [each for each in wanted if each not in copies]
            asked = [(each.broker, topic, each.key) for each in left]
            newest = look_up_by_key(self.cluster.client, asked, "looking for halves", deadline, body=bodies)
            copies |= {each: record for each, record in zip(left, newest, strict=True) if record is not None}
        return copies

    def _all_copies(self, wanted: Sequence[_Expected], deadline: Deadline) -> dict[_Expected, MessageExt]:
        """Return the newest copy of the half of each message. Raise `EvidenceLost` if a half is gone."""
        until = Deadline(min(self._timing.index_timeout, deadline.left()))
        while len(copies := self._copies(wanted, deadline)) < len(wanted):
            if until.expired:
                deadline.check("looking for halves")
                raise EvidenceLost(
                    f"broker {wanted[0].broker} finds neither {len(wanted) - len(copies)} messages of a transaction nor"
                    " their halves: they were dropped by age (retention, fileReservedTime) or by an administrator, or"
                    " the broker was killed and its index has lost them (messageIndexSafe)"
                )
            time.sleep(self._timing.publish_look_up_pause)
        return copies

    def only_half(self, transaction: str, topics: Sequence[HalfCount], deadline: Deadline) -> MessageExt:
        """Return the newest copy of the only half of a transaction of one message, whose topic `topics` names.

        Raise `EvidenceLost` if it is gone.
        """
        (record,) = self._all_copies(_expected(transaction, topics), deadline).values()
        return record

    def require_kept(self, broker: str, half: MessageExt, deadline: Deadline) -> None:
        """Raise `EvidenceLost` if retention may have dropped the message that a broker has published from a half.

        Retention drops the oldest records first, so the message is younger than the half, but a copy of the half may be
        younger than the message (hazard H135). For a copy, the oldest record in the half topic must be older than the
        half, whose time of birth all copies have.
        """
        if half.properties.keys().isdisjoint((Property.CHECKS, Property.COPY_OF)):
            return
        oldest = self._oldest_half(broker, deadline)
        clocks_differ = self._timing.clocks_differ * 1000
        if oldest is None or (oldest.queue_offset > 0 and oldest.stored_time + clocks_differ > half.born_time):
            raise EvidenceLost(
                f"broker {broker} does not find a message of a transaction, and by now retention (fileReservedTime) may"
                " have dropped it: whether it was published is not known"
            )

    def _oldest_half(self, broker: str, deadline: Deadline) -> MessageExt | None:
        topic, at = self.cluster.brokers.config(broker, deadline).half_topic, 0
        while True:
            request = read_requests.pull(topic, 0, at, _LOCK_GROUP, count=1)
            pulled = retry_call(self.cluster.client, broker, request, "looking for the oldest half", deadline)
            if pulled.records or pulled.next_offset <= at:
                return pulled.records[0] if pulled.records else None
            at = pulled.next_offset
            deadline.check("looking for the oldest half")

    def _sequences(self, wanted: Sequence[_Expected], deadline: Deadline) -> list[EndSequence]:
        """Look up messages' halves, and return them in order for each queue. Raise `EvidenceLost` if one is gone."""
        sequences: dict[Queue, EndSequence] = {}
        for each, record in sorted(self._all_copies(wanted, deadline).items(), key=lambda item: item[0].number):
            queue = Queue(each.topic, each.broker, int(record.properties.get(_REAL_QUEUE_PROPERTY, record.queue)))
            sequences.setdefault(queue, EndSequence(queue, deque())).halves.append(address_of_copy(record))
        return list(sequences.values())

    def _wait_for(self, published: Sequence[_Expected], deadline: Deadline) -> None:
        """Wait until a look-up finds these published messages. Raise `PublishedMessageMissing` after some seconds."""
        until = Deadline(min(self._timing.index_timeout, deadline.left() / 2))
        left, pause = published, self._timing.publish_look_up_pause / 8  # mostly the index has it after a millisecond
        while left := self._unpublished(left, deadline):
            if until.expired:
                deadline.check("looking for what is published")
                raise PublishedMessageMissing(
                    f"broker {left[0].broker} answered that it has published a message to {left[0].topic}, but the"
                    " message is missing. Do not connect to a proxy: it answers so without publishing"
                )
            time.sleep(pause)
            pause = min(2 * pause, self._timing.publish_look_up_pause)
        self._verified_brokers.update(each.broker for each in published)

    def _wait_until_expired(self, transaction: str, sequences: Sequence[EndSequence], deadline: Deadline) -> None:
        """Wait until no commit without a response can take effect: brokers drop old requests (hazard H61).

        A broker that was paused reads them when it runs again. So first wait until the broker answers a request.
        """
        doubtful = {each.queue.broker for each in sequences if each.stopped and each.stopped.may_have_had_effect}
        if not (doubtful := doubtful | self._doubtful.get(transaction, set())):
            return
        self._doubtful[transaction] = doubtful  # for the next call, if this one has no time left
        known = [self.cluster.brokers.config(broker, deadline, fresh=True) for broker in doubtful]
        longest = max(each.number("waitTimeMillsInTransactionQueue", 3_000) for each in known)
        until = Deadline(longest / 1000 + self._timing.index_delay)
        while not until.expired:
            deadline.check("publishing a transaction")
            time.sleep(self._timing.publish_look_up_pause)
        self._doubtful.pop(transaction, None)


def _require_rights(sequences: Sequence[EndSequence]) -> None:
    """Raise `AccessDenied` if a sequence stopped because this user may not publish."""
    for sequence in sequences:
        if sequence.stopped is not None:
            refused = translate(sequence.stopped, f"publishing to {sequence.queue.topic}")
            if isinstance(refused, AccessDenied):
                raise refused from sequence.stopped


class _Expected(NamedTuple):
    """A message that a transaction is to publish. `number` counts the transaction's messages in the topic, from 0.

    `key` is the unique key of the message and of its half.
    """

    topic: str
    broker: str
    number: int
    key: str


def _expected(transaction: str, topics: Sequence[HalfCount]) -> list[_Expected]:
    return [
        _Expected(each.topic, each.broker, number, unique_key(each.topic, TransactionPlace(transaction, number)))
        for each in topics
        for number in range(each.count)
    ]


def address_of_copy(record: MessageExt) -> HalfAddress:
    """Return the address of a half from a copy of it, a record that was read from a broker's half topic."""
    return HalfAddress(
        record.properties.get(Property.REAL_TOPIC, record.topic),
        record.properties.get(Property.GROUP, ""),
        record.queue_offset,
        record.log_offset,
        record.unique_key or "",
    )
