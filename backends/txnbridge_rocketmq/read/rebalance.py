"""Assigns the partitions of a group to its members.

Brokers list the members, and every member computes the same assignment from that list. A member that gets a partition
waits for the broker's lock on the queue. The previous reader releases the lock after its transaction has ended.
Assignment and locks only save members wasted work: the decision log alone decides whose acknowledgement counts.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, InvalidOption
from txnbridge.spi import Deadline, Partition
from txnbridge_rocketmq.client import administration, groups
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.groups import Membership, Queue
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.retry import retry, retry_call
from txnbridge_rocketmq.settings import RocketMQSettings
from txnbridge_rocketmq.settings.names import encoded, group_name

T = TypeVar("T")

# The heartbeat interval of members. Brokers drop a member after two minutes of silence.
HEARTBEAT_SECONDS = 5.0
# How often a member refreshes its assignment and locks. Brokers tell changes at once, and keep a lock a minute.
REFRESH_SECONDS = 1.0
# Timeout of one broker's part of a refresh, if there are several: one that is away keeps no partition of the others.
_BROKER_SECONDS = 3.0
# The wait between two attempts to get a lock.
_LOCK_RETRY_SECONDS = 0.1
# Interval and timeout of probes of another member. For a member that is asleep, the broker answers after ten seconds.
_PROBE_INTERVAL_SECONDS = 3.0
_PROBE_TIMEOUT_SECONDS = 15.0
_UNLOCK_SECONDS = 1.0

# The client id of a member, with hashes of its application and its topics.
_MEMBER = re.compile(r".*@txnbridge-[0-9a-f]+\.([0-9a-f]{8})((?:\.[0-9a-f]{8})+)")


@dataclass(frozen=True)
class QueueAssignment:
    """The partitions of a member.

    `mine` are all partitions that are assigned to the member, `free` those that it may read now. `taken` are partitions
    that the member had locked, and that another member has locked since.
    """

    mine: frozenset[Partition] = frozenset()
    free: frozenset[Partition] = frozenset()
    taken: frozenset[Partition] = frozenset()

    def __or__(self, other: QueueAssignment) -> QueueAssignment:
        return QueueAssignment(self.mine | other.mine, self.free | other.free, self.taken | other.taken)


@dataclass
class _BrokerShare:
    """One broker's part in the last refresh: the members that are awake, and the queues that this member has locked."""

    living: set[str] = field(default_factory=set)
    locked: set[Queue] = field(default_factory=set)


