"""`HalfTopicStore`: half messages on brokers that have none, by a topic of each group and the decision log.

A half is stored in its group's half topic; the decision log decides it: the first claim counts. A resolver of the group
reads the topic, and acknowledges each half in the transaction that publishes it, drops it, or stores it again. The
topic's partitions have roles:

- The active partition has the halves that were stored last, and those that are asked about. Its resolver publishes.
- Delay partitions have undecided halves until their next check-back, so that they do not hold back younger ones.
- The parked partition has those that an administrator has to end or resume.

A half that is moved keeps the name of its copy. The owner of a half that was perhaps moved to a delay partition stores
a second copy in the active partition before it commits: its messages are then published at once, and in front of those
that it sends later. The claim names the copy to publish, so that the other one is dropped (hazard H85).
"""

from __future__ import annotations

import logging
import math
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING

from txnbridge._connection import random_name
from txnbridge._consumer import RawConsumer
from txnbridge._deadline import Deadline
from txnbridge._half_decisions import HalfDecisions
from txnbridge._half_records import Barrier, Handled, Record, Resume, StoredHalf
from txnbridge._half_window import PartitionWindow, Scanned, WaitingHalf
from txnbridge._messages import Message, Position
from txnbridge._timing import Timing
from txnbridge._token import Decision, Outcome
from txnbridge.capabilities import Capability
from txnbridge.errors import (
    Conflict,
    EvidenceLost,
    InvalidOption,
    NotFound,
    TransactionAborted,
    TxnBridgeError,
    UsageError,
)
from txnbridge.spi import Advice, Half, HalfStore

if TYPE_CHECKING:
    from txnbridge._consumers import Consumers
    from txnbridge._decision_logs import DecisionLogs
    from txnbridge._decisions import Claim
    from txnbridge._transaction import Transaction

_log = logging.getLogger("txnbridge")

_ACTIVE = 0
# An undecided half is moved only after decided ones behind it have waited this long, because most local work is done by
# then. The more halves have to be moved, the longer they wait, so that moving takes only a part of the resolver's time.
_GRACE_SECONDS, _MOVED_PER_SECOND = 0.25, 2_000
# The interval at which a resolver looks for decisions of other processes, and the longest poll while halves are
# undecided.
_LOOK_SECONDS, _POLL_SECONDS = 0.05, 0.02
# Reading the decisions of very many undecided halves is slow. The resolver pauses this multiple of its duration before
# the next time, and handles halves meanwhile.
_LOOK_PAUSE_FACTOR = 4
# The largest pass: the number of halves, and the bytes in their messages.
_MOST_HALVES, _MOST_BYTES = 1_000, 4_000_000
_MOST_RECORDS_A_POLL = 2_000
_POLL_IDLE_SECONDS = 0.5
# The time for which a sender waits for a resolver of its process to join the group, before it opens the group itself.
_JOIN_SECONDS = 0.5
# The lowest, the first and the highest number of halves a second that come back from the delay partitions. A half that
# comes back sooner than it can be asked about is moved away again; a large backlog would take all the resolver's time.
_SLOWEST_BACK, _FIRST_BACK, _FASTEST_BACK = 20, 500, 2_000
# The timeout of one poll for parked halves; the last one finds that all of them were read.
_READ_SECONDS = 0.25
# The pause between two check-backs doubles up to this multiple of the first pause.
_LONGEST_PAUSE_FACTOR = 8
# The delay in seconds of halves that were not asked about yet: about the time from their storing to that.
_FIRST_DELAY = 5.0
_LONGEST_NAME = 100
_PREFIX = "half."
_PLAIN = (string.ascii_letters + string.digits + "-").encode()
# The interval at which acknowledged records are deleted.
_TRIM_SECONDS = 10.0
# The time until the next attempt after a deletion has failed, perhaps because a right is missing.
_TRIM_AGAIN_SECONDS = 600.0
# The time for which a resolver that ends still publishes halves that its own process has committed.
_DRAIN_SECONDS = 10.0


