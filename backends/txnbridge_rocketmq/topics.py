"""Topics: looked at, created, changed, by requests to name servers and brokers."""

from __future__ import annotations

import time
from collections.abc import Iterable

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    NotSupported,
    TxnBridgeError,
)
from txnbridge.spi import Deadline
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Queue, administration, routes
from txnbridge_rocketmq.client.retry import again, ask
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.settings import Settings
from txnbridge_rocketmq.settings.names import topic_name

# Queues may be added while we write and read; asking takes a millisecond.
_FRESH_SECONDS = 1.0
# A broker that has just started is not known to the name server yet.
_SURE_SECONDS = 0.5
_LOOK_SECONDS = 0.01
# A broker that is away is looked for again so soon. One that lives answers in milliseconds.
_AWAY_PAUSE = 0.1
_ANSWER_SECONDS = 2.0
# What gRPC clients may send there: brokers tell topics apart for them, and take either kind from us.
_KIND, _OWN_KIND = "TRANSACTION", "NORMAL"


class Topics:
    """The topics of a cluster. Any thread may call.

    A partition is a queue, by its number. All of a topic's queues are on one broker: of those on several, numbers would
    not stay the same while a broker is away. What is made here is made on the broker `home`.
    """

    def __init__(self, settings: Settings, client: remoting.Client, home: str, brokers: Iterable[str] = ()) -> None:
        """`brokers` are those that the cluster is known to have, also those that are away."""
        self._settings = settings
        self._client = client
        self.home = home
        self._brokers = frozenset({home, *brokers})
        self._known: dict[str, tuple[float, remoting.Route]] = {}
        self._internal: set[str] = set()

    # --- looking ------------------------------------------------------------------------------------------------------

    def queues(self, topic: str, deadline: Deadline, at_least: int = 1, create: bool = True) -> tuple[Queue, ...]:
        """The queues of a topic that can be read, by partition; a missing topic is created where that is allowed.

        Known for a moment, but asked anew if there are less than `at_least`. Raises `NotFound`, `InvalidOption`, and
        `NotSupported` for a topic on several brokers.
        """
        return self._route(topic, deadline, at_least, create).readable

    def require(self, topic: str, partition: int | None, deadline: Deadline) -> tuple[Queue, ...]:
        """The queues that can be written, for a message to this partition, or to any.

        Raises what `queues` does, and `NotFound` also for a missing partition.
        """
        if partition is not None and partition < 0:
            raise NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        found = self._route(topic, deadline, (partition or 0) + 1).writable
        if partition is not None and partition >= len(found):
            raise NotFound(f"{topic} has {len(found)} partitions, so there is no partition {partition}")
        if not found:
            raise NotFound(f"no queue of topic {topic!r} may be written")
        return found

    def look(self, topic: str, deadline: Deadline) -> tuple[Queue, ...]:
        """The queues that can be read now, without creating anything; empty if there certainly is no such topic.

        Raises `DeadlineExceeded` while a broker is away that may have the topic.
        """
        found = self._find(topic, deadline)
        return () if found is None else _on_one_broker(found).readable

    def all(self, deadline: Deadline) -> list[str]:
        """The names of all topics that the name server knows."""
        return all_topics(self._client, deadline)

    def _look(self, topic: str, deadline: Deadline) -> remoting.Route | None:
        topic_name(topic)
        return route_of(self._client, topic, deadline)

    def _find(self, topic: str, deadline: Deadline) -> remoting.Route | None:
        """Return where a topic is, None if there certainly is no such topic; wait for brokers that are away.

        A name server forgets the topics of a broker moments after that has gone, as if they had been deleted.
        """
        while (found := self._look(topic, deadline)) is None:
            there = again(lambda: self._client.brokers(deadline.left()), "looking for brokers", deadline)
            if (found := self._look(topic, deadline)) is not None:
                break
            brokers = self._brokers | self._client.seen_brokers
            away = sorted(
                broker for broker in brokers if broker not in there or self._may_have(broker, topic, deadline)
            )
            if not away:
                break
            if deadline.left() <= _AWAY_PAUSE:
                raise DeadlineExceeded(
                    f"the name server knows no topic {topic!r} now, and broker {away[0]}, which may have it, is away;"
                    f" so it was for {deadline.seconds:g} s. (Where that broker is gone for good, delete the topic"
                    f" {self._settings.broker_topic(away[0])}, and open the bridge anew)"
                )
            time.sleep(_AWAY_PAUSE)
        return found

    def _may_have(self, broker: str, topic: str, deadline: Deadline) -> bool:
        """Whether a broker that the name server knows has a topic, or does not answer."""
        try:
            request = administration.topic_attributes(topic)
            return self._client.call(broker, request, min(_ANSWER_SECONDS, deadline.left())) is not None
        except remoting.RemotingError as error:
            # A user who may not ask goes by the name server alone, which hears of all topics together with the broker.
            return not isinstance(translate(error, ""), AccessDenied)

    def _route(self, topic: str, deadline: Deadline, at_least: int, create: bool = True) -> remoting.Route:
        at, known = self._known.get(topic, (0.0, None))
        if known is not None and len(known.readable) >= at_least and time.monotonic() - at < _FRESH_SECONDS:
            return known
        found = _on_one_broker(self._found_or_created(topic, deadline, at_least, create))
        self._known[topic] = time.monotonic(), found
        return found

    def _found_or_created(self, topic: str, deadline: Deadline, at_least: int, create: bool) -> remoting.Route:
        sure_at = time.monotonic() + _SURE_SECONDS
        while True:
            found = self._find(topic, deadline)
            if found is not None and len(found.readable) >= at_least:
                return found
            if found is None and create and self._settings.create_topics:
                self.create(topic, self._settings.create_topics, deadline)
            elif time.monotonic() >= sure_at or deadline.expired:
                break
            time.sleep(_LOOK_SECONDS)
        if found is None:
            raise NotFound(
                f"there is no topic {topic!r}; create it with: txnbridge topics create {topic} --partitions N"
                f" --url {self._settings.url}"
            )
        return found

    # --- changing -----------------------------------------------------------------------------------------------------

    def create(self, topic: str, partitions: int, deadline: Deadline) -> bool:
        """Create a topic; False if it was there already, with however many partitions. Raises `InvalidOption`."""
        if partitions < 1:
            raise InvalidOption(f"a topic has at least one partition, not {partitions}")
        if self.look(topic, deadline):
            return False
        created = create_on(self._client, self.home, topic, partitions, _KIND, deadline)
        self._wait_until(topic, 1, deadline)
        return created

    def grow(self, topic: str, partitions: int, deadline: Deadline) -> None:
        """Raises `NotFound`, and `InvalidOption` for fewer partitions than there are."""
        found = self.look(topic, deadline)
        if not found:
            raise NotFound(f"there is no topic {topic!r}")
        if partitions < len(found):
            raise InvalidOption(f"topic {topic!r} has {len(found)} partitions; they cannot become fewer")
        if partitions > len(found):
            _change(self._client, found[0].broker, topic, partitions, None, deadline)
            self._wait_until(topic, partitions, deadline)
        self._known.pop(topic, None)

    def delete(self, topic: str, deadline: Deadline) -> None:
        """Delete a topic wherever it is. Raises `NotFound`."""
        found = self._find(topic, deadline)
        if found is None:
            raise NotFound(f"there is no topic {topic!r}")
        what = f"deleting topic {topic!r}"
        for broker in sorted({queue.broker for queue in (*found.readable, *found.writable)}):
            ask(self._client, broker, administration.delete_topic(topic), what, deadline)
        for address in self._settings.name_servers:  # each keeps what brokers told it
            forget = administration.forget_topic(topic)
            try:
                self._client.call_address(address, forget, deadline.left())
            except remoting.Unreachable:
                continue  # when it is back, the brokers tell it anew
            except remoting.RemotingError as error:
                raise translate(error, what) from error
        self._known.pop(topic, None)
        while self._look(topic, deadline) is not None:
            deadline.check(f"waiting until topic {topic!r} is gone")
            time.sleep(_LOOK_SECONDS)

    def _wait_until(self, topic: str, partitions: int, deadline: Deadline) -> None:
        while (found := self._look(topic, deadline)) is None or len(found.readable) < partitions:
            deadline.check(f"waiting until the name server knows {partitions} partitions of topic {topic!r}")
            time.sleep(_LOOK_SECONDS)

    # --- our own ------------------------------------------------------------------------------------------------------

    def internal(self, topic: str, deadline: Deadline) -> Queue:
        """The one queue of a topic of our own, made at home if it is missing.

        Raises `InvalidOption` for a topic with more queues or at another place, and `AccessDenied` with what an
        administrator has to do.
        """
        queue = Queue(topic, self.home, 0)
        if topic not in self._internal:
            one_queue(self._client, queue, deadline)
            self._internal.add(topic)
        return queue


