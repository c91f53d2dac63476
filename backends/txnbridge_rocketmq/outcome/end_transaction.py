"""Ending halves: directly by their owner while they are fresh, by everybody else with a look first.

A broker publishes a half each time it is told to, and keeps no record of that. So a process that is not certain to be
the first to tell the broker looks whether the message is there, has the broker publish the newest copy of the half, and
looks again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from txnbridge.errors import AccessDenied, BrokerUnavailable, EvidenceLost
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client import groups
from txnbridge_rocketmq.client.codes import HALF_TOPIC, ROCKSDB_HALF_TOPIC, Property, ResponseCode
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.records import StoredMessage
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.client.retry import AT_ONCE, look_up_by_key, retry_call
from txnbridge_rocketmq.client.sending import HalfEnd, HalfHandle, end
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.write.half_batch import TopicPart
from txnbridge_rocketmq.write.transaction_properties import TransactionSlot, unique_key

T = TypeVar("T")

_log = logging.getLogger("txnbridge")

# A published message can be looked up a moment later: a millisecond mostly, 67 at most on a busy machine. Where a look
# finds nothing, and another process may have told the broker a moment ago, the second look comes after this.
_INDEX_SECONDS = 0.25
# After that much more a message that the broker claims to have published should be there.
_SURELY_INDEXED = 10.0
_LOOK_SECONDS = 0.01
# A process that publishes may fall asleep, and others take it for dead when no message has come for some seconds. So a
# look that is older than this is repeated before the broker is told to publish.
_LOOK_HOLDS = 1.0
# So many are published between two looks, each of which is mostly much shorter than it holds.
_PUBLISHED_AT_ONCE = 64
# A broker that is away, or busy, is asked again so soon.
_PAUSE = 0.05
# The locks that keep two resolvers from publishing the same transaction at once are hints: a broker forgets them a
# minute after they were taken or renewed, and when it restarts.
_LOCK_GROUP = "txnbridge-resolver"
_REAL_QUEUE = "REAL_QID"


class PublishedMessageMissing(BrokerUnavailable):
    """A message is missing that its broker claims to have published."""


class LockHolder(Enum):
    """The thread or process that ends a transaction now."""

    CALLER = "whoever asks"
    OTHER_THREAD = "another thread of this process"
    OTHER_PROCESS = "another process, or one that died less than a minute ago"


@dataclass
class EndSequence:
    """One queue's halves in their order: each is ended when the one before it has been."""

    queue: Queue
    halves: deque[HalfHandle]
    call: Call[None] | None = None
    stopped: RemotingError | None = None  # by it the line ended early


