"""Group commit: small transactions of many threads share one transaction of the broker.

A gathered transaction keeps its messages in memory. Its commit makes it a member of the next batch, and waits for it. A
thread of the bridge sends all messages of a batch in one transaction, the shared transaction, and commits that. Other
transactions gather meanwhile. The next batch begins at once if a single thread commits; otherwise it waits shortly for
the threads of the last one, which are about to commit again, so that not half of the threads wait for two batches.

| a transaction     | event                                               | then                                   |
|-------------------|-----------------------------------------------------|----------------------------------------|
| gathered          | it aborts, or its deadline passes                   | it is aborted, without any request     |
| gathered          | it grows, acknowledges, or sends to another topic   | it is promoted: it gets its own writer |
| gathered          | it commits                                          | it is a member of a batch              |
| member            | its deadline passes before the batch begins         | it is aborted, without any request     |
| member            | the shared transaction is committed                 | it is committed                        |
| member            | the outcome of the shared transaction is unknown    | it is unknown, with the shared token   |
| member            | the shared transaction is aborted                   | it is promoted, and commits alone      |

So acknowledgements are never shared (hazard H96), and a member that the broker refuses fails alone (hazard H97).
`Fenced`, an error of the transactional id, is true for all members.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from txnbridge import errors
from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline, next_within
from txnbridge._base.messages import encode_item
from txnbridge._base.token import State
from txnbridge._write.token_operations import Outcomes
from txnbridge._write.transaction import Transaction
from txnbridge._write.writers import KeptMessage, TakenWriter, Writers
from txnbridge.spi import Begin, Evidence, Partition, Position, Raw, RawHeaders, Writer

_log = logging.getLogger("txnbridge")

# A larger transaction gains nothing, because sending its messages takes longer than its commit.
_MEMBER_MESSAGES, _MEMBER_BYTES = 100, 16 << 10
# The size of a batch is limited, because its first member waits while the messages of all members are sent.
_BATCH_MESSAGES, _BATCH_BYTES = 5000, 1 << 20
# A message grows when a backend encodes its headers: as JSON to at most six times their size.
_ENCODED = 8
_MOST_TOPICS = 10_000
# A member with less time left commits alone, because a batch has to end by the earliest deadline of its members.
_LEAST_SECONDS = 1.0
# How long a batch waits for the threads of the last one, as a share of the time that the last one took.
# If threads could not wake in that time, it does not wait.
_COMPANY_SHARE, _LEAST_COMPANY = 0.125, 0.001


@dataclass(eq=False, repr=False)
class GroupCommit:
    """Gathers the small transactions of one bridge, and commits them in batches.

    Up to `beyond` open transactions, each new one gets a writer of its own and is not gathered.
    """

    _connection: Connection
    writers: Writers
    _outcomes: Outcomes
    _new_parameters: Callable[[], Begin]
    _beyond: int

    def __post_init__(self) -> None:
        self.checks = self._connection.timing.writer_checks
        self.least_seconds = min(_LEAST_SECONDS, self._connection.timeout / 2)
        limits = self._connection.broker.limits
        self.member_messages = min(_MEMBER_MESSAGES, limits.transaction_messages or _MEMBER_MESSAGES)
        self.member_bytes = min(_MEMBER_BYTES, (limits.message_bytes or 1 << 62) // _ENCODED)
        self._batch_messages = min(_BATCH_MESSAGES, limits.transaction_messages or _BATCH_MESSAGES)
        self._batch_bytes = min(_BATCH_BYTES, limits.transaction_bytes or _BATCH_BYTES)
        self._joined: SimpleQueue[Member | None] = SimpleQueue()  # None asks the thread to end
        self._role: list[None] = [None]  # empty while a thread commits batches: it has removed the only entry
        self._expected = 0  # the number of members that joined for the last batch, or while it was being committed
        self._expected_until = 0.0  # the time of `time.monotonic` until which the next batch waits for as many members
        self._taken_at: dict[tuple[str, int | None], float] = {}  # when a writer took a message for a topic's partition

    def take(self, parameters: Begin) -> TakenWriter:
        """Return a new transaction's writer: one that keeps messages for group commit, or a broker's if few run."""
        self.writers.clear_abandoned(parameters.deadline)
        transactions = self.writers.open_transactions
        try:
            transactions.add(parameters.transaction)
            if len(transactions) > self._beyond:
                return Member(self, parameters)
            return self.writers.take(parameters)
        except BaseException:  # perhaps from a signal handler, before the writers know the transaction
            transactions.discard(parameters.transaction)
            raise

    def gather(self, parameters: Begin) -> Member | None:
        """Return a writer that keeps messages in memory for a group commit; None if too few transactions are open."""
        transactions = self.writers.open_transactions
        if self.writers.has_abandoned or len(transactions) < self._beyond:
            return None
        try:
            transactions.add(parameters.transaction)
            return Member(self, parameters)
        except BaseException:  # perhaps from a signal handler
            transactions.discard(parameters.transaction)
            raise

    def close(self) -> None:
        """Ask the committing thread to end, after the batches of transactions that wait for their commit."""
        self._joined.put(None)

    # --- topics ---------------------------------------------------------------------------------------------------

    def takes(self, topic: str, partition: int | None) -> bool:
        """Return whether a writer has sent to this topic and partition lately: then group commit may keep a message."""
        return time.monotonic() - self._taken_at.get((topic, partition), 0.0) < self._connection.timing.topic_taken

    def note(self, places: Iterable[tuple[str, int | None]]) -> None:
        if len(self._taken_at) > _MOST_TOPICS:
            self._taken_at.clear()
        self._taken_at.update(dict.fromkeys(places, time.monotonic()))

    # --- batches --------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Return whether a thread commits batches. It may end at any time; the next transaction starts another."""
        return not self._role

    def join(self, member: Member) -> None:
        """Let a transaction be committed with the next batch; start the thread that commits if there is none."""
        self._joined.put(member)
        if self._role:
            # The new thread takes the role itself: a signal handler's exception may end this call at any point.
            threading.Thread(
                target=_commit_batches,
                args=(weakref.ref(self), self._joined, self._role),
                name=f"txnbridge group commit {self._connection.name}",
                daemon=True,
            ).start()

    def commit_batch(self, first: Member) -> None:
        """Commit the waiting transactions from `first` on in one transaction of the broker; tell them the outcome."""
        members: list[Member] = []
        shared: SharedTransaction | None = None
        error: BaseException | None = None
        began_at = time.monotonic()
        try:
            parameters = self._new_parameters()
            taken = self.writers.take(parameters, running=True)
            try:
                self._gather(first, members)
                for member in members:
                    parameters.deadline.shorten(member.parameters.deadline.at)
                if members:
                    taken.start()
            except BaseException:
                taken.give_back(sound=False)
                raise
            if not members:  # the first member has gone away
                return taken.give_back(sound=True)
            shared = SharedTransaction(self._connection, taken, self._outcomes, members)
            self._commit(shared, members)
        except BaseException as caught:
            error = caught
            if not members:
                self._gather(first, members)
            self._taken_at.clear()  # a topic may refuse messages by now
        finally:
            now = time.monotonic()
            patience = _COMPANY_SHARE * (now - began_at)
            self._expected = len(members) + self._joined.qsize()
            self._expected_until = now + patience if patience >= _LEAST_COMPANY else now
            for member in members:
                member.end(shared, error)

    def _gather(self, first: Member, members: list[Member]) -> None:
        """Add waiting transactions, in their order after `first`, to the batch `members`, while the batch has room."""
        messages, size = self._batch_messages, self._batch_bytes
        member: Member | None = first
        with suppress(Empty):
            while member is not None:
                if member.reserve(members):
                    members.append(member)
                    messages -= len(member.kept)
                    size -= member.bytes
                if messages < self.member_messages or size < self.member_bytes:
                    return
                left = self._expected_until - time.monotonic() if len(members) < self._expected else 0.0
                member = next_within(self._joined, left)
            self._joined.put(None)  # the thread is to end after this batch

    def _commit(self, shared: SharedTransaction, members: Sequence[Member]) -> None:
        places = set()
        with shared:
            for member in members:
                shared.separate()
                for message in member.kept:
                    shared._write(*message)
                    places.add((message.topic, message.partition))
        self.note(places)


