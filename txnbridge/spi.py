"""The contract between the core and a backend.

A backend imports this module and `txnbridge.errors`, nothing else of ours. The core keeps, once for all backends:
states, guards, deadlines, retries, error wrapping, events, tokens, codecs, and which delivered message may be
acknowledged. A backend talks to its broker.

Rules for every method
- It ends by its deadline, and raises `DeadlineExceeded` if the broker did not answer. A call that may or may not have
  taken effect raises `OutcomeUnknown` only if its docstring says so.
- It raises errors of `txnbridge.errors`, with the client's own error as `__cause__`. Any other error counts as a bug.
- A `Writer` and a `Reader` are never called twice at once, but from changing threads. A `Broker`, an `Admin`, a
  `DecisionLog` and a `HalfStore` are called from any thread at any time.
- In the child of a fork the core calls nothing of the parent process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from txnbridge._background_task import BackgroundTask
from txnbridge._deadline import Deadline
from txnbridge._events import Emitter
from txnbridge._fair_semaphore import FairSemaphore
from txnbridge._messages import NO_HEADERS, Batch, Headers, Message, Position, encode_headers, encode_item
from txnbridge._plugins import hookimpl
from txnbridge._token import Decision, Outcome, Status, Token, TokenState
from txnbridge.capabilities import NATIVE, Capabilities, Capability, Level, Limits, Support, absent, emulated

__all__ = [
    "NATIVE",
    "NO_HEADERS",
    "Ack",
    "Admin",
    "Advice",
    "Backend",
    "BackgroundTask",
    "Batch",
    "Begin",
    "Broker",
    "Capabilities",
    "Capability",
    "Context",
    "Deadline",
    "Decision",
    "DecisionLog",
    "Emitter",
    "Evidence",
    "FairSemaphore",
    "GroupInfo",
    "GroupMember",
    "Half",
    "HalfMessage",
    "HalfStore",
    "Headers",
    "Identity",
    "Item",
    "Ledger",
    "LedgerClaim",
    "LedgerEntry",
    "LedgerValue",
    "Level",
    "Limits",
    "Message",
    "OpenTransaction",
    "Option",
    "Outcome",
    "Partition",
    "Position",
    "Publisher",
    "RawHeaders",
    "Reader",
    "ReaderListener",
    "Status",
    "Subscription",
    "Support",
    "Token",
    "TokenState",
    "TopicInfo",
    "Url",
    "Writer",
    "absent",
    "emulated",
    "encode_headers",
    "encode_item",
    "hookimpl",
]

Partition = tuple[str, int]  # topic and partition number
RawHeaders = Sequence[tuple[str, bytes | None]]
# One message of `send_many`: bytes are taken as they are, anything else goes through `encode_item` first.
Item = Any


# --- opening ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One typed option of a backend, given as URL query or by `connect(url, <backend>={...})`.

    `kind` is bool, int, float or str; `choices` bounds it; a secret's value never shows.
    """

    kind: type
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    secret: bool = False


@dataclass(frozen=True)
class Url:
    """A broker's address, taken apart; `path` keeps its leading slash if it has one."""

    scheme: str
    hosts: tuple[tuple[str, int | None], ...] = ()
    path: str = ""
    text: str = field(default="", repr=False)  # without secrets; for messages

    def __str__(self) -> str:
        return self.text


def _no_ledger(application: str, id: str) -> Ledger:
    raise NotImplementedError("whoever opened this broker gave it no ledgers")


@dataclass(frozen=True)
class Context:
    """The bridge's settings, and the core's services, for a backend that opens a broker."""

    bridge: str  # the bridge's name in events
    events: Emitter
    application: str
    timeout: float  # the bridge's default deadline in seconds; the broker's own transaction timeout follows from it
    hold: float | None
    create_topics: int | None  # partitions of a missing topic; 0: never create; None: the backend's own default
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # names with a dot: the client's own
    # Returns the ledger of any id in the decision log of an application: administrators and groups need other ids'
    # ones.
    ledger: Callable[[str, str], Ledger] = field(default=_no_ledger, repr=False)


