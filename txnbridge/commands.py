"""The options --json and --debug, which every command has, for commands of plug-ins (the hook `txnbridge_commands`).

@click.command("greet")
@json_and_debug
def greet(as_json: bool) -> None:
    click.echo(json.dumps({"greeting": "hello"}) if as_json else "hello")
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from txnbridge import Event, EventLogger, hookimpl, plugins

__all__ = ["asked_for", "json_and_debug"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def json_and_debug(function: _Function) -> _Function:
    """Give a command the options --json (its argument `as_json`) and --debug, which shows events and tracebacks.

    With --json, an error that ends the command is written to stderr as one JSON document.
    """
    return _JSON(_DEBUG(function))


def asked_for(ctx: click.Context, option: Literal["json", "debug"]) -> bool:
    """Return whether the running command was called with the option --json (or --debug) that `option` names."""
    return bool(ctx.meta.get(f"txnbridge.{option}"))


def _remember(ctx: click.Context, option: click.Parameter, value: bool) -> bool:
    ctx.meta[f"txnbridge.{option.opts[0].lstrip('-')}"] = value
    return value


def _start_debugging(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if _remember(ctx, option, value):
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        ctx.with_resource(plugins.registered(_ShowEvents()))


class _ShowEvents(EventLogger):
    """The plug-in of the option --debug: it logs every event of every transaction, without bodies or keys."""

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        self(event)


# Both options are eager, so that they take effect even if another option is invalid.
_JSON = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember, help="JSON on stdout, for machines."
)
_DEBUG = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_start_debugging,
    help="Show every step on stderr, and errors with their traceback.",
)
