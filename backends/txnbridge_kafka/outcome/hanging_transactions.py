"""Hanging transactions (KIP-664): ended at their coordinator, but open in a partition that lacks a control marker.

A broker that is killed right after a commit may never write the control markers. Then the partition's readers wait for
ever, no time-out helps, and the producer's next abort would also abort the committed messages (hazard H5). So hanging
transactions are searched for by a writer before its first message to a partition, by a group whose offsets stay
undecided, by every bridge's monitor in the partitions that the bridge uses, and by an administrator on demand.

A transaction is proven to hang before a marker is written. A process that has not opened the id asks the coordinator
before and after it asks the leaders: the proof is that both descriptions have the same ended transaction. With one
description only, a new transaction of the same writer could be mistaken for the hanging one (hazard H7). A writer's
proof is that its own opening of the id has raised the epoch: no producer can still use an older epoch. The decision is
read from the topic __transaction_state, because the coordinator may describe a later transaction in other partitions
(hazard H8).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from txnbridge.errors import AccessDenied, InvalidState, NotFound, NotSupported, StorageFailed, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.protocol_types import COMMITTED, ActiveProducer, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.transaction_state_log import RecordedDecision, recorded_decisions
from txnbridge_kafka.settings import Timing
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition
from txnbridge_kafka.write.owner import PREPARED_ID, KafkaOwner, evidence_key, recorded_outcome

_log = logging.getLogger("txnbridge")

# An id is in the state "Empty" if it was opened again after its last transaction.
_ENDED = ("CompleteCommit", "CompleteAbort", "Empty")
_REPAIR = "An administrator writes the missing markers by: txnbridge transactions repair {} --yes --reason TEXT"

OpenPartitions = Mapping[Partition, ActiveProducer]  # the partitions in which one producer has a transaction open


@dataclass(frozen=True)
class HangingTransaction:
    """A transaction that its coordinator describes as ended, and the partitions in which it is still open."""

    description: TransactionDescription
    open_in: OpenPartitions


@dataclass(frozen=True)
class HangingSurvey:
    """The hanging transactions in the partitions that have a leader and that this user may read.

    `unknown` has, by producer id, the partitions with an open transaction of a producer that no coordinator lists.
    `unread` is the number of the other partitions.
    """

    hanging: list[HangingTransaction]
    unknown: dict[int, OpenPartitions]
    unread: int


def survey(cluster: KafkaCluster, deadline: Deadline) -> HangingSurvey:
    """Return the cluster's hanging transactions: open at the partitions' leaders, but ended at their coordinators."""
    requests = cluster.requests
    everywhere = _all_partitions(cluster, deadline)
    producers = requests.producers(everywhere, deadline, readable_only=True)
    open_before = _by_producer(producers)
    # The coordinators are asked later than the leaders, so they list every producer that had an open transaction.
    ids = {each.id: each.pid for each in requests.transactions(deadline)}
    before = _ended(requests.describe([id for id, pid in ids.items() if pid in open_before], deadline))
    suspects = [partition for each in before.values() for partition in open_before[each.pid]]
    open_now = _by_producer(requests.producers(suspects, deadline))
    after = requests.describe(list(before), deadline)
    hanging = [
        HangingTransaction(each, open_now[each.pid])
        for id, each in before.items()
        if each.pid in open_now and after.get(id) == each
    ]
    unknown = {pid: open_before[pid] for pid in sorted(open_before.keys() - ids.values())}
    return HangingSurvey(hanging, unknown, unread=len(everywhere) - len(producers))


def write_missing_markers_of_id(
    cluster: KafkaCluster, id: str, deadline: Deadline, partitions: Sequence[Partition] | None = None
) -> list[str]:
    """Write the missing markers of a transactional id in these partitions, or in all; return the markers as text.

    Raise `NotFound` if no coordinator knows the id, and `InvalidState` unless its transaction is proven to hang and the
    decision for each partition is known. After either error no marker was written.
    """
    before = cluster.requests.describe([id], deadline).get(id)
    if before is None:
        raise NotFound(f"no coordinator knows {id!r}")
    if before.state not in _ENDED:
        raise InvalidState(f"the transaction of {id} has not ended ({before.state}): end it instead")
    partitions = _all_partitions(cluster, deadline) if partitions is None else partitions
    open_in = _by_producer(cluster.requests.producers(partitions, deadline)).get(before.pid, {})
    decisions = last_decisions(open_in, recorded_decisions(cluster, id, deadline) if open_in else ())
    if unknown := open_in.keys() - decisions:
        raise InvalidState(
            f"the outcome of the transaction of {id} in {listed(unknown)} is no longer in its coordinator's log: its"
            " owner may find the outcome in the decision log, and writes the markers before its next message there"
        )
    if cluster.requests.describe([id], deadline).get(id) != before:
        raise InvalidState(f"{id} is in use: stop its writer first")
    return _write_markers(cluster, before, _as_markers(decisions), deadline)


def write_missing_markers_of_group(cluster: KafkaCluster, group: str, deadline: Deadline) -> list[str]:
    """Write the missing markers in the partition of `__consumer_offsets` with a group's committed offsets (hazard H9).

    Return the markers as text.
    """
    partition = offsets_partition(group, cluster.topics.partitions(OFFSETS_TOPIC, deadline))
    return write_missing_markers_of_others(cluster, [partition], deadline)


def write_missing_markers_of_others(
    cluster: KafkaCluster, partitions: Sequence[Partition], deadline: Deadline
) -> list[str]:
    """Find the transactions that hang in these partitions, and write their missing markers in all their partitions.

    Called for transactions of other processes: the producer and its broker may both be gone, so that nobody else writes
    the markers (hazard H10). Return the markers as text. If none was written, raise the error of a transaction whose
    markers could not be written, such as `StorageFailed` if no record has its outcome. Raise `AccessDenied`, with a
    command for an administrator, if this user may not write markers.
    """
    requests = cluster.requests
    if not (pids := list(open_transactions(cluster, partitions, deadline))):
        return []
    before = _ended(requests.describe([each.id for each in requests.transactions(deadline, pids=pids)], deadline))
    written: list[str] = []
    failed: TxnBridgeError | None = None
    for id, ended in before.items():
        if ended.pid not in open_transactions(cluster, partitions, deadline):
            continue  # the markers have just been written
        try:
            decisions = recorded_decisions(cluster, id, deadline)
            open_in = open_transactions(cluster, partitions, deadline).get(ended.pid, {})
            if open_in and requests.describe([id], deadline).get(id) == ended:
                written += _fence_and_write(cluster, ended, open_in, decisions, deadline)
        except AccessDenied as error:
            raise AccessDenied(f"{error}. {_REPAIR.format(id)}") from error
        except TxnBridgeError as error:
            failed = error
    if failed is not None and not written:
        raise failed
    return written


def _fence_and_write(
    cluster: KafkaCluster,
    ended: TransactionDescription,
    open_in: OpenPartitions,
    decisions: Sequence[RecordedDecision],
    deadline: Deadline,
) -> list[str]:
    """Fence a hanging transaction's id, unless it was opened again; write and return the missing markers, as text.

    A marker ends no transaction of a later epoch. So the fence is needed only against a producer of the same epoch, and
    an owner that has opened the id again keeps it. An id for prepared transactions is not fenced: each epoch has only
    one, and the id's owner may have prepared the next one meanwhile, which the fence would abort.
    """
    decided = last_decisions(open_in, decisions)
    if unknown := open_in.keys() - decided:
        raise StorageFailed(f"no record has the outcome of the transaction of {ended.id} in {listed(unknown)} any more")
    epoch = ended.epoch  # the last one of which no producer can begin another transaction
    if max(each.epoch for each in decided.values()) < epoch:
        epoch -= 1
    elif not PREPARED_ID.fullmatch(ended.id):
        try:
            cluster.requests.fence(ended.id, int(cluster.settings.timeout * 1000), deadline)
        except AccessDenied as error:  # to this id alone: the search for other transactions goes on
            raise StorageFailed(f"{error}. {_REPAIR.format(ended.id)}") from error
    decisions = [each for each in decisions if each.pid == ended.pid and each.epoch <= epoch]
    partitions = sorted({partition for each in decisions for partition in each.partitions})
    everywhere = _by_producer(cluster.requests.producers(partitions, deadline)).get(ended.pid, {})
    # The owner may have begun a newer transaction since.
    old = {partition: active for partition, active in everywhere.items() if active.epoch <= epoch}
    written = _write_markers(cluster, ended, _as_markers(last_decisions(old, decisions)), deadline)
    return [f"{ended.id}: {each}" for each in written]


def write_missing_markers_of_owner(
    cluster: KafkaCluster,
    owner: KafkaOwner,
    opened: TransactionDescription,
    previous: TransactionDescription,
    partitions: Sequence[Partition],
    deadline: Deadline,
) -> None:
    """Write the missing markers of an id's earlier transactions in these partitions, after this process opened the id.

    `opened` and `previous` are the coordinator's descriptions after and before this process opened the id. Raise
    `StorageFailed` if no record has a hanging transaction's outcome.
    """
    try:
        producers = cluster.requests.producers(partitions, deadline, known=True)
    except (AccessDenied, NotSupported) as error:
        _log.warning("hanging transactions cannot be looked for: %s", error)
        return
    of_id = _by_producer(producers).get(opened.pid, {})
    open_in = {partition: active for partition, active in of_id.items() if active.epoch < opened.epoch}
    if not open_in:
        return
    markers = _missing_markers(cluster, owner, previous, open_in, deadline)
    with cluster.events.step("step:repair", id=opened.id, partitions=len(open_in)):
        written = _write_markers(cluster, opened, markers, deadline)
    _log.warning("%s: wrote missing control markers: %s", opened.id, ", ".join(written))


def _missing_markers(
    cluster: KafkaCluster,
    owner: KafkaOwner,
    previous: TransactionDescription,
    open_in: OpenPartitions,
    deadline: Deadline,
) -> dict[Partition, tuple[int, bool]]:
    """Return, by partition, the epoch and the decision for its missing marker, from the topic __transaction_state.

    If this user may not read that topic, or it has no decision of the epoch any more, the decision is taken from the
    coordinator's description before this process opened the id, or from the decision log. These two sources are wrong
    only if other programs write under this id: they may have had another transaction in the same epoch.
    """
    known: Sequence[RecordedDecision] = ()
    try:
        known = recorded_decisions(cluster, previous.id, deadline)
    except AccessDenied as error:
        _log.warning("this user may not read a transaction's outcome in the coordinator's log: %s", error)
    markers = _as_markers(last_decisions(open_in, known))
    for partition, active in open_in.items():
        if partition in markers:
            continue
        commit = None if _of_epoch(active, known) else _epoch_outcome(owner, previous, active.epoch, deadline)
        if commit is None:
            raise StorageFailed(
                f"{listed([partition])} has a hanging transaction of an earlier owner of {previous.id}, and no record"
                " has its outcome; see `txnbridge doctor`"
            )
        markers[partition] = active.epoch, commit
    return markers


def _epoch_outcome(owner: KafkaOwner, previous: TransactionDescription, epoch: int, deadline: Deadline) -> bool | None:
    """Return whether an epoch's last transaction was committed; None if unknown.

    The outcome is taken from `previous`, if it describes this epoch, or else from the decision log.
    """
    if epoch == previous.epoch and previous.state in ("CompleteCommit", "CompleteAbort"):
        return previous.state in COMMITTED
    if owner.opening is None:
        return None
    state = recorded_outcome(owner.ledger, evidence_key(previous.id, previous.pid, f"epoch {epoch}"), deadline)
    return None if state is None else state == "committed"


def last_decisions(open_in: OpenPartitions, known: Sequence[RecordedDecision]) -> dict[Partition, RecordedDecision]:
    """Return, by partition, the last decision recorded for the producer epoch of the partition's open transaction.

    This decision is about the open transaction: the marker of any later decision would have ended that transaction.
    """
    return {
        partition: decision
        for partition, active in open_in.items()
        for decision in _of_epoch(active, known)
        if partition in decision.partitions
    }


def _of_epoch(active: ActiveProducer, known: Sequence[RecordedDecision]) -> list[RecordedDecision]:
    # The end of a transaction may raise the epoch by one; its markers then have the new epoch.
    return [each for each in known if each.pid == active.pid and each.epoch - active.epoch in (0, 1)]


def _as_markers(decisions: Mapping[Partition, RecordedDecision]) -> dict[Partition, tuple[int, bool]]:
    return {partition: (each.epoch, each.commit) for partition, each in decisions.items()}


def _write_markers(
    cluster: KafkaCluster, of: TransactionDescription, markers: Mapping[Partition, tuple[int, bool]], deadline: Deadline
) -> list[str]:
    """Write control markers, and return them as text, such as "commit in topic[0]"."""
    grouped: dict[tuple[int, bool], list[Partition]] = defaultdict(list)
    for partition, marker in markers.items():
        grouped[marker].append(partition)
    for (epoch, commit), partitions in sorted(grouped.items()):
        cluster.requests.write_markers(of.pid, epoch, commit, partitions, deadline)
    return [f"{'commit' if commit else 'abort'} in {listed(those)}" for (_, commit), those in sorted(grouped.items())]


def listed(partitions: Collection[Partition]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions))


def _all_partitions(cluster: KafkaCluster, deadline: Deadline) -> list[Partition]:
    topics = cluster.topics.all(deadline)
    return [(name, number) for name, topic in topics.items() for number in topic.partitions]


def open_transactions(
    cluster: KafkaCluster, partitions: Sequence[Partition], deadline: Deadline, *, readable_only: bool = False
) -> dict[int, OpenPartitions]:
    """Return, by producer id, the open transactions in these partitions.

    With `readable_only` the partitions that have no leader, or that this user may not read, are left out.
    """
    return _by_producer(cluster.requests.producers(partitions, deadline, readable_only=readable_only))


def _by_producer(producers: Mapping[Partition, Iterable[ActiveProducer]]) -> dict[int, OpenPartitions]:
    grouped: dict[int, dict[Partition, ActiveProducer]] = defaultdict(dict)
    for partition, active_producers in producers.items():
        for active in active_producers:
            if active.start_offset is not None:
                grouped[active.pid][partition] = active
    return dict(grouped)


def _ended(described: Mapping[str, TransactionDescription]) -> dict[str, TransactionDescription]:
    return {id: each for id, each in described.items() if each.state in _ENDED}


_LONGEST_CHECK = 10.0
_SHARE = 0.01  # the largest share of the time that checks take


class HangingTransactionMonitor:
    """Looks for hanging transactions in `cluster.watched_partitions`, and ends them, on a background thread.

    A writer writes the missing markers of its own id only. If a process and its broker die at the same moment, the last
    transaction of the process may block readers for ever. So each bridge checks its partitions every ten seconds
    (hazard H10).
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._before: dict[int, OpenPartitions] = {}
        self._warned = ""
        weakref.finalize(self, self._ended.set).atexit = False

    def start(self) -> None:
        with self._guard:
            if self._thread is None:
                arguments = weakref.ref(self), self._ended, self._cluster.settings.timing
                thread = threading.Thread(target=_run, args=arguments, name="txnbridge-kafka-watch", daemon=True)
                thread.start()
                self._thread = thread  # unless no more threads can be started now: the next call tries again

    def close(self) -> None:
        """Stop the checks without waiting. A check that is under way ends when the bridge closes its connections."""
        self._ended.set()

    def check(self) -> bool:
        """Write the missing markers of transactions that this check and the last one found hanging.

        Return False if further checks are useless: the bridge is closed, its user lacks a right, or the broker is old.
        """
        try:
            for written in self._write_missing_markers(Deadline(_LONGEST_CHECK)):
                _log.warning("wrote the missing control marker of the hanging transaction %s", written)
        except (AccessDenied, NotSupported, StorageFailed) as error:
            if str(error) != self._warned:
                self._warned = str(error)
                _log.warning(
                    "readers may wait for a hanging transaction, which cannot be looked for or ended from here: %s. See"
                    " txnbridge doctor",
                    error,
                )
            return isinstance(error, StorageFailed)  # after other errors each attempt would fence a running producer
        except InvalidState:
            return False  # the connection to the cluster is closed
        except TxnBridgeError as error:
            _log.debug("the next check repeats a failed search for hanging transactions: %s", error)
        return True

    def _write_missing_markers(self, deadline: Deadline) -> list[str]:
        now = open_transactions(self._cluster, list(self._cluster.watched_partitions), deadline, readable_only=True)
        before, self._before = self._before, now
        still: list[Partition] = [
            partition
            for pid, open_in in now.items()
            for partition, active in open_in.items()
            if (then := before.get(pid, {}).get(partition)) and then.start_offset == active.start_offset
        ]
        return write_missing_markers_of_others(self._cluster, still, deadline) if still else []


def _run(monitor_of: weakref.ref[HangingTransactionMonitor], ended: threading.Event, timing: Timing) -> None:
    repeat, took = True, 0.0
    while repeat and not ended.wait(max(timing.monitor_interval, min(took / _SHARE, timing.monitor_longest_interval))):
        if (monitor := monitor_of()) is None:
            return
        begun = time.monotonic()
        repeat = monitor.check()
        took = time.monotonic() - begun
        del monitor  # without this reference an unused monitor can be garbage-collected during the wait
