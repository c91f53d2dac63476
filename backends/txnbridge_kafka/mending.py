"""Markers that a broker forgot: a transaction that its coordinator calls complete, and that is open in a partition.

A single node that is killed right after a commit may come back so. Readers of that partition stop there, no time-out
helps, and the next abort of the same producer would take the committed messages with it. So a writer looks before its
first message to a partition, and finishes with the coordinator's own decision what it finds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from txnbridge.errors import AccessDenied, StorageFailed
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.history import endings
from txnbridge_kafka.owner import COMMITTED, Owner, evidence_key, recorded_outcome
from txnbridge_kafka.requests import Described

_log = logging.getLogger("txnbridge")


def mend(
    cluster: Cluster,
    owner: Owner,
    opened: Described,
    past: Described,
    partitions: Sequence[Partition],
    deadline: Deadline,
) -> None:
    """Write the markers that are missing there of earlier openings of this id.

    `past` is what the coordinator said before the id was opened: complete, so no marker was on its way any more. The
    opening raised the epoch, so what is open under an older one is nobody's.
    Raises `StorageFailed` if nobody knows how a forgotten transaction ended.
    """
    try:
        producers = cluster.requests.producers(partitions, deadline)
    except AccessDenied as error:
        _log.warning("forgotten markers cannot be looked for without the right to read: %s", error)
        return
    forgotten: dict[int, list[Partition]] = defaultdict(list)
    for partition, actives in producers.items():
        for active in actives:
            if active.pid == opened.pid and active.start_offset is not None and active.epoch < opened.epoch:
                forgotten[active.epoch].append(partition)
    for epoch, where in forgotten.items():
        commit = _decision(cluster, owner, past, epoch, where, deadline)
        if commit is None:
            topic, number = where[0]
            raise StorageFailed(
                f"{topic}[{number}] holds an open transaction of an earlier owner of {opened.id} of which nobody knows"
                " how it ended; see `txnbridge doctor`"
            )
        with cluster.events.step("step:repair", id=opened.id, commit=commit, partitions=len(where)):
            cluster.requests.write_markers(opened.pid, epoch, commit, where, deadline)
        _log.warning(
            "%s: the broker had forgotten the %s markers of a transaction in %s; they are written now",
            opened.id,
            "commit" if commit else "abort",
            ", ".join(f"{topic}[{number}]" for topic, number in sorted(where)),
        )


def _decision(
    cluster: Cluster, owner: Owner, past: Described, epoch: int, where: Sequence[Partition], deadline: Deadline
) -> bool | None:
    """How it ended: as the coordinator said before the opening, as that was recorded, or as its own log has it."""
    if epoch == past.epoch and past.state != "Empty":
        return past.state in COMMITTED
    if owner.opening is not None:
        state = recorded_outcome(owner.ledger, evidence_key(past.id, past.pid, f"epoch {epoch}"), deadline)
        if state is not None:
            return state == "committed"
    try:
        decided = endings(cluster, past.id, deadline)
    except AccessDenied as error:
        _log.warning("the coordinator's log cannot be asked how a transaction ended: %s", error)
        return None
    about = [each.commit for each in decided if each.pid == past.pid and each.partitions.issuperset(where)]
    return about[-1] if about else None
