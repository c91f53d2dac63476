"""The plug-in that brings `txnbridge brokers`. It is loaded with every bridge, so it imports nothing before it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click

# By their names in `brokers`; for each there is a backend that passes the story.
_PLAYED_ON = ("kafka", "pulsar", "rocketmq")


@hookimpl
def txnbridge_brokers() -> list[tuple[str, Callable[[], AbstractContextManager[str]]]]:
    """The brokers that `txnbridge demo` can play on."""
    return [(name, partial(_started, name)) for name in _PLAYED_ON]


@contextmanager
def _started(name: str) -> Iterator[str]:
    from txnbridge_conformance import brokers

    with getattr(brokers, name)() as broker:
        yield f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """The commands that start real brokers."""
    from txnbridge_conformance.brokers.commands import command

    return [command]
