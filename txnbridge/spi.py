"""The contract between txnbridge's core and a backend (the adapter for one kind of broker).

A backend imports this module and `txnbridge.errors`, and no other module of txnbridge. The core does for all backends:
states, guards, deadlines, retries, error wrapping, events, tokens, codecs, and checking which delivered message may be
acknowledged. A backend sends the requests to its broker.

Rules for every method
- The method returns by its deadline, or raises `DeadlineExceeded` if the broker did not answer. A call that may or may
  not have taken effect raises `OutcomeUnknown` only if its docstring says so.
- The method raises errors of `txnbridge.errors`, with the client library's error as `__cause__`. Any other error
  counts as a bug.
- A `Writer` and a `Reader` get one call at a time, but from changing threads. A `Broker`, an `Admin`, a
  `DecisionLog` and a `HalfStore` are called from any thread at any time.
- In the child of a fork the core calls no method of an object that the parent process opened.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, TypeVar

from txnbridge._base.deadline import Deadline
from txnbridge._base.events import Emitter
from txnbridge._base.fair_semaphore import FairSemaphore
from txnbridge._base.messages import (
    NO_HEADERS,
    Batch,
    Headers,
    Message,
    MessageColumns,
    Position,
    as_offset,
    columns_of,
    encode_headers,
    encode_item,
)
from txnbridge._base.plugins import hookimpl
from txnbridge._base.request_during_polls import BackgroundTask
from txnbridge._base.token import Decision, Outcome, Status, Token, TokenState
from txnbridge.capabilities import NATIVE, Capabilities, Capability, Level, Limits, Support, absent, emulated
from txnbridge.errors import BackendMissing, NotFound, NotSupported, TxnBridgeError

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
    "Held",
    "Identity",
    "Ledger",
    "LedgerClaim",
    "LedgerEntry",
    "LedgerValue",
    "Level",
    "Limits",
    "Message",
    "MessageColumns",
    "OpenTransaction",
    "Option",
    "Outcome",
    "Partition",
    "Position",
    "Publisher",
    "Raw",
    "RawHeaders",
    "Reader",
    "ReaderListener",
    "Status",
    "Subscription",
    "Support",
    "Token",
    "TokenState",
    "TopicInfo",
    "TopicRules",
    "Url",
    "Writer",
    "absent",
    "as_offset",
    "emulated",
    "encode_headers",
    "encode_item",
    "hookimpl",
]

Partition = tuple[str, int]  # topic and partition number
Raw = bytes | None  # a key or a value
RawHeaders = Sequence[tuple[str, bytes | None]]

_Part = TypeVar("_Part")
_log = logging.getLogger("txnbridge")

# The defaults of the options `half_check_seconds` and `half_checks`, which are RocketMQ's.
HALF_CHECK_SECONDS, HALF_CHECKS = 30.0, 15


# --- opening ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One typed option of a backend, given as URL query or by `connect(url, <backend>={...})`.

    `kind` is bool, int, float or str; `choices` are the allowed values; a secret's value is never displayed.
    """

    kind: type
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    secret: bool = False

    @classmethod
    def setting(cls, default: Any, help: str, choices: tuple[Any, ...] = (), *, secret: bool = False) -> Any:
        """Return a field for a dataclass of settings that an option of the same name sets; no repr shows a secret."""
        option = cls(type(default), default, help, choices, secret)
        return field(default=default, repr=not secret, metadata={"option": option})

    @staticmethod
    def of(settings: Any) -> dict[str, Option]:
        """Return the options that the fields of a settings dataclass declare (by `Option.setting`), by name."""
        return {each.name: each.metadata["option"] for each in fields(settings) if "option" in each.metadata}


@dataclass(frozen=True)
class Url:
    """A broker's address, split into its parts; `path` includes its leading slash if the URL has one."""

    scheme: str
    hosts: tuple[tuple[str, int | None], ...] = ()
    path: str = ""
    text: str = field(default="", repr=False)  # the URL without secrets, for error texts

    def __str__(self) -> str:
        return self.text


def _no_ledger(application: str, id: str) -> Ledger:
    raise NotImplementedError("this broker was opened without ledgers")