class Backend(ABC):
    """A broker's adapter, found by its URL schemes. It is cheap to import: the client library is imported in `open`."""

    name: str
    schemes: tuple[str, ...]
    capabilities: Capabilities
    limits: Limits
    options: Mapping[str, Option]
    steps: tuple[str, ...] = ()  # the names of its own `step:` events

    def check_installed(self) -> None:
        """Raise `BackendMissing` without the client library. It connects to nothing: a broker may not run yet."""

    @abstractmethod
    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        """Connect. `options` are complete and typed.

        Raises `BackendMissing` without the client library, `BrokerUnavailable`, `AccessDenied`, `InvalidOption`.
        """


@dataclass(frozen=True)
class Identity:
    """The identity under which a bridge writes. `name` is the transactional id.

    `owned` is False for a name that the bridge made up for itself: no other process can hold it, so nothing has to be
    fenced. `host` describes this process to the owners that it fences.
    """

    name: str
    owned: bool
    application: str
    host: str


class Broker(ABC):
    """One open connection to one broker."""

    capabilities: Capabilities  # the backend's, without those that this cluster's settings or rights take away
    limits: Limits
    cluster: str  # the cluster's id, stable and unique

    @abstractmethod
    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        """Open an id and all its writers as one act.

        Fence every older owner, end its plain and unprepared transactions, and leave prepared ones alone.
        """

    @abstractmethod
    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        """Return a writer for one transaction that will be prepared. Raise `Fenced` if a newer owner exists."""

    @abstractmethod
    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        """Return a publisher; it gets a name only if `resume-sequence` is kept."""

    @abstractmethod
    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        """Start reading committed messages. Raise `NotFound` for a missing topic that may not be created."""

    @abstractmethod
    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """Commit a prepared transaction of any process; return the true outcome, also if it is not the wanted one.

        Safe to repeat. Raise `OutcomeUnknown` if the broker was asked and did not answer, `EvidenceLost` if the outcome
        can never be known.
        """

    @abstractmethod
    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """Abort a prepared transaction of any process; the rules of `commit`."""

    @abstractmethod
    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        """Return what became of a token's transaction, prepared or not. Decides nothing.

        Before it returns ABORTED because a deadline has passed, it records that: clocks may be set back.
        """

    @property
    @abstractmethod
    def admin(self) -> Admin: ...

    @abstractmethod
    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        """Return the log of this name, created at first need. Two processes that create it at once get one log."""

    def half_store(self) -> HalfStore | None:
        """Return the store of the broker's own half messages; None if it has none."""
        return None

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Close all connections. Never aborts a prepared transaction. Safe to repeat."""


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """One transaction, as its writer begins it."""

    transaction: str  # unique for ever
    deadline: Deadline
    prepare: bool
    hold: float | None  # seconds for which it may stay prepared after its deadline; None: as long as the broker allows


@dataclass(frozen=True)
class Evidence:
    """The backend's part of a token, as JSON values: it ends the transaction by this, or finds its outcome."""

    how: Mapping[str, Any]
    messages: int
    expires_at: int | None = None
    log: Mapping[str, Any] | None = None  # from `Ledger.begin`, if the ledger keeps the evidence


