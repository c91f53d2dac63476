"""What a backend provides, and what the core does for it.

A backend imports this module and `txnbridge.errors`, nothing else of ours. The core keeps, once for all backends:
states, guards, deadlines, retries, error wrapping, events, tokens, codecs, and which delivered message may be
acknowledged. A backend talks to its broker.

Rules for every method
- It ends by its deadline, with `DeadlineExceeded` if the broker did not answer; a call that may or may not have taken
  effect raises `OutcomeUnknown` only where its docstring says so.
- It raises errors of `txnbridge.errors`, the client's own error as `__cause__`. Anything else counts as a bug.
- A `Writer` and a `Reader` are never called twice at once, but from changing threads. A `Broker`, an `Admin`, a
  `DecisionLog` and a `HalfStore` are called from any thread at any time.
- After a fork nothing of the parent's is called in the child.
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
    """What the core tells a backend when it opens a broker."""

    bridge: str  # the bridge's name in events
    events: Emitter
    application: str
    timeout: float  # the bridge's default deadline in seconds; the broker's own transaction timeout follows from it
    hold: float | None
    create_topics: int | None  # partitions of a missing topic; 0: never create; None: the backend's own default
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # names with a dot: the client's own
    # The ledger of any id, in the decision log of an application: what an administrator and a group need.
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
    """Who writes. `name` is the transactional id; `owned` is False for a name that the bridge made up for itself,
    which nobody else can hold and nothing has to fence. `host` describes this process to those it fences."""

    name: str
    owned: bool
    application: str
    host: str


class Broker(ABC):
    """One open connection to one broker."""

    capabilities: Capabilities  # the backend's, less what this cluster's settings or rights take away
    limits: Limits
    cluster: str  # the cluster's id, stable and unique

    @abstractmethod
    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        """Open an id and all its writers as one act.

        Fences every older owner, ends its plain and unprepared transactions, leaves prepared ones alone.
        """

    @abstractmethod
    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        """A writer for one transaction that will be prepared. Raises `Fenced` if a newer owner exists."""

    @abstractmethod
    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        """Sends without a transaction; with a name where `resume-sequence` is kept."""

    @abstractmethod
    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        """Start reading committed messages. Raises `NotFound` for a missing topic that may not be created."""

    @abstractmethod
    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """Commit a prepared transaction from anywhere; the true outcome, also when it is not the one asked for.

        Safe to repeat. Raises `OutcomeUnknown` if it was asked and not answered, `EvidenceLost` if nobody can tell.
        """

    @abstractmethod
    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """As `commit`, with the other decision."""

    @abstractmethod
    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        """What became of a token, prepared or not.

        It decides nothing. Before ABORTED is said because a deadline has passed, that is recorded: clocks are set back.
        """

    @property
    @abstractmethod
    def admin(self) -> Admin: ...

    @abstractmethod
    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        """The log of this name, created at first need. Two processes may create it at once: it is one log."""

    def half_store(self) -> HalfStore | None:
        """Half messages of the broker's own; None where it has none."""
        return None

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Let go of everything. Never aborts what is prepared. Safe to repeat."""


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """One transaction as its writer is told of it."""

    transaction: str  # unique for ever
    deadline: Deadline
    prepare: bool
    hold: float | None  # seconds that a prepared one may live after its deadline; None: as long as the broker allows


@dataclass(frozen=True)
class Evidence:
    """What a token needs of the backend: how to end the transaction or ask about it, as JSON values."""

    how: Mapping[str, Any]
    messages: int
    expires_at: int | None = None
    log: Mapping[str, Any] | None = None  # what the ledger's `begin` said, where the ledger keeps the evidence


class Writer(ABC):
    """One identity at the broker that carries one transaction at a time.

    A writer whose client takes a message by a call that costs little more than ours may offer that call: the core then
    calls `quick[topic](topic, value, key)` instead of `send` for messages without headers, partition and timestamp, and
    counts them in `messages`. If it raises one of `not_taken` (among them what is raised for a topic that is not
    there yet, or is no text), nothing was taken, and `send` with the same message does it or says why.
    """

    quick: Mapping[Any, Callable[..., object]] | None = None
    not_taken: tuple[type[Exception], ...] = ()
    messages: int = 0  # taken in the current transaction

    @abstractmethod
    def begin(self, begin: Begin) -> None:
        """Start a transaction. Local where the broker allows it. Raises `Fenced`."""

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
        """Take one message. May block for room until the transaction's deadline, never longer.

        Raises `NotFound` for a topic or partition that does not exist, `InvalidOption` for a message over the limit:
        both leave the transaction as it was.
        """

    @abstractmethod
    def send_many(self, topic: str, items: Iterable[Item]) -> None:
        """Take many messages for one topic; the same rules. What was taken before an error stays taken, and `messages`
        counts it: the core then names the item, and lets the transaction only abort.

        An item that is not bytes is what the user gave: `encode_item(item)` makes (value, key, headers) of it.
        """

    @abstractmethod
    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Acknowledge delivered positions of a reader with this transaction.

        `context` is what the reader's `ack_context()` said when they were delivered. Raises `Conflict` as soon as the
        broker knows of one; at the latest the commit does.
        """

    @abstractmethod
    def prepare(self, deadline: Deadline) -> None:
        """Make the transaction durable and independent of this writer. Raises what `commit` raises."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """What a token of the current (or just ended) transaction holds; true also after a `reopen`. Never blocks."""

    @abstractmethod
    def commit(self, deadline: Deadline) -> None:
        """Return only after the broker has said "committed".

        Raises `TransactionAborted` (or a subclass) or `Fenced` if it certainly did not happen and never will,
        `BrokerUnavailable` if it was not asked yet (`abort` comes next), or `OutcomeUnknown`.
        """

    @abstractmethod
    def abort(self, deadline: Deadline) -> None:
        """Return when the transaction is certainly aborted, by whomever. Raises `OutcomeUnknown` if it cannot tell."""

    @abstractmethod
    def reopen(self, deadline: Deadline) -> None:
        """After an unknown outcome or a doubtful connection: be as good as new, or raise `Fenced`.

        It is no opening of the id: it may not take the id back from a newer owner.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go. A prepared transaction lives on; an open plain one is aborted if that can be done at once."""


class Publisher(ABC):
    """Sends without a transaction: in order, idempotent, each visible once stored."""

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
        """Take one message. With a `sequence` not above the last stored one of this name and topic: a silent no-op.

        Raises `DeliveryFailed` if an earlier message could not be stored; nothing after it in its partition was either.
        """

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Return when all is stored. Raises `DeliveryFailed`."""

    @abstractmethod
    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        """The highest sequence stored under this name on this topic; None if there is none."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Flush and let go."""


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subscription:
    """What a reader reads. Without a group it reads every partition and cannot acknowledge.

    `start` is "earliest", "latest" or a timestamp in milliseconds: where a group begins that has never read.
    `sharing` is "partition", "message" or "key".
    """

    topics: tuple[str, ...]
    group: str | None = None
    start: str | int = "earliest"
    sharing: str = "partition"