@dataclass(frozen=True)
class Context:
    """The settings of a bridge and services of the core, given to a backend when it opens a broker."""

    bridge: str  # the bridge's name in events
    events: Emitter
    application: str
    timeout: float  # the bridge's default deadline in seconds; the broker's own transaction timeout follows from it
    hold: float | None
    create_topics: int | None  # partitions of a missing topic; 0: never create; None: the backend's own default
    # Options for the client library itself; their names contain a dot.
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # `ledger(application, id)` returns the ledger of any transactional id in the application's decision log.
    ledger: Callable[[str, str], Ledger] = field(default=_no_ledger, repr=False)
    own_logs: bool = True  # whether the broker itself keeps the bridge's decision logs


class Backend(ABC):
    """The adapter for one kind of broker, found by its URL schemes. Only `open` imports the client library."""

    name: str
    schemes: tuple[str, ...]
    capabilities: Capabilities
    limits: Limits
    options: Mapping[str, Option]
    libraries: tuple[
        str, ...
    ] = ()  # the modules that `open` needs; the extra of txnbridge with them has the name `name`

    def check_installed(self) -> None:
        """Raise `BackendMissing` if a library is not installed. The core calls this before `open`."""
        for library in self.libraries:
            if find_spec(library) is None:
                package = library.replace("_", "-")
                text = f"{package} is not installed: in a clone of txnbridge, pip install -e '.[{self.name}]'"
                raise BackendMissing(text)

    @abstractmethod
    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        """Connect to the broker at `url`. `options` has every declared option, with its value of the right type.

        Raise `InvalidOption` if options contradict each other, `BrokerUnavailable` if the broker does not answer,
        `AccessDenied` if it refuses the credentials.
        """


@dataclass(frozen=True)
class Identity:
    """The identity under which a bridge writes. `name` is the transactional id.

    `owned` is False for a transactional id that the bridge made up for itself: no other process can have it, so no
    owner has to be fenced. `host` describes this process to the owners that it fences.
    """

    name: str
    owned: bool
    application: str
    host: str


class TopicRules(NamedTuple):
    """The limits of a topic's messages, as far as the broker tells them before a message is sent."""

    message_bytes: int | None = None  # the size of the largest record with value, key and headers
    keyed: bool = False  # whether each message needs a key


