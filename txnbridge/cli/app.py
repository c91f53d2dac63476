"""The command `txnbridge app describe`, which describes an application as a document of AsyncAPI."""

from __future__ import annotations

import json

import click

from txnbridge import App
from txnbridge.cli import _common
from txnbridge.cli._common import Cli
from txnbridge.cli._object_loading import load

command: _common.Group = _common.Group("app", help="Describe an application.")


@_common.command("describe", command, broker=False)
@click.argument("target", metavar="MODULE:NAME")
def describe(cli: Cli, target: str) -> None:
    """Describe the application NAME of MODULE, found from the current folder, as a document of AsyncAPI 3.

    The document has a channel for each topic, an operation for each function that receives or sends, and the schemas of
    the values as far as they are known: those of dataclasses and pydantic models. Nothing is sent to a broker.
    """
    app = load(target, lambda found: isinstance(found, App), "not an App")
    cli.answer(app.describe(), *json.dumps(app.describe(), indent=2).splitlines())