def all_topics(client: remoting.Client, deadline: Deadline) -> list[str]:
    """The names of all topics that the name server knows."""
    return again(lambda: client.ask_name_server(routes.topics(), deadline.left()), "listing topics", deadline)


def route_of(client: remoting.Client, topic: str, deadline: Deadline) -> remoting.Route | None:
    """Where a topic is now; None if the name server knows of no such topic."""
    what = f"looking at topic {topic!r}"
    return again(lambda: client.route(topic, deadline.left(), fresh=True), what, deadline)


def one_queue(client: remoting.Client, queue: Queue, deadline: Deadline) -> None:
    """Return when a topic is there, with this one queue and no other; it is made if it is missing.

    Raises `InvalidOption` for a topic that has others, `AccessDenied` with what an administrator has to do.
    """
    topic, broker = topic_name(queue.topic), queue.broker
    found = route_of(client, topic, deadline)
    if found is None:
        try:
            create_on(client, broker, topic, 1, _OWN_KIND, deadline)
        except AccessDenied as error:
            raise AccessDenied(_for_the_administrator(client, topic, broker, deadline)) from error.__cause__
        while (found := route_of(client, topic, deadline)) is None:
            deadline.check(f"waiting until the name server knows topic {topic!r}")
            time.sleep(_LOOK_SECONDS)
    if {*found.readable, *found.writable} != {queue} or not (found.readable and found.writable):
        places = ", ".join(
            f"{each.broker}[{each.queue}]" for each in sorted({*found.readable, *found.writable}, key=str)
        )
        raise InvalidOption(
            f"the topic {topic} must have one queue, on broker {broker}, to read and to write: a log has one order. It"
            f" has {places or 'none that may be used'}; let an administrator mend that, or choose another prefix"
        )


