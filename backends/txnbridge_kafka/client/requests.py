"""The raw requests that confluent-kafka lacks or cannot bound in time, such as EndTxn and WriteTxnMarkers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from txnbridge.errors import OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client import messages, wire
from txnbridge_kafka.client import protocol_types as codes
from txnbridge_kafka.client.connection import AttemptError
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.marker_proof import CoordinatorSession
from txnbridge_kafka.client.protocol_types import (
    ActiveProducer,
    CommittedOffset,
    EndTxnResult,
    OffsetCommitResult,
    RequestResult,
    RetryLaterError,
    TransactionDescription,
    TransactionListing,
    check,
    error_name,
    refused,
)
from txnbridge_kafka.client.request_retry import RequestRunner
from txnbridge_kafka.settings import KafkaSettings


class Requests:
    """Raw requests to a cluster. Any thread may call any method at any time; each returns by its deadline.

    A method may return later only because it resolves a host name or fetches an OAuth token, which happens on the
    calling thread. Each method raises `DeadlineExceeded` if no broker answers in time, `AccessDenied` if the user lacks
    a right, `NotSupported` if the broker is too old, and the errors that its docstring names.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._runner = RequestRunner(settings)

    def describe(self, ids: Sequence[str], deadline: Deadline) -> dict[str, TransactionDescription]:
        """Return the coordinators' descriptions of transactional ids; an unknown id is absent."""
        described: dict[str, TransactionDescription] = {}
        left = dict.fromkeys(ids)

        def attempt(connections: Connections) -> dict[str, TransactionDescription]:
            for node, keys in connections.coordinators(list(left)).items():
                answer = connections.send(node, wire.DESCRIBE_TRANSACTIONS(transactional_ids=keys))
                for each in answer.transaction_states:
                    if each.error_code in codes.COORDINATOR_RETRY_CODES:
                        continue
                    del left[each.transactional_id]
                    if each.error_code == codes.DONE:
                        described[each.transactional_id] = messages.transaction_description(each)
                    elif each.error_code != codes.TRANSACTIONAL_ID_NOT_FOUND:
                        raise refused(each.error_code, f"describing the transactional id {each.transactional_id!r}")
            if left:
                raise RetryLaterError(f"the coordinator of {next(iter(left))!r} is moving")
            return described

        return self._runner.repeat(deadline, "describing transactions", attempt) if left else described

    def coordinator_session(self, id: str, deadline: Deadline) -> CoordinatorSession:
        """Return a new connection to a transactional id's coordinator, which is never re-established."""

        def attempt(connections: Connections) -> CoordinatorSession:
            connection = connections.connect(connections.coordinator(id))
            session = CoordinatorSession(id, connections, connection, self._runner.give_back)
            session.first_description = session.describe(connections)
            return session

        return self._runner.repeat(deadline, f"asking the coordinator of {id!r}", attempt)

    def end(
        self, id: str, pid: int, epoch: int, commit: bool, deadline: Deadline, *, bump_epoch: bool | None = None
    ) -> EndTxnResult:
        """Send EndTxn to the coordinator until the answer is final: one of `END_TXN_CODES`.

        If the cluster supports it, a commit also raises the producer epoch. An abort raises the epoch only with
        `bump_epoch=True`, which is for producers that never commit by themselves. The reason: if the producer has just
        committed the transaction, the coordinator still answers "aborted" to an abort that raises the epoch.

        Raise `OutcomeUnknown` if the request was sent and no final answer came. After any other error the request was
        certainly not carried out.
        """
        what = f"{'committing' if commit else 'aborting'} the transaction of {id!r}"
        asked = False

        def attempt(connections: Connections) -> EndTxnResult:
            nonlocal asked
            node = connections.coordinator(id)
            may_bump = commit if bump_epoch is None else bump_epoch
            end = wire.END_TXN_AND_BUMP if may_bump and connections.bumps_epochs(node) else wire.END_TXN
            request = end(transactional_id=id, producer_id=pid, producer_epoch=epoch, committed=commit)
            connections.connect(node)
            before, asked = asked, True
            answer = connections.send(node, request)
            if answer.error_code in codes.NOT_CARRIED_OUT or answer.error_code in codes.DENIED:
                asked = before  # this copy of the request was refused and will never be carried out
            if answer.error_code in codes.DENIED:
                raise refused(answer.error_code, what)
            if answer.error_code not in codes.END_TXN_CODES:
                raise RetryLaterError(f"the coordinator answered {error_name(answer.error_code)}")
            return messages.end_txn_result(answer, pid, epoch, only_once=not before)

        try:
            return self._runner.repeat(deadline, what, attempt)
        except TxnBridgeError as error:
            if asked:
                raise OutcomeUnknown(f"{what}: the coordinator got the request and gave no final answer") from error
            raise

    def fence(self, id: str, timeout_ms: int, deadline: Deadline) -> tuple[int, int]:
        """Send InitProducerId: the coordinator aborts the id's open transaction and fences its producer.

        Return the new producer id and epoch.
        """
        what, fields = f"opening the transactional id {id!r}", {"producer_id": -1, "producer_epoch": -1}
        request = wire.INIT_PRODUCER_ID(transactional_id=id, transaction_timeout_ms=timeout_ms, **fields)

        def attempt(connections: Connections) -> tuple[int, int]:
            answer = connections.send(connections.coordinator(id), request)
            check(answer.error_code, what)
            return answer.producer_id, answer.producer_epoch

        return self._runner.repeat(deadline, what, attempt)

    def add_offsets(self, id: str, pid: int, epoch: int, group: str, deadline: Deadline) -> None:
        """Add a group to a transaction without committing an offset, so that an empty transaction is open.

        Raise `Fenced` if the id has another producer id or epoch, and `InvalidState` if its transaction is ending.
        """
        what = f"adding a group to the transaction of {id!r}"

        def attempt(connections: Connections) -> None:
            asked = wire.ADD_OFFSETS_TO_TXN(transactional_id=id, producer_id=pid, producer_epoch=epoch, group_id=group)
            check(connections.send(connections.coordinator(id), asked).error_code, what)

        self._runner.repeat(deadline, what, attempt)

    def acknowledge(
        self, id: str, pid: int, epoch: int, offsets: Mapping[str, Any], deadline: Deadline
    ) -> OffsetCommitResult:
        """Add offsets, as `offsets_of` returns them, to a transaction. Raise `NotFound` if a topic is gone."""
        added, out, lost, group = False, False, False, offsets["group_id"]
        add = wire.ADD_OFFSETS_TO_TXN(transactional_id=id, producer_id=pid, producer_epoch=epoch, group_id=group)
        commit = wire.TXN_OFFSET_COMMIT(transactional_id=id, producer_id=pid, producer_epoch=epoch, **offsets)

        def send(connections: Connections, node: int, request: Any) -> Any:
            nonlocal out, lost
            connections.connect(node)
            lost, out = lost or out, True
            answer = connections.send(node, request)
            out = False
            return answer

        def attempt(connections: Connections) -> int:
            nonlocal added
            if not added:
                answer = send(connections, connections.coordinator(id), add)
                if answer.error_code in codes.COORDINATOR_RETRY_CODES:
                    raise RetryLaterError(f"the coordinator of {id!r} answered {error_name(answer.error_code)}")
                if answer.error_code != codes.DONE:
                    return int(answer.error_code)
                added = True
            answer = send(connections, connections.group_coordinator(group), commit)
            refusals = {each.error_code for _, each in messages.each_partition(answer.topics)} - {codes.DONE}
            if final := refusals - codes.ACK_RETRY_CODES:
                return int(min(final))
            if codes.UNKNOWN_TOPIC in refusals:
                connections.counts({topic["name"] for topic in offsets["topics"]})
            if refusals:
                raise RetryLaterError(f"the coordinator of group {group!r} answered {error_name(min(refusals))}")
            return codes.DONE

        code = self._runner.repeat(deadline, f"acknowledging for group {group!r}", attempt)
        return OffsetCommitResult(code, lost)

    def commit_offsets(
        self, member: GroupMembership, first: Mapping[Partition, int], ids: Mapping[Partition, str], deadline: Deadline
    ) -> OffsetCommitResult:
        """Commit a group's `first` offsets as its member, outside a transaction; return the answer. Ask only once."""
        request = wire.OFFSET_COMMIT(**messages.offsets_of(member, first, ids, {}))

        def attempt(connections: Connections) -> OffsetCommitResult:
            node = connections.group_coordinator(member.group)
            connections.connect(node)
            try:
                answer = connections.send(node, request)
            except AttemptError:
                return OffsetCommitResult(codes.TIMED_OUT, answer_lost=True)
            found = (each.error_code for _, each in messages.each_partition(answer.topics))
            return OffsetCommitResult(next(filter(None, found), codes.DONE), answer_lost=False)

        return self._runner.repeat(deadline, f"committing the first offsets of group {member.group!r}", attempt)

    def leave(self, member: GroupMembership, deadline: Deadline) -> None:
        """Remove a member from its group: afterwards the broker refuses its earlier requests."""
        what = f"leaving group {member.group!r}"
        members = [{"member_id": member.name, "group_instance_id": member.instance}]
        request = wire.LEAVE_GROUP(group_id=member.group, members=members)

        def attempt(connections: Connections) -> None:
            answer = connections.send(connections.group_coordinator(member.group), request)
            for code in {answer.error_code, *(each.error_code for each in answer.members)} - codes.NO_MEMBER:
                check(code, what)

        self._runner.repeat(deadline, what, attempt)

    def list_offsets(
        self, times: Mapping[Partition, int], deadline: Deadline, request: Any = messages.list_offsets_request
    ) -> dict[Partition, int]:
        """Return, by partition, the first offset with a timestamp at or after a time in milliseconds, or -1.

        For the time `EARLIEST` return the first offset that retention has not removed, and for `LATEST` the last stable
        offset. Raise `NotFound` if a topic does not exist.
        """
        offsets: dict[Partition, int] = {}
        if not times:
            return offsets
        what = "looking up offsets of partitions"

        def attempt(connections: Connections) -> dict[Partition, int]:
            left = times.keys() - offsets.keys()
            leaders = connections.leaders(left)
            if missing := left.difference(*leaders.values()):
                connections.counts({topic for topic, _ in missing})
                raise RetryLaterError(f"there is no {messages.partition_name(min(missing))}")
            later = set()
            for node, led in leaders.items():
                for partition, each in messages.each_partition(connections.send(node, request(led, times)).topics):
                    if each.error_code in codes.LEADER_RETRY_CODES:
                        later.add(each.error_code)
                    else:
                        check(each.error_code, f"{what}, {messages.partition_name(partition)}")
                        offsets[partition] = each.offset
            if later:
                raise RetryLaterError(f"a leader answered {error_name(min(later))}")
            return offsets

        return self._runner.repeat(deadline, what, attempt)

    def epoch_ends(self, epochs: Mapping[Partition, int], deadline: Deadline) -> dict[Partition, int]:
        """Return where the log ends that each partition has up to a leader epoch; -1 if its leader has no such log."""
        return self.list_offsets(epochs, deadline, messages.leader_epochs_request)

    def led(self, partitions: Collection[Partition], deadline: Deadline, group: str = "") -> set[Partition]:
        """Return those of these partitions that have a leader now, for all that the group's coordinator knows."""
        if not partitions:
            return set()
        attempt = partial(Connections.leaders, partitions=partitions, led_only=True, group=group)
        return set().union(*self._runner.repeat(deadline, "looking up leaders", attempt).values())

    def begins(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's first offset that retention has not removed."""
        return self.list_offsets(dict.fromkeys(partitions, codes.EARLIEST), deadline)

    def ends(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, int]:
        """Return each partition's last stable offset, below which every transaction has ended."""
        return self.list_offsets(dict.fromkeys(partitions, codes.LATEST), deadline)

    def since(
        self, partitions: Iterable[Partition], timestamp: int, deadline: Deadline
    ) -> dict[Partition, tuple[int, int]]:
        """Return, by partition, the first offset with a timestamp at or after a time, and the last stable offset.

        The first offset may be that of a control marker. If no offset has such a timestamp, the last stable offset is
        returned in place of the first offset.
        """
        names = list(partitions)
        # The ends are read first, so that a message stored between the two requests is not skipped.
        ends = self.ends(names, deadline)
        since = self.list_offsets(dict.fromkeys(names, timestamp), deadline)
        return {name: (since[name] if 0 <= since[name] < ends[name] else ends[name], ends[name]) for name in names}

    def committed(
        self, group: str, partitions: Collection[Partition], deadline: Deadline, *, decided: bool = False
    ) -> dict[Partition, int | None]:
        """Return a group's committed offsets or None; with `decided`, none that an open transaction may change."""
        positions = self.positions(group, partitions, deadline, decided=decided)
        return {partition: None if each is None else each.at for partition, each in positions.items()}

    def positions(
        self, group: str, partitions: Collection[Partition], deadline: Deadline, *, decided: bool
    ) -> dict[Partition, CommittedOffset | None]:
        """Return a group's committed offset in each partition, with its topic's id then; None if there is none.

        With `decided` a partition is absent while an open transaction may change its committed offset.
        """
        what = f"reading the positions of group {group!r}"

        def attempt(connections: Connections) -> dict[Partition, CommittedOffset | None]:
            topics = messages.numbers_by_topic(partitions)
            request = wire.OFFSET_FETCH(group_id=group, topics=topics, require_stable=decided)
            answer = connections.send(connections.group_coordinator(group), request)
            check(answer.error_code, what)
            positions: dict[Partition, CommittedOffset | None] = {}
            for partition, each in messages.each_partition(answer.topics):
                if each.error_code != codes.UNSTABLE_OFFSET:
                    check(each.error_code, f"{what}, {messages.partition_name(partition)}")
                    positions[partition] = messages.committed_offset(each)
            return positions

        return self._runner.repeat(deadline, what, attempt) if partitions else {}

    def counts(self, topics: Collection[str], deadline: Deadline) -> dict[str, int]:
        """Return how many partitions each topic has. Raise `NotFound` if a topic does not exist."""
        what = f"looking up topic {', '.join(topics)!r}"
        return self._runner.repeat(deadline, what, lambda at: at.counts(topics)) if topics else {}

    def topic_ids(self, topics: Iterable[str], deadline: Deadline) -> dict[str, str]:
        """Return the id of each existing topic; each id is "" if the Kafka version has no topic ids.

        A topic that is deleted and created again gets another id. All leaders of the partitions are asked, because
        another broker's metadata may still be of the deleted topic.
        """
        wanted = sorted(set(topics))

        def attempt(connections: Connections) -> dict[str, str]:
            first = connections.metadata(wanted)
            ids = messages.topic_ids(first)
            for node in messages.leaders(first) if len(first.brokers) > 1 else ():
                others = messages.topic_ids(connections.metadata(wanted, node))
                if strange := [topic for topic, id in others.items() if ids.get(topic, id) != id]:
                    raise RetryLaterError(f"not every broker knows yet that topic {strange[0]!r} was created again")
            return ids

        return self._runner.repeat(deadline, f"looking up topic {', '.join(wanted)!r}", attempt) if wanted else {}

    def transactions(
        self, deadline: Deadline, states: Sequence[str] = (), pids: Sequence[int] = ()
    ) -> list[TransactionListing]:
        """Return the transactional ids of all brokers, or only those in these states or with these producer ids."""
        what = "listing transactions"

        def attempt(connections: Connections) -> list[TransactionListing]:
            listed: dict[str, TransactionListing] = {}
            for node in connections.nodes():
                answer = connections.send(node, wire.LIST_TRANSACTIONS(state_filters=states, producer_id_filters=pids))
                check(answer.error_code, what)
                for each in answer.transaction_states:
                    id = each.transactional_id
                    listed[id] = TransactionListing(id, each.producer_id, each.transaction_state)
            return list(listed.values())

        return self._runner.repeat(deadline, what, attempt)

    def producers(
        self, partitions: Sequence[Partition], deadline: Deadline, *, readable_only: bool = False, known: bool = False
    ) -> dict[Partition, list[ActiveProducer]]:
        """Return, by partition, the producers that its leader remembers. A partition that does not exist is absent.

        With `readable_only` a partition that has no leader, or that this user may not read, is absent too. Without
        `readable_only` it is waited for, or raises `AccessDenied`. With `known` all partitions certainly exist: one
        that a broker does not know, because the broker has just started, is waited for.
        """
        producers: dict[Partition, list[ActiveProducer]] = {}
        left = set(partitions)

        def attempt(connections: Connections) -> dict[Partition, list[ActiveProducer]]:
            leaders = connections.leaders(left, readable_only=readable_only)
            if known and (unknown := left.difference(*leaders.values())):
                raise RetryLaterError(f"a broker does not know {messages.partition_name(min(unknown))} yet")
            left.intersection_update(partition for led in leaders.values() for partition in led)
            for node, led in leaders.items():
                answer = connections.send(node, wire.DESCRIBE_PRODUCERS(topics=messages.numbers_by_topic(led)))
                for partition, each in messages.each_partition(answer.topics):
                    if each.error_code in codes.NO_LEADER or (known and each.error_code == codes.UNKNOWN_TOPIC):
                        raise RetryLaterError(f"the leader of {messages.partition_name(partition)} is moving")
                    left.discard(partition)
                    if each.error_code == codes.DONE:
                        producers[partition] = [messages.active_producer(active) for active in each.active_producers]
                    elif each.error_code not in {codes.UNKNOWN_TOPIC, *(codes.DENIED if readable_only else ())}:
                        raise refused(each.error_code, f"asking for producers of {messages.partition_name(partition)}")
            return producers

        return self._runner.repeat(deadline, "asking for producers", attempt) if left else producers

    def write_markers(
        self, pid: int, epoch: int, commit: bool, partitions: Sequence[Partition], deadline: Deadline
    ) -> None:
        """Write the control markers that end a transaction in these partitions, in place of its coordinator.

        A leader refuses a coordinator epoch that is older than the last one it has seen. So the leaders are first asked
        for the last epoch that they have seen. The request needs a right to the cluster resource. Raise `Fenced` if a
        partition has a newer producer epoch.
        """
        left = set(partitions)
        known = [each for led in self.producers(partitions, deadline).values() for each in led]
        coordinator_epoch = max([0, *(each.coordinator_epoch for each in known if each.pid == pid)])

        def attempt(connections: Connections) -> None:
            for node, led in connections.leaders(left).items():
                request = messages.markers_request(pid, epoch, commit, coordinator_epoch, led)
                answer = connections.send(node, request)
                for partition, each in messages.each_partition(answer.markers[0].topics):
                    if each.error_code in codes.NO_LEADER | {codes.UNKNOWN_TOPIC}:
                        continue
                    check(each.error_code, f"writing a transaction marker to {messages.partition_name(partition)}")
                    left.discard(partition)
            if left:
                raise RetryLaterError(f"{messages.partition_name(min(left))} has no leader")

        self._runner.repeat(deadline, "writing transaction markers", attempt)

    def partitions_everywhere(self, topic: str, deadline: Deadline) -> int:
        """Return how many of a topic's partitions have a leader in every broker's metadata."""

        def attempt(connections: Connections) -> int:
            answers = [connections.metadata([topic], node).topics[0] for node in connections.nodes()]
            return min(len([1 for each in answer.partitions if each.leader_id >= 0]) for answer in answers)

        return self._runner.repeat(deadline, f"asking every broker for topic {topic!r}", attempt)

    def transaction_version(self, deadline: Deadline) -> int:
        """Return the cluster's finalised level of the feature transaction.version; 0 if there is none."""
        what = "asking for the cluster's features"
        return self._runner.repeat(deadline, what, lambda at: at.transaction_version(at.bootstrap_node))

    def cluster_id(self, deadline: Deadline, *, no_listener_for: float = math.inf) -> str:
        """Return the cluster's id. Raise `BrokerUnavailable` if no server listened for `no_listener_for` seconds."""
        what = "asking for the cluster's id"
        return self._runner.repeat(deadline, what, lambda at: str(at.metadata().cluster_id), no_listener_for)

    def lists_transactions(self, deadline: Deadline) -> bool:
        """Return whether the brokers know ListTransactions, which not every one that speaks Kafka's protocol does."""
        return self._runner.repeat(
            deadline,
            "asking for the broker's requests",
            lambda at: bool(at.connect(at.bootstrap_node).versions(wire.LIST_TRANSACTIONS)),
        )

    def create_topic(
        self, name: str, partitions: int, replicas: int, config: Mapping[str, str], deadline: Deadline
    ) -> RequestResult:
        configs = [{"name": key, "value": value} for key, value in config.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": replicas, "assignments": []}
        request = partial(wire.CREATE_TOPICS, topics=[{**topic, "configs": configs}], validate_only=False)
        return self._ask_controller(request, "topics", deadline, f"creating topic {name!r}")

    def delete_topic(self, name: str, id: str, deadline: Deadline) -> RequestResult:
        """Delete a topic, by its id if it has one: a late or second copy then does not delete a topic created again."""
        topic = {"name": None if id else name, "topic_id": uuid.UUID(id or "0" * 32)}
        request = partial(wire.DELETE_TOPICS, topics=[topic], topic_names=[name])
        done = codes.UNKNOWN_TOPIC_ID if id else codes.UNKNOWN_TOPIC
        return self._ask_controller(request, "responses", deadline, f"deleting topic {name!r}", done)

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> RequestResult:
        topic = {"name": name, "count": partitions, "assignments": None}
        request = partial(wire.CREATE_PARTITIONS, topics=[topic], validate_only=False)
        return self._ask_controller(request, "results", deadline, f"growing topic {name!r}", codes.INVALID_PARTITIONS)

    def _ask_controller(
        self, request: Callable[..., Any], results: str, deadline: Deadline, what: str, done: int = codes.DONE
    ) -> RequestResult:
        """Return the controller's result. After a lost answer the code `done` says that the request was carried out."""
        asked = False

        def attempt(connections: Connections) -> RequestResult:
            nonlocal asked
            node = connections.metadata().controller_id
            connections.connect(node)
            before, asked = asked, True
            answer = connections.send(node, request(timeout_ms=max(1, int(deadline.left() * 1000))))
            (each,) = getattr(answer, results)
            if each.error_code == codes.NOT_CONTROLLER:
                raise RetryLaterError(f"{what}: {error_name(codes.NOT_CONTROLLER)}")
            code = codes.DONE if before and each.error_code == done else each.error_code
            return RequestResult(code, each.error_message or error_name(code))

        return self._runner.repeat(deadline, what, attempt, slow=True)

    def configs(
        self, kind: int, names: Sequence[str], deadline: Deadline
    ) -> dict[str, tuple[RequestResult, Mapping[str, str]]]:
        """Return the effective settings of topics, or of one broker (by `kind`), with the broker's error code.

        The settings of a broker are requested from that broker itself.
        """
        asked = [{"resource_type": kind, "resource_name": name, "configuration_keys": None} for name in names]
        request = wire.DESCRIBE_CONFIGS(resources=asked, include_synonyms=False, include_documentation=False)

        def attempt(connections: Connections) -> dict[str, tuple[RequestResult, Mapping[str, str]]]:
            connections.metadata()
            node = int(names[0]) if kind == codes.BROKER else connections.bootstrap_node
            answer = connections.send(node, request)
            return {
                each.resource_name: (
                    RequestResult(each.error_code, each.error_message or error_name(each.error_code)),
                    {entry.name: entry.value for entry in each.configs if entry.value is not None},
                )
                for each in answer.results
            }

        return self._runner.repeat(deadline, "asking for settings", attempt) if names else {}

    def drop_records(self, partition: Partition, before: int, deadline: Deadline) -> RequestResult:
        topic, number = partition
        asked = {"name": topic, "partitions": [{"partition_index": number, "offset": before}]}

        def attempt(connections: Connections) -> RequestResult:
            leaders = connections.leaders([partition])
            if not leaders:
                return RequestResult(codes.UNKNOWN_TOPIC, f"there is no {messages.partition_name(partition)}")
            request = wire.DELETE_RECORDS(topics=[asked], timeout_ms=max(1, int(deadline.left() * 1000)))
            ((_, each),) = messages.each_partition((connections.send(next(iter(leaders)), request)).topics)
            return RequestResult(each.error_code, error_name(each.error_code))

        return self._runner.repeat(deadline, "dropping old records", attempt)

    def close(self) -> None:
        """Close all idle connections. A request that is under way closes its connection at its end. Safe to repeat."""
        self._runner.close()
