"""The command `txnbridge run`, which runs a processor in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

from txnbridge import Poison, Processor, TxnBridgeError
from txnbridge.cli import _common
from txnbridge.cli._common import Cli
from txnbridge.cli._object_loading import load, telling


@_common.command("run")
@click.argument("target", metavar="MODULE:NAME")
@click.option("--until-idle", is_flag=True, help="End when all input is processed.")
def command(cli: Cli, target: str, until_idle: bool) -> None:
    """Run the processor NAME of MODULE, found from the current folder.

    NAME is a `Processor`, or a function that is given a bridge to --url and returns one. SIGTERM and Ctrl-C stop the
    processor after its running transaction, a second signal at once. Progress and errors are logged to standard error.
    """
    found = load(target, _makes_processors, "neither a Processor nor a function that makes one")
    with ExitStack() as stack:
        stack.enter_context(telling())
        if not isinstance(found, Processor):
            found = found(stack.enter_context(cli.connect()))
        if not isinstance(found, Processor):
            raise click.UsageError(f"{target} returned {type(found).__name__}; it must return a Processor")
        try:
            found.run(until_idle)
        except Poison as error:
            raise TxnBridgeError(str(error)) from error
        finally:
            _say_what_it_did(cli, found)


def _makes_processors(found: Any) -> bool:
    return isinstance(found, Processor) or callable(found)


def _say_what_it_did(cli: Cli, processor: Processor) -> None:
    stats = processor.stats
    if cli.json:
        cli.document(stats._asdict())
    cli.say(
        f"{stats.messages} messages in {stats.transactions} transactions,"
        f" {stats.dead_letters} dead letters, {stats.retries} retries"
    )