class Writer(ABC):
    """One identity at the broker that carries one transaction at a time.

    A writer whose client takes a message by one cheap call may offer that call: the core then calls
    `quick[topic](topic, value, key)` instead of `send` for messages without headers, partition and timestamp, and
    counts them in `messages`. If it raises an error of `not_taken` (such as a KeyError for a topic that is not there
    yet), nothing was taken: the core then calls `send` with the same message.
    """

    quick: Mapping[Any, Callable[..., object]] | None = None
    not_taken: tuple[type[Exception], ...] = ()
    messages: int = 0  # taken in the current transaction

    @abstractmethod
    def begin(self, begin: Begin) -> None:
        """Start a transaction, without a request if the broker allows it. Raise `Fenced`."""

    @abstractmethod
    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None:
        """Take one message. It may wait for room until the transaction's deadline, never longer.

        Raise `NotFound` for a topic or partition that does not exist, `InvalidOption` for a message over the limit:
        both leave the transaction as it was.
        """

    @abstractmethod
    def send_many(self, topic: str, items: Iterable[Item]) -> None:
        """Take many messages for one topic; the rules of `send`.

        Messages that were taken before an error stay taken, and `messages` counts them: the core names the item that
        failed, and allows only the abort. An item that is not bytes is as the user gave it: `encode_item(item)` makes
        (value, key, headers) of it.
        """

    @abstractmethod
    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Acknowledge delivered positions of a reader with this transaction.

        `context` is the result of the reader's `ack_context()` at their delivery. Raise `Conflict` as soon as the
        broker knows of a conflict; at the latest the commit raises it.
        """

    @abstractmethod
    def prepare(self, deadline: Deadline) -> None:
        """Make the transaction durable and independent of this writer. Raise as `commit` does."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """Return the evidence for a token of the current or last transaction, also behind a `reopen`. Never blocks."""

    @abstractmethod
    def commit(self, deadline: Deadline) -> None:
        """Return only after the broker has said "committed".

        Raise `TransactionAborted` (or a subclass) or `Fenced` if the commit certainly did not happen and never will,
        `BrokerUnavailable` if the broker was not asked yet (the core calls `abort` next), or `OutcomeUnknown`.
        """

    @abstractmethod
    def abort(self, deadline: Deadline) -> None:
        """Return when the transaction is certainly aborted. Raise `OutcomeUnknown` if that cannot be known."""

    @abstractmethod
    def reopen(self, deadline: Deadline) -> None:
        """Become usable again after an unknown outcome or a doubtful connection, or raise `Fenced`.

        This is no new opening of the id: it may not take the id back from a newer owner.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the writer. A prepared transaction lives on; an open one is aborted if that can be done at once."""


class Publisher(ABC):
    """Sends without a transaction: in order, idempotently, each message visible once it is stored."""

    @abstractmethod
    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> None:
        """Take one message; ignore it if its `sequence` is not above the last stored one of this name and topic.

        Raise `DeliveryFailed` if an earlier message could not be stored; nothing behind that one in its partition was
        stored either.
        """

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Return when all messages are stored. Raise `DeliveryFailed`."""

    @abstractmethod
    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        """Return the highest sequence stored under this name on this topic; None if there is none."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Flush and close the connections."""


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subscription:
    """Describes what a reader reads. Without a group it reads every partition and cannot acknowledge.

    `start` says where a group without positions begins: "earliest", "latest" or a timestamp in milliseconds.
    `sharing` is "partition", "message" or "key".
    """

    topics: tuple[str, ...]
    group: str | None = None
    start: str | int = "earliest"
    sharing: str = "partition"


class ReaderListener(Protocol):
    """The core's side of a reader; called on the thread that polls."""

    def assigned(self, partition: Partition) -> object:
        """Note that a partition was assigned. The result is the `source` of each of its messages until it leaves."""

    def revoking(self, partitions: Sequence[Partition]) -> None:
        """Note that partitions are about to leave; return when no transaction holds acknowledgements of them."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """Note that partitions have left already, so that no message of theirs can be acknowledged any more."""


class Reader(ABC):
    """Reads committed messages only, each partition in order."""

    # True if no message is lost when an exception from a signal handler ends a call, at any point. Any other reader is
    # closed behind such a call, and opened anew.
    resumes: ClassVar[bool] = False

    @abstractmethod
    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        """Return up to `max_messages` as soon as there is one, or an empty list at the deadline.

        Keys and values are bytes or None. Raise `PositionLost` if retention has passed a partition's position.
        """

    @abstractmethod
    def positions(self) -> dict[Partition, Position]:
        """Return the next position to read of each assigned partition."""

    @abstractmethod
    def seek(self, positions: Mapping[Partition, Position]) -> None:
        """Go on with the first committed message at or after each position; acknowledged messages are not read again.

        Raise `PositionLost` below retention.
        """

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        """Go back to messages that were delivered and have to be delivered again, as after an abort.

        A partition whose position is lost stays lost; a `seek`, by which the user chooses a position, ends that.
        """
        self.seek(positions)

    @abstractmethod
    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        """Go on, in every assigned partition, with the first message stamped at or after `timestamp`."""

    @abstractmethod
    def pause(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def resume(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Give delivered messages back, to be delivered again."""

    @abstractmethod
    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        """Return the number of messages (or positions, on some brokers) from the group to the end of each partition."""

    def group_lag(self, deadline: Deadline) -> int | None:
        """Return the sum of the lag over all partitions, also those of other members; None if it cannot be known."""
        return None

    @abstractmethod
    def ack_context(self) -> object:
        """Return a proof of the current assignment, for a writer's `ack`."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Leave the group at once, so that other members take over without waiting."""


