"""The commands `txnbridge pipeline`, which runs a job from broker to broker, and `txnbridge spark`.

The latter shows and finishes a query's batches on a machine without Spark.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pyspark_txnbridge._write.sink_options import SinkOptions, name_values
from txnbridge import Decision, InvalidOption, TxnBridgeError
from txnbridge.commands import json_and_debug

if TYPE_CHECKING:
    from pyspark_txnbridge._kept_bridges import SinkSession
    from pyspark_txnbridge._write.recovery import QueryStatus
    from pyspark_txnbridge.pipeline import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The interval between lines of progress where stderr is no terminal.
_PROGRESS_SECONDS = 10.0


@click.group("pipeline")
def pipeline_command() -> None:
    """Move messages from broker to broker, exactly once, on PySpark."""


@pipeline_command.command("run")
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
            yield lambda progress: status.update(_progress_line(progress))
        return
    due = 0.0

    def report(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_SECONDS
            click.echo(_progress_line(progress), err=True)

    yield report


def _progress_line(progress: Progress) -> str:
    behind = "" if progress.behind is None else f", {progress.behind} behind"
    return f"{progress.rows} rows in {progress.batches} batches{behind}"


@click.group("spark")
def spark_command() -> None:
    """Show what a Spark query has decided, and finish its batches."""


def _about_a_query(function: _Function) -> _Function:
    for option in reversed(
        [
            click.option("--checkpoint", help="The query's checkpoint folder, unless --query or txnAppId is given."),
            click.option("--query", help="The query's id, or its txnAppId."),
            click.option("--url", required=True, envvar="TXNBRIDGE_URL", help="Where the query writes."),
            click.option("--sink", help="The sink's name, if the query gives it one."),
            click.option("--prefix", help="The query's option transactionalIdPrefix."),
            click.option("--decision-log", help="The query's option decisionLog."),
            click.option(
                "--option", "-o", "given", multiple=True, metavar="NAME=VALUE", help="Another option of the sink."
            ),
        ]
    ):
        function = option(function)
    return function


@spark_command.command("status")
@_about_a_query
@json_and_debug
def show_status(as_json: bool, **query: Any) -> None:
    """Show which batches are published, decided or given up, and which transactions are open.

    This decides and publishes nothing. A missing decision log is created, empty.
    """
    from pyspark_txnbridge._write.recovery import status

    with _opened(**query) as (session, path):
        found = status(session, path)
    if as_json:
        click.echo(json.dumps(_document(found), indent=2, default=lambda outcome: outcome.value))
    else:
        click.echo("\n".join(_lines(found)))


@spark_command.command("recover")
@_about_a_query
@click.option("--skip", type=int, metavar="BATCH", help="Mark this batch done although part of it can't be published.")
@click.option("--clear", is_flag=True, help="Also abort undecided transactions. This fences a running driver.")
@json_and_debug
def run_recovery(as_json: bool, skip: int | None, clear: bool, **query: Any) -> None:
    """Publish every batch that is decided and not published. Safe to repeat, and while the query runs."""
    from pyspark_txnbridge._write import recovery

    with _opened(**query) as (session, path):
        done = recovery.recover(session, path, skip)
        ended = recovery.clear(session, path) if clear else []
    if as_json:
        click.echo(json.dumps({"published": done.published, "skipped": done.skipped, "aborted": ended}))
        return
    click.echo(f"published: {', '.join(f'batch {batch}' for batch in done.published) or 'nothing was left to publish'}")
    if done.skipped is not None:
        click.echo(f"skipped: batch {done.skipped} counts as published from now on, whatever was published of it")
    for transaction in ended:
        click.echo(f"aborted: {transaction}")


@contextmanager
def _opened(
    checkpoint: str | None,
    query: str | None,
    url: str,
    sink: str | None,
    prefix: str | None,
    decision_log: str | None,
    given: tuple[str, ...],
) -> Iterator[tuple[SinkSession, tuple[str, str]]]:
    from pyspark_txnbridge._kept_bridges import SinkSession
    from pyspark_txnbridge._write.recovery import query_of

    if (checkpoint is None) == (query is None):
        raise InvalidOption("say which query: either --checkpoint or --query")
    known = {"url": url, "sink": sink, "transactionalIdPrefix": prefix, "decisionLog": decision_log}
    options = SinkOptions.parse(
        {name: value for name, value in known.items() if value is not None} | name_values("--option", given)
    )
    query = query or options.app_id or query_of(checkpoint or "")
    with closing(SinkSession(options, options.application(query))) as session:
        yield session, (query, options.sink)


def _lines(status: QueryStatus) -> Iterator[str]:
    from pyspark_txnbridge._write.batch_identity import place

    if status.run is None:
        yield "this query has not written anything to a sink of this name"
        return
    yield f"last run: {status.run}, opened by {status.host}"
    yield "published: " + ("no batch" if status.done_up_to is None else f"every batch up to {status.done_up_to}")
    for batch in status.undone:
        if batch.decision is Decision.ABORT:
            yield f"batch {batch.batch}: given up, attempt {batch.attempt}; the next run writes it again"
            continue
        yield f"batch {batch.batch}: decided, {batch.rows} rows, not marked as published (txnbridge spark recover)"
        for part in batch.parts:
            yield f"  {place(part.partition)}: {part.rows} rows, {part.state.value}{_until(part.expires_at)}"
    if status.open is None:
        yield "open transactions: unknown, because this broker does not list them"
    for transaction in status.open or ():
        yield f"{transaction.state}: {transaction.transaction}{_until(transaction.expires_at)}"


def _until(expires_at: int | None) -> str:
    if expires_at is None:
        return ""
    return f", until {datetime.fromtimestamp(expires_at / 1000).astimezone().isoformat(' ', 'seconds')}"


def _document(status: QueryStatus) -> dict[str, Any]:
    shown = ("transaction", "state", "since", "expires_at")
    return {
        **vars(status),
        "undone": [asdict(batch) for batch in status.undone],
        "open": status.open and [{name: getattr(each, name) for name in shown} for each in status.open],
    }
