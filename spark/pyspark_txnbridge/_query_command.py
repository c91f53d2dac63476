"""The command `txnbridge spark`, which shows and finishes a query's batches on a machine without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from txnbridge import Decision, InvalidOption
from txnbridge.commands import json_and_debug

if TYPE_CHECKING:
    from pyspark_txnbridge._kept_bridges import SinkSession
    from pyspark_txnbridge._write.recovery import QueryStatus

_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group("spark")
def command() -> None:
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


@command.command("status")
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


@command.command("recover")
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
    from pyspark_txnbridge._write.sink_options import SinkOptions, name_values

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
