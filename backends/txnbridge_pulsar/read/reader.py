"""The reader: receives committed messages of topics, in a group or without one."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from txnbridge import errors
from txnbridge.spi import (
    BackgroundTask,
    Context,
    Deadline,
    Message,
    Partition,
    Position,
    Reader,
    ReaderListener,
    Subscription,
)
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import RestRefused
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import EndDelivery
from txnbridge_pulsar.outcome.forgotten_transactions import release
from txnbridge_pulsar.read.group_registry import GroupRegistry
from txnbridge_pulsar.read.partition import MAX_OVERCOUNT, PulsarPartition
from txnbridge_pulsar.read.subscriptions import mode_of
from txnbridge_pulsar.write.acks import PulsarAckContext, finish_entries

_log = logging.getLogger("txnbridge.pulsar.read")

# Timeout of calls without a deadline (`seek`).
SEEK_SECONDS = 10.0
# The longest wait in `poll`: everything wakes it earlier, except signals and partitions that were added to a topic.
_MAX_POLL_WAIT_SECONDS = 0.25
# Seconds between two checks for partitions that were added to the reader's topics.
_NEW_PARTITIONS_CHECK_SECONDS = 3.0
# Seconds until a missing topic counts as deleted: a broker that has just started does not know all topics.
_DELETED_TOPIC_SECONDS = 0.5
# Seconds to wait until the broker has said of each partition which member has it, before partitions are assigned
# together: a member that stops when all its partitions are read would else stop after the first one. A broker usually
# says so at once, but a second later if it takes the partition from another member, and even later if it is busy.
_ASSIGN_TOGETHER_SECONDS = 10.0
# Seconds between two checks for pending acks of open transactions.
_PENDING_ACKS_CHECK_SECONDS = 0.1
# The most entries that are taken from the inbox at once.
_MAX_ENTRIES_PER_TAKE = 500
# Bytes, about, that one poll returns at most: 10,000 large messages at once would not fit into memory.
_MAX_POLL_BYTES = 16 * 1024 * 1024
# Partitions in one check of idle ones, and seconds for the check, in which nothing else is done in the background.
_MAX_IDLE_CHECKS = 20
_IDLE_CHECK_SECONDS = 5.0
# Seconds between two looks for entries of shared groups that may be acknowledged whole.
_FINISH_SECONDS = 1.0
# Seconds for one of several lost or new partitions, with time for REST; brokers go on loading its topic meanwhile.
_REOPEN_SECONDS = 4.0
_DELETION_SECONDS = 5.0  # a topic that is being deleted loses its subscriptions at most so long before it is gone
# Partitions that are opened in parallel: each waits some milliseconds for the broker.
_PARALLEL_OPENINGS = 16

_numbers = itertools.count()


@dataclass(frozen=True)
class _BackgroundResult:
    """The result of a reader's background work: partitions to assign, with start positions, and added partitions."""

    starting: Mapping[PulsarPartition, Position] = field(default_factory=dict)
    added: Sequence[PulsarPartition] = ()


