"""Reading committed messages, in a group or alone."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txnbridge.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    InvalidState,
    NotSupported,
    PositionLost,
    TxnBridgeError,
)
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
from txnbridge_kafka.client.librdkafka import Consumer, settle
from txnbridge_kafka.client.messages import metadata_of
from txnbridge_kafka.client.offsets import is_another
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.errors import is_passing, translate
from txnbridge_kafka.outcome.hanging_transactions import mend_group
from txnbridge_kafka.read.partition import Cursor, State, Wish, has_errors, split
from txnbridge_kafka.read.start_positions import Found, GroupStarts, Lost, Starts, out_of_range
from txnbridge_kafka.settings import Settings
from txnbridge_kafka.write.acks import AckContext

_log = logging.getLogger("txnbridge.kafka.client")
_for_people = logging.getLogger("txnbridge.kafka")  # what a group does, and why nothing comes
_NAMED = 8  # so many partitions are named in a line of it

# A call without a deadline of its own (seek) asks the broker something; it waits this long for the answer.
SHORT_CALL = 10.0
# The client wakes nobody when something was looked up, nor for a signal: a poll asks this often, more often while
# something is being looked up, which takes some milliseconds.
_IDLE_SECONDS, _BUSY_SECONDS = 0.25, 0.005
# How often a reader looks for partitions that were added to its topics; in a group its leader or the broker does.
_LOOK_SECONDS = 3.0
# How often a reader asks whether its topics are still the same, and how long it waits for the answer: a topic is not
# deleted, made anew and filled beyond where a reader stands within this time.
_CHECK_SECONDS, _CHECK_PATIENCE = 0.1, 1.0
# The client's messages are made ours in pieces of so many: many more at once take longer a message, because they leave
# the processor's cache.
_PIECE = 1000
# One poll goes on with what the client has at hand until it has so many bytes of values, a quarter of the client's own
# buffer: nobody asks for 10,000 messages in order to hold as many megabytes.
_ENOUGH_BYTES = 16 * 2**20

_DENIED_OR_GONE = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_OUT_OF_RANGE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


@dataclass(frozen=True)
class Committing:
    """Where a group begins to read partitions, until the broker says that it is committed."""

    wishes: Mapping[Cursor, Wish]
    begun: Found


class KafkaReader(Reader):
    """One consumer of confluent-kafka. One thread at a time; what takes time besides reading is done on another."""

    def __init__(
        self,
        settings: Settings,
        subscription: Subscription,
        listener: ReaderListener,
        context: Context,
        cluster: Cluster,
        deadline: Deadline,
    ) -> None:
        self._settings = settings
        self._subscription = subscription
        self._listener = listener
        self._cursors: dict[Partition, Cursor] = {}
        self._paused: set[Partition] = set()
        self._kept: deque[BaseException] = deque()  # raised in a callback or found among messages, for the next poll
        self._broken: TxnBridgeError | None = None  # why the client will never read again
        self._work: BackgroundTask[Any] | None = None
        self._committing: Committing | None = None
        self._closed = False
        self._look_at = self._check_at = 0.0
        self._left = 0  # how many times partitions have left
        self._ahead: list[Any] = []  # what `lag` came across
        self._context = AckContext(subscription.group or "")
        # A group may wait for a topic that nobody has written yet; a reader without a group makes none.
        create = subscription.group is not None
        self._counts = {
            topic: cluster.topics.partitions(topic, deadline, create=create) for topic in subscription.topics
        }
        self._eager = settings.group_protocol == "classic" and settings.assignment != "cooperative-sticky"
        self._offsets = cluster.offsets
        self._places = cluster.places
        self._starts = Starts(self._offsets, subscription)
        self._group_starts: GroupStarts | None = None
        self._client = _connect(settings, subscription, self._on_commit)
        try:
            if subscription.group is None:
                self._begin_alone(deadline)
            else:
                self._join(context, cluster, deadline)
        except BaseException:
            with suppress(DeadlineExceeded):
                self.close(deadline)
            raise

    def _begin_alone(self, deadline: Deadline) -> None:
        for topic in self._counts:
            # A client that is connected does not look for an assigned topic that it does not know for up to a second.
            settle(self._client, topic, deadline)
        partitions = [(topic, number) for topic, count in self._counts.items() for number in range(count)]
        cursors = {partition: self._add(partition) for partition in partitions}
        if isinstance(self._subscription.start, int):
            self._go_to(cursors, self._subscription.start, deadline)
        else:
            topic_ids = self._offsets.topic_ids(self._counts, deadline)
            first = Found(self._starts.first(partitions, deadline), topic_ids=topic_ids)
            self._settle({cursor: cursor.wish for cursor in cursors.values()}, first)

    def _join(self, context: Context, cluster: Cluster, deadline: Deadline) -> None:
        mend = partial(mend_group, cluster, self._context.group)
        self._group_starts = GroupStarts(self._offsets, self._subscription, context, self._counts, mend, deadline)
        self._starts = self._group_starts
        self._client.subscribe(
            list(self._subscription.topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        self._say("joining; what a member that died had comes here once the broker takes it for dead")

    # --- reading ----------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        while True:
            self._raise_kept()
            self._follow()
            lost = [c for c in self._cursors.values() if c.state is State.LOST and c.partition not in self._paused]
            wait = 0.0 if lost else min(deadline.left(), _IDLE_SECONDS if self._work is None else _BUSY_SECONDS)
            batch, self._ahead = self._ahead, []
            room = min(max_messages, _PIECE) - len(batch)
            if room > 0:
                batch += self._read(room, 0.0 if batch else wait)
            messages = self._hand_out(batch)
            if messages and len(batch) == _PIECE < max_messages:
                messages = self._add_what_is_there(messages, max_messages, sum(map(len, batch)))
            if messages:
                messages = self._without_lost(messages, deadline)
            if messages:
                self._renew_context()
                return messages
            if lost:
                raise PositionLost(lost[0].why_lost)
            if deadline.expired:
                self._raise_kept()
                return []

    def _add_what_is_there(self, messages: list[Message], max_messages: int, size: int) -> list[Message]:
        """The same messages and what the client has at hand behind them."""
        left = self._left
        while len(messages) < max_messages and size < _ENOUGH_BYTES and not self._kept:
            batch = self._read(min(_PIECE, max_messages - len(messages)), 0)
            if not batch:
                break
            size += sum(map(len, batch))
            messages += self._hand_out(batch)
        if self._left == left:
            return messages
        # A partition left meanwhile: what was read of it comes again where it is now.
        here = {(*partition, cursor.source) for partition, cursor in self._cursors.items()}
        return [message for message in messages if (message.topic, message.partition, message.source) in here]

    def _without_lost(self, messages: list[Message], deadline: Deadline) -> list[Message]:
        """Return the messages but for those of topics that were made anew since their partitions were placed.

        Acknowledging asks for certain; here it is asked often enough that a reader without a group learns of it, too.
        """
        if time.monotonic() < self._check_at:
            return messages
        topics = {message.topic for message in messages}
        try:
            topic_ids = self._offsets.topic_ids(topics, Deadline(max(deadline.left(), _CHECK_PATIENCE)))
        except BrokerUnavailable as error:
            _log.debug("whether %s is still the same topic is asked again: %s", ", ".join(sorted(topics)), error)
            return messages
        self._check_at = time.monotonic() + _CHECK_SECONDS
        here = [self._cursors[partition] for partition in {(m.topic, m.partition) for m in messages}]
        strange = {c.partition: c for c in here if is_another(topic_ids.get(c.partition[0]), c.topic_id)}
        if not strange:
            return messages
        for partition, cursor in strange.items():
            (at,) = next(m.position for m in messages if (m.topic, m.partition) == partition)
            lost = self._starts.made_anew(partition, at)
            cursor.lose(lost.why, lost.at)
        return [message for message in messages if (message.topic, message.partition) not in strange]

    def _raise_kept(self) -> None:
        if self._kept:
            raise self._kept.popleft()
        if self._broken is not None:
            raise self._broken

    def _read(self, limit: int, wait: float) -> list[Any]:
        """What the client has, else what comes first within that time."""
        batch: list[Any] = []
        try:
            batch = self._client.consume(limit, 0)
            if not batch and wait > 0 and (first := self._client.poll(wait)) is not None:
                batch = [first]
                if limit > 1:
                    batch += self._client.consume(limit - 1, 0)
        except KafkaException as error:
            # What was taken before is handed out: it would be skipped otherwise.
            self._keep(translate(error, "reading"), error)
        return batch

    def _hand_out(self, batch: list[Any]) -> list[Message]:
        if has_errors(batch):
            for message in batch:
                if (error := message.error()) is not None:
                    self._note(error, message)
            batch = [message for message in batch if message.error() is None]
        messages: list[Message] = []
        for partition, run in split(batch, self._subscription.topics) if batch else ():
            cursor = self._cursors.get(partition)
            if cursor is None:
                continue  # it has left meanwhile
            if cursor.state is not State.READING or partition in self._paused:
                cursor.reached = None
                continue
            try:
                messages += cursor.hand_out(run)
            except UnicodeDecodeError as error:
                # The client cannot tell such a name. It stays where it is: to go on behind it takes a seek.
                cursor.seek(Wish(target=cursor.next, topic_id=cursor.topic_id))
                text = f"a header behind {cursor.next} of {partition[0]}[{partition[1]}] has a name that is not UTF-8"
                self._keep(NotSupported(text), error)
        return messages

    def _note(self, error: KafkaError, message: Any) -> None:
        """An error that came instead of a message."""
        partition = message.topic(), message.partition()
        cursor = self._cursors.get(partition)
        if error.code() == KafkaError._PARTITION_EOF:
            if cursor is not None and cursor.state is State.READING and cursor.reached is not None:
                cursor.reached = message.offset()
        elif error.code() in _OUT_OF_RANGE:
            # It may be older than a seek.
            if cursor is not None and cursor.state is State.READING and message.offset() >= (cursor.next or 0):
                cursor.seek(Wish(refused=cursor.next, topic_id=cursor.topic_id))
        elif error.code() == KafkaError._FATAL:
            self._broken = translate(error, f"reading in group {self._context.group!r}")
            self._broken.__cause__ = KafkaException(error)
        elif error.code() in _DENIED_OR_GONE:
            cause = KafkaException(error)
            self._keep(translate(cause, f"reading {partition[0]}"), cause)
        else:
            _log.debug("waited out: %s", error)

    def _keep(self, error: BaseException, cause: BaseException) -> None:
        error.__cause__ = cause
        self._kept.append(error)

    def _renew_context(self) -> None:
        if self._subscription.group is not None:
            metadata = self._client.consumer_group_metadata()
            # A member that was thrown out has no name.
            if metadata != self._context.metadata and self._client.memberid():
                self._context.metadata = metadata

    # --- what is looked up meanwhile ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take in what was looked up, and look up what is wanted next."""
        if self._work is not None:
            if not self._work.done:
                return
            work, self._work = self._work, None
            try:
                work.finish()
            except BrokerUnavailable as error:
                if not isinstance(error, DeadlineExceeded) and not is_passing(error.__cause__):
                    raise
                _log.warning("no answer yet: %s", error)
        if self._work is None and self._committing is None:
            self._look_up(Deadline(self._settings.timeout))

    def _look_up(self, deadline: Deadline) -> None:
        wishes = {c: c.wish for c in self._cursors.values() if c.state in (State.COMING, State.SEEKING)}
        starts, unchecked = self._starts, self._group_starts and self._group_starts.unchecked
        if wishes:
            asked = {cursor.partition: wish for cursor, wish in wishes.items()}
            self._work = BackgroundTask(
                lambda: starts.settle(asked, deadline), lambda found: self._begin(wishes, found)
            )
        elif unchecked and self._cursors:
            self._record(sorted(unchecked), lambda: None)
        elif self._group_starts is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            topics = self._subscription.topics
            self._work = BackgroundTask(lambda: self._offsets.counts(topics, deadline), self._grow)

    def _begin(self, wishes: Mapping[Cursor, Wish], found: Found) -> None:
        """Where a group begins to read partitions is committed and recorded before they are read."""
        owed = set() if self._group_starts is None else self._group_starts.owed
        ready = {p: start for p, start in found.known.items() if p[0] not in owed}
        self._settle(wishes, Found(ready, topic_ids=found.topic_ids))
        begun = {c.partition: at for c in self._current(wishes) if (at := found.begun.get(c.partition)) is not None}
        if begun:
            self._say("%s: begins to read, at %s", named(begun), ", ".join(map(str, begun.values())))
            offsets = [
                TopicPartition(*partition, at, metadata_of(found.topic_ids.get(partition[0])))
                for partition, at in begun.items()
            ]
            self._tell(lambda: self._client.commit(offsets=offsets, asynchronous=True))
            self._committing = Committing(wishes, Found(begun, topic_ids=found.topic_ids))
        elif owed:
            self._record(sorted(owed), lambda: self._settle(wishes, found))

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """The client calls this inside `poll`."""
        committing, self._committing = self._committing, None
        try:
            failed = [each for each in (error, *(p.error for p in partitions)) if each is not None]
            if committing is None or self._closed:
                return
            if not failed:
                self._begun(committing)
            elif not is_passing(KafkaException(failed[0])):
                cause = KafkaException(failed[0])
                self._keep(translate(cause, f"committing where group {self._context.group!r} begins"), cause)
        except BaseException as error:
            self._kept.append(error)

    def _begun(self, committed: Committing) -> None:
        assert self._group_starts is not None
        self._group_starts.owed.update(topic for topic, _ in committed.begun.known)
        self._record(sorted(self._group_starts.owed), lambda: self._settle(committed.wishes, committed.begun))

    def _record(self, topics: Sequence[str], then: Callable[[], object]) -> None:
        starts, deadline = self._group_starts, Deadline(self._settings.timeout)
        assert starts is not None
        self._work = BackgroundTask(lambda: starts.record(topics, deadline), lambda _: then())

    def _grow(self, counts: Mapping[str, int]) -> None:
        for topic, count in counts.items():
            for number in range(count):
                if (topic, number) not in self._cursors:
                    self._add((topic, number))

    def _add(self, partition: Partition) -> Cursor:
        self._places.add(partition)
        cursor = self._cursors[partition] = Cursor(partition)
        return cursor

    def _current(self, wishes: Mapping[Cursor, Wish]) -> list[Cursor]:
        """Those that have neither left nor been moved since they wished."""
        return [c for c, wish in wishes.items() if self._cursors.get(c.partition) is c and c.wish is wish]

    def _settle(self, wishes: Mapping[Cursor, Wish], found: Found) -> None:
        """Go on where it was found that partitions go on."""
        ready: list[Cursor] = []
        for cursor in self._current(wishes):
            if (start := found.known.get(cursor.partition)) is None:
                continue
            if not cursor.told:
                at = start.at if isinstance(start, Lost) else start
                self._say("%s: is here, from %d on", named([cursor.partition]), at)
                cursor.come(self._listener.assigned(cursor.partition))
            if isinstance(start, Lost):
                cursor.lose(start.why, start.at)
            else:
                cursor.next = start
                self._read_in(cursor, found.topic_ids.get(cursor.partition[0], cursor.wish.topic_id))
                if start != cursor.wish.target:
                    cursor.since = None  # the group has got further
                ready.append(cursor)
        self._tell(lambda: self._place(ready))

    def _read_in(self, cursor: Cursor, topic_id: str | None) -> None:
        """Remember which topic a partition is read in: one that is made anew under its name is another."""
        cursor.topic_id = topic_id
        if topic_id is None:
            self._context.topic_ids.pop(cursor.partition, None)
        else:
            self._context.topic_ids[cursor.partition] = topic_id

    # --- what the client reads ----------------------------------------------------------------------------------------

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            call()
        except KafkaException as error:
            raise translate(error, "telling the client what to read") from error

    def _place(self, cursors: Sequence[Cursor]) -> None:
        """Let the client read partitions from where they go on."""
        fresh = [cursor for cursor in cursors if not self._move(cursor)]
        touched = {*cursors}
        if fresh and self._eager:
            # The client knows all or nothing then, and begins anew with each.
            touched.update(cursor for cursor in self._cursors.values() if cursor.placed)
            self._client.assign([cursor.at_next() for cursor in touched])
        elif fresh:
            self._client.incremental_assign([cursor.at_next() for cursor in fresh])
        for cursor in touched:
            cursor.placed = True
            cursor.reached = 0
        for cursor in cursors:
            cursor.read()
        self._pause([cursor for cursor in touched if cursor.partition in self._paused])
        self._forget_ahead(touched)

    def _move(self, cursor: Cursor) -> bool:
        """Seek, if the client reads the partition; False if it does not, or has given it up after an error."""
        if not cursor.placed:
            return False
        try:
            self._client.seek(cursor.at_next())
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            self._displace([cursor])
            return False
        return True

    def _displace(self, cursors: Iterable[Cursor]) -> None:
        """Let the client read partitions no longer."""
        placed = [cursor for cursor in cursors if cursor.placed]
        for cursor in placed:
            cursor.placed = False
        self._forget_ahead(placed)
        if not self._eager:
            self._client.incremental_unassign([cursor.at_next() for cursor in placed])

    def _forget_ahead(self, cursors: Iterable[Cursor]) -> None:
        gone = {cursor.partition for cursor in cursors}
        self._ahead = [each for each in self._ahead if (each.topic(), each.partition()) not in gone]

    def _pause(self, cursors: Iterable[Cursor]) -> None:
        if names := [cursor.at_next() for cursor in cursors if cursor.placed]:
            self._client.pause(names)

    # --- partitions come and go -------------------------------------------------------------------------------------
    # The client calls these inside `poll`, or inside its own `close`. An exception would come out of it as SystemError.

    def _on_assign(self, client: Any, partitions: list[TopicPartition]) -> None:
        try:
            if not self._closed:
                for each in partitions:
                    self._add((each.topic, each.partition))
                self._say("given %s", named([(each.topic, each.partition) for each in partitions]) or "nothing")
            # None of them is read before it is settled where it goes on.
            (client.assign if self._eager else client.incremental_assign)([])
        except BaseException as error:
            self._kept.append(error)

    def _on_revoke(self, client: object, partitions: list[TopicPartition]) -> None:
        self._say("gives up %s: it is shared out anew", named([(each.topic, each.partition) for each in partitions]))
        self._leave(partitions, before=self._revoking)

    def _on_lost(self, client: object, partitions: list[TopicPartition]) -> None:
        gone = named([(each.topic, each.partition) for each in partitions])
        self._say("%s left: the broker took this member for dead, or could not be reached in time", gone)
        self._leave(partitions, after=self._listener.lost)

    def _leave(
        self,
        partitions: list[TopicPartition],
        before: Callable[[Sequence[Partition]], None] | None = None,
        after: Callable[[Sequence[Partition]], None] | None = None,
    ) -> None:
        self._left += 1
        try:
            names = [(each.topic, each.partition) for each in partitions]
            told = [name for name in names if name in self._cursors and self._cursors[name].told]
            if told and before and not self._closed:
                self._guarded(before, told)
            self._displace([self._cursors.pop(name) for name in names if name in self._cursors])
            if self._eager:
                self._client.unassign()
            if told and after and not self._closed:
                after(told)
        except BaseException as error:
            self._kept.append(error)

    def _revoking(self, partitions: Sequence[Partition]) -> None:
        # The group is being shared out anew: for what is acknowledged now another proof holds already.
        self._renew_context()
        self._listener.revoking(partitions)

    def _guarded(self, function: Callable[[Sequence[Partition]], None], partitions: Sequence[Partition]) -> None:
        try:
            function(partitions)
        except BaseException as error:
            self._kept.append(error)

    # --- where it stands --------------------------------------------------------------------------------------------

    def positions(self) -> dict[Partition, Position]:
        return {partition: (cursor.next,) for partition, cursor in self._cursors.items() if cursor.next is not None}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        offsets = {self._cursor(partition): _offset(position) for partition, position in positions.items()}
        # Behind an abort everything is where it has just been read: nothing has to be asked that could fail.
        elsewhere = {c.partition: offset for c, offset in offsets.items() if not c.was_handed_out(offset)}
        for partition, begin in self._offsets.begins(elsewhere, Deadline(SHORT_CALL)).items():
            if elsewhere[partition] < begin:
                what = "the position to seek"
                raise PositionLost(out_of_range(what, partition, elsewhere[partition], begin, begin))
        self._go_on({cursor: Wish(target=offset) for cursor, offset in offsets.items()})

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        offsets = {self._cursor(partition): _offset(position) for partition, position in positions.items()}
        self._go_on({c: Wish(target=offset, topic_id=c.topic_id) for c, offset in offsets.items()})

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        cursors = {partition: cursor for partition, cursor in self._cursors.items() if cursor.next is not None}
        self._go_to(cursors, timestamp, deadline)

    def _go_to(self, cursors: Mapping[Partition, Cursor], timestamp: int, deadline: Deadline) -> None:
        topic_ids = self._offsets.topic_ids({topic for topic, _ in cursors}, deadline)
        since = self._offsets.since(cursors, timestamp, deadline)
        ats = {cursor: since[partition] for partition, cursor in cursors.items()}
        self._go_on(
            {
                c: Wish(target=first, since=(timestamp, end), topic_id=topic_ids.get(c.partition[0]))
                for c, (first, end) in ats.items()
            }
        )

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        back = {partition: min(_offset(each) for each in given) for partition, given in positions.items() if given}
        # If it has left, they come again where it is now.
        here = {cursor: at for partition, at in back.items() if (cursor := self._cursors.get(partition)) is not None}
        self._go_on(
            {c: Wish(target=at if c.next is None else min(at, c.next), topic_id=c.topic_id) for c, at in here.items()}
        )

    def _go_on(self, wishes: Mapping[Cursor, Wish]) -> None:
        for cursor, wish in wishes.items():
            cursor.next = wish.target
            cursor.seek(wish)
        if self._group_starts is None and all(wish.topic_id == c.topic_id for c, wish in wishes.items()):
            self._settle(wishes, Found({c.partition: c.next for c in wishes if c.next is not None}))
        # Else the next poll first asks which topics are there now, and in a group what is acknowledged: that is not
        # read again.

    def pause(self, partitions: Sequence[Partition]) -> None:
        cursors = [self._cursor(partition) for partition in partitions]
        self._paused.update(partitions)
        self._tell(lambda: self._pause(cursors))

    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            if partition not in self._paused:
                self._cursor(partition)  # raises for one that is not here
                continue
            self._paused.discard(partition)
            if (cursor := self._cursors.get(partition)) is not None:
                self._tell(partial(self._flow_again, cursor))

    def _flow_again(self, cursor: Cursor) -> None:
        if cursor.placed:
            self._client.resume([cursor.at_next()])
        if cursor.state is State.READING:
            # From where it stands here, whatever the client took for handed out before it heard of the pause.
            self._place([cursor])

    def _cursor(self, partition: Partition) -> Cursor:
        cursor = self._cursors.get(partition)
        if cursor is None or not cursor.told:
            topic, number = partition
            raise InvalidState(
                f"{topic}[{number}] is not with this reader now; `positions()` lists the partitions that are"
            )
        return cursor

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        # Without a look at what comes next nobody could tell a marker from a message.
        self._ahead = self._ahead or self._read(1, 0)
        group, ends = self._subscription.group, self._offsets.ends(self._cursors, deadline)
        if group is None:
            return {p: self._behind(cursor, cursor.next or 0, ends[p]) for p, cursor in self._cursors.items()}
        acknowledged = self._offsets.committed(group, self._cursors, deadline)
        begins = self._offsets.begins([p for p in self._cursors if acknowledged.get(p) is None], deadline)
        stands = {p: begins[p] if p in begins else acknowledged[p] or 0 for p in self._cursors}
        return {p: self._behind(cursor, stands[p], ends[p]) for p, cursor in self._cursors.items()}

    def _behind(self, cursor: Cursor, stands: int, end: int) -> int:
        reading = cursor.state is State.READING
        if reading and cursor.reached is not None and stands >= (cursor.next or 0):
            # Nothing is outstanding, so it stands where the client is: that passes over markers and what was aborted.
            ahead = [each.offset() for each in self._ahead if (each.topic(), each.partition()) == cursor.partition]
            client = ahead[0] if ahead else self._client.position([cursor.at_next()])[0].offset
            stands = max(stands, cursor.reached, client)
        return max(0, end - stands)

    def ack_context(self) -> AckContext:
        if self._context.metadata is None:
            self._renew_context()
        return self._context

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        self._closed = True
        closing = BackgroundTask(self._client.close, lambda _: None)
        if not closing.join(deadline.left()):
            raise DeadlineExceeded(f"no broker answered within {deadline.seconds:g} s while the reader was closed")
        closing.finish()
        self._say("left")

    def _say(self, text: str, *args: object) -> None:
        if self._subscription.group is not None:
            _for_people.info("group %r: " + text, self._subscription.group, *args)


