"""The topics of a cluster: looks them up, creates and deletes them, and adds partitions."""

from __future__ import annotations

import time
from collections.abc import Iterable

from txnbridge import errors
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client import administration, routes
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import RemotingError, Unreachable
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.retry import retry, retry_call
from txnbridge_rocketmq.client.routes import TopicRoute
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings import RocketMQSettings
from txnbridge_rocketmq.settings.names import topic_name

# How long a route is cached. Other clients may add queues at any time, and a look-up takes a millisecond.
_ROUTE_CACHE_SECONDS = 1.0
# Seconds for which a topic is looked up before it counts as missing: a broker that has just started may not be
# registered at the name server yet.
_TOPIC_MISSING_SECONDS = 0.5
_ROUTE_POLL_SECONDS = 0.01
# The wait between two requests while a broker is down, and the time within which a live broker responds.
_BROKER_DOWN_PAUSE_SECONDS = 0.1
_RESPONSE_SECONDS = 2.0
# The message types of topics. Brokers enforce them only for gRPC clients.
_USER_TOPIC_TYPE, _OWN_TOPIC_TYPE = "TRANSACTION", "NORMAL"


class RocketMQTopics:
    """The topics of a cluster. Safe for use by several threads.

    A partition is a queue, by its number. All queues of a topic are on one broker, because the numbers of queues on
    several brokers would change while a broker is down. New topics are created on the broker `home`.
    """

    def __init__(
        self, settings: RocketMQSettings, client: RemotingClient, home: str, brokers: Iterable[str] = ()
    ) -> None:
        """`brokers` are the names of all brokers that the cluster has or had, from `record_brokers`."""
        self._settings = settings
        self._client = client
        self.home = home
        self._brokers = frozenset({home, *brokers})
        self._known: dict[str, tuple[float, TopicRoute]] = {}
        self._internal: set[str] = set()

    def queues(self, topic: str, deadline: Deadline, create: bool = True) -> tuple[Queue, ...]:
        """Return the readable queues of a topic, by partition.

        Create a missing topic if `create` and the settings allow that. Use the cached route of the last second. Raise
        `NotFound` if the topic is missing, `InvalidOption` if the name is invalid, or `NotSupported` if the topic is on
        several brokers.
        """
        return self._route(topic, deadline, 1, create).readable

    def require(self, topic: str, partition: int | None, deadline: Deadline) -> tuple[Queue, ...]:
        """Return a topic's writable queues. Raise the errors of `queues`, or `NotFound` if the partition is missing."""
        if partition is not None and partition < 0:
            raise errors.NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        queues = self._route(topic, deadline, (partition or 0) + 1).writable
        if partition is not None and partition >= len(queues):
            raise errors.NotFound(f"{topic} has {len(queues)} partitions, so there is no partition {partition}")
        if not queues:
            raise errors.NotFound(f"topic {topic!r} has no writable queue: its permission (perm) allows no writing")
        return queues

    def existing_queues(self, topic: str, deadline: Deadline) -> tuple[Queue, ...]:
        """Return the readable queues of a topic without creating it; () if the topic does not exist.

        Raise `DeadlineExceeded` if a broker that may have the topic is down.
        """
        route = self._find_route(topic, deadline)
        return () if route is None else _on_one_broker(route).readable

    def all(self, deadline: Deadline) -> list[str]:
        return all_topics(self._client, deadline)

    def _current_route(self, topic: str, deadline: Deadline) -> TopicRoute | None:
        topic_name(topic)
        return route_of(self._client, topic, deadline)

    def _find_route(self, topic: str, deadline: Deadline) -> TopicRoute | None:
        """Return the route of a topic; None if no broker has the topic. Wait for brokers that are down.

        A name server forgets the topics of a broker moments after the broker has stopped. So a topic without a route
        may be deleted, or its broker may be down (hazard H81).
        """
        while (route := self._current_route(topic, deadline)) is None:
            running = retry(lambda: self._client.brokers(deadline.left()), "looking for brokers", deadline)
            if (route := self._current_route(topic, deadline)) is not None:
                break
            known = self._brokers | self._client.seen_brokers
            away = sorted(each for each in known if each not in running or self._may_have(each, topic, deadline))
            if not away:
                break
            if deadline.left() <= _BROKER_DOWN_PAUSE_SECONDS:
                raise errors.DeadlineExceeded(
                    f"for {deadline.seconds:g} s the name server knew no topic {topic!r}, and broker {away[0]}, which"
                    " may have the topic, was down. (If that broker is gone for good, delete the topic"
                    f" {self._settings.broker_topic(away[0])}, and reopen the bridge)"
                )
            time.sleep(_BROKER_DOWN_PAUSE_SECONDS)
        return route

    def _may_have(self, broker: str, topic: str, deadline: Deadline) -> bool:
        """Return whether a broker may have a topic for which the name server has no route.

        A broker may have the topic if it says so, or does not respond.
        """
        try:
            request = administration.topic_attributes(topic)
            return self._client.call(broker, request, min(_RESPONSE_SECONDS, deadline.left())) is not None
        except RemotingError as error:
            # Without the right to ask the broker, the name server's answer is used: a broker registers itself and its
            # topics in one request, so a broker that the name server knows has no other topics.
            return not isinstance(translate(error, ""), errors.AccessDenied)

    def _route(self, topic: str, deadline: Deadline, at_least: int, create: bool = True) -> TopicRoute:
        at, known = self._known.get(topic, (0.0, None))
        if known is not None and len(known.readable) >= at_least and time.monotonic() - at < _ROUTE_CACHE_SECONDS:
            return known
        route = _on_one_broker(self._find_or_create(topic, deadline, at_least, create))
        self._known[topic] = time.monotonic(), route
        return route

    def _find_or_create(self, topic: str, deadline: Deadline, at_least: int, create: bool) -> TopicRoute:
        sure_at = time.monotonic() + _TOPIC_MISSING_SECONDS
        while True:
            route = self._find_route(topic, deadline)
            if route is not None and len(route.readable) >= at_least:
                return route
            if route is None and create and self._settings.create_topics:
                self.create(topic, self._settings.create_topics, deadline)
            elif time.monotonic() >= sure_at or deadline.expired:
                break
            time.sleep(_ROUTE_POLL_SECONDS)
        if route is None:
            raise errors.NotFound(
                f"there is no topic {topic!r}; create it with: txnbridge topics create {topic} --partitions N"
                f" --url {self._settings.url}"
            )
        return route

    def create(self, topic: str, partitions: int, deadline: Deadline) -> bool:
        """Create a topic. Return False if a topic of this name exists."""
        if self.existing_queues(topic, deadline):
            return False
        # The broker `home` is up now, and has the names of brokers that were away when the bridge was opened.
        self._brokers |= self._settings.noted_brokers(self.all(deadline))
        if self.existing_queues(topic, deadline):
            return False
        created = create_topic_on(self._client, self.home, topic, partitions, _USER_TOPIC_TYPE, deadline)
        self._wait_until(topic, 1, deadline)
        return created

    def grow(self, topic: str, partitions: int, deadline: Deadline) -> None:
        """Add partitions, so that the topic has `partitions`. Raise `NotFound`, or `InvalidOption` if it has more."""
        queues = self.existing_queues(topic, deadline)
        if not queues:
            raise errors.NotFound(f"there is no topic {topic!r}")
        if partitions < len(queues):
            raise errors.InvalidOption(f"topic {topic!r} has {len(queues)} partitions; they cannot become fewer")
        if partitions > len(queues):
            _change(self._client, queues[0].broker, topic, partitions, None, deadline)
            self._wait_until(topic, partitions, deadline)
        self._known.pop(topic, None)

    def delete(self, topic: str, deadline: Deadline) -> None:
        """Delete a topic from its brokers and from the name servers. Raise `NotFound` if the topic is missing."""
        route = self._find_route(topic, deadline)
        if route is None:
            raise errors.NotFound(f"there is no topic {topic!r}")
        action = f"deleting topic {topic!r}"
        for broker in sorted({queue.broker for queue in (*route.readable, *route.writable)}):
            retry_call(self._client, broker, administration.delete_topic(topic), action, deadline)
        for address in self._settings.name_servers:  # each keeps the routes that brokers have registered
            forget = administration.forget_topic(topic)
            try:
                self._client.call_address(address, forget, deadline.left())
            except Unreachable:
                continue  # when the name server is back, the brokers register their topics anew
            except RemotingError as error:
                raise translate(error, action) from error
        self._known.pop(topic, None)
        while self._current_route(topic, deadline) is not None:
            deadline.check(f"waiting until topic {topic!r} is gone")
            time.sleep(_ROUTE_POLL_SECONDS)

    def _wait_until(self, topic: str, partitions: int, deadline: Deadline) -> None:
        while (route := self._current_route(topic, deadline)) is None or len(route.readable) < partitions:
            deadline.check(f"waiting until the name server knows {partitions} partitions of topic {topic!r}")
            time.sleep(_ROUTE_POLL_SECONDS)

    def internal(self, topic: str, deadline: Deadline) -> Queue:
        """Return the only queue of one of the bridge's own topics. Create a missing topic on the broker `home`."""
        queue = Queue(topic, self.home, 0)
        if topic not in self._internal:
            ensure_single_queue(self._client, queue, deadline)
            self._internal.add(topic)
        return queue


