"""A broker in the memory of one process, by the URL `toy:NAME`: what a backend has to do, and of no other use."""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txnbridge import spi
from txnbridge.errors import Conflict, Fenced, NotFound, TransactionTimedOut
from txnbridge.spi import Deadline, Message, Partition, Position

# What is not kept is declared, with the reason: the core refuses it, and the suite leaves out what needs it.
MISSING = """prepare resolve-anywhere status-lookup idempotent-send resume-sequence list-open end-open individual-ack
redelivery share-message share-key start-by-time decision-log half-messages topic-admin group-admin
survives-broker-kill"""
CAPABILITIES = spi.Capabilities(
    "The toy", {c: spi.absent("it is a toy") if c.value in MISSING.split() else spi.NATIVE for c in spi.Capability}
)
BROKERS: dict[str, ToyBroker] = {}
never: Any = None  # in the place of what is declared absent, which nobody calls


class ToyBroker(spi.Broker, spi.Admin):
    """All bridges to one name share it. The thread that holds `changed` may look and change; the others wait."""

    limits, capabilities = spi.Limits(), CAPABILITIES

    def __init__(self, name: str, create: int) -> None:
        self.cluster, self._create = f"toy-{name}", create
        self.changed = threading.Condition()
        self.logs: dict[Partition, list[tuple[Any, ...]]] = {}  # the messages of each partition
        self.owners: dict[str, int] = defaultdict(int)  # how often each transactional id was opened
        self.acknowledged: dict[tuple[str, Partition], int] = {}  # of a group: its next message
        self.members: dict[tuple[str, Partition], ToyReader] = {}  # of a group: who has a partition

    def open_writers(self, identity: spi.Identity, count: int, *rest: object) -> list[spi.Writer]:
        with self.changed:
            self.owners[identity.name] += 1  # from now on an older owner cannot commit
            return [ToyWriter(self, identity.name) for _ in range(count)]

    def reader(self, wanted: spi.Subscription, listener: spi.ReaderListener, deadline: Deadline) -> ToyReader:
        return ToyReader(self, wanted, listener)

    def partitions(self, topics: Sequence[str]) -> list[Partition]:
        """Those of some topics. A missing topic is made."""
        with self.changed:
            missing = {topic for topic in topics if (topic, 0) not in self.logs}
            self.logs.update({(topic, number): [] for topic in missing for number in range(self._create)})
            return [partition for partition in self.logs if partition[0] in topics]

    def topics(self, deadline: Deadline) -> list[spi.TopicInfo]:
        return [spi.TopicInfo(name, len(self.partitions([name]))) for name, number in list(self.logs) if number == 0]

    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        return {p: ((0,), (len(self.logs[p]),)) for p in self.partitions(topics)}

    def check(self, deadline: Deadline) -> list[spi.Advice]:
        return []

    def close(self, deadline: Deadline) -> None: ...

    admin = property(lambda self: self)
    create_topic = delete_topic = grow_topic = transactions = end = never
    prepare_writer = publisher = commit = abort = status = decision_log = never


