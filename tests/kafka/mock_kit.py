"""Kafka's client against brokers that fail on demand: librdkafka's own mock cluster, in this process.

It answers what the client sends, and any request with the error that was pushed for it. It knows nothing of what a
coordinator does about errors, nor the raw requests: `Coordinator` stands in for those and
says what a test has decided. So this shows what our code makes of an answer, and nothing about Kafka.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
from txnbridge_kafka.client import protocol_types
from txnbridge_kafka.client.marker_proof import CoordinatorSession
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.outcome.transaction_state_log import StateRecord

from txnbridge.errors import AccessDenied, DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Deadline, Partition

# The numbers by which Kafka's protocol knows requests.
KEYS = {"Produce": 0, "InitProducerId": 22, "AddPartitionsToTxn": 24, "EndTxn": 26}
# In place of an error: the connection is closed.
HANG_UP = -195
_PRODUCER = 0  # of the two kinds of clients; the cluster belongs to one that does nothing else


def _library() -> ctypes.CDLL:
    """The librdkafka that confluent-kafka brings, under a name with a hash in it."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    (found,) = folder.glob("librdkafka*.so*")
    library = ctypes.CDLL(str(found))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new", "rd_kafka_headers_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


class MockCluster:
    """One broker with these topics of one partition."""

    def __init__(self, *topics: str) -> None:
        self._library = _library()
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._library.rd_kafka_conf_set(conf, b"log_level", b"0", None, ctypes.c_size_t(0))
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(_PRODUCER, conf, None, ctypes.c_size_t(0)))
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, 1))
        self.url = f"kafka://{self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()}"
        self._topics = topics
        for topic in topics:
            self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), 1, 1)

    def fail(self, request: str, *codes: int) -> None:
        """Answer the next ones of a kind with these errors, one each, or hang up."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(KEYS[request]), ctypes.c_size_t(len(codes)), array
        )

    def fail_topic(self, topic: str, code: int) -> None:
        """Answer questions about a topic with this error, until the cluster is healed."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), code)

    def heal(self) -> None:
        for key in KEYS.values():
            self._library.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(key))
        for topic in self._topics:
            self.fail_topic(topic, 0)

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)


def produce(servers: str, topic: str, *headers: tuple[bytes, bytes]) -> None:
    """Store a message whose headers' names may be any bytes, which confluent-kafka's producer does not take."""
    library = _library()
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(conf, b"bootstrap.servers", servers.encode(), None, ctypes.c_size_t(0))
    producer = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, None, ctypes.c_size_t(0)))
    listed = ctypes.c_void_p(library.rd_kafka_headers_new(ctypes.c_size_t(len(headers))))
    for name, value in headers:
        sizes = ctypes.c_ssize_t(len(name)), ctypes.c_ssize_t(len(value))
        library.rd_kafka_header_add(listed, name, sizes[0], value, sizes[1])
    # The tags of librdkafka's variable arguments: 1 is the topic, 3 the partition, 10 the headers, 0 the end.
    tagged: list[object] = [ctypes.c_int(1), topic.encode(), ctypes.c_int(3), ctypes.c_int32(0)]
    assert library.rd_kafka_producev(producer, *tagged, ctypes.c_int(10), listed, ctypes.c_int(0)) == 0
    assert library.rd_kafka_flush(producer, 30_000) == 0
    library.rd_kafka_destroy(producer)


class Coordinator(Requests):
    """Says of every transactional id what the test wants to be true, and ends what is open."""

    def __init__(self) -> None:
        self.told = protocol_types.TransactionDescription("", "Empty", 1000, 0, None, 30_000, ())
        self.silent = self.denied = self.leaves = False  # it leaves once
        self.settles = False  # whether what is being committed is complete when it is asked about again
        self.steps: list[StateRecord] = []  # what it has written down
        self.ended: list[bool] = []  # the decisions that were asked for
        self.refusals: list[int] = []  # of acknowledgements, which our own requests bring

    def opened(self) -> None:
        """An opening raises the epoch."""
        self.told = replace(self.told, state="Empty", epoch=self.told.epoch + 1)

    def becomes(self, state: str, epochs: int = 0, producers: int = 0) -> None:
        """Change the state from now on, and add to the epoch and the producer id."""
        told = self.told
        self.told = replace(told, state=state, epoch=told.epoch + epochs, pid=told.pid + producers)

    def cluster_id(self, deadline: Deadline, *, no_listener_for: float = 0) -> str:
        return "mock"

    def lists_transactions(self, deadline: Deadline) -> bool:
        return True

    def describe(self, ids: Sequence[str], deadline: Deadline) -> dict[str, protocol_types.TransactionDescription]:
        self._answer(deadline)
        told = self.told
        if self.settles and told.state == "PrepareCommit":
            self.becomes("CompleteCommit")
        return {id: replace(told, id=id) for id in ids}

    def coordinator_session(self, id: str, deadline: Deadline) -> CoordinatorSession:
        return _CoordinatorSession(self, id, deadline)

    def end(
        self, id: str, pid: int, epoch: int, commit: bool, deadline: Deadline, *, bump_epoch: bool | None = None
    ) -> protocol_types.EndTxnResult:
        self._answer(deadline)
        self.ended.append(commit)
        self.becomes("CompleteCommit" if commit else "CompleteAbort")
        return protocol_types.EndTxnResult(0, pid, epoch)

    def transactions(
        self, deadline: Deadline, states: Sequence[str] = (), pids: Sequence[int] = ()
    ) -> list[protocol_types.TransactionListing]:
        self._answer(deadline)
        return []

    def topic_ids(self, topics: Iterable[str], deadline: Deadline) -> dict[str, str]:
        self._answer(deadline)
        return dict.fromkeys(topics, "")

    def acknowledge(
        self, id: str, pid: int, epoch: int, offsets: Mapping[str, Any], deadline: Deadline
    ) -> protocol_types.OffsetCommitResult:
        self._answer(deadline)
        assert [offsets[name] for name in ("group_id", "generation_id", "member_id")] == ["billing", -1, ""]
        return protocol_types.OffsetCommitResult(self.refusals.pop(0) if self.refusals else 0, answer_lost=False)

    def fence(self, id: str, timeout_ms: int, deadline: Deadline) -> tuple[int, int]:
        self._answer(deadline)
        self.opened()
        return self.told.pid, self.told.epoch

    def producers(
        self, partitions: Sequence[Partition], deadline: Deadline, **which: bool
    ) -> dict[Partition, list[protocol_types.ActiveProducer]]:
        return {}

    def close(self) -> None:
        pass

    def _answer(self, deadline: Deadline) -> None:
        if self.silent:
            raise DeadlineExceeded("the stand-in was told to say nothing")
        if self.denied:
            raise AccessDenied("the stand-in was told to refuse")


class _CoordinatorSession(CoordinatorSession):
    def __init__(self, coordinator: Coordinator, id: str, deadline: Deadline) -> None:
        self._coordinator, self._id = coordinator, id
        self.first_description = coordinator.describe([id], deadline)[id]

    def last_transaction(self, deadline: Deadline) -> protocol_types.TransactionDescription | None:
        if self._coordinator.leaves:
            self._coordinator.leaves = False
            return None
        try:
            return self._coordinator.describe([self._id], deadline)[self._id]
        except TxnBridgeError:
            return None

    def close(self) -> None:
        pass