def _commit_batches(reference: weakref.ref[GroupCommit], joined: SimpleQueue[Member | None], role: list[None]) -> None:
    """Commit batches until the bridge is closed or idle; do nothing if another thread has taken `role`'s only entry."""
    while True:
        try:
            role.pop()
        except IndexError:  # another thread was quicker
            return
        try:
            _commit_until_idle(reference, joined)
        finally:
            role.append(None)
        # A member may have joined before the role was given back. Then either this thread or the member's takes it.
        if joined.empty():
            return


def _commit_until_idle(reference: weakref.ref[GroupCommit], joined: SimpleQueue[Member | None]) -> None:
    """Commit batches until the bridge is closed or idle. An idle thread keeps no bridge from garbage collection."""
    while True:
        try:
            first = next_within(joined, Connection.timing.group_idle)
        except Empty:
            return
        if first is None:
            return
        group = reference()
        if group is not None:  # the member refers to it
            group.commit_batch(first)
        del first, group


class SharedTransaction(Transaction):
    """The transaction in which the messages of all members of a batch are committed."""

    __slots__ = ("_members", "in_doubt")

    def __init__(
        self, connection: Connection, taken: TakenWriter, outcomes: Outcomes, members: Sequence[Member]
    ) -> None:
        super().__init__(connection, taken, outcomes, None)
        self._began_at = None  # each member emits the event of its own end
        self._members = [member.parameters.transaction for member in members]
        self.in_doubt = False  # whether the commit was requested and its outcome is unknown

    def separate(self) -> None:
        self._writer.separate()

    def _commit_step(self) -> AbstractContextManager[object]:
        return self._events.step("group.commit", self.id, members=self._members)

    def _settle(self, error: errors.OutcomeUnknown) -> None:
        """Leave an unknown outcome to the batch's transactions: each asks by its own deadline, and no batch waits."""
        self._end_unknown()
        raise error

    def _end_unknown(self) -> None:
        self.in_doubt = self._state is State.COMMITTING
        super()._end_unknown()


