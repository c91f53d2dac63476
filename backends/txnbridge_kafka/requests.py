"""The requests that confluent-kafka lacks, sent by kafka-python: who is in a transaction, end it, mark it.

The only module that imports kafka-python. Its request classes are not documented and have moved before, hence one
minor version of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import socket
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from txnbridge.errors import (
    AccessDenied,
    BackendMissing,
    BrokerUnavailable,
    DeadlineExceeded,
    Fenced,
    InvalidOption,
    InvalidState,
    NotFound,
    NotSupported,
    OutcomeUnknown,
    TransactionAborted,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.acks import Member
from txnbridge_kafka.limits import EPOCH_BUMPS
from txnbridge_kafka.security import OAuthTokens
from txnbridge_kafka.settings import Settings

_import_failed: ImportError | None = None
with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 and 3.12 call deprecated, and 3.13 no longer does.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from kafka import errors  # type: ignore[import-untyped]
        from kafka.net.manager import KafkaConnectionManager  # type: ignore[import-untyped]
        from kafka.net.sasl.oauth import AbstractTokenProvider  # type: ignore[import-untyped]
        from kafka.net.selector import NetworkSelector  # type: ignore[import-untyped]
        from kafka.protocol.admin import (  # type: ignore[import-untyped]
            CreatePartitionsRequest,
            CreateTopicsRequest,
            DeleteRecordsRequest,
            DeleteTopicsRequest,
            DescribeConfigsRequest,
            DescribeProducersRequest,
            DescribeTransactionsRequest,
            ListTransactionsRequest,
        )
        from kafka.protocol.consumer import ListOffsetsRequest, OffsetFetchRequest  # type: ignore[import-untyped]
        from kafka.protocol.metadata import (  # type: ignore[import-untyped]
            ApiVersionsRequest,
            FindCoordinatorRequest,
            MetadataRequest,
        )
        from kafka.protocol.producer import (  # type: ignore[import-untyped]
            AddOffsetsToTxnRequest,
            EndTxnRequest,
            InitProducerIdRequest,
            TxnOffsetCommitRequest,
            WriteTxnMarkersRequest,
        )

        AbstractTokenProvider.register(OAuthTokens)  # it takes no other, and no other module of ours may import it
    except ImportError as error:  # missing, or a version that moved them: `Requests` says so
        _import_failed = error

T = TypeVar("T")

DONE = 0
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
PRODUCER_FENCED = 90
TRANSACTION_ABORTABLE = 120

# What the coordinator's last word means to whoever asked it to end a transaction.
ANSWERS: Mapping[int, str] = {
    DONE: "the decision is durable; repeating it says the same",
    INVALID_PRODUCER_EPOCH: "timed out, or the id was opened again, perhaps after it had ended (old request versions)",
    INVALID_TXN_STATE: "it has ended the other way, or nothing was ever added to it",
    INVALID_PRODUCER_ID_MAPPING: "the id is not known, or it belongs to another producer",
    PRODUCER_FENCED: "timed out, or the id was opened again, perhaps after it had ended",
    TRANSACTION_ABORTABLE: "it can only be aborted",
}

# What coordinators are of.
_GROUP, _TRANSACTION = 0, 1
# What has settings.
TOPIC, BROKER = 2, 4
# Instead of a time.
EARLIEST, LATEST = -2, -1
_READ_COMMITTED = 1
# A leader that is new, or of which a broker has not heard yet, and one that is too busy.
_LEADER_LATER = {3, 5, 6, 7, 74, 75, 76, 78}
_UNSTABLE = 88
_INVALID_TRANSACTION_TIMEOUT = 50
_TRANSACTIONAL_ID_NOT_FOUND = 105
# Nobody there at the moment: loading, not available, moved, or the previous end is still being written.
_NOT_NOW = {14, 15, 16, 51}
# Of these the ones that say that nothing was done: loading, or the previous end is still being written.
_UNTOUCHED = {14, 51}
# For acknowledgements also: a broker that has not heard of the topic yet, or was too slow to store them.
_ACK_LATER = {*_NOT_NOW, 3, 7}
# A partition without a leader at the moment, or with another one.
_NO_LEADER = {5, 6}
_UNKNOWN_TOPIC = 3
_DENIED = {29, 30, 31, 53}
_FENCED = {INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED}

# A broker that stays silent for that long may be stopped while another has taken over: ask again who it is.
_PATIENCE = 5.0
# A log-in on a busy machine takes tenths of a second.
_LEAST_PATIENCE = 0.3
_NOBODY = ("ECONNREFUSED", "DNS Resolution failure")  # what kafka-python says where no server is
# What a coordinator says of a transaction that it is ending: its markers are not all written yet.
_ENDING = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
# Markers are written within milliseconds, where nothing is in their way.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05
# Markers take milliseconds to be written; a coordinator takes seconds to move.
_PAUSES = (0.005, 0.02, 0.1, 0.3)
# Of so many ids and groups at most a connection remembers who coordinates them.
_MOST_KNOWN = 1000
# Enough for a few callers at once; more are made as needed and not kept.
_IDLE = 4
# A list of all transactions takes 60 bytes each; kafka-python's own limit of 1 MB is soon reached.
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Described:
    """What the coordinator says of a transactional id.

    `state` is "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead" or
    "PrepareEpochFence". `start` is in milliseconds, None where there is none; `timeout` in milliseconds.
    """

    id: str
    state: str
    pid: int
    epoch: int
    start: int | None
    timeout: int
    partitions: tuple[Partition, ...]


@dataclass(frozen=True)
class Ended:
    """The coordinator's last word to EndTxn: a code of `ANSWERS`, and the producer's id and epoch from now on.

    `only_once`: no other copy of the request can have arrived or be on its way.
    """

    code: int
    pid: int
    epoch: int
    only_once: bool = True


@dataclass(frozen=True)
class Acknowledged:
    """The last word to an acknowledgement: 0, or the code of its refusal.

    `again`: an answer was lost, so another copy of a request may still arrive, in whatever transaction.
    """

    code: int
    again: bool


@dataclass(frozen=True)
class ActiveProducer:
    """A producer as a partition's leader knows it; `start_offset` is where its open transaction begins."""

    pid: int
    epoch: int
    start_offset: int | None
    last_timestamp: int
    coordinator_epoch: int