class Broker(ABC):
    """One open connection to one broker, through which a bridge uses the backend."""

    capabilities: Capabilities  # the backend's ones, without those that this cluster's settings or rights forbid
    limits: Limits
    cluster: str  # the stable and unique id of the broker's cluster
    # True if transactions of several threads may share one transaction of a writer by default. Tests on the live broker
    # have to show first that all of them get its true outcome.
    group_commit: bool = False
    # True if several writers together commit no more transactions a second than one writer, because they take turns.
    commits_in_turn: bool = False
    # True if a reader may, for a moment, read on in a topic that was deleted and created again, before it notices this.
    notices_renewed_topics_late: bool = False
    # For the core's own half store: the pause before a half's second check-back, after which the pauses double, and the
    # number of check-backs after which a half is parked.
    half_check_seconds: float = HALF_CHECK_SECONDS
    half_checks: int = HALF_CHECKS

    @abstractmethod
    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        """Open a transactional id, and return `count` writers for it.

        Fence every older owner of the id, end its transactions that are not prepared, and leave prepared ones open.
        """

    @abstractmethod
    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        """Return a writer for one transaction that will be prepared. Raise `Fenced` if a newer owner exists."""

    @abstractmethod
    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        """Return a publisher; `name` is None unless the broker has the capability `resume-sequence`."""

    @abstractmethod
    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        """Return a reader of committed messages. Raise `NotFound` for a missing topic that may not be created."""

    def require_topic(self, topic: str, deadline: Deadline) -> TopicRules:
        """Look for a topic as a writer does before it sends: create it if it is missing, or raise `NotFound`.

        Return what the topic refuses, and raise `AccessDenied` if this user may not write to it, as far as the broker
        tells both. A backend that does not override this raises `NotFound` when the first message is sent to the topic.
        """
        return TopicRules()

    @abstractmethod
    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """Commit a prepared transaction of any process; return the true outcome, even if it was aborted before.

        Safe to repeat. Raise `OutcomeUnknown` if the broker got the request and did not answer, `EvidenceLost` if the
        outcome can never be known.
        """

    @abstractmethod
    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        """Abort a prepared transaction of any process; return the true outcome, even if it was committed before.

        Safe to repeat. Raise the errors of `commit`.
        """

    @abstractmethod
    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        """Return the present state of a token's transaction, prepared or not, without ending the transaction.

        Before returning ABORTED because a deadline has passed, record the abort, because clocks may be set back.
        """

    @property
    @abstractmethod
    def admin(self) -> Admin: ...

    @abstractmethod
    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        """Return the decision log of this name, and create it if it does not exist.

        Two processes that create the log at once get the same log.
        """

    def half_store(self) -> HalfStore | None:
        """Return the store of half messages; None for the core's own store, in a topic of each group."""
        return None

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Close all connections to the broker, without aborting prepared transactions. Safe to repeat."""

    def _close_publishers(self, publishers: Iterable[Publisher], deadline: Deadline) -> None:
        """Close publishers that the application has left open, and log their errors."""
        for publisher in list(publishers):
            try:
                publisher.close(deadline)
            except TxnBridgeError as error:
                _log.warning("closing a publisher: %s", error)


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """The parameters with which a writer begins a transaction."""

    transaction: str  # the transaction's id, unique for ever
    deadline: Deadline
    prepare: bool
    hold: float | None  # seconds for which it may stay prepared after its deadline; None: as long as the broker allows
    in_span: bool = False  # it is a part of a span


@dataclass(frozen=True)
class Evidence:
    """The backend's part of a token: JSON values by which it ends the transaction or finds the outcome."""

    how: Mapping[str, Any]
    messages: int
    expires_at: int | None = None
    log: Mapping[str, Any] | None = None  # the result of `Ledger.begin`, if the ledger keeps the evidence


