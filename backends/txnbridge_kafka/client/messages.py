"""The requests and answers of Kafka's protocol: built from, and converted to, the types of txnbridge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from txnbridge.spi import Partition
from txnbridge_kafka.client import wire
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.protocol_types import (
    DONE,
    UNKNOWN_TOPIC,
    ActiveProducer,
    CommittedOffset,
    EndTxnResult,
    TransactionDescription,
)

_READ_COMMITTED = 1
_TOPIC_ID = "txnbridge-topic-id:"  # by which a reader notices that a topic was deleted and created again


def list_offsets_request(partitions: Iterable[Partition], times: Mapping[Partition, int]) -> wire.Request:
    topics = _topics(partitions, lambda each: {"current_leader_epoch": -1, "timestamp": times[each]})
    return wire.LIST_OFFSETS(replica_id=-1, isolation_level=_READ_COMMITTED, topics=topics)


def leader_epochs_request(partitions: Iterable[Partition], epochs: Mapping[Partition, int]) -> wire.Request:
    topics = _topics(partitions, lambda each: {"current_leader_epoch": -1, "leader_epoch": epochs[each]})
    return wire.OFFSET_FOR_LEADER_EPOCH(replica_id=-1, topics=topics)


def offsets_of(
    member: GroupMembership,
    offsets: Mapping[Partition, int],
    topic_ids: Mapping[Partition, str | None],
    epochs: Mapping[Partition, int],
) -> dict[str, Any]:
    """Return the fields with which a member of a group commits offsets, in a transaction or not."""
    topics = _topics(
        offsets,
        lambda each: {
            "committed_offset": offsets[each],
            "committed_leader_epoch": epochs.get(each, -1),
            "committed_metadata": f"{_TOPIC_ID}{topic_ids[each]}" if topic_ids.get(each) else "",
        },
    )
    return {
        "group_id": member.group,
        "generation_id": member.generation,
        "member_id": member.name,
        "group_instance_id": member.instance,
        "topics": topics,
    }


def _topics(partitions: Iterable[Partition], fields: Callable[[Partition], Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": topic, "partitions": [{"partition_index": each, **fields((topic, each))} for each in numbers]}
        for topic, numbers in by_topic(partitions).items()
    ]


def committed_offset(partition: Any) -> CommittedOffset | None:
    if partition.committed_offset < 0:
        return None
    metadata = (partition.metadata or "").rstrip("\0")  # confluent-kafka also stores its C string's final zero
    known = metadata.removeprefix(_TOPIC_ID) if metadata.startswith(_TOPIC_ID) else None
    epoch = partition.committed_leader_epoch
    return CommittedOffset(partition.committed_offset, known, None if epoch < 0 else epoch)


def markers_request(
    pid: int, epoch: int, commit: bool, coordinator_epoch: int, partitions: Iterable[Partition]
) -> wire.Request:
    marker = {
        "producer_id": pid,
        "producer_epoch": epoch,
        "transaction_result": commit,
        "topics": numbers_by_topic(partitions),
        "coordinator_epoch": coordinator_epoch,
    }
    return wire.WRITE_TXN_MARKERS(markers=[marker])


def transaction_description(state: Any) -> TransactionDescription:
    return TransactionDescription(
        id=state.transactional_id,
        state=state.transaction_state,
        pid=state.producer_id,
        epoch=state.producer_epoch,
        start=None if state.transaction_start_time_ms < 0 else state.transaction_start_time_ms,
        timeout=state.transaction_timeout_ms,
        partitions=tuple((topic.topic, number) for topic in state.topics for number in topic.partitions),
    )


def end_txn_result(answer: Any, pid: int, epoch: int, only_once: bool) -> EndTxnResult:
    if answer.error_code == DONE and hasattr(answer, "producer_epoch"):
        return EndTxnResult(DONE, answer.producer_id, answer.producer_epoch, only_once)
    return EndTxnResult(answer.error_code, pid, epoch, only_once)


def active_producer(producer: Any) -> ActiveProducer:
    start = producer.current_txn_start_offset
    return ActiveProducer(
        pid=producer.producer_id,
        epoch=producer.producer_epoch,
        start_offset=None if start < 0 else start,
        last_timestamp=producer.last_timestamp,
        coordinator_epoch=producer.coordinator_epoch,
    )


def topic_ids(metadata: Any) -> dict[str, str]:
    """Return topic ids by name from a metadata answer; the id is empty if the Kafka version has no topic ids."""
    found = {each.name: getattr(each, "topic_id", None) for each in metadata.topics if each.error_code != UNKNOWN_TOPIC}
    return {name: str(id) if id is not None and id.int else "" for name, id in found.items()}


def leaders(metadata: Any) -> set[int]:
    return {each.leader_id for topic in metadata.topics for each in topic.partitions if each.leader_id >= 0}


def by_topic(partitions: Iterable[Partition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(partitions):
        found[topic].append(number)
    return found


def numbers_by_topic(partitions: Iterable[Partition]) -> list[dict[str, Any]]:
    return [{"name": topic, "partition_indexes": numbers} for topic, numbers in by_topic(partitions).items()]


def each_partition(topics: Iterable[Any]) -> Iterator[tuple[Partition, Any]]:
    for topic in topics:
        for each in topic.partitions:
            yield (topic.name, each.partition_index), each


def partition_name(partition: Partition) -> str:
    return f"{partition[0]}[{partition[1]}]"
