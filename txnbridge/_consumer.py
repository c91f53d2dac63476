"""Reading in a group or alone, and which delivered message may still be acknowledged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from txnbridge._deadline import Deadline
from txnbridge._messages import Batch, Message, Position
from txnbridge._token import Outcome, Token
from txnbridge._topics import Topic, as_topic
from txnbridge.capabilities import Capability
from txnbridge.errors import Conflict, InvalidOption, InvalidState, OutcomeUnknown, Poison
from txnbridge.spi import Partition, Reader, Subscription

if TYPE_CHECKING:
    from txnbridge._bridge import Bridge
    from txnbridge._transaction import State, Transaction

# What was delivered and not acknowledged is remembered, about 150 bytes a message. A program that reaches this bound
# reads in a group and never acknowledges, which it does not want.
MAX_UNACKED = 1_000_000

_source_of = attrgetter("source")


class Assignment:
    """One stay of one partition with one consumer: what was delivered in it and is not acknowledged yet."""

    __slots__ = ("_fresh", "_unacked", "consumer", "context", "ended", "partition")

    def __init__(self, consumer: Consumer, partition: Partition) -> None:
        self.consumer = consumer
        self.partition = partition
        self.context: object = None  # the reader's proof, taken with the first delivery
        self.ended = False
        # Most deliveries are noted in lists, which is quick, and looked up later or never. (One thread may poll while
        # another acknowledges.)
        self._fresh: deque[list[Position]] = deque()
        self._unacked: dict[Position, None] = {}

    def deliver(self, messages: Iterable[Message]) -> None:
        """Note that these were delivered, in this order."""
        self._fresh.append([message.position for message in messages])

    @property
    def unacked(self) -> dict[Position, None]:
        """The positions of what was delivered and is not acknowledged, in order."""
        while self._fresh:
            self._unacked.update(dict.fromkeys(self._fresh.popleft()))
        return self._unacked


def collect_acks(
    transaction: Transaction, messages: Sequence[Message], up_to: bool
) -> list[tuple[object, dict[Partition, list[Position]]]]:
    """Check that these messages may be acknowledged by this transaction, and hold them for it.

    Returns what to tell the writer, by context. Raises before anything is held.
    """
    wanted: dict[Assignment, list[Position]] = {}
    for _, run in groupby(messages, _source_of):  # once for each run: there may be a million messages
        delivered = list(run)
        assignment = _assignment_of(delivered[0], transaction)
        wanted.setdefault(assignment, []).extend([message.position for message in delivered])
    for assignment, positions in wanted.items():
        assignment.consumer._check_holder(transaction)
        if up_to:
            wanted[assignment] = [p for p in assignment.unacked if p <= positions[0]] or positions
        if not _is_all(assignment, wanted[assignment]):
            _check_acks(transaction, assignment, wanted[assignment])
    by_context: dict[int, tuple[object, dict[Partition, list[Position]]]] = {}
    for assignment, positions in wanted.items():
        unacked = assignment.unacked
        if len(positions) == len(unacked):
            unacked.clear()
        for position in positions if unacked else ():
            del unacked[position]
        transaction._held.setdefault(assignment, []).extend(positions)
        assignment.consumer._holder = transaction
        _, told = by_context.setdefault(id(assignment.context), (assignment.context, {}))
        told[assignment.partition] = positions
    return list(by_context.values())


def _is_all(assignment: Assignment, positions: list[Position]) -> bool:
    """Whether they are all that is unacknowledged, in order, as they mostly are: then nothing is left to check."""
    return len(assignment.unacked) == len(positions) and list(assignment.unacked) == positions


def _assignment_of(message: Message, transaction: Transaction) -> Assignment:
    assignment = message.source
    if not isinstance(assignment, Assignment):
        raise InvalidState(f"{message!r} was not read in a group (consumer(…, group=…)), so it cannot be acknowledged")
    if assignment.consumer._bridge is not transaction._bridge:
        raise InvalidState(f"{message!r} was read by another bridge; acknowledge it in a transaction of that one")
    if assignment.ended:
        topic, partition = assignment.partition
        raise Conflict(
            f"{topic}[{partition}] left this consumer after the message was delivered; it comes again elsewhere"
        )
    return assignment


def _check_acks(transaction: Transaction, assignment: Assignment, positions: list[Position]) -> None:
    topic, number = assignment.partition
    unacked = assignment.unacked
    for position in positions:
        if position not in unacked:
            if position in transaction._held.get(assignment, ()):
                raise InvalidState(
                    f"the message at {topic}[{number}] {position} is acknowledged in this transaction already"
                )
            raise InvalidState(
                f"the message at {topic}[{number}] {position} is acknowledged already, or given back and comes again"
            )
    if len(set(positions)) != len(positions):
        raise InvalidState(f"a message of {topic}[{number}] is in this acknowledgement twice")
    if not transaction._bridge.capabilities[Capability.INDIVIDUAL_ACK]:
        for expected, position in zip(unacked, positions, strict=False):
            if position != expected:
                raise InvalidState(
                    f"this broker only knows positions: {topic}[{number}] must be acknowledged in order, and {expected}"
                    f" comes before {position} (or use ack_up_to)"
                )


class Consumer:
    """Reads committed messages only, each partition in order. One thread uses it at a time."""

    def __init__(self, bridge: Bridge, topics: Sequence[Topic], subscription: Subscription) -> None:
        self._bridge = bridge
        self._subscription = subscription
        # Topics whose values pass as they are need no decoding.
        self._codecs = {topic.name: topic for topic in topics if not topic.plain}
        self._guard = threading.Lock()
        self._told = threading.Lock()  # a transaction may end on another thread than the one that polls
        self._assignments: dict[Partition, Assignment] = {}
        self._most_unacked = 0  # no more than so many messages are
        self._pending: list[Message] = []  # read, but behind a message that could not be decoded
        self._holder: Transaction | None = None  # the open transaction that holds acknowledgements
        self._returned: dict[Assignment, list[Position]] = {}  # of an aborted transaction: to be delivered again
        self._unknown: tuple[Token, dict[Assignment, list[Position]]] | None = None
        self._closed = False
        self._reader: Reader = bridge._broker.reader(subscription, self, Deadline(bridge._timeout))

    # --- reading --------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int = 500, timeout: float = 1.0) -> Batch:
        """Up to `max_messages` as soon as there is one; an empty batch if none came within `timeout` seconds.

        A value that its codec cannot decode raises `Poison`, alone and in its place; the next poll goes on behind it.
        Raises `PositionLost` if retention has passed this group, `OutcomeUnknown` while the outcome of the transaction
        that acknowledged the last messages is not known.
        """
        with self._using("poll"):
            return self._decode(self._poll_raw(max_messages, timeout))

    def _poll_raw(self, max_messages: int, timeout: float) -> list[Message]:
        if max_messages < 1:
            raise InvalidOption(f"max_messages must be at least 1, not {max_messages}")
        self._settle(timeout)
        if self._pending:
            taken, self._pending = self._pending[:max_messages], self._pending[max_messages:]
            return taken
        with self._bridge._events.step("reader.poll", None, group=self._subscription.group) as found:
            messages = self._reader.poll(max_messages, Deadline(timeout))
            found["messages"] = len(messages)
        if self._subscription.group is not None and messages:
            self._track(messages)
        return messages

    def _track(self, messages: list[Message]) -> None:
        for assignment, delivered in groupby(messages, _source_of):
            assignment.deliver(delivered)
        context: object = None
        for assignment in self._assignments.values():
            if assignment.context is None:
                context = context or self._reader.ack_context()
                assignment.context = context
        self._most_unacked += len(messages)
        if self._most_unacked > MAX_UNACKED:
            self._most_unacked = sum(len(a.unacked) for a in self._assignments.values())
        if self._most_unacked > MAX_UNACKED:
            raise InvalidState(
                f"more than {MAX_UNACKED} messages were delivered to group {self._subscription.group!r} and not"
                " acknowledged; acknowledge them in transactions, or read without a group"
            )

    def _decode(self, messages: list[Message]) -> Batch:
        if not self._codecs:
            return Batch(messages)
        decoded: list[Message] = []
        for index, message in enumerate(messages):
            try:
                decoded.append(self._decode_one(message))
            except Poison:
                if not decoded:
                    self._pending = messages[1:] + self._pending
                    raise
                # What came before it is delivered first; it is raised when its turn comes.
                self._pending = messages[index:] + self._pending
                break
        return Batch(decoded)

    def _take(self, max_messages: int, timeout: float) -> list[Message]:
        """As `poll`, but undecoded: for the processor, which sets aside what cannot be decoded."""
        with self._using("poll"):
            return self._poll_raw(max_messages, timeout)

    def _decode_one(self, message: Message) -> Message:
        topic = self._codecs.get(message.topic)
        return message if topic is None else topic.decode(message)

    def _take_back(self) -> None:
        """Everything that was delivered and is not acknowledged comes again with the next poll."""
        with self._told:
            for assignment in self._assignments.values():
                if assignment.unacked:
                    self._returned.setdefault(assignment, []).extend(assignment.unacked)

    def batches(self, max_messages: int = 500, max_wait: float = 1.0) -> Iterator[Batch]:
        """Batches for ever, none of them empty; each waits up to `max_wait` seconds to become full."""
        while True:
            batch = self._fill(max_messages, max_wait)
            if batch:
                yield batch

    def _fill(self, max_messages: int, max_wait: float) -> Batch:
        deadline = Deadline(max_wait)
        messages: list[Message] = []
        while len(messages) < max_messages and not (messages and deadline.expired):
            try:
                more = self.poll(max_messages - len(messages), deadline.left())
            except Poison as poison:
                if not messages:
                    raise
                self._pending.insert(0, poison.message)
                break
            messages += more
            if not more and deadline.expired:
                break
        return Batch(messages)

    def __iter__(self) -> Iterator[Message]:
        """Message by message, for ever."""
        while True:
            yield from self.poll()

    # --- where it stands ------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[Partition]:
        """The partitions that are with this consumer now."""
        return sorted(self._reader.positions())

    def positions(self) -> dict[Partition, Position]:
        """The next position to read of each assigned partition."""
        with self._using("positions"):
            positions = self._reader.positions()
            for message in reversed(self._pending):
                positions[message.topic, message.partition] = message.position
            return positions

    def seek(self, positions: Mapping[Partition, Position] | int) -> None:
        """Go on from these positions, or everywhere from a point in time (milliseconds since 1970).

        Raises `PositionLost` below retention, `InvalidState` while an open transaction holds acknowledgements.
        """
        with self._using("seek"):
            self._bridge.capabilities.require(Capability.REPLAY)
            if self._holder is not None:
                raise InvalidState(
                    f"transaction {self._holder.id} holds acknowledgements of this consumer; end it first"
                )
            self._settle(self._bridge._timeout)
            with self._bridge._events.step("reader.seek"):
                if isinstance(positions, int):
                    self._bridge.capabilities.require(Capability.START_BY_TIME)
                    self._reader.seek_to_time(positions, Deadline(self._bridge._timeout))
                    moved = set(self._assignments)
                else:
                    self._reader.seek(positions)
                    moved = set(positions)
            self._pending = [m for m in self._pending if (m.topic, m.partition) not in moved]
            for partition in moved & self._assignments.keys():
                self._assignments[partition].unacked.clear()

    def pause(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver nothing from these partitions (all by default) until `resume`; the assignment stays."""
        with self._using("pause"):
            self._reader.pause(self.assignment if partitions is None else partitions)

    def resume(self, partitions: Sequence[Partition] | None = None) -> None:
        """Deliver from these partitions (all by default) again."""
        with self._using("resume"):
            self._reader.resume(self.assignment if partitions is None else partitions)

    def lag(self) -> dict[Partition, int]:
        """How many readable messages (or positions) lie before each assigned partition's end."""
        with self._using("lag"):
            return self._reader.lag(Deadline(self._bridge._timeout))

    def nack(self, messages: Message | Iterable[Message]) -> None:
        """Give delivered messages back: they are delivered again, to this or another member."""
        with self._using("nack"):
            self._bridge.capabilities.require(Capability.REDELIVERY)
            back: dict[Partition, list[Position]] = {}
            for message in (messages,) if isinstance(messages, Message) else tuple(messages):
                assignment = message.source
                if not isinstance(assignment, Assignment) or assignment.consumer is not self or assignment.ended:
                    raise InvalidState(f"{message!r} is not with this consumer, so it cannot be given back")
                if message.position not in assignment.unacked:
                    raise InvalidState(f"{message!r} is acknowledged or given back already")
                del assignment.unacked[message.position]
                back.setdefault(assignment.partition, []).append(message.position)
            if not self._bridge.capabilities[Capability.INDIVIDUAL_ACK]:
                self._forget_behind({partition: min(positions) for partition, positions in back.items()})
            self._reader.nack(back)

    def _forget_behind(self, back: Mapping[Partition, Position]) -> None:
        """A broker that only knows positions goes back, so everything behind these comes again too."""
        for partition, first in back.items():
            unacked = self._assignments[partition].unacked
            for position in [position for position in unacked if position > first]:
                del unacked[position]
        self._pending = [m for m in self._pending if m.position <= back.get((m.topic, m.partition), m.position)]

    def close(self, timeout: float | None = None) -> None:
        """Leave the group: others take over at once, and what was not acknowledged comes again there.

        It ends within `timeout` seconds, by default the bridge's.
        """
        if self._closed or self._bridge._forked:
            return
        with self._using("close"):
            self._closed = True
            self.revoking(list(self._assignments))
            self._bridge._consumers.discard(self)
            self._reader.close(Deadline(self._bridge._timeout if timeout is None else timeout))

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {', '.join(self._subscription.topics)} in group {self._subscription.group!r}>"

    # --- the reader tells ------------------------------------------------------------------------------------------

    def assigned(self, partition: Partition) -> object:
        """A partition came (called by the reader)."""
        self._bridge._events.emit("reader.assign", "after", None, topic=partition[0], partition=partition[1])
        if self._subscription.group is None:
            return None
        assignment = self._assignments[partition] = Assignment(self, partition)
        return assignment

    def revoking(self, partitions: Sequence[Partition]) -> None:
        """Partitions are about to leave: the transaction that holds their acknowledgements ends first."""
        self._leave(partitions, "reader.revoke")

    def lost(self, partitions: Sequence[Partition]) -> None:
        """Partitions have left already."""
        self._leave(partitions, "reader.lost")

    def _leave(self, partitions: Sequence[Partition], event: str) -> None:
        for partition in partitions:
            self._bridge._events.emit(event, "before", None, topic=partition[0], partition=partition[1])
        leaving = {self._assignments.pop(p) for p in partitions if p in self._assignments}
        for assignment in leaving:
            assignment.ended = True
        holder = self._holder
        if holder is not None and leaving & holder._held.keys():
            # A commit that is running is waited for; one that has not begun can only abort now.
            names = ", ".join(f"{t}[{n}]" for t, n in sorted(a.partition for a in leaving))
            error = Conflict(f"{names} left this consumer while transaction {holder.id} held acknowledgements of it")
            holder._fail_from_outside(error, patience=holder.deadline)
        gone = set(partitions)
        self._pending = [m for m in self._pending if (m.topic, m.partition) not in gone]
        for partition in partitions:
            self._bridge._events.emit(event, "after", None, topic=partition[0], partition=partition[1])

    # --- the transaction tells -------------------------------------------------------------------------------------

    def _check_holder(self, transaction: Transaction) -> None:
        if self._holder not in (None, transaction):
            raise InvalidState(
                f"transaction {self._holder.id if self._holder else ''} holds acknowledgements of this consumer;"
                " one open transaction at a time can"
            )

    def _transaction_ended(self, state: State, held: dict[Assignment, list[Position]], token: Token | None) -> None:
        """What it held is acknowledged, or comes again with the next poll, or waits until its outcome is known."""
        with self._told:
            self._holder = None
            self._unknown = None
            if state.value == "aborted":
                for assignment, positions in held.items():
                    self._returned.setdefault(assignment, []).extend(positions)
            elif state.value == "unknown" and token is not None:
                self._unknown = token, held

    def _settle(self, timeout: float) -> None:
        """Before reading on: learn an outcome that is not known yet, and go back behind an aborted transaction."""
        if self._unknown is not None:
            token, held = self._unknown
            outcome = self._bridge._resolve(token, Deadline(timeout))
            if outcome is None:
                raise OutcomeUnknown(
                    f"the outcome of transaction {token.transaction}, which acknowledged the last messages, is not"
                    " known yet; poll again later",
                    token=str(token),
                )
            with self._told:
                self._unknown = None
                if outcome is Outcome.ABORTED:
                    for assignment, positions in held.items():
                        self._returned.setdefault(assignment, []).extend(positions)
        if self._returned:
            with self._told:
                returned, self._returned = self._returned, {}
            self._go_back({a: p for a, p in returned.items() if not a.ended})

    def _go_back(self, returned: dict[Assignment, list[Position]]) -> None:
        if self._subscription.sharing != "partition":
            self._reader.nack({a.partition: positions for a, positions in returned.items()})
            return
        # Everything delivered and not acknowledged comes again, in order: nothing is skipped and nothing overtakes.
        back = {a.partition: min([*positions, *a.unacked]) for a, positions in returned.items()}
        for assignment in returned:
            assignment.unacked.clear()
        self._pending = [m for m in self._pending if (m.topic, m.partition) not in back]
        if back:
            self._reader.seek(back)

    def _using(self, call: str) -> _Using:
        return _Using(self, call)


class _Using:
    """One call at a time, on an open consumer, in the process that made it."""

    __slots__ = ("_call", "_consumer")

    def __init__(self, consumer: Consumer, call: str) -> None:
        self._consumer = consumer
        self._call = call

    def __enter__(self) -> None:
        consumer = self._consumer
        consumer._bridge._check_process()
        if consumer._closed:
            raise InvalidState(f"{self._call} on {consumer!r}, which is closed")
        if not consumer._guard.acquire(False):
            raise InvalidState(f"{self._call} on {consumer!r} while another call on it runs: one thread at a time")

    def __exit__(self, *error: Any) -> None:
        self._consumer._guard.release()


def topic_list(topics: str | Topic | Iterable[str | Topic]) -> list[Topic]:
    """One topic or many, as `Topic`s. Raises `InvalidOption` for none, or for one that is there twice."""
    found = [as_topic(t) for t in ((topics,) if isinstance(topics, str | Topic) else topics)]
    names = [topic.name for topic in found]
    if not names or len(set(names)) != len(names):
        raise InvalidOption("give at least one topic, and each of them once")
    return found
