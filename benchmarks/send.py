"""The time of `txn.send` and `txn.send_many` beyond that of the writer to which they give the message.

The writer belongs to a backend that does nothing at all, so that everything measured is the interface's own: processor
time, as nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import txnbridge
from benchmarks._files import bodies
from benchmarks._harness import PROCESSOR, Contender, Lap, Report, Settings, alternate, at_most, excess, per_unit, run
from txnbridge.spi import (
    NATIVE,
    Backend,
    Begin,
    Broker,
    Capabilities,
    Capability,
    Evidence,
    Limits,
    Partition,
    Position,
    RawHeaders,
    Url,
    Writer,
    hookimpl,
)

MESSAGES = 1000  # a transaction


class IdleWriter(Writer):
    """A writer that accepts every message and does nothing with it."""

    def begin(self, begin: Begin) -> None: ...

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None: ...

    def send_many(self, topic: str, items: Iterable[Any]) -> None: ...

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None: ...

    def flush(self, deadline: Any) -> None: ...

    def prepare(self, deadline: Any) -> None: ...

    def evidence(self) -> Evidence:
        return Evidence({}, 0)

    def commit(self, deadline: Any) -> None: ...

    def abort(self, deadline: Any) -> None: ...

    def reopen(self, deadline: Any) -> None: ...

    def close(self) -> None: ...


class IdleBroker(Broker):
    capabilities = Capabilities("an idle broker", dict.fromkeys(Capability, NATIVE))
    limits = Limits()
    cluster = "idle"

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def open_writers(self, identity: Any, count: int, ledger: Any, deadline: Any) -> list[Writer]:
        return [self._writer] * count

    def close(self, deadline: Any) -> None: ...

    def _unused(self, *arguments: Any, **settings: Any) -> Any:
        raise NotImplementedError("this benchmark only writes")

    prepare_writer = publisher = reader = commit = abort = status = decision_log = _unused
    admin = property(_unused)


class IdleBackend(Backend):
    name = "idle"
    schemes = ("idle",)
    capabilities = IdleBroker.capabilities
    limits = IdleBroker.limits
    options: Mapping[str, Any] = {}

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def open(self, url: Url, options: Mapping[str, Any], context: Any, deadline: Any) -> IdleBroker:
        return IdleBroker(self._writer)

    @hookimpl
    def txnbridge_backends(self) -> list[Backend]:
        return [self]


@contextmanager
def transaction(writer: Writer) -> Iterator[txnbridge.Transaction]:
    # The transaction lasts for the round, so that neither its begin nor its end is measured.
    with txnbridge.plugins.registered(IdleBackend(writer)), txnbridge.connect("idle:", timeout=3600) as bridge:
        with bridge.transaction() as txn:
            yield txn


def sending(values: Sequence[bytes]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with transaction(IdleWriter()) as txn:

            def lap() -> int:
                send = txn.send
                for value in values:
                    send("topic", value)
                return len(values)

            yield lap

    return contender


def writing(values: Sequence[bytes]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        writer = IdleWriter()

        def lap() -> int:
            send = writer.send
            for value in values:
                send("topic", value, None, None, None, None)
            return len(values)

        yield lap

    return contender


def sending_many(values: Sequence[Any]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with transaction(IdleWriter()) as txn:

            def lap() -> int:
                txn.send_many("topic", values)
                return len(values)

            yield lap

    return contender


def writing_many(values: Sequence[Any]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        writer = IdleWriter()

        def lap() -> int:
            writer.send_many("topic", values)
            return len(values)

        yield lap

    return contender


def measure(settings: Settings) -> None:
    report = Report(settings, "Sending, above the writer's own call")
    values = bodies(MESSAGES, 100)
    few = values[:10]
    found = alternate(
        settings,
        {
            "send": sending(values),
            "writer.send": writing(values),
            "send_many": sending_many(values),
            "writer.send_many": writing_many(values),
            "send_many of few": sending_many(few),
            "writer.send_many of few": writing_many(few),
        },
        PROCESSOR,
    )
    above = excess(found["send"], found["writer.send"], 1e6)
    report.figure("`txn.send` above `writer.send`, a message", above, "us", at_most(0.25))
    report.figure("yardstick: `writer.send` that does nothing", per_unit(found["writer.send"], 1e6), "us")
    above = excess(found["send_many"], found["writer.send_many"], 1e6)
    report.figure(f"`txn.send_many` of {MESSAGES:,} above the writer's, a message", above, "us", at_most(0.05))
    report.figure("yardstick: `writer.send_many` that does nothing", per_unit(found["writer.send_many"], 1e6), "us")
    above = excess(found["send_many of few"], found["writer.send_many of few"], 1e6)
    report.figure(f"`txn.send_many` of {len(few)} above the writer's, a message", above, "us")


if __name__ == "__main__":
    run(measure)