class Rebalancer:
    """Finds and locks one member's share of its group's queues. One thread at a time; any thread calls `on_change`."""

    def __init__(
        self,
        settings: RocketMQSettings,
        group: str,
        topics: Sequence[str],
        on_change: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """Join the group. Raise `InvalidOption`, `BrokerUnavailable`, `AccessDenied`."""
        self._user_group = group
        self._group = group_name(encoded(group))
        self._topics = topics
        self._application = _short_hash(settings.application)
        self._lock_timeout = settings.timing.lock_timeout
        self._changed = threading.Event()
        self._changed.set()
        self._on_change = on_change
        self.client = open_client(settings, self._client_id(), self._on_members)
        self._shares: dict[str, _BrokerShare] = {}
        self._waits: dict[Partition, float] = {}
        self._refresh_at = 0.0
        self._sleep_detector = _SleepDetector(self.client, self._group)
        try:
            self._join(deadline)
        except BaseException:
            self.client.close()
            raise

    def _client_id(self) -> str:
        topics = ".".join(_short_hash(topic) for topic in sorted(self._topics))
        return f"{socket.gethostname()}@{os.getpid()}@txnbridge-{uuid.uuid4().hex[:12]}.{self._application}.{topics}"

    def _on_members(self, group: str) -> None:
        self._changed.set()
        self._on_change()

    def _join(self, deadline: Deadline) -> None:
        membership = Membership(consumers={self._group: frozenset(self._topics)})
        retry(lambda: self.client.join(membership, deadline.left()), f"joining group {self._user_group!r}", deadline)

    def due_in(self) -> float:
        """Return the seconds until `refresh` is to be called; 0 after a change of members."""
        return 0.0 if self._changed.is_set() else max(0.0, self._refresh_at - time.monotonic())

    # --- refreshing ---------------------------------------------------------------------------------------------------

    def refresh(
        self, queues: Mapping[str, Sequence[Queue]], holding: Collection[Partition], deadline: Deadline
    ) -> QueueAssignment:
        """Return this member's assignment, and renew its locks. `holding` are the partitions that it reads now.

        Of these, the assignment has those of a broker that does not respond as `mine`, and not as `free` or `taken`.
        Raise `InvalidOption` if a member of another application reads these topics in the same group.
        """
        self._changed.clear()
        assignment, failures = QueueAssignment(), list[BrokerUnavailable]()
        brokers = sorted({each.broker for here in queues.values() for each in here})
        for broker in brokers:
            here = {topic: each for topic, each in queues.items() if each and each[0].broker == broker}
            share = deadline if len(brokers) == 1 else Deadline(min(deadline.left(), _BROKER_SECONDS))
            try:
                assignment |= self._refresh_broker(broker, here, holding, share)
            except BrokerUnavailable as error:
                failures.append(error)
                assignment |= QueueAssignment(frozenset(each for each in holding if each[0] in here))
        if failures and len(failures) == len(brokers):
            raise failures[-1]
        waiting = assignment.mine - assignment.free
        self._waits = {partition: since for partition, since in self._waits.items() if partition in waiting}
        self._refresh_at = time.monotonic() + (_LOCK_RETRY_SECONDS if waiting else REFRESH_SECONDS)
        return assignment

    def _refresh_broker(
        self, broker: str, queues: Mapping[str, Sequence[Queue]], holding: Collection[Partition], deadline: Deadline
    ) -> QueueAssignment:
        me, share = self.client.client_id, self._shares.setdefault(broker, _BrokerShare())
        ids = self._members(broker, deadline)
        asleep = self._sleep_detector.asleep(broker, ids)
        for gone in share.living - (set(ids) - asleep):  # otherwise a dead member's locks remain for a minute
            all_queues = [queue for topic_queues in queues.values() for queue in topic_queues]
            self._call(broker, groups.unlock(self._group, gone, all_queues), deadline)
        share.living = set(ids) - asleep
        wanted, alone = list[Queue](), set[str]()
        for topic, topic_queues in queues.items():
            readers = [each for each in ids if _reads_topic(each, topic)]
            wanted += assign(topic_queues, readers, asleep).get(me, ())
            if share.living.intersection(readers) == {me}:
                alone.add(topic)  # locks on this topic can only be those of dead members
        locked = self._call(broker, groups.lock(self._group, me, wanted), deadline) if wanted else set()
        before, share.locked = share.locked, locked
        free = {queue for queue in wanted if queue in share.locked or queue.topic in alone or self._has_waited(queue)}
        refused = {queue for queue in wanted if queue not in free and _partition(queue) in holding}
        return QueueAssignment(
            frozenset(map(_partition, wanted)),
            frozenset(map(_partition, free | (refused - before))),
            frozenset(map(_partition, refused & before)),
        )

    def _members(self, broker: str, deadline: Deadline) -> list[str]:
        """Return the client ids of all members. If this member is not among them, join again, or create the group."""
        ids = self._call(broker, groups.members(self._group), deadline)
        if self.client.client_id not in ids:  # the broker has restarted
            self._join(deadline)
            ids = self._call(broker, groups.members(self._group), deadline)
        if self.client.client_id not in ids:  # the broker creates no groups by itself
            with suppress(RemotingError):
                self.client.call(broker, administration.create_group(self._group), deadline.left())
            self._join(deadline)
            ids = self._call(broker, groups.members(self._group), deadline)
        if self.client.client_id not in ids:
            raise BrokerUnavailable(
                f"broker {broker} accepts no members of group {self._user_group!r}. Let an administrator create it:"
                f"\n  mqadmin updateSubGroup -n NAME_SERVER -b BROKER_ADDRESS -g {self._group}"
            )
        members = sorted(each for each in ids if _MEMBER.fullmatch(each))
        self._check_application(members)
        return members

    def _check_application(self, ids: Sequence[str]) -> None:
        for each in ids:
            match = _MEMBER.fullmatch(each)
            if match and match[1] != self._application and any(_reads_topic(each, topic) for topic in self._topics):
                raise InvalidOption(
                    f"host {each.split('@')[0]} reads in group {self._user_group!r} for another application, but all"
                    " members share one decision log: connect them with the same application=…"
                )

    def _has_waited(self, queue: Queue) -> bool:
        return time.monotonic() - self._waits.setdefault(_partition(queue), time.monotonic()) >= self._lock_timeout

    def _call(self, broker: str, request: RpcRequest[T], deadline: Deadline) -> T:
        return retry_call(self.client, broker, request, f"looking at group {self._user_group!r}", deadline)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def release(self, queues: Sequence[Queue]) -> None:
        """Unlock queues, so that other members may read them at once. Do not wait for the responses."""
        for broker in {queue.broker for queue in queues}:
            here = [queue for queue in queues if queue.broker == broker]
            with suppress(RemotingError):
                self.client.submit(broker, groups.unlock(self._group, self.client.client_id, here), _UNLOCK_SECONDS)

    def close(self, deadline: Deadline) -> None:
        """Unlock all queues and leave the group."""
        for broker, share in self._shares.items():
            if share.locked:
                request = groups.unlock(self._group, self.client.client_id, share.locked)
                with suppress(RemotingError):
                    self.client.call(broker, request, min(_UNLOCK_SECONDS, deadline.left()))
        self.client.close(deadline.left())


class _SleepDetector:
    """Finds members that are asleep: still connected, but their process or their machine is suspended.

    The queues of a sleeping member are assigned to the member before it, in the order of client ids. So each member
    probes only the members that follow it, up to the first that is awake, and a broker relays few probes.
    """

    def __init__(self, client: RemotingClient, group: str) -> None:
        self._client = client
        self._group = group
        self._asleep: set[str] = set()
        self._calls: dict[str, Call[bool]] = {}
        self._ask_at: dict[str, float] = {}

    def asleep(self, broker: str, ids: Sequence[str]) -> set[str]:
        """Return those of the members `ids` that are connected and did not answer their last probe.

        Process the results of probes, and send the probes that are due.
        """
        for each, call in list(self._calls.items()):
            if call.done():
                del self._calls[each]
                self._record(each, call)
        self._asleep &= set(ids)
        self._ask_at = {each: at for each, at in self._ask_at.items() if each in ids}
        for each in self._to_probe(ids):
            if each not in self._calls and time.monotonic() >= self._ask_at.get(each, 0.0):
                self._ask_at[each] = time.monotonic() + _PROBE_INTERVAL_SECONDS
                with suppress(RemotingError):
                    request = groups.is_asleep(self._group, each)
                    self._calls[each] = self._client.submit(broker, request, _PROBE_TIMEOUT_SECONDS)
        return set(self._asleep)

    def _record(self, member: str, call: Call[bool]) -> None:
        try:
            is_asleep = call.result()
        except RemotingError:
            return  # unknown, as for a user who may not probe: then the broker drops a dead member after two minutes
        (self._asleep.add if is_asleep else self._asleep.discard)(member)

    def _to_probe(self, ids: Sequence[str]) -> list[str]:
        me = self._client.client_id
        if me not in ids:
            return []
        at = list(ids).index(me)
        members: list[str] = []
        for each in [*ids[at + 1 :], *ids[:at]]:
            members.append(each)
            if each not in self._asleep:
                break
        return members


def assign(queues: Sequence[Queue], readers: Sequence[str], asleep: Collection[str] = ()) -> dict[str, list[Queue]]:
    """Return the queues of one topic by member. Queues of an `asleep` member go to the awake member before it."""
    assigned: dict[str, list[Queue]] = {}
    awake = [index for index, each in enumerate(readers) if each not in asleep]
    if not awake:
        return assigned
    # Each topic begins with another member. Otherwise the first member would read all topics that have one queue.
    first = int(_short_hash(queues[0].topic), 16) if queues else 0
    for number, queue in enumerate(queues):
        index = (first + number) % len(readers)
        living = max((each for each in awake if each <= index), default=awake[-1])
        assigned.setdefault(readers[living], []).append(queue)
    return assigned


def open_client(
    settings: RocketMQSettings, name: str | None = None, on_members: Callable[[str], None] | None = None
) -> RemotingClient:
    """Return a client with connections of its own, so that pulls waiting for messages do not delay other requests."""
    return RemotingClient(
        settings.name_servers,
        client_id=name,
        credentials=settings.credentials(),
        tls=settings.tls_context(),
        on_members=on_members,
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )


def _partition(queue: Queue) -> Partition:
    return queue.topic, queue.queue


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _reads_topic(member: str, topic: str) -> bool:
    match = _MEMBER.fullmatch(member)
    return match is not None and _short_hash(topic) in match[2].split(".")
