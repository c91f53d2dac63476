"""A backend that does what a test tells it, for the core's own logic. It proves no promise of any broker.

A call of a name in `acts`, which all objects of a backend share, calls that function first. It may wait, or raise.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from txnbridge import Bridge, plugins, spi
from txnbridge._bridge import connect
from txnbridge.errors import NotFound

Acts = dict[str, Callable[[], object]]


class ToyWriter(spi.Writer):
    """Records its calls; `raises[name]` is raised (once each) by the call of that name."""

    def __init__(self, acts: Acts | None = None) -> None:
        self.acts: Acts = {} if acts is None else acts
        self.calls: list[Any] = []
        self.sent: list[tuple[Any, ...]] = []
        self.acked: list[tuple[object, Mapping[spi.Partition, Sequence[spi.Position]]]] = []
        self.raises: dict[str, list[BaseException]] = {}

    def _call(self, name: str) -> None:
        self.acts.get(name, bool)()
        self.calls.append(name)
        if self.raises.get(name):
            raise self.raises[name].pop(0)

    def begin(self, begin: spi.Begin) -> None:
        self._call("begin")
        self.messages = 0

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: spi.RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None:
        self._call("send")
        self.sent.append((topic, value, key, headers, partition, timestamp))
        self.messages += 1

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        for item in items:
            self.sent.append((topic, item))
            self.messages += 1
        self._call("send_many")

    def ack(self, context: object, positions: Mapping[spi.Partition, Sequence[spi.Position]]) -> None:
        self._call("ack")
        self.acked.append((context, positions))

    def prepare(self, deadline: spi.Deadline) -> None:
        self._call("prepare")

    def evidence(self) -> spi.Evidence:
        return spi.Evidence({"toy": 1}, len(self.sent), expires_at=9)

    def commit(self, deadline: spi.Deadline) -> None:
        self._call("commit")

    def abort(self, deadline: spi.Deadline) -> None:
        self.abort_seconds = deadline.seconds
        self._call("abort")

    def reopen(self, deadline: spi.Deadline) -> None:
        self._call("reopen")

    def close(self) -> None:
        self._call("close")


class SlowWriter(ToyWriter):
    """A writer whose commit lasts until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def commit(self, deadline: spi.Deadline) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        super().commit(deadline)


class ToyReader(spi.Reader):
    """Hands out what `feed` put in; `leave` takes partitions away at the next poll."""

    def __init__(self, subscription: spi.Subscription, listener: spi.ReaderListener, acts: Acts | None = None) -> None:
        self.acts: Acts = {} if acts is None else acts
        self.subscription = subscription
        self.listener = listener
        self.log: dict[spi.Partition, list[Any]] = {}
        self.next: dict[spi.Partition, int] = {}
        self.sources: dict[spi.Partition, object] = {}
        self.leaving: list[tuple[str, list[spi.Partition]]] = []
        self.coming: list[spi.Partition] = [(topic, 0) for topic in subscription.topics]
        self.nacked: list[Any] = []
        self.generation = 0
        self.calls: list[Any] = []

    def feed(self, *values: Any, partition: spi.Partition = ("t", 0)) -> None:
        self.log.setdefault(partition, []).extend(values)

    def poll(self, max_messages: int, deadline: spi.Deadline) -> list[spi.Message]:
        self.acts.get("poll", bool)()
        for how, partitions in self.leaving:
            (self.listener.revoking if how == "revoke" else self.listener.lost)(partitions)
            for partition in partitions:
                self.sources.pop(partition)
        self.leaving = []
        for partition in self.coming:
            self.generation += 1
            self.sources[partition] = self.listener.assigned(partition)
            self.next.setdefault(partition, 0)
        self.coming = []
        found: list[spi.Message] = []
        for (topic, number), source in self.sources.items():
            values = self.log.get((topic, number), [])
            while self.next[topic, number] < len(values) and len(found) < max_messages:
                at = self.next[topic, number]
                found.append(spi.Message(topic, number, (at,), None, values[at], spi.NO_HEADERS, 0, 1, source))
                self.next[topic, number] = at + 1
        return found

    def positions(self) -> dict[spi.Partition, spi.Position]:
        return {p: (self.next[p],) for p in self.sources}

    def seek(self, positions: Mapping[spi.Partition, spi.Position]) -> None:
        self.acts.get("seek", bool)()
        self.calls.append(("seek", dict(positions)))
        for partition, position in positions.items():
            self.next[partition] = position[0]

    def seek_to_time(self, timestamp: int, deadline: spi.Deadline) -> None:
        self.calls.append(("seek_to_time", timestamp))

    def pause(self, partitions: Sequence[spi.Partition]) -> None:
        self.calls.append(("pause", list(partitions)))

    def resume(self, partitions: Sequence[spi.Partition]) -> None:
        self.calls.append(("resume", list(partitions)))

    def nack(self, positions: Mapping[spi.Partition, Sequence[spi.Position]]) -> None:
        self.nacked.append(positions)

    def lag(self, deadline: spi.Deadline) -> dict[spi.Partition, int]:
        self.acts.get("lag", bool)()
        return {p: len(self.log.get(p, [])) - self.next[p] for p in self.sources}

    def ack_context(self) -> object:
        return f"generation {self.generation}"

    def close(self, deadline: spi.Deadline) -> None:
        self.acts.get("close", bool)()
        self.calls.append("close")


