"""`connect` and `Bridge`: one open connection to one broker, its `Admin` and `Publisher`, for an event loop's tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio.lowlevel

import txnbridge
from txnbridge._base.deadline import check_seconds
from txnbridge._base.topic import Topic
from txnbridge.aio._calls import (
    Call,
    ClosedByBlock,
    OneCall,
    Opening,
    Threads,
    close_opened,
    delegated,
    delegated_property,
)
from txnbridge.aio._consumer import Consumer
from txnbridge.aio._half_messages import Execute, HalfMessages
from txnbridge.aio._processor import Each, LoopProcessor, OnBatch, Processor
from txnbridge.aio._services import Check, Relay, Resolver
from txnbridge.aio._transaction import Transaction, abort_quietly
from txnbridge.errors import DeadlineExceeded, InvalidOption, NotSupported

if TYPE_CHECKING:
    from typing import Unpack

    from sqlalchemy import Engine

    from txnbridge._process.processor import ProcessorSettings
    from txnbridge.sql import Outbox
    from txnbridge.sql.relay import RelaySettings

R = TypeVar("R")


def connect(
    url: str | None = None,
    *,
    transactional_id: str | None = None,
    application: str | None = None,
    timeout: float = 30,
    hold: float | None = None,
    writers: int = 4,
    create_topics: int | None = None,
    decision_log: str | Engine | None = None,
    group_commit: bool | None = None,
    threads: int = 64,
    **backend: Mapping[str, Any],
) -> Opening[Bridge]:
    """Open a bridge to the broker at `url`, as `txnbridge.connect` does.

        async with aio.connect("embedded:orders.db") as bridge:
            async with bridge.transaction() as txn:
                await txn.send("orders", b"...")

    `bridge = await aio.connect(…)` opens one that the program closes itself. `threads` is the number of calls that may
    wait, each in a worker thread, for a writer or for a commit that they share; further tasks wait on the event loop.
    """
    if type(threads) is not int or threads < 1:
        raise InvalidOption(f"threads= is how many calls may run in worker threads at once, from 1, not {threads!r}")
    opening = partial(
        txnbridge.connect,
        url,
        transactional_id=transactional_id,
        application=application,
        timeout=timeout,
        hold=hold,
        writers=writers,
        create_topics=create_topics,
        decision_log=decision_log,
        group_commit=group_commit,
        **backend,
    )
    return Opening(_open(opening, threads))


async def _open(opening: Callable[[], txnbridge.Bridge], threads: int) -> Bridge:
    return Bridge(await Call(opening, undo=close_opened).run(), threads)


class Bridge(ClosedByBlock):
    """One open connection to one broker; any number of tasks may use it, on any event loop. Made by `connect`.

    After a cancellation `commit`, `abort` and `status` go on in their threads, and are safe to repeat.
    """

    def __init__(self, sync: txnbridge.Bridge, threads: int) -> None:
        self._sync = sync
        self._timeout = sync._connection.timeout
        # Calls that may wait for a writer are limited apart from others, which the tasks with the writers may need.
        self._size = threads
        self._waiting = Threads(threads)
        self._asking = Threads(threads)

    @property
    def sync(self) -> txnbridge.Bridge:
        """The synchronous bridge below this one, for other threads: its calls would block an event loop."""
        return self._sync

    url: Final[str] = delegated_property(txnbridge.Bridge.url)
    backend: Final[str] = delegated_property(txnbridge.Bridge.backend)
    cluster: Final[str] = delegated_property(txnbridge.Bridge.cluster)
    transactional_id: Final[str | None] = delegated_property(txnbridge.Bridge.transactional_id)
    capabilities: Final[txnbridge.Capabilities] = delegated_property(txnbridge.Bridge.capabilities)
    limits: Final[txnbridge.Limits] = delegated_property(txnbridge.Bridge.limits)

    @property
    def admin(self) -> Admin:
        """The broker's administration: topics, groups, open transactions, and the checks of `txnbridge doctor`."""
        return Admin(self._sync.admin, self._asking, self._timeout)

    def __repr__(self) -> str:
        return repr(self._sync)

    def transaction(
        self,
        *,
        timeout: float | None = None,
        prepare: bool = False,
        hold: float | None = None,
        fingerprint: bool = False,
        group_commit: bool = True,
    ) -> Opening[Transaction]:
        """Begin a transaction, for an `async with` block. Wait for a free writer, until the transaction's deadline.

        With `prepare=True` the end of the block does not commit the transaction, but makes it durable, still invisible
        to readers: any process can commit or abort it by `txn.token` within `hold` seconds. `fingerprint=True` puts a
        checksum of the messages, independent of their order, into the token (this needs the package xxhash).
        `group_commit=False` keeps the transaction from sharing one of the broker with other tasks (group commit).

        Raise `DeadlineExceeded` if no writer became free, `Fenced` if the transactional id has a newer owner,
        `NotSupported` if the broker cannot do it, `BrokerUnavailable` if the broker does not answer.
        """
        return Opening(self._begin(timeout, prepare, hold, fingerprint, group_commit))

    async def _begin(
        self, timeout: float | None, prepare: bool, hold: float | None, fingerprint: bool, group_commit: bool
    ) -> Transaction:
        if group_commit and not (prepare or fingerprint) and hold is None:
            gathered = self._sync._begin_from_loop(timeout)
            if gathered is not None:
                return await self._begun(gathered)
        seconds = self._timeout if timeout is None else timeout
        check_seconds("timeout", seconds, above_0=True)
        began_at = time.monotonic()
        async with self._waiting.one(seconds) as taken:
            waited = time.monotonic() - began_at
            if not taken:
                text = f"other tasks waited for the writers of this bridge, or used them, for {seconds:g} s; end"
                raise DeadlineExceeded(text + " transactions sooner or connect(…, writers=…) with more")
            if waited > 0.001:  # the time limit of a transaction begins with this call
                timeout = max(seconds - waited, 0.001)
            begin = partial(self._sync._begin, timeout, prepare, hold, fingerprint, group_commit)
            sync = await Call(begin, undo=abort_quietly).run()
        self._sync._adopt(sync)
        return Transaction(sync, self._waiting)

    async def _begun(self, gathered: txnbridge.Transaction) -> Transaction:
        """Return the `aio` transaction for one that has sent no request; abort this if the task is cancelled."""
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            gathered.abort()  # sends no request
            raise
        self._sync._adopt(gathered)
        return Transaction(gathered, self._waiting)

    commit: Final = delegated(txnbridge.Bridge.commit)
    abort: Final = delegated(txnbridge.Bridge.abort)
    status: Final = delegated(txnbridge.Bridge.status)

    ensure_topics: Final = delegated(txnbridge.Bridge.ensure_topics)
    read: Final = delegated(txnbridge.Bridge.read)

    def consumer(
        self,
        topics: str | Topic | Iterable[str | Topic],
        group: str | None = None,
        *,
        start: str | int | datetime = "earliest",
        sharing: str = "partition",
    ) -> Opening[Consumer]:
        """Open a consumer of committed messages. Group members share the partitions; without a group all are read.

        `start` is where a group begins that has never read: "earliest", "latest" or a time in milliseconds since 1970.
        `sharing` is "partition" (each partition is read in order by one member), or, if the broker supports it,
        "message" or "key" (members share each partition message by message, or key by key).
        """
        return Opening(self._open_consumer(partial(self._sync.consumer, topics, group, start=start, sharing=sharing)))

    async def _open_consumer(self, opening: Callable[[], txnbridge.Consumer]) -> Consumer:
        return Consumer(await self._run("consumer", opening, close_opened))

    def publisher(self, name: str | None = None) -> Opening[Publisher]:
        """Open a publisher, which sends messages in order and idempotently, without a transaction.

        With a `name` it can resume after a crash, by the sequences of its messages.
        """
        return Opening(self._open_publisher(name))

    async def _open_publisher(self, name: str | None) -> Publisher:
        sync = await self._run("publisher", partial(self._sync.publisher, name), close_opened)
        return Publisher(sync, self._asking, self._timeout)

    def processor(
        self,
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str,
        each: Each | None = None,
        batch: OnBatch | None = None,
        **settings: Unpack[ProcessorSettings],
    ) -> Processor:
        """Return a `Processor`, which consumes, transforms and produces exactly once; see there for the settings.

        async def ship(message, txn):
            await txn.send("shipments", message.value)

        async with bridge.processor("orders", group="shipping", each=ship):
            ...
        """
        self._sync._connection.check_open()
        if settings.keys() & {"db", "outbox", "to"}:
            raise NotSupported("a processor with db= or to= has a plain handler: use txnbridge.connect")
        begin = partial(self._sync.transaction, group_commit=False)
        make = partial(LoopProcessor, self._sync._consumers, begin, inputs, group=group, **settings)
        return Processor(make, self._waiting, each, batch)

    def half_messages(self, group: str, *, execute: Execute, check: Check) -> HalfMessages:
        """Return a sender of half messages: published if local work, such as a database's commit, succeeds.

            async with bridge.half_messages("shop", execute=book, check=was_booked) as sales:
                async with sales.transaction(order) as txn:    # stored at its end; then `await book(txn, order)`
                    await txn.send("orders", ...)

        `execute(txn, arg)` and `check(transaction_id, messages)` are coroutine functions that return a `Decision`; all
        else is as for `txnbridge.Bridge.half_messages`. Raise `NotSupported` if the broker has no half messages.
        """
        self._sync._connection.check_open()
        return HalfMessages(partial(self._sync.half_messages, group), execute, check, self._size)

    def resolver(
        self, group: str, *, check: Check, parallel: int = 4, check_timeout: float = 30.0, stop_timeout: float = 30.0
    ) -> Resolver:
        """Return a `Resolver`, which decides half messages whose sender did not report the outcome of its work."""
        self._sync._connection.check_open()
        settings = {"parallel": parallel, "check_timeout": check_timeout, "stop_timeout": stop_timeout}
        return Resolver(lambda check: self._sync.resolver(group, check=check, **settings), check)  # type: ignore[arg-type]

    def relay(self, outbox: Outbox, database: str | Engine, **settings: Unpack[RelaySettings]) -> Relay:
        """Return a `Relay`, which publishes the rows of an outbox exactly once; see there for the settings.

            async with bridge.relay(outbox, "postgresql+psycopg://localhost/shop"):
                ...  # programs send with `outbox.send(async_session, ...)` and commit

        The relay works in a thread, so `database` is an `Engine` of SQLAlchemy, or a URL, with a synchronous driver.
        """
        if hasattr(database, "sync_engine"):
            raise InvalidOption(
                "a relay works in a thread: it takes no AsyncEngine, but an Engine or a URL with a synchronous driver"
            )
        return Relay(self._sync.relay(outbox, database, **settings))

    async def _run(self, _: str, function: Callable[[], R], undo: Callable[[R | None], object] = lambda _: None) -> R:
        """Call `function`, which needs no writer, in a thread; `undo` undoes it for a task that was cancelled."""
        return await self._asking.run(Call(function, undo=undo), self._timeout)

    async def close(self) -> None:
        """Refuse new calls, wait for running ones, abort unfinished transactions, leave all groups, and disconnect.

        Calls that go on in their threads, because their tasks were cancelled, are waited for like others. Prepared
        transactions stay prepared. Closing takes at most the bridge's timeout; a cancelled call ends in its thread.
        Safe to repeat.
        """
        await Call(self._sync.close, must_run=True).run()