# Begins a transaction of the bridge with a timeout; False lets it share one of the broker with other threads.
Begin = Callable[[float, bool], "Transaction"]


class HalfTopicStore(HalfStore):
    """The half store of one bridge. It has one `GroupTopic` for each group. Any thread may use it."""

    def __init__(self, consumers: Consumers, begin: Begin, create_topics: int, logs: DecisionLogs) -> None:
        self._consumers = consumers
        self._connection = consumers.connection
        self._begin = begin
        self._create_topics = create_topics
        self._logs = logs
        self._decisions = HalfDecisions(logs, self._connection, self._connection.identity.application)
        self._guard = threading.Lock()
        self._topics: dict[str, GroupTopic] = {}
        self._targets: dict[str, int] = {}  # the number of partitions of each topic to which halves were sent

    def _topic(self, group: str) -> GroupTopic:
        with self._guard:
            if group not in self._topics:
                self._topics[group] = GroupTopic(self._consumers, self._begin, self._decisions, group)
            return self._topics[group]

    def put(self, half: Half, deadline: Deadline) -> Half:
        topic = self._topic(half.group)
        topic.ensure_group(deadline)
        self._check_targets(half, deadline)
        now, fresh_until = _now(), time.monotonic() + self._connection.timing.half_second_copy
        stored = StoredHalf(
            half.transaction,
            random_name(8),
            self._decisions.begin(deadline),
            log_at=now,
            stored_at=now,
            check_at=half.check_at,
            deadline_at=half.deadline_at,
            checks=half.checks,
            due_at=0,
            messages=half.messages,
        )
        topic.append(_ACTIVE, stored.records(), deadline)
        return replace(half, how={"stored": stored, "fresh_until": fresh_until})

    def _check_targets(self, half: Half, deadline: Deadline) -> None:
        """Raise `NotFound` if a message's topic or partition does not exist: it could not be published later."""
        for message in half.messages:
            if message.topic not in self._targets:
                self._targets[message.topic] = self._partitions(message.topic, deadline)
            count = self._targets[message.topic]
            if message.partition is not None and not 0 <= message.partition < count:
                self._targets.pop(message.topic, None)  # partitions may be added later
                raise NotFound(f"topic {message.topic!r} has no partition {message.partition}, only {count}")

    def _partitions(self, topic: str, deadline: Deadline) -> int:
        admin, create = self._connection.broker.admin, self._create_topics
        try:
            return len(admin.bounds([topic], deadline))
        except NotFound:
            if not create:
                raise
        with suppress(InvalidOption):  # another process has created the topic meanwhile
            admin.create_topic(topic, create, deadline)
        return len(admin.bounds([topic], deadline))

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        stored = half.how.get("stored")
        if not isinstance(stored, StoredHalf):
            raise NotFound(f"the broker has no half message of transaction {half.transaction!r}")
        topic = self._topic(half.group)
        moved = time.monotonic() > half.how["fresh_until"]
        if decision is Decision.UNDECIDED or moved:
            (claim,) = self._decisions.read([stored], deadline)
            if isinstance(claim, EvidenceLost):
                raise claim
            if claim is not None:
                return _outcome(claim.decision)
            if decision is Decision.UNDECIDED:
                return Outcome.UNKNOWN
            if decision is Decision.COMMIT:
                check_at = _now() + int(self._connection.broker.half_check_seconds * 1000)
                stored = replace(
                    stored, copy=random_name(8), due_at=0, checks=0, check_at=check_at, messages=half.messages
                )
                topic.append(_ACTIVE, stored.records(), deadline)
        if decision is Decision.COMMIT:
            topic.unpublished.add(stored.copy)
        published = None
        try:
            claim = self._decisions.claim(stored, decision, deadline)
            published = claim.data.get("copy")
        finally:
            if stored.copy != published:
                topic.unpublished.discard(stored.copy)
            topic.decided.put(stored.copy)
        return _outcome(claim.decision)

    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        return self._topic(group).checks(limit, deadline)

    def publish(self, group: str, deadline: Deadline) -> None:
        self._topic(group).checks(0, deadline)

    def leave(self, group: str, deadline: Deadline) -> None:
        self._topic(group).leave()

    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        return [_as_half(group, each, fresh_until=0.0) for each in self._topic(group).parked(deadline)]

    def resume(self, half: Half, deadline: Deadline) -> None:
        topic = self._topic(half.group)
        if half.transaction not in {each.transaction for each in topic.parked(deadline)}:
            raise NotFound(f"no half message of transaction {half.transaction!r} is parked in group {half.group!r}")
        topic.resume(half.transaction, deadline)

    def check(self, deadline: Deadline) -> list[Advice]:
        """Return the doctor's findings about half topics of all applications."""
        admin = self._connection.broker.admin
        prefix = admin.internal_name(_PREFIX)
        names = [topic.name for topic in admin.topics(deadline) if topic.name.startswith(prefix)]
        has_members = self._connection.capabilities[Capability.GROUP_ADMIN]
        members = admin.groups(deadline) if names and has_members else dict.fromkeys(names, 1)
        return [advice for name in names for advice in self._check(name, prefix, members.get(name, 0), deadline)]

    def _check(self, name: str, prefix: str, members: int, deadline: Deadline) -> Iterator[Advice]:
        application, _, group = (_unescaped(part) for part in name.removeprefix(prefix).partition("."))
        decisions = HalfDecisions(self._logs, self._connection, application)
        topic = GroupTopic(self._consumers, self._begin, decisions, group)
        subject, arguments = f"half messages of group {group!r}", f"--group {group} --application {application}"
        if halves := topic.parked(deadline):
            text = f"{len(halves)} are parked: their check-backs had no decision, or they cannot be published"
            yield Advice("problem", subject, text, f"txnbridge resolver parked {arguments}")
        if not members:
            database = re.fullmatch(r"(.+)-db-[0-9a-f]{8}", group)  # of transactions with db=
            if database is not None:
                arguments = f"--group {database[1]} --application {application} --database URL"
            else:
                arguments += " --check MODULE:NAME"
            text = "no process of the group is open to publish committed ones and to answer check-backs"
            yield Advice("warning", subject, text, f"txnbridge resolver run {arguments}")


