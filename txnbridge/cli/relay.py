"""The commands `txnbridge relay`, which publish the rows of an outbox, and list and change those that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, when
from txnbridge.cli._object_loading import telling
from txnbridge.errors import BackendMissing, NotFound
from txnbridge.spi import Deadline

if TYPE_CHECKING:
    from txnbridge.sql import Outbox
    from txnbridge.sql.relay import OutboxStore

_log = logging.getLogger("txnbridge")

command: _common.Group = _common.Group(
    "relay", help="Publish the rows of an outbox, and list and change those that cannot be."
)

_OPTIONS = (
    click.option(
        "--database", metavar="URL", envvar="TXNBRIDGE_DATABASE", required=True, help="The database, for SQLAlchemy."
    ),
    click.option("--outbox", "name", metavar="NAME", required=True, help="The outbox's name, as in Outbox(NAME)."),
    click.option("--schema", metavar="NAME", help="The schema of the outbox's tables, if it is not the default."),
)


def _outbox_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def _outbox(name: str, schema: str | None) -> Outbox:
    try:
        from sqlalchemy import MetaData

        from txnbridge.sql import Outbox
    except ModuleNotFoundError as error:
        raise BackendMissing("an outbox needs SQLAlchemy: in a clone of txnbridge, pip install -e '.[sql]'") from error
    return Outbox(name, MetaData(schema=schema))


@contextmanager
def _store(name: str, schema: str | None, database: str) -> Iterator[OutboxStore]:
    """Open an existing outbox. Raise `NotFound` if the database has no such outbox."""
    outbox = _outbox(name, schema)
    from txnbridge.sql.relay import OutboxStore

    with closing(OutboxStore(outbox, database)) as store:
        if not store.exists(Deadline(30)):
            raise NotFound(f"this database has no outbox {name!r} that a relay has opened")
        yield store


@_common.command("run", command)
@_outbox_options
@click.option("--batch", metavar="N", type=click.IntRange(1), default=10_000, show_default=True, help="Rows at once.")
@click.option("--unordered", is_flag=True, help="Let a parked row hold back no later rows of its key.")
@click.option("--keep", metavar="SECONDS", type=click.FloatRange(0), help="Delete published rows only after this time.")
def run(
    cli: Cli, database: str, name: str, schema: str | None, batch: int, unordered: bool, keep: float | None
) -> None:
    """Publish the rows of an outbox, each exactly once, until SIGTERM or Ctrl-C.

    Several relays may run: one works, and another takes over if it stands still.
    """
    with telling(), cli.look() as bridge:
        relay = bridge.relay(_outbox(name, schema), database, ordered=not unordered, batch=batch, keep=keep)
        relay.run()
    stats = relay.stats
    cli.answer(stats._asdict(), f"{stats.published} published in {stats.batches} batches, {stats.parked} parked")


@_common.command(
    "status", command, broker=False, help="Say how many rows wait, and whether a batch is being published."
)
@_outbox_options
def status(cli: Cli, database: str, name: str, schema: str | None) -> None:
    with _store(name, schema, database) as store:
        state, waiting = store.state(Deadline(30)), store.count(Deadline(30))
    cli.answer(
        {"waiting": waiting, "parked": state.parked, "token": state.token, "relay": state.relay},
        f"{waiting} rows wait, {state.parked} are parked; the last relay is {state.relay or 'none'}",
    )
    if state.token is not None:
        cli.say(f"a batch is being published (token: {state.token})")


@_common.command("parked", command, broker=False, help="List parked rows, which the broker refused.")
@_outbox_options
def parked(cli: Cli, database: str, name: str, schema: str | None) -> None:
    with _store(name, schema, database) as store:
        found = store.parked(Deadline(30))
    documents = [{"id": r.id, "topic": r.topic, "parked_at": r.changed_at, "reason": r.reason} for r in found]
    rows = [(r.id, r.topic, when(r.changed_at), r.reason) for r in found]
    cli.listing(documents, f"nothing is parked in outbox {name}", ["row", "topic", "since", "reason"], rows)


def _add_changing(verb: str, delete: bool, help: str, done: str) -> None:
    @_common.command(verb, command, broker=False, help=help)
    @_outbox_options
    @click.argument("rows", nargs=-1, type=int)
    @click.option("--all", "every", is_flag=True, help="All parked rows.")
    @click.option("--yes", is_flag=True, help="Really do it.")
    def change(
        cli: Cli, database: str, name: str, schema: str | None, rows: Sequence[int], every: bool, yes: bool
    ) -> ExitCode:
        if bool(rows) == every:
            raise click.UsageError("name rows by their numbers, or give --all")
        with _store(name, schema, database) as store:
            if not yes:
                chosen = [each.id for each in store.parked(Deadline(30)) if every or each.id in rows]
                return cli.would({"rows": len(chosen), "would": verb}, f"would {verb} {len(chosen)} rows", "--yes")
            changed = store.unpark(None if every else rows, delete, Deadline(30))
        _log.warning("outbox %s: %d rows were %s by hand", name, changed, done)
        cli.answer({"rows": changed}, f"{changed} rows were {done}")
        return ExitCode.OK if changed else ExitCode.FAILED


_add_changing("resume", False, "Let parked rows be published again, in their order.", "resumed")
_add_changing("drop", True, "Delete parked rows, which are then never published.", "deleted")


@_common.command("end-batch", command, broker=False)
@_outbox_options
@click.argument("token")
@click.option("--published/--again", required=True, help="Its messages are in their topics: yes, or no.")
@click.option("--yes", is_flag=True, help="Really do it.")
def end_batch(
    cli: Cli, database: str, name: str, schema: str | None, token: str, published: bool, yes: bool
) -> ExitCode:
    """End the batch with this token whose outcome the broker can never tell, after a look into the topics.

    With --again its rows are published again, with --published they are deleted.
    """
    with _store(name, schema, database) as store:
        state = store.state(Deadline(30))
        if state.token != token:
            raise NotFound("no batch with this token is being published")
        if not yes:
            text = f"would {'delete the rows' if published else 'publish the rows again'}"
            return cli.would({"token": token, "published": published, "would": "end-batch"}, text, "--yes")
        if published:
            store.end_batch(token, state.batch or "", None, False, 1, False, Deadline(30))
        else:
            store.withdraw_batch(token, None, Deadline(30))
    _log.warning("outbox %s: a batch was ended by hand as %s", name, "published" if published else "not published")
    cli.answer({"token": token, "published": published}, "done")
    return ExitCode.OK