class Writer(ABC):
    """Writes one transaction at a time under one identity at the broker.

    A writer whose client library takes a message by one cheap call may offer this call in `quick`: the core then calls
    `quick[topic](topic, value, key)` instead of `send` for messages without headers, partition and timestamp, and
    counts them in `messages`. If that raises an error of a class in `not_taken` (such as KeyError for a topic that
    `quick` does not contain yet), the message was not taken, and the core calls `send` with the same message.
    """

    quick: Mapping[Any, Callable[..., object]] | None = None
    not_taken: tuple[type[Exception], ...] = ()
    messages: int = 0  # the number of messages taken in the current transaction

    @abstractmethod
    def begin(self, begin: Begin) -> None:
        """Begin a transaction, without a request if the broker allows it. Raise `Fenced` if a newer owner exists."""

    @abstractmethod
    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        """Take one message. Wait for free buffer space if necessary, at most until the transaction's deadline.

        Raise `NotFound` for a topic or partition that does not exist, `InvalidOption` for a message over the broker's
        limit: both leave the transaction as it was.
        """

    @abstractmethod
    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        """Take many messages for one topic. Wait for buffer space and raise errors as `send` does.

        Messages taken before an error stay taken, and `messages` counts them: the core names the item that failed, and
        then allows only an abort. An item is the message's value as bytes, or else `encode_item(item)` converts it to
        (value, key, headers).
        """

    def separate(self) -> None:
        """Note that later messages of the transaction may be stored before, among or behind its earlier ones.

        A shared transaction consists of transactions of several threads, between which there is no order.
        """

    @abstractmethod
    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Acknowledge positions that a reader has delivered, as part of this transaction.

        `context` is the result of the reader's `ack_context()` at their delivery. Raise `Conflict` if another
        transaction acknowledged one of them or their assignment has ended; a broker may report this only at the commit.
        """

    def prepare(self, deadline: Deadline) -> None:
        """Make the transaction durable and independent of this writer, so that any process can end it.

        Only a writer of `prepare_writer` is asked to. Raise the errors of `commit`.
        """
        raise NotImplementedError("a plain writer never prepares")

    def store(self, deadline: Deadline) -> None:
        """Wait until the messages are stored, if the broker may refuse one only then; otherwise do nothing.

        Raise `DeliveryFailed`, which is `permanent` for a message that would be refused again.
        """

    @abstractmethod
    def evidence(self) -> Evidence:
        """Return the backend's part of the current or last transaction's token, even after a `reopen`. Never block."""

    @abstractmethod
    def commit(self, deadline: Deadline) -> None:
        """Commit the transaction; return only after the broker has confirmed the commit.

        Raise `TransactionAborted` (or a subclass) or `Fenced` if the transaction certainly is not and will not be
        committed, `BrokerUnavailable` if no request to commit was sent (the core calls `abort` next), `OutcomeUnknown`
        if the request was sent and not answered.
        """

    @abstractmethod
    def abort(self, deadline: Deadline) -> None:
        """Abort the transaction; return once it is certainly aborted. Raise `OutcomeUnknown` if this is not certain."""

    @abstractmethod
    def reopen(self, deadline: Deadline) -> None:
        """Make this writer usable again after an unknown outcome or a failed connection.

        This must not open the transactional id anew, which would fence a newer owner: raise `Fenced` if there is one.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the writer. A prepared transaction stays prepared; abort an open one if this needs no waiting."""


class Publisher(ABC):
    """Sends messages without a transaction: in order, idempotently, each readable as soon as it is stored."""

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

        Only a publisher with a name gets sequences. Raise `DeliveryFailed` if an earlier message could not be stored;
        no later message of the same partition was stored either.
        """

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Wait until all messages are stored. Raise `DeliveryFailed` if one could not be stored."""

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        """Return the highest sequence that is stored under this publisher's name in a topic; None if there is none."""
        raise NotImplementedError("declare resume-sequence absent, or provide this")

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Flush, and close the publisher's connections."""


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subscription:
    """The topics, group and settings of a reader. Without a group it reads every partition and cannot acknowledge.

    `start` says where a group without stored positions begins: "earliest", "latest" or a timestamp in milliseconds.
    `sharing` is "partition", "message" or "key". The topics in `found` existed a moment ago: a pattern has found them.
    """

    topics: tuple[str, ...]
    group: str | None = None
    start: str | int = "earliest"
    sharing: str = "partition"
    found: Collection[str] = ()

    def creates(self, topic: str) -> bool:
        """Return whether a reader creates this topic if it is missing, where the bridge's settings allow that."""
        return self.group is not None and topic not in self.found


class ReaderListener(Protocol):
    """Receives changes of a reader's assignment for the core; the reader calls it on the thread that polls."""

    def assigned(self, partition: Partition) -> object:
        """Note a new assigned partition; return the `source` for its messages until the assignment ends."""

    def revoking(self, partitions: Sequence[Partition]) -> None:
        """Note that partitions are about to be revoked; return once no open transaction has acknowledged from them."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """Note that partitions were lost: their delivered messages can no longer be acknowledged."""


class Reader(ABC):
    """Reads committed messages only, each partition in order.

    After an exception from a signal handler has ended a call, at any point, the core calls only `close`.
    """

    @abstractmethod
    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        """Return up to `max_messages` as soon as there is one, or an empty list at the deadline.

        Keys and values are bytes or None. Raise `PositionLost` if retention has deleted the next message to read.
        """

    def poll_columns(self, max_messages: int, deadline: Deadline) -> list[MessageColumns]:
        """Return the messages of a `poll` as columns; only a reader without a group gets this call.

        A reader that has columns without making messages overrides this.
        """
        return columns_of(self.poll(max_messages, deadline))

    @abstractmethod
    def positions(self) -> dict[Partition, Position]:
        """Return, for each assigned partition, the next position to read."""

    @abstractmethod
    def seek(self, positions: Mapping[Partition, Position]) -> None:
        """Continue with the first committed message at or after each position.

        Messages that the group has acknowledged are left out. Raise `PositionLost` if retention has deleted a position.
        """

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        """Go back to delivered messages that must be delivered again, for example after an abort.

        If a partition's position is lost, it stays lost (`PositionLost`) until a `seek` by the user.
        """
        self.seek(positions)

    @abstractmethod
    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        """Continue, in every assigned partition, with the first message whose timestamp is at or after `timestamp`."""

    @abstractmethod
    def pause(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def resume(self, partitions: Sequence[Partition]) -> None: ...

    @abstractmethod
    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        """Give back delivered messages for redelivery to this or another member of the group."""

    @abstractmethod
    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        """Return the lag of each assigned partition: messages (or positions, on some brokers) that are not read yet."""

    def group_lag(self, deadline: Deadline) -> int | None:
        """Return the lag of the whole group, over all members' partitions; None if the broker does not report it."""
        return None

    @abstractmethod
    def ack_context(self) -> object:
        """Return a proof of the current assignment (such as group generation and member id), for `Writer.ack`."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Leave the group at once, so that other members take over without waiting for a session timeout."""

    _turn = 0

    def _rotated(self, parts: Iterable[_Part]) -> list[_Part]:
        """Return what the reader polls (partitions), each time beginning with another one, so none is always last."""
        listed = list(parts)
        self._turn = (self._turn + 1) % max(1, len(listed))
        return listed[self._turn :] + listed[: self._turn]


