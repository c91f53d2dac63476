"""Plug-ins: backends, listeners, header makers and commands, found by entry point and loaded one by one.

A plug-in that fails to load is reported by name; the others work without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import click
    import pluggy

    from txnbridge._events import Event
    from txnbridge.spi import Backend

GROUP = "txnbridge"  # the entry point group, and the hooks' prefix

_Function = TypeVar("_Function")


def hookimpl(function: _Function) -> _Function:
    """Mark a function as an implementation of the hook of its name."""
    # This does the same as pluggy's own marker, so that `import txnbridge` need not import pluggy.
    options = {
        "wrapper": False,
        "hookwrapper": False,
        "optionalhook": False,
        "tryfirst": False,
        "trylast": False,
    }
    setattr(function, f"{GROUP}_impl", {**options, "specname": None})
    return function


class Hooks:
    """The hooks that a plug-in may implement."""

    def txnbridge_backends(self) -> list[Backend]:  # type: ignore[empty-body]
        """The backends that this plug-in provides."""

    def txnbridge_event(self, event: Event) -> None:
        """Take an event of a bridge that was opened after this plug-in was registered."""

    def txnbridge_headers(self, topic: str, key: bytes | None) -> Mapping[str, str] | None:
        """Return headers to add to a message before it is sent, for example for tracing."""

    def txnbridge_commands(self) -> list[click.Command]:  # type: ignore[empty-body]
        """Commands for the command line."""

    def txnbridge_brokers(self) -> list[tuple[str, Callable[[], AbstractContextManager[str]]]]:  # type: ignore[empty-body]
        """Return brokers for experiments by name: a context manager starts one, gives its URL, and ends it."""


class Plugins:
    """The registry of one process."""

    def __init__(self, entry_points: bool = True) -> None:
        self._lock = threading.RLock()
        self._entry_points = entry_points
        self._manager: pluggy.PluginManager | None = None
        self.failed: dict[str, BaseException] = {}  # entry point name -> why it could not be loaded

    @property
    def manager(self) -> pluggy.PluginManager:
        with self._lock:
            if self._manager is None:
                self._manager = self._load()
            return self._manager

    def _load(self) -> pluggy.PluginManager:
        import importlib.metadata  # here, because the two take longer to import than all the rest

        import pluggy

        manager = pluggy.PluginManager(GROUP)
        spec = pluggy.HookspecMarker(GROUP)
        for name in vars(Hooks):
            if name.startswith(GROUP):
                spec(getattr(Hooks, name))
        manager.add_hookspecs(Hooks)
        if self._entry_points:
            for entry in importlib.metadata.entry_points(group=GROUP):
                self._load_one(manager, entry)
        return manager

    def _load_one(self, manager: pluggy.PluginManager, entry: EntryPoint) -> None:
        try:
            if not manager.has_plugin(entry.name):
                manager.register(entry.load(), entry.name)
        except Exception as error:
            self.failed[entry.name] = error

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plug-in by hand; bridges opened from now on know it."""
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
        """Every backend; a plug-in whose hook raises is reported in `failed`."""
        return self._collect("txnbridge_backends")

    def listeners(self) -> list[Any]:
        return self._functions("txnbridge_event")

    def header_makers(self) -> list[Any]:
        return self._functions("txnbridge_headers")

    def commands(self) -> list[click.Command]:
        """Every plug-in's commands; a plug-in whose hook raises is reported in `failed`."""
        return self._collect("txnbridge_commands")

    def brokers(self) -> dict[str, Callable[[], AbstractContextManager[str]]]:
        """Every plug-in's brokers; a plug-in whose hook raises is reported in `failed`."""
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
        return [impl.function for impl in getattr(self.manager.hook, hook).get_hookimpls()]


plugins = Plugins()
