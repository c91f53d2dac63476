"""Opening a transactional id: one act that leaves nothing of an older owner alive but what it prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from txnbridge.spi import Deadline
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.owner import OPEN, PREPARE, Owner
from txnbridge_kafka.prepared import pool_ids
from txnbridge_kafka.requests import Described
from txnbridge_kafka.writer import KafkaWriter, end_if_open

# Opening waits for the broker, not for this process; but each has a client with threads of its own.
_AT_ONCE = 16


def open_id(cluster: Cluster, owner: Owner, writers: Sequence[KafkaWriter], deadline: Deadline) -> None:
    """Say in the log that the id is ours, end what is left of older owners, and open every writer."""
    before = owner.open(len(writers), deadline)
    _end_unprepared(cluster, owner, int(before.get("prepared_ids", 0)), deadline)
    _all_at_once(lambda writer: _open(cluster, owner, writer, deadline), writers)
    # Of an owner with more writers than we have: nobody opens those, so they are fenced without a client.
    ours = {writer.id for writer in writers}
    older = [f"{owner.name}.{number}" for number in range(int(before.get("writers", 0)))]
    _all_at_once(lambda id: _fence(cluster, owner, id, deadline), [id for id in older if id not in ours])


def _open(cluster: Cluster, owner: Owner, writer: KafkaWriter, deadline: Deadline) -> None:
    writer.past = _clear(cluster, owner, writer.id, deadline)
    writer.open(deadline)


def _clear(cluster: Cluster, owner: Owner, id: str, deadline: Deadline) -> Described | None:
    """End what is open under a plain writer's id, and record how its last one ended."""
    owner.check(deadline)  # a process that slept since it opened the id would end what the next owner has open
    found = end_if_open(cluster, id, deadline)
    if found is not None and found.state in ("CompleteCommit", "CompleteAbort"):
        owner.note_outcome(found, deadline)
    return found


def _fence(cluster: Cluster, owner: Owner, id: str, deadline: Deadline) -> None:
    _clear(cluster, owner, id, deadline)
    with cluster.events.step("step:fence", id=id):
        cluster.requests.fence(id, int(cluster.settings.timeout * 1000), deadline)


def _end_unprepared(cluster: Cluster, owner: Owner, prepared_ids: int, deadline: Deadline) -> None:
    """Of the ids for prepared transactions: abort what is open and has no prepare record that counts."""
    described = cluster.requests.describe(pool_ids(owner.name, prepared_ids), deadline)
    if not any(found.state == OPEN for found in described.values()):
        return
    # Read after the opening was written: whoever records one later is told that it does not count.
    spared = {(e.data["id"], e.data["pid"], e.data["start"]) for e in owner.ledger.entries(PREPARE, deadline)}
    for id, found in described.items():
        if found.state == OPEN and (id, found.pid, found.start) not in spared:
            end_if_open(cluster, id, deadline, only=found)


def _all_at_once(do: Callable[[Any], object], items: Sequence[Any]) -> None:
    """Do it for all side by side; the first error is raised once all have ended."""
    if not items:
        return
    with ThreadPoolExecutor(min(len(items), _AT_ONCE), thread_name_prefix="txnbridge-kafka-open") as pool:
        for done in [pool.submit(do, item) for item in items]:
            done.result()
