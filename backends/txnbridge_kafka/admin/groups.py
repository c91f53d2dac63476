"""Administration of consumer groups: their members, committed offsets and lag, and the reset of their offsets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, ConsumerGroupType, KafkaError, KafkaException, TopicPartition

from txnbridge.errors import AccessDenied, InvalidState, NotFound
from txnbridge.spi import Deadline, GroupInfo, GroupMember, Partition, Position, Subscription
from txnbridge_kafka.client.librdkafka import ConfluentAdminClient, ignore, result_of, seconds
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import kafka_error, translate
from txnbridge_kafka.read.assignment import open_consumer
from txnbridge_kafka.read.start_positions import KafkaStartPositions

_HAS_MEMBERS = {KafkaError.NON_EMPTY_GROUP, KafkaError.UNKNOWN_MEMBER_ID}
_SEARCH_SECONDS = 2.0
_READ_ON = 100  # offsets; a seek takes about as long as reading so many small messages
_CONSUMER_GROUP_TYPES = {ConsumerGroupType.CLASSIC, ConsumerGroupType.CONSUMER}


class KafkaGroups:
    """The consumer groups of a cluster, for one call of an administrator, until the call's deadline."""

    def __init__(self, cluster: KafkaCluster, deadline: Deadline) -> None:
        self._cluster = cluster
        self._deadline = deadline
        self._client = ConfluentAdminClient({**cluster.settings.client, "log_level": 0, "error_cb": ignore})

    def members(self) -> dict[str, int]:
        """Return the number of members of every group that this user may see, by the group's name."""
        answer = self._client.list_consumer_groups(request_timeout=seconds(self._deadline))
        found = self._result(answer, "listing groups").valid
        names = [each.group_id for each in found if each.type in _CONSUMER_GROUP_TYPES]
        return {name: len(group.members) for name, group in self._described(names, AccessDenied).items()}

    def group(self, name: str) -> GroupInfo:
        """Return a group's members, offsets and lag. Raise `NotFound` if it has neither members nor offsets."""
        if found := self.describe([name]):
            return found[name]
        raise NotFound(f"there is no group {name!r}; `txnbridge groups list` shows all groups")

    def describe(self, names: Sequence[str]) -> dict[str, GroupInfo]:
        """Return groups with members, offsets and lag, without those that have neither members nor offsets."""
        members = {name: _members(group) for name, group in self._described(names).items()}
        positions = self._positions(names)
        try:
            lags = self._lags(positions)
        except NotFound:  # a topic was deleted meanwhile, and so were the positions in it
            return self.describe(names)
        return {
            name: GroupInfo(name, members[name], {p: (at,) for p, at in positions[name].items()}, lags[name])
            for name in names
            if members[name] or positions[name]
        }

    def _lags(self, positions: Mapping[str, Mapping[Partition, int]]) -> dict[str, dict[Partition, int]]:
        """Return each group's lag by partition: the offsets from the first unread message on, without markers before.

        All offsets from the group's position count if the message is not found in time, or was removed by retention.
        """
        requests, places = self._cluster.requests, {each for found in positions.values() for each in found.items()}
        ends = requests.ends({partition for partition, _ in places}, self._deadline)
        behind = [(partition, at) for partition, at in places if at < ends[partition]]
        begins = requests.begins({partition for partition, _ in behind}, self._deadline)
        first = self._first_messages([(partition, at) for partition, at in behind if at >= begins[partition]])
        return {
            name: {p: max(0, ends[p] - first.get((p, at), at)) for p, at in found.items()}
            for name, found in positions.items()
        }

    def _first_messages(self, places: Collection[tuple[Partition, int]]) -> dict[tuple[Partition, int], int]:
        """Return, for each partition and offset, the offset of the first message from there on, or else the end.

        Groups that stand in the same partition share one reading of it.
        """
        first: dict[tuple[Partition, int], int] = {}
        if not places:
            return first
        waiting: dict[Partition, list[int]] = defaultdict(list)
        for partition, at in sorted(places, reverse=True):
            waiting[partition].append(at)
        until = Deadline(min(_SEARCH_SECONDS, self._deadline.left()))
        with closing(open_consumer(self._cluster.settings, Subscription((), None))) as client:
            client.assign([TopicPartition(*partition, offsets[-1]) for partition, offsets in waiting.items()])
            while waiting and not until.expired:
                found: Any = client.poll(seconds(until))
                if found is None or (found.error() and found.error().code() != KafkaError._PARTITION_EOF):
                    continue
                partition = found.topic(), found.partition()
                offsets = waiting.get(partition, [])
                while offsets and offsets[-1] <= found.offset():
                    first[partition, offsets.pop()] = found.offset()
                if not offsets:
                    waiting.pop(partition, None)
                    client.pause([TopicPartition(*partition)])
                elif offsets[-1] - found.offset() > _READ_ON:
                    client.seek(TopicPartition(*partition, offsets[-1]))
        return first

    def reset(self, name: str, to: str | int, topics: Sequence[str] | None) -> dict[Partition, Position]:
        """Set a group's offsets to "earliest", "latest" or a time in milliseconds, and return the new offsets.

        Raise `NotFound` if the group does not exist or has no offset in a given topic. Raise `InvalidState` if the
        group has members, or if an open transaction has acknowledgements of the group.
        """
        positions = self.group(name).positions
        for topic in topics or ():
            if topic not in {each for each, _ in positions}:
                raise NotFound(f"group {name!r} has never read topic {topic!r}")
        wanted = [partition for partition in positions if topics is None or partition[0] in topics]
        # The commit of an open transaction with acknowledgements would overwrite the new offsets.
        if len(self._cluster.requests.committed(name, wanted, self._deadline, decided=True)) < len(wanted):
            raise InvalidState(f"an open transaction has acknowledged messages for group {name!r}: end it first")
        starts = KafkaStartPositions(self._cluster.requests, Subscription((), None, to))
        targets = starts.first(wanted, self._deadline)
        offsets = ConsumerGroupTopicPartitions(name, [TopicPartition(*p, at) for p, at in targets.items()])
        answer = self._client.alter_consumer_group_offsets([offsets], request_timeout=seconds(self._deadline))[name]
        for each in self._result(answer, f"setting group {name!r}", name).topic_partitions:
            if each.error is not None:
                raise self._refusal(KafkaException(each.error), f"setting group {name!r}", name)
        return {partition: (at,) for partition, at in targets.items()}

    def _described(self, names: Sequence[str], *left_out: type[Exception]) -> dict[str, Any]:
        wait, described = seconds(self._deadline), dict[str, Any]()
        answers = self._client.describe_consumer_groups(list(names), request_timeout=wait) if names else {}
        for name, answer in answers.items():
            with suppress(*left_out):
                described[name] = self._result(answer, f"looking up group {name!r}")
        return described

    def _positions(self, names: Sequence[str]) -> dict[str, dict[Partition, int]]:
        """Return groups' committed offsets in the partitions that still exist."""
        ask, wait = self._client.list_consumer_group_offsets, seconds(self._deadline)
        answers = {name: ask([ConsumerGroupTopicPartitions(name)], request_timeout=wait)[name] for name in names}
        what = "reading the positions of group"
        offsets = {name: self._result(each, f"{what} {name!r}").topic_partitions for name, each in answers.items()}
        topics = self._cluster.topics.all(self._deadline).items()
        there = {(name, number) for name, topic in topics for number in topic.partitions}
        return {
            name: {at: p.offset for p in each if p.offset >= 0 and (at := (p.topic, p.partition)) in there}
            for name, each in offsets.items()
        }

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


def _members(group: Any) -> tuple[GroupMember, ...]:
    return tuple(
        GroupMember(
            each.member_id,
            f"{each.client_id} at {each.host.removeprefix('/')}",
            tuple((p.topic, p.partition) for p in each.assignment.topic_partitions),
        )
        for each in group.members
    )
