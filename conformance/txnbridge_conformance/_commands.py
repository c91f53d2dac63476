"""The plug-in that adds `txnbridge brokers`. Every bridge loads it, so it imports nothing before a command needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click

# Functions of `brokers` that start a broker on which the demo runs.
_DEMO_BROKERS = ("kafka", "pulsar", "rocketmq")


@hookimpl
def txnbridge_brokers() -> list[tuple[str, Callable[[], AbstractContextManager[str]]]]:
    """Return the brokers on which `txnbridge demo` can run."""
    return [(name, partial(_started, name)) for name in _DEMO_BROKERS]


@contextmanager
def _started(name: str) -> Iterator[str]:
    from txnbridge_conformance import brokers

    with getattr(brokers, name)() as broker:
        yield f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """Return the commands that start real brokers."""
    from txnbridge_conformance.brokers.commands import command

    return [command]