class GroupTopic:
    """The half topic of one group, as this process uses it. Any thread may use it.

    One thread at a time reads and handles halves: the one that holds `_turn`.
    """

    def __init__(self, consumers: Consumers, begin: Begin, decisions: HalfDecisions, group: str) -> None:
        self._consumers = consumers
        self._connection = consumers.connection
        self._begin = begin
        self._decisions = decisions
        self._group = group
        name = half_topic_name(decisions.application, group)
        self._name = self._connection.broker.admin.internal_name(name)
        self._turn = threading.Lock()
        self._consumer: RawConsumer | None = None
        self._partitions = 0  # 0 until the topic is known to exist
        self._group_exists = threading.Event()
        self._windows: dict[int, PartitionWindow] = {}
        self._scanned: dict[int, tuple[object, Scanned]] = {}  # by partition: the assignment in which it was scanned
        self._paused: set[int] = set()
        self._problems: dict[str, str] = {}  # copies that could not be published and are not parked yet, and why
        self._batch = _MOST_HALVES
        # The present number of halves a second, and how many may come back by now.
        self._back_a_second = self._may_come_back = float(_FIRST_BACK)
        self._counted_at = 0.0
        self._trimmed_at = 0.0
        self._look_at = 0.0  # when the decisions of other processes are read again
        # Copies that this process has decided, so that the thread that handles halves reads the decisions at once.
        self.decided: SimpleQueue[str] = SimpleQueue()
        self.unpublished: set[str] = set()  # copies that this process commits and has not published yet

    @property
    def _timing(self) -> Timing:
        return self._connection.timing

    @property
    def _delays(self) -> list[float]:
        """The delays of the delay partitions: until the first check-back at the latest, and the later pauses."""
        seconds = self._connection.broker.half_check_seconds
        return [min(_FIRST_DELAY, seconds), seconds, 2 * seconds, 4 * seconds, _LONGEST_PAUSE_FACTOR * seconds]

    @property
    def _parked(self) -> int:
        """The number of the parked partition: the last one, as the delay partitions are behind the active one."""
        return self._partitions - 1

    # --- storing ----------------------------------------------------------------------------------------------------

    def append(self, partition: int, records: Iterable[Record], deadline: Deadline) -> None:
        """Store records in one transaction. Raise `TransactionAborted` if none of them is stored."""
        with self._begin(deadline.left(), False) as txn:
            self._send(txn, partition, records)

    def _send(self, txn: Transaction, partition: int, records: Iterable[Record]) -> None:
        for record in records:
            txn._send_encoded(self._name, record.value, record.key, record.headers, partition, None)

    def ensure_group(self, deadline: Deadline) -> None:
        """Create the topic and the group. Some brokers keep messages only for groups that exist."""
        # Mostly a resolver of this process joins the group.
        while not self._group_exists.wait(min(_JOIN_SECONDS, deadline.left())):
            deadline.check(f"opening half topic {self._name!r}")
            held: list[bool] = []
            try:
                if Deadline(0).acquire(self._turn, held):
                    self._open_consumer(deadline).close()
            finally:
                if held:
                    self._turn.release()

    def _join(self, deadline: Deadline) -> RawConsumer:
        if self._consumer is None:
            self._consumer = self._open_consumer(deadline)
        return self._consumer

    def _open_consumer(self, deadline: Deadline) -> RawConsumer:
        self._create(deadline)
        consumer = RawConsumer.open(self._consumers, self._name, self._name, "earliest")
        self._group_exists.set()
        return consumer

    def _create(self, deadline: Deadline) -> None:
        if not self._partitions:
            admin = self._connection.broker.admin
            with suppress(InvalidOption):  # another version, with other delays, has created it
                admin.create_internal_topic(self._name, len(self._delays) + 2, deadline)
            self._partitions = len(admin.bounds([self._name], deadline))

    # --- resolving --------------------------------------------------------------------------------------------------

    def checks(self, limit: int, deadline: Deadline) -> list[Half]:
        held: list[bool] = []
        try:
            if not deadline.acquire(self._turn, held):
                return []
            while True:
                self._work(deadline)
                if due := self._due(limit):
                    return due
                if deadline.expired:
                    return []
        finally:
            if held:
                self._turn.release()

    def leave(self) -> None:
        """Publish what this process has committed, and leave the group."""
        with self._turn:
            deadline = Deadline(_DRAIN_SECONDS)
            try:
                while self.unpublished and not deadline.expired and not self._connection.closed:
                    try:
                        self._work(deadline)
                    except TxnBridgeError:
                        time.sleep(_POLL_SECONDS)  # the next one may succeed
            finally:
                consumer, self._consumer = self._consumer, None
                self._forget()
                if consumer is not None:
                    consumer.close()

    def _work(self, deadline: Deadline) -> None:
        """Read records, waiting for some if there is nothing else to do, and handle the halves that can be handled."""
        self._read(deadline)
        for window in list(self._windows.values()):
            if window.ready and not window.expected and (batch := self._choose(window)):
                self._handle(window, batch)
        self._pause()

    def _read(self, deadline: Deadline) -> None:
        consumer = self._join(self._connection.deadline())
        active = self._windows.get(_ACTIVE)
        wait = _POLL_IDLE_SECONDS
        if not self._all_ready() or (active is not None and (active.waiting or active.expected)):
            wait = _POLL_SECONDS
        if not self.decided.empty() and active is not None and active.ready and not active.expected:
            wait = 0.0
        now = time.monotonic()
        for message in consumer.take(_MOST_RECORDS_A_POLL, min(wait, deadline.left())):
            self._window(message).add(message, now)
        self._drop_ended_windows(consumer)
        for window in self._windows.values():
            if not window.barrier_is_stored:
                self.append(window.number, [Barrier(window.barrier).record()], self._connection.deadline())
                window.barrier_is_stored = True
        if any(window.ready and window.overflowed for window in self._windows.values()):
            self._read_again(consumer)

    def _all_ready(self) -> bool:
        return all(window.ready for window in self._windows.values())

    def _window(self, message: Message) -> PartitionWindow:
        number, source = message.partition, message.source
        window = self._windows.get(number)
        if window is None or window.source is not source:
            scanned = self._scanned.get(number)
            known = scanned[1] if scanned is not None and scanned[0] is source else None
            window = self._windows[number] = PartitionWindow(number, source, known)
            self._paused.discard(number)
        return window

    def _drop_ended_windows(self, consumer: RawConsumer) -> None:
        mine = {number for _, number in consumer.assignment}
        for number in self._windows.keys() - mine:
            del self._windows[number]
            self._paused.discard(number)
        if mine and _ACTIVE not in mine:  # another process publishes what this one decides
            self.unpublished.clear()
            self._take_decided()

    def _read_again(self, consumer: RawConsumer) -> None:
        """Read everything again that is not acknowledged."""
        for window in self._windows.values():
            if window.ready:
                self._scanned[window.number] = window.source, window.scanned
        consumer.take_back()
        self._forget()

    def _forget(self) -> None:
        if self._consumer is not None and self._paused:
            self._consumer.resume([(self._name, number) for number in self._paused])
        self._windows.clear()
        self._paused.clear()

    def _pause(self) -> None:
        """Pause partitions of which nothing has to be handled now, so that few halves are in memory."""
        assert self._consumer is not None
        idle = {window.number for window in self._windows.values() if self._is_idle(window)}
        for change, call in ((idle - self._paused, self._consumer.pause), (self._paused - idle, self._consumer.resume)):
            if change:
                call([(self._name, number) for number in change])
        self._paused = idle

    def _is_idle(self, window: PartitionWindow) -> bool:
        if not window.ready:
            return False
        if window.number == self._parked:
            return window.is_full
        if window.number == _ACTIVE:
            return window.is_full and not window.expected
        return bool(window.waiting) and (window.is_full or window.waiting[0].half.due_at > _now())

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _choose(self, window: PartitionWindow) -> list[WaitingHalf]:
        """Return the halves of a window that are handled now, in the order of their records."""
        if window.number == _ACTIVE:
            return self._choose_active(window)
        now = _now()
        due = list(islice((each for each in window.waiting if each.half.due_at <= now), self._batch))
        if window.number != self._parked:
            due = self._coming_back(due)
        else:
            resumed = [number for number, each in enumerate(window.waiting) if window.is_resumed(each)]
            due = window.waiting[: resumed[-1] + 1] if resumed else due
            self._learn(due)
        return window.closed(due)

    def _coming_back(self, due: list[WaitingHalf]) -> list[WaitingHalf]:
        """Return those of a delay partition's due halves that may come back now: all, or those of 0.2 s at least."""
        now = time.monotonic()
        earned = (now - self._counted_at) * self._back_a_second
        self._may_come_back, self._counted_at = min(self._may_come_back + earned, self._back_a_second), now
        allowed = int(self._may_come_back)
        if len(due) > allowed:
            return due[:allowed] if allowed >= self._back_a_second / 5 else []
        return due

    def _note_return(self, count: int) -> None:
        """Let more halves come back for those that were asked about, and fewer for those that came back in vain.

        So twice as many come back as are asked about, and the same number is moved away again.
        """
        self._back_a_second = min(max(self._back_a_second + count, _SLOWEST_BACK), _FASTEST_BACK)

    def _choose_active(self, window: PartitionWindow) -> list[WaitingHalf]:
        self._look(window)
        waiting = window.waiting
        settled = [number for number, each in enumerate(waiting) if each.is_settled]
        if window.is_full:
            chosen = waiting
        elif not settled:
            return []
        else:
            chosen = waiting[: settled[-1] + 1]
            undecided = len(chosen) - len(settled)
            since = min(each.settled_at for each in chosen if each.is_settled)
            if undecided and time.monotonic() - since < max(_GRACE_SECONDS, undecided / _MOVED_PER_SECOND):
                first = next(number for number, each in enumerate(waiting) if not each.is_settled)
                chosen = waiting[:first]
        return window.closed(self._limited(chosen))

    def _limited(self, chosen: Sequence[WaitingHalf]) -> list[WaitingHalf]:
        """Return the first of the chosen halves, as many as one transaction should have."""
        limited: list[WaitingHalf] = []
        messages = size = 0
        most = self._connection.broker.limits.transaction_messages or math.inf
        for each in chosen:
            messages += len(each.half.messages)
            size += each.half.bytes
            if limited and (len(limited) >= self._batch or size > _MOST_BYTES or messages >= most):
                break
            limited.append(each)
        return limited

    def _look(self, window: PartitionWindow) -> None:
        """Read the decisions of this process at once, and those of other processes now and then."""
        decided = self._take_decided()
        began = time.monotonic()
        if began > self._look_at:
            self._learn(list(window.undecided()))
            now = time.monotonic()
            self._look_at = now + max(_LOOK_SECONDS, _LOOK_PAUSE_FACTOR * (now - began))
        elif decided:
            self._learn([each for each in window.undecided() if each.half.copy in decided])

    def _take_decided(self) -> set[str]:
        decided: set[str] = set()
        while not self.decided.empty():
            decided.add(self.decided.get())
        return decided

    def _learn(self, halves: Sequence[WaitingHalf]) -> None:
        if not halves:
            return
        claims = self._decisions.read([each.half for each in halves], self._connection.deadline())
        for each, claim in zip(halves, claims, strict=True):
            if isinstance(claim, EvidenceLost):
                each.problem, each.settled_at = f"its outcome can never be known: {claim}", time.monotonic()
            elif claim is not None:
                each.claim, each.problem = claim, self._problems.get(each.half.copy, "")
                each.settled_at = time.monotonic()

    # --- handling ---------------------------------------------------------------------------------------------------

    def _handle(self, window: PartitionWindow, batch: Sequence[WaitingHalf]) -> None:
        """Publish, drop or move halves in one transaction, which acknowledges them."""
        deadline = self._connection.deadline()
        published = [each for each in batch if window.number == _ACTIVE and each.is_published and not each.problem]
        moved = [(each, target) for each in batch if (target := self._target(window, each)) is not None]
        moves = [(target, self._moved(window, each, target, deadline)) for each, target in moved]
        last = window.last_record(batch)
        counts = {"published": len(published), "moved": len(moves), "dropped": len(batch) - len(published) - len(moves)}
        try:
            with (
                self._connection.events.step("half.publish", None, group=self._group, **counts),
                self._begin(deadline.left(), True) as txn,
            ):
                for each in sorted(published, key=_claimed_at):
                    self._publish(txn, each)
                for target, half in moves:
                    self._send(txn, target, half.records())
                self._send(txn, window.number, [Handled(last.position).record()])
                txn.ack_up_to(last)
        except _CannotBePublished as refused:
            self._note_problem(refused.half, str(refused.__cause__))
            return
        except TxnBridgeError as error:
            self._read_again(self._join(deadline))
            self._scanned.clear()  # what the transaction has stored may become visible late: wait for new barriers
            if isinstance(error, Conflict):  # another resolver has the partition by now
                return
            if isinstance(error, TransactionAborted):
                self._suspect(published, error)
            raise
        window.acknowledged(batch, last)
        if _ACTIVE < window.number < self._parked:
            self._may_come_back -= len(batch)
        now = _now()
        self._note_return(-sum(target != _ACTIVE and each.half.check_at <= now for each, target in moved))
        if window.number == _ACTIVE:
            window.expected.update(half.copy for target, half in moves if target == _ACTIVE)
        for each in batch:
            self.unpublished.discard(each.half.copy)
            self._problems.pop(each.half.copy, None)
        self._batch = min(2 * self._batch, _MOST_HALVES)
        self._trim(last, window.number)

    def _publish(self, txn: Transaction, each: WaitingHalf) -> None:
        for message in each.half.messages:
            try:
                txn._send_encoded(*message)
            except UsageError as error:
                raise _CannotBePublished(each) from error

    def _suspect(self, published: Sequence[WaitingHalf], error: TxnBridgeError) -> None:
        """Publish halves one by one after the broker has refused several; note the problem of a single one."""
        if len(published) > 1:
            self._batch = 1
        elif published:
            self._note_problem(published[0], str(error))

    def _note_problem(self, each: WaitingHalf, reason: str) -> None:
        _log.error(
            "half-message transaction %s is committed and parked, not published: %s", each.half.transaction, reason
        )
        self._problems[each.half.copy] = each.problem = reason

    def _target(self, window: PartitionWindow, each: WaitingHalf) -> int | None:
        """Return the partition to which a half is moved; None for one that is published or dropped."""
        if window.number == _ACTIVE:
            if each.problem:
                return self._parked
            if each.is_settled:
                return None
            young = _now() - each.half.stored_at < self._timing.half_active * 1000
            return _ACTIVE if young and not window.is_full else self._delay_partition(each.half)
        if window.number == self._parked and each.claim is None and not window.is_resumed(each):
            return self._parked
        if window.number == self._parked and each.is_settled and not each.is_published:
            return None
        return _ACTIVE

    def _delay_partition(self, half: StoredHalf) -> int:
        """Return the delay partition with the least delay that reaches the half's next check-back."""
        seconds = (half.check_at - _now()) / 1000
        delays = self._delays[: self._parked - 1]
        return 1 + next((number for number, delay in enumerate(delays) if delay >= seconds), len(delays) - 1)

    def _moved(self, window: PartitionWindow, each: WaitingHalf, target: int, deadline: Deadline) -> StoredHalf:
        half = each.half
        if each.claim is None:
            with suppress(EvidenceLost):
                half = self._decisions.with_lasting_evidence(half, deadline)
        now = _now()
        if target == _ACTIVE:
            if window.is_resumed(each):
                return replace(half, due_at=0, checks=0, check_at=now)
            return replace(half, due_at=0)
        delay = self._timing.parked_look if target == self._parked else self._delays[target - 1]
        return replace(half, due_at=now + int(delay * 1000))

    def _trim(self, last: Message, partition: int) -> None:
        now = time.monotonic()
        admin = self._connection.broker.admin
        if now - self._trimmed_at < _TRIM_SECONDS:
            return
        self._trimmed_at = now
        try:
            admin.trim((self._name, partition), last.position, self._connection.deadline())
        except TxnBridgeError as error:
            self._trimmed_at = now + _TRIM_AGAIN_SECONDS
            _log.warning("acknowledged records of half topic %r could not be deleted: %s", self._name, error)

    # --- check-backs ------------------------------------------------------------------------------------------------

    def _due(self, limit: int) -> list[Half]:
        window = self._windows.get(_ACTIVE)
        if window is None or not window.ready:
            return []
        now = _now()
        due: list[Half] = []
        for each in window.undecided():
            half = each.half
            if half.check_at > now or len(due) == limit:
                continue
            if half.checks >= self._connection.broker.half_checks:
                self._park(each)
                continue
            pause = self._connection.broker.half_check_seconds * min(1 << half.checks, _LONGEST_PAUSE_FACTOR)
            each.half = replace(half, checks=half.checks + 1, check_at=now + int(pause * 1000))
            due.append(_as_half(self._group, each.half, fresh_until=math.inf))
        self._note_return(len(due))
        return due

    def _park(self, each: WaitingHalf) -> None:
        """Mark a half for the parked partition unless it was decided meanwhile."""
        self._learn([each])
        if each.is_settled:
            return
        half = each.half
        with self._connection.events.step("half.park", half.transaction, group=self._group, checks=half.checks):
            each.problem = f"{half.checks} check-backs had no decision"
            each.settled_at = time.monotonic()

    def parked(self, deadline: Deadline) -> list[StoredHalf]:
        """Return the halves in the parked partition that are neither decided nor resumed."""
        try:
            bounds = self._connection.broker.admin.bounds([self._name], deadline)
        except NotFound:  # the group has stored no half yet
            return []
        self._partitions = len(bounds)
        place = (self._name, self._parked)
        start, end = bounds[place]
        if start >= end:
            return []
        found: dict[str, StoredHalf] = {}
        window = PartitionWindow(self._parked, None, Scanned(()))
        consumer = RawConsumer.open(self._consumers, self._name, None, "earliest")
        with consumer:
            consumer.pause([(self._name, number) for number in range(self._parked)])
            while consumer.positions().get(place, start) < end:
                deadline.check("reading the parked half messages")
                messages = consumer.take(_MOST_RECORDS_A_POLL, min(_READ_SECONDS, deadline.left()))
                for message in messages:
                    if message.partition == self._parked:
                        window.add(message, 0.0)
                if not messages and not consumer.lag().get(place, 0):
                    break
        for each in window.waiting:
            if not window.is_resumed(each):
                found[each.half.copy] = each.half  # a later record of the same copy replaces the earlier one
        halves = list(found.values())
        claims = self._decisions.read(halves, deadline)
        return [half for half, claim in zip(halves, claims, strict=True) if not _is_settled_elsewhere(half, claim)]

    def resume(self, transaction: str, deadline: Deadline) -> None:
        self.append(self._parked, [Resume(transaction).record()], deadline)