class ToyWriter(spi.Writer):
    """Keeps a transaction to itself until it is committed, so that to abort is to forget."""

    def __init__(self, broker: ToyBroker, name: str) -> None:
        self._broker, self._name, self._epoch = broker, name, broker.owners[name]

    def begin(self, begin: spi.Begin) -> None:
        self._begin, self.messages = begin, 0
        self._sent: list[tuple[Any, ...]] = []
        self._acks: list[tuple[ToyReader, Partition, int, int]] = []

    def send(self, topic: str, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any) -> None:
        count = len(self._broker.partitions([topic]))
        if partition is None:
            partition = (self.messages if key is None else zlib.crc32(key)) % count
        if not 0 <= partition < count:
            raise NotFound(f"{topic} has {count} partitions, so there is no partition {partition}")
        self._sent.append((topic, partition, key, value, spi.Headers(headers or ()), timestamp))
        self.messages += 1

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        for item in items:
            self.send(topic, *spi.encode_item(item), None, None)

    def ack(self, context: Any, positions: Mapping[Partition, Sequence[Position]]) -> None:
        self._acks += [(context, partition, at[0][0], at[-1][0] + 1) for partition, at in positions.items()]

    def commit(self, deadline: Deadline) -> None:
        with self._broker.changed:  # all of it is checked before any of it happens
            if self._begin.deadline.expired:
                raise TransactionTimedOut("its deadline passed before its commit")
            if self._broker.owners[self._name] != self._epoch:
                raise Fenced(f"{self._name} was opened again by somebody else")
            for reader, partition, first, _ in self._acks:
                group = reader.group, partition
                if self._broker.members.get(group) is not reader or self._broker.acknowledged[group] != first:
                    raise Conflict(f"{partition[0]}[{partition[1]}] is with another member by now")
            now = time.time_ns() // 1_000_000
            for topic, number, *message, at in self._sent:
                self._broker.logs[topic, number].append((*message, now if at is None else at))
            for reader, partition, _, end in self._acks:
                self._broker.acknowledged[reader.group, partition] = end
            self._broker.changed.notify_all()

    def evidence(self) -> spi.Evidence:
        return spi.Evidence({}, self.messages)

    def abort(self, deadline: Deadline | None = None) -> None: ...

    reopen = close = abort
    prepare = never


class ToyReader(spi.Reader):
    """Of each partition one member of a group is the reader: the first that asks, until it leaves."""

    def __init__(self, broker: ToyBroker, wanted: spi.Subscription, listener: spi.ReaderListener) -> None:
        self._broker, self._wanted, self._listener, self.group = broker, wanted, listener, wanted.group or ""
        self._next: dict[Partition, int] = {}
        self._sources: dict[Partition, object] = {}
        self._paused: set[Partition] = set()
        with broker.changed:
            self._follow(latest=wanted.start == "latest")

    def _follow(self, latest: bool = False) -> None:
        for partition in [p for p in self._broker.partitions(self._wanted.topics) if p not in self._next]:
            begin = len(self._broker.logs[partition]) if latest else 0
            if self.group:
                begin = self._broker.acknowledged.setdefault((self.group, partition), begin)
                if self._broker.members.setdefault((self.group, partition), self) is not self:
                    continue
            self._next[partition] = begin
            self._sources[partition] = self._listener.assigned(partition)

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        with self._broker.changed:
            while not (found := self._take(max_messages)) and not deadline.expired:
                self._broker.changed.wait(deadline.left())
                self._follow()
            return found

    def _take(self, most: int) -> list[Message]:
        found: list[Message] = []
        for partition in self._next.keys() - self._paused:
            taken = self._broker.logs[partition][(begin := self._next[partition]) :][: most - len(found)]
            for at, (key, value, headers, timestamp) in enumerate(taken, begin):
                found.append(Message(*partition, (at,), key, value, headers, timestamp, 1, self._sources[partition]))
            self._next[partition] += len(taken)
        return found

    def positions(self) -> dict[Partition, Position]:
        return {partition: (at,) for partition, at in self._next.items()}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        for partition, (at,) in positions.items():  # what is acknowledged does not come again
            self._next[partition] = max(at, self._broker.acknowledged.get((self.group, partition), 0))

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._paused.difference_update(partitions)

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        reached = {p: self._broker.acknowledged.get((self.group, p), at) for p, at in self._next.items()}
        return {partition: len(self._broker.logs[partition]) - at for partition, at in reached.items()}

    def ack_context(self) -> object:
        return self

    def close(self, deadline: Deadline) -> None:
        with self._broker.changed:
            self._broker.members = {name: m for name, m in self._broker.members.items() if m is not self}
            self._broker.changed.notify_all()

    nack = seek_to_time = never


class ToyBackend(spi.Backend):
    name, schemes = "toy", ("toy",)
    options: Mapping[str, spi.Option] = {}
    limits, capabilities = spi.Limits(), CAPABILITIES

    def open(self, url: spi.Url, options: Mapping[str, Any], context: spi.Context, deadline: Deadline) -> ToyBroker:
        return BROKERS.setdefault(url.path, ToyBroker(url.path, context.create_topics or 1))


@spi.hookimpl
def txnbridge_backends() -> list[spi.Backend]:
    return [ToyBackend()]
