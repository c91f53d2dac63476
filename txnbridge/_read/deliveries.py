"""The state of each message that a consumer has fetched, as a state machine.

| a message is | event                                                            | then it is    |
|--------------|-------------------------------------------------------------------|---------------|
| fetched      | `poll` returns it to the program                                  | out           |
| out          | a transaction acknowledges it                                     | held          |
| out          | `nack` of it, or of an earlier message of its ordered partition   | back          |
| held         | the transaction committed                                         | done          |
| held         | the transaction was prepared                                      | done (1)      |
| held         | a span's transaction was prepared                                 | held, unknown |
| held         | the transaction aborted, or was garbage-collected unfinished      | back (2)      |
| held         | the transaction's outcome is unknown                              | held, unknown |
| held, unknown| the transaction's outcome is known                                | done, or back |
| back         | the reader has returned to its position without an error          | to be fetched |
| fetched      | an earlier message of its ordered partition is redelivered        | to be fetched |
| any of them  | its partition is revoked, or moved by `seek`                      | forgotten     |

(1) Back, if the broker only knows positions: a later acknowledgement would skip the message if the token is aborted. So
the reader waits there until the transaction has ended, and goes on at the group's position.

(2) Or to be fetched, if the reader has gone back to an earlier message, and so is about to read it again.

Messages that are done or to be fetched are not remembered. A message that is back can't be acknowledged, and the
reader fetches nothing new before it has returned to that message's position. It then fetches later messages that are
held once more; these are skipped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from txnbridge._base.connection import Connection
from txnbridge._base.messages import Message, Position
from txnbridge._base.token import Outcome, State, Token
from txnbridge.errors import Conflict, InvalidState
from txnbridge.spi import Partition

_source_of = attrgetter("source")


class Holder(Protocol):
    """The part of `Transaction` that this module uses. A transaction holds the messages that it acknowledges."""

    _holds: dict[Deliveries, object]  # each with its consumer, so that the consumer is not garbage-collected

    @property
    def id(self) -> str: ...

    @property
    def deadline(self) -> float: ...

    def _fail_from_outside(self, error: Conflict, patience: float) -> None: ...


class Assignment:
    """The time in which a partition belongs to a consumer, and the unfinished messages delivered in it."""

    __slots__ = ("_fresh", "_out", "_passed_over", "back", "context", "deliveries", "ended", "held", "partition")

    def __init__(self, deliveries: Deliveries, partition: Partition) -> None:
        self.deliveries = deliveries
        self.partition = partition
        self.context: object = None  # the reader's `ack_context()`, taken before the first delivery
        self.ended = False
        self.held: dict[str, list[Position]] = {}  # by the id of the transaction that holds them
        self.back: set[Position] = set()
        # Positions of new deliveries are appended to `_fresh`, which is quick; most are never looked up one by one.
        self._fresh: list[list[Position]] = []
        self._out: dict[Position, None] = {}
        # Positions of held messages that the reader is about to read again, because it went back to an earlier message.
        # True: it passes the message over then. False: it delivers it, because its transaction was aborted meanwhile.
        self._passed_over: dict[Position, bool] = {}

    def __len__(self) -> int:
        return len(self.out) + len(self.back) + sum(map(len, self.held.values()))

    @property
    def out(self) -> dict[Position, None]:
        """The positions of messages that the program has got and not acknowledged, in the order of delivery."""
        for positions in self._fresh:
            self._out.update(dict.fromkeys(positions))
        self._fresh.clear()
        return self._out

    def hand_out(self, positions: list[Position]) -> None:
        self._fresh.append(positions)

    def hold(self, transaction: str, positions: list[Position]) -> None:
        self.held.setdefault(transaction, []).extend(positions)
        out = self.out
        if len(positions) == len(out):
            out.clear()
        for position in positions if out else ():
            del out[position]

    def let_go(self, transaction: str, acknowledged: bool) -> None:
        positions = self.held.get(transaction, ())
        for position in () if acknowledged else positions:
            if position in self._passed_over:
                # The reader will come to this message. In the state back it would make the reader skip those before it.
                self._passed_over[position] = False
            else:
                self.back.add(position)
        self.held.pop(transaction, None)

    def take_back(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self.back.add(position)
            self.out.pop(position, None)

    def go_back(self) -> None:
        """Mark the messages that the program has for redelivery: the reader reads again from the first of them on."""
        self.take_back(list(self.out))
        first = min(self.back)
        for positions in self.held.values():
            self._passed_over.update(dict.fromkeys((p for p in positions if p > first), True))

    def without_held(self, messages: list[Message]) -> list[Message]:
        """Return these messages without those that a transaction acknowledges already and that were read again."""
        if not self._passed_over:
            return messages
        return [message for message in messages if not self._passed_over.get(message.position)]

    def has_come_to(self, last: Position) -> None:
        """Note that the reader has read up to `last`, so that it fetches no acknowledged message before that again."""
        self._passed_over = {position: over for position, over in self._passed_over.items() if position > last}

    def forget(self) -> None:
        self.back.clear()
        self.out.clear()
        self._passed_over.clear()


class Deliveries:
    """The states of all messages that one consumer has fetched.

    Each method is one step under one lock, because a transaction may end on a thread other than the polling one. Only
    the polling thread touches fetched messages. No method calls the broker.

    An exception from a signal handler may interrupt a call on a transaction at any point, and the consumer goes on. So
    each method deletes the old state of a message only after it has written the new one.
    """

    def __init__(
        self, consumer: object, connection: Connection, group: str | None, ordered: bool, individual: bool
    ) -> None:
        self.consumer = weakref.ref(consumer)  # weak, so that an unused consumer is garbage-collected at once
        self.connection = connection
        self._group = group
        self._ordered = ordered  # each partition is assigned to one member of the group, which reads it in order
        self.individual = individual  # messages can be acknowledged in any order
        self.lock = threading.RLock()
        self.assignments: dict[Partition, Assignment] = {}
        self.on_the_way: list[Message] | None = None  # being returned to the program; None once it has them
        self._fetched: list[Message] = []
        self._set_aside: list[Message] = []  # fetched messages of partitions that were paused afterwards
        self._most = 0  # upper bound of the number of remembered messages
        self._any_back = False  # False: no message is back
        self.doubts: dict[str, Token] = {}  # tokens, by id, of transactions that hold messages with unknown outcome
        self._holder: tuple[str, weakref.ref[Holder]] | None = None  # the open transaction that holds messages

    # --- fetched and handed out -----------------------------------------------------------------------------------

    def room_for(self, wanted: int) -> int:
        """Return how many more messages may be fetched, at most `wanted`.

        Raise `InvalidState` if the largest allowed number of messages is unacknowledged.
        """
        if self._group is None:
            return wanted
        limit = self.connection.timing.unacked_messages
        with self.lock:
            if self._most + wanted > limit:
                self._most = len(self._fetched) + len(self._set_aside) + sum(map(len, self.assignments.values()))
            room = limit - self._most
        if room <= 0:
            text = f"{limit} messages were delivered to group {self._group!r} and not acknowledged; acknowledge them"
            raise InvalidState(text + " in transactions, or read without a group")
        return min(room, wanted)

    def fetch(self, messages: list[Message]) -> None:
        """Add messages of the reader to the fetched ones, except those that a transaction acknowledges already."""
        with self.lock:
            self._most += len(messages)
            passed: dict[Assignment, Position] = {}
            if any(assignment._passed_over for assignment in self.assignments.values()):
                kept: list[Message] = []
                for assignment, run in groupby(messages, _source_of):
                    came = list(run)
                    kept += assignment.without_held(came)
                    passed[assignment] = came[-1].position
                messages = kept
            self._fetched = self._fetched + messages if self._fetched else messages
            for assignment, last in passed.items():
                assignment.has_come_to(last)

    def fetched(self) -> list[Message]:
        """Return the fetched messages: those that the program has not got yet."""
        return self._fetched

    def hand_out(self, most: int) -> list[Message]:
        """Return the first `most` fetched messages for the program, which may acknowledge them from now on.

        They stay in `on_the_way` until the caller sets this attribute to None. If it does not, because its task was
        cancelled, the next call returns the messages again.
        """
        with self.lock:
            taken, rest = self._fetched[:most], self._fetched[most:]
            self.on_the_way, self._fetched = taken, rest
            if self._group is not None:
                for assignment, messages in groupby(taken, _source_of):
                    assignment.hand_out([message.position for message in messages])
            return taken

    def recover(self) -> None:
        """Restore the messages that a call has handed out to a task that was cancelled, so that none is lost."""
        if self.on_the_way:
            with self.lock:
                again = [message for message in self.on_the_way if self._comes_again(message)]
                self._fetched, self.on_the_way = again + self._fetched, None

    def _comes_again(self, message: Message) -> bool:
        assignment = message.source
        if not isinstance(assignment, Assignment):  # the message was read without a group
            return True
        assignment.out.pop(message.position, None)
        return not assignment.ended and message.position not in assignment.back

    def _drop(self, partitions: set[Partition]) -> None:
        if self._fetched:
            self._fetched = _elsewhere(self._fetched, partitions)
        if self._set_aside:
            self._set_aside = _elsewhere(self._set_aside, partitions)

    def next_positions(self, positions: dict[Partition, Position]) -> dict[Partition, Position]:
        """Return the next position to deliver of each partition, computed from the reader's `positions`.

        The reader is ahead of the program by the messages that are fetched but not handed out, and by those to
        redeliver.
        """
        for message in reversed(self._fetched + self._set_aside):
            positions[message.topic, message.partition] = message.position
        with self.lock:
            for partition, assignment in self.assignments.items():
                if assignment.back and partition in positions:
                    positions[partition] = min(positions[partition], *assignment.back, *assignment.out)
        return positions

    def set_aside(self, since: Mapping[Partition, Position]) -> None:
        """Keep fetched messages from the program until `resume`: in each partition of `since`, those from there on."""

        def is_chosen(message: Message) -> bool:
            at = since.get((message.topic, message.partition))
            return at is not None and message.position >= at

        with self.lock:
            self._set_aside += [m for m in self._fetched if is_chosen(m)]
            self._fetched = [m for m in self._fetched if not is_chosen(m)]

    def first_set_aside(self) -> dict[Partition, Message]:
        """Return, for each partition with messages that `set_aside` keeps from the program, the first of them."""
        return {(m.topic, m.partition): m for m in reversed(self._set_aside)}

    def resume(self, partitions: Iterable[Partition]) -> None:
        with self.lock:
            resumed = set(partitions)
            # Fetched messages of these partitions, if there are any, come before those that were set aside.
            self._fetched += [m for m in self._set_aside if (m.topic, m.partition) in resumed]
            self._set_aside = _elsewhere(self._set_aside, resumed)

    # --- held by transactions -------------------------------------------------------------------------------------

    @property
    def holder(self) -> str | None:
        """The id of the open transaction that holds messages of this consumer; None if there is none."""
        return None if self._holder is None else self._holder[0]

    @property
    def is_abandoned(self) -> bool:
        """True if the holding transaction's object was garbage-collected before the transaction ended."""
        return self._holder is not None and self._holder[1]() is None

    def give_up(self) -> None:
        """Mark the messages of an abandoned transaction, whose object was garbage-collected, for redelivery."""
        with self.lock:
            if self._holder is not None and self.is_abandoned:
                self._let_go(self._holder[0], acknowledged=False)

    def check_holder(self, transaction: Holder) -> None:
        self.give_up()
        if self.holder not in (None, transaction.id):
            raise InvalidState(
                f"transaction {self.holder} holds acknowledgements of this consumer; one open transaction at a time can"
            )

    def hold(self, transaction: Holder, wanted: Mapping[Assignment, list[Position]]) -> None:
        self._holder = transaction.id, weakref.ref(transaction)
        for assignment, positions in wanted.items():
            assignment.hold(transaction.id, positions)

    def end(self, transaction: Holder, state: State, token: Token | None) -> None:
        """Apply a transaction's outcome to the messages that it holds.

        Committed: forget them. Aborted: deliver them again. Unknown: keep them held until a call of `found`. Prepared:
        forget them, or have the reader wait at them for the outcome.
        """
        with self.lock:
            if state is State.UNKNOWN and token is not None:
                self.doubts[transaction.id] = token
                self._forget_holder(transaction.id)
            else:
                comes_back = {State.ABORTED} if self.individual else {State.ABORTED, State.PREPARED}
                self._let_go(transaction.id, acknowledged=state not in comes_back)

    def found(self, transaction: str, outcome: Outcome) -> None:
        """Apply the outcome of a transaction, unknown until now, to the messages that it holds."""
        with self.lock:
            self._let_go(transaction, acknowledged=outcome is not Outcome.ABORTED)

    def _let_go(self, transaction: str, acknowledged: bool) -> None:
        self._any_back |= not acknowledged
        for assignment in self.assignments.values():
            assignment.let_go(transaction, acknowledged)
        self.doubts.pop(transaction, None)
        self._forget_holder(transaction)

    def _forget_holder(self, transaction: str) -> None:
        if self.holder == transaction:
            self._holder = None

    # --- back: to be delivered again ------------------------------------------------------------------------------

    def take_back(self) -> list[Assignment]:
        """Mark every message for redelivery that was delivered and is not acknowledged.

        Return the assignments of which messages are redelivered.
        """
        with self.lock:
            self._any_back = True
            for assignment in self.assignments.values():
                assignment.take_back(list(assignment.out))
            return [assignment for assignment in self.assignments.values() if assignment.back]

    def give_back(self, messages: Iterable[Message]) -> tuple[dict[Assignment, list[Position]], list[Message]]:
        """Mark the messages of a `nack` for redelivery; return the positions that the reader has to deliver again.

        Also return those that do not come again: acknowledged, given back before, or delivered by another consumer.
        """
        given: dict[Assignment, list[Position]] = {}
        others = list[Message]()
        with self.lock:
            self._any_back = True
            for message in messages:
                assignment, position = message.source, message.position
                mine = isinstance(assignment, Assignment) and assignment.deliveries is self
                if mine and not assignment.ended and position in assignment.out:
                    assignment.take_back([position])
                    given.setdefault(assignment, []).append(position)
                elif not mine or not (assignment.ended or position in assignment.back):
                    others.append(message)
            if not self.individual:  # the broker knows only positions, so all later messages are delivered again, too
                given = {a: [*positions, *filter(min(positions).__lt__, a.out)] for a, positions in given.items()}
            elif self._ordered:
                for message in self._fetched + self._set_aside:  # later messages, redelivered after the given ones
                    if message.source in given:
                        message.source.back.add(message.position)
            if self._ordered:
                self._drop({assignment.partition for assignment in given})
            for assignment, positions in given.items():
                assignment.take_back(positions)
            return given, others

    def stay(self, positions: Mapping[Partition, Position]) -> None:
        """Have the reader go back to `positions`, its positions before a seek that failed and may have moved it."""
        with self.lock:
            self._any_back = True
            if self._group is None:
                self.assignments.update({partition: Assignment(self, partition) for partition in positions})
            for partition in positions.keys() & self.assignments.keys():
                assignment = self.assignments[partition]
                if self._ordered:
                    assignment.back.add(positions[partition])
                else:  # a shared partition has no position: all unacknowledged messages are delivered again
                    assignment.take_back(list(assignment.out))
                    fetched = self._fetched + self._set_aside
                    assignment.back.update(m.position for m in fetched if m.source is assignment)
            if not self._ordered:
                self._drop(set(positions))

    def going_back(self) -> dict[Assignment, list[Position]]:
        """Return, for each assignment, the positions that the reader has to deliver again.

        The messages there cannot be acknowledged until `gone_back` is called. On an ordered partition the reader reads
        all messages after the first of these positions again, in order.
        """
        if not self._any_back:
            return {}
        with self.lock:
            returning = [assignment for assignment in self.assignments.values() if assignment.back]
            if self._ordered:
                for assignment in returning:
                    assignment.go_back()
                self._drop({assignment.partition for assignment in returning})
            return {assignment: sorted(assignment.back) for assignment in returning}

    def gone_back(self, returned: Mapping[Assignment, Sequence[Position]]) -> None:
        """Note that the reader will deliver again the messages that `going_back` has returned."""
        with self.lock:
            for assignment, positions in returned.items():
                if self.individual:
                    assignment.back.difference_update(positions)
                else:  # and everything behind the first one
                    assignment.back = set(filter(min(positions).__gt__, assignment.back))
            self._any_back = any(assignment.back for assignment in self.assignments.values())

    # --- moved and reassigned -------------------------------------------------------------------------------------

    def moved(self, partitions: Iterable[Partition]) -> None:
        """Forget the messages of partitions whose position a `seek` has changed."""
        with self.lock:
            moved = set(partitions)
            self._drop(moved)
            for partition in moved & self.assignments.keys():
                self.assignments[partition].forget()

    def assigned(self, partition: Partition) -> Assignment | None:
        if self._group is None:
            return None
        with self.lock:
            assignment = self.assignments[partition] = Assignment(self, partition)
        return assignment

    def left(self, partitions: Sequence[Partition]) -> tuple[Holder | None, list[Partition]]:
        """End the assignments of revoked or lost partitions.

        Return the open transaction that holds messages of some of them (None if there is none), and these partitions.
        """
        with self.lock:
            leaving = [self.assignments.pop(p) for p in partitions if p in self.assignments]
            for assignment in leaving:
                assignment.ended = True
            self._drop(set(partitions))
            still = {transaction for a in self.assignments.values() for transaction in a.held}
            self.doubts = {transaction: token for transaction, token in self.doubts.items() if transaction in still}
            if self._holder is None:
                return None, []
            name, holder = self._holder
            return holder(), [assignment.partition for assignment in leaving if name in assignment.held]