class _CannotBePublished(Exception):
    def __init__(self, half: WaitingHalf) -> None:
        self.half = half


def half_topic_name(application: str, group: str) -> str:
    """Return the name of a group's half topic, without the broker's prefix. Any two groups have different names."""
    return f"{_PREFIX}{_escaped(application)}.{_escaped(group)}"


def _escaped(text: str) -> str:
    """Return text in the characters that all brokers allow in a topic's name; others become `_` and two digits."""
    name = "".join(chr(c) if c in _PLAIN else f"_{c:02x}" for c in text.encode())
    digest = sha256(text.encode()).hexdigest()[:16]
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - len(digest) - 1]}_{digest}"


def _unescaped(name: str) -> str:
    return re.sub(
        "((?:_[0-9a-f]{2})+)", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(errors="replace"), name
    )


def _as_half(group: str, stored: StoredHalf, fresh_until: float) -> Half:
    how = {"stored": replace(stored, messages=()), "fresh_until": fresh_until}
    return Half(
        group, stored.transaction, stored.messages, stored.check_at, stored.deadline_at, checks=stored.checks, how=how
    )


def _is_settled_elsewhere(half: StoredHalf, claim: Claim | EvidenceLost | None) -> bool:
    """Return whether a parked copy is dropped. A copy that its claim publishes is kept: publishing it has failed."""
    return claim is not None and not isinstance(claim, EvidenceLost) and claim.data.get("copy") != half.copy


def _claimed_at(each: WaitingHalf) -> Position:
    assert each.claim is not None
    return each.claim.position


def _outcome(decision: Decision) -> Outcome:
    return Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED


def _now() -> int:
    return int(time.time() * 1000)