def all_topics(client: RemotingClient, deadline: Deadline) -> list[str]:
    return retry(lambda: client.ask_name_server(routes.topics(), deadline.left()), "listing topics", deadline)


def route_of(client: RemotingClient, topic: str, deadline: Deadline) -> TopicRoute | None:
    """Return the current route of a topic; None if the name server does not know the topic."""
    return retry(lambda: client.route(topic, deadline.left(), fresh=True), f"looking at topic {topic!r}", deadline)


def ensure_single_queue(client: RemotingClient, queue: Queue, deadline: Deadline) -> None:
    """Create the topic of `queue` with this one queue if the topic is missing, and return when the topic exists.

    Raise `InvalidOption` if the topic has other queues. Raise `AccessDenied`, with the command for an administrator, if
    this user may not create topics.
    """
    topic, broker = topic_name(queue.topic), queue.broker
    route = route_of(client, topic, deadline)
    if route is None:
        try:
            create_topic_on(client, broker, topic, 1, _OWN_TOPIC_TYPE, deadline)
        except errors.AccessDenied as error:
            raise errors.AccessDenied(_advice_to_create(client, topic, broker, deadline)) from error.__cause__
        while (route := route_of(client, topic, deadline)) is None:
            deadline.check(f"waiting until the name server knows topic {topic!r}")
            time.sleep(_ROUTE_POLL_SECONDS)
    if {*route.readable, *route.writable} != {queue} or not (route.readable and route.writable):
        queues = sorted({*route.readable, *route.writable}, key=str)
        places = ", ".join(f"{each.broker}[{each.queue}]" for each in queues)
        raise errors.InvalidOption(
            f"the topic {topic} must have one queue, on broker {broker}, to read and to write: a log has one order."
            f" Its queues are {places or 'neither readable nor writable'}; let an administrator change that, or choose"
            " another prefix"
        )


