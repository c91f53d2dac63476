"""Lifespans: functions that open what the handlers of a process share, yield once, and close it again."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from txnbridge.errors import InvalidOption

# Functions of an `App`, whose module imports this one.
Opening = Callable[[Any], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
LifespanFunction = Opening | Callable[[Any], Iterator[Any]] | Callable[[Any], AsyncIterator[Any]]


class Lifespan:
    """A lifespan of an app or a router: a function with one `yield`, plain or asynchronous.

    A plain one is open once in each process, an asynchronous one once on the event loop of each `async def` handler.
    """

    def __init__(self, function: Any) -> None:
        generator = inspect.unwrap(function)  # what `contextmanager` has decorated
        self.is_async = inspect.isasyncgenfunction(generator)
        if not self.is_async and not inspect.isgeneratorfunction(generator):
            raise InvalidOption("a lifespan is a function that is given the app and has one yield")
        self.open: Callable[[Any], Any] = function
        if generator is function:
            self.open = asynccontextmanager(function) if self.is_async else contextmanager(function)