# --- administration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicInfo:
    """One topic."""

    name: str
    partitions: int
    internal: bool = False
    retention_seconds: float | None = None
    retention_bytes: int | None = None


@dataclass(frozen=True)
class OpenTransaction:
    """One transaction that has not ended, as an administrator sees it.

    `transaction` is the argument of `Admin.end`: our own id if the broker knows it, else the broker's name for it.
    """

    transaction: str
    state: str  # "open", "prepared", or the broker's word for one that is ending
    owner: str = ""
    since: int | None = None
    expires_at: int | None = None
    partitions: tuple[Partition, ...] = ()
    groups: tuple[str, ...] = ()
    messages: int | None = None
    token: Token | None = None  # of a prepared transaction, if the broker can make it again
    transactional_id: str = ""  # empty if the broker does not know it


@dataclass(frozen=True)
class GroupMember:
    """One member of a group. `until`: the time at which it counts as dead without a heartbeat, if the broker tells."""

    name: str
    host: str
    partitions: tuple[Partition, ...] = ()
    until: int | None = None


@dataclass(frozen=True)
class GroupInfo:
    """One group: its members, its positions, and its lag, counted as its readers count it."""

    name: str
    members: tuple[GroupMember, ...]
    positions: Mapping[Partition, Position]
    lag: Mapping[Partition, int]


@dataclass(frozen=True)
class Advice:
    """One finding of the doctor: `level` is "ok", "warning" or "problem"; `remedy` says what to do."""

    level: str
    subject: str
    text: str
    remedy: str = ""


