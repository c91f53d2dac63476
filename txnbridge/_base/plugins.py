"""Plug-ins: packages that add backends, event listeners, header makers and commands by an entry point.

Each plug-in is loaded by itself: if one fails to load, its name and error are reported, and the others work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import click
    import pluggy

    from txnbridge._base.events import Event, Listener
    from txnbridge._base.messages import Message
    from txnbridge._process.handler import MakeContext
    from txnbridge.spi import Backend, RawHeaders

GROUP = "txnbridge"  # the entry point group, and the hooks' prefix

_Function = TypeVar("_Function")


def hookimpl(function: _Function) -> _Function:
    """Mark a function as the implementation of the hook with the function's name."""
    # This sets the same attribute as pluggy's marker, so that `import txnbridge` need not import pluggy.
    options = dict.fromkeys(("wrapper", "hookwrapper", "optionalhook", "tryfirst", "trylast"), False)
    setattr(function, f"{GROUP}_impl", {**options, "specname": None})
    return function


class Hooks:
    """The hooks that a plug-in can implement."""

    def txnbridge_backends(self) -> list[Backend]:  # type: ignore[empty-body]
        """Return the backends that this plug-in provides."""

    def txnbridge_event(self, event: Event) -> None:
        """Handle an event of any bridge that was opened after this plug-in was registered.

        A plug-in that has a collection `txnbridge_event_names` gets only events of these names. Every other listener
        also gets an event for each message sent, which makes sending many messages slower.
        """

    def txnbridge_headers(self, topic: str, key: bytes | None, headers: RawHeaders) -> Mapping[str, str] | None:
        """Return headers to add to a message before it is sent, for example for tracing; `headers` has it already."""

    def txnbridge_processing(self, messages: Sequence[Message], group: str) -> AbstractContextManager[object]:  # type: ignore[empty-body]
        """Return a context manager, inside which a processor calls its handler for these messages."""

    def txnbridge_commands(self) -> list[click.Command]:  # type: ignore[empty-body]
        """Return commands to add to the command line `txnbridge`."""

    def txnbridge_brokers(self) -> list[tuple[str, Callable[[], AbstractContextManager[str]]]]:  # type: ignore[empty-body]
        """Return brokers for experiments, by name: a context manager starts a broker, yields its URL, and stops it."""


class Plugins:
    """The registry of plug-ins in this process."""

    def __init__(self, entry_points: bool = True) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._entry_points = entry_points
        self._manager: pluggy.PluginManager | None = None
        self.failed: dict[str, BaseException] = {}  # the errors of plug-ins that failed, by entry point name

    @property
    def manager(self) -> pluggy.PluginManager:
        with self.lock:
            if self._manager is None:
                try:
                    return self._load()
                except BaseException:
                    self._manager = None
                    raise
            return self._manager

    def _load(self) -> pluggy.PluginManager:
        import importlib.metadata  # not at the top, because this import and the next take long

        import pluggy

        # A plug-in may register another one while it is loaded.
        self._manager = manager = pluggy.PluginManager(GROUP)
        spec = pluggy.HookspecMarker(GROUP)
        for name in vars(Hooks):
            if name.startswith(GROUP):
                spec(getattr(Hooks, name))
        manager.add_hookspecs(Hooks)
        if self._entry_points:
            for entry in importlib.metadata.entry_points(group=GROUP):
                try:
                    if not manager.has_plugin(entry.name):
                        manager.register(entry.load(), entry.name)
                except Exception as error:
                    self.failed[entry.name] = error
        return manager

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plug-in without an entry point; bridges that are opened later use it."""
        self.manager.register(plugin, name)

    def unregister(self, plugin: object) -> None:
        self.manager.unregister(plugin)

    @contextmanager
    def registered(self, plugin: object) -> Iterator[None]:
        self.register(plugin)
        try:
            yield
        finally:
            self.unregister(plugin)

    def backends(self) -> list[Backend]:
        """Return the backends of all plug-ins. An error that a plug-in raises is kept in `failed`."""
        return self._collect("txnbridge_backends")

    def listeners(self) -> list[Listener]:
        """Return the listeners that get every event."""
        return [impl.function for impl in self._implementations("txnbridge_event") if _event_names(impl) is None]

    def filtered_listeners(self) -> list[tuple[Listener, Collection[str]]]:
        """Return the listeners that get only events of some names, with these names."""
        found = [(impl.function, _event_names(impl)) for impl in self._implementations("txnbridge_event")]
        return [(listener, names) for listener, names in found if names is not None]

    def header_makers(self) -> list[Any]:
        """Return the functions that make headers; each takes topic, key and headers, also if its hook takes fewer."""
        return [
            impl.function if "headers" in impl.argnames else _without_headers(impl.function)
            for impl in self._implementations("txnbridge_headers")
        ]

    def context_makers(self) -> list[MakeContext]:
        """Return the functions that make the context managers inside which processors call their handlers."""
        return self._functions("txnbridge_processing")

    def commands(self) -> list[click.Command]:
        """Return the commands of all plug-ins. An error that a plug-in raises is kept in `failed`."""
        return self._collect("txnbridge_commands")

    def brokers(self) -> dict[str, Callable[[], AbstractContextManager[str]]]:
        """Return all plug-ins' brokers for experiments, by name. An error that a plug-in raises is kept in `failed`."""
        return dict(self._collect("txnbridge_brokers"))

    def _collect(self, hook: str) -> list[Any]:
        found: list[Any] = []
        for function in self._functions(hook):
            try:
                found += function()
            except Exception as error:
                self.failed[getattr(function, "__module__", repr(function))] = error
        return found

    def _functions(self, hook: str) -> list[Any]:
        return [impl.function for impl in self._implementations(hook)]

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        return list(getattr(self.manager.hook, hook).get_hookimpls())


def _without_headers(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda topic, key, headers: make(topic=topic, key=key)


def _event_names(implementation: pluggy.HookImpl) -> Collection[str] | None:
    names: Collection[str] | None = getattr(implementation.plugin, "txnbridge_event_names", None)
    return (names,) if isinstance(names, str) else names


plugins: Plugins = Plugins()