class Answer(NamedTuple):
    """A code, 0 for done, and what the broker says of it."""

    code: int
    text: str


@dataclass(frozen=True)
class Listed:
    """One line of a coordinator's list of transactional ids."""

    id: str
    pid: int
    state: str


class _NotYetError(Exception):
    """The broker answered that it cannot answer now."""


class Requests:
    """Raw requests to a cluster. Any thread may call any method at any time; each ends by its deadline.

    (Names of hosts are looked up, and tokens asked for, on the calling thread: a resolver that hangs is waited for.)
    They raise `DeadlineExceeded` when no broker answered in time, `AccessDenied`, `NotSupported` for a broker that is
    too old, and what is said at each.
    """

    def __init__(self, settings: Settings) -> None:
        check_version()
        _silence()
        self._servers = [server.strip() for server in settings.bootstrap.split(",") if server.strip()]
        self._config = {"receive_message_max_bytes": _MOST_BYTES, **settings.raw}
        self._advice = f"; {settings.advice}" if settings.advice else ""
        self._idle: list[_Line] = []
        self._lock = threading.Lock()
        self._closed = False

    def describe(self, ids: Sequence[str], deadline: Deadline) -> dict[str, Described]:
        """What the coordinators say of transactional ids; one that they do not know is absent."""
        found: dict[str, Described] = {}
        left = list(dict.fromkeys(ids))
        if not left:
            return found

        async def attempt(line: _Line) -> dict[str, Described]:
            for node, keys in (await line.coordinators(left)).items():
                answer = await line.ask(node, DescribeTransactionsRequest(transactional_ids=keys))
                for each in answer.transaction_states:
                    if each.error_code in _NOT_NOW:
                        continue
                    left.remove(each.transactional_id)
                    if each.error_code == DONE:
                        found[each.transactional_id] = _described(each)
                    elif each.error_code != _TRANSACTIONAL_ID_NOT_FOUND:
                        raise _refused(each.error_code, f"describing the transactional id {each.transactional_id!r}")
            if left:
                raise _NotYetError(f"the coordinator of {left[0]!r} is moving")
            return found

        return self._until(deadline, "describing transactions", attempt)

    def witness(self, id: str, deadline: Deadline) -> Witness:
        """Connect to the coordinator of a transactional id, to ask it later on this connection and no other."""

        async def attempt(line: _Line) -> Witness:
            witness = Witness(id, line, await line.connect(await line.coordinator(id)), self._give_back)
            witness.first = await witness.ask(line)
            return witness

        return self._until(deadline, f"asking the coordinator of {id!r}", attempt)

    def end(
        self, id: str, pid: int, epoch: int, commit: bool, deadline: Deadline, *, shut_out: bool | None = None
    ) -> Ended:
        """Ask the coordinator to end a transaction, until it says something final: a code of `ANSWERS`.

        The same decision may be repeated. A commit also shuts the producer out, where the cluster can do that. An abort
        does with `shut_out=True`, which is for ids whose producer never commits by itself: of a transaction that it has
        committed just before, the request that shuts out would say that it is aborted now.
        Raises `OutcomeUnknown` if it was asked and no final answer came, any other error only if it was certainly
        never asked or certainly refused.
        """
        what = f"{'committing' if commit else 'aborting'} the transaction of {id!r}"
        asked = False

        async def attempt(line: _Line) -> Ended:
            nonlocal asked
            node = await line.coordinator(id)
            may_shut_out = commit if shut_out is None else shut_out
            newest = 5 if may_shut_out and await line.bumps_epochs(node) else 4
            request = EndTxnRequest(
                transactional_id=id, producer_id=pid, producer_epoch=epoch, committed=commit, max_version=newest
            )
            await line.connect(node)
            before, asked = asked, True
            answer = await line.ask(node, request)
            if answer.error_code in _UNTOUCHED or answer.error_code in _DENIED:
                asked = before  # this one was not carried out, and never will be
            if answer.error_code in _DENIED:
                raise _refused(answer.error_code, what)
            if answer.error_code not in ANSWERS:
                raise _NotYetError(f"the coordinator said {_name(answer.error_code)}")
            return _ended(answer, pid, epoch, only_once=not before)

        try:
            return self._until(deadline, what, attempt)
        except TxnBridgeError as error:
            if asked:
                raise OutcomeUnknown(f"{what}: the coordinator was asked and gave no final answer") from error
            raise

    def fence(self, id: str, timeout_ms: int, deadline: Deadline) -> tuple[int, int]:
        """Open a transactional id, which ends what is open on it and shuts its owner out: its new pid and epoch."""
        what = f"opening the transactional id {id!r}"

        async def attempt(line: _Line) -> tuple[int, int]:
            request = InitProducerIdRequest(
                transactional_id=id,
                transaction_timeout_ms=timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
                max_version=4,  # 5 adds an answer for clients that can recover from it; 6 is another protocol
            )
            answer = await line.ask(await line.coordinator(id), request)
            _check(answer.error_code, what)
            return answer.producer_id, answer.producer_epoch

        return self._until(deadline, what, attempt)

    def add_offsets(self, id: str, pid: int, epoch: int, group: str, deadline: Deadline) -> None:
        """Add a group's offsets to a transaction without writing any: an empty transaction becomes an open one.

        Raises `Fenced` if the id belongs to another producer or epoch, `InvalidState` if its transaction is ending.
        """
        what = f"adding a group to the transaction of {id!r}"

        async def attempt(line: _Line) -> None:
            answer = await line.ask(await line.coordinator(id), _add_offsets(id, pid, epoch, group))
            _check(answer.error_code, what)

        self._until(deadline, what, attempt)

    def acknowledge(
        self, id: str, pid: int, epoch: int, member: Member, offsets: Mapping[Partition, int], deadline: Deadline
    ) -> Acknowledged:
        """Put a group's positions into a transaction. Raises `DeadlineExceeded` if no final answer came."""
        added, out, lost = False, False, False

        async def ask(line: _Line, node: int, request: Any) -> Any:
            nonlocal out, lost
            await line.connect(node)
            lost, out = lost or out, True
            answer = await line.ask(node, request)
            out = False
            return answer

        async def attempt(line: _Line) -> int:
            nonlocal added
            if not added:
                node = await line.coordinator(id)
                answer = await ask(line, node, _add_offsets(id, pid, epoch, member.group))
                if answer.error_code in _NOT_NOW:
                    raise _NotYetError(f"the coordinator of {id!r} said {_name(answer.error_code)}")
                if answer.error_code != DONE:
                    return int(answer.error_code)
                added = True
            node = await line.group_coordinator(member.group)
            answer = await ask(line, node, _positions(id, pid, epoch, member, offsets))
            refusals = {each.error_code for _, each in _each_partition(answer.topics)} - {DONE}
            if final := refusals - _ACK_LATER:
                return int(min(final))
            if refusals:
                raise _NotYetError(f"the coordinator of group {member.group!r} said {_name(min(refusals))}")
            return DONE

        code = self._until(deadline, f"acknowledging for group {member.group!r}", attempt)
        return Acknowledged(code, lost)

    def list_offsets(self, times: Mapping[Partition, int], deadline: Deadline) -> dict[Partition, int]:
        """Of each partition the first offset stamped at or after a time in milliseconds, -1 if there is none.

        `EARLIEST` is the first that retention has left, `LATEST` where readers of what is committed come to. Raises
        `NotFound`.
        """
        found: dict[Partition, int] = {}
        if not times:
            return found
        what = "reading where partitions begin and end"

        async def attempt(line: _Line) -> dict[Partition, int]:
            left = times.keys() - found.keys()
            leaders = await line.leaders(left)
            if missing := left.difference(*leaders.values()):
                await line.counts({topic for topic, _ in missing})
                raise _NotYetError(f"there is no {_title(min(missing))}")
            later = set()
            for node, those in leaders.items():
                for partition, each in _each_partition((await line.ask(node, _times(those, times))).topics):
                    if each.error_code in _LEADER_LATER:
                        later.add(each.error_code)
                    else:
                        _check(each.error_code, f"{what}, {_title(partition)}")
                        found[partition] = each.offset
            if later:
                raise _NotYetError(f"a leader said {_name(min(later))}")
            return found

        return self._until(deadline, what, attempt)

    def positions(
        self, group: str, partitions: Sequence[Partition], deadline: Deadline, *, decided: bool
    ) -> dict[Partition, int | None]:
        """The positions of a group, None for a partition that has none.

        With `decided` without those that a transaction is about to change.
        """
        what = f"reading the positions of group {group!r}"

        async def attempt(line: _Line) -> dict[Partition, int | None]:
            node = await line.group_coordinator(group)
            answer = await line.ask(node, _fetch(group, partitions, decided))
            _check(answer.error_code, what)
            found: dict[Partition, int | None] = {}
            for partition, each in _each_partition(answer.topics):
                if each.error_code != _UNSTABLE:
                    _check(each.error_code, f"{what}, {_title(partition)}")
                    found[partition] = each.committed_offset if each.committed_offset >= 0 else None
            return found

        return self._until(deadline, what, attempt) if partitions else {}

    def counts(self, topics: Sequence[str], deadline: Deadline) -> dict[str, int]:
        """How many partitions each topic has. Raises `NotFound`."""

        async def attempt(line: _Line) -> dict[str, int]:
            return await line.counts(topics)

        return self._until(deadline, f"looking for topic {', '.join(topics)!r}", attempt) if topics else {}

    def transactions(self, deadline: Deadline, states: Sequence[str] = (), pids: Sequence[int] = ()) -> list[Listed]:
        """Every transactional id that any broker coordinates; only those in one of `states`, of one of `pids`."""
        what = "listing transactions"

        async def attempt(line: _Line) -> list[Listed]:
            found: dict[str, Listed] = {}
            for node in await line.nodes():
                request = ListTransactionsRequest(
                    state_filters=list(states), producer_id_filters=list(pids), max_version=0
                )
                answer = await line.ask(node, request)
                _check(answer.error_code, what)
                for each in answer.transaction_states:
                    found[each.transactional_id] = Listed(
                        each.transactional_id, each.producer_id, each.transaction_state
                    )
            return list(found.values())

        return self._until(deadline, what, attempt)

    def producers(
        self, partitions: Sequence[Partition], deadline: Deadline, *, readable_only: bool = False
    ) -> dict[Partition, list[ActiveProducer]]:
        """The producers that each partition's leader remembers; a partition that does not exist is absent.

        With `readable_only` so is one that this user may not read, instead of an `AccessDenied`.
        """
        found: dict[Partition, list[ActiveProducer]] = {}
        left = set(partitions)

        async def attempt(line: _Line) -> dict[Partition, list[ActiveProducer]]:
            leaders = await line.leaders(left)
            left.intersection_update(partition for those in leaders.values() for partition in those)
            for node, those in leaders.items():
                topics = [
                    DescribeProducersRequest.TopicRequest(name=topic, partition_indexes=numbers)
                    for topic, numbers in _by_topic(those).items()
                ]
                answer = await line.ask(node, DescribeProducersRequest(topics=topics))
                for partition, each in _each_partition(answer.topics):
                    if each.error_code in _NO_LEADER:
                        raise _NotYetError(f"the leader of {_title(partition)} is moving")
                    left.discard(partition)
                    if each.error_code == DONE:
                        found[partition] = [_active(producer) for producer in each.active_producers]
                    elif each.error_code != _UNKNOWN_TOPIC and not (readable_only and each.error_code in _DENIED):
                        raise _refused(each.error_code, f"asking for the producers of {_title(partition)}")
            return found

        return self._until(deadline, "asking for producers", attempt) if left else found

    def write_markers(
        self,
        pid: int,
        epoch: int,
        commit: bool,
        partitions: Sequence[Partition],
        deadline: Deadline,
        coordinator_epoch: int | None = None,
    ) -> None:
        """Write the markers that end a transaction in its partitions, as its coordinator would have done.

        A partition refuses a coordinator that is older than one it has heard of: without `coordinator_epoch` it is
        asked which that was. It needs a right on the whole cluster. Raises `Fenced` if a partition knows a newer epoch.
        """
        left = set(partitions)
        if coordinator_epoch is None:
            heard = [each for those in self.producers(partitions, deadline).values() for each in those]
            coordinator_epoch = max([0, *(each.coordinator_epoch for each in heard if each.pid == pid)])

        async def attempt(line: _Line) -> None:
            for node, those in (await line.leaders(left)).items():
                answer = await line.ask(node, _markers(pid, epoch, commit, coordinator_epoch, those))
                for partition, each in _each_partition(answer.markers[0].topics):
                    if each.error_code in _NO_LEADER | {_UNKNOWN_TOPIC}:
                        continue
                    _check(each.error_code, f"writing a transaction marker to {_title(partition)}")
                    left.discard(partition)
            if left:
                raise _NotYetError(f"{_title(min(left))} has no leader")

        self._until(deadline, "writing transaction markers", attempt)

    def partitions_everywhere(self, topic: str, deadline: Deadline) -> int:
        """How many partitions of a topic every living broker knows the leader of; 0 if one does not know the topic."""

        async def attempt(line: _Line) -> int:
            answers = [(await line.metadata([topic], node)).topics[0] for node in await line.nodes()]
            return min(len([1 for each in answer.partitions if each.leader_id >= 0]) for answer in answers)

        return self._until(deadline, f"asking every broker for topic {topic!r}", attempt)

    def transaction_version(self, deadline: Deadline) -> int:
        """The level of Kafka's feature transaction.version that the cluster has finalised; 0 where there is none."""

        async def attempt(line: _Line) -> int:
            return await line.transaction_version(line.any)

        return self._until(deadline, "asking for the cluster's features", attempt)

    def cluster_id(self, deadline: Deadline, *, nobody_for: float = math.inf) -> str:
        """The cluster's own id.

        Raises `BrokerUnavailable` when every server has refused the connection, or had no address, for `nobody_for`.
        """

        async def attempt(line: _Line) -> str:
            return str((await line.metadata()).cluster_id)

        return self._until(deadline, "asking for the cluster's id", attempt, nobody_for)

    def create_topic(
        self, name: str, partitions: int, replicas: int, config: Mapping[str, str], deadline: Deadline
    ) -> Answer:
        kind = CreateTopicsRequest.CreatableTopic
        configs = [kind.CreatableTopicConfig(name=key, value=value) for key, value in config.items()]
        topic = kind(name=name, num_partitions=partitions, replication_factor=replicas, assignments=[], configs=configs)
        request = partial(CreateTopicsRequest, topics=[topic], validate_only=False, max_version=6)
        return self._of_controller(request, lambda answer: answer.topics, deadline, f"creating topic {name!r}")

    def delete_topic(self, name: str, deadline: Deadline) -> Answer:
        request = partial(DeleteTopicsRequest, topic_names=[name], max_version=5)
        return self._of_controller(request, lambda answer: answer.responses, deadline, f"deleting topic {name!r}")

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> Answer:
        topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=partitions, assignments=None)
        request = partial(CreatePartitionsRequest, topics=[topic], validate_only=False)
        return self._of_controller(request, lambda answer: answer.results, deadline, f"growing topic {name!r}")

    def _of_controller(
        self, request: Callable[..., Any], results: Callable[[Any], Any], deadline: Deadline, what: str
    ) -> Answer:
        async def attempt(line: _Line) -> Answer:
            node = (await line.metadata()).controller_id
            answer = await line.ask(node, request(timeout_ms=max(1, int(deadline.left() * 1000))))
            (each,) = results(answer)
            return Answer(each.error_code, getattr(each, "error_message", None) or _name(each.error_code))

        return self._until(deadline, what, attempt, patient=True)

    def configs(
        self, kind: int, names: Sequence[str], deadline: Deadline
    ) -> dict[str, tuple[Answer, Mapping[str, str]]]:
        """The settings in effect of topics, or of one broker, which has to tell them itself."""
        resource = DescribeConfigsRequest.DescribeConfigsResource
        asked = [resource(resource_type=kind, resource_name=name, configuration_keys=None) for name in names]

        async def attempt(line: _Line) -> dict[str, tuple[Answer, Mapping[str, str]]]:
            await line.metadata()
            answer = await line.ask(
                int(names[0]) if kind == BROKER else line.any, DescribeConfigsRequest(resources=asked)
            )
            return {
                each.resource_name: (
                    Answer(each.error_code, each.error_message or _name(each.error_code)),
                    {entry.name: entry.value for entry in each.configs if entry.value is not None},
                )
                for each in answer.results
            }

        return self._until(deadline, "asking for settings", attempt) if names else {}

    def drop_records(self, partition: Partition, before: int, deadline: Deadline) -> Answer:
        """Records of a partition before an offset."""
        kind = DeleteRecordsRequest.DeleteRecordsTopic
        number = kind.DeleteRecordsPartition(partition_index=partition[1], offset=before)

        async def attempt(line: _Line) -> Answer:
            leaders = await line.leaders([partition])
            if not leaders:
                return Answer(_UNKNOWN_TOPIC, f"there is no {_title(partition)}")
            request = DeleteRecordsRequest(
                topics=[kind(name=partition[0], partitions=[number])], timeout_ms=max(1, int(deadline.left() * 1000))
            )
            ((_, each),) = _each_partition((await line.ask(next(iter(leaders)), request)).topics)
            return Answer(each.error_code, _name(each.error_code))

        return self._until(deadline, "dropping old records", attempt)

    def close(self) -> None:
        """Let go of every connection; a call that is under way ends by itself. Safe to repeat."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _until(
        self,
        deadline: Deadline,
        what: str,
        attempt: Callable[[_Line], Awaitable[T]],
        nobody_for: float = math.inf,
        patient: bool = False,
    ) -> T:
        """Try until it succeeds, is refused, the deadline passes, or for so many seconds no server was there at all.

        `patient` is for what a broker may well take long for: half of the time, before it is asked again.
        """
        reason, cause = "no time was left to ask", None
        begun, nobody = time.monotonic(), 0  # tries, one after the other
        for pause in _pauses():
            if deadline.expired:
                break
            try:
                return self._once(attempt, deadline.left() / 2 if patient else self._patience(deadline))
            except _NotYetError as error:
                reason, cause = str(error), error.__cause__
            except errors.IncompatibleBrokerVersion as error:
                raise NotSupported(f"{what}: the broker is too old for it; Kafka 3.0 or newer is needed") from error
            except _login_errors() as error:
                name = type(error).__name__
                raise AccessDenied(f"{what}: the broker refuses the login ({name}){self._advice}") from error
            except errors.KafkaTimeoutError as error:
                # An attempt that the deadline cut short tells less than one before it.
                reason, cause = (_reason(error), error) if cause is None else (reason, cause)
            except (errors.KafkaError, OSError) as error:
                advice = self._advice if isinstance(error, errors.KafkaConnectionError) else ""
                reason, cause = _reason(error) + advice, error
            nobody = nobody + 1 if any(sign in reason for sign in _NOBODY) else 0
            if nobody >= len(self._servers) and time.monotonic() - begun >= nobody_for:
                raise BrokerUnavailable(
                    f"nothing listens at {', '.join(self._servers)} ({reason.partition(';')[0]}); start the broker, or"
                    " correct the URL"
                )
            time.sleep(min(pause, deadline.left()))
        raise DeadlineExceeded(
            f"{what} at {','.join(self._servers)} took longer than the deadline of {deadline.seconds:g} s: {reason}"
        ) from cause

    def _patience(self, deadline: Deadline) -> float:
        """How long one attempt may take; where there are other servers, so that time is left for another one."""
        left = deadline.left()
        return min(left, _PATIENCE, max(left / 2, _LEAST_PATIENCE) if len(self._servers) > 1 else left)

    def _once(self, attempt: Callable[[_Line], Awaitable[T]], seconds: float) -> T:
        """One attempt. Its connections are kept if it was answered, and dropped if not; a witness keeps them itself."""
        line = self._take()
        kept = lent = False
        try:
            result = line.run(attempt, seconds)
            kept, lent = True, isinstance(result, Witness)
        except (TxnBridgeError, _NotYetError):
            line.forget()
            kept = True
            raise
        except (errors.KafkaError, OSError):
            self._try_another(line.server)
            raise
        finally:
            if not kept:
                line.close()
            elif not lent:
                self._give_back(line)
        return result

    def _take(self) -> _Line:
        with self._lock:
            if self._closed:
                raise InvalidState("the connection to Kafka is closed")
            line = self._idle.pop() if self._idle else None
            server = self._servers[0]
        if line is not None:
            line.catch_up()
            return line
        return _Line(server, self._config)

    def _give_back(self, line: _Line) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE:
                self._idle.append(line)
                return
        line.close()

    def _try_another(self, server: str) -> None:
        """A server that did not answer comes last from now on."""
        with self._lock:
            if self._servers[0] == server:
                self._servers.append(self._servers.pop(0))


class Witness:
    """A connection to the coordinator of a transactional id that is never made anew. One thread at a time.

    Who answers on it has lived since it was made. So when it says that a transaction which ended meanwhile is complete,
    its markers are written. One that was killed and has come back says the same, and may have forgotten them.
    """

    def __init__(self, id: str, line: _Line, connection: Any, give_back: Callable[[_Line], None]) -> None:
        self._id = id
        self._line: _Line | None = line  # None once the connection is lost, or given back
        self._connection = connection
        self._give_back = give_back
        self.first: Described | None = None  # what the coordinator said to begin with; None if it does not know the id

    def last(self, deadline: Deadline) -> Described | None:
        """The id's last transaction, once its markers are written; None if nobody is left who could tell."""
        pause = _FIRST_LOOK
        while self._line is not None:
            try:
                self._line.catch_up()
                found = self._line.run(self.ask, min(deadline.left(), _PATIENCE))
            except (errors.KafkaError, OSError, TxnBridgeError, _NotYetError):
                self._line.close()
                self._line = None
                break
            if found is None or found.state not in _ENDING:
                return found
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self._id!r}")
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 2, _LAST_LOOK)
        return None

    async def ask(self, _: _Line) -> Described | None:
        answer = await self._connection.send_request(DescribeTransactionsRequest(transactional_ids=[self._id]))
        (each,) = answer.transaction_states
        if each.error_code == _TRANSACTIONAL_ID_NOT_FOUND:
            return None
        _check(each.error_code, f"describing the transactional id {self._id!r}")
        return _described(each)

    def close(self) -> None:
        """Ask no more. Safe to repeat."""
        line, self._line = self._line, None
        if line is not None:
            self._give_back(line)


