"""Helpers of the tests of readers: readers as the core has them, and a writer on the wire."""

from typing import Any

from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.read.partition import PulsarPartition
from txnbridge_pulsar.read.reader import PulsarReader

from tests.core.decisions_kit import MemoryLog
from tests.core.reading_kit import Listener, Polling, by_partition
from tests.pulsar.kit import SOON, Connection
from txnbridge._decisions.decisions import Decisions
from txnbridge.spi import Context, Deadline, Emitter, Subscription

SUBSCRIPTION = "readers"


def hang_up(client: wire.PulsarClient, reader: PulsarReader) -> None:
    """Let the connection end on which a reader reads."""
    client.hang_up(reader._connection_key)


class Member(Polling):
    """A reader with its listener, and a client of its own."""

    reader: PulsarReader

    def __init__(self, url: str, topics: str | tuple[str, ...], group: str | None = SUBSCRIPTION, **given: Any) -> None:
        """`given` are fields of the subscription, and settings."""
        how = {name: given.pop(name) for name in ("start", "sharing") if name in given}
        self.connection = Connection(url, **given)
        self.client = self.connection.client
        events = Emitter("tests", ())
        cluster = ClusterAccess(
            "cluster", self.connection.settings, self.client, self.connection.topics, self.connection.rest, events
        )
        topics = (topics,) if isinstance(topics, str) else topics
        self.listener, self.sharing = Listener(), how.get("sharing", "partition")
        decisions = Decisions(MemoryLog(), timeout=SOON)
        self.context = Context(
            "tests", events, "tests", SOON, None, None, ledger=lambda application, id: decisions.ledger(id)
        )
        try:
            self.reader = PulsarReader(
                cluster, Subscription(topics, group, **how), self.listener, self.context, Deadline(SOON)
            )
        except BaseException:
            self.connection.close()
            raise

    def cut(self):
        """The connection on which it reads breaks."""
        hang_up(self.client, self.reader)

    def partition(self, topic: str) -> PulsarPartition:
        """Return what the reader knows of the first partition of a topic."""
        return self.reader._partitions[topic, 0]

    def leave(self):
        self.reader.close(Deadline(SOON))
        self.connection.close()

    # --- acknowledging, as a writer does it -----------------------------------------------------------------------

    def begin(self, *partitions, ttl_ms=60_000):
        """A transaction that may acknowledge these partitions."""
        assert not self.until(lambda: set(partitions) <= self.reader.positions().keys())
        txn = self.client.transactions.begin(ttl_ms, SOON)
        named = self.reader.ack_context().subscriptions(partitions)
        self.client.transactions.register(txn, SOON, subscriptions=named)
        return txn

    def ack(self, txn, messages):
        """Hold messages for a transaction, and wait until the broker has them."""
        sent = self.reader.ack_context().acknowledge(txn, by_partition(messages), Deadline(SOON))
        sent.settle(Deadline(SOON))
        return sent

    def end(self, txn, commit):
        self.client.transactions.end(txn, commit, SOON)

    def pass_on(self, messages):
        """Acknowledge messages in a transaction of their own."""
        txn = self.begin(*by_partition(messages))
        sent = self.ack(txn, messages)
        self.end(txn, commit=True)
        return sent


def write(client: wire.PulsarClient, topic: str, *contents: Any, **options: Any) -> list[wire.Receipt]:
    """Write to a concrete topic: bytes, singles or batches, each an entry of its own."""
    producer = client.create_producer(topic, timeout=SOON, **options)
    sends = [
        producer.send(wire.Single(content) if isinstance(content, bytes) else content, timeout=SOON)
        for content in contents
    ]
    receipts = [send.result(SOON) for send in sends]
    producer.close(SOON)
    return receipts


def write_chunks(
    client: wire.PulsarClient, topic: str, chunks: list[bytes], first: int = 0, of: int | None = None
) -> None:
    """Write chunks of one message, from that number on, as other clients write what is too large for one entry."""
    described = {
        "uuid": "one",
        "num_chunks_from_msg": of or len(chunks),
        "total_chunk_msg_size": None if of else sum(map(len, chunks)),
    }

    class Chunk(wire.Single):
        def metadata(self) -> dict[str, Any]:
            return {**described, "chunk_id": int(str(self.key))}

    write(client, topic, *(Chunk(chunk, str(number)) for number, chunk in enumerate(chunks, first)))
