"""The connection to a cluster, and the cluster's identity.

RocketMQ's own cluster name is "DefaultCluster" almost everywhere. Therefore the bridge gives each cluster a random id.
The bridge stores the id together with the name of the home broker, which holds the bridge's own topics.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from txnbridge import errors
from txnbridge.spi import Context, Deadline, Ledger
from txnbridge_rocketmq.client import routes
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.decision_log import RocketMQDecisionLog
from txnbridge_rocketmq.outcome.producer_groups import CheckBackRouter, ProducerGroups
from txnbridge_rocketmq.settings import RocketMQSettings
from txnbridge_rocketmq.settings.broker_config import BrokerConfigs
from txnbridge_rocketmq.settings.names import decoded, encoded, topic_name
from txnbridge_rocketmq.topics import RocketMQTopics, all_topics, create_topic_on, ensure_single_queue, route_of

_log = logging.getLogger("txnbridge")

_VERSION = 1
# The wait between two requests for the list of brokers, while no broker is up.
_BROKER_LIST_PAUSE_SECONDS = 0.1
_IDENTITY_SUFFIX = re.compile(r"([0-9a-f]{32})-(.+)")


@dataclass(frozen=True)
class RocketMQCluster:
    """The settings, client, topics and other objects that all parts of a bridge to one cluster share."""

    id: str  # stable and unique
    settings: RocketMQSettings
    client: RemotingClient
    topics: RocketMQTopics
    brokers: BrokerConfigs
    producer_groups: ProducerGroups
    context: Context

    def ledger(self, transaction: str, log: Mapping[str, Any]) -> Ledger:
        """Return the ledger of a transaction's owner: the owner's records in the decision log that `log` names."""
        return self.context.ledger(str(log.get("log") or self.settings.application), transaction.rsplit("/", 2)[0])


def open_cluster(settings: RocketMQSettings, context: Context, deadline: Deadline) -> RocketMQCluster:
    """Connect to a cluster, and identify it. Raise `InvalidOption`, `BrokerUnavailable`, or `AccessDenied`."""
    router = CheckBackRouter()
    try:
        client = RemotingClient(
            settings.name_servers, credentials=settings.credentials(), tls=settings.tls_context(), on_checks=router.call
        )
    except ValueError as error:
        raise errors.InvalidOption(str(error)) from error
    try:
        identity = identify_cluster(settings, client, deadline)
        noted = record_brokers(settings, client, identity.home, deadline)
    except BaseException:
        client.close()
        raise
    topics = RocketMQTopics(settings, client, identity.home, noted)
    return RocketMQCluster(
        identity.id, settings, client, topics, BrokerConfigs(client), ProducerGroups(client, router), context
    )


@dataclass(frozen=True)
class ClusterId:
    """A cluster's id, and the name of its home broker, which holds the bridge's own topics."""

    id: str
    home: str


def identify_cluster(settings: RocketMQSettings, client: RemotingClient, deadline: Deadline) -> ClusterId:
    """Return the cluster's id and the broker of the bridge's own topics (home). Choose them if the cluster has none.

    The first record of the topic `RocketMQSettings.cluster_topic` holds the id, so that processes that connect at the
    same time agree. Brokers keep records for days only, but topics for ever. Therefore the name of an empty topic on
    every broker repeats the id and the home broker's name. While the home broker is down, any other broker shows that
    the cluster has an id already (hazard H82).

    Raise `StorageFailed` if the id is lost or the brokers have several, and `InvalidOption` if the address is not that
    of a name server.
    """
    try:
        brokers = _brokers(settings, client, deadline)
    except errors.NotSupported as error:
        # Messages through a proxy would be lost: it reports success for END_TRANSACTION and does nothing.
        raise errors.InvalidOption(
            f"a broker or a proxy answers at {', '.join(settings.name_servers)}, and not a name server. Put the"
            " addresses of the name servers into the URL, and let this host reach the brokers themselves"
        ) from error.__cause__
    identity = _identity_among(all_topics(client, deadline), settings)
    identity = identity or _identity_among(_topics_everywhere(settings, client, deadline), settings)
    if identity is None:
        identity = _identity_in_log(settings, client, brokers[0], deadline)
        _store_on(identity, settings, client, identity.home, deadline)
        if _identity_among(all_topics(client, deadline), settings) != identity:
            raise errors.BrokerUnavailable(
                "this cluster got its id a moment ago, and not every broker has it yet; try again"
            )
    _store_on_all(identity, settings, client, brokers, deadline)
    return identity


def record_brokers(settings: RocketMQSettings, client: RemotingClient, home: str, deadline: Deadline) -> frozenset[str]:
    """Record the names of the running brokers. Return the names of all brokers that the cluster has or had.

    A name server forgets a broker that is down, together with the broker's topics. Therefore, for each broker that a
    bridge has seen, the broker `home` gets an empty topic with the seen broker's name in the topic's name (hazard H81).
    """
    noted = settings.noted_brokers(all_topics(client, deadline))
    running = set(BrokerConfigs(client).names(deadline)) - {home}
    for broker in sorted(running - noted):
        try:
            create_topic_on(client, home, settings.broker_topic(broker), 1, "NORMAL", deadline)
        except errors.TxnBridgeError as error:
            _log.warning("broker %s is not recorded: while it is down, its topics will look deleted: %s", broker, error)
    return frozenset({home} | noted | running)


def _brokers(settings: RocketMQSettings, client: RemotingClient, deadline: Deadline) -> list[str]:
    """Return the names of the brokers that are up. Wait until there is one: brokers may be restarting."""
    while not (names := BrokerConfigs(client).names(deadline)):
        if deadline.left() <= _BROKER_LIST_PAUSE_SECONDS:
            servers = ", ".join(settings.name_servers)
            raise errors.BrokerUnavailable(f"name server {servers} knew no running broker for {deadline.seconds:g} s")
        time.sleep(_BROKER_LIST_PAUSE_SECONDS)
    return names


def _topics_everywhere(settings: RocketMQSettings, client: RemotingClient, deadline: Deadline) -> list[str]:
    """Return the topics that any name server knows: one that was just started may know only a new broker."""

    def ask(address: str) -> list[str]:
        action = f"asking name server {address} whether this cluster has an id"
        return retry(lambda: client.call_address(address, routes.topics(), deadline.left()), action, deadline)

    return [topic for address in settings.name_servers for topic in ask(address)]


def _identity_among(topics: Sequence[str], settings: RocketMQSettings) -> ClusterId | None:
    """Return the identity in the names of empty topics; None if `topics` has none."""
    begin = f"{settings.cluster_topic}-"
    suffixes = [name.removeprefix(begin) for name in topics if name.startswith(begin)]
    names = {ClusterId(match[1], decoded(match[2])) for text in suffixes if (match := _IDENTITY_SUFFIX.fullmatch(text))}
    if len(names) > 1:
        raise errors.StorageFailed(
            f"this cluster has several ids, in the names of topics that begin with {begin}: its brokers belonged to"
            " several clusters before. Choose another prefix, or delete the topics of the ids that nobody uses"
        )
    return names.pop() if names else None


def _identity_in_log(settings: RocketMQSettings, client: RemotingClient, home: str, deadline: Deadline) -> ClusterId:
    """Return the identity in the first record of the cluster topic. Write the record if there is none."""
    queue = Queue(settings.cluster_topic, home, 0)
    others = [name for name in all_topics(client, deadline) if name.startswith(settings.prefix)]
    ensure_single_queue(client, queue, deadline)
    log = RocketMQDecisionLog(client, queue)
    used = log.was_used(deadline)
    identity = _first_record(log, home, deadline)
    if identity is not None:
        return identity
    if used or any(name != queue.topic for name in others):
        raise errors.StorageFailed(
            f"the record with this cluster's id is gone from {queue.topic}, and so is the topic that repeats the id:"
            f" create that topic again ({queue.topic}-ID-BROKER, with the ID in any token), or choose another prefix"
        )
    with suppress(errors.OutcomeUnknown):
        log.append(json.dumps({"v": _VERSION, "cluster": uuid.uuid4().hex}).encode(), deadline)
    identity = _first_record(log, home, deadline)
    if identity is None:
        raise errors.BrokerUnavailable(f"the record with this cluster's id could not be written to {queue.topic}")
    return identity


def _first_record(log: RocketMQDecisionLog, home: str, deadline: Deadline) -> ClusterId | None:
    begin = log.begin(deadline)
    if begin is None:
        return None
    ((_, record),) = log.read(begin, begin, deadline)
    try:
        cluster_id = str(json.loads(record)["cluster"])
    except (ValueError, TypeError, KeyError):
        cluster_id = ""
    if not re.fullmatch("[0-9a-f]{32}", cluster_id):
        raise errors.StorageFailed(
            "the record with this cluster's id was not written by txnbridge: choose another prefix"
        )
    return ClusterId(cluster_id, home)


def _store_on(
    identity: ClusterId, settings: RocketMQSettings, client: RemotingClient, broker: str, deadline: Deadline
) -> None:
    topic = topic_name(f"{settings.cluster_topic}-{identity.id}-{encoded(identity.home)}")
    create_topic_on(client, broker, topic, 1, "NORMAL", deadline)
    while (route := route_of(client, topic, deadline)) is None or Queue(topic, broker, 0) not in route.readable:
        deadline.check(f"waiting until the name server knows topic {topic!r} on broker {broker}")


def _store_on_all(
    identity: ClusterId, settings: RocketMQSettings, client: RemotingClient, brokers: list[str], deadline: Deadline
) -> None:
    """Store the identity on all brokers that are up. On other brokers, a bridge that connects later stores it."""
    topic = f"{settings.cluster_topic}-{identity.id}-{encoded(identity.home)}"
    route = route_of(client, topic, deadline)
    for broker in brokers:
        if route is None or Queue(topic, broker, 0) not in route.readable:
            try:
                _store_on(identity, settings, client, broker, deadline)
            except errors.TxnBridgeError as error:
                _log.warning("the cluster's id is not stored on broker %s: %s", broker, error)