# --- administration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicInfo:
    """A topic as the broker describes it."""

    name: str
    partitions: int
    internal: bool = False
    retention_seconds: float | None = None
    retention_bytes: int | None = None


@dataclass(frozen=True)
class OpenTransaction:
    """One transaction that has not ended, as an administrator sees it.

    `transaction` is the argument of `Admin.end`: txnbridge's transaction id if the broker stores it, else the broker's
    own id of the transaction.
    """

    transaction: str
    state: str  # "open", "prepared", or the broker's word for one that is ending
    owner: str = ""
    since: int | None = None
    expires_at: int | None = None
    partitions: tuple[Partition, ...] = ()
    groups: tuple[str, ...] = ()
    messages: int | None = None
    token: Token | None = None  # the token of a prepared transaction, if the broker's data suffice to make it
    transactional_id: str = ""  # empty if the broker does not know it
    # Of an open part of a span whose name the broker does not know: the time until which its process may prepare it.
    prepares_until: int | None = None


@dataclass(frozen=True)
class GroupMember:
    """One member of a group. `until` is the time of its removal without a heartbeat, if the broker reports it."""

    name: str
    host: str
    partitions: tuple[Partition, ...] = ()
    until: int | None = None


@dataclass(frozen=True)
class GroupInfo:
    """One group: its members, its positions, and its lag, counted as `Reader.lag` does."""

    name: str
    members: tuple[GroupMember, ...]
    positions: Mapping[Partition, Position]
    lag: Mapping[Partition, int]


@dataclass(frozen=True)
class Advice:
    """One finding of `txnbridge doctor`: `level` is "ok", "warning" or "problem"; `remedy` says what to do."""

    level: str
    subject: str
    text: str
    remedy: str = ""


