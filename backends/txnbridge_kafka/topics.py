"""The topics of a cluster: described by confluent-kafka's client, created and changed by raw requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._metadata import ClusterMetadata, TopicMetadata

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded, InvalidOption, NotFound
from txnbridge.spi import Deadline, Partition, TopicRules
from txnbridge_kafka.capabilities import DEFAULT_LONGEST_MS, longest_ms
from txnbridge_kafka.client.librdkafka import ConfluentAdminClient, ignore, refresh_metadata, result_of
from txnbridge_kafka.client.protocol_types import BROKER, DONE, TOPIC, RequestResult
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.errors import DENIED, MISSING, translate
from txnbridge_kafka.settings import KafkaSettings

OFFSETS_TOPIC = "__consumer_offsets"

# The settings of an internal topic: no record is dropped by age or size, and no replica that lacks records may lead.
KEEP_ALL: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}
# The group id of the consumers that read decision logs. librdkafka requires one; they never join the group.
LOG_GROUP = "txnbridge-log"
# The rights to an internal topic: to read, to append, to describe, and to drop old records.
_RIGHTS = ("Read", "Write", "Describe", "DescribeConfigs", "Delete")

# The replicas of an internal topic, or one on each broker if there are fewer: Kafka's default for __transaction_state.
_REPLICAS = 3
# The prefix of Kafka's internal topics, which the brokers create themselves.
_KAFKA_INTERNAL_PREFIX = "__"

# A broker that has just started answers before it has loaded its topics: for this time a missing topic is asked again.
_RECHECK_MISSING_SECONDS = 0.5
_RETRY_SECONDS = 0.02
# The longest wait for one broker's settings: a running broker answers within milliseconds.
_BROKER_ANSWER_SECONDS = 2.0

_log = logging.getLogger("txnbridge.kafka.client")


class KafkaTopics:
    """Looks up, creates, changes and deletes topics. Any thread may use it; it connects at the first call."""

    def __init__(self, settings: KafkaSettings, requests: Requests) -> None:
        self._settings = settings
        self._requests = requests  # confluent-kafka's admin client may crash the process (hazard H21)
        self._lock = threading.Lock()
        self._client: ConfluentAdminClient | None = None

    def partitions(self, topic: str, deadline: Deadline, at_least: int = 1, create: bool = True) -> int:
        """Return how many partitions a topic has.

        Create a missing topic if `create` and the option `create_topics` allow it, else raise `NotFound`. If there are
        fewer partitions than `at_least`, ask again for half a second: some may have been added just now.
        """
        count = self.count(topic, deadline)
        # The half second begins after the first answer, which may itself take longer.
        sure_at = time.monotonic() + _RECHECK_MISSING_SECONDS
        if not count and create and self._settings.create_topics > 0 and not topic.startswith(_KAFKA_INTERNAL_PREFIX):
            self.create(topic, self._settings.create_topics, deadline)
            sure_at = deadline.at
        while count < at_least and time.monotonic() < sure_at and not deadline.expired:
            time.sleep(_RETRY_SECONDS)
            count = self.count(topic, deadline)
        if not count:
            raise NotFound(
                f"there is no topic {topic!r}; create it with:"
                f" txnbridge topics create {topic} --partitions N --url kafka://{self._settings.bootstrap}"
            )
        return count

    def require(self, topic: str, partition: int | None, deadline: Deadline, create: bool = True) -> int:
        """Return how many partitions a topic has. Raise `NotFound` if the topic or the partition is missing."""
        if partition is not None and partition < 0:
            raise NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        count = self.partitions(topic, deadline, at_least=(partition or 0) + 1, create=create)
        if partition is not None and partition >= count:
            raise NotFound(f"{topic} has {count} partitions, so there is no partition {partition}")
        return count

    def rules(self, topic: str, deadline: Deadline) -> TopicRules:
        """Return the rules by which a topic refuses messages. Raise `AccessDenied` if this user may not write to it."""
        rights = self._rights([topic], deadline)
        if not rights:
            raise NotFound(f"there is no topic {topic!r}")
        if AclOperation.WRITE not in rights[topic]:
            raise AccessDenied(f"this user may not write to topic {topic!r}; an administrator grants it Write there")
        config = self.configs([topic], deadline)[topic]
        own = {**self._settings.client, **self._settings.producer}
        packed = any(own.get(name, "none") != "none" for name in ("compression.type", "compression.codec"))
        size = config.get("max.message.bytes")
        return TopicRules(int(size) if size and not packed else None, "compact" in config.get("cleanup.policy", ""))

    def unreadable(self, topics: Sequence[str], deadline: Deadline) -> list[str]:
        rights = self._rights(topics, deadline)
        return [topic for topic in topics if AclOperation.READ not in rights.get(topic, AclOperation)]

    def _rights(self, topics: Sequence[str], deadline: Deadline) -> dict[str, Collection[AclOperation]]:
        """Return what this user may do with each existing topic: anything if the broker does not tell."""
        what = f"looking up {', '.join(topics)}"

        def ask() -> dict[str, Collection[AclOperation]]:
            seconds = max(deadline.left(), 0.01)
            names = TopicCollection(list(topics))
            asked = self._admin().describe_topics(names, include_authorized_operations=True, request_timeout=seconds)
            rights: dict[str, Collection[AclOperation]] = {}
            for topic, answer in asked.items():
                try:
                    rights[topic] = result_of(answer, what, deadline).authorized_operations or list(AclOperation)
                except KafkaException as error:
                    if _code(error) in DENIED:
                        rights[topic] = ()
                    elif _code(error) not in MISSING:
                        raise
            return rights

        rights: dict[str, Collection[AclOperation]] = self._call_client(ask, deadline, what)
        return rights

    def count(self, topic: str, deadline: Deadline) -> int:
        """Return how many partitions a topic has by one broker's metadata; 0 if that broker has no such topic."""
        what = f"looking up topic {topic!r}"
        metadata = self._call_client(lambda: refresh_metadata(self._admin(), deadline, topic), deadline, what)
        described: TopicMetadata = metadata.topics[topic]
        if described.error is None or described.error.code() == KafkaError.LEADER_NOT_AVAILABLE:
            return len(described.partitions)
        if described.error.code() in MISSING:
            return 0
        error = KafkaException(described.error)
        raise translate(error, what) from error

    def all(self, deadline: Deadline) -> dict[str, TopicMetadata]:
        return dict(self.overview(deadline).topics)

    def overview(self, deadline: Deadline) -> ClusterMetadata:
        """Return the living brokers and every topic from one metadata request."""
        what = "listing brokers and topics"
        metadata: ClusterMetadata = self._call_client(lambda: refresh_metadata(self._admin(), deadline), deadline, what)
        return metadata

    def create(
        self,
        topic: str,
        partitions: int,
        deadline: Deadline,
        config: Mapping[str, str] | None = None,
        replicas: int | None = None,
    ) -> bool:
        """Create a topic with settings (`config`); return False if it exists. Raise `InvalidOption` for bad ones."""
        copies, settings = replicas or self._settings.replicas, config or {}
        try:
            self._repeat_until_done(
                lambda requests: requests.create_topic(topic, partitions, copies, settings, deadline), deadline
            )
        except KafkaException as error:
            if _code(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise translate(error, f"creating topic {topic!r}") from error
        return True

    def create_internal_topic(self, name: str, deadline: Deadline) -> None:
        """Create an internal topic, such as a decision log, unless it exists, and wait until the brokers know it.

        Raise `AccessDenied`, with the commands for an administrator, if this user may not create or see the topic.
        Raise `InvalidOption` if the topic exists with several partitions.
        """
        try:
            count = self.count(name, deadline)
            if not count:
                copies = self._replicas(deadline)
                self.create(name, 1, deadline, {**KEEP_ALL, **_in_sync(copies)}, copies)
            while not count:  # other brokers learn of the topic a little later than the controller
                deadline.check(f"waiting until the brokers know the topic {name!r}")
                time.sleep(_RETRY_SECONDS)
                count = self.count(name, deadline)
        except AccessDenied as error:
            raise AccessDenied(self._creation_text(name)) from error.__cause__
        if count != 1:
            raise InvalidOption(f"topic {name!r} has {count} partitions and must have 1: another program created it")

    def require_keeping(self, name: str, deadline: Deadline) -> bool:
        """Check that an internal topic keeps its records; return whether this user may see the topic's settings.

        Raise `InvalidOption` if they would lose records or their order (hazard H26).
        """
        config = self.configs([name], deadline)[name]
        wrong = [f"{key}={config[key]} instead of {to}" for key, to in KEEP_ALL.items() if config.get(key, to) != to]
        if wrong:
            wanted = ",".join(f"{key}={value}" for key, value in KEEP_ALL.items())
            raise InvalidOption(
                f"the topic {name} would lose decisions: {', '.join(wrong)}; let an administrator change it:"
                f"\n  kafka-configs.sh --bootstrap-server {self._settings.bootstrap} --alter --topic {name}"
                f" --add-config {wanted}"
            )
        return bool(config)

    def _replicas(self, deadline: Deadline) -> int:
        """Return the replicas of a new internal topic: as set, else 3, or the number of brokers if that is less."""
        if self._settings.replicas > 0:
            return self._settings.replicas
        return min(_REPLICAS, len(self.overview(deadline).brokers))

    def _creation_text(self, name: str) -> str:
        server = f"--bootstrap-server {self._settings.bootstrap}"
        copies = self._settings.replicas if self._settings.replicas > 0 else _REPLICAS
        settings = " ".join(f"--config {key}={value}" for key, value in {**KEEP_ALL, **_in_sync(copies)}.items())
        return (
            f"this user may not create or see the topic {name!r}, which txnbridge needs. An administrator creates it:"
            f"\n  kafka-topics.sh {server} --create --topic {name} --partitions 1"
            f" --replication-factor {copies} {settings}"
            f"\nand grants this user:{self.grants(name)}"
        )

    def grants(self, name: str) -> str:
        """Return the shell commands, a line each, that grant a user all rights to an internal topic."""
        command = f"\n  kafka-acls.sh --bootstrap-server {self._settings.bootstrap} --add --allow-principal User:NAME"
        rights = " ".join(f"--operation {right}" for right in _RIGHTS)
        return f"{command} {rights} --topic {name}{command} --operation Describe --group {LOG_GROUP}"

    def delete(self, topic: str, deadline: Deadline) -> None:
        """Delete a topic. Raise `NotFound` if it does not exist."""
        id = self._requests.topic_ids([topic], deadline).get(topic, "")
        self._change(lambda requests: requests.delete_topic(topic, id, deadline), deadline, f"deleting topic {topic!r}")

    def grow(self, topic: str, partitions: int, deadline: Deadline) -> None:
        """Add partitions to a topic. Raise `NotFound` if it does not exist, `InvalidOption` if it has more already."""
        has = self.count(topic, deadline)
        if not has:
            raise NotFound(f"there is no topic {topic!r}")
        if partitions < has:
            raise InvalidOption(f"topic {topic!r} has {has} partitions; they cannot become fewer")
        if partitions > has:
            what = f"growing topic {topic!r}"
            self._change(lambda requests: requests.grow_topic(topic, partitions, deadline), deadline, what)

    def configs(self, topics: Sequence[str], deadline: Deadline) -> dict[str, dict[str, str]]:
        """Return each topic's effective settings; {} for a topic whose settings this user may not see."""
        return self._settings_of(TOPIC, topics, deadline)

    def broker_configs(self, brokers: Iterable[int], deadline: Deadline) -> dict[str, dict[str, str]]:
        """Return each broker's effective settings, by its id; {} for a broker whose settings this user may not see.

        A broker that does not answer within two seconds is left out, because a cluster lists a dead broker for some
        seconds. If no broker answers, all are asked again until the deadline.
        """
        numbers = list(brokers)
        configs: dict[str, dict[str, str]] = {}
        while numbers and not configs:
            deadline.check("asking brokers for their settings")
            for number in numbers:
                with suppress(BrokerUnavailable):
                    soon = Deadline(min(_BROKER_ANSWER_SECONDS, deadline.left()))
                    configs.update(self._settings_of(BROKER, [str(number)], soon))
        return configs

    def _settings_of(self, kind: int, names: Sequence[str], deadline: Deadline) -> dict[str, dict[str, str]]:
        what = "asking for settings"
        configs: dict[str, dict[str, str]] = {}
        for name, (answer, settings) in self._requests.configs(kind, names, deadline).items():
            if answer.code and answer.code not in DENIED | MISSING:
                error = _refusal_of(answer)
                raise translate(error, what) from error
            configs[name] = dict(settings)
        return configs

    def drop_records(self, partition: Partition, before: int, deadline: Deadline) -> None:
        """Drop the records of a partition before an offset. Raise `KafkaException` if the broker refuses."""
        self._repeat_until_done(lambda requests: requests.drop_records(partition, before, deadline), deadline)

    def _admin(self) -> ConfluentAdminClient:
        with self._lock:
            if self._client is None:
                # Nobody polls this client, so its log lines would accumulate. The errors of calls have the same text.
                config = {**self._settings.client, "log_level": 0, "logger": _log, "error_cb": ignore}
                self._client = ConfluentAdminClient(config)
            return self._client

    def _call_client(self, ask: Callable[[], Any], deadline: Deadline, what: str) -> Any:
        """Return the result of `ask`, a call of confluent-kafka's admin client; repeat it after a temporary error."""
        while True:
            try:
                return ask()
            except KafkaException as error:
                refused = translate(error, what)
                if not _is_temporary(error):
                    raise refused from error
                if deadline.left() <= _RETRY_SECONDS:
                    raise DeadlineExceeded(f"{refused}; tried for {deadline.seconds:g} s") from error
            time.sleep(_RETRY_SECONDS)

    def _change(self, ask: Callable[[Requests], RequestResult], deadline: Deadline, what: str) -> None:
        try:
            self._repeat_until_done(ask, deadline)
        except KafkaException as error:
            raise translate(error, what) from error

    def _repeat_until_done(self, ask: Callable[[Requests], RequestResult], deadline: Deadline) -> None:
        """Repeat the request `ask` until the broker has carried it out. Raise `KafkaException` if refused for good."""
        while True:
            answer = ask(self._requests)
            if answer.code == DONE:
                return
            error = _refusal_of(answer)
            if not _is_temporary(error) or deadline.left() <= _RETRY_SECONDS:
                raise error
            time.sleep(_RETRY_SECONDS)


def longest_transaction_ms(topics: KafkaTopics, brokers: Iterable[int], deadline: Deadline) -> int:
    """Return the longest transaction time-out that these brokers allow; a broker that does not answer is left out."""
    return min(map(longest_ms, topics.broker_configs(brokers, deadline).values()), default=DEFAULT_LONGEST_MS)


def _refusal_of(answer: RequestResult) -> KafkaException:
    return KafkaException(KafkaError(answer.code, answer.text))


def _in_sync(copies: int) -> dict[str, str]:
    """Return the setting min.insync.replicas for a number of replicas: 2 of 3, so that one broker may be down."""
    return {"min.insync.replicas": str(max(1, min(2, copies - 1)))}


def _code(error: KafkaException) -> int:
    return int(error.args[0].code())


def _is_temporary(error: KafkaException) -> bool:
    # For a moment the controller regards a broker as fenced that has just started or was slow.
    if _code(error) == KafkaError.INVALID_REPLICATION_FACTOR:
        return "currently fenced" in error.args[0].str()
    return _code(error) in (
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError.NOT_CONTROLLER,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.BROKER_NOT_AVAILABLE,
    )


def offsets_partition(group: str, partitions: int) -> Partition:
    """Return the partition of `__consumer_offsets` with a group's committed offsets, by Java's `String.hashCode`."""
    code = 0
    units = group.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[at : at + 2], "big")) & 0xFFFF_FFFF
    signed = code - (1 << 32) if code >> 31 else code
    # In Java the smallest integer has no absolute value, for which Kafka uses 0.
    return OFFSETS_TOPIC, 0 if signed == -(1 << 31) else abs(signed) % partitions
