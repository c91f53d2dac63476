"""The plug-in that adds the suite's commands. Every bridge loads it, so commands import other modules when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click

# The functions in `txnbridge_conformance.brokers` that start a broker for `txnbridge demo`.
_DEMO_BROKERS = ("kafka", "pulsar", "rocketmq")


@hookimpl
def txnbridge_brokers() -> list[tuple[str, Callable[[], AbstractContextManager[str]]]]:
    """Return the names of the brokers for `txnbridge demo`, each with a function that starts the broker."""
    return [(name, partial(_started, name)) for name in _DEMO_BROKERS]


@contextmanager
def _started(name: str) -> Iterator[str]:
    from txnbridge_conformance import brokers

    with getattr(brokers, name)() as broker:
        yield f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """Return the commands `txnbridge brokers` and `txnbridge conformance`."""
    try:
        from txnbridge_conformance import commands
        from txnbridge_conformance.brokers.commands import command
    except ModuleNotFoundError as error:
        text = f"conformance and brokers need {error.name}: in a clone of txnbridge, pip install -e '.[conformance]'"
        raise ModuleNotFoundError(text, name=error.name) from error

    return [command, commands.command]