def _elsewhere(messages: list[Message], partitions: set[Partition]) -> list[Message]:
    return [m for m in messages if (m.topic, m.partition) not in partitions]


# --- acknowledging ---------------------------------------------------------------------------------------------------


def hold(
    transaction: Holder, connection: Connection, messages: Sequence[Message], up_to: bool
) -> list[tuple[object, dict[Partition, list[Position]]]]:
    """Check that a transaction may acknowledge these messages, and let no other one do so before its end.

    Return pairs of a reader's `ack_context()` and the positions delivered under it, for `Writer.ack`. If a check fails,
    raise its error before any message is changed.
    """
    wanted: dict[Assignment, list[Position]] = {}
    for _, run in groupby(messages, _source_of):  # in runs of one assignment, because there may be a million messages
        delivered = list(run)
        wanted.setdefault(_assignment_of(delivered[0], connection), []).extend([m.position for m in delivered])
    by_deliveries: dict[Deliveries, dict[Assignment, list[Position]]] = {}
    for assignment, positions in wanted.items():
        by_deliveries.setdefault(assignment.deliveries, {})[assignment] = positions
    by_context: dict[int, tuple[object, dict[Partition, list[Position]]]] = {}
    with ExitStack() as locks:
        for deliveries in sorted(by_deliveries, key=id):
            locks.enter_context(deliveries.lock)
        # At its end the transaction releases messages in each `Deliveries` in `_holds`, so `_holds` is filled first.
        transaction._holds.update({d: _check(transaction, d, mine, up_to) for d, mine in by_deliveries.items()})
        for deliveries, mine in by_deliveries.items():
            deliveries.hold(transaction, mine)
        for assignment, positions in (each for mine in by_deliveries.values() for each in mine.items()):
            _, acked = by_context.setdefault(id(assignment.context), (assignment.context, {}))
            acked[assignment.partition] = positions
    return list(by_context.values())


