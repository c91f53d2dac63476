"""Administration of consumer groups: their members, committed offsets and lag, and the reset of their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, ConsumerGroupType, KafkaError, KafkaException, TopicPartition

from txnbridge.errors import InvalidState, NotFound
from txnbridge.spi import Deadline, GroupInfo, GroupMember, Partition, Position, Subscription
from txnbridge_kafka.client.librdkafka import ConfluentAdminClient, ignore, result_of, seconds
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import kafka_error, translate
from txnbridge_kafka.read.assignment import open_consumer

_HAS_MEMBERS = {KafkaError.NON_EMPTY_GROUP, KafkaError.UNKNOWN_MEMBER_ID}
_SEARCH_SECONDS = 2.0
_CONSUMER_GROUP_TYPES = {ConsumerGroupType.CLASSIC, ConsumerGroupType.CONSUMER}


class KafkaGroups:
    """The consumer groups of a cluster, for one call of an administrator, until the call's deadline."""

    def __init__(self, cluster: KafkaCluster, deadline: Deadline) -> None:
        self._cluster = cluster
        self._deadline = deadline
        self._client = ConfluentAdminClient({**cluster.settings.client, "log_level": 0, "error_cb": ignore})

    def members(self) -> dict[str, int]:
        """Return every group's name with the number of its members."""
        what = "listing groups"
        listed = self._result(self._client.list_consumer_groups(request_timeout=seconds(self._deadline)), what)
        names = [each.group_id for each in listed.valid if each.type in _CONSUMER_GROUP_TYPES]
        return {name: len(group.members) for name, group in self._described(names).items()}

    def describe(self, name: str) -> GroupInfo:
        """Return a group's members, offsets and lag. Raise `NotFound` if it has neither members nor offsets."""
        members = tuple(
            GroupMember(
                each.member_id,
                f"{each.client_id} at {each.host.removeprefix('/')}",
                tuple((p.topic, p.partition) for p in each.assignment.topic_partitions),
            )
            for each in self._described([name])[name].members
        )
        positions = self._positions(name)
        if not members and not positions:
            raise NotFound(f"there is no group {name!r}; `txnbridge groups list` shows all groups")
        return GroupInfo(name, members, {p: (at,) for p, at in positions.items()}, self._lag(positions))

    def _lag(self, positions: dict[Partition, int]) -> dict[Partition, int]:
        """Return the number of offsets from the first message on, because markers before it are no lag.

        In a partition where the first message is not found in time, all offsets count.
        """
        ends = self._cluster.requests.ends(positions, self._deadline)
        if ends == positions:
            return dict.fromkeys(positions, 0)
        first = {partition: at for partition, at in positions.items() if at < ends[partition]}
        until = Deadline(min(_SEARCH_SECONDS, self._deadline.left()))
        with closing(open_consumer(self._cluster.settings, Subscription((), None), ignore)) as client:
            client.assign([TopicPartition(*partition, at) for partition, at in first.items()])
            waiting = set(first)
            while waiting and not until.expired:
                found: Any = client.poll(seconds(until))
                if found is not None and (not found.error() or found.error().code() == KafkaError._PARTITION_EOF):
                    partition = found.topic(), found.partition()
                    client.pause([TopicPartition(*partition)])
                    waiting.discard(partition)
                    first[partition] = found.offset()
        return {partition: max(0, ends[partition] - first.get(partition, at)) for partition, at in positions.items()}

    def reset(self, name: str, to: str | int, topics: Sequence[str] | None) -> dict[Partition, Position]:
        """Set a group's offsets to "earliest", "latest" or a time in milliseconds, and return the new offsets.

        Raise `NotFound` if the group does not exist or has no offset in a given topic. Raise `InvalidState` if the
        group has members, or if an open transaction has acknowledgements of the group.
        """
        positions = self.describe(name).positions
        for topic in topics or ():
            if topic not in {each for each, _ in positions}:
                raise NotFound(f"group {name!r} has never read topic {topic!r}")
        wanted = [partition for partition in positions if topics is None or partition[0] in topics]
        # The commit of an open transaction with acknowledgements would overwrite the new offsets.
        if len(self._cluster.requests.committed(name, wanted, self._deadline, decided=True)) < len(wanted):
            raise InvalidState(f"an open transaction has acknowledged messages for group {name!r}: end it first")
        targets = self._offsets_at(wanted, to)
        offsets = ConsumerGroupTopicPartitions(name, [TopicPartition(*p, at) for p, at in targets.items()])
        answer = self._client.alter_consumer_group_offsets([offsets], request_timeout=seconds(self._deadline))[name]
        for each in self._result(answer, f"setting group {name!r}", name).topic_partitions:
            if each.error is not None:
                raise self._refusal(KafkaException(each.error), f"setting group {name!r}", name)
        return {partition: (at,) for partition, at in targets.items()}

    def _offsets_at(self, partitions: list[Partition], to: str | int) -> dict[Partition, int]:
        offsets = self._cluster.requests
        if isinstance(to, int):
            return {p: first for p, (first, _) in offsets.since(partitions, to, self._deadline).items()}
        return (offsets.begins if to == "earliest" else offsets.ends)(partitions, self._deadline)

    def _described(self, names: list[str]) -> dict[str, Any]:
        if not names:
            return {}
        answers = self._client.describe_consumer_groups(names, request_timeout=seconds(self._deadline))
        return {name: self._result(answer, f"looking up group {name!r}") for name, answer in answers.items()}

    def _positions(self, name: str) -> dict[Partition, int]:
        """Return a group's committed offsets in the topics that still exist."""
        asked = [ConsumerGroupTopicPartitions(name)]
        answers = self._client.list_consumer_group_offsets(asked, request_timeout=seconds(self._deadline))
        offsets = self._result(answers[name], f"reading the positions of group {name!r}").topic_partitions
        topics = self._cluster.topics.all(self._deadline)
        return {(p.topic, p.partition): p.offset for p in offsets if p.offset >= 0 and p.topic in topics}

    def _result(self, answer: Any, what: str, group: str = "") -> Any:
        try:
            return result_of(answer, what, self._deadline)
        except KafkaException as error:
            raise self._refusal(error, what, group) from error

    def _refusal(self, error: KafkaException, what: str, group: str) -> Exception:
        cause = kafka_error(error)
        if cause is not None and cause.code() in _HAS_MEMBERS:
            return InvalidState(f"group {group!r} has members: stop them first")
        return translate(error, what)
