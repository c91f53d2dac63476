"""What is public is listed by name, is there, and says what it is."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from types import ModuleType

import pytest

import txnbridge
from tests.house.rooms import PUBLIC_MODULES


def exposed(module: ModuleType) -> set[str]:
    """The names that a reader takes for public: no underscore, and not just something that it imported."""
    return {
        name
        for name in dir(module)
        if not name.startswith("_")
        and not inspect.ismodule(getattr(module, name))
        and getattr(getattr(module, name), "__module__", module.__name__).startswith("txnbridge")
    }


def undocumented(module: ModuleType, names: list[str]) -> list[str]:
    """Which of the classes, functions and modules named here say nothing about themselves."""
    return [name for name in names if _has_docstring_place(getattr(module, name)) and not _docstring(getattr(module, name))]


def _has_docstring_place(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)


def _docstring(thing: object) -> str:
    """The docstring that somebody wrote: a dataclass without one gets its signature."""
    text = (thing.__doc__ or "").strip()
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text
