"""Opening a transactional id: older owners are fenced, and their transactions aborted, except the prepared ones.

An older owner may still run. So its transaction is aborted by InitProducerId, for which the coordinator fences the
owner and aborts the transaction atomically. After an EndTxn the older owner would keep its epoch, and might commit the
second half of its transaction (hazard H11).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from txnbridge.errors import AccessDenied, NotSupported
from txnbridge.spi import Deadline
from txnbridge_kafka.client.protocol_types import OPEN, SETTLED
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.write.owner import PREPARE, KafkaOwner
from txnbridge_kafka.write.prepared import is_pool_id
from txnbridge_kafka.write.writer import KafkaWriter

_log = logging.getLogger("txnbridge")

# How many writers are opened in parallel. Openings wait for the broker, but each client starts several threads.
_PARALLEL_OPENINGS = 16
# An owner without the decision log, which has the older owners' number of writers, fences so many more than its own.
_EXTRA_WRITERS = 64


def open_id(cluster: KafkaCluster, owner: KafkaOwner, writers: Sequence[KafkaWriter], deadline: Deadline) -> None:
    """Record this process as the id's owner in the decision log, fence older owners, and open every writer's id.

    Without access to the decision log only the broker fences, and `KafkaOwner` logs which guarantees are lost.
    """
    before: Mapping[str, Any] = {}
    try:
        before = owner.open(len(writers), deadline)
    except AccessDenied as error:
        owner.continue_without_log(error)
    _warn_if_older_owner_runs(cluster, owner, writers, before, deadline)
    if owner.denied:
        # Without prepare records prepared transactions cannot be recognised, so the ids for them are not fenced.
        more = range(len(writers), len(writers) + _EXTRA_WRITERS)
        leftovers = list(cluster.requests.describe([f"{owner.name}.{number}" for number in more], deadline))
    else:
        _end_unprepared(cluster, owner, deadline)
        leftovers = [f"{owner.name}.{number}" for number in range(len(writers), int(before.get("writers", 0)))]
    _in_parallel(lambda writer: _open(cluster, owner, writer, deadline), writers)
    # If older owners had more writers than this owner, the ids of those writers are fenced too, by raw requests.
    _in_parallel(lambda id: _fence(cluster, owner, id, deadline), leftovers)


def _warn_if_older_owner_runs(
    cluster: KafkaCluster,
    owner: KafkaOwner,
    writers: Sequence[KafkaWriter],
    before: Mapping[str, Any],
    deadline: Deadline,
) -> None:
    """Log a warning if an older owner has an open transaction. `before` is the last owner's own record."""
    now = time.time() * 1000
    for last in cluster.requests.describe([writer.id for writer in writers], deadline).values():
        if last.state == OPEN and last.start is not None:
            opened = f", which opened it {_age(now, before['at'])}" if "at" in before else ""
            _log.warning(
                "%s: an older owner (%s%s) began a transaction on %s %s: its process still runs, or died in the"
                " transaction. The older owner is fenced now, and the transaction is aborted",
                *(owner.name, before.get("host") or "host unknown", opened, last.id, _age(now, last.start)),
            )


def _age(now: float, then: int) -> str:
    return f"{max(0.0, now - then) / 1000:.0f} s ago"


def _open(cluster: KafkaCluster, owner: KafkaOwner, writer: KafkaWriter, deadline: Deadline) -> None:
    writer.session.previous_transaction = previous = cluster.requests.describe([writer.id], deadline).get(writer.id)
    if previous is not None and previous.state not in SETTLED:
        # Otherwise the writer's client would abort the transaction, and wait ten times as long for its end.
        _fence(cluster, owner, writer.id, deadline)
    writer.open(deadline)


def _fence(cluster: KafkaCluster, owner: KafkaOwner, id: str, deadline: Deadline) -> None:
    owner.check(deadline)  # otherwise a process that was suspended after its opening would fence the next owner
    with cluster.events.step("step:fence", id=id):
        cluster.requests.fence(id, int(cluster.settings.timeout * 1000), deadline)


def _end_unprepared(cluster: KafkaCluster, owner: KafkaOwner, deadline: Deadline) -> None:
    """Abort transactions that earlier owners began in order to prepare them, but did not prepare (hazard H16)."""
    try:
        listed = cluster.requests.transactions(deadline, [OPEN])
    except NotSupported as error:
        _log.warning("%s: transactions that its dead owners left open end only by their time: %s", owner.name, error)
        return
    described = cluster.requests.describe([each.id for each in listed if is_pool_id(each.id, owner.name)], deadline)
    if not any(last.state == OPEN for last in described.values()):
        return
    # The prepare records are read after this owner's opening was recorded: no later prepare record counts.
    prepared = {(e.data["id"], e.data["pid"], e.data["start"]) for e in owner.ledger.entries(PREPARE, deadline)}
    for id, last in described.items():
        if last.state == OPEN and (id, last.pid, last.start) in prepared:
            owner.inherited_ids.append(id)
        elif last.state == OPEN:
            _fence(cluster, owner, id, deadline)


def _in_parallel(do: Callable[[Any], object], items: Sequence[Any]) -> None:
    """Call a function for all items in parallel threads. Raise the first error after all calls have returned."""
    if not items:
        return
    with ThreadPoolExecutor(min(len(items), _PARALLEL_OPENINGS), thread_name_prefix="txnbridge-kafka-open") as pool:
        for done in [pool.submit(do, item) for item in items]:
            done.result()
