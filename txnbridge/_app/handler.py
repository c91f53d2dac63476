"""`Handler`: a function of an app with its input, group and output, as the decorator `process` gets it."""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from txnbridge._app.event_loop import EventLoop
from txnbridge._app.outgoing import Outgoing, ResultPublisher, Send, UnfitResult
from txnbridge._app.value_types import alternatives, for_input, for_output, require_codec, without_none
from txnbridge._base.connection import Connection
from txnbridge._base.messages import Batch, Message
from txnbridge._base.topic import Topic, as_topic
from txnbridge._base.url import nearest
from txnbridge._process.processor import Processor
from txnbridge._read.consumer import topic_list
from txnbridge._write.transaction import Transaction
from txnbridge.errors import InvalidOption, Poison

# The names of parameters by which a function asks for more than the value of its message.
_NAMES = ("txn", "message", "db", "state")
_SEVERAL = (list, Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)
# Annotations that do not tell a type. The codec of such a value is chosen when the value exists.
_UNKNOWN = (Any, object, inspect.Parameter.empty)
# Arguments of `Processor` that the app passes itself.
_OF_THE_APP = {"self", "consumers", "begin", "inputs", "group", "each", "batch", "stop_timeout"}


class Handler:
    """A function with the topics it reads, its group, and the topic to which its results go."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: str | Topic | Iterable[str | Topic],
        group: str,
        to: str | Topic | None,
        settings: Mapping[str, Any],
        batch: bool = False,
        middleware: Callable[[Any], AbstractContextManager[object]] | None = None,
        on: str | None = None,
    ) -> None:
        if not isinstance(function, FunctionType | MethodType):
            raise InvalidOption(f"process() decorates a function, not {type(function).__name__}")
        self.function = function
        self.name = function.__name__
        self.group = group
        self.settings = dict(settings)
        self.batch = batch
        self._around = middleware
        self.on = on  # the name of the broker to which it sends, if that is not the one of its input
        self.is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        self._yields_async = inspect.isasyncgenfunction(function)
        self._check_settings()
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise InvalidOption(f"{self.name} has no parameter for the value of its message")
        self._read_first(parameters[0])
        self.extras = {p.name: role for p in parameters[1:] if (role := self._role(p))}
        kind = None if self.value_type in _UNKNOWN else self.value_type
        codec = kind and partial(require_codec, kind, f"{self.name} takes")
        self.inputs = [for_input(topic, codec) for topic in topic_list(inputs)]
        self.to = None if to is None else for_output(as_topic(to))
        self.output_types = self._read_output_types(None if to is None else as_topic(to))
        patterns = [topic.name for topic in self.inputs if "*" in topic.name]
        if on is None and self.to is not None and any(fnmatchcase(self.to.name, pattern) for pattern in patterns):
            raise InvalidOption(f"{self.name} would read its own results: {self.to.name!r} fits its inputs' pattern")
        self._publisher = ResultPublisher(self.name, self.to, self.inputs)

    def _check_settings(self) -> None:
        if not self.group or not isinstance(self.group, str):
            raise InvalidOption(f"@app.process needs group=, the name of the group in which {self.name} reads")
        known = inspect.signature(Processor.__init__).parameters.keys() - _OF_THE_APP
        for setting in self.settings.keys() - known:
            near = nearest(setting, known)
            raise InvalidOption(f"process() has no {setting}=" + (f"; did you mean {near}=?" if near else ""))

    def _read_first(self, parameter: inspect.Parameter) -> None:
        """Note, from the first parameter, the type of the value, and whether it may be a `Message` or None."""
        kind = self._type(parameter.annotation, needed=True)
        if self.batch:
            if get_origin(kind) is not list or not get_args(kind):  # `typing.List` has an origin alone
                text = f"with batch=True the first parameter of {self.name} is a list, such as list[Order]"
                raise InvalidOption(text)
            (kind,) = get_args(kind)
        self.takes_message = _is_message(kind) or (kind in _UNKNOWN and parameter.name == "message")
        if self.takes_message:
            kind = next(iter(get_args(kind)), Any)
        elif (role := self._role_of_type(kind)) or (role := parameter.name) in _NAMES:
            raise InvalidOption(f"the first parameter of {self.name} is for the message's value, not for {role}")
        self.value_type, takes_none = without_none(kind)
        self._takes_none = takes_none or kind in _UNKNOWN

    def _role(self, parameter: inspect.Parameter) -> str | None:
        """Return which argument in `_NAMES` (such as "txn") a parameter gets; None if it keeps its default."""
        role = self._role_of_type(self._type(parameter.annotation))
        if role is None and parameter.name in _NAMES:
            role = parameter.name
        variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if role is None or variable or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            if (variable and role is None) or parameter.default is not inspect.Parameter.empty:
                return None
            raise InvalidOption(
                f"{self.name} has an unknown parameter {str(parameter)!r}: besides the message's value it may ask for"
                f" {', '.join(_NAMES)}"
            )
        if role == "message" and self.batch:
            raise InvalidOption(f"{self.name} asks for message, but with batch=True it gets many: list[Message[Order]]")
        if role == "db" and self.settings.get("db") is None:
            raise InvalidOption(f"{self.name} asks for db: give process() a db=, an Engine of SQLAlchemy")
        if role == "txn" and self.settings.get("db") is not None:
            raise InvalidOption(f"{self.name} asks for txn, but with db= its transaction is the database's: ask for db")
        return role

    def _role_of_type(self, kind: Any) -> str | None:
        if kind is Transaction:
            return "txn"
        if _is_message(kind):
            return "message"
        module = getattr(kind, "__module__", "")
        if getattr(kind, "__name__", "") == "Connection" and module.startswith("sqlalchemy."):
            return "db"
        return None

    def _read_output_types(self, to: Topic | None) -> list[Any]:
        """Return the types of the values that the function returns for its topic `to`, as far as it is annotated."""
        told = self._type(inspect.signature(self.function).return_annotation)
        kind, _ = without_none(told)
        if get_origin(kind) in _SEVERAL or kind in _SEVERAL:
            kind, _ = without_none(next(iter(get_args(kind)), Any))
        if kind is NoneType and to is not None:
            raise InvalidOption(f"{self.name} has a topic to={to.name!r}, but returns None")
        if to is not None and self.settings.get("db") is not None and self.settings.get("outbox") is None:
            raise InvalidOption(f"with db= what {self.name} returns is sent through an outbox: give process() outbox=")
        types = [part for part in alternatives(kind) if part not in (NoneType, Outgoing, *_UNKNOWN)]
        if types and to is None:
            raise InvalidOption(f"{self.name} returns a value, but has no topic for it: give process() a to=")
        if to is not None and for_output(to) is not to:
            for part in types:
                require_codec(part, f"{self.name} returns")
        return types

    def _type(self, annotation: Any, needed: bool = False) -> Any:
        """Return the type of an annotation, which may be text. Raise `InvalidOption` if it is needed and not found."""
        if annotation is inspect.Parameter.empty or annotation is None:
            return NoneType if annotation is None else annotation
        try:
            holder: Any = SimpleNamespace(__annotations__={"it": annotation})
            module = inspect.unwrap(self.function).__globals__  # also of a method
            return get_type_hints(holder, globalns=module)["it"]
        except Exception as error:
            if needed:
                raise InvalidOption(
                    f"{self.name}: the type {annotation!r} is not found; define or import it at the top of the module"
                ) from error
            return Any

    def require_output(self, connection: Connection, name: str) -> None:
        """Raise `NotFound` if the topic `to` is missing and may not be created; `name` is the function's in its app."""
        if self.to is not None and self.settings.get("db") is None:  # with a database a relay sends the results
            connection.require_topic(self.to.name, f"{name} sends to")

    def calls(self, state: Any, loop: EventLoop | None) -> dict[str, Any]:
        """Return the function as the argument `each` or `batch` of a processor; `loop` runs an `async def` function."""

        def call(given: Message | Batch, txn: Any) -> None:
            with self._around(given) if self._around else nullcontext():
                if isinstance(given, Batch):
                    self._call(None, [self._value(message) for message in given], txn, state, loop)
                else:
                    self._call(given, self._value(given), txn, state, loop)

        return {"batch" if self.batch else "each": call}

    def _value(self, message: Message) -> Any:
        if message.value is None and not self._takes_none:
            raise Poison(f"a tombstone, which {self.name} does not take (its value would be None)", message=message)
        return message if self.takes_message else message.value

    def _call(self, message: Message | None, value: Any, given: Any, state: Any, loop: EventLoop | None) -> None:
        asked = {"txn": given, "db": given, "message": message, "state": state}
        extras = {name: asked[role] for name, role in self.extras.items()}
        result = self.function(value, **extras)
        send = self._sender(given)
        if loop is None:
            self._publisher.publish(result, message, send)
        elif self._yields_async:
            loop.run(self._publisher.publish_all(result, message, send))
        else:
            self._publisher.publish(loop.run(result), message, send)

    def _sender(self, given: Any) -> Send:
        if self.settings.get("db") is None:
            send: Send = given.send
            return send
        outbox = self.settings.get("outbox")
        return self._refuse_to_send if outbox is None else partial(outbox.send, given)

    def _refuse_to_send(self, *message: Any, **more: Any) -> None:
        raise UnfitResult(f"with db= what {self.name} returns is sent through an outbox: give process() outbox=")


def _is_message(kind: Any) -> bool:
    return kind is Message or get_origin(kind) is Message
