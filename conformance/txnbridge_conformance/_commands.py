"""The plug-in that brings `txnbridge brokers`. It is loaded with every bridge, so it imports nothing before it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def txnbridge_brokers() -> Mapping[str, Callable[[], AbstractContextManager[str]]]:
    """The brokers that `txnbridge demo` can play on."""
    return {"kafka": _kafka}


@contextmanager
def _kafka() -> Iterator[str]:
    from txnbridge_conformance import brokers

    with brokers.kafka() as broker:
        yield broker.url


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """The commands that start real brokers."""
    from txnbridge_conformance.brokers.commands import command

    return [command]