def create_topic_on(client: RemotingClient, broker: str, topic: str, count: int, kind: str, deadline: Deadline) -> bool:
    """Create a topic on a broker. Return False if the broker has it: creating it again would change its settings."""
    request = administration.topic_attributes(topic_name(topic))
    if retry_call(client, broker, request, f"creating topic {topic!r}", deadline) is not None:
        return False
    _change(client, broker, topic, count, kind, deadline)
    return True


def _change(client: RemotingClient, broker: str, topic: str, queues: int, kind: str | None, deadline: Deadline) -> None:
    request = administration.create_topic(topic, queues, kind)
    action = f"setting topic {topic!r} to {queues} partitions"

    def attempt() -> None:
        # Since an attempt without an answer, another process may have given the topic more queues.
        route = client.route(topic, deadline.left(), fresh=True)
        if route is None or [queue.broker for queue in route.readable].count(broker) < queues:
            client.call(broker, request, deadline.left())

    def to_error(error: RemotingError, action: str) -> errors.TxnBridgeError:
        return errors.BrokerUnavailable(f"{action}: {error}") if error.may_have_had_effect else translate(error, action)

    retry(attempt, action, deadline, to_error)


def _on_one_broker(route: TopicRoute) -> TopicRoute:
    brokers = sorted({queue.broker for queue in (*route.readable, *route.writable)})
    if len(brokers) > 1:
        raise errors.NotSupported(
            f"topic {route.topic!r} is on the brokers {', '.join(brokers)}; txnbridge reads and writes only topics on"
            " one broker, because partitions would change their numbers while a broker is down"
        )
    return route


def _advice_to_create(client: RemotingClient, topic: str, broker: str, deadline: Deadline) -> str:
    address = retry(lambda: client.brokers(deadline.left()), "looking for brokers", deadline).get(broker, "ADDRESS")
    return (
        f"this user may not create the topic {topic}, which txnbridge needs. An administrator creates it:"
        f"\n  mqadmin updateTopic -b {address} -t {topic} -r 1 -w 1"
        f"\nand gives this user the right to publish and to subscribe there"
    )