def create_on(client: remoting.Client, broker: str, topic: str, queues: int, kind: str, deadline: Deadline) -> bool:
    """Create a topic on a broker; False if that has it already: asking for it once more would change it."""
    request = administration.topic_attributes(topic_name(topic))
    what = f"creating topic {topic!r}"
    if ask(client, broker, request, what, deadline) is not None:
        return False
    _change(client, broker, topic, queues, kind, deadline)
    return True


def _change(
    client: remoting.Client, broker: str, topic: str, queues: int, kind: str | None, deadline: Deadline
) -> None:
    request = administration.create_topic(topic, queues, kind)
    what = f"setting topic {topic!r} to {queues} partitions"

    def words(error: remoting.RemotingError, what: str) -> TxnBridgeError:
        # It may have come about; doing it twice changes nothing.
        return BrokerUnavailable(f"{what}: {error}") if error.may_have_had_effect else translate(error, what)

    again(lambda: client.call(broker, request, deadline.left()), what, deadline, words)


def _on_one_broker(found: remoting.Route) -> remoting.Route:
    brokers = sorted({queue.broker for queue in (*found.readable, *found.writable)})
    if len(brokers) > 1:
        raise NotSupported(
            f"topic {found.topic!r} is on the brokers {', '.join(brokers)}; only topics on one broker are read and"
            " written here, because partitions would change their numbers while a broker is away"
        )
    return found


def _for_the_administrator(client: remoting.Client, topic: str, broker: str, deadline: Deadline) -> str:
    address = again(lambda: client.brokers(deadline.left()), "looking for brokers", deadline).get(broker, "ADDRESS")
    return (
        f"this user may not create the topic {topic}, which txnbridge needs. An administrator creates it:"
        f"\n  mqadmin updateTopic -b {address} -t {topic} -r 1 -w 1"
        f"\nand gives this user the right to publish and to subscribe there"
    )