def _assignment_of(message: Message, connection: Connection) -> Assignment:
    assignment = message.source
    if not isinstance(assignment, Assignment):
        raise InvalidState(f"{message!r} was not read in a group (consumer(…, group=…)), so it cannot be acknowledged")
    if assignment.deliveries.connection is not connection:
        raise InvalidState(f"{message!r} was read by another bridge; acknowledge it in a transaction of that one")
    return assignment


def _check(
    transaction: Holder, deliveries: Deliveries, wanted: dict[Assignment, list[Position]], up_to: bool
) -> object:
    """Check that the transaction may acknowledge the wanted positions of one consumer; return this consumer.

    With `up_to`, first add all earlier positions of the partition that the program has. Raise `Conflict` if an
    assignment has ended, `InvalidState` if a position cannot be acknowledged.
    """
    consumer = deliveries.consumer()
    for assignment in wanted:
        if assignment.ended or consumer is None:
            topic, partition = assignment.partition
            text = f"{topic}[{partition}] left this consumer after the message was delivered; it comes again elsewhere"
            raise Conflict(text)
    deliveries.check_holder(transaction)
    for assignment, positions in wanted.items():
        if up_to and positions[0] in assignment.out:  # otherwise it is refused, and with it those before it
            wanted[assignment] = positions = [p for p in assignment.out if p <= positions[0]]
        if not deliveries.individual:
            _check_nothing_before(transaction, assignment)
        # Mostly the positions are those of all messages that are out, in order: then each is known to be valid.
        if len(assignment.out) != len(positions) or list(assignment.out) != positions:
            _check_positions(transaction, assignment, positions)
    assert consumer is not None
    return consumer


