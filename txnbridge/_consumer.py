"""Consumers: they read committed messages, in a group or alone."""

from __future__ import annotations

import logging
import weakref
from _thread import RLock as _RLock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from txnbridge._connection import ConnectionUser
from txnbridge._consumers import Consumers
from txnbridge._deadline import Deadline, check_seconds
from txnbridge._deliveries import MAX_UNACKED, Assignment, Deliveries
from txnbridge._messages import Batch, Message, Position, as_messages
from txnbridge._reopening import ReopeningReader
from txnbridge._topics import Topic, as_topic
from txnbridge.capabilities import Capability
from txnbridge.errors import Conflict, InvalidOption, InvalidState, OutcomeUnknown, Poison, TxnBridgeError, UsageError
from txnbridge.spi import Partition, Subscription

_log = logging.getLogger("txnbridge")

_Kind = TypeVar("_Kind", bound="Consumer")

# Iteration fetches this many messages at once, and hands them out one by one.
_FETCH = 500


class Consumer(ConnectionUser):
    """Reads committed messages only, each partition in order. One thread uses it at a time."""

    def __init__(self, consumers: Consumers, topics: Sequence[Topic], subscription: Subscription) -> None:
        self._consumers = consumers
        self._connection = connection = consumers.connection
        self._subscription = subscription
        # Plain topics need no decoding.
        self._codecs = {topic.name: topic for topic in topics if not topic.plain}
        self._guard = _OneCall()
        self._guard.of = repr(self)
        self._closed = True  # until the reader is open
        self._unproven = False  # whether messages were fetched since the last proof was taken
        ordered = subscription.sharing == "partition"
        individual = bool(connection.capabilities[Capability.INDIVIDUAL_ACK])
        self._deliveries = Deliveries(self, connection, subscription.group, ordered, individual)
        self._reader = ReopeningReader(
            connection.broker.reader, subscription, _ConsumerListener(self), connection.deadline(), connection.timeout
        )
        self._closed = False
        consumers.add(self, self._reader)

    @classmethod
    def open(
        cls: type[_Kind],
        consumers: Consumers,
        topics: str | Topic | Iterable[str | Topic],
        group: str | None,
        start: str | int,
        sharing: str = "partition",
    ) -> _Kind:
        connection = consumers.connection
        if sharing not in ("partition", "message", "key"):
            raise InvalidOption(f"sharing is 'partition', 'message' or 'key', not {sharing!r}")
        if start not in ("earliest", "latest") and not _is_time(start):
            raise InvalidOption(f"start is 'earliest', 'latest' or milliseconds since 1970, not {start!r}")
        if sharing != "partition":
            connection.capabilities.require(Capability.SHARE_MESSAGE if sharing == "message" else Capability.SHARE_KEY)
        if isinstance(start, int):
            connection.capabilities.require(Capability.START_BY_TIME)
        if group is not None and (not isinstance(group, str) or not group.strip()):
            raise InvalidOption("a group's name is non-empty text")
        found = topic_list(topics)
        subscription = Subscription(tuple(topic.name for topic in found), group, start, sharing)
        with connection.call():
            return cls(consumers, found, subscription)

    # --- reading --------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int = 500, timeout: float = 1.0) -> Batch:
        """Return up to `max_messages` as soon as there is one; an empty batch if none came within `timeout` seconds.

        A value that its codec cannot decode raises `Poison`, alone and in its place; the next poll goes on behind it.
        Raise `PositionLost` if retention has passed this group, `OutcomeUnknown` while the outcome of the transaction
        that acknowledged the last messages is not known. A poll that raises hands out nothing, so nothing is skipped.
        """
        with self._guard:
            self._begin("poll")
            self._fetch(max_messages, timeout)
            batch = self._hand_out(max_messages)
        self._deliveries.on_the_way = None
        return batch

    def batches(self, max_messages: int = 500, max_wait: float = 1.0) -> Iterator[Batch]:
        """Yield batches for ever, none of them empty; each waits up to `max_wait` seconds to become full."""
        while True:
            batch = self._fill(max_messages, max_wait)
            if batch:
                self._deliveries.on_the_way = None
                yield batch

    def _fill(self, max_messages: int, max_wait: float) -> Batch:
        deadline = Deadline(max_wait)
        while True:
            with self._guard:
                self._begin("poll")
                self._fetch(max_messages, deadline.left(), full=True)
                if deadline.expired or len(self._deliveries.fetched()) >= max_messages:
                    return self._hand_out(max_messages)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages for ever."""
        while True:
            with self._guard:
                self._begin("poll")
                self._fetch(_FETCH, 1.0)
                batch = list(self._hand_out(1))
            for message in batch:
                self._deliveries.on_the_way = None
                yield message

    def _fetch(self, most: int, timeout: float, full: bool = False) -> None:
        """Fetch until there is a message to hand out; with `full`, try to fetch as many as are wanted."""
        if type(most) is not int or most < 1:
            raise InvalidOption(f"max_messages is a whole number from 1, not {most!r}")
        most = min(most, MAX_UNACKED)
        check_seconds("timeout", timeout)
        self._settle(timeout)
        there = len(self._deliveries.fetched())
        if there < (most if full else 1):
            room = self._deliveries.room_for(most - there)
            with self._connection.events.step("reader.poll", None, group=self._subscription.group) as found:
                messages = self._reader.poll(room, Deadline(timeout))
                self._deliveries.arrived = messages
                if messages:
                    self._unproven = True
                found["messages"] = len(messages)
            self._deliveries.fetch()
        if self._unproven:
            self._prove()

    def _prove(self) -> None:
        """Take the reader's proof of each new assignment, before messages of it are handed out."""
        context: object = None
        for assignment in self._deliveries.assignments.values():
            if assignment.context is None:
                context = context or self._reader.ack_context()
                assignment.context = context
        self._unproven = False

    def _hand_out(self, most: int) -> Batch:
        if not self._codecs:
            return Batch(self._deliveries.hand_out(most))
        decoded: list[Message] = []
        for message in self._deliveries.fetched()[:most]:
            try:
                decoded.append(self._decode_one(message))
            except Poison:
                if decoded:  # the messages in front of it are delivered first; the next poll raises it
                    break
                self._deliveries.hand_out(1)
                self._deliveries.on_the_way = None
                raise
        self._deliveries.hand_out(len(decoded))
        return Batch(decoded)

    def _decode_one(self, message: Message) -> Message:
        topic = self._codecs.get(message.topic)
        return message if topic is None else topic.decode(message)

    # --- positions ------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[Partition]:
        """The partitions that are assigned to this consumer now."""
        return sorted(self._reader.positions())

    def positions(self) -> dict[Partition, Position]:
        """Return the next position to read of each assigned partition."""
        with self._guard:
            self._begin("positions")
            return self._deliveries.next_positions(self._reader.positions())

    def seek(self, positions: Mapping[Partition, Position] | int) -> None:
        """Go on at these positions, or in all partitions at a point in time (milliseconds since 1970).

        Raise `PositionLost` below retention, `InvalidState` while an open transaction holds acknowledgements. If it
        fails, the next poll goes on where this consumer was, with the messages that were delivered and not acknowledged
        (in a group that shares messages, with those alone).
        """
        if not _is_time(positions) and not (isinstance(positions, Mapping) and all(map(_is_partition, positions))):
            raise InvalidOption("seek takes a mapping of (topic, partition) to positions, or milliseconds since 1970")
        with self._guard:
            self._begin("seek")
            self._connection.capabilities.require(Capability.REPLAY)
            if (holder := self._deliveries.holder) is not None:
                raise InvalidState(f"transaction {holder} holds acknowledgements of this consumer; end it first")
            self._ask_for_outcomes(self._connection.timeout)
            if isinstance(positions, int):
                self._connection.capabilities.require(Capability.START_BY_TIME)
            before = self._deliveries.next_positions(self._reader.positions())
            moving = before.keys() if isinstance(positions, int) else positions.keys()
            try:
                with self._connection.events.step("reader.seek"):
                    if isinstance(positions, int):
                        self._reader.seek_to_time(positions, self._connection.deadline())
                    else:
                        self._reader.seek(positions)
            except UsageError:
                raise
            except BaseException:
                self._deliveries.stay({partition: at for partition, at in before.items() if partition in moving})
                raise
            self._deliveries.moved(moving)

    def pause(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver nothing from these partitions (all by default) until `resume`; the assignment stays."""
        with self._guard:
            self._begin("pause")
            chosen = self.assignment if partitions is None else partitions
            self._reader.pause(chosen)
            self._deliveries.pause(chosen)

    def resume(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver from these partitions (all by default) again."""
        with self._guard:
            self._begin("resume")
            chosen = self.assignment if partitions is None else partitions
            self._reader.resume(chosen)
            self._deliveries.resume(chosen)

    def lag(self) -> dict[Partition, int]:
        """Return the number of readable messages (or positions) in front of each assigned partition's end."""
        with self._guard:
            self._begin("lag")
            return self._reader.lag(self._connection.deadline())

    def nack(self, messages: Message | Iterable[Message]) -> None:
        """Give delivered messages back, to be delivered again to this or another member, also if this call fails."""
        with self._guard:
            self._begin("nack")
            self._connection.capabilities.require(Capability.REDELIVERY)
            chosen = as_messages("nack", messages)
            back = self._deliveries.give_back(chosen)
            self._reader.nack({assignment.partition: positions for assignment, positions in back.items()})
            self._deliveries.gone_back(back)

    def close(self, timeout: float | None = None) -> None:
        """Leave the group: other members take over at once, and get what was not acknowledged.

        It ends within `timeout` seconds, by default the bridge's.
        """
        if self._closed or self._connection.forked:
            return
        with self._guard:
            self._begin("close")
            self._close(self._connection.deadline() if timeout is None else Deadline(timeout))

    def _close(self, deadline: Deadline) -> None:
        self._leave(list(self._deliveries.assignments), "reader.revoke")
        try:
            self._consumers.close_reader(self._reader, deadline)
        except TxnBridgeError:
            self._closed = True
            raise
        self._closed = True

    def close_behind_bridge(self) -> None:
        """Wait, in a thread, for a call that outlasts the closing of the bridge, and close then."""
        try:
            self._guard.acquire()
            try:
                if not self._closed:
                    self._close(self._connection.deadline())
            finally:
                self._guard.release()
        except Exception as error:
            _log.debug("closing %r behind its bridge: %s", self, error)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._connection.forked:
            # A thread closes the reader: garbage is collected at any time, also while locks are held.
            self._consumers.drop(self._reader)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {', '.join(self._subscription.topics)} in group {self._subscription.group!r}>"

    # --- assignments ----------------------------------------------------------------------------------------------

    def _assigned(self, partition: Partition) -> Assignment | None:
        self._connection.events.emit("reader.assign", "after", None, topic=partition[0], partition=partition[1])
        return self._deliveries.assigned(partition)

    def _leave(self, partitions: Sequence[Partition], event: str) -> None:
        for partition in partitions:
            self._connection.events.emit(event, "before", None, topic=partition[0], partition=partition[1])
        holder, held = self._deliveries.left(partitions)
        if holder is not None and held:
            # A running commit is waited for; a transaction that has not begun to commit can only abort now.
            names = ", ".join(f"{topic}[{number}]" for topic, number in sorted(held))
            error = Conflict(f"{names} left this consumer while transaction {holder.id} held acknowledgements of it")
            holder._fail_from_outside(error, patience=holder.deadline)
        for partition in partitions:
            self._connection.events.emit(event, "after", None, topic=partition[0], partition=partition[1])

    # --- before reading on ----------------------------------------------------------------------------------------

    def _settle(self, timeout: float) -> None:
        """Find outcomes that are not known yet, and move the reader back to messages that have to come again."""
        deliveries = self._deliveries
        if deliveries.is_abandoned:
            self._consumers.writers.clear_abandoned(Deadline(timeout))
            deliveries.give_up()
        if deliveries.doubts:
            self._ask_for_outcomes(timeout)
        if not (back := deliveries.going_back()):
            return
        by_partition = {assignment.partition: positions for assignment, positions in back.items()}
        if self._subscription.sharing == "partition":
            self._reader.rewind({partition: positions[0] for partition, positions in by_partition.items()})
        else:
            self._reader.nack(by_partition)
        deliveries.gone_back(back)

    def _ask_for_outcomes(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        for transaction, token in list(self._deliveries.doubts.items()):
            outcome = self._consumers.outcomes.resolve(token, deadline)
            if outcome is None:
                raise OutcomeUnknown(
                    f"the outcome of transaction {transaction}, which acknowledged the last messages, is not known yet;"
                    " poll again later",
                    token=str(token),
                )
            self._deliveries.found(transaction, outcome)

    def _begin(self, call: str) -> None:
        """Begin a call that has `_guard`: check that the consumer may be used, and recover from an interrupted call."""
        self._connection.check_process()
        if self._closed:
            raise InvalidState(f"{call} on {self!r}, which is closed")
        if call == "close":
            return
        self._connection.check_open()
        self._deliveries.recover()
        if call != "seek":  # a seek gives a position to a reader that cannot go on where it was
            self._reader.mend()


class RawConsumer(Consumer):
    """A processor's consumer: it hands out messages undecoded, so that the processor can set poison aside."""

    def take(self, max_messages: int, timeout: float) -> list[Message]:
        """Return messages as `poll` does, undecoded."""
        with self._guard:
            self._begin("poll")
            self._fetch(max_messages, timeout)
            messages = self._deliveries.hand_out(max_messages)
        self._deliveries.on_the_way = None
        return messages

    @property
    def decodes(self) -> bool:
        """True if any topic has a codec."""
        return bool(self._codecs)

    def decode(self, message: Message) -> Message:
        """Decode a message. Raise `Poison`."""
        return self._decode_one(message)

    def take_back(self) -> None:
        """Have all messages delivered again that were handed out and not acknowledged."""
        self._deliveries.take_back()

    def group_lag(self, timeout: float) -> int | None:
        """Return the lag of all members together; None if the broker does not tell."""
        return self._reader.group_lag(Deadline(timeout))


class _OneCall(_RLock):  # type: ignore[misc]  # it is not final, whatever its stub says
    """A lock that one call on a consumer holds at a time; it refuses another call, also on the same thread.

    Calls take it by `with`, so it is released in any case: an exception from a signal handler can come into the first
    line of every function that is written in Python, and `__exit__` is not written in Python.
    """

    of = ""

    _is_owned: Callable[[], bool]  # returns whether this thread has it

    def __enter__(self) -> bool:  # type: ignore[override]
        held = self._is_owned()
        try:
            if held or not self.acquire(blocking=False):
                raise InvalidState(f"a call on {self.of} while another call on it runs: one thread at a time")
        except BaseException:
            if not held and self._is_owned():
                self.release()
            raise
        return True


class _ConsumerListener:
    """Passes a reader's assignments to its consumer, without keeping the consumer alive."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = weakref.ref(consumer)

    def assigned(self, partition: Partition) -> object:
        consumer = self._consumer()
        return None if consumer is None else consumer._assigned(partition)

    def revoking(self, partitions: Sequence[Partition]) -> None:
        self._leave(partitions, "reader.revoke")

    def lost(self, partitions: Sequence[Partition]) -> None:
        self._leave(partitions, "reader.lost")

    def _leave(self, partitions: Sequence[Partition], event: str) -> None:
        if (consumer := self._consumer()) is not None:
            consumer._leave(partitions, event)


def _is_time(given: object) -> bool:
    """Return whether this is a point in time: milliseconds since 1970, in 63 bits, as brokers store it."""
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 63


def _is_partition(given: object) -> bool:
    match given:
        case (str(), int()):
            return True
    return False


def topic_list(topics: str | Topic | Iterable[str | Topic]) -> list[Topic]:
    """Return one topic or many as a list. Raise `InvalidOption` for none, and for a topic that is there twice."""
    if not isinstance(topics, str | Topic | Iterable):
        raise InvalidOption(f"topics are a topic's name, a Topic, or several of them, not {type(topics).__name__}")
    found = [as_topic(t) for t in ((topics,) if isinstance(topics, str | Topic) else topics)]
    names = [topic.name for topic in found]
    if not names or len(set(names)) != len(names):
        raise InvalidOption("give at least one topic, and each of them once")
    return found
