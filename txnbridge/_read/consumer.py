"""`Consumer`, which reads committed messages in a group or without one, and `RawConsumer` for processors."""

from __future__ import annotations

import logging
import weakref
from _thread import RLock as _RLock
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from threading import TIMEOUT_MAX
from typing import Concatenate, ParamSpec, TypeVar

from txnbridge._base.connection import ConnectionUser, never_ran
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import Batch, Message, MessageColumns, Position, as_messages, columns_of, milliseconds
from txnbridge._base.topic import Topic, as_topic
from txnbridge._read.deliveries import Assignment, Deliveries
from txnbridge._read.open_consumers import Consumers
from txnbridge.capabilities import Capability
from txnbridge.errors import Conflict, InvalidOption, InvalidState, OutcomeUnknown, Poison, TxnBridgeError, UsageError
from txnbridge.spi import Partition, Subscription

_log = logging.getLogger("txnbridge")

_Kind = TypeVar("_Kind", bound="Consumer")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# `for message in consumer` fetches this many messages at once, and yields them one by one.
_FETCH = 500
# How long an interrupted call takes for closing its consumer. A broker that can be reached needs less, and one that
# cannot must not keep a program from ending.
_INTERRUPTED_SECONDS = 5.0


def one_call(
    call: str,
) -> Callable[[Callable[Concatenate[_Kind, _Parameters], _Result]], Callable[Concatenate[_Kind, _Parameters], _Result]]:
    """Decorate a method that is a call on a consumer, with the call's name for error texts.

    A call is refused while another one runs. An exception of another library, as of a signal handler, closes the
    consumer: its messages may have been taken from the broker and not returned.
    """

    def decorate(
        method: Callable[Concatenate[_Kind, _Parameters], _Result],
    ) -> Callable[Concatenate[_Kind, _Parameters], _Result]:
        @wraps(method)
        def run(self: _Kind, /, *arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            try:
                with self._guard:
                    self._begin(call)
                    result = method(self, *arguments, **named)  # with `return` here, a signal could keep the guard held
            except (TxnBridgeError, Poison):
                raise
            except BaseException as error:
                if not never_ran(error):
                    self._close_interrupted()
                raise
            return result

        return run

    return decorate


class Consumer(ConnectionUser):
    """Reads committed messages only, each partition in order. Only one thread at a time may use a consumer."""

    def __init__(
        self, consumers: Consumers, topics: Sequence[Topic], subscription: Subscription, deadline: Deadline
    ) -> None:
        self._consumers = consumers
        self._connection = connection = consumers.connection
        self._subscription = subscription
        # Messages of a topic without codecs (a plain topic) need no decoding.
        self._codecs = {topic.name: topic for topic in topics if not topic.plain}
        self._guard = _OneCall()
        self._guard.of = repr(self)
        self._closed = True  # until the reader is open
        self._lacks_ack_context = False  # whether messages were fetched since the last `ack_context()` was taken
        ordered = subscription.sharing == "partition"
        individual = bool(connection.capabilities[Capability.INDIVIDUAL_ACK])
        self._deliveries = Deliveries(self, connection, subscription.group, ordered, individual)
        self._interrupted = False  # whether an exception of another library has ended a call
        self._reader = connection.broker.reader(subscription, _ConsumerListener(self), deadline)
        self._closed = False
        consumers.add(self, self._reader)

    @classmethod
    def _open(
        cls: type[_Kind],
        consumers: Consumers,
        topics: str | Topic | Iterable[str | Topic],
        group: str | None,
        start: str | int | datetime,
        sharing: str = "partition",
        deadline: Deadline | None = None,
        found: Collection[str] = (),
    ) -> _Kind:
        connection = consumers.connection
        if sharing not in ("partition", "message", "key"):
            raise InvalidOption(f"sharing is 'partition', 'message' or 'key', not {sharing!r}")
        if not isinstance(start, str) or start not in ("earliest", "latest"):
            start = milliseconds(start, "start is 'earliest', 'latest' or a time: it")
        if sharing != "partition":
            connection.capabilities.require(Capability.SHARE_MESSAGE if sharing == "message" else Capability.SHARE_KEY)
        if isinstance(start, int):
            connection.capabilities.require(Capability.START_BY_TIME)
        if group is not None and (not isinstance(group, str) or not group.strip()):
            raise InvalidOption("a group's name is non-empty text")
        chosen = topic_list(topics)
        subscription = Subscription(tuple(topic.name for topic in chosen), group, start, sharing, found)
        with connection.call():
            return cls(consumers, chosen, subscription, deadline or connection.deadline())

    # --- reading --------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int = 500, timeout: float = 1.0) -> Batch:
        """Return up to `max_messages` as soon as there is one; an empty batch if none came within `timeout` seconds.

        Raise `Poison` for a message that its codec cannot decode, after all messages before it were returned; the next
        poll continues after it. Raise `BrokerUnavailable` if the codec raises an OSError (its schema registry is down):
        the next poll decodes the message again. Raise `PositionLost` if retention has deleted the group's next message,
        `OutcomeUnknown` while the outcome of the transaction that acknowledged the last messages is not known. A poll
        that raises an error skips no message. An exception of a signal handler closes the consumer.
        """
        batch = self._poll(max_messages, timeout)
        self._deliveries.on_the_way = None
        return batch

    @one_call("poll")
    def _poll(self, max_messages: int, timeout: float) -> Batch:
        """Return up to `max_messages` messages. The next call repeats these unless `_received` is called before."""
        self._fetch(max_messages, timeout)
        return self._hand_out(max_messages)

    def _received(self) -> None:
        """Note that the program has received the messages that the last poll returned; takes no lock."""
        self._deliveries.on_the_way = None

    @one_call("poll")
    def poll_columns(self, max_messages: int = 10_000, timeout: float = 1.0) -> list[MessageColumns]:
        """Return messages as `poll` does, but undecoded and as columns, which takes less time for many messages.

        Raise `InvalidState` for a consumer in a group: only a `Message` can be acknowledged.
        """
        if self._subscription.group is not None:
            raise InvalidState("columns are read without a group, because nothing acknowledges them; use poll")
        _check_limits(max_messages, timeout)
        self._settle(timeout)
        if self._deliveries.fetched():
            columns = columns_of(self._deliveries.hand_out(max_messages))
            self._received()
            return columns
        with self._connection.events.step("reader.poll", None, group=None) as found:
            columns = self._reader.poll_columns(max_messages, Deadline(timeout))
            found["messages"] = sum(map(len, columns))
        return columns

    def batches(self, max_messages: int = 500, max_wait: float = 1.0) -> Iterator[Batch]:
        """Yield non-empty batches without end; wait up to `max_wait` seconds for each batch to become full."""
        while True:
            batch = self._fill(max_messages, max_wait)
            if batch:
                self._deliveries.on_the_way = None
                yield batch

    def _fill(
        self, max_messages: int, max_wait: float, step: float = TIMEOUT_MAX, hurry: Callable[[], bool] = lambda: False
    ) -> Batch:
        """Wait `max_wait` seconds at most for a full batch; end the wait if `hurry()`, asked each `step` seconds."""
        deadline = Deadline(max_wait)
        while (batch := self._fill_once(max_messages, deadline, step, hurry)) is None:
            pass
        return batch

    @one_call("poll")
    def _fill_once(self, most: int, deadline: Deadline, step: float, hurry: Callable[[], bool]) -> Batch | None:
        most = self._fetch(most, min(deadline.left(), step), full=True)
        if deadline.expired or hurry() or len(self._deliveries.fetched()) >= most:
            return self._hand_out(most)
        return None

    def __iter__(self) -> Iterator[Message]:
        """Yield messages without end."""
        while True:
            for message in self._next():
                self._deliveries.on_the_way = None
                yield message

    @one_call("poll")
    def _next(self, timeout: float = 1.0) -> Batch:
        """Return the next message as a batch, as iteration does, or an empty batch after `timeout` seconds."""
        self._fetch(_FETCH, timeout)
        return self._hand_out(1)

    def _fetch(self, most: int, timeout: float, full: bool = False) -> int:
        """Fetch messages unless one is there (`full`: unless `most` are). Return `most`, or how many may be there."""
        _check_limits(most, timeout)
        most = min(most, self._connection.timing.unacked_messages)
        self._settle(timeout)
        there = len(self._deliveries.fetched())
        if there < (most if full else 1):
            room = self._deliveries.room_for(most - there)
            with self._connection.events.step("reader.poll", None, group=self._subscription.group) as found:
                messages = self._reader.poll(room, Deadline(timeout))
                found["messages"] = len(messages)
            if messages:
                self._lacks_ack_context = self._subscription.group is not None
                self._deliveries.fetch(messages)
        if self._lacks_ack_context:
            self._take_ack_contexts()
        return most

    def _take_ack_contexts(self) -> None:
        """Store the reader's `ack_context()`, which `Writer.ack` needs, in each new assignment of a partition."""
        context: object = None
        for assignment in self._deliveries.assignments.values():
            if assignment.context is None:
                context = context or self._reader.ack_context()
                assignment.context = context
        self._lacks_ack_context = False

    def _hand_out(self, most: int) -> Batch:
        if not self._codecs:
            return Batch(self._deliveries.hand_out(most))
        decoded: list[Message] = []
        for message in self._deliveries.fetched()[:most]:
            try:
                decoded.append(self._decode_one(message))
            except (Poison, TxnBridgeError) as error:
                if decoded:  # the messages before the undecodable one are delivered first; the next poll raises
                    break
                if isinstance(error, Poison):
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

    @one_call("positions")
    def positions(self) -> dict[Partition, Position]:
        """Return, for each assigned partition, the position of the next message that the program will get."""
        return self._deliveries.next_positions(self._reader.positions())

    @one_call("seek")
    def seek(self, positions: Mapping[Partition, Position] | int | datetime) -> None:
        """Continue reading at these positions, or in all partitions at a time (milliseconds since 1970, or a datetime).

        Raise `PositionLost` if retention has deleted a position, `InvalidState` while an open transaction holds
        acknowledgements of this consumer. After a failed seek the next poll continues at the position before the seek,
        and redelivers unacknowledged messages (in a group that shares messages, only these).
        """
        if not isinstance(positions, Mapping):
            positions = milliseconds(positions, "seek takes a mapping of (topic, partition) to positions or a time: it")
        elif not all(map(_is_partition, positions)) or not all(map(_is_position, positions.values())):
            raise InvalidOption("seek takes a mapping of (topic, partition) to positions such as `message.position`")
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

    @one_call("pause")
    def pause(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver nothing from these partitions (all by default) until `resume`; the consumer keeps its assignment."""
        chosen = self._chosen(partitions)
        self._reader.pause(chosen)
        self._deliveries.set_aside(dict.fromkeys(chosen, ()))

    @one_call("resume")
    def resume(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver from these partitions (all by default) again."""
        chosen = self._chosen(partitions)
        self._reader.resume(chosen)
        self._deliveries.resume(chosen)

    def _chosen(self, partitions: Sequence[Partition] | None) -> Sequence[Partition]:
        if partitions is None:
            return self.assignment
        if not isinstance(partitions, Sequence) or not all(map(_is_partition, partitions)):
            raise InvalidOption(f"give partitions as a list of (topic, number), not {partitions!r}")
        return partitions

    @one_call("lag")
    def lag(self) -> dict[Partition, int]:
        """Return, for each assigned partition, the number of messages (or positions) that are readable but not read."""
        return self._reader.lag(self._connection.deadline())

    @one_call("nack")
    def nack(self, messages: Message | Iterable[Message]) -> None:
        """Give back delivered messages for redelivery to this or another member of the group.

        They are redelivered also if this call raises an error. Messages that come again anyway, by an abort or because
        their partition was taken away, are passed over. Raise `InvalidState` for others, such as acknowledged ones.
        """
        self._connection.capabilities.require(Capability.REDELIVERY)
        back, others = self._deliveries.give_back(as_messages("nack", messages))
        self._reader.nack({assignment.partition: positions for assignment, positions in back.items()})
        self._deliveries.gone_back(back)
        if others:
            raise InvalidState(f"{len(others)} messages are acknowledged, given back or not its own: {others[:3]}")

    def close(self, timeout: float | None = None) -> None:
        """Leave the group: other members take over at once, and get the unacknowledged messages.

        Closing takes at most `timeout` seconds, by default the bridge's timeout.
        """
        if self._closed or self._connection.forked:
            return
        self._close_now(self._connection.deadline(timeout))

    @one_call("close")
    def _close_now(self, deadline: Deadline) -> None:
        self._close(deadline)

    def _close_interrupted(self) -> None:
        """Close the consumer after an interrupted call, so that other members get its messages."""
        self._interrupted = True
        try:
            with self._guard:
                if not (self._closed or self._connection.forked):
                    self._close(Deadline(min(_INTERRUPTED_SECONDS, self._connection.timeout)))
        except Exception as error:
            _log.debug("closing %r after an interrupted call: %s", self, error)

    def _close(self, deadline: Deadline) -> None:
        self._leave(list(self._deliveries.assignments), "reader.revoke", deadline.left())
        try:
            self._consumers.close_reader(self._reader, deadline)
        except TxnBridgeError:
            self._closed = True
            raise
        self._closed = True

    def _close_behind_bridge(self) -> None:
        """Close the consumer once its running call has ended; runs in a thread after the bridge was closed."""
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
            # A thread closes the reader, because garbage collection may run while locks are held.
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

    def _leave(self, partitions: Sequence[Partition], event: str, patience: float = TIMEOUT_MAX) -> None:
        for partition in partitions:
            self._connection.events.emit(event, "before", None, topic=partition[0], partition=partition[1])
        holder, held = self._deliveries.left(partitions)
        if holder is not None and held:
            # A running commit ends first; a transaction that has not begun to commit can only be aborted now.
            names = ", ".join(f"{topic}[{number}]" for topic, number in sorted(held))
            error = Conflict(f"{names} left this consumer while transaction {holder.id} held acknowledgements of it")
            holder._fail_from_outside(error, patience=min(patience, holder.deadline))
        for partition in partitions:
            self._connection.events.emit(event, "after", None, topic=partition[0], partition=partition[1])

    # --- before reading on ----------------------------------------------------------------------------------------

    def _settle(self, timeout: float) -> None:
        """Look up unknown outcomes of transactions, for `timeout` seconds; then have the reader redeliver messages."""
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
        """Raise an error if the consumer cannot be used now, and take back messages that no task has received.

        The caller must hold `_guard`; `call` is the caller's name for error texts.
        """
        self._connection.check_process()
        if self._interrupted and call != "close":
            raise InvalidState(f"{call} on {self!r}, which was interrupted in the middle of a call; open another")
        if self._closed:
            raise InvalidState(f"{call} on {self!r}, which is closed")
        if call == "close":
            return
        self._connection.check_open()
        self._deliveries.recover()


class RawConsumer(Consumer):
    """A processor's consumer: it returns undecoded messages, so that the processor can set aside undecodable ones."""

    @one_call("poll")
    def take(self, max_messages: int, timeout: float) -> list[Message]:
        """Return up to `max_messages` undecoded messages, as soon as there is one; none after `timeout` seconds."""
        self._fetch(max_messages, timeout)
        messages = self._deliveries.hand_out(max_messages)
        self._received()
        return messages

    @one_call("poll")
    def poll_idle(self) -> None:
        """Poll, and keep what comes for the next `take`: some brokers expel a member that polls too rarely."""
        self._fetch(len(self._deliveries.fetched()) + 1, 0.0, full=True)

    @one_call("lag")
    def lag_within(self, timeout: float) -> dict[Partition, int]:
        return self._reader.lag(Deadline(timeout))

    def take_back(self) -> list[Assignment]:
        """Have the messages delivered again that were handed out and not acknowledged; return their assignments."""
        return self._deliveries.take_back()

    @property
    def in_doubt(self) -> bool:
        """Whether the outcome of a transaction that acknowledged messages is unknown: they may come again."""
        return bool(self._deliveries.doubts)

    def group_lag(self, timeout: float) -> int | None:
        """Return the lag of the whole group, over all its members; None if the broker cannot report it."""
        return self._reader.group_lag(Deadline(timeout))


class _OneCall(_RLock):  # type: ignore[misc]  # it is not final, whatever its stub says
    """A lock for one call on a consumer at a time; a second call gets `InvalidState`, also on the same thread.

    Calls use it by `with`, so it is always released: a signal handler can raise an exception in the first line of any
    function written in Python, but the inherited `__exit__` is written in C.
    """

    of = ""

    _is_owned: Callable[[], bool]  # returns whether this thread holds the lock

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
    """Passes a reader's assignments to its consumer by a weak reference, so the consumer can be garbage-collected."""

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


def _check_limits(max_messages: int, timeout: float) -> None:
    if type(max_messages) is not int or max_messages < 1:
        raise InvalidOption(f"max_messages is a whole number from 1, not {max_messages!r}")
    check_seconds("timeout", timeout)


def _is_partition(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int)


def _is_position(given: object) -> bool:
    return isinstance(given, tuple | list) and all(type(part) is int and abs(part) < 1 << 63 for part in given)


def topic_list(topics: str | Topic | Iterable[str | Topic]) -> list[Topic]:
    """Return one topic or many as a list. Raise `InvalidOption` for no topic, and for a topic given twice."""
    if not isinstance(topics, str | Topic | Iterable):
        raise InvalidOption(f"topics are a topic's name, a Topic, or several of them, not {type(topics).__name__}")
    found = [as_topic(t) for t in ((topics,) if isinstance(topics, str | Topic) else topics)]
    names = [topic.name for topic in found]
    if not names or len(set(names)) != len(names):
        raise InvalidOption("give at least one topic, and each of them once")
    return found