class ReaderListener(Protocol):
    """The core's side of a reader; called on the thread that polls."""

    def assigned(self, partition: Partition) -> object:
        """A partition came. The result goes as `source` into each of its messages until it leaves."""

    def revoking(self, partitions: Sequence[Partition]) -> None:
        """Partitions are about to leave. Returns when no transaction holds their acknowledgements any more."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """Partitions have left already; nothing of theirs can be acknowledged any more."""


class Reader(ABC):
    """Reads committed messages only, each partition in order."""

    # Whether a call that an exception from a signal handler ended, at whatever point, has lost nothing, and the next
    # one goes on. Any other reader is closed behind such a call, and opened anew.
    resumes: ClassVar[bool] = False

    @abstractmethod
    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        """Up to `max_messages`, as soon as there is one; an empty list when the deadline passes first.

        Keys and values are bytes or None. Raises `PositionLost` if retention has passed a partition's position.
        """

    @abstractmethod
    def positions(self) -> dict[Partition, Position]:
        """The next position to read of each assigned partition."""

    @abstractmethod
    def seek(self, positions: Mapping[Partition, Position]) -> None:
        """Go on from the first committed message at or after each position; what was acknowledged is not read again.

        Raises `PositionLost` below retention.
        """

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        """Go back to what was delivered before and comes again, as after an abort.

        Unlike `seek`, by which a user says where to go on, it leaves a partition lost whose position is lost.
        """
        self.seek(positions)

    @abstractmethod
    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        """Every assigned partition: go on from the first message stamped at or after `timestamp`."""

    @abstractmethod
    def pause(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def resume(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Give delivered messages back, to be delivered again."""

    @abstractmethod
    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        """Messages (or positions, where the broker counts those) between the group and the end of each partition."""

    def group_lag(self, deadline: Deadline) -> int | None:
        """The sum of that over all partitions, also those of other members; None where it cannot be told."""
        return None

    @abstractmethod
    def ack_context(self) -> object:
        """Proof of the current assignment, to go with acknowledgements into a writer."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Leave the group at once, so that others take over without waiting."""


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

    `transaction` is what `Admin.end` takes: its own id where the broker knows it, else the broker's name for it.
    """

    transaction: str
    state: str  # "open", "prepared", or what the broker calls it while it ends
    owner: str = ""
    since: int | None = None
    expires_at: int | None = None
    partitions: tuple[Partition, ...] = ()
    groups: tuple[str, ...] = ()
    messages: int | None = None
    token: Token | None = None  # a prepared one's, where the broker can make it again
    transactional_id: str = ""  # empty where the broker does not know it


@dataclass(frozen=True)
class GroupMember:
    """One member of a group; `until` is when it counts as gone unless it is heard of again, where the broker tells."""

    name: str
    host: str
    partitions: tuple[Partition, ...] = ()
    until: int | None = None


@dataclass(frozen=True)
class GroupInfo:
    """One group: who is in it, where it stands, and how far that is from the end, as its readers count it."""

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
    """What an administrator does."""

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
        """Create a topic; False if it was there already with as many partitions. Raises `InvalidOption`."""

    @abstractmethod
    def topics(self, deadline: Deadline) -> list[TopicInfo]: ...

    @abstractmethod
    def delete_topic(self, name: str, deadline: Deadline) -> None:
        """Raises `NotFound`, and `InvalidState` while an undecided transaction holds messages there."""

    @abstractmethod
    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        """Raises `NotFound`, and `InvalidOption` for fewer partitions than there are."""

    @abstractmethod
    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        """What can be read of each partition: the first position that is kept, and where readers come to now.

        Everything below the second is decided, so between two positions below it the same messages are read at any
        time, until retention removes them. A transaction past its deadline holds it back no longer than a reader.
        Raises `NotFound`.
        """

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Return for each topic an id that one made later under the same name does not have.

        A topic that is missing, or of which the broker tells none, is absent.
        """
        return {}

    def groups(self, deadline: Deadline) -> dict[str, int]:
        """Every group and how many members it has."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def group(self, name: str, deadline: Deadline) -> GroupInfo:
        """One group. Raises `NotFound`."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def reset_group(
        self, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
    ) -> dict[Partition, Position]:
        """Let a group without members go on elsewhere, in some topics or in all that it has read; where that is.

        `to` is "earliest", "latest" or a timestamp in milliseconds. What a member that is taken for dead had read it
        cannot acknowledge any more. Raises `NotFound` for a group, or a topic that the group has never read, and
        `InvalidState` while it has members or an undecided transaction holds acknowledgements of it.
        """
        raise NotImplementedError("declare group-admin absent, or provide this")

    @abstractmethod
    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        """Every open and prepared transaction whose transactional id begins with `owners`."""

    @abstractmethod
    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End an open (ABORT only) or prepared transaction; the true outcome. Raises `NotFound`, `InvalidState`."""

    def repair(self, transaction: str, deadline: Deadline) -> str:
        """Mend what the broker left half done about a transaction, and say what was done."""
        from txnbridge.errors import NotSupported

        raise NotSupported("this broker leaves nothing half done that would need a repair")

    @abstractmethod
    def check(self, deadline: Deadline) -> list[Advice]:
        """Settings and states that weaken a promise or hold readers back."""


# --- decisions -------------------------------------------------------------------------------------------------------


class DecisionLog(ABC):
    """An ordered, durable log: one total order, plain appends, read without isolation, never compacted by key.

    `origin` is where every new log's first record stands, None if that cannot be known: by it a log that retention has
    emptied is told from a new one. `keeps` is for how many seconds a record surely stays, None if until it is trimmed.
    `numbered`: positions are `(number,)`, one more for each record, so that a reader of a long log finds its last ones.
    """

    origin: Position | None = None
    keeps: float | None = None
    numbered: bool = False

    @abstractmethod
    def begin(self, deadline: Deadline) -> Position | None:
        """The position of the first record that is still there; None if there is none."""

    @abstractmethod
    def end(self, deadline: Deadline) -> Position | None:
        """The position of the last record; None if there is none."""

    @abstractmethod
    def append(self, record: bytes, deadline: Deadline) -> Position:
        """Store a record and return its position when it is durable.

        Raises `OutcomeUnknown` if it may or may not be stored; repeating it may store it twice, which is harmless.
        """

    @abstractmethod
    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterable[tuple[Position, bytes]]:
        """Every record from `first` to `last`, both included; None means the log's own begin or end.

        Raises `PositionLost`, also on the way, if a record in between is gone.
        """

    @abstractmethod
    def trim(self, before: Position, deadline: Deadline) -> None:
        """Drop the records before a position, or as many of them as the broker can."""

    def close(self) -> None:
        """Let go."""


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
    # What `Ledger.positions` said when it gave `first` as the group's position: a position in the decision log.
    read_up_to: Position


@dataclass(frozen=True)
class LedgerClaim:
    """The claim that counts for a transaction; `opening` is the one under which its owner made it."""

    decision: Decision
    data: Mapping[str, Any]
    opening: str | None


class Ledger(ABC):
    """What the core keeps in the decision log for one transactional id, so that a backend needs no log of its own.

    A backend that has such evidence natively ignores it.
    """

    @abstractmethod
    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Append "this id is opened"; returns the opening's own id. Everything older stops counting."""

    @abstractmethod
    def open_behind(self, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Open the id if its newest opening is still `before` (None: it has none). Return whether it was."""

    @abstractmethod
    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        """The newest opening of the id and its data; None if it was never opened."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        """Where the evidence about a transaction that begins now begins; its `Evidence.log`.

        Raises `Fenced` if the id has a newer opening than this process's. Of an id that this process has not opened it
        may be asked, too: then there is nothing to be fenced from.
        """

    @abstractmethod
    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        """Append a record about a transaction. Raises `Fenced` if a newer opening stands before it."""

    @abstractmethod
    def find(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any] | None = None) -> list[LedgerEntry]:
        """Every counting record about a transaction, oldest first. Raises `EvidenceLost` if they may be gone.

        With `log`, its `Evidence.log`, only what is behind that is read, else the whole log.
        """

    @abstractmethod
    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        """Every counting record of one kind, oldest first, that a living transaction can still need."""

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
        """Claim a transaction's outcome; the claim that counts, whoever made it. `log` is its `Evidence.log`.

        Of an id that this process has opened, a COMMIT of a transaction that is not prepared is its owner's, and void
        behind a newer opening: `Fenced`. Every other claim is judged by first-wins alone. A COMMIT with `acks` does not
        count either if somebody else acknowledged on the same group and partition since `read_up_to`: `Conflict`. After
        both the transaction is still undecided, and a claim has to abort it. Raises `OutcomeUnknown` if the claim may
        or may not stand (repeat it), `EvidenceLost` if nobody can ever tell.
        """

    @abstractmethod
    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        """The claim that counts for a transaction; None while there is none. Changes nothing. Raises `EvidenceLost`."""

    @abstractmethod
    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        """The last commit of each writer of the owner that committed last, oldest first: what an opener has to finish.

        A writer finishes one commit before it claims the next, and an opener those of the owner before it. `"writer"`,
        text or a number, in a claim's data tells the writers of an owner apart. Of those that a living transaction can
        still need.
        """

    @abstractmethod
    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        """The transaction that acknowledged last on each partition of a group, and the claim that decided it.

        Of those that a living transaction can still need: what whoever takes a partition over may have to finish.
        """

    @abstractmethod
    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        """Where a group stands by all claims that count, and up to where in the log that was read.

        The second is the `Ack.read_up_to` of what is read from the first. A group's start is a claim, too: of a fresh
        transaction, with acknowledgements that end where they begin.
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
        """Write what `change` makes of the value; it is asked again if another process wrote first.

        `change` returns None to leave the value as it is. Return the value that stands.
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
    """One message that waits, in the order of `Writer.send`."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: RawHeaders
    partition: int | None = None
    timestamp: int | None = None


@dataclass(frozen=True)
class Half:
    """Messages that wait for the outcome of something outside the broker. Times are milliseconds since 1970."""

    group: str
    transaction: str  # unique for ever
    messages: Sequence[HalfMessage]
    check_at: int  # from then on, and again after each unanswered check, it is asked about
    deadline_at: int  # before that nobody may answer ABORT because nothing was recorded
    checks: int = 0  # how often it was asked about
    how: Mapping[str, Any] = field(default_factory=dict)  # what the store needs to end it: its own


class HalfStore(ABC):
    """Half messages that a broker keeps by itself. Any thread may call."""

    @abstractmethod
    def put(self, half: Half, deadline: Deadline) -> Half:
        """Store all messages of a half, or none that could be published; the half as `end` takes it.

        Repeating it with the same transaction changes nothing. Raises `DeliveryFailed` if it certainly is not stored.
        """

    @abstractmethod
    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        """Publish a half or drop it, for good: the first decision counts, and its outcome is what comes back.

        UNDECIDED changes nothing but that it is asked about later; UNKNOWN comes back unless it was ended before.
        Raises `OutcomeUnknown` and `BrokerUnavailable` if the decision may or may not stand: repeat it.
        """

    @abstractmethod
    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        """Halves that are due to be asked about, as soon as there is one; empty when the deadline passes first.

        Each is lent to one asker for a while. One that was asked about too often is parked instead.
        """

    def leave(self, group: str, deadline: Deadline) -> None:
        """Nobody here calls `checks` for this group any more: a broker that chooses whom it asks may ask others."""

    @abstractmethod
    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        """Halves that were asked about too often; they stay until somebody ends or resumes them."""

    @abstractmethod
    def resume(self, half: Half, deadline: Deadline) -> None:
        """Ask about a parked half again from the start. Raises `NotFound`."""
