"""`App`: opens the bridge of a service, and starts and stops the processors of its functions together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from txnbridge._app.event_loop import EventLoop
from txnbridge._app.handler import Handler
from txnbridge._app.outgoing import UnfitResult
from txnbridge._app.router import Lifespan, LifespanFunction, Router
from txnbridge._base.deadline import check_seconds
from txnbridge._base.service_stop import Shutdown, StopNow, leaving_seconds
from txnbridge._bridge import Bridge, connect
from txnbridge._process.polled_batch import PolledBatch
from txnbridge._process.processor import Processor, ProcessorStats, _TimeToPoll
from txnbridge.errors import InvalidOption, InvalidState, NotFound

_log = logging.getLogger("txnbridge")

# The default of `connect`. An app with more functions has a writer for each, because each may have a transaction open.
_LEAST_WRITERS = 4
_RESTART_SECONDS = 1.0  # the pause before a function of `background` is called again


class ServedProcessor(Processor):
    """The processor of an app's function. It sends to the bridge `to`; if `to` is None, to the bridge it reads from.

    `ended` is called when the processor's loop ends in its thread, which stops the app.
    """

    def __init__(
        self,
        bridge: Bridge,
        to: Bridge | None,
        name: str,
        handler: Handler,
        state: Any,
        loop: EventLoop | None,
        *,
        stop_timeout: float,
        ended: Callable[[], None],
    ) -> None:
        settings = handler.settings.copy()
        fatal = settings.pop("fatal", ())
        super().__init__(
            bridge._consumers,
            bridge._begins_passes(to, settings.get("db")),
            handler.inputs,
            group=handler.group,
            stop_timeout=stop_timeout,
            fatal=(UnfitResult, *((fatal,) if isinstance(fatal, type) else fatal)),
            **handler.calls(state, loop),
            **settings,
        )
        self.name = name
        self.paused = self._held = False
        self._event_loop = loop
        self._ended = ended

    @property
    def stopping(self) -> bool:
        return self._stop.asked

    def _pass(self, until_idle: bool) -> bool:
        assert self._inputs is not None
        if self.paused:
            self._held, self._since = True, time.monotonic()
            try:
                self._inputs.hold()
            except NotFound:
                if not self._follow_topics(failed=True):
                    raise
            self._measure_lag(self._inputs, now=False)
            self._stop.sleep(0.25)  # it resumes soon, and polls often enough to stay in its group
            return self._stop.asked
        if self._held:
            self._inputs.resume()
            self._held = False
        return super()._pass(until_idle)

    def _process(self, items: PolledBatch) -> None:
        if self.paused:
            raise _TimeToPoll  # it was paused during the poll: the messages are taken back
        super()._process(items)

    def _loop_in_thread(self) -> None:
        super()._loop_in_thread()
        self._ended()

    def _hurry(self, at: float) -> None:
        """Move the transaction's deadline to `at`, and cancel an asynchronous function in time for an abort by then."""
        super()._hurry(at)
        if self._event_loop is not None:
            self._event_loop.cancel_at(at - 2 * leaving_seconds(self._stop_timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop and wait for the end; on a second signal (`StopNow`) abort the transaction and do not wait."""
        try:
            if kind is not StopNow:
                return super().__exit__(kind, error, trace)
            self._give_up()
        except StopNow:
            self._give_up()
            raise


Makers = list[Callable[[], ServedProcessor]]


class App(Router):
    """A service: functions that process messages, with one bridge, one start and one stop.

        app = txnbridge.App("embedded:shop.db")

        @app.process("orders", group="shipping", to="shipments")
        def ship(order: Order) -> Shipment:
            return Shipment(order.id)

        app.run()

    `url` and `connect` are the arguments of `connect`. `others` has the URLs of further brokers by name, to which
    functions with `on=name` send, by the same `connect` with the name behind a `transactional_id`. After a stop the
    functions have `stop_timeout` seconds to finish; then their transactions are aborted. A call that lasts longer than
    `hang_after` seconds, by default ten times the transaction's timeout, makes the check `/healthz` of `txnbridge run`
    fail. `title` and `version` name the service in its description. `lifespan` is that of a `Router`.

    Run an app with `run()`, in a test with a `with` block and a broker of its own (`using`), or as processes with
    `txnbridge run`. If the processor of one function fails for good, all stop, and its error is raised.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        stop_timeout: float = 30.0,
        hang_after: float | None = None,
        lifespan: LifespanFunction | None = None,
        title: str = "app",
        version: str = "",
        others: Mapping[str, str] | None = None,
        **connect: Any,
    ) -> None:
        super().__init__(lifespan=lifespan)
        check_seconds("stop_timeout", stop_timeout, above_0=True)
        if hang_after is not None:
            check_seconds("hang_after", hang_after, above_0=True)
        self.hang_after = hang_after
        self.title = title
        self.version = version
        self.stop_timeout = stop_timeout
        self._connect_options = {"url": url, **connect}
        self._others = dict(others or {})
        if "broker" in self._others:
            raise InvalidOption("others= has no 'broker': this is the name of the app's own in its description")
        self._stop: Shutdown | None = None  # while the app is open
        self._bridge: Bridge | None = None
        self._processors: list[ServedProcessor] = []
        self._finished: list[ServedProcessor] = []  # ended processors of functions that work in turn
        self._running = False
        self._was_running = False  # whether the start of this run or the last one succeeded
        self._stopped_itself = False  # whether `stop` was called in this run or the last one
        self._block: ExitStack | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # those of `background`
        self._failure: BaseException | None = None  # the error of one of them, which ended this run or the last one

    @property
    def bridge(self) -> Bridge:
        """The app's bridge, which is opened before the lifespans and closed after them."""
        if self._bridge is None:
            raise InvalidState("the app has a bridge while it runs")
        return self._bridge

    @property
    def healthy(self) -> bool:
        """True while the app runs and the processor of every function is healthy."""
        stop = self._stop
        return self._running and stop is not None and not stop.asked and all(p.healthy for p in self._processors)

    @property
    def stats(self) -> dict[str, ProcessorStats]:
        """Counts of the work of each function in this run or the last one, by its name."""
        counts: dict[str, ProcessorStats] = {}
        for each in [*self._finished, *self._processors]:
            counts[each.name] = _sum(counts.get(each.name, ProcessorStats()), each.stats)
        return counts

    def describe(self) -> dict[str, Any]:
        """Return a description of the app as a document of AsyncAPI 3, which can be written as JSON."""
        from txnbridge._app.description import describe

        handlers = {name: handler for name, (handler, _) in self._named().items()}
        urls = {"broker": self._connect_options["url"], **self._others}
        return describe(self.title, self.version, urls, handlers)

    @contextmanager
    def using(self, url: str, others: Mapping[str, str] | None = None, **connect: Any) -> Iterator[App]:
        """Let the app run with another broker inside a block, for its tests.

            with app.using(f"embedded:{tmp_path}/test.db"):
                app.run(until_idle=True)

        `url`, `others` and `connect` replace those arguments of the app. Raise `InvalidState` while the app runs.
        """
        if self._stop is not None:
            raise InvalidState("this app runs already; enter `using` before its run")
        before = self._connect_options, self._others
        self._connect_options = {**self._connect_options, "url": url, **connect}
        self._others = {**self._others, **(others or {})}
        try:
            yield self
        finally:
            self._connect_options, self._others = before

    def _status(self) -> dict[str, Any]:
        """Return the status of the app for the health checks of `txnbridge run`."""
        functions = {
            each.name: {
                "healthy": each.healthy,
                "paused": each.paused,
                "lag": each.lag,
                "messages": each.stats.messages,
                "hangs": each._call_seconds > (10 * each._timeout if self.hang_after is None else self.hang_after),
            }
            for each in self._processors
        }
        return {"ready": self.healthy, "functions": functions}

    # --- running and stopping -------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False) -> None:
        """Process messages until stopped; with `until_idle=True` until all input is processed.

        Each function works in a thread of its own. With `until_idle` they work in turn on this thread, again and again
        until none finds a message, so that one function may process what another one returns.

        On the main thread SIGTERM and SIGINT stop the app: what is under way is finished, or aborted after
        `stop_timeout`. A second signal aborts at once and raises `SystemExit`.

        Raise what `Processor.run` raises if the processor of a function ends with an error.
        """
        if until_idle:
            self._run_until_idle()
            return
        with self._opened() as make:
            stop = self._stop
            assert stop is not None
            try:
                with stop.by_signals(), self._started(make):
                    while not stop.asked:
                        stop.sleep(3600)
            except StopNow:
                assert stop.signalled is not None
                raise SystemExit(128 + stop.signalled) from None

    def stop(self) -> None:
        """Ask all functions to stop after the messages they are at. Return at once; any thread or function may call."""
        self._stopped_itself = True
        self._stop_all()

    def background(
        self, function: Callable[..., Coroutine[Any, Any, object]], *args: Any, restart: bool = False
    ) -> None:
        """Run `function(*args)` on the event loop of the asynchronous lifespan that calls this, until that is closed.

        An error of the function ends the app, whose `run` raises it. With `restart` it is logged, and the function is
        called again after a second.
        """

        async def work() -> None:
            while True:
                try:
                    await function(*args)
                    return
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    if not restart or not isinstance(error, Exception):
                        self._failure = self._failure or error
                        self._stop_all()
                        return
                    name = getattr(function, "__name__", "a function")  # a `partial` has no name
                    _log.exception("%s of the app has failed, and is called again", name)
                    await asyncio.sleep(_RESTART_SECONDS)

        self._tasks.add(task := asyncio.get_running_loop().create_task(work()))  # the loop has weak references only
        task.add_done_callback(self._tasks.discard)

    def pause(self, name: str) -> None:
        """Stop calling a function after its present batch, until `resume`; it keeps its partitions. Thread-safe."""
        self._named_processor(name).paused = True

    def resume(self, name: str) -> None:
        """Let a paused function go on."""
        self._named_processor(name).paused = False

    def _named_processor(self, name: str) -> ServedProcessor:
        for processor in self._processors if self._running else ():
            if processor.name == name:
                return processor
        raise InvalidState(f"no function {name!r} runs; the app has {', '.join(self._named())}")

    def _stop_all(self) -> None:
        stop = self._stop  # another thread may be closing the app
        if stop is not None:
            stop.ask()
        for processor in self._processors:
            processor.stop()

    def __enter__(self) -> App:
        """Run the functions in threads until the end of the block, which raises the error of a failed one, if any."""
        with ExitStack() as stack:
            stack.enter_context(self._started(stack.enter_context(self._opened())))
            self._block = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._block is not None
        return self._block.__exit__(kind, error, trace)

    def _run_until_idle(self) -> None:
        with self._opened() as make:
            stop = self._stop
            assert stop is not None
            self._processors = [make_one() for make_one in make]
            runs = idle = 0
            # A function that has read everything runs again only if another function may have sent it messages since.
            while not stop.asked and (runs < len(make) or idle < len(make) - 1):
                place = runs % len(make)
                if runs >= len(make):
                    self._finished.append(self._processors[place])
                    self._processors[place] = make[place]()
                processor = self._processors[place]
                processor.run(until_idle=True)
                if processor.stopping:  # a signal stops only the processor that runs
                    return
                runs += 1
                idle = 0 if processor.stats.messages else idle + 1

    @contextmanager
    def _started(self, make: Makers) -> Iterator[None]:
        """Run the processors in a thread each during a block; at its end stop all of them, then wait for each."""
        with ExitStack() as stack:
            self._processors = [make_one() for make_one in make]
            for processor in self._processors:
                stack.enter_context(processor)
            stack.callback(self._stop_all)
            self._running = self._was_running = True
            yield

    @contextmanager
    def _opened(self) -> Iterator[Makers]:
        """Open the bridge and the lifespans for a block; yield for each handler a function that makes its processor."""
        if self._stop is not None:
            raise InvalidState("this app runs already")
        handlers = list(self._collect())
        self._check(handlers)
        with ExitStack() as stack:
            stack.callback(self._end)
            for router in self._routers():
                router._runs += 1
            self._finished = []
            self._was_running = self._stopped_itself = False
            self._failure = None
            self._stop = Shutdown(self.stop_timeout, "app", lambda _: None, lambda: None)
            options = {"writers": max(_LEAST_WRITERS, len(handlers)), **self._connect_options}
            bridge = self._bridge = stack.enter_context(connect(**options))
            # A mapping is the options of one backend, and not each one has group commits.
            options = {n: o for n, o in options.items() if not isinstance(o, Mapping) and n != "group_commit"}
            owner = options.get("transactional_id")
            options["application"] = options.get("application") or owner
            targets: dict[str | None, Bridge | None] = {None: None}
            for other, url in self._others.items():
                # One decision_log= may have the openings of both bridges, and one id would fence the first of them.
                mine = {"url": url, "transactional_id": owner and f"{owner}-{other}"}
                targets[other] = stack.enter_context(connect(**{**options, **mine}))
            states: dict[Lifespan | None, Any] = {None: None}
            for lifespan in self._lifespans():
                if not lifespan.is_async:
                    block = lifespan.open(self)
                    states[lifespan] = block.__enter__()
                    stack.callback(block.__exit__, None, None, None)
            named = self._named()
            for name, (handler, _) in named.items():
                if handler.on not in targets:
                    raise InvalidOption(f"{name} sends on={handler.on!r}, but the app has no such URL in others=")
                handler.require_output((targets[handler.on] or bridge)._connection, name)
            yield [
                partial(
                    ServedProcessor,
                    bridge,
                    targets[handler.on],
                    name,
                    handler,
                    *self._open_handler(handler, lifespan, states, stack),
                    stop_timeout=self.stop_timeout,
                    ended=self._stop_all,
                )
                for name, (handler, lifespan) in named.items()
            ]

    def _named(self) -> dict[str, tuple[Handler, Lifespan | None]]:
        """Return the app's functions by unique names: a second one with the same name gets a number, and so on."""
        named: dict[str, tuple[Handler, Lifespan | None]] = {}
        for handler, lifespan in self._collect():
            number = sum(other.name == handler.name for other, _ in named.values())
            named[f"{handler.name}-{number + 1}" if number else handler.name] = handler, lifespan
        return named

    def _check(self, handlers: list[tuple[Handler, Lifespan | None]]) -> None:
        if not handlers:
            raise InvalidOption("this app has no functions: decorate one with @app.process(…)")
        self._require_distinct()
        used = {lifespan for handler, lifespan in handlers if handler.is_async}
        if any(lifespan.is_async and lifespan not in used for lifespan in self._lifespans()):
            raise InvalidOption("an asynchronous lifespan is for `async def` functions, but none of its functions is")
        for handler, lifespan in handlers:
            if "state" not in handler.extras.values():
                continue
            if lifespan is None:
                raise InvalidOption(f"{handler.name} asks for state, but has no lifespan that would yield it")
            if lifespan.is_async and not handler.is_async:
                raise InvalidOption(
                    f"{handler.name} asks for the state of an asynchronous lifespan, which is on the event loop of an"
                    " `async def` function: make the function `async def`, or the lifespan plain"
                )

    def _open_handler(
        self, handler: Handler, lifespan: Lifespan | None, states: dict[Lifespan | None, Any], stack: ExitStack
    ) -> tuple[Any, EventLoop | None]:
        """Return a function's state and event loop, open until `stack` ends; `states` has plain lifespans' results."""
        if not handler.is_async:
            return states.get(lifespan), None
        is_open = lifespan is not None and lifespan.is_async
        loop = EventLoop(runs_always=is_open or handler.settings.get("concurrency", 1) != 1)
        stack.callback(loop.close)
        if lifespan is not None and is_open:
            return stack.enter_context(loop.opened(lifespan.open(self))), loop
        return states[lifespan], loop

    def _end(self) -> None:
        for router in self._routers():
            router._runs -= 1
        self._stop = self._bridge = None
        self._running = False
        if self._failure is not None:
            raise self._failure


def _sum(first: ProcessorStats, second: ProcessorStats) -> ProcessorStats:
    counts = {name: count + getattr(second, name) for name, count in first._asdict().items() if name != "last_error"}
    return second._replace(**counts, last_error=second.last_error or first.last_error)
