"""The command `txnbridge pipeline`, which runs a job from broker to broker."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from pyspark_txnbridge._write.sink_options import name_values
from txnbridge import InvalidOption, TxnBridgeError
from txnbridge.commands import json_and_debug

if TYPE_CHECKING:
    from pyspark_txnbridge.pipeline import Progress

# The interval between lines of progress where stderr is no terminal.
_PROGRESS_SECONDS = 10.0


@click.group("pipeline")
def command() -> None:
    """Move messages from broker to broker, exactly once, on PySpark."""


@command.command("run")
@click.option("--from", "from_url", required=True, metavar="URL", help="The broker to read from.")
@click.option("--from-topic", "from_topics", required=True, multiple=True, help="A topic to read; may be repeated.")
@click.option("--to", "to_url", required=True, metavar="URL", help="The broker to write to.")
@click.option("--to-topic", help="The topic to write to. Default: the column `topic` of the written rows.")
@click.option("--sql", help="A query on the table `input` that returns the rows to write, with a column `value`.")
@click.option("--transform", metavar="MODULE:FUNCTION", help="A function that turns the data frame into another one.")
@click.option("--checkpoint", required=True, metavar="FOLDER", help="Where the job stores its progress.")
@click.option("--max-rows-per-batch", type=click.IntRange(min=1), help="The most rows of a batch. Default: no limit.")
@click.option("--available-now", is_flag=True, help="End when all messages that exist now are published.")
@click.option("--start", default="earliest", show_default=True, help="Where a new checkpoint begins (startingOffsets).")
@click.option("--from-option", multiple=True, metavar="NAME=VALUE", help="Another option of the source.")
@click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="Another option of the sink.")
@json_and_debug
def run(
    as_json: bool, transform: str | None, from_option: tuple[str, ...], to_option: tuple[str, ...], **given: Any
) -> None:
    """Read committed messages, change them, and publish them. The same call continues after any crash.

    It runs on this machine; on a cluster run pyspark_txnbridge/pipeline.py with spark-submit and the same options.
    """
    from pyspark_txnbridge import pipeline

    function = None if transform is None else _load(transform)
    given["from_options"] = name_values("--from-option", from_option)
    given["to_options"] = name_values("--to-option", to_option)
    with nullcontext() if as_json else _showing_progress() as report:
        done = pipeline.run(**given, transform=function, report=report)
    summary = json.dumps({"rows": done.rows, "batches": done.batches})
    click.echo(summary if as_json else f"{done.rows} rows in {done.batches} batches")


def main() -> None:
    """Run the command `txnbridge pipeline run` alone, for spark-submit and `python -m`."""
    try:
        run()
    except TxnBridgeError as error:
        click.echo(f"pipeline: {error}", err=True)
        sys.exit(1)


def _load(target: str) -> Callable[[Any], Any]:
    """Return the function that MODULE:FUNCTION names. Errors that the module itself raises pass through."""
    name, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[[Any], Any] = getattr(importlib.import_module(name), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InvalidOption(f"--transform is MODULE:FUNCTION, found from the current folder; {error}") from error
    if not callable(function):
        raise InvalidOption(f"--transform {target} is no function")
    return function


@contextmanager
def _showing_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on stderr: in one changing line, or in a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, markup=False, highlight=False).status("waiting for messages") as status:
            yield lambda progress: status.update(_line(progress))
        return
    due = 0.0

    def report(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_SECONDS
            click.echo(_line(progress), err=True)

    yield report


def _line(progress: Progress) -> str:
    behind = "" if progress.behind is None else f", {progress.behind} behind"
    return f"{progress.rows} rows in {progress.batches} batches{behind}"
