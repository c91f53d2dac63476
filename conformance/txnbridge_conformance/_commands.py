"""The plug-in that brings `txnbridge brokers`. It is loaded with every bridge, so it imports nothing before it must."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """The commands that start real brokers."""
    from txnbridge_conformance.brokers.commands import command

    return [command]