class Admin(ABC):
    """The work of an administrator: topics, groups, open transactions, the doctor."""

    @abstractmethod
    def create_topic(
        self,
        name: str,
        partitions: int,
        deadline: Deadline,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        """Create a topic; return False if it is there already with as many partitions. Raise `InvalidOption`."""

    @abstractmethod
    def topics(self, deadline: Deadline) -> list[TopicInfo]: ...

    @abstractmethod
    def delete_topic(self, name: str, deadline: Deadline) -> None:
        """Delete a topic. Raise `NotFound`, and `InvalidState` while an undecided transaction holds messages there."""

    @abstractmethod
    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        """Add partitions. Raise `NotFound`, and `InvalidOption` for fewer partitions than there are."""

    @abstractmethod
    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        """Return the readable range of each partition: the first position that is kept, and the end of decided ones.

        All below the second is decided, so the same messages are read between two positions below it at any time, until
        retention removes them. A transaction past its deadline holds the second back no longer than it holds readers.
        Raise `NotFound`.
        """

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Return for each topic an id that a later topic of the same name does not have.

        A missing topic is left out, and so is one whose id the broker does not tell.
        """
        return {}

    def groups(self, deadline: Deadline) -> dict[str, int]:
        """Return every group with its number of members."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def group(self, name: str, deadline: Deadline) -> GroupInfo:
        """Return one group. Raise `NotFound`."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def reset_group(
        self, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
    ) -> dict[Partition, Position]:
        """Set the positions of a group without members, in some topics or in all that it has read; return them.

        `to` is "earliest", "latest" or a timestamp in milliseconds. A member that only seemed dead cannot acknowledge
        what it read before. Raise `NotFound` for an unknown group, or a topic that the group has never read, and
        `InvalidState` while it has members or an undecided transaction holds acknowledgements of it.
        """
        raise NotImplementedError("declare group-admin absent, or provide this")

    @abstractmethod
    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        """Return the open and prepared transactions whose transactional id begins with `owners`."""

    @abstractmethod
    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End an open (ABORT only) or prepared transaction; return the outcome. Raise `NotFound`, `InvalidState`."""

    def repair(self, transaction: str, deadline: Deadline) -> str:
        """Finish what the broker left half done about a transaction; return what was done, as text."""
        from txnbridge.errors import NotSupported

        raise NotSupported("this broker leaves nothing half done that would need a repair")

    @abstractmethod
    def check(self, deadline: Deadline) -> list[Advice]:
        """Return the settings and states that weaken a promise or hold readers back."""


# --- decisions -------------------------------------------------------------------------------------------------------


class DecisionLog(ABC):
    """An ordered, durable log: one total order, plain appends, read without isolation, never compacted by key.

    `origin` is the position of every new log's first record, None if it differs: it tells a log that retention has
    emptied from a new one. `keeps` is the number of seconds for which a record surely stays, None if it stays until it
    is trimmed. `numbered`: positions are `(number,)` and count up by one, so a reader finds a long log's last records.
    """

    origin: Position | None = None
    keeps: float | None = None
    numbered: bool = False

    @abstractmethod
    def begin(self, deadline: Deadline) -> Position | None:
        """Return the position of the first record that is still there; None if there is none."""

    @abstractmethod
    def end(self, deadline: Deadline) -> Position | None:
        """Return the position of the last record; None if there is none."""

    @abstractmethod
    def append(self, record: bytes, deadline: Deadline) -> Position:
        """Store a record and return its position once it is durable.

        Raise `OutcomeUnknown` if it may or may not be stored; repeating it may store it twice, which is harmless.
        """

    @abstractmethod
    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterable[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`, both included; None means the log's own begin or end.

        Raise `PositionLost`, also on the way, if a record in between is gone.
        """

    @abstractmethod
    def trim(self, before: Position, deadline: Deadline) -> None:
        """Drop the records before a position, or as many of them as the broker can."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True)
class LedgerEntry:
    """One record of a ledger about a transaction: its kind ("prepare", "announce", "outcome", …) and its data."""

    kind: str
    transaction: str
    data: Mapping[str, Any]
    opening: str  # the opening that wrote it


@dataclass(frozen=True)
class Ack:
    """One acknowledged range of a group, as a claim carries it; `end` is the next position to read."""

    group: str
    partition: Partition
    first: Position
    end: Position
    # The position in the decision log that `Ledger.positions` returned with `first`.
    read_up_to: Position


@dataclass(frozen=True)
class LedgerClaim:
    """The claim that counts for a transaction. `opening` is the opening under which its owner made it."""

    decision: Decision
    data: Mapping[str, Any]
    opening: str | None


class Ledger(ABC):
    """The records of one transactional id in the decision log, so that a backend needs no log of its own.

    A backend whose broker keeps such evidence does not use it.
    """

    @abstractmethod
    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Open the id; return the opening's name. Records that older owners append from now on do not count."""

    @abstractmethod
    def open_behind(self, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Open the id if its newest opening is still `before` (None: it has none). Return whether it was."""

    @abstractmethod
    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name and data of the id's newest opening; None if it was never opened."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        """Return where the evidence about a transaction that begins now begins, for its `Evidence.log`.

        Raise `Fenced` if the id has a newer opening than this process's. If this process has not opened the id, nothing
        is fenced.
        """

    @abstractmethod
    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        """Append a record about a transaction. Raise `Fenced` if a newer opening is in front of it."""

    @abstractmethod
    def find(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any] | None = None) -> list[LedgerEntry]:
        """Return the counting records about a transaction, oldest first. Raise `EvidenceLost` if some may be gone.

        With `log`, the transaction's `Evidence.log`, only records behind that are read, else the whole log.
        """

    @abstractmethod
    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        """Return the counting records of one kind that a living transaction can still need, oldest first."""

    @abstractmethod
    def claim(
        self,
        transaction: str,
        decision: Decision,
        data: Mapping[str, Any],
        deadline: Deadline,
        *,
        log: Mapping[str, Any],
        acks: Sequence[Ack] = (),
    ) -> LedgerClaim:
        """Claim a transaction's outcome; return the claim that counts, whichever process made it.

        `log` is the transaction's `Evidence.log`. The first claim counts, with two exceptions. If this process has
        opened the id and the transaction is not prepared, a COMMIT is the owner's, and void behind a newer opening:
        `Fenced`. A COMMIT with `acks` is void if another transaction acknowledged on the same group and partition since
        `read_up_to`: `Conflict`. After both errors the transaction is still undecided, and a claim has to abort it.
        Raise `OutcomeUnknown` if the claim may or may not count (repeat it), `EvidenceLost` if that can never be known.
        """

    @abstractmethod
    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        """Return the claim that counts for a transaction; None while there is none. Raise `EvidenceLost`."""

    @abstractmethod
    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        """Return the last commit of each writer of the owner that committed last, oldest first.

        Who opens the id has to finish these: a writer finishes one commit before it claims the next, and an opener
        first finishes those of the owner before it. `"writer"`, text or a number, in a claim's data tells an owner's
        writers apart. Commits that no living transaction can need are left out.
        """

    @abstractmethod
    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        """Return the transaction that acknowledged last on each partition of a group, and the claim that decided it.

        A member that takes a partition over may have to finish that one. Transactions that no living one can need are
        left out.
        """

    @abstractmethod
    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        """Return the group's positions by all claims that count, and the position up to which the log was read.

        The second is the `Ack.read_up_to` of messages that are read from there on. A group's start is a claim, too: of
        a new transaction, with acknowledged ranges that end where they begin.
        """


class LedgerValue:
    """A small value in the decision log, changed by compare-and-set: the newest opening of a ledger of its own.

    The ledger's id names the value; no transaction uses that id.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, deadline: Deadline) -> Mapping[str, Any] | None:
        """Return the value; None if it was never written."""
        opening = self._ledger.newest_opening(deadline)
        return None if opening is None else opening[1]

    def update(
        self, change: Callable[[Mapping[str, Any] | None], Mapping[str, Any] | None], deadline: Deadline
    ) -> Mapping[str, Any] | None:
        """Replace the value by the result of `change`, which is called again if another process wrote first.

        `change` returns None to leave the value as it is. Return the value that is there then.
        """
        while True:
            name, value = self._ledger.newest_opening(deadline) or (None, None)
            changed = change(value)
            if changed is None:
                return value
            if self._ledger.open_behind(name, changed, deadline):
                return changed


# --- half messages ---------------------------------------------------------------------------------------------------


class HalfMessage(NamedTuple):
    """One half message, with the fields of `Writer.send`."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: RawHeaders
    partition: int | None = None
    timestamp: int | None = None


@dataclass(frozen=True)
class Half:
    """Messages that wait for the outcome of work outside the broker. Times are milliseconds since 1970."""

    group: str
    transaction: str  # unique for ever
    messages: Sequence[HalfMessage]
    check_at: int  # the first check-back; others follow while none is answered
    deadline_at: int  # until then no check may answer ABORT because it finds no record of the work
    checks: int = 0  # the number of check-backs so far
    how: Mapping[str, Any] = field(default_factory=dict)  # the store's own data, by which it ends the half


class HalfStore(ABC):
    """Half messages that a broker keeps by itself. Any thread may call."""

    @abstractmethod
    def put(self, half: Half, deadline: Deadline) -> Half:
        """Store all messages of a half, or none that could be published; return the half for `end`.

        Repeating it with the same transaction changes nothing. Raise `DeliveryFailed` if it certainly is not stored.
        """

    @abstractmethod
    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        """Publish a half or drop it, for good: the first decision counts. Return its outcome.

        UNDECIDED only postpones the next check-back; then the result is UNKNOWN, unless the half was ended before.
        Raise `OutcomeUnknown` and `BrokerUnavailable` if the decision may or may not count: repeat it.
        """

    @abstractmethod
    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        """Return halves that are due for a check-back, as soon as there is one; an empty list at the deadline.

        Each half is lent to one resolver for a while. A half with too many check-backs is parked instead.
        """

    def leave(self, group: str, deadline: Deadline) -> None:
        """Note that this process calls `checks` for a group no more, so that the broker asks other processes."""

    @abstractmethod
    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        """Return the halves with too many check-backs; they stay until an administrator ends or resumes them."""

    @abstractmethod
    def resume(self, half: Half, deadline: Deadline) -> None:
        """Start the check-backs of a parked half again. Raise `NotFound`."""
