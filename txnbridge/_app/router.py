"""`Router`: gathers functions by the decorator `process`, so that each module of a service has its own.

A `Lifespan` opens what the handlers of a process share, yields once, and closes it again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from inspect import isasyncgenfunction, isgeneratorfunction, unwrap
from typing import TYPE_CHECKING, Any, TypeVar

from txnbridge._app.handler import Handler
from txnbridge._base.topic import Topic
from txnbridge.errors import InvalidOption

if TYPE_CHECKING:
    from typing import Unpack

    from txnbridge._process.processor import HandlerSettings

# Functions of an `App`, whose module imports this one.
Opening = Callable[[Any], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
LifespanFunction = Opening | Callable[[Any], Iterator[Any]] | Callable[[Any], AsyncIterator[Any]]


class Lifespan:
    """A lifespan of an app or a router: a function with one `yield`, plain or asynchronous.

    A plain one is open once in each process, an asynchronous one once on the event loop of each `async def` handler.
    """

    def __init__(self, function: Any) -> None:
        generator = unwrap(function)  # what `contextmanager` has decorated
        self.is_async = isasyncgenfunction(generator)
        if not self.is_async and not isgeneratorfunction(generator):
            raise InvalidOption("a lifespan is a function that is given the app and has one yield")
        self.open: Callable[[Any], Any] = function
        if generator is function:
            self.open = asynccontextmanager(function) if self.is_async else contextmanager(function)


F = TypeVar("F", bound=Callable[..., Any])


class Router:
    """Functions that process messages, of one module of a service; an `App` or another router includes it.

    `lifespan` is a function with one `yield`, called with the app: what it opens before the `yield` is open while the
    functions of this router run, and they get what it yields if they ask for `state`. A plain lifespan is opened once
    in each process, an asynchronous one once on the event loop of each `async def` function.
    """

    def __init__(self, *, lifespan: LifespanFunction | None = None) -> None:
        self._lifespan = None if lifespan is None else Lifespan(lifespan)
        self._handlers: list[Handler] = []
        self._included: list[Router] = []
        self._runs = 0  # the running apps that have taken its functions

    def process(
        self,
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str = "",
        to: str | Topic | None = None,
        on: str | None = None,
        batch: bool = False,
        middleware: Callable[[Any], AbstractContextManager[object]] | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> Callable[[F], F]:
        """Decorate a function, plain or `async def`, that processes each message of a topic in a transaction.

            @app.process(orders, group="shipping", to=shipments)
            def ship(order: Order) -> Shipment:
                return Shipment(order.id)

        The type of its first parameter decodes the message's value if the topic has no codec: bytes, str, dict, list, a
        dataclass, a pydantic model, or `Message` or `Message[T]` for the whole message. Further parameters are passed
        by name or type: `txn` (the `Transaction`), `message`, `state` (what the lifespan yielded), and with `db=` the
        database's connection, `db`.

        What it returns is sent to `to` in the message's transaction, with the message's key: one value, several as a
        list or an iterator, or an `Outgoing` to another topic; None is nothing. With `on` it sends to the one of the
        app's `others` with this name, and each transaction is on both brokers. `settings` are those of a `Processor`.

        With `batch=True` the function is called with the messages of a poll, as `list[Order]` or
        `list[Message[Order]]`, all in one transaction; its results have no key. `middleware` is called with the message
        or the batch, and returns a context manager inside which the function is called; its errors are the function's.

        The function itself stays as it is. It may run more than once for one message, and only what it returns, or
        sends with `txn`, takes effect once.

        Raise `InvalidOption` for a function whose parameters or results do not fit, and if another function has the
        same topic and group, or the same group where one of them has `retry`.
        """

        def decorate(function: F) -> F:
            self._add(self._handlers, Handler(function, inputs, group, to, settings, batch, middleware, on))
            return function

        return decorate

    def include(self, router: Router) -> None:
        """Add the functions of another router, also those that it gets later."""
        if any(each is self for each in router._routers()):
            raise InvalidOption("a router cannot include itself")
        self._add(self._included, router)

    def _add(self, to: list[Any], added: Handler | Router) -> None:
        to.append(added)
        try:
            self._require_distinct()
        except InvalidOption:
            to.remove(added)
            raise

    def _routers(self) -> Iterator[Router]:
        yield self
        for router in self._included:
            yield from router._routers()

    def _collect(self, outer: Lifespan | None = None) -> Iterator[tuple[Handler, Lifespan | None]]:
        """Yield the functions of this router and of routers it includes, each with its nearest router's lifespan."""
        lifespan = self._lifespan or outer
        for handler in self._handlers:
            yield handler, lifespan
        for router in self._included:
            yield from router._collect(lifespan)

    def _lifespans(self) -> list[Lifespan]:
        """Return the lifespans of this router and of the routers it includes, each once, the outer ones first."""
        return list(dict.fromkeys(router._lifespan for router in self._routers() if router._lifespan is not None))

    def _require_distinct(self) -> None:
        if self._runs:
            raise InvalidOption("the app runs: functions and routers are added before its start")
        seen: dict[tuple[str, str], str] = {}
        for handler, _ in self._collect():
            for topic in handler.inputs:
                place = topic.name, handler.group
                if place in seen:
                    raise InvalidOption(
                        f"{seen[place]} and {handler.name} both read {topic.name!r} in group {handler.group!r}, so that"
                        " each would get a part of the messages: give each a group of its own"
                    )
                seen[place] = handler.name
        self._require_own_groups()

    def _require_own_groups(self) -> None:
        """Raise `InvalidOption` if a function with retries shares its group: the group's retry topics are shared."""
        by_group: dict[str, Handler] = {}
        for handler, _ in self._collect():
            other = by_group.setdefault(handler.group, handler)
            if other is not handler and (handler.settings.get("retry") or other.settings.get("retry")):
                raise InvalidOption(
                    f"{other.name} and {handler.name} are both in group {handler.group!r}, so with retry= each would"
                    " get the other's messages from the group's retry topics: give each a group of its own"
                )