class ToyBroker(spi.Broker):
    def __init__(self, capabilities: spi.Capabilities, acts: Acts | None = None, group_commit: bool = False) -> None:
        self.capabilities = capabilities
        self.acts: Acts = {} if acts is None else acts
        self.group_commit = group_commit
        self.limits = spi.Limits(prepared_seconds=3600)
        self.cluster = "toy-cluster"
        self.writers: list[ToyWriter] = []
        self.readers: list[ToyReader] = []
        self.identities: list[spi.Identity] = []
        self.answers: dict[str, list[Any]] = {"commit": [], "abort": [], "status": []}
        self.closed = False

    def open_writers(
        self, identity: spi.Identity, count: int, ledger: spi.Ledger, deadline: spi.Deadline
    ) -> list[spi.Writer]:
        self.acts.get("open_writers", bool)()
        self.identities.append(identity)
        opened = [ToyWriter(self.acts) for _ in range(count)]
        self.writers += opened
        return list(opened)

    def prepare_writer(self, identity: spi.Identity, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Writer:
        self.writers.append(ToyWriter(self.acts))
        return self.writers[-1]

    def publisher(self, name: str | None, deadline: spi.Deadline) -> spi.Publisher:
        raise NotImplementedError

    def reader(
        self, subscription: spi.Subscription, listener: spi.ReaderListener, deadline: spi.Deadline
    ) -> spi.Reader:
        if "missing" in subscription.topics:
            raise NotFound("there is no topic 'missing'")
        self.readers.append(ToyReader(subscription, listener, self.acts))
        return self.readers[-1]

    def _answer(self, call: str, default: Any) -> Any:
        answer = self.answers[call].pop(0) if self.answers[call] else default
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def commit(self, token: spi.Token, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Outcome:
        return self._answer("commit", spi.Outcome.COMMITTED)  # type: ignore[no-any-return]

    def abort(self, token: spi.Token, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Outcome:
        return self._answer("abort", spi.Outcome.ABORTED)  # type: ignore[no-any-return]

    def status(self, token: spi.Token, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Status:
        return self._answer("status", spi.Status(spi.TokenState.UNKNOWN))  # type: ignore[no-any-return]

    @property
    def admin(self) -> spi.Admin:
        raise NotImplementedError

    def decision_log(self, name: str, deadline: spi.Deadline) -> spi.DecisionLog:
        raise NotImplementedError

    def close(self, deadline: spi.Deadline) -> None:
        self.closed = True


class ToyBackend(spi.Backend):
    name = "toy"
    schemes = ("toy",)
    limits = spi.Limits()
    options: Mapping[str, spi.Option] = {}

    def __init__(self, absent: Mapping[spi.Capability, spi.Support] | None = None, group_commit: bool = False) -> None:
        self.acts: Acts = {}
        self.group_commit = group_commit
        self.capabilities = spi.Capabilities("toy", dict.fromkeys(spi.Capability, spi.NATIVE) | dict(absent or {}))
        self.brokers: list[ToyBroker] = []

    def open(
        self, url: spi.Url, options: Mapping[str, Any], context: spi.Context, deadline: spi.Deadline
    ) -> spi.Broker:
        self.acts.get("open", bool)()
        self.brokers.append(ToyBroker(self.capabilities, self.acts, self.group_commit))
        return self.brokers[-1]

    @spi.hookimpl
    def txnbridge_backends(self) -> list[spi.Backend]:
        return [self]


def connect_toy(backend: ToyBackend | None = None, **options: Any) -> tuple[Bridge, ToyBroker]:
    backend = backend or ToyBackend()
    with plugins.registered(backend):
        bridge = connect("toy:", **options)
    return bridge, backend.brokers[-1]


__all__ = ["SlowWriter", "ToyBackend", "ToyBroker", "ToyReader", "ToyWriter", "connect_toy"]