@dataclass
class HalfEnder:
    """Ends halves for one bridge. Any thread may call."""

    cluster: RocketMQCluster
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: set[str] = field(default_factory=set)
    _trusted: set[str] = field(default_factory=set)  # brokers that have published what they said they had

    # --- one at a time ------------------------------------------------------------------------------------------------

    @contextmanager
    def exclusively(self, transaction: str, deadline: Deadline) -> Iterator[LockHolder]:
        """Keep others from ending this transaction meanwhile, as far as others can be known of."""
        with self._lock:
            if transaction in self._under_way:
                mine = False
            else:
                mine = True
                self._under_way.add(transaction)
        try:
            if not mine:
                yield LockHolder.OTHER_THREAD
            else:
                yield LockHolder.CALLER if self._locked(transaction, deadline) else LockHolder.OTHER_PROCESS
        finally:
            if mine:
                with self._lock:
                    self._under_way.discard(transaction)
                self._unlock(transaction)

    @contextmanager
    def as_owner(self, transaction: str) -> Iterator[None]:
        """Keep this process from answering brokers about a transaction that its owner is about to publish."""
        with self._lock:
            self._under_way.add(transaction)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(transaction)

    def _locked(self, transaction: str, deadline: Deadline) -> bool:
        queue = self._lock_of(transaction)
        request = groups.lock(_LOCK_GROUP, self.cluster.client.client_id, [queue])
        return queue in retry_call(self.cluster.client, queue.broker, request, "locking a transaction", deadline)

    def _keep_locked(self, transaction: str) -> None:
        self._tell(self._lock_of(transaction), groups.lock)

    def _unlock(self, transaction: str) -> None:
        self._tell(self._lock_of(transaction), groups.unlock)

    def _tell(self, queue: Queue, what: Callable[[str, str, Sequence[Queue]], RpcRequest[Any]]) -> None:
        """Waits for no answer."""
        try:
            self.cluster.client.submit(
                queue.broker, what(_LOCK_GROUP, self.cluster.client.client_id, [queue]), _SURELY_INDEXED
            )
        except RemotingError as error:
            _log.debug("a lock goes by itself: %s", error)

    def _lock_of(self, transaction: str) -> Queue:
        """Of a topic that does not exist, under the prefix for which this user has rights."""
        name = hashlib.sha256(transaction.encode()).hexdigest()[:32]
        return Queue(f"{self.cluster.settings.prefix}lock-{name}", self.cluster.topics.home, 0)

    # --- the owner's ends ---------------------------------------------------------------------------------------------

    def publish_fresh(self, halves: Mapping[Queue, Sequence[HalfHandle]], deadline: Deadline) -> bool:
        """Publish halves that nobody else knows of as long as they are fresh; whether all are published.

        The broker refuses what is too old for that; then, or where an answer is lost, somebody has to look first.
        """
        sequences = [EndSequence(queue, deque(found)) for queue, found in halves.items()]
        self._run(sequences, False, deadline)
        self._let_pass(sequences, deadline)
        return not any(sequence.stopped for sequence in sequences)

    def look_once(self, halves: Mapping[Queue, Sequence[HalfHandle]], deadline: Deadline) -> None:
        """See one message that each broker says it has published, if it was never seen to do so before.

        What stands between may answer and do nothing, as proxies do. Raises `BrokerUnavailable`.
        """
        published: dict[str, _Expected] = {}
        for queue, found in halves.items():
            if queue.broker not in self._trusted and self._keeps_index(queue.broker, deadline):
                published[queue.broker] = _Expected(found[0].topic, queue.broker, 0, found[0].unique_key)
        try:
            self._wait_for(list(published.values()), deadline)
        except AccessDenied as error:
            self._trusted.update(published)
            _log.warning("whoever may only publish has to believe what brokers say is published: %s", error)

    def _keeps_index(self, broker: str, deadline: Deadline) -> bool:
        """Without one nothing is ever found, and owners publish all the same."""
        return self.cluster.brokers.config(broker, deadline).is_on("messageIndexEnable", True)

    def drop(self, halves: Iterable[tuple[str, HalfHandle]], deadline: Deadline) -> None:
        """Abort halves, as far as the broker is there; it asks about the others, and is told the same."""
        waiting = deque(halves)
        while waiting:
            chunk = [waiting.popleft() for _ in range(min(AT_ONCE, len(waiting)))]
            try:
                calls = [
                    self.cluster.client.submit(broker, end(half, HalfEnd.ABORT, from_check=True), deadline.left())
                    for broker, half in chunk
                ]
                for call in calls:
                    call.result()
            except RemotingError as error:
                _log.debug("a half stays until the broker asks about it: %s", error)
                if not error.may_have_had_effect:
                    return

    def _run(
        self, sequences: Sequence[EndSequence], from_check: bool, deadline: Deadline, until: float = math.inf
    ) -> None:
        """Publish what the lines hold; a line stops at the first half of which it is not certain what became of it.

        Nothing is begun at or after `until`, on the monotonic clock.
        """
        going = [sequence for sequence in sequences if sequence.halves]
        while going and time.monotonic() < until:
            paused = False
            for sequence in going:
                paused |= not self._ask(sequence, end(sequence.halves[0], HalfEnd.COMMIT, from_check), deadline)
            for sequence in going:
                paused |= not self._hear(sequence, deadline)
            going = [sequence for sequence in going if sequence.halves and sequence.stopped is None]
            if paused and going:
                time.sleep(_PAUSE)

    def _ask(self, sequence: EndSequence, request: RpcRequest[None], deadline: Deadline) -> bool:
        try:
            sequence.call = self.cluster.client.submit(sequence.queue.broker, request, deadline.left())
        except RemotingError as error:
            self._stop(sequence, error, deadline)
            return False
        return True

    def _hear(self, sequence: EndSequence, deadline: Deadline) -> bool:
        call, sequence.call = sequence.call, None
        if call is None:
            return True
        try:
            call.result()
        except RemotingError as error:
            self._stop(sequence, error, deadline)
            return False
        sequence.halves.popleft()
        return True

    def _stop(self, sequence: EndSequence, error: RemotingError, deadline: Deadline) -> None:
        """Unless the same may be asked again soon, because it was certainly not carried out."""
        passing = not error.may_have_had_effect and _code(error) != ResponseCode.ILLEGAL_OPERATION
        if not passing or type(translate(error, "")) is not BrokerUnavailable or deadline.left() <= _PAUSE:
            sequence.stopped = error

    # --- everybody else's ---------------------------------------------------------------------------------------------

    def publish(self, transaction: str, parts: Sequence[TopicPart], deadline: Deadline, *, first: bool = False) -> None:
        """Have every message of a committed transaction published.

        `first`: it was decided this moment, by the caller, so that nobody can have published any of it before. Raises
        `BrokerUnavailable`, `AccessDenied`, and `EvidenceLost` where a half is gone.
        """
        missing = _expected(transaction, parts)
        if not first and (missing := self._unpublished(missing, deadline)):
            # Somebody may have told the broker just now. Then it is there, and cannot be looked up yet.
            time.sleep(min(_INDEX_SECONDS, deadline.left()))
        missing.sort(key=lambda each: each.number)  # all topics side by side
        at_once = _PUBLISHED_AT_ONCE
        while missing:
            self._keep_locked(transaction)
            some, others = missing[:at_once], missing[at_once:]
            left = self._publish_some(some, deadline)
            # Where brokers are so slow that a look at all of these does not hold until its end, none was published.
            at_once = max(1, at_once // 2) if len(left) == len(some) else min(2 * at_once, _PUBLISHED_AT_ONCE)
            missing = left + others
            if missing:
                deadline.check("publishing a transaction")

    def _publish_some(self, missing: Sequence[_Expected], deadline: Deadline) -> list[_Expected]:
        """Those of which it did not succeed."""
        sequences = self._sequences(missing, deadline)
        looked = time.monotonic()
        left = {each.key for each in self._still_missing(missing, deadline)}
        for sequence in sequences:
            sequence.halves = deque(half for half in sequence.halves if half.unique_key in left)
        self._run(sequences, True, deadline, looked + _LOOK_HOLDS)
        _require_rights(sequences)
        self._let_pass(sequences, deadline)
        left = {half.unique_key or "" for sequence in sequences for half in sequence.halves}
        self._wait_for([each for each in missing if each.key not in left], deadline)
        return self._unpublished([each for each in missing if each.key in left], deadline)

    def _still_missing(self, missing: Sequence[_Expected], deadline: Deadline) -> Sequence[_Expected]:
        """Those that are not in their topic; while somebody else publishes them, he is waited for."""
        while len(left := self._unpublished(missing, deadline)) < len(missing):
            deadline.check("waiting for somebody else who publishes the same transaction")
            time.sleep(min(_INDEX_SECONDS, deadline.left()))
            missing = left
        return left

    def missing(self, transaction: str, parts: Sequence[TopicPart], deadline: Deadline) -> int:
        """How many of its messages cannot be seen yet."""
        return len(self._unpublished(_expected(transaction, parts), deadline))

    def unpublished(self, transaction: str, parts: Sequence[TopicPart], age: float, deadline: Deadline) -> int:
        """Return how many messages of a committed transaction have a half that still waits to be published.

        The transaction was decided `age` seconds ago: of a young one the broker's index may lack what is published. A
        message that is not found, nor any half of it, was dropped by age.
        """
        until = Deadline(min(max(0.0, _SURELY_INDEXED - age), deadline.left() / 2))
        wanted = _expected(transaction, parts)
        while waiting := self._copies(wanted := self._unpublished(wanted, deadline), deadline):
            if until.expired:
                break
            time.sleep(_LOOK_SECONDS)
        return len(waiting)

    def withdraw(self, transaction: str, parts: Sequence[TopicPart], deadline: Deadline) -> None:
        """Abort every half of an aborted transaction, as far as the brokers are there."""
        found = self._copies(_expected(transaction, parts), deadline)
        self.drop([(each.broker, handle_of_copy(record)) for each, record in found], deadline)

    def copies(self, transaction: str, parts: Sequence[TopicPart], deadline: Deadline) -> list[StoredMessage]:
        """The newest copy of each of its halves that is there, with what is in it, in their order."""
        wanted = _expected(transaction, parts)
        found = dict(self._copies(wanted, deadline, bodies=True))
        return [found[each] for each in wanted if each in found]

    def _unpublished(self, wanted: Sequence[_Expected], deadline: Deadline) -> list[_Expected]:
        """Those that are not in their topic."""
        asked = [(each.broker, each.topic, each.key) for each in wanted]
        found = look_up_by_key(self.cluster.client, asked, "looking for what is published", deadline)
        return [each for each, record in zip(wanted, found, strict=True) if record is None]

    def _copies(
        self, wanted: Sequence[_Expected], deadline: Deadline, bodies: bool = False
    ) -> list[tuple[_Expected, StoredMessage]]:
        """The newest copies of halves, of those of which there is one."""
        found: list[tuple[_Expected, StoredMessage]] = []
        left = list(wanted)
        for topic in (HALF_TOPIC, ROCKSDB_HALF_TOPIC):
            looked_for, left = left, []
            asked = [(each.broker, topic, each.key) for each in looked_for]
            newest = look_up_by_key(self.cluster.client, asked, "looking for halves", deadline, body=bodies)
            for each, record in zip(looked_for, newest, strict=True):
                if record is None:
                    left.append(each)
                else:
                    found.append((each, record))
        return found

    def _sequences(self, wanted: Sequence[_Expected], deadline: Deadline) -> list[EndSequence]:
        """The halves of what is not published yet, by queue, in their order."""
        until = Deadline(min(_SURELY_INDEXED, deadline.left()))
        while len(found := self._copies(wanted, deadline)) < len(wanted):
            if until.expired:
                deadline.check("looking for halves")
                raise EvidenceLost(
                    f"{len(wanted) - len(found)} messages of a committed transaction are neither published nor kept by"
                    f" broker {wanted[0].broker}: they were dropped by age (fileReservedTime), or by an administrator;"
                    " or it was killed, and has forgotten where they are (messageIndexSafe)"
                )
            time.sleep(_LOOK_SECONDS)
        sequences: dict[Queue, EndSequence] = {}
        for each, record in sorted(found, key=lambda item: item[0].number):
            queue = Queue(each.topic, each.broker, int(record.properties.get(_REAL_QUEUE, record.queue)))
            sequences.setdefault(queue, EndSequence(queue, deque())).halves.append(handle_of_copy(record))
        return list(sequences.values())

    def _wait_for(self, published: Sequence[_Expected], deadline: Deadline) -> None:
        """Return when the messages that the broker claims to have published can be seen."""
        until = Deadline(min(_SURELY_INDEXED, deadline.left() / 2))
        left = published
        while left := self._unpublished(left, deadline):
            if until.expired:
                deadline.check("looking for what is published")
                raise PublishedMessageMissing(
                    f"broker {left[0].broker} says that it has published a message to {left[0].topic}, and it"
                    " is not there: is that the address of a proxy? Those answer so, and do nothing"
                )
            time.sleep(_LOOK_SECONDS)
        self._trusted.update(each.broker for each in published)

    def _let_pass(self, sequences: Sequence[EndSequence], deadline: Deadline) -> None:
        """A request that was not answered may wait at the broker for some time before it is carried out."""
        doubtful = {
            sequence.queue.broker for sequence in sequences if sequence.stopped and sequence.stopped.may_have_had_effect
        }
        if not doubtful:
            return
        deadline.check("publishing a transaction")
        known = [self.cluster.brokers.config(broker, deadline) for broker in doubtful]
        longest = max(each.number("waitTimeMillsInTransactionQueue", 3_000) for each in known)
        until = Deadline(longest / 1000 + _INDEX_SECONDS)
        while not until.expired:
            deadline.check("publishing a transaction")
            time.sleep(_LOOK_SECONDS)


def _require_rights(sequences: Sequence[EndSequence]) -> None:
    """A user who may not publish at all would look in vain until his time is over."""
    for sequence in sequences:
        if sequence.stopped is not None:
            refused = translate(sequence.stopped, f"publishing to {sequence.queue.topic}")
            if isinstance(refused, AccessDenied):
                raise refused from sequence.stopped


class _Expected(NamedTuple):
    """One message that is to be published, and the key by which it and its half are found."""

    topic: str
    broker: str
    number: int
    key: str


def _expected(transaction: str, parts: Sequence[TopicPart]) -> list[_Expected]:
    return [
        _Expected(part.topic, part.broker, number, unique_key(part.topic, TransactionSlot(transaction, number)))
        for part in parts
        for number in range(part.count)
    ]


def handle_of_copy(record: StoredMessage) -> HalfHandle:
    """What ends a copy of a half that was found in the half topic."""
    return HalfHandle(
        record.properties.get(Property.REAL_TOPIC, record.topic),
        record.properties.get(Property.GROUP, ""),
        record.queue_offset,
        record.log_offset,
        record.unique_key or "",
    )


def _code(error: RemotingError) -> int | None:
    return error.code if isinstance(error, ErrorResponse) else None