def named(partitions: Iterable[Partition]) -> str:
    """Partitions as text for people, not all of very many."""
    names = [f"{topic}[{number}]" for topic, number in partitions]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _connect(settings: Settings, subscription: Subscription, on_commit: Callable[..., None]) -> Consumer:
    """The client. Raises `InvalidOption` for settings that it does not take."""
    kind = {"group.protocol": settings.group_protocol}
    if settings.group_protocol == "classic":
        kind["partition.assignment.strategy"] = settings.assignment
    try:
        return Consumer(
            {
                # The client's five minutes are long for who waits for a partition that was added.
                "topic.metadata.refresh.interval.ms": int(_LOOK_SECONDS * 1000),
                # After a seek the client waits for the answer to the fetch that is under way, and a broker without
                # messages holds that back as long as this: half a second by the client's own default.
                "fetch.wait.max.ms": 100,
                # Its second of rest after a full queue is longer than reading the queue takes.
                "fetch.queue.backoff.ms": 10,
                **settings.client,
                **settings.consumer,
                **kind,
                "isolation.level": "read_committed",
                # A reader without a group commits nothing; the client wants a name all the same.
                "group.id": subscription.group or f"txnbridge-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                # A reader without a group mostly reads up to an end, and behind it may be no message for long.
                "enable.partition.eof": subscription.group is None,
                "on_commit": on_commit,
                "allow.auto.create.topics": False,
                "log_level": settings.log_level,
                "logger": _log,
                "error_cb": _noted,
            }
        )
    except KafkaException as error:
        raise translate(error, "opening a consumer") from error


def _noted(error: KafkaError) -> None:
    """What the client tells besides messages: connections that dropped, which it makes anew by itself."""
    _log.debug("waited out: %s", error)


def _offset(position: Position) -> int:
    match position:
        case (int(offset),) if offset >= 0:
            return offset
    raise InvalidOption(f"{position!r} is not a position of this broker, such as (0,)")
