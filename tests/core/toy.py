"""A backend that does what a test tells it, for the core's own logic. It proves no promise of any broker."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txnbridge import Bridge, plugins
from txnbridge._bridge import connect
from txnbridge.errors import NotFound
from txnbridge.spi import (
    NATIVE,
    NO_HEADERS,
    Admin,
    Backend,
    Begin,
    Broker,
    Capabilities,
    Capability,
    Context,
    Deadline,
    Decision,
    DecisionLog,
    Evidence,
    Identity,
    Ledger,
    Limits,
    Message,
    Option,
    Outcome,
    Partition,
    Position,
    Publisher,
    RawHeaders,
    Reader,
    ReaderListener,
    Status,
    Subscription,
    Support,
    Token,
    TokenState,
    Url,
    Writer,
    hookimpl,
)


class ToyWriter(Writer):
    """Records its calls; `raises[name]` is raised (once each) by the call of that name."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.sent: list[tuple[Any, ...]] = []
        self.acked: list[tuple[object, Mapping[Partition, Sequence[Position]]]] = []
        self.raises: dict[str, list[BaseException]] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.raises.get(name):
            raise self.raises[name].pop(0)

    def begin(self, begin: Begin) -> None:
        self._call("begin")
        self.messages = 0

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
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

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        self._call("ack")
        self.acked.append((context, positions))

    def prepare(self, deadline: Deadline) -> None:
        self._call("prepare")

    def evidence(self) -> Evidence:
        return Evidence({"toy": 1}, len(self.sent), expires_at=9)

    def commit(self, deadline: Deadline) -> None:
        self._call("commit")

    def abort(self, deadline: Deadline) -> None:
        self._call("abort")

    def reopen(self, deadline: Deadline) -> None:
        self._call("reopen")

    def close(self) -> None:
        self._call("close")


class SlowWriter(ToyWriter):
    """A writer whose commit lasts until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def commit(self, deadline: Deadline) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        super().commit(deadline)


class ToyReader(Reader):
    """Hands out what `feed` put in; `leave` takes partitions away at the next poll."""

    def __init__(self, subscription: Subscription, listener: ReaderListener) -> None:
        self.subscription = subscription
        self.listener = listener
        self.log: dict[Partition, list[Any]] = {}
        self.next: dict[Partition, int] = {}
        self.sources: dict[Partition, object] = {}
        self.leaving: list[tuple[str, list[Partition]]] = []
        self.coming: list[Partition] = [(topic, 0) for topic in subscription.topics]
        self.nacked: list[Any] = []
        self.generation = 0
        self.calls: list[Any] = []

    def feed(self, *values: Any, partition: Partition = ("t", 0)) -> None:
        self.log.setdefault(partition, []).extend(values)

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
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
        found: list[Message] = []
        for (topic, number), source in self.sources.items():
            values = self.log.get((topic, number), [])
            while self.next[topic, number] < len(values) and len(found) < max_messages:
                at = self.next[topic, number]
                found.append(Message(topic, number, (at,), None, values[at], NO_HEADERS, 0, 1, source))
                self.next[topic, number] = at + 1
        return found

    def positions(self) -> dict[Partition, Position]:
        return {p: (self.next[p],) for p in self.sources}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        self.calls.append(("seek", dict(positions)))
        for partition, position in positions.items():
            self.next[partition] = position[0]

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self.calls.append(("seek_to_time", timestamp))

    def pause(self, partitions: Sequence[Partition]) -> None:
        self.calls.append(("pause", list(partitions)))

    def resume(self, partitions: Sequence[Partition]) -> None:
        self.calls.append(("resume", list(partitions)))

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        self.nacked.append(positions)

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        return {p: len(self.log.get(p, [])) - self.next[p] for p in self.sources}

    def ack_context(self) -> object:
        return f"generation {self.generation}"

    def close(self, deadline: Deadline) -> None:
        self.calls.append("close")


class ToyBroker(Broker):
    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.limits = Limits(prepared_seconds=3600)
        self.cluster = "toy-cluster"
        self.writers: list[ToyWriter] = []
        self.readers: list[ToyReader] = []
        self.identities: list[Identity] = []
        self.answers: dict[str, list[Any]] = {"commit": [], "abort": [], "status": []}
        self.closed = False

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        self.identities.append(identity)
        opened = [ToyWriter() for _ in range(count)]
        self.writers += opened
        return list(opened)

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        self.writers.append(ToyWriter())
        return self.writers[-1]

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        raise NotImplementedError

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        if "missing" in subscription.topics:
            raise NotFound("there is no topic 'missing'")
        self.readers.append(ToyReader(subscription, listener))
        return self.readers[-1]

    def _answer(self, call: str, default: Any) -> Any:
        answer = self.answers[call].pop(0) if self.answers[call] else default
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._answer("commit", Outcome.COMMITTED)  # type: ignore[no-any-return]

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._answer("abort", Outcome.ABORTED)  # type: ignore[no-any-return]

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        return self._answer("status", Status(TokenState.UNKNOWN))  # type: ignore[no-any-return]

    @property
    def admin(self) -> Admin:
        raise NotImplementedError

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        raise NotImplementedError

    def close(self, deadline: Deadline) -> None:
        self.closed = True


class ToyBackend(Backend):
    name = "toy"
    schemes = ("toy",)
    limits = Limits()
    options: Mapping[str, Option] = {}

    def __init__(self, absent: Mapping[Capability, Support] | None = None) -> None:
        self.capabilities = Capabilities("toy", dict.fromkeys(Capability, NATIVE) | dict(absent or {}))
        self.brokers: list[ToyBroker] = []

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        self.brokers.append(ToyBroker(self.capabilities))
        return self.brokers[-1]

    @hookimpl
    def txnbridge_backends(self) -> list[Backend]:
        return [self]


def connect_toy(backend: ToyBackend | None = None, **options: Any) -> tuple[Bridge, ToyBroker]:
    backend = backend or ToyBackend()
    with plugins.registered(backend):
        bridge = connect("toy:", **options)
    return bridge, backend.brokers[-1]


__all__ = ["Decision", "SlowWriter", "ToyBackend", "ToyBroker", "ToyReader", "ToyWriter", "connect_toy"]
