"""What tells a cluster from all others, and where topics of our own are: RocketMQ's names are the same everywhere."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from txnbridge.errors import (
    BrokerUnavailable,
    InvalidOption,
    NotSupported,
    OutcomeUnknown,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge.spi import Deadline
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Queue
from txnbridge_rocketmq.decision_log import RocketMQLog
from txnbridge_rocketmq.settings import Settings
from txnbridge_rocketmq.settings.broker_config import Brokers
from txnbridge_rocketmq.settings.names import decoded, encoded, topic_name
from txnbridge_rocketmq.topics import all_topics, create_on, one_queue, route_of

_log = logging.getLogger("txnbridge")

_VERSION = 1
# A broker that starts takes seconds.
_PAUSE = 0.1
_NAME = re.compile(r"([0-9a-f]{32})-(.+)")


@dataclass(frozen=True)
class Named:
    """A cluster's id, stable and nobody else's, and the broker that holds the topics of our own."""

    id: str
    home: str


def name_of(settings: Settings, client: remoting.Client, deadline: Deadline) -> Named:
    """The cluster's name, made if it has none.

    The first record of a topic says it, so that all who come at once agree. Brokers keep records for days only; so the
    name is repeated in the name of an empty topic on every broker, which they keep. As long as one of the brokers is
    there, it is known on which one our topics are: if that is away, nobody takes it for a cluster without any.

    Raises `StorageFailed` where the name is lost, or where there are two, `InvalidOption` for what is no name server.
    """
    try:
        brokers = _brokers(settings, client, deadline)
    except NotSupported as error:
        # On the port of a proxy messages would get lost: it says yes to the end of a half, and does nothing.
        raise InvalidOption(
            f"what answers at {', '.join(settings.name_servers)} is a broker or a proxy; a URL names the name servers,"
            " which tell where the brokers are, and those must be reached themselves"
        ) from error.__cause__
    found = _repeated(settings, client, deadline)
    if found is None:
        found = _agreed(settings, client, brokers[0], deadline)
        _repeat(found, settings, client, found.home, deadline)
        if _repeated(settings, client, deadline) != found:
            raise BrokerUnavailable("this cluster was named a moment ago, and not everybody knows it yet")
    _repeat_everywhere(found, settings, client, brokers, deadline)
    return found


def noted_brokers(settings: Settings, client: remoting.Client, home: str, deadline: Deadline) -> frozenset[str]:
    """The names of all brokers that the cluster has or had, also of those that are away.

    A name server forgets a broker that is away, with its topics. So the others note each that they meet, as an empty
    topic on the broker `home`.
    """
    topics = all_topics(client, deadline)
    noted = {name for topic in topics if (name := settings.noted_broker(topic)) is not None}
    there = set(Brokers(client).names(deadline)) - {home}
    for broker in sorted(there - noted):
        try:
            create_on(client, home, settings.broker_topic(broker), 1, "NORMAL", deadline)
        except TxnBridgeError as error:
            _log.warning("broker %s is not noted: while it is away its topics look as if deleted: %s", broker, error)
    return frozenset({home} | noted | there)


def _brokers(settings: Settings, client: remoting.Client, deadline: Deadline) -> list[str]:
    """Their names, once there are any: one that restarts is known to no name server until it is back."""
    while not (names := Brokers(client).names(deadline)):
        if deadline.left() <= _PAUSE:
            servers = ", ".join(settings.name_servers)
            raise BrokerUnavailable(f"no broker was known to the name server {servers} for {deadline.seconds:g} s")
        time.sleep(_PAUSE)
    return names


def _repeated(settings: Settings, client: remoting.Client, deadline: Deadline) -> Named | None:
    begin = f"{settings.cluster_topic}-"
    told = [name.removeprefix(begin) for name in all_topics(client, deadline) if name.startswith(begin)]
    names = {Named(found[1], decoded(found[2])) for text in told if (found := _NAME.fullmatch(text))}
    if len(names) > 1:
        raise StorageFailed(
            f"this cluster has several names, each in the name of a topic that begins with {begin}: brokers were used"
            " apart before they came together. Choose another prefix, or delete the topics of those that nobody uses"
        )
    return names.pop() if names else None


def _agreed(settings: Settings, client: remoting.Client, home: str, deadline: Deadline) -> Named:
    """The name in the first record, written if there is none."""
    queue = Queue(settings.cluster_topic, home, 0)
    others = [name for name in all_topics(client, deadline) if name.startswith(settings.prefix)]
    one_queue(client, queue, deadline)
    log = RocketMQLog(client, queue)
    used = log.was_used(deadline)
    named = _first(log, home, deadline)
    if named is not None:
        return named
    if used or any(name != queue.topic for name in others):
        raise StorageFailed(
            f"the record that names this cluster is gone from {queue.topic}, and so is the topic that repeats it:"
            f" create that again ({queue.topic}-ID-BROKER, with the ID in any token), or choose another prefix"
        )
    with suppress(OutcomeUnknown):
        log.append(json.dumps({"v": _VERSION, "cluster": uuid.uuid4().hex}).encode(), deadline)
    named = _first(log, home, deadline)
    if named is None:
        raise BrokerUnavailable(f"the record that names this cluster could not be written to {queue.topic}")
    return named


def _first(log: RocketMQLog, home: str, deadline: Deadline) -> Named | None:
    begin = log.begin(deadline)
    if begin is None:
        return None
    ((_, record),) = log.read(begin, begin, deadline)
    try:
        found = str(json.loads(record)["cluster"])
    except (ValueError, TypeError, KeyError):
        found = ""
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise StorageFailed("the record that names this cluster is not one of ours: choose another prefix")
    return Named(found, home)


def _repeat(named: Named, settings: Settings, client: remoting.Client, broker: str, deadline: Deadline) -> None:
    topic = topic_name(f"{settings.cluster_topic}-{named.id}-{encoded(named.home)}")
    create_on(client, broker, topic, 1, "NORMAL", deadline)
    while (found := route_of(client, topic, deadline)) is None or broker not in found.masters:
        deadline.check(f"waiting until the name server knows topic {topic!r} on broker {broker}")


def _repeat_everywhere(
    named: Named, settings: Settings, client: remoting.Client, brokers: list[str], deadline: Deadline
) -> None:
    """As far as that can be done now: whoever comes next does the rest."""
    topic = f"{settings.cluster_topic}-{named.id}-{encoded(named.home)}"
    found = route_of(client, topic, deadline)
    for broker in brokers:
        if found is None or broker not in found.masters:
            try:
                _repeat(named, settings, client, broker, deadline)
            except TxnBridgeError as error:
                _log.warning("broker %s does not repeat the cluster's name: %s", broker, error)