class Admin:
    """A broker's administration, as users call it (`bridge.admin`). Each call ends within the bridge's timeout."""

    def __init__(self, sync: txnbridge.Admin, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._threads = threads
        self._timeout = timeout

    async def _run(self, _: str, function: Callable[[], R]) -> R:
        return await self._threads.run(Call(function), self._timeout)

    create_topic: Final = delegated(txnbridge.Admin.create_topic)
    topics: Final = delegated(txnbridge.Admin.topics)
    topic: Final = delegated(txnbridge.Admin.topic)
    delete_topic: Final = delegated(txnbridge.Admin.delete_topic)
    grow_topic: Final = delegated(txnbridge.Admin.grow_topic)
    bounds: Final = delegated(txnbridge.Admin.bounds)
    topic_ids: Final = delegated(txnbridge.Admin.topic_ids)
    unreadable: Final = delegated(txnbridge.Admin.unreadable)
    groups: Final = delegated(txnbridge.Admin.groups)
    group: Final = delegated(txnbridge.Admin.group)
    describe_groups: Final = delegated(txnbridge.Admin.describe_groups)
    reset_group: Final = delegated(txnbridge.Admin.reset_group)
    transactions: Final = delegated(txnbridge.Admin.transactions)
    transaction: Final = delegated(txnbridge.Admin.transaction)
    commit: Final = delegated(txnbridge.Admin.commit)
    abort: Final = delegated(txnbridge.Admin.abort)
    parked: Final = delegated(txnbridge.Admin.parked)
    resume: Final = delegated(txnbridge.Admin.resume)
    end_parked: Final = delegated(txnbridge.Admin.end_parked)
    repair: Final = delegated(txnbridge.Admin.repair)
    doctor: Final = delegated(txnbridge.Admin.doctor)


class Publisher(ClosedByBlock):
    """Sends messages in order and idempotently; readers see each as soon as it is stored. `flush` raises failures.

    Several tasks may use a publisher: its calls run in the order in which they were made. A `send` whose task was
    cancelled may have sent its message.
    """

    def __init__(self, sync: txnbridge.Publisher, threads: Threads, timeout: float) -> None:
        self._sync = sync
        self._calls = OneCall("a publisher")
        self._limit = threads, timeout

    send: Final = delegated(txnbridge.Publisher.send)
    flush: Final = delegated(txnbridge.Publisher.flush)
    last_sequence: Final = delegated(txnbridge.Publisher.last_sequence)

    async def close(self) -> None:
        """Flush, and close the publisher; a cancelled call goes on in its thread."""
        await self._calls.run(Call(self._sync.close, must_run=True, patience=self._limit[1]))

    async def _run(self, _: str, function: Callable[[], R]) -> R:
        return await self._calls.run(Call(function, patience=self._limit[1]), *self._limit)