class _Quick(dict[Any, Callable[..., object]]):
    """Maps a topic to the `quick` call of a transaction's own writer; empty while the transaction has none."""

    __slots__ = ("_member",)

    def __init__(self, member: Member) -> None:
        self._member = member

    def __missing__(self, topic: Any) -> Callable[..., object]:
        writer = self._member.writer
        if writer is None or writer.quick is None:
            raise KeyError(topic)
        return writer.quick[topic]


class Member(TakenWriter, Writer):
    """The writer of a transaction that shares its commit with others: it gathers the messages in memory.

    `writer`, a writer at the broker, is None until the transaction needs one of its own (it is promoted).
    """

    def __init__(self, group: GroupCommit, parameters: Begin) -> None:
        super().__init__(group.writers, parameters, None)
        self.kept: list[KeptMessage] = []
        self.bytes = 0
        self._group = group
        self._reserved_by: dict[None, object] = {}  # by the only key: a batch's members, or this transaction itself
        self._over = False  # whether the batch has ended
        self._ended = threading.Lock()  # released when the batch has ended
        self._ended.acquire()
        self._shared: SharedTransaction | None = None  # that of the batch, once the batch has ended
        self._error: BaseException | None = None  # the error because of which the batch was not committed
        self._joined = False
        self._withdrawn = False  # whether it has left a batch before its begin, and has to be committed alone
        self._on_end: Callable[[], object] | None = None  # called when the batch has ended

    # --- as a writer ------------------------------------------------------------------------------------------------

    @property
    def interface(self) -> Writer:
        return self

    @property
    def quick(self) -> Mapping[Any, Callable[..., object]]:  # type: ignore[override]
        return _Quick(self)

    @property
    def not_taken(self) -> tuple[type[Exception], ...]:  # type: ignore[override]
        return (KeyError, TypeError, *(() if self.writer is None else self.writer.not_taken))

    @property
    def messages(self) -> int:
        return len(self.kept) if self.writer is None else self.writer.messages

    @messages.setter
    def messages(self, count: int) -> None:
        assert self.writer is not None  # no call of `quick` has succeeded before
        self.writer.messages = count

    def begin(self, begin: Begin) -> None:
        raise errors.InvalidState("a gathered transaction begins when it is made")

    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        if self.writer is None and self.keep(KeptMessage(topic, value, key, headers, partition, timestamp)):
            return
        self._promoted().send(topic, value, key, headers, partition, timestamp)
        self._group.note([(topic, partition)])

    def keep(self, message: KeptMessage) -> bool:
        if self.writer is not None:
            return False
        topic, value, key, headers, partition, timestamp = message
        size = (len(value) if value else 0) + (len(key) if key else 0) + (_size(headers) if headers else 0)
        if (
            self.bytes + size > self._group.member_bytes
            or len(self.kept) >= self._group.member_messages
            or timestamp is not None
            or value == b""
            or not self._group.takes(topic, partition)
        ):
            return False
        self.kept.append(message)
        self.bytes += size
        return True

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        if self.writer is None and not (isinstance(items, Sized) and len(items) > self._group.member_messages):
            items = iter(items)
            for item in items:
                value, key, headers = encode_item(item)
                self.send(topic, value, key, headers, None, None)
                if self.writer is not None:
                    break
            else:
                return
        self._promoted().send_many(topic, items)

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        self._promoted().ack(context, positions)

    def evidence(self) -> Evidence:
        assert self.writer is not None
        return self.writer.evidence()

    def abort(self, deadline: Deadline) -> None:
        if self.writer is not None:
            self.writer.abort(deadline)
        elif (state := self.state_after_interrupt()) is not State.ABORTED:  # a cancelled task has left it in its batch
            text = f"the commit of transaction {self.parameters.transaction} had begun; it is {state.value}"
            raise errors.OutcomeUnknown(text, token=None if self.token is None else str(self.token))

    def reopen(self, deadline: Deadline) -> None:
        raise errors.InvalidState("a gathered transaction has no writer to reopen")

    def close(self) -> None:
        pass

    def _promoted(self) -> Writer:
        """Return the transaction's own writer at the broker; first take one and send what is in memory, if needed."""
        if self.writer is not None:
            return self.writer
        try:
            own = self._writers.take(self.parameters, running=True)
            try:
                own.start()
                self._send_kept(own.interface)
            except BaseException:
                own.give_back(sound=False)
                raise
        except BaseException:
            self._writers.open_transactions.add(self.parameters.transaction)  # it has not ended
            raise
        self.place, self.open, self.writer = own.place, own.open, own.writer
        own.writer = None
        self.kept = []
        assert self.writer is not None
        return self.writer

    def _send_kept(self, writer: Writer) -> None:
        try:
            for message in self.kept:
                writer.send(*message)
        except errors.UsageError as error:  # `send` has taken the message before
            raise errors.DeliveryFailed(f"transaction {self.parameters.transaction} was aborted: {error}") from error
        self._group.note((message.topic, message.partition) for message in self.kept)

    # --- as the writer taken by a transaction -------------------------------------------------------------------------

    def start(self) -> None:
        """Send no request: the transaction begins at the broker with its batch, or once it has a writer of its own."""

    def commit(self, deadline: Deadline) -> None:
        """Commit the transaction in a batch; alone if it has its own writer, or if the batch was aborted."""
        if self.writer is None:
            if deadline.expired and not self._joined:
                text = f"transaction {self.parameters.transaction} was not ended by its deadline"
                raise errors.TransactionTimedOut(text)
            if (self._joined or self._may_join) and self._commit_in_batch(deadline):
                return
        self._promoted()
        self.open = False
        super().commit(deadline)

    @property
    def _may_join(self) -> bool:
        late = self.parameters.deadline.left() < self._group.least_seconds
        return not (late or self._withdrawn or self._writers.loses_answers)

    def join_from_loop(self, on_end: Callable[[], object]) -> bool:
        """Join the next batch, whose end calls `on_end` in its thread; return False if `commit` has to be called.

        Then `commit` only waits for that end. An event loop may call this.
        """
        if self.writer is not None or not self._may_join or not self._group.is_running:
            return False
        self._on_end = on_end
        self._joined = True
        try:
            self._group.join(self)
        except RuntimeError:  # no thread can be started
            return not self.withdraw()
        return True

    def withdraw(self) -> bool:
        """Leave the next batch of group commit, joined by `join_from_loop`; return False if the batch has begun."""
        if not self.reserve(self):
            return False
        self._joined, self._withdrawn = False, True
        return True

    @property
    def is_committed(self) -> bool:
        """Return whether the batch has ended, and is committed: then `commit` neither waits nor asks the broker."""
        return self._over and self._shared is not None and self._shared.state is State.COMMITTED

    def _commit_in_batch(self, deadline: Deadline) -> bool:
        """Commit in a batch. Return whether this is done; False if the transaction has to be committed alone.

        Raise `OutcomeUnknown` or `Fenced` if this is true for all members of the batch, and `DeadlineExceeded` if the
        deadline passes before the batch begins.
        """
        try:
            if not self._joined:
                self._group.join(self)
        except RuntimeError:  # no thread can be started
            if self.reserve(self):
                return False
        self._wait(deadline)
        if self._shared is not None and self._shared.state is State.COMMITTED:
            return True
        if isinstance(self._error, errors.Fenced) or self.token is not None:
            error = copy.copy(self._error) if isinstance(self._error, errors.TxnBridgeError) else None
            raise error or errors.OutcomeUnknown("the shared transaction's commit was interrupted") from self._error
        return False

    def _wait(self, deadline: Deadline) -> None:
        """Wait for the end of the batch, which comes by its deadline, or withdraw at the transaction's deadline."""
        while not self._over:
            self._ended.acquire(timeout=min(max(deadline.left(), 0.01), self._group.checks))
            if deadline.expired and self.reserve(self):
                deadline.check("waiting for a writer")

    def reserve(self, by: object) -> bool:
        """Reserve this transaction for a batch or for its own thread, which then ends it. Return whether `by` has it.

        `by` is the list of the batch's members, or this transaction for its own thread. The first caller gets it. The
        same caller may call again, because a signal handler's exception may end the thread's call after it had effect.
        """
        return self._reserved_by.setdefault(None, by) is by

    def end(self, shared: SharedTransaction | None, error: BaseException | None) -> None:
        """Note how this transaction's batch has ended, in `shared` or by `error`; wake the transaction's thread."""
        self._shared, self._error = shared, error
        if shared is not None and shared.in_doubt:
            self.token = shared.token
        self._over = True
        self._ended.release()
        if self._on_end is not None:
            self._on_end()

    def state_after_interrupt(self) -> State:
        if self.writer is not None:
            return State.UNKNOWN
        if not self.reserve(self):
            self._wait(self.parameters.deadline)
        if self._shared is not None and self._shared.state is State.COMMITTED:
            return State.COMMITTED
        return State.ABORTED if self.token is None else State.UNKNOWN

    def give_back(self, sound: bool) -> None:
        self.kept = []
        if self.writer is None:
            self._writers.open_transactions.discard(self.parameters.transaction)
        else:
            super().give_back(sound)

    def __del__(self) -> None:
        if hasattr(self, "parameters"):
            self._writers.open_transactions.discard(self.parameters.transaction)
        super().__del__()


def _size(headers: RawHeaders) -> int:
    """Return the size of the headers, or, if some broker may refuse them, a number above every limit."""
    names = {name for name, _ in headers}
    if len(names) < len(headers) or "" in names:
        return 1 << 62
    return sum(len(name) * 4 + (len(value) if value is not None else 1 << 62) for name, value in headers)