def _check_nothing_before(transaction: Holder, assignment: Assignment) -> None:
    """Raise `InvalidState` if earlier messages are given back or held by another transaction.

    The broker knows only positions, so acknowledging a later position would acknowledge these messages, too.
    """
    topic, number = assignment.partition
    if assignment.back:
        raise InvalidState(
            f"this broker only knows positions, and {min(assignment.back)} of {topic}[{number}] was given back and"
            " comes again with the next poll, and all later messages after it"
        )
    for name in assignment.held:
        if name != transaction.id:
            raise InvalidState(
                f"this broker only knows positions, and the outcome of transaction {name}, which acknowledged what"
                f" comes before this in {topic}[{number}], is not known yet; the next poll asks for it"
            )


def _check_positions(transaction: Holder, assignment: Assignment, positions: list[Position]) -> None:
    topic, number = assignment.partition
    out = assignment.out
    for position in positions:
        if position not in out:
            if position in assignment.held.get(transaction.id, ()):
                text = f"the message at {topic}[{number}] {position} is acknowledged in this transaction already"
                raise InvalidState(text)
            text = f"the message at {topic}[{number}] {position} is acknowledged already, or given back and comes again"
            raise InvalidState(text)
    if len(set(positions)) != len(positions):
        raise InvalidState(f"a message of {topic}[{number}] is in this acknowledgement twice")
    if not assignment.deliveries.individual:
        for expected, position in zip(out, positions, strict=False):
            if position != expected:
                raise InvalidState(
                    f"this broker only knows positions: {topic}[{number}] must be acknowledged in order, and {expected}"
                    f" comes before {position} (or use ack_up_to)"
                )
