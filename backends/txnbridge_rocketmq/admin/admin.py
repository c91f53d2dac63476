"""Administration: topics, open transactions, and the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from txnbridge.errors import AccessDenied, InvalidOption, InvalidState, NotFound, NotSupported
from txnbridge.spi import Admin, Advice, Deadline, Decision, OpenTransaction, Outcome, Partition, Position, TopicInfo
from txnbridge_rocketmq.admin import doctor, open_halves
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.settings.names import is_system_topic
from txnbridge_rocketmq.topics import route_of

# Each cluster and each broker has a system topic of its own name. A cluster has a second one with this suffix.
_REPLY_SUFFIX = "_REPLY_TOPIC"
# Timeout of the requests that test the right to read topics. A live broker answers in milliseconds.
_RIGHTS_SECONDS = 2.0


class RocketMQAdmin(Admin):
    """Administration of a cluster's topics and open transactions."""

    def __init__(self, ender: HalfEnder) -> None:
        self._ender = ender
        self._cluster = ender.cluster
        self._topics = self._cluster.topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        deadline: Deadline,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        """Create a topic on the home broker, which has the bridge's own topics; return False if it exists.

        Raise `NotSupported` for a retention.
        """
        if retention_seconds is not None or retention_bytes is not None:
            raise NotSupported(
                f"topic {name!r}: RocketMQ keeps the messages of all topics for the same time (fileReservedTime of the"
                " brokers); leave out the retention"
            )
        created = self._topics.create(name, partitions, deadline)
        count = len(self._topics.existing_queues(name, deadline))
        if count != partitions:
            raise InvalidOption(f"topic {name!r} exists already, with {count} partitions")
        return created

    def topic_names(self, deadline: Deadline) -> list[str]:
        names = self._topics.all(deadline)
        clusters = {name.removesuffix(_REPLY_SUFFIX) for name in names if name.endswith(_REPLY_SUFFIX)}
        systems = {*clusters, *(name + _REPLY_SUFFIX for name in clusters), *self._cluster.brokers.names(deadline)}
        own = self._cluster.settings.prefix
        return [n for n in names if n not in systems and not n.startswith(own) and not is_system_topic(n)]

    def unreadable(self, topics: Sequence[str], deadline: Deadline) -> list[str]:
        """Return the topics in which a broker refuses to look for a message. A broker that is away refuses nothing."""
        client = self._cluster.client
        routes = [found for topic in topics if (found := route_of(client, topic, deadline)) and found.readable]
        asked = [(each.readable[0].broker, read_requests.newest_by_unique_key(each.topic, "-")) for each in routes]
        answers = client.call_all(asked, min(_RIGHTS_SECONDS, deadline.left()))
        told = zip(routes, answers, strict=True)
        failed = [(each.topic, translate(answer, "")) for each, answer in told if isinstance(answer, RemotingError)]
        return [topic for topic, error in failed if isinstance(error, AccessDenied)]

    def topics(self, deadline: Deadline) -> list[TopicInfo]:
        names, users = self._topics.all(deadline), set(self.topic_names(deadline))
        kept = self._cluster.brokers.config(self._topics.home, deadline).retention
        found = ((name, route_of(self._cluster.client, name, deadline)) for name in names)
        # A topic without a route was deleted meanwhile.
        return [TopicInfo(name, len(route.readable), name not in users, kept) for name, route in found if route]

    def delete_topic(self, name: str, deadline: Deadline) -> None:
        for listed in open_halves.list_open(self._cluster, deadline):
            if listed.may_be_published and any(half.partition[0] == name for half in listed.halves):
                raise InvalidState(f"topic {name!r} is in use by transaction {listed.name}; end this transaction first")
        self._topics.delete(name, deadline)

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        self._topics.grow(name, partitions, deadline)

    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        bounds = {}
        for topic in topics:
            queues = self._topics.existing_queues(topic, deadline)
            if not queues:
                raise NotFound(f"there is no topic {topic!r}")
            for number, queue in enumerate(queues):
                bounds[topic, number] = self._bounds(queue, deadline)
        return bounds

    def _bounds(self, queue: Queue, deadline: Deadline) -> tuple[Position, Position]:
        action = f"asking for the bounds of {queue.topic}[{queue.queue}]"
        first, end = (
            retry_call(self._cluster.client, queue.broker, bound(queue.topic, queue.queue), action, deadline)
            for bound in (read_requests.min_offset, read_requests.max_offset)
        )
        return (max(0, first),), (max(0, first, end),)

    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        """Return the open transactions whose transactional id begins with `owners`, also those with discarded halves.

        A half of another client counts as a transaction with an empty transactional id.
        """
        listed = open_halves.list_open(self._cluster, deadline)
        found = {one.name: open_halves.as_open_transaction(self._cluster, one) for one in listed}
        held = {each.transaction: each for each in open_halves.list_held(self._cluster, deadline)}
        return [each for each in {**held, **found}.values() if each.transactional_id.startswith(owners)]

    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End an open transaction, and return its outcome.

        `transaction` is its id or, for a half of another client, the half's unique key.
        """
        return open_halves.end_open(self._ender, self._named(transaction, deadline), decision, deadline)

    def _named(self, transaction: str, deadline: Deadline) -> open_halves.OpenHalves:
        for listed in open_halves.list_open(self._cluster, deadline):
            if listed.name == transaction:
                return listed
        raise NotFound(f"no open or prepared transaction {transaction!r}: it has ended, or only its token ends it")

    def repair(self, transaction: str, deadline: Deadline) -> str:
        """Have the broker send check-backs again for the discarded halves of a transaction. Return a report.

        Raise `NotFound` if the transaction is not listed, `InvalidState` if it has no discarded halves.
        """
        count = open_halves.resume_check_backs(self._cluster, self._named(transaction, deadline), deadline)
        if not count:
            raise InvalidState(f"the broker has not discarded any half of transaction {transaction!r}")
        return f"the broker sends check-backs again for {count} halves of {transaction}"

    def check(self, deadline: Deadline) -> list[Advice]:
        return list(self._advice(deadline))

    def _advice(self, deadline: Deadline) -> Iterator[Advice]:
        brokers = self._cluster.brokers
        parts: list[tuple[str, Callable[[], Iterable[Advice]]]] = [
            ("topics", lambda: doctor.check_brokers_of_topics(self._cluster, self.topic_names(deadline), deadline)),
            ("transactions", lambda: doctor.check_open(self.transactions(deadline), self._cluster.settings)),
            ("producer groups", lambda: doctor.check_producer_groups(self._cluster, deadline)),
        ]
        for broker in brokers.names(deadline):
            parts.append((f"broker {broker}", lambda broker=broker: self._check_broker(broker, deadline)))  # type: ignore[misc]
        for subject, look in parts:
            try:
                yield from look()
            except AccessDenied as error:
                yield Advice("warning", subject, str(error), "let an administrator of the cluster run the doctor")

    def _check_broker(self, broker: str, deadline: Deadline) -> Iterator[Advice]:
        told = self._cluster.brokers.require_config(broker, deadline, fresh=True)
        yield from doctor.check_settings(told, self._cluster.settings)
        action = f"asking broker {broker} how full its disk is"
        full = retry_call(self._cluster.client, broker, administration.disk_ratio(), action, deadline)
        yield from doctor.check_disk(broker, full)
