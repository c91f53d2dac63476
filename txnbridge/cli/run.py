"""`txnbridge run`: a processor as a process of its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from txnbridge import Poison, Processor, TxnBridgeError
from txnbridge.cli import _common
from txnbridge.cli._common import Cli


@_common.command("run")
@click.argument("target", metavar="MODULE:NAME")
@click.option("--until-idle", is_flag=True, help="End when all input is processed.")
def command(cli: Cli, target: str, until_idle: bool) -> None:
    """Run the processor NAME of MODULE, found from the current folder.

    NAME is a `Processor`, or a function that is given a bridge to --url and returns one. SIGTERM and Ctrl-C stop it
    after the transaction that is running, a second one at once. What its group does, and what it waits for, is told on
    standard error.
    """
    found = _load(target)
    with ExitStack() as stack:
        stack.enter_context(_telling())
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


@contextmanager
def _telling() -> Iterator[None]:
    """What the group does and waits for goes to stderr, unless the program has its own idea of logs."""
    logger = logging.getLogger("txnbridge")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _load(target: str) -> Any:
    """A `Processor`, or something to call. Raises `click.UsageError`; what the module itself raises passes."""
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise click.UsageError(f"{target!r} is not MODULE:NAME")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise click.UsageError(f"there is no module {error.name!r} here or among what is installed") from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"module {name} has no {attribute!r}")
        found = getattr(found, part)
    if not (isinstance(found, Processor) or callable(found)):
        raise click.UsageError(f"{target} is {type(found).__name__}, neither a Processor nor a function that makes one")
    return found


def _say_what_it_did(cli: Cli, processor: Processor) -> None:
    stats = processor.stats
    if cli.json:
        cli.document(stats._asdict())
    cli.say(
        f"{stats.messages} messages in {stats.transactions} transactions,"
        f" {stats.dead_letters} dead letters, {stats.retries} retries"
    )
