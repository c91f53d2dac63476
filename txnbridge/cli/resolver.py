"""The commands `txnbridge resolver`, which answer check-backs about half messages, and list and end parked ones."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

import click

from txnbridge import Decision
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, outcome_code, reason_option, when
from txnbridge.cli._object_loading import load, telling
from txnbridge.spi import Half

_log = logging.getLogger("txnbridge")

command: _common.Group = _common.Group(
    "resolver", help="Answer check-backs of half messages, and list and end parked ones."
)

_group_option = click.option("--group", metavar="NAME", required=True, help="The group of the half messages.")
_application_option = click.option(
    "--application", metavar="NAME", help="The application whose half messages these are, as in connect()."
)


@_common.command("run", command)
@_group_option
@click.option("--check", metavar="MODULE:NAME", help="check(transaction_id, messages) -> Decision")
@click.option("--database", metavar="URL", help="The database of transaction(db=…), for SQLAlchemy.")
@click.option("--parallel", metavar="N", type=click.IntRange(1), default=4, show_default=True, help="Checks at once.")
@_application_option
def run(cli: Cli, group: str, check: str | None, database: str | None, parallel: int, application: str | None) -> None:
    """Answer check-backs about half messages whose sender did not report its work's outcome, until SIGTERM or Ctrl-C.

    With --check they are answered by the function NAME of MODULE, found from the current folder; with --database by the
    rows of transactions with db=. Its default is TXNBRIDGE_DATABASE. Several resolvers may run.
    """
    if check is None:
        database = database or os.environ.get("TXNBRIDGE_DATABASE")
    if (check is None) == (database is None):
        raise click.UsageError("give either --check or --database")
    found = None if check is None else load(check, callable, "not a function")
    with ExitStack() as stack:
        stack.enter_context(telling())
        # The published half messages are stored already, so no topic is missing.
        bridge = stack.enter_context(cli.look(application=application))
        resolver = bridge.resolver(group, check=found, db=database, parallel=parallel)
        resolver.run()
    stats = resolver.stats
    text = f"{stats.checks} checks: {stats.committed} committed, {stats.aborted} aborted, {stats.failed} failed"
    cli.answer(stats._asdict(), text)


@_common.command("parked", command, help="List parked half messages: they had too many check-backs without a decision.")
@_group_option
@_application_option
def parked(cli: Cli, group: str, application: str | None) -> None:
    with cli.look(application=application) as bridge:
        found = bridge.admin.parked(group)
    rows = [(h.transaction, len(h.messages), ", ".join(_topics(h)), h.checks, when(h.deadline_at)) for h in found]
    columns = ["transaction", "messages", "topics", "asked", "since"]
    cli.listing([_as_json(half) for half in found], f"nothing is parked in group {group}", columns, rows)


def _topics(half: Half) -> list[str]:
    return sorted({message.topic for message in half.messages})


def _as_json(half: Half) -> dict[str, object]:
    told = {name: getattr(half, name) for name in ("transaction", "group", "checks", "deadline_at")}
    return {**told, "messages": len(half.messages), "topics": _topics(half)}


@_common.command("resume", command, help="Start the check-backs of a parked half message again.")
@_group_option
@_application_option
@click.argument("transaction")
def resume(cli: Cli, group: str, application: str | None, transaction: str) -> None:
    with cli.look(application=application) as bridge:
        bridge.admin.resume(group, transaction)
    cli.answer({"transaction": transaction, "resumed": True}, f"{transaction} is asked about again")


def _add_ending(decision: Decision, help: str) -> None:
    @_common.command(decision.value, command, help=help)
    @_group_option
    @_application_option
    @click.argument("transaction")
    @click.option("--yes", is_flag=True, help="Really do it.")
    @reason_option
    def end(cli: Cli, group: str, application: str | None, transaction: str, yes: bool, reason: str | None) -> ExitCode:
        if not (yes and reason):
            text = f"would {decision.value} half-message transaction {transaction} of group {group}"
            return cli.would({"transaction": transaction, "would": decision.value}, text)
        with cli.look(application=application) as bridge:
            outcome = bridge.admin.end_parked(group, transaction, decision, reason=reason)
        text = "half-message transaction %s: %s by hand, it is %s; reason: %s"
        _log.warning(text, transaction, decision.value, outcome.value, reason)
        cli.answer({"transaction": transaction, "outcome": outcome.value, "reason": reason}, outcome.value)
        return outcome_code(outcome, decision)


_add_ending(Decision.COMMIT, "Publish a parked half message, overriding the application's decision.")
_add_ending(Decision.ABORT, "Drop a parked half message, overriding the application's decision.")
