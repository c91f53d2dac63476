"""Mutants of the Kafka backend. The docstring of each says what is wrong with it."""

import uuid
from typing import Any

from txnbridge_kafka import broker
from txnbridge_kafka.client import messages
from txnbridge_kafka.client.librdkafka import ConfluentConsumer, membership_of
from txnbridge_kafka.read import assignment
from txnbridge_kafka.read.reader import KafkaReader
from txnbridge_kafka.write import opening
from txnbridge_kafka.write.owner import KafkaOwner
from txnbridge_kafka.write.prepared import KafkaPreparedWriter
from txnbridge_kafka.write.replaceable_producer import ProducerSession
from txnbridge_kafka.write.writer import KafkaWriter

from tests.conformance.mutants import Mutants, nothing, replace
from txnbridge.spi import Deadline

KAFKA = Mutants()


@KAFKA.mutant("G1a", "early-read", workload="transactions")
def reads_uncommitted() -> None:
    """Readers read messages of open and aborted transactions."""

    def make(settings: dict[str, Any]) -> Any:
        return ConfluentConsumer({**settings, "isolation.level": "read_uncommitted"})

    replace(assignment, "ConfluentConsumer", make)


@KAFKA.mutant("half-ack", workload="groups")
def acks_outside() -> None:
    """Acknowledgements are committed at once, in another transaction than the messages."""

    def ack(writer: Any, context: Any, positions: Any) -> None:
        deadline, id, requests = Deadline(30), f"mutant-{uuid.uuid4().hex}", writer._cluster.requests
        offsets = {partition: max(acked)[0] + 1 for partition, acked in positions.items()}
        pid, epoch = requests.fence(id, 30_000, deadline)
        member = membership_of(context.metadata)
        requests.acknowledge(id, pid, epoch, member, offsets, deadline, context.topic_ids)
        requests.end(id, pid, epoch, True, deadline, bump_epoch=False)

    replace(KafkaWriter, "ack", ack)


@KAFKA.mutant("half-ack", "group-skip", workload="groups")
def reads_on_after_an_abort() -> None:
    """A reader does not go back to the messages of an aborted transaction."""
    replace(KafkaReader, "rewind", nothing)


@KAFKA.mutant("replay-duplicate", workload="groups")
def reads_undecided_positions() -> None:
    """A new member starts at the group's last position, although an open transaction may move it."""

    def fetch(group: str, partitions: Any, decided: bool) -> Any:
        return before(group, partitions, False)

    before = replace(messages, "offset_fetch_request", fetch)


@KAFKA.mutant("outcome-lie", "zombie-write", "unseen", workload="owners")
def takes_a_refusal_for_a_commit() -> None:
    """A commit that the coordinator refuses counts as committed."""
    replace(KafkaWriter, "_settle", nothing)


@KAFKA.mutant("zombie-write", workload="owners")
def takes_the_id_back() -> None:
    """An owner does not look whether it still is the owner before it opens its id again (H14)."""
    replace(KafkaOwner, "check", nothing)


@KAFKA.mutant("zombie-write", workload="owners")
def fences_nobody() -> None:
    """Each opening uses another id at the broker, so the broker fences no older owner."""

    def init(session: Any, cluster: Any, owner: Any, id: str, timeout_ms: int) -> None:
        is_for_prepared = str(owner.opening) in id
        before(session, cluster, owner, id if is_for_prepared else f"{id}.{uuid.uuid4().hex}", timeout_ms)

    before = replace(ProducerSession, "__init__", init)


@KAFKA.mutant("zombie-write", workload="owners")
def prepares_as_a_zombie() -> None:
    """An opener does not end what is not prepared yet, and an owner prepares without a prepare record (H16)."""
    replace(KafkaPreparedWriter, "_record", nothing)
    replace(opening, "_end_unprepared", nothing)


@KAFKA.mutant("lost-prepare", workload="owners")
def aborts_what_is_prepared() -> None:
    """An opener ends prepared transactions, too, because it finds no prepare record (H16)."""
    replace(opening, "PREPARE", "no such kind")


KAFKA.add_shared(broker)
KAFKA.apply_chosen()