class _Line:
    """An event loop of kafka-python with its connections, driven by one thread at a time and never beyond its time.

    Nothing runs while nobody drives it. What it logs is dropped: it would be one line for each attempt at a broker
    that is away, and its debug lines hold passwords. What matters is in the errors.
    """

    any = "bootstrap-0"  # kafka-python's name of the server that it was given

    def __init__(self, server: str, config: Mapping[str, Any]) -> None:
        self.server = server
        self._levels: dict[Any, int] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        with _quiet():
            self._sockets: list[socket.socket] = []
            self._net = _loop(self._sockets)
            self._manager = KafkaConnectionManager(self._net, **{**config, "bootstrap_servers": server})

    def run(self, attempt: Callable[[_Line], Awaitable[T]], seconds: float) -> T:
        with _quiet():
            future = self._manager.call_soon(attempt, self)
            self._net.poll(timeout_ms=seconds * 1000, future=future)
        if not future.is_done:
            raise errors.KafkaTimeoutError(f"no answer within {seconds:.3g} s")
        if future.exception is not None:
            raise future.exception
        result: T = future.value
        return result

    def catch_up(self) -> None:
        """Take notice of connections that were closed while nobody looked."""
        with _quiet():
            self._net.poll(timeout_ms=0)

    def close(self) -> None:
        with _quiet():
            self._manager.close()
            self._net.close()
        for each in self._sockets:
            each.close()

    async def connect(self, node: Any) -> Any:
        try:
            # Without a background refresh of metadata, which would go on for ever.
            return await self._manager.get_connection(node, refresh_metadata_on_err=False)
        except (errors.KafkaError, OSError, TxnBridgeError):
            raise
        except Exception as error:  # of a token provider, which is the application's; its text may hold a secret
            raise BrokerUnavailable(f"logging in to the broker failed with {type(error).__name__}") from error

    async def ask(self, node: Any, request: Any) -> Any:
        connection = await self.connect(node)
        return await connection.send_request(request)

    async def metadata(self, topics: Iterable[str] = (), node: Any = any) -> Any:
        """An answer to a metadata request; from it the connections learn where the nodes are."""
        asked = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        answer = await self.ask(node, MetadataRequest(topics=asked, allow_auto_topic_creation=False))
        self._manager.cluster.update_metadata(answer)
        return answer

    async def nodes(self) -> list[int]:
        return [broker.node_id for broker in (await self.metadata()).brokers]

    async def coordinator(self, id: str) -> int:
        (node,) = await self.coordinators([id])
        return node

    async def group_coordinator(self, group: str) -> int:
        (node,) = await self.coordinators([group], _GROUP)
        return node

    async def coordinators(self, ids: Sequence[str], kind: int = _TRANSACTION) -> dict[int, list[str]]:
        """The coordinator of each transactional id, or of each group, as it was last told."""
        unknown = [id for id in ids if (kind, id) not in self._coordinators]
        if unknown:
            if len(self._coordinators) > _MOST_KNOWN:
                self.forget()
                unknown = list(ids)
            request = FindCoordinatorRequest(key_type=kind, coordinator_keys=unknown, min_version=4, max_version=4)
            for each in (await self.ask(self.any, request)).coordinators:
                _check(each.error_code, f"looking for the coordinator of {each.key!r}")
                self._coordinators[kind, each.key] = each.node_id
        found: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            found[self._coordinators[kind, id]].append(id)
        if any(self._manager.cluster.broker_metadata(node) is None for node in found):
            await self.metadata()
        return found

    def forget(self) -> None:
        """What was told may not be so any more."""
        self._coordinators.clear()

    async def leaders(self, partitions: Iterable[Partition]) -> dict[int, list[Partition]]:
        """The leader of each partition; one that does not exist is absent."""
        wanted = set(partitions)
        found: dict[int, list[Partition]] = defaultdict(list)
        for topic in (await self.metadata(sorted({name for name, _ in wanted}))).topics:
            if topic.error_code not in (DONE, _UNKNOWN_TOPIC):
                _check(topic.error_code, f"asking for the topic {topic.name!r}")
            for each in topic.partitions:
                partition = (topic.name, each.partition_index)
                if partition in wanted:
                    if each.leader_id < 0:
                        raise _NotYetError(f"{_title(partition)} has no leader")
                    found[each.leader_id].append(partition)
        return found

    async def counts(self, topics: Iterable[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for topic in (await self.metadata(sorted(topics))).topics:
            if topic.error_code == _UNKNOWN_TOPIC:
                raise NotFound(f"there is no topic {topic.name!r}")
            if topic.error_code not in _NO_LEADER:
                _check(topic.error_code, f"looking for topic {topic.name!r}")
            found[topic.name] = len(topic.partitions)
        return found

    async def transaction_version(self, node: Any) -> int:
        """The finalised level, as a node says now."""
        levels = (await self.ask(node, _features())).finalized_features or ()
        return max((int(each.max_version_level) for each in levels if each.name == "transaction.version"), default=0)

    async def bumps_epochs(self, node: Any) -> bool:
        """Whether EndTxn 5 may be sent. Asked once: a level that rises later disturbs no older request."""
        if node not in self._levels:
            self._levels[node] = await self.transaction_version(node)
        return self._levels[node] >= EPOCH_BUMPS  # only then EndTxn 5 is promised to work


def _features() -> Any:
    name = "txnbridge"
    return ApiVersionsRequest(client_software_name=name, client_software_version="1", min_version=3)


def _times(partitions: Iterable[Partition], times: Mapping[Partition, int]) -> Any:
    kind = ListOffsetsRequest.ListOffsetsTopic
    topics = [
        kind(
            name=topic,
            partitions=[
                kind.ListOffsetsPartition(
                    partition_index=number, current_leader_epoch=-1, timestamp=times[topic, number]
                )
                for number in numbers
            ],
        )
        for topic, numbers in _by_topic(partitions).items()
    ]
    return ListOffsetsRequest(
        replica_id=-1, isolation_level=_READ_COMMITTED, topics=topics, min_version=2, max_version=6
    )


def _fetch(group: str, partitions: Iterable[Partition], decided: bool) -> Any:
    topics = [
        OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=numbers)
        for topic, numbers in _by_topic(partitions).items()
    ]
    return OffsetFetchRequest(group_id=group, topics=topics, require_stable=decided, min_version=7, max_version=7)


def _add_offsets(id: str, pid: int, epoch: int, group: str) -> Any:
    return AddOffsetsToTxnRequest(
        transactional_id=id, producer_id=pid, producer_epoch=epoch, group_id=group, max_version=3
    )


def _positions(id: str, pid: int, epoch: int, member: Member, offsets: Mapping[Partition, int]) -> Any:
    kind = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    topics = [
        kind(
            name=topic,
            partitions=[
                kind.TxnOffsetCommitRequestPartition(
                    partition_index=number,
                    committed_offset=offsets[topic, number],
                    committed_leader_epoch=-1,
                    committed_metadata="",
                )
                for number in numbers
            ],
        )
        for topic, numbers in _by_topic(offsets).items()
    ]
    # Only from version 3 on does the coordinator check that the member belongs to the group; 5 is another protocol.
    return TxnOffsetCommitRequest(
        transactional_id=id,
        group_id=member.group,
        producer_id=pid,
        producer_epoch=epoch,
        generation_id=member.generation,
        member_id=member.name,
        group_instance_id=member.instance,
        topics=topics,
        min_version=3,
        max_version=3,
    )


def _markers(pid: int, epoch: int, commit: bool, coordinator_epoch: int, partitions: Iterable[Partition]) -> Any:
    kind = WriteTxnMarkersRequest.WritableTxnMarker
    topics = [
        kind.WritableTxnMarkerTopic(name=topic, partition_indexes=numbers)
        for topic, numbers in _by_topic(partitions).items()
    ]
    marker = kind(
        producer_id=pid,
        producer_epoch=epoch,
        transaction_result=commit,
        topics=topics,
        coordinator_epoch=coordinator_epoch,
    )
    return WriteTxnMarkersRequest(markers=[marker], min_version=1)


def _described(state: Any) -> Described:
    return Described(
        id=state.transactional_id,
        state=state.transaction_state,
        pid=state.producer_id,
        epoch=state.producer_epoch,
        start=None if state.transaction_start_time_ms < 0 else state.transaction_start_time_ms,
        timeout=state.transaction_timeout_ms,
        partitions=tuple((topic.topic, number) for topic in state.topics for number in topic.partitions),
    )


def _ended(answer: Any, pid: int, epoch: int, only_once: bool) -> Ended:
    if answer.API_VERSION >= 5 and answer.error_code == DONE:
        return Ended(DONE, answer.producer_id, answer.producer_epoch, only_once)
    return Ended(answer.error_code, pid, epoch, only_once)


def _active(producer: Any) -> ActiveProducer:
    start = producer.current_txn_start_offset
    return ActiveProducer(
        pid=producer.producer_id,
        epoch=producer.producer_epoch,
        start_offset=None if start < 0 else start,
        last_timestamp=producer.last_timestamp,
        coordinator_epoch=producer.coordinator_epoch,
    )


def _by_topic(partitions: Iterable[Partition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(partitions):
        found[topic].append(number)
    return found


def _each_partition(topics: Iterable[Any]) -> Iterator[tuple[Partition, Any]]:
    for topic in topics:
        for each in topic.partitions:
            yield (topic.name, each.partition_index), each


def _title(partition: Partition) -> str:
    return f"{partition[0]}[{partition[1]}]"


# --- errors ----------------------------------------------------------------------------------------------------------


def _check(code: int, what: str) -> None:
    """Raises our error for a broker's error code, `_NotYetError` for one that passes by itself."""
    if code in _NOT_NOW or code in _NO_LEADER:
        raise _NotYetError(f"{what}: {_name(code)}")
    if code != DONE:
        raise _refused(code, what)


def _refused(code: int, what: str) -> TxnBridgeError:
    text = f"{what}: {_name(code)}"
    if code in _DENIED:
        return AccessDenied(text)
    if code in _FENCED:
        return Fenced(text)
    if code == INVALID_TXN_STATE:
        return InvalidState(text)
    if code == TRANSACTION_ABORTABLE:
        return TransactionAborted(text)
    if code == _INVALID_TRANSACTION_TIMEOUT:
        return InvalidOption(f"{text}; the broker's transaction.max.timeout.ms is the limit")
    return BrokerUnavailable(text)


def _name(code: int) -> str:
    kind = errors.for_code(code)
    return f"{getattr(kind, 'message', None) or kind.__name__} (error {code})"


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, errors.KafkaError) else f"{type(error).__name__}: {error}"


def _login_errors() -> tuple[type[BaseException], ...]:
    return (
        errors.SaslAuthenticationFailedError,
        errors.UnsupportedSaslMechanismError,
        errors.IllegalSaslStateError,
        errors.AuthorizationError,
    )


def _pauses() -> Iterator[float]:
    yield from _PAUSES
    while True:
        yield _PAUSES[-1]


# --- kafka-python ----------------------------------------------------------------------------------------------------


def check_version() -> None:
    """Raise `BackendMissing` without the one minor version of kafka-python that we know."""
    try:
        version = importlib.metadata.version("kafka-python")
    except importlib.metadata.PackageNotFoundError:
        raise BackendMissing(
            "kafka-python is not installed: in a clone of txnbridge, pip install -e '.[kafka]'"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (3, 0, 12) <= numbers < (3, 1):
        raise BackendMissing(
            f"kafka-python {version} is installed and will not do: pip install 'kafka-python>=3.0.12,<3.1'"
        )
    if _import_failed is not None:
        raise BackendMissing(
            f"kafka-python {version} is installed and cannot be imported: {_import_failed}. A file beside your program"
            " with the name of one of Python's own modules does this, too"
        ) from _import_failed


def _loop(sockets: list[socket.socket]) -> Any:
    """An event loop that tells which sockets it waits for: kafka-python forgets to close those that never connected."""

    class Loop(NetworkSelector):  # type: ignore[misc]
        def wait_read(self, fileobj: Any, timeout_at: float | None = None) -> Any:
            _remember(sockets, fileobj)
            return super().wait_read(fileobj, timeout_at)

        def wait_write(self, fileobj: Any, timeout_at: float | None = None) -> Any:
            _remember(sockets, fileobj)
            return super().wait_write(fileobj, timeout_at)

    return Loop()


def _remember(sockets: list[socket.socket], one: socket.socket) -> None:
    if one not in sockets:
        sockets[:] = [each for each in sockets if each.fileno() >= 0] + [one]


_here = threading.local()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    _here.quiet = True
    try:
        yield
    finally:
        _here.quiet = False


def _is_wanted(record: logging.LogRecord) -> bool:
    return not getattr(_here, "quiet", False)


def _silence() -> None:
    """Drop what kafka-python logs on our behalf; an application that uses it too keeps its own lines."""
    # A filter counts only on the logger that is written to, hence on each.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("kafka."):
            logging.getLogger(name).addFilter(_is_wanted)
