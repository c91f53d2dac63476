"""Transactions that have ended for their coordinator and are still open in a partition, proven before they are touched.

A broker that is killed right after a commit may forget to write its markers. Readers stop there, no time-out helps, and
the next abort of the same producer would take the committed messages with it. So a writer looks before its first
message to a partition, a group that waits too long for its own positions looks there, every bridge looks now and then
where it is at work, and an administrator at any time.

An administrator's proof is what the coordinator says before and after the leaders are asked: ended, and the same
transaction. Without the second look a transaction that its writer has begun since would be taken for the forgotten one.
A writer's proof is its own opening of the id: it has raised the epoch, so what is open under an older one is nobody's.
How it ended is read from the coordinator's log, because what the coordinator tells may be about a later one, elsewhere.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from txnbridge.errors import AccessDenied, InvalidState, NotFound, StorageFailed
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.responses import COMMITTED, ActiveProducer, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.transaction_state_log import RecordedDecision, recorded_decisions
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition
from txnbridge_kafka.write.owner import KafkaOwner, evidence_key, recorded_outcome

_log = logging.getLogger("txnbridge")

# "Empty" is an id that was opened again since.
_ENDED = ("CompleteCommit", "CompleteAbort", "Empty")

Held = Mapping[Partition, ActiveProducer]


@dataclass(frozen=True)
class HangingTransaction:
    """What the coordinator calls ended, and where it is open."""

    told: TransactionDescription
    held: Held


@dataclass(frozen=True)
class HangingSurvey:
    """What of a cluster this user may read: what was forgotten there, and what is open of producers that no coordinator
    knows, by their ids. `unread` partitions could not be looked at."""

    hanging: list[HangingTransaction]
    unknown: dict[int, Held]
    unread: int


def survey(cluster: KafkaCluster, deadline: Deadline) -> HangingSurvey:
    """Ask every leader for what is open, and the coordinators about it."""
    requests = cluster.requests
    everywhere = _everywhere(cluster, deadline)
    asked = requests.producers(everywhere, deadline, readable_only=True)
    held = _open_ones(asked)
    # Asked for after that: whoever had something open then is known to a coordinator since.
    ids = {each.id: each.pid for each in requests.transactions(deadline)}
    before = _ended(requests.describe([id for id, pid in ids.items() if pid in held], deadline))
    suspects = {told.pid for told in before.values()}
    again = _open_ones(requests.producers([one for pid in suspects for one in held[pid]], deadline))
    after = requests.describe(list(before), deadline)
    return HangingSurvey(
        hanging=[
            HangingTransaction(told, again[told.pid])
            for id, told in before.items()
            if told.pid in again and after.get(id) == told
        ],
        unknown={pid: where for pid, where in held.items() if pid not in set(ids.values())},
        unread=len(everywhere) - len(asked),
    )


def write_missing_markers_of_id(
    cluster: KafkaCluster, id: str, deadline: Deadline, where: Sequence[Partition] | None = None
) -> list[str]:
    """Write the markers of an id that were forgotten, in these partitions or anywhere, and say which.

    Raises `NotFound`, and `InvalidState` without a proof of each: then nothing was written.
    """
    told = cluster.requests.describe([id], deadline).get(id)
    if told is None:
        raise NotFound(f"no coordinator knows {id!r}")
    if told.state not in _ENDED:
        raise InvalidState(f"the transaction of {id} has not ended ({told.state}): end it instead")
    asked = cluster.requests.producers(_everywhere(cluster, deadline) if where is None else where, deadline)
    held = _open_ones(asked).get(told.pid, {})
    ends = last_decisions(held, recorded_decisions(cluster, id, deadline) if held else ())
    if held.keys() - ends:
        raise InvalidState(
            f"how the transaction of {id} in {listed(held.keys() - ends)} ended is not in its coordinator's log any"
            " more: its owner may know from the decision log, and mends it before its next message there"
        )
    if cluster.requests.describe([id], deadline).get(id) != told:
        raise InvalidState(f"{id} is in use: stop its writer first")
    return _write(cluster, told, _decided(ends), deadline)


def write_missing_markers_of_group(cluster: KafkaCluster, group: str, deadline: Deadline) -> list[str]:
    """Write the markers, forgotten where a group's positions are kept, that make it wait for an end that was decided.

    Raises as `mend_others`.
    """
    place = offsets_partition(group, cluster.topics.partitions(OFFSETS_TOPIC, deadline))
    return write_missing_markers_of_others(cluster, [place], deadline)


def write_missing_markers_of_others(cluster: KafkaCluster, where: Sequence[Partition], deadline: Deadline) -> list[str]:
    """Write the markers that were forgotten there, and wherever else the same transaction was, and say which.

    Who has forgotten them, and its producer, may both be gone: then nobody else would look.
    Raises `StorageFailed` if nobody knows how one ended, and `AccessDenied` with what an administrator can do.
    """
    requests = cluster.requests
    if not (pids := list(open_transactions(cluster, where, deadline))):
        return []
    before = _ended(requests.describe([each.id for each in requests.transactions(deadline, pids=pids)], deadline))
    written: list[str] = []
    failed: StorageFailed | None = None
    for id, told in before.items():
        if told.pid not in open_transactions(cluster, where, deadline):
            continue  # it has just ended
        try:
            known = recorded_decisions(cluster, id, deadline)
            held = open_transactions(cluster, where, deadline).get(told.pid, {})
            if held and requests.describe([id], deadline).get(id) == told:
                written += _finish(cluster, told, held, known, deadline)
        except StorageFailed as error:
            failed = error
        except AccessDenied as error:
            command = f"txnbridge transactions repair {id} --yes --reason TEXT"
            raise AccessDenied(f"{error}. An administrator finishes it: {command}") from error
    if failed is not None and not written:
        raise failed
    return written


def _finish(
    cluster: KafkaCluster,
    told: TransactionDescription,
    held: Held,
    known: Sequence[RecordedDecision],
    deadline: Deadline,
) -> list[str]:
    """With the proof that it has ended, and known how. Its id is opened first: a producer that lives begins nothing
    there meanwhile, is told that it was shut out, and opens its id again.
    """
    if unknown := held.keys() - last_decisions(held, known):
        raise StorageFailed(f"how the transaction of {told.id} in {listed(unknown)} ended is not known any more")
    cluster.requests.fence(told.id, told.timeout, deadline)
    where = sorted({partition for end in known if end.pid == told.pid for partition in end.partitions})
    everywhere = _open_ones(cluster.requests.producers(where, deadline)).get(told.pid, {})
    # The owner of the id may have opened a newer one since.
    ends = last_decisions({at: active for at, active in everywhere.items() if active.epoch <= told.epoch}, known)
    return [f"{told.id}: {each}" for each in _write(cluster, told, _decided(ends), deadline)]


def write_missing_markers_of_owner(
    cluster: KafkaCluster,
    owner: KafkaOwner,
    opened: TransactionDescription,
    previous: TransactionDescription,
    partitions: Sequence[Partition],
    deadline: Deadline,
) -> None:
    """Write the markers that are missing there of earlier openings of an id that this process has opened.

    `past` is what the coordinator said before that. Opening the id has waited until no marker was on its way any more.
    Raises `StorageFailed` if nobody knows how a forgotten transaction ended.
    """
    try:
        asked = cluster.requests.producers(partitions, deadline)
    except AccessDenied as error:
        _log.warning("forgotten markers cannot be looked for without the right to read: %s", error)
        return
    of_id = _open_ones(asked).get(opened.pid, {})
    held = {where: active for where, active in of_id.items() if active.epoch < opened.epoch}
    if not held:
        return
    ends = _own_ends(cluster, owner, previous, held, deadline)
    with cluster.events.step("step:repair", id=opened.id, partitions=len(held)):
        written = _write(cluster, opened, ends, deadline)
    _log.warning("%s: the broker had forgotten markers, which are written now: %s", opened.id, ", ".join(written))


def _own_ends(
    cluster: KafkaCluster, owner: KafkaOwner, previous: TransactionDescription, held: Held, deadline: Deadline
) -> dict[Partition, tuple[int, bool]]:
    """The epoch and the decision of each: as the coordinator's log has them.

    Without the right to that, or if it says nothing of their time any more, as the coordinator said before the opening,
    or as that was recorded: about another transaction of the same epoch, if other programs write under this id.
    """
    known: Sequence[RecordedDecision] = ()
    try:
        known = recorded_decisions(cluster, previous.id, deadline)
    except AccessDenied as error:
        _log.warning("the coordinator's log cannot be asked how a transaction ended: %s", error)
    ends = _decided(last_decisions(held, known))
    for where, active in held.items():
        if where in ends:
            continue
        commit = None if _of_its_time(active, known) else _as_recorded(owner, previous, active.epoch, deadline)
        if commit is None:
            raise StorageFailed(
                f"{listed([where])} holds an open transaction of an earlier owner of {previous.id}, and nobody knows"
                " how it ended; see `txnbridge doctor`"
            )
        ends[where] = active.epoch, commit
    return ends


def _as_recorded(owner: KafkaOwner, previous: TransactionDescription, epoch: int, deadline: Deadline) -> bool | None:
    if epoch == previous.epoch and previous.state in ("CompleteCommit", "CompleteAbort"):
        return previous.state in COMMITTED
    if owner.opening is None:
        return None
    state = recorded_outcome(owner.ledger, evidence_key(previous.id, previous.pid, f"epoch {epoch}"), deadline)
    return None if state is None else state == "committed"


def last_decisions(held: Held, known: Sequence[RecordedDecision]) -> dict[Partition, RecordedDecision]:
    """Of each partition that is held open, where it is known, the last end there: a later one would have ended it."""
    ends: dict[Partition, RecordedDecision] = {}
    for where, active in held.items():
        for end in _of_its_time(active, known):
            if where in end.partitions:
                ends[where] = end
    return ends


def _decided(ends: Mapping[Partition, RecordedDecision]) -> dict[Partition, tuple[int, bool]]:
    """The epoch and the decision of each, as markers have them."""
    return {where: (end.epoch, end.commit) for where, end in ends.items()}


def _of_its_time(active: ActiveProducer, known: Sequence[RecordedDecision]) -> list[RecordedDecision]:
    # An end may raise the epoch by one, and its markers carry the new one.
    return [end for end in known if end.pid == active.pid and end.epoch - active.epoch in (0, 1)]


def _write(
    cluster: KafkaCluster, of: TransactionDescription, ends: Mapping[Partition, tuple[int, bool]], deadline: Deadline
) -> list[str]:
    """Write markers, and say which."""
    grouped: dict[tuple[int, bool], list[Partition]] = defaultdict(list)
    for where, end in ends.items():
        grouped[end].append(where)
    for (epoch, commit), those in sorted(grouped.items()):
        cluster.requests.write_markers(of.pid, epoch, commit, those, deadline)
    return [f"{'commit' if commit else 'abort'} in {listed(those)}" for (_, commit), those in sorted(grouped.items())]


def listed(partitions: Collection[Partition]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions))


def _everywhere(cluster: KafkaCluster, deadline: Deadline) -> list[Partition]:
    topics = cluster.topics.all(deadline)
    return [(name, number) for name, topic in topics.items() for number in topic.partitions]


def open_transactions(
    cluster: KafkaCluster, where: Sequence[Partition], deadline: Deadline, *, readable_only: bool = False
) -> dict[int, Held]:
    """What is open in these partitions, by producer id. Raises `AccessDenied`, or leaves out what may not be read."""
    return _open_ones(cluster.requests.producers(where, deadline, readable_only=readable_only))


def _open_ones(asked: Mapping[Partition, Iterable[ActiveProducer]]) -> dict[int, Held]:
    """By producer id: where the leaders hold a transaction of it open."""
    held: dict[int, dict[Partition, ActiveProducer]] = defaultdict(dict)
    for partition, producers in asked.items():
        for active in producers:
            if active.start_offset is not None:
                held[active.pid][partition] = active
    return dict(held)


def _ended(described: Mapping[str, TransactionDescription]) -> dict[str, TransactionDescription]:
    return {id: told for id, told in described.items() if told.state in _ENDED}
