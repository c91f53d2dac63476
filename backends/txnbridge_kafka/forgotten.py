"""Transactions that have ended for their coordinator and are still open in a partition, proven before they are touched.

A broker that is killed right after a commit may forget to write its markers. Readers stop there, and no time-out helps.

The proof is what the coordinator says before and after the leaders are asked: ended, and the same transaction. Without
the second look a transaction that its writer has begun since would be taken for the forgotten one. How that one ended
is read from the coordinator's log, because what the coordinator tells may be about a later one, elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from txnbridge.errors import InvalidState, NotFound
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.history import Ending, endings
from txnbridge_kafka.requests import ActiveProducer, Described, Requests

# "Empty" is an id that was opened again since.
_ENDED = ("CompleteCommit", "CompleteAbort", "Empty")

Held = Mapping[Partition, ActiveProducer]


@dataclass(frozen=True)
class Forgotten:
    """What the coordinator calls ended, and where it is open."""

    told: Described
    held: Held


@dataclass(frozen=True)
class Survey:
    """What of a cluster this user may read: what was forgotten there, and what is open of producers that no coordinator
    knows, by their ids. `unread` partitions could not be looked at."""

    forgotten: list[Forgotten]
    unknown: dict[int, Held]
    unread: int


def survey(cluster: Cluster, deadline: Deadline) -> Survey:
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
    return Survey(
        forgotten=[
            Forgotten(told, again[told.pid])
            for id, told in before.items()
            if told.pid in again and after.get(id) == told
        ],
        unknown={pid: where for pid, where in held.items() if pid not in set(ids.values())},
        unread=len(everywhere) - len(asked),
    )


def mend(cluster: Cluster, id: str, deadline: Deadline) -> list[str]:
    """Write the markers of an id that were forgotten, and say which; an empty list if none were.

    Raises `NotFound`, and `InvalidState` without a proof of each: then nothing was written.
    """
    told = cluster.requests.describe([id], deadline).get(id)
    if told is None:
        raise NotFound(f"no coordinator knows {id!r}")
    if told.state not in _ENDED:
        raise InvalidState(f"the transaction of {id} has not ended ({told.state}): end it instead")
    held = _open_ones(cluster.requests.producers(_everywhere(cluster, deadline), deadline)).get(told.pid, {})
    decided = _decided(id, held, endings(cluster, id, deadline) if held else (), told)
    if cluster.requests.describe([id], deadline).get(id) != told:
        raise InvalidState(f"{id} is in use: stop its writer first")
    return [
        _write(cluster.requests, told.pid, epoch, commit, where, deadline)
        for (epoch, commit), where in sorted(decided.items())
    ]


def _decided(
    id: str, held: Held, known: Sequence[Ending], told: Described
) -> dict[tuple[int, bool], dict[Partition, ActiveProducer]]:
    """What is held, by the epoch and the decision of its last end there: any later one would have ended it too."""
    decided: dict[tuple[int, bool], dict[Partition, ActiveProducer]] = defaultdict(dict)
    for partition, active in held.items():
        # An end may raise the epoch by one, and its markers carry the new one.
        about = [
            each
            for each in known
            if each.pid == told.pid and partition in each.partitions and each.epoch - active.epoch in (0, 1)
        ]
        if not about:
            raise InvalidState(
                f"how the transaction of {id} in {places([partition])} ended is not in its coordinator's log any more:"
                " its owner may know from the decision log, and mends it before its next message there"
            )
        decided[about[-1].epoch, about[-1].commit][partition] = active
    return decided


def _write(requests: Requests, pid: int, epoch: int, commit: bool, where: Held, deadline: Deadline) -> str:
    requests.write_markers(pid, epoch, commit, list(where), deadline)
    return f"{'commit' if commit else 'abort'} in {places(where)}"


def places(partitions: Collection[Partition]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions))


def _everywhere(cluster: Cluster, deadline: Deadline) -> list[Partition]:
    topics = cluster.topics.all(deadline)
    return [(name, number) for name, topic in topics.items() for number in topic.partitions]


def _open_ones(asked: Mapping[Partition, Iterable[ActiveProducer]]) -> dict[int, Held]:
    """By producer id: where the leaders hold a transaction of it open."""
    held: dict[int, dict[Partition, ActiveProducer]] = defaultdict(dict)
    for partition, producers in asked.items():
        for active in producers:
            if active.start_offset is not None:
                held[active.pid][partition] = active
    return dict(held)


def _ended(described: Mapping[str, Described]) -> dict[str, Described]:
    return {id: told for id, told in described.items() if told.state in _ENDED}