class PulsarReader(Reader):
    """Reads by one consumer for each partition, all on one connection. A background thread sends the slow requests."""

    def __init__(
        self,
        cluster: ClusterAccess,
        subscription: Subscription,
        listener: ReaderListener,
        context: Context,
        deadline: Deadline,
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._listener = listener
        self._timeout = context.timeout
        self._connection_key = f"reader {next(_numbers)}"
        self._timing = cluster.settings.timing
        self._inbox = wire.Inbox(self._timing.reader_bytes)
        self._end_delivery = EndDelivery(cluster)
        self._registry = GroupRegistry(cluster.rest, subscription, context, self._timing)
        self._mode = mode_of(cluster.client, subscription, self._inbox, self._connection_key)
        self._guard = threading.Lock()  # other threads acknowledge
        self._partitions: dict[Partition, PulsarPartition] = {}
        self._by_consumer: dict[object, PulsarPartition] = {}
        shared = subscription.sharing != "partition"
        self._early: list[wire.ReceivedEntry] = []  # entries of partitions that are being opened
        self._context = PulsarAckContext(subscription.group or "", shared, self._partitions, self._guard)
        self._work: BackgroundTask[_BackgroundResult] | None = None
        self._check_partitions_at = time.monotonic() + _NEW_PARTITIONS_CHECK_SECONDS
        self._check_idle_at = time.monotonic() + self._timing.idle_check_seconds
        self._finish_at, self._together_until = time.monotonic(), 0.0
        self._may_release = True  # whether the user may end forgotten transactions, as far as it is known
        self._closed = False
        topics = self._concrete_topics(deadline)
        try:
            with translated(f"reading {', '.join(subscription.topics)}"):
                self._add(self._open(topics, True, deadline))
                self._together_until = time.monotonic() + _ASSIGN_TOGETHER_SECONDS
                for partition in () if self._mode.grouped else list(self._partitions.values()):
                    with self._replacing_consumer(partition):
                        first = self._mode.begin(partition, deadline)
                    self._arrive(partition, first)
        except BaseException:
            self.close(deadline)
            raise

    def _open(self, topics: Mapping[str, Sequence[str]], first: bool, deadline: Deadline) -> list[PulsarPartition]:
        """Open a consumer on partitions without one, and return these. `first` is False if they were added later."""
        missing = [
            ((topic, number), concrete)
            for topic, names in topics.items()
            for number, concrete in enumerate(names)
            if (topic, number) not in self._partitions
        ]
        begun = {topic: self._registry.partitions(topic, deadline) for topic in {topic for (topic, _), _ in missing}}
        added: list[PulsarPartition] = []

        def open_one(key: Partition, concrete: str) -> None:
            if key[1] < begun[key[0]]:
                self._check_subscription(key, concrete, deadline)
            # Where a new group begins does not count for a group that has begun: it would skip messages (hazard H57).
            consumer = self._mode.open(concrete, first and not begun[key[0]], deadline)
            added.append(PulsarPartition(key, concrete, consumer, self._mode.grouped, self._timing.max_delivery_counts))

        try:
            in_parallel(lambda each: open_one(*each), missing, _PARALLEL_OPENINGS)
            for topic in begun:
                self._registry.record(topic, len(topics[topic]), deadline)
        except BaseException as error:
            if added and not first:  # the next check opens the other ones
                _log.warning("not every new partition can be read yet: %s", error)
                return added
            # A retry opens new consumers, and the broker could assign a partition to one of these.
            for partition in added:
                partition.consumer.close(deadline.left())
            raise
        return added

    def _add(self, partitions: Iterable[PulsarPartition]) -> None:
        with self._guard:
            for partition in partitions:
                self._partitions[partition.key] = partition
                self._by_consumer[partition.consumer] = partition
        early, self._early = self._early, []
        for entry in early:
            if entry.consumer in self._by_consumer:
                self._by_consumer[entry.consumer].put(entry)

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        has_received = False
        while True:
            self._update_assignments()
            messages = self._hand_out(max_messages)
            if messages:
                return messages
            self._raise_faults()
            if has_received and deadline.expired:
                return []
            for partition in self._partitions.values():
                if partition.is_assigned:  # without it, messages that cannot be handed out would pile up
                    self._mode.grant_permits(partition, max_messages)
            self._receive(min(deadline.left(), _MAX_POLL_WAIT_SECONDS))
            has_received = True

    def _receive(self, wait: float) -> None:
        again: set[object] = set()  # consumers whose entries of this loop come again
        for entry in self._inbox.take(wait, _MAX_ENTRIES_PER_TAKE):
            partition = self._by_consumer.get(entry.consumer) if entry.consumer is not None else None
            if partition is None:
                self._early.append(entry)
            elif entry.consumer not in again:
                if self._mode.in_order and self._has_to_come_again(partition, entry):
                    again.add(entry.consumer)
                else:
                    partition.put(entry)

    def _has_to_come_again(self, partition: PulsarPartition, entry: wire.ReceivedEntry) -> bool:
        """Return whether the broker has left out entries before this one; if so, request all of them again."""
        with self._guard:
            is_missing = partition.is_assigned and partition.misses_entries_before(entry)
            if is_missing:
                self._mode.redeliver(partition)
        return is_missing

    def _hand_out(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        room = _MAX_POLL_BYTES
        for partition in self._rotated(self._partitions.values()):
            while len(messages) < limit and room > 0 and partition.ready:
                with self._guard:
                    taken, size = partition.take(limit - len(messages))
                messages += taken
                room -= size
        return messages

    def _raise_faults(self) -> None:
        for partition in self._partitions.values():
            if partition.fault is not None and not partition.paused:
                raise partition.fault

    def _update_assignments(self) -> None:
        """Report gained and lost partitions to the listener, and start background work if any is due, in each poll."""
        for partition in list(self._partitions.values()):
            if partition.is_assigned and (departure := self._mode.has_left(partition)):
                self._leave(partition, departure)
            elif not partition.is_assigned and not self._mode.is_due(partition):
                partition.drop()
                partition.waits_until = None
        self._finish_done_work()
        if self._work is None:
            self._start_work()

    def _finish_done_work(self) -> None:
        if self._work is not None and self._work.done:
            work, self._work = self._work, None
            try:
                work.finish()
            except errors.BrokerUnavailable as error:
                _log.warning("a broker cannot be reached, and is asked again: %s", error)

    def _leave(self, partition: PulsarPartition, departure: str) -> None:
        notify = self._listener.revoking if departure == "revoking" else self._listener.lost
        try:
            notify([partition.key])
        finally:
            with self._guard:
                partition.leave()
            # Assigned again already, or reopened, which shared groups are not told: new entries were just dropped.
            if partition.consumer.active is not False:
                with suppress(wire.BrokerConnectionLost):
                    partition.consumer.redeliver()

    def _start_work(self) -> None:
        partitions = self._partitions.values()
        over = {each for each in partitions if each.overcount > MAX_OVERCOUNT and each.is_idle}
        lost = [each for each in partitions if each.consumer.lost or each.consumer.stray or each in over]
        known = time.monotonic() >= self._together_until or not any(map(self._mode.is_undecided, partitions))
        due = [each for each in partitions if known and not each.is_assigned and self._mode.is_due(each)]
        check_topics = time.monotonic() >= self._check_partitions_at
        # A partition that stays lost must not keep the others from being checked.
        next_check = self._check_idle_at if self._mode.in_order else min(self._check_idle_at, self._finish_at)
        is_overdue = time.monotonic() >= next_check + self._timing.idle_check_seconds
        if (lost or due or check_topics) and not is_overdue:
            deadline = Deadline(self._timeout)
            self._work = BackgroundTask(
                lambda: self._run_work(lost, due, check_topics, deadline), self._apply_work, self._inbox.wake
            )
        elif time.monotonic() >= self._check_idle_at:
            self._check_idle_at = time.monotonic() + self._timing.idle_check_seconds
            idle = [each for each in partitions if each.is_assigned and not each.waiting]
            checked = random.sample(idle, min(len(idle), _MAX_IDLE_CHECKS))
            self._work = BackgroundTask(
                lambda: self._check_idle(checked), lambda _: self._redeliver_skipped(checked), self._inbox.wake
            )
        elif time.monotonic() >= self._finish_at and not self._mode.in_order:
            self._finish_at = time.monotonic() + _FINISH_SECONDS
            if unfinished := [each for each in partitions if each.unfinished]:
                self._work = BackgroundTask(lambda: self._finish_entries(unfinished), lambda _: None, self._inbox.wake)

    def _finish_work(self, deadline: Deadline) -> None:
        """Wait for the end of running background work, which could otherwise change positions after a seek."""
        if self._work is not None and not self._work.join(deadline.left()):
            deadline.check("waiting for a broker")
        with suppress(errors.PositionLost):  # the caller is about to set a position
            self._finish_done_work()
        if self._mode.grouped:
            self._update_assignments()

    def _run_work(
        self, lost: Sequence[PulsarPartition], due: Sequence[PulsarPartition], check_topics: bool, deadline: Deadline
    ) -> _BackgroundResult:
        try:
            with translated(f"reading {', '.join(self._subscription.topics)}"):
                starting: dict[PulsarPartition, Position] = {}

                def begin(partition: PulsarPartition, deadline: Deadline) -> None:
                    if not self._must_wait(partition, deadline):
                        starting[partition] = self._mode.begin(partition, deadline)

                silent = self._try_each(begin, due, deadline)
                away = self._try_each(self._reopen, lost, deadline)
                # If no other work waits, one of the lost ones gets the rest of the time.
                if away and len(away) == len(lost) and not (due or check_topics):
                    self._reopen(lost[0], deadline)
                if due and not starting:
                    time.sleep(_PENDING_ACKS_CHECK_SECONDS)
                if silent and len(silent) == len(due) and not (lost or check_topics):
                    raise silent[0]
                topics = self._concrete_topics(deadline) if check_topics and not starting else {}
                if topics:
                    self._check_partitions_at = time.monotonic() + _NEW_PARTITIONS_CHECK_SECONDS
                return _BackgroundResult(starting, self._open(topics, False, deadline))
        finally:
            if self._closed:
                self._cluster.client.hang_up(self._connection_key)

    def _try_each(
        self,
        action: Callable[[PulsarPartition, Deadline], None],
        partitions: Sequence[PulsarPartition],
        deadline: Deadline,
    ) -> list[Exception]:
        """Call `action` for each, with a short time, so that none delays others; return their errors."""
        failed: list[Exception] = []

        def attempt(partition: PulsarPartition) -> None:
            try:
                if not self._closed:
                    action(partition, Deadline(min(_REOPEN_SECONDS, deadline.left())))
            except (wire.PulsarError, errors.BrokerUnavailable) as error:
                _log.debug("%s cannot be read yet: %s", partition.topic, error)
                failed.append(error)

        in_parallel(attempt, random.sample(partitions, len(partitions)), _PARALLEL_OPENINGS)
        return failed

    def _reopen(self, partition: PulsarPartition, deadline: Deadline) -> None:
        self._check_exists(partition.key, partition.topic, deadline)
        self._check_subscription(partition.key, partition.topic, deadline)
        self._mode.check_kept(partition, deadline)
        partition.consumer.go_back()
        partition.consumer.reopen(deadline.left())
        self._together_until = time.monotonic() + _ASSIGN_TOGETHER_SECONDS

    def _finish_entries(self, partitions: Sequence[PulsarPartition]) -> _BackgroundResult:
        deadline, group = Deadline(_IDLE_CHECK_SECONDS), self._subscription.group or ""
        for partition in partitions:
            try:
                finish_entries(self._cluster.client, self._end_delivery, group, partition, self._guard, deadline)
            except wire.PulsarError as error:
                _log.debug("entries of %s stay in the backlog for now: %s", partition.topic, error)
        return _BackgroundResult()

    def _check_idle(self, partitions: Sequence[PulsarPartition]) -> _BackgroundResult:
        """Look for the reason why partitions deliver nothing, and remove it. Return an empty result.

        A forgotten transaction may hide messages (hazard H98), or the broker may have skipped some (hazard H94), or
        take some for this member's that it has not (hazard H160).
        """
        deadline = Deadline(_IDLE_CHECK_SECONDS)
        for partition in partitions:
            try:
                if self._mode.grouped:  # first, because REST may be away
                    with translated(f"asking for the end of {partition.topic}"):
                        partition.note_progress(*partition.consumer.progress(deadline.left()))
                if self._cluster.rest and self._may_release:
                    release(self._cluster, partition.topic, deadline)
            except errors.AccessDenied as error:
                self._may_release = False
                _log.warning(
                    "transactions that their coordinators have forgotten may hold readers of %s back: %s",
                    *(partition.topic, error),
                )
            except (errors.TxnBridgeError, RestRefused) as error:
                _log.debug("why nothing comes from %s is not known: %s", partition.topic, error)
        return _BackgroundResult()

    def _redeliver_skipped(self, partitions: Sequence[PulsarPartition]) -> None:
        """Have brokers redeliver partitions in which the last two checks found messages that the reader never got.

        Before that, acknowledge chunks of messages amid which the group began: they would stay in its backlog.
        """
        for partition in partitions:
            with self._guard:
                if partition.is_assigned and partition.mark_delete is not None:
                    with suppress(wire.BrokerConnectionLost):
                        partition.consumer.acknowledge_strays(partition.mark_delete)
                if partition.is_assigned and partition.is_behind and partition.is_idle and partition.consumer.all_taken:
                    self._mode.redeliver(partition)

    def _concrete_topics(self, deadline: Deadline) -> dict[str, tuple[str, ...]]:
        """Return each topic's partitions by full name. For a group, create a missing topic where that is allowed."""
        topics, read = self._cluster.topics, self._subscription
        return {each: topics.concrete(each, deadline, create=read.creates(each)) for each in read.topics}

    def _must_wait(self, partition: PulsarPartition, deadline: Deadline) -> bool:
        """Return whether a partition must not be assigned yet, because open transactions have acknowledged messages on
        it: if they abort, the broker redelivers these messages out of order.

        The wait is limited, because transactions that are not prepared time out.
        """
        if not self._mode.in_order or not self._registry.has_pending_acks(partition.topic, deadline):
            return False
        if partition.waits_until is None:
            partition.waits_until = time.monotonic() + self._timeout + self._timing.timeout_delay_seconds
        return time.monotonic() < partition.waits_until

    def _check_subscription(self, key: Partition, concrete: str, deadline: Deadline) -> None:
        """Raise `PositionLost` if the group's subscription is gone, or `NotFound` if it went because its topic does."""
        sure = Deadline(min(_DELETION_SECONDS, max(deadline.left() - 1, 0)))
        while True:
            try:
                return self._registry.check(concrete, deadline)
            except errors.PositionLost:
                if sure.expired:
                    raise
            time.sleep(_DELETED_TOPIC_SECONDS / 10)
            self._check_exists(key, concrete, deadline)

    def _check_exists(self, key: Partition, concrete: str, deadline: Deadline) -> None:
        """Raise `NotFound` if the partition's topic was deleted: subscribing again would create an empty topic."""
        sure_at = time.monotonic() + _DELETED_TOPIC_SECONDS
        while concrete not in self._cluster.topics.existing(key[0], deadline):
            if time.monotonic() > sure_at:
                raise errors.NotFound(f"{key[0]}[{key[1]}] no longer exists: its topic was deleted")
            time.sleep(_DELETED_TOPIC_SECONDS / 10)

    def _apply_work(self, result: _BackgroundResult) -> None:
        self._add(result.added)
        if not self._mode.grouped:
            for partition in result.added:
                self._arrive(partition, partition.next)
        for partition, first in result.starting.items():
            self._arrive(partition, first)

    def _arrive(self, partition: PulsarPartition, first: Position) -> None:
        partition.generation, partition.activations = partition.consumer.generation, partition.consumer.activations
        source = self._listener.assigned(partition.key)
        with self._guard:
            partition.arrive(source, first)
        if partition.waits_until is not None:  # messages that have arrived meanwhile may be out of order
            partition.waits_until = None
            partition.drop()
            with suppress(wire.BrokerConnectionLost):
                partition.consumer.redeliver()

    def positions(self) -> dict[Partition, Position]:
        return {key: partition.next for key, partition in self._partitions.items() if partition.is_assigned}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        wanted = {self._partition(key): _checked(position) for key, position in positions.items()}
        deadline = Deadline(SEEK_SECONDS)
        if not self._mode.grouped:  # in a group, going back after an abort must not fail because a broker is down
            self._finish_work(deadline)
        for partition, position in wanted.items():
            with translated(f"seeking in {partition.key[0]}"), self._replacing_consumer(partition):
                self._mode.seek(partition, position, deadline)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self._finish_work(deadline)
        for key in self.positions():
            partition = self._partition(key)
            with translated(f"seeking in {key[0]}"), self._replacing_consumer(partition):
                self._mode.seek_to_time(partition, timestamp, deadline)

    @contextmanager
    def _replacing_consumer(self, partition: PulsarPartition) -> Iterator[None]:
        """During the block, which may replace the partition's consumer, let no other thread use the reader's consumers.

        Afterwards entries of the new consumer are taken as the partition's.
        """
        with self._guard:
            del self._by_consumer[partition.consumer]
            try:
                yield
            finally:
                self._by_consumer[partition.consumer] = partition

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for key, given in positions.items():
            partition = self._partitions.get(key)
            # Otherwise the messages are redelivered to the member that has the partition now.
            if partition is not None and partition.is_assigned:
                with self._guard:
                    self._mode.nack(partition, given)

    def pause(self, partitions: Sequence[Partition]) -> None:
        for partition in [self._partition(key) for key in partitions]:
            partition.paused = True
            self._mode.hold(partition, True)

    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in [self._partition(key) for key in partitions]:
            partition.paused = False
            self._mode.hold(partition, False)

    def _partition(self, key: Partition) -> PulsarPartition:
        partition = self._partitions.get(key)
        if partition is None or not partition.is_assigned:
            topic, number = key
            raise errors.InvalidState(f"{topic}[{number}] is not assigned to this reader now: see `positions()`")
        return partition

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        if self._work is not None and not self._mode.grouped:  # it may reopen consumers, which then go back
            self._work.join(deadline.left())
        with translated("asking for the lag"):
            return {key: self._lag_of(each, deadline) for key, each in self._partitions.items() if each.is_assigned}

    def _lag_of(self, partition: PulsarPartition, deadline: Deadline) -> int:
        """Return a partition's lag: received messages that are not processed, plus entries that are not received."""
        last, acknowledged = partition.consumer.progress(deadline.left())
        end = last.ledger, last.entry
        done = (-1, -1) if acknowledged is None or not self._mode.grouped else (acknowledged.ledger, acknowledged.entry)
        ours = partition.waiting + partition.outstanding
        unacknowledged = self._mode.grouped and _entries(done, end) > 0
        received = max(partition.received, partition.consumer.heard[:2], done)
        return max(int(unacknowledged), ours + _entries(received, end))

    def ack_context(self) -> PulsarAckContext:
        return self._context

    def close(self, deadline: Deadline) -> None:
        try:
            if self._closed:  # by a call that a signal handler's exception may have ended
                return
            self._closed = True
            self._end_delivery.close(deadline)
            # A broker does not tell a closed consumer that its topic was unloaded during a commit (hazard H49).
            time.sleep(min(self._timing.unload_notice_seconds * self._mode.grouped, deadline.left()))
            for partition in list(self._by_consumer.values()):
                with suppress(wire.PulsarError):
                    partition.consumer.close(deadline.left())
        finally:
            # This also ends unanswered requests and consumers that are being opened.
            self._cluster.client.hang_up(self._connection_key)


def _entries(since: tuple[int, int], end: tuple[int, int]) -> int:
    """Return the number of entries from `since` to `end`, each a (BookKeeper ledger, entry).

    If these are different ledgers, count only the entries of the later one: the lengths of the others are not known.
    """
    if end[1] < 0 or since >= end:
        return 0
    return end[1] - since[1] if end[0] == since[0] else end[1] + 1


def _checked(position: Position) -> Position:
    match position:
        case (int(ledger), int(entry), int(index)) if min(ledger, entry, index) >= 0:
            return position
    raise errors.InvalidOption(f"{position!r} is not a position of this broker, such as (7, 0, 0)")
