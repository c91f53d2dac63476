"""Clearing up marker topics: records that no living token can need are dropped, and topics whose writers died deleted.

Each writer says on its marker topic, before its transactions, until when any of them can be open. An hour after that
their tokens tell nothing more. Nothing else decides: not how old a record looks, nor which writer seems to be alive.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator

from txnbridge.errors import InvalidState, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.rest import RestRefused, path_of
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.proof import PRESENCE, ProofRecord, proof_prefix, record_of
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, encoded

_log = logging.getLogger("txnbridge")

# For so long after its deadline a token of a transaction that was ended tells how; clocks may differ by much less.
KEPT_SECONDS = 3600.0
# A bridge that lives for a moment clears nothing up. Later it costs little, and there is more to drop at once.
_FIRST_SECONDS, _EVERY_SECONDS = 5.0, 600.0
# Of others' topics each bridge looks at a few at a time, so that many bridges do not all do the same.
_OTHERS = 20
_SECONDS_A_TOPIC = 30.0


def clean_up(cluster: ClusterAccess, topic: str, now_ms: float, deadline: Deadline) -> None:
    """Drop the records from a marker topic, by its full name, that are over; delete the topic if no other is left and
    it belongs to no transactional id.

    Raises `NotFound` for a missing one. A topic that somebody writes to is not deleted. If time is short, the rest is
    left for the next time.
    """
    with translated(f"clearing up {topic}"):
        try:
            consumer = cluster.client.subscribe(topic, SUBSCRIPTION, timeout=deadline.left(), create=False)
        except wire.ConsumerBusy:
            return  # somebody else is at it
        try:
            newest, passed = _look_through(consumer, now_ms, deadline)
            if passed is not None:
                consumer.acknowledge_up_to(passed, timeout=deadline.left())
        finally:
            consumer.close(deadline.left())
    if newest is not None and not newest.owned and _is_over(newest, now_ms):
        _delete(cluster, topic, deadline)


def _delete(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    """Unless its writer is alive and has only had nothing to write, or nobody has run the coordinators' clocks: then
    something is still open there, and brokers list no transactions while a topic of one is missing.
    """
    if cluster.rest is None:
        return
    try:
        stats = cluster.rest.get(f"/admin/v3/transactions/transactionBufferStats/{path_of(topic)}", deadline)
        if not stats.get("ongoingTxnSize"):
            cluster.topics.delete(topic, deadline, force=False)
    except (InvalidState, RestRefused) as error:
        _log.debug("%s stays: %s", topic, error)


def _look_through(
    consumer: wire.PulsarConsumer, now_ms: float, deadline: Deadline
) -> tuple[ProofRecord | None, wire.MessageId | None]:
    """From what was dropped last to the first record of a writer that is not over, or the last one.

    That record, and the last entry before it, up to which all may go.
    """
    newest: ProofRecord | None = None
    passed: wire.MessageId | None = None
    before: wire.MessageId | None = None
    for entry in _entries(consumer, deadline):
        record = record_of(entry)
        if record is not None and record.kind == PRESENCE:
            newest, passed = record, before
            if not _is_over(record, now_ms):
                break
        before = entry.id
    return newest, passed


def _entries(consumer: wire.PulsarConsumer, deadline: Deadline) -> Iterator[wire.ReceivedEntry]:
    """The entries that can be read now."""
    last, dropped = consumer.progress(deadline.left())
    at = wire.EARLIEST if dropped is None else dropped
    while at[:2] < last[:2] and not deadline.expired:
        for entry in consumer.receive(deadline.left()):
            at = entry.id
            yield entry


def _is_over(record: ProofRecord, now_ms: float) -> bool:
    return record.until + KEPT_SECONDS * 1000 < now_ms


class ProofTopicCleanup:
    """Clears up now and then, on a thread of its own: an owner's own marker topics, and a few others of all that are
    there.
    """

    def __init__(self, cluster: ClusterAccess, name: str) -> None:
        self._cluster = cluster
        self._all = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
        self._own = f"{self._all}{encoded(name)}."
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="txnbridge-pulsar-tidier", daemon=True).start()

    def _run(self) -> None:
        pause = _FIRST_SECONDS
        while not self._stop.wait(pause):
            try:
                self.sweep()
            except TxnBridgeError as error:
                _log.debug("marker topics are not cleared up: %s", error)
            pause = _EVERY_SECONDS

    def sweep(self) -> None:
        """Once, as far as it can be done."""
        found = self._cluster.topics.all_concrete(Deadline(_SECONDS_A_TOPIC))
        own = [topic for topic in found if topic.startswith(self._own)]
        others = [topic for topic in found if topic.startswith(self._all) and not topic.startswith(self._own)]
        for topic in (*own, *random.sample(others, min(len(others), _OTHERS))):
            if self._stop.is_set():
                return
            try:
                clean_up(self._cluster, topic, time.time() * 1000, Deadline(_SECONDS_A_TOPIC))
            except TxnBridgeError as error:
                _log.debug("%s is not cleared up: %s", topic, error)

    def close(self) -> None:
        """Stop. A look that is under way ends with the client."""
        self._stop.set()
