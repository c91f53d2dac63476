"""Cleanup of proof topics: drops records that no valid token needs any more, and deletes topics of dead writers.

A proof topic has a writer's proofs of its commits. A presence record there says until when the writer's next
transactions can be open. The tokens of these transactions are valid for one hour longer. Records are dropped only when
these tokens are no longer valid. Neither a record's own age counts, nor whether the writer seems to be alive.
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
from txnbridge_pulsar.admin.rest import RestRefused, path_of
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.proof import PRESENCE, ProofRecord, proof_prefix, record_of
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, encoded

_log = logging.getLogger("txnbridge")

# Proof topics of other owners in one cleanup, chosen at random so that bridges share the work.
_MAX_OTHER_TOPICS = 20
_TOPIC_SECONDS = 30.0


def clean_up(cluster: ClusterAccess, topic: str, now_ms: float, deadline: Deadline) -> None:
    """Drop expired records from a proof topic (given by its full name), until the deadline; the next cleanup continues.

    If no other record is left and the topic's writer has no transactional id, delete the topic, unless it has a
    producer. Raise `NotFound` if the topic does not exist.
    """
    expired_ms = now_ms - cluster.settings.timing.token_valid_seconds * 1000
    with translated(f"cleaning up {topic}"):
        try:
            consumer = cluster.client.subscribe(topic, SUBSCRIPTION, timeout=deadline.left(), create=False)
        except wire.ConsumerBusy:
            return  # another process cleans it up
        with wire.closing(consumer, deadline.left):
            newest, passed = _find_expired(consumer, expired_ms, deadline)
            if passed is not None:
                consumer.acknowledge_up_to(passed, timeout=deadline.left())
    if newest is not None and not newest.owned and newest.until < expired_ms:
        _delete(cluster, topic, deadline)


def _delete(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    """Delete a proof topic, unless a producer is connected to it, or a transaction is still open on it.

    A producer means that the topic's writer is idle but alive. A transaction stays open if no client has connected to
    the coordinators; without its topic, brokers would list no open transactions.
    """
    if not cluster.rest:
        return
    try:
        stats = cluster.rest.get(f"/admin/v3/transactions/transactionBufferStats/{path_of(topic)}", deadline)
        if not stats.get("ongoingTxnSize"):
            cluster.topics.delete(topic, deadline, force=False)
    except (InvalidState, RestRefused) as error:
        _log.debug("%s is not deleted: %s", topic, error)


def _find_expired(
    consumer: wire.PulsarConsumer, expired_ms: float, deadline: Deadline
) -> tuple[ProofRecord | None, wire.MessageId | None]:
    """Read a proof topic up to the first record announcing a writer that has not expired: from there on, keep all.

    Return the last announcement that was read (writers store one before their transactions), and the id of the entry
    before it. Records up to that entry can be dropped.
    """
    newest: ProofRecord | None = None
    passed: wire.MessageId | None = None
    before: wire.MessageId | None = None
    for entry in _entries(consumer, deadline):
        record = record_of(entry)
        if record is not None and record.kind == PRESENCE:
            newest, passed = record, before
            if record.until >= expired_ms:
                break
        before = entry.id
    return newest, passed


def _entries(consumer: wire.PulsarConsumer, deadline: Deadline) -> Iterator[wire.ReceivedEntry]:
    """Yield the entries of a proof topic that have not been dropped, up to the last one that can be read now."""
    last, dropped = consumer.progress(deadline.left())
    at = wire.EARLIEST if dropped is None else dropped
    while at[:2] < last[:2] and not deadline.expired:
        for entry in consumer.receive(deadline.left()):
            at = entry.id
            yield entry


class ProofTopicCleanup:
    """A thread that regularly cleans up its owner's proof topics (with proofs of commits) and a few of other owners."""

    def __init__(self, cluster: ClusterAccess, name: str) -> None:
        self._cluster = cluster
        self._all = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
        self._own = f"{self._all}{encoded(name)}."
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="txnbridge-pulsar-tidier", daemon=True).start()

    def _run(self) -> None:
        pause = self._cluster.settings.timing.first_cleanup_seconds
        while not self._stop.wait(pause):
            try:
                self.sweep()
            except TxnBridgeError as error:
                _log.debug("proof topics are not cleaned up: %s", error)
            pause = self._cluster.settings.timing.cleanup_every_seconds

    def sweep(self) -> None:
        """Drop expired records from the owner's proof topics, and from some of other owners. Log errors, and go on."""
        topics = self._cluster.topics.all_concrete(Deadline(_TOPIC_SECONDS))
        own = [topic for topic in topics if topic.startswith(self._own)]
        others = [topic for topic in topics if topic.startswith(self._all) and not topic.startswith(self._own)]
        for topic in (*own, *random.sample(others, min(len(others), _MAX_OTHER_TOPICS))):
            if self._stop.is_set():
                return
            try:
                clean_up(self._cluster, topic, time.time() * 1000, Deadline(_TOPIC_SECONDS))
            except TxnBridgeError as error:
                _log.debug("%s is not cleaned up: %s", topic, error)

    def close(self) -> None:
        """Tell the thread to stop. A running cleanup ends when the client is closed."""
        self._stop.set()