class Admin(ABC):
    """A broker's administration: topics, groups, open transactions, and the checks of `txnbridge doctor`."""

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
        """Create a topic, or return False if it exists. Raise `InvalidOption` if its number of partitions differs."""

    @abstractmethod
    def topics(self, deadline: Deadline) -> list[TopicInfo]: ...

    def topic_names(self, deadline: Deadline) -> list[str]:
        """Return the names of the topics that are not internal. Processors of patterns ask for them again and again."""
        return [topic.name for topic in self.topics(deadline) if not topic.internal]

    def unreadable(self, topics: Sequence[str], deadline: Deadline) -> list[str]:
        """Return those of the topics that this user may not read, as far as the broker tells that before a read."""
        return []

    @abstractmethod
    def delete_topic(self, name: str, deadline: Deadline) -> None:
        """Delete a topic.

        Raise `NotFound` if it does not exist, `InvalidState` while an open transaction has messages in it.
        """

    @abstractmethod
    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        """Add partitions to a topic, up to `partitions`.

        Raise `NotFound` if the topic does not exist, `InvalidOption` if it has more partitions already.
        """

    @abstractmethod
    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        """Return, for each partition, the first position that is kept, and the end of the decided messages.

        Before this end every transaction has ended, so reading between two positions before it always yields the same
        messages, until retention removes them. A transaction past its deadline may hold back this end only as long as
        it holds back readers. Raise `NotFound` if a topic does not exist.
        """

    # --- for the core's own half store --------------------------------------------------------------------------------

    def internal_name(self, name: str) -> str:
        """Return the full name of an internal topic, one with the core's own records, from its short name."""
        return f"_txnbridge-{name}"

    def create_internal_topic(self, name: str, deadline: Deadline) -> None:
        """Create a topic of one partition by its full name, unless it exists. Only `trim` may remove records.

        Raise `InvalidOption` if it exists with several partitions, or with settings that remove records.
        """
        self.create_topic(name, 1, deadline)

    def trim(self, partition: Partition, before: Position, deadline: Deadline) -> None:
        """Delete the messages of an internal topic before a position, or as many of them as the broker can delete."""

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Return, for each topic, an id that a later topic of the same name does not have.

        Topics that do not exist, and topics for which the broker has no id, are left out.
        """
        return {}

    def groups(self, deadline: Deadline) -> dict[str, int]:
        """Return the number of members of every group, by the group's name."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def group(self, name: str, deadline: Deadline) -> GroupInfo:
        """Return one group. Raise `NotFound` if it does not exist."""
        raise NotImplementedError("declare group-admin absent, or provide this")

    def describe_groups(self, names: Sequence[str], deadline: Deadline) -> dict[str, GroupInfo]:
        """Return groups by name, without those that do not exist."""
        found = dict[str, GroupInfo]()
        for name in names:
            with suppress(NotFound):
                found[name] = self.group(name, deadline)
        return found

    def reset_group(
        self, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
    ) -> dict[Partition, Position]:
        """Set the positions of a group without members, in some topics or in all that it has read; return them.

        `to` is "earliest", "latest" or a timestamp in milliseconds. A former member that still runs cannot acknowledge
        the messages that it read before. Raise `NotFound` for an unknown group, or a topic that the group has never
        read, and `InvalidState` while the group has members or an open transaction has acknowledged for it.
        """
        raise NotImplementedError("declare group-admin absent, or provide this")

    @abstractmethod
    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        """Return the open and prepared transactions whose transactional id begins with `owners`."""

    @abstractmethod
    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End an open or prepared transaction by COMMIT or ABORT; return the outcome.

        Raise `NotFound` if it does not exist, `InvalidState` for a COMMIT of a transaction that is not prepared.
        """

    def repair(self, transaction: str, deadline: Deadline) -> str:
        """Complete a transaction that the broker ended only in part; return the repair as text for the operator."""
        raise NotSupported("on this broker no transaction needs a repair: it ends each one completely")

    @abstractmethod
    def check(self, deadline: Deadline) -> list[Advice]:
        """Return the broker's settings and states that weaken a guarantee or keep messages from readers."""


# --- decisions -------------------------------------------------------------------------------------------------------


