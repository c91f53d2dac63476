"""Reading committed messages, in a group or alone."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from txnbridge.errors import BrokerUnavailable, InvalidOption, InvalidState, NotFound, PositionLost
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
from txnbridge_pulsar.cluster import Cluster
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.read.group_registry import Begun
from txnbridge_pulsar.read.partition import Cursor
from txnbridge_pulsar.read.subscriptions import way_of
from txnbridge_pulsar.write.acks import AckContext

_log = logging.getLogger("txnbridge.pulsar.client")

# A call without a deadline of its own (seek) asks the broker something; it waits this long for the answer.
SHORT_CALL = 10.0
# Nothing that has to be noticed goes unannounced, but for a signal and partitions that were added.
_IDLE_SECONDS = 0.25
# How often a reader looks for partitions that were added to its topics.
_LOOK_SECONDS = 3.0
# A broker that has just started answers before it knows its topics.
_SURE_SECONDS = 0.5
# Partitions come together: a member that reads until all its partitions are read would else take the first for all. A
# broker says at once which member has a partition, or a second after it took that from another one, a busy broker
# later; past this time the reader does not wait for its word.
_TOGETHER_SECONDS = 10.0
# How soon is asked again whether open transactions still hold messages in front, and how late coordinators may be to
# abort those whose time is over.
_HELD_SECONDS, _LATE_SECONDS = 0.1, 5.0
# So many bytes wait to be handed out, over all partitions; entries that were taken in may hold as many again.
READ_BYTES = 32 * 1024 * 1024
# Entries that are taken in at once: of large ones there are never so many.
_MOST_ENTRIES = 500
# One poll hands out so many bytes at most: a program that asks for 10,000 messages has no room for as many megabytes.
_ENOUGH_BYTES = 16 * 1024 * 1024
# Opening a partition is a matter of some milliseconds of waiting for the broker.
_OPENED_AT_ONCE = 16

_numbers = itertools.count()


@dataclass(frozen=True)
class _Found:
    """The results of the work behind a reader: partitions that begin, and those that were added."""

    begun: Mapping[Cursor, Position] = field(default_factory=dict)
    added: Sequence[Cursor] = ()


class PulsarReader(Reader):
    """One consumer for each partition, on a connection of their own. What takes time besides reading is done on another
    thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        subscription: Subscription,
        listener: ReaderListener,
        context: Context,
        deadline: Deadline,
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._listener = listener
        self._timeout = context.timeout
        self._lane = f"reader {next(_numbers)}"
        self._inbox = wire.Inbox(READ_BYTES)
        self._begun = Begun(cluster.rest, subscription.group, context)
        self._way = way_of(cluster.client, subscription, self._inbox, self._lane)
        self._guard = threading.Lock()  # acknowledgements come from other threads
        self._cursors: dict[Partition, Cursor] = {}
        self._of: dict[wire.Consumer, Cursor] = {}
        shared = subscription.sharing != "partition"
        self._early: list[wire.Entry] = []  # of partitions that are being opened
        self._context = AckContext(subscription.group or "", shared, self._cursors, self._guard)
        self._work: BackgroundTask[_Found] | None = None
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._together_until = 0.0
        self._turn = 0
        self._closed = False
        topics = self._concrete(deadline)
        try:
            with translated(f"reading {', '.join(subscription.topics)}"):
                self._add(self._open(topics, True, deadline))
                self._together_until = time.monotonic() + _TOGETHER_SECONDS
                for cursor in () if self._way.grouped else list(self._cursors.values()):
                    with self._moving(cursor):
                        first = self._way.begin(cursor, deadline)
                    self._arrive(cursor, first)
        except BaseException:
            self.close(deadline)
            raise

    def _open(self, topics: Mapping[str, Sequence[str]], first: bool, deadline: Deadline) -> list[Cursor]:
        """Consumers of the partitions that there are none of yet."""
        missing = [
            ((topic, number), concrete)
            for topic, names in topics.items()
            for number, concrete in enumerate(names)
            if (topic, number) not in self._cursors
        ]
        begun = {topic: self._begun.partitions(topic, deadline) for topic in {topic for (topic, _), _ in missing}}

        opened: list[Cursor] = []

        def open_one(partition: Partition, concrete: str) -> None:
            if partition[1] < begun[partition[0]]:
                self._begun.check(concrete, deadline)
            consumer = self._way.open(concrete, first, deadline)
            opened.append(Cursor(partition, concrete, consumer, self._way.grouped))

        try:
            if len(missing) < 2:
                for each in missing:
                    open_one(*each)
            else:
                with ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(missing))) as pool:
                    list(pool.map(lambda each: open_one(*each), missing))
            for topic in begun:
                self._begun.record(topic, len(topics[topic]), deadline)
        except BaseException:
            for cursor in opened:  # it is opened once more, and the broker could give the partition to this one
                cursor.consumer.close(deadline.left())
            raise
        return opened

    def _add(self, cursors: Iterable[Cursor]) -> None:
        with self._guard:
            for cursor in cursors:
                self._cursors[cursor.partition] = cursor
                self._of[cursor.consumer] = cursor
        early, self._early = self._early, []
        for entry in early:
            if entry.consumer in self._of:
                self._of[entry.consumer].put(entry)

    # --- reading ----------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        looked = False
        while True:
            self._follow()
            messages = self._hand_out(max_messages)
            if messages:
                return messages
            self._raise_faults()
            if looked and deadline.expired:
                return []
            for cursor in self._cursors.values():
                if cursor.is_here:  # what comes before could not be handed out, and more would be asked for
                    self._way.let_in(cursor, max_messages)
            self._receive(min(deadline.left(), _IDLE_SECONDS))
            looked = True

    def _receive(self, wait: float) -> None:
        for entry in self._inbox.take(wait, _MOST_ENTRIES):
            cursor = self._of.get(entry.consumer) if entry.consumer is not None else None
            if cursor is not None:
                cursor.put(entry)
            else:
                self._early.append(entry)

    def _hand_out(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        room = _ENOUGH_BYTES
        for cursor in self._in_turn():
            while len(messages) < limit and room > 0 and cursor.ready:
                with self._guard:
                    found, size = cursor.take(limit - len(messages))
                messages += found
                room -= size
        return messages

    def _in_turn(self) -> list[Cursor]:
        """All cursors, another one first each time, so that a long partition does not keep the others waiting."""
        cursors = list(self._cursors.values())
        if len(cursors) > 1:
            self._turn = (self._turn + 1) % len(cursors)
            cursors = cursors[self._turn :] + cursors[: self._turn]
        return cursors

    def _raise_faults(self) -> None:
        for cursor in self._cursors.values():
            if cursor.fault is not None and not cursor.paused:
                raise cursor.fault

    # --- partitions come and go ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Tell of partitions that come and go, and have done what that takes."""
        for cursor in list(self._cursors.values()):
            if cursor.is_here and (how := self._way.has_left(cursor)):
                self._leave(cursor, how)
            elif not cursor.is_here and not self._way.is_due(cursor):
                cursor.drop()
                cursor.waits_until = None
        self._take_in_work()
        if self._work is None:
            self._begin_work()

    def _take_in_work(self) -> None:
        if self._work is not None and self._work.done:
            work, self._work = self._work, None
            try:
                work.finish()
            except BrokerUnavailable as error:
                _log.warning("tried again: %s", error)

    def _leave(self, cursor: Cursor, how: str) -> None:
        tell = self._listener.revoking if how == "revoking" else self._listener.lost
        try:
            tell([cursor.partition])
        finally:
            with self._guard:
                cursor.leave()
            if cursor.consumer.active:  # it has come back already, and some of what came with it was just dropped
                with suppress(wire.ConnectionLost):
                    cursor.consumer.redeliver()

    def _begin_work(self) -> None:
        cursors = self._cursors.values()
        lost = [cursor for cursor in cursors if cursor.consumer.lost is not None]
        known = time.monotonic() >= self._together_until or not any(map(self._way.is_undecided, cursors))
        due = [cursor for cursor in cursors if known and not cursor.is_here and self._way.is_due(cursor)]
        look = time.monotonic() >= self._look_at
        if lost or due or look:
            deadline = Deadline(self._timeout)
            self._work = BackgroundTask(lambda: self._do(lost, due, look, deadline), self._take_in, self._inbox.wake)

    def _finish_work(self, deadline: Deadline) -> None:
        """Nothing is done behind a call that moves partitions, and nothing that was begun before it is told later."""
        if self._work is not None and not self._work.join(deadline.left()):
            deadline.check("waiting for a broker")
        with suppress(PositionLost):  # the caller says where to go on
            self._take_in_work()
        if self._way.grouped:
            self._follow()

    def _do(self, lost: Sequence[Cursor], due: Sequence[Cursor], look: bool, deadline: Deadline) -> _Found:
        try:
            with translated(f"reading {', '.join(self._subscription.topics)}"):
                for cursor in lost:
                    self._check_there(cursor, deadline)
                    self._begun.check(cursor.topic, deadline)
                    self._way.check_kept(cursor, deadline)
                    cursor.consumer.reopen(deadline.left())
                    self._together_until = time.monotonic() + _TOGETHER_SECONDS
                begun = {c: self._way.begin(c, deadline) for c in due if not self._waits(c, deadline)}
                if due and not begun:
                    time.sleep(_HELD_SECONDS)
                topics = self._concrete(deadline) if look else {}
                return _Found(begun, self._open(topics, False, deadline))
        finally:
            if self._closed:
                self._cluster.client.hang_up(self._lane)

    def _concrete(self, deadline: Deadline) -> dict[str, tuple[str, ...]]:
        """A group may wait for a topic that nobody has written yet; a reader without a group makes none."""
        create, found = self._subscription.group is not None, self._cluster.topics
        return {topic: found.concrete(topic, deadline, create=create) for topic in self._subscription.topics}

    def _waits(self, cursor: Cursor, deadline: Deadline) -> bool:
        """Whether a partition is to begin later: what others have acknowledged in open transactions comes again if they
        are aborted, and what is behind it must not come before. Those that are not prepared are over in time.
        """
        if not self._way.in_order or not self._begun.is_held(cursor.topic, deadline):
            return False
        if cursor.waits_until is None:
            cursor.waits_until = time.monotonic() + self._timeout + _LATE_SECONDS
        return time.monotonic() < cursor.waits_until

    def _check_there(self, cursor: Cursor, deadline: Deadline) -> None:
        """Raises `NotFound` for a topic that was deleted, which subscribing again would make anew."""
        sure_at = time.monotonic() + _SURE_SECONDS
        while cursor.topic not in self._cluster.topics.look(cursor.partition[0], deadline):
            if time.monotonic() > sure_at:
                topic, number = cursor.partition
                raise NotFound(f"{topic}[{number}] is not there any more")
            time.sleep(_SURE_SECONDS / 10)

    def _take_in(self, found: _Found) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
        self._add(found.added)
        if not self._way.grouped:
            for cursor in found.added:
                self._arrive(cursor, cursor.next)
        for cursor, first in found.begun.items():
            self._arrive(cursor, first)

    def _arrive(self, cursor: Cursor, first: Position) -> None:
        cursor.generation, cursor.activations = cursor.consumer.generation, cursor.consumer.activations
        source = self._listener.assigned(cursor.partition)
        with self._guard:
            cursor.arrive(source, first)
        if cursor.waits_until is not None:  # the messages that have come meanwhile are those behind
            cursor.waits_until = None
            cursor.drop()
            with suppress(wire.ConnectionLost):
                cursor.consumer.redeliver()

    # --- where it stands --------------------------------------------------------------------------------------------

    def positions(self) -> dict[Partition, Position]:
        return {partition: cursor.next for partition, cursor in self._cursors.items() if cursor.is_here}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        wanted = {self._cursor(partition): _checked(position) for partition, position in positions.items()}
        deadline = Deadline(SHORT_CALL)
        if not self._way.grouped:  # in a group, going back behind an abort must not fail because a broker is away
            self._finish_work(deadline)
        for cursor, position in wanted.items():
            with translated(f"seeking in {cursor.partition[0]}"), self._moving(cursor):
                self._way.seek(cursor, position, deadline)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self._finish_work(deadline)
        for partition in self.positions():
            cursor = self._cursor(partition)
            with translated(f"seeking in {partition[0]}"), self._moving(cursor):
                self._way.seek_to_time(cursor, timestamp, deadline)

    @contextmanager
    def _moving(self, cursor: Cursor) -> Iterator[None]:
        """Inside, the cursor's consumer may become another one."""
        with self._guard:
            del self._of[cursor.consumer]
            try:
                yield
            finally:
                self._of[cursor.consumer] = cursor

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            cursor = self._cursors.get(partition)
            if cursor is not None and cursor.is_here:  # else they come again where it is now
                with self._guard:
                    self._way.nack(cursor, given)

    def pause(self, partitions: Sequence[Partition]) -> None:
        for cursor in [self._cursor(partition) for partition in partitions]:
            cursor.paused = True
            self._way.hold(cursor, True)

    def resume(self, partitions: Sequence[Partition]) -> None:
        for cursor in [self._cursor(partition) for partition in partitions]:
            cursor.paused = False
            self._way.hold(cursor, False)

    def _cursor(self, partition: Partition) -> Cursor:
        cursor = self._cursors.get(partition)
        if cursor is None or not cursor.is_here:
            topic, number = partition
            raise InvalidState(
                f"{topic}[{number}] is not with this reader now; `positions()` lists the partitions that are"
            )
        return cursor

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        with translated("asking for the lag"):
            return {p: self._behind(cursor, deadline) for p, cursor in self._cursors.items() if cursor.is_here}

    def _behind(self, cursor: Cursor, deadline: Deadline) -> int:
        """Messages where they are known, and entries where only the broker has them."""
        last, acknowledged = cursor.consumer.progress(deadline.left())
        end = last.ledger, last.entry
        done = (-1, -1) if acknowledged is None or not self._way.grouped else (acknowledged.ledger, acknowledged.entry)
        ours = cursor.waiting + cursor.in_hand
        unacknowledged = self._way.grouped and _entries(done, end) > 0
        return max(int(unacknowledged), ours + _entries(max(cursor.received, done), end))

    def ack_context(self) -> AckContext:
        return self._context

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            for consumer in list(self._of):
                with suppress(wire.PulsarError):
                    consumer.close(deadline.left())
        finally:
            # With it go whatever was not answered, and what is being opened at this moment.
            self._cluster.client.hang_up(self._lane)


def _entries(since: tuple[int, int], end: tuple[int, int]) -> int:
    """How many entries a broker has behind one and up to another; of ledgers in between nobody knows the length."""
    if end[1] < 0 or since >= end:
        return 0
    return end[1] - since[1] if end[0] == since[0] else end[1] + 1


def _checked(position: Position) -> Position:
    match position:
        case (int(ledger), int(entry), int(index)) if min(ledger, entry, index) >= 0:
            return position
    raise InvalidOption(f"{position!r} is not a position of this broker, such as (7, 0, 0)")