class DecisionLog(ABC):
    """The store of one decision log: durable appends in one total order, read uncommitted, never compacted by key.

    `origin` is the position that every new log's first record has, None if it differs; it distinguishes a log that
    retention has emptied from a new log. `keeps` is the number of seconds for which a record surely stays, None if it
    stays until it is trimmed. `numbered` is True if positions are `(number,)` and count up by one, so that a reader can
    begin a given number of records before the end.
    """

    origin: Position | None = None
    keeps: float | None = None
    numbered: bool = False

    @abstractmethod
    def begin(self, deadline: Deadline) -> Position | None:
        """Return the position of the first record that is not removed yet; None for an empty log."""

    @abstractmethod
    def end(self, deadline: Deadline) -> Position | None:
        """Return the position of the last record; None for an empty log."""

    @abstractmethod
    def append(self, record: bytes, deadline: Deadline) -> Position:
        """Store a record at the end of the log; return its position once it is durable.

        Raise `OutcomeUnknown` if the record may or may not be stored. Repeating the append may store the record twice,
        which is harmless.
        """

    @abstractmethod
    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterable[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`, both included; None means the log's first or last record.

        Raise `PositionLost` if a record of this range is gone, also after some were yielded.
        """

    @abstractmethod
    def trim(self, before: Position, deadline: Deadline) -> None:
        """Remove the records before a position, or as many of them as the broker can remove."""

    def close(self) -> None:
        """Close the log's connections."""


@dataclass(frozen=True)
class LedgerEntry:
    """A backend's record about a transaction in the decision log. Backends choose `kind`; the core uses "prepare"."""

    kind: str
    transaction: str
    data: Mapping[str, Any]
    opening: str  # the name of the opening under which the owner wrote the record


@dataclass(frozen=True)
class Ack:
    """A range of messages that the claim of a COMMIT acknowledges for a group, which next reads from `end` on."""

    group: str
    partition: Partition
    first: Position
    end: Position
    # The position in the decision log that `Ledger.positions` returned together with the group's position `first`.
    read_up_to: Position


@dataclass(frozen=True)
class Held:
    """The undecided prepared transaction that holds a partition of a group: no other one acknowledges on it.

    `log` is its `Evidence.log`; from `expires_at` (ms since 1970) on any process may claim its ABORT.
    """

    transaction: str
    log: Mapping[str, Any]
    expires_at: int


@dataclass(frozen=True)
class LedgerClaim:
    """The claim (record of a decision) that decides a transaction. `opening` names its author, if it owned the id."""

    decision: Decision
    data: Mapping[str, Any]
    opening: str | None


class Ledger(ABC):
    """The records of one transactional id in the decision log, so that a backend needs no log of its own.

    A backend whose broker itself keeps the outcomes of transactions does not use it.
    """

    @abstractmethod
    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        """Open the transactional id, to own it; return the opening's name. Later records of older owners are void."""

    @abstractmethod
    def open_behind(self, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        """Open (own) the transactional id if its last opening is `before` (None: it has none); return whether so."""

    @abstractmethod
    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name and data of the transactional id's last opening (takeover); None if it was never opened."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        """Return the place in the log after which records about a new transaction come, for its `Evidence.log`.

        Raise `Fenced` if this process has opened the id and another process has opened it since.
        """

    @abstractmethod
    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        """Append a record about a transaction of this owner; it is durable at the return.

        `kind` is a word of the backend's choice, and `data` holds JSON values. Raise `Fenced` if a newer owner opened
        the id before.
        """

    @abstractmethod
    def find(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any] | None = None) -> list[LedgerEntry]:
        """Return the records about a transaction that are not void, oldest first.

        With `log`, the transaction's `Evidence.log`, only the log's records after that place are read, else the whole
        log. Raise `EvidenceLost` if some of these records are gone.
        """

    @abstractmethod
    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        """Return the records of one kind that are not void, oldest first, without those of expired transactions."""

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
        """Claim (record) a decision on a transaction; return the claim that counts, whichever process made it.

        `log` is the transaction's `Evidence.log`. The first claim counts, with two exceptions. A COMMIT by the id's
        owner, of a transaction that is not prepared, is void once another process has opened the id: raise `Fenced`. A
        COMMIT with `acks` is void if another transaction acknowledged on the same group and partition since
        `read_up_to`: raise `Conflict`. After both errors the transaction is still undecided, and the caller must claim
        its ABORT. Raise `OutcomeUnknown` if the claim may or may not count (repeat the call), `EvidenceLost` if this
        can never be known.
        """

    @abstractmethod
    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        """Return the claim (record of a decision) that decides a transaction; None while there is none.

        Raise `EvidenceLost` if the log's records about it are gone.
        """

    @abstractmethod
    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        """Return the last decided commit of each writer of the owner that committed last, oldest first.

        A new owner must carry these commits out at the broker: a writer carries out one commit before it claims the
        next, and a new owner those of the owner before it. The entry "writer" (text or a number) in a claim's data
        identifies the writer. Commits of expired transactions are left out.
        """

    @abstractmethod
    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        """Return, for each partition of a group, the id and claim of the transaction that acknowledged on it last.

        A member that takes the partition over may have to carry this commit out at the broker. Expired transactions
        are left out.
        """

    @abstractmethod
    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        """Return a group's positions by all commits that count, and the log position up to which the log was read.

        The log position is the `Ack.read_up_to` of messages that are read from these positions on. A group's start
        positions are stored by a claim on a new transaction, whose acknowledged ranges end where they begin.
        """

    @abstractmethod
    def holds(self, deadline: Deadline) -> list[tuple[str, Partition, Held]]:
        """Return groups' partitions on which undecided prepared transactions acknowledge, by the decision log so far.

        Expired transactions are left out. Call it after `positions`. A transaction holds the partitions of its
        acknowledgements if the data of its "prepare" record has them as "acks": a list of group, topic, number and
        more, together with its "log" and "expires_at" (see `Held`). A COMMIT with `acks` on such a partition is void
        unless its author had read this record. An author that has read it waits, or raises `Conflict`.
        """


class LedgerValue:
    """A small value in the decision log, changed by compare-and-set. Its name is the id that stores it.

    The value is the data with which this id, which no transaction uses, was opened last.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, deadline: Deadline) -> Mapping[str, Any] | None:
        """Return the value in the decision log, from the last `update` by any process; None before the first one."""
        opening = self._ledger.newest_opening(deadline)
        return None if opening is None else opening[1]

    def update(
        self, change: Callable[[Mapping[str, Any] | None], Mapping[str, Any] | None], deadline: Deadline
    ) -> Mapping[str, Any] | None:
        """Replace the value by the result of `change`, and return the value that is stored then.

        `change` returns None to leave the value unchanged, and is called again if another process wrote first.
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
    """One half message, with the parameters of `Writer.send` as fields."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: RawHeaders
    partition: int | None = None
    timestamp: int | None = None


@dataclass(frozen=True)
class Half:
    """The half messages of one transaction, stored until the outcome of work outside the broker is known.

    Times are milliseconds since 1970.
    """

    group: str
    transaction: str  # the transaction's id, unique for ever
    messages: Sequence[HalfMessage]
    check_at: int  # the time of the first check-back; others follow until one is answered
    deadline_at: int  # the time before which a check-back may not answer ABORT because the work is not recorded yet
    checks: int = 0  # the number of check-backs so far
    how: Mapping[str, Any] = field(default_factory=dict)  # the data of `HalfStore` by which `end` finds the messages


class HalfStore(ABC):
    """The store of half messages of a broker that supports them. Any thread may call it."""

    def ready(self, group: str, deadline: Deadline) -> None:
        """Prepare to store half messages of a group, before the deadline of their transaction begins to run."""

    @abstractmethod
    def put(self, half: Half, deadline: Deadline) -> Half:
        """Store all messages of a transaction, or none that can be published; return `half` with its field `how` set.

        A second call with the same transaction changes nothing. Raise `DeliveryFailed` if the half certainly is not
        stored.
        """

    @abstractmethod
    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        """Publish or drop a transaction's half messages for good; return the outcome by the first decision.

        UNDECIDED only postpones the next check-back; then return UNKNOWN, unless the half was ended before. Raise
        `OutcomeUnknown` or `BrokerUnavailable` if the decision may or may not count: the caller repeats the call.
        """

    @abstractmethod
    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        """Return half messages due for a check-back, as soon as there are some; an empty list at the deadline.

        No other resolver gets the same half messages for a while. After too many check-backs they are parked instead.
        """

    def tend(self, group: str, deadline: Deadline) -> None:
        """Do the store's regular work, such as a heartbeat, while this process can take no more check-backs."""

    def leave(self, group: str, deadline: Deadline) -> None:
        """Note that this process answers no more check-backs of a group, so that the broker asks other processes."""

    @abstractmethod
    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        """Return the half messages parked after too many check-backs; an administrator must end or resume them."""

    @abstractmethod
    def resume(self, half: Half, deadline: Deadline) -> None:
        """Start again the check-backs about half messages that had too many (parked). Raise `NotFound` for others."""

    def check(self, deadline: Deadline) -> list[Advice]:
        """Return the doctor's findings about half messages that `Admin.check` does not return."""
        return []
