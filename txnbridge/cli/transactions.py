"""The commands `txnbridge transactions`, which list open and prepared transactions, and end them."""

from __future__ import annotations

import logging
from typing import Any

import click

from txnbridge import Bridge, Decision, Outcome, Token
from txnbridge._half.span_sweep import PART_OF_SPAN, is_part
from txnbridge.cli import _common, status
from txnbridge.cli._common import Cli, ExitCode, dash, outcome_code, reason_option, when
from txnbridge.errors import UsageError
from txnbridge.spi import OpenTransaction

_log = logging.getLogger("txnbridge")

command: _common.Group = _common.Group("transactions", help="List and end open and prepared transactions.")


@_common.command("list", command, help="List open and prepared transactions, the oldest first.")
def list_(cli: Cli) -> None:
    with cli.look() as bridge:
        found = bridge.admin.transactions()
    rows = [
        (t.transaction, _state(t).partition(":")[0], t.owner, when(t.since), when(t.expires_at), dash(t.messages))
        for t in found
    ]
    columns = ["transaction", "state", "owner", "since", "expires", "messages"]
    cli.listing([_as_json(transaction) for transaction in found], "no open transactions", columns, rows)


@_common.command("describe", command, help="Show all that is known of one open or prepared transaction.")
@click.argument("transaction")
def describe(cli: Cli, transaction: str) -> None:
    with cli.look() as bridge:
        found = bridge.admin.transaction(transaction)
    cli.answer(
        _as_json(found),
        f"transaction  {found.transaction}",
        f"state        {_state(found)}",
        f"owner        {found.owner or '-'}",
        f"since        {when(found.since)}",
        f"expires      {when(found.expires_at)}",
        f"messages     {dash(found.messages)}",
        f"partitions   {', '.join(f'{topic}[{number}]' for topic, number in found.partitions) or '-'}",
        f"groups       {', '.join(found.groups) or '-'}",
        f"token        {found.token or '-'}",
    )


def _as_json(transaction: OpenTransaction) -> dict[str, Any]:
    token = transaction.token
    return {**vars(transaction), "token": None if token is None else str(token)}


def _state(transaction: OpenTransaction) -> str:
    return f"{transaction.state}, {PART_OF_SPAN}" if is_part(transaction) else transaction.state


def _add_ending(decision: Decision, help: str) -> None:
    @_common.command(decision.value, command, help=help)
    @click.argument("transaction", metavar="TRANSACTION_OR_TOKEN")
    @click.option("--yes", is_flag=True, help="Really do it.")
    @reason_option
    def end(cli: Cli, transaction: str, yes: bool, reason: str | None) -> ExitCode:
        token = Token.parse(transaction) if transaction.startswith("txb") else None
        with cli.look() as bridge:
            _refuse_part(bridge, token or transaction)
            if not (yes and reason):
                return _say_what_would_happen(cli, bridge, token or transaction, decision)
            outcome = _end(bridge, token or transaction, decision, reason)
        name = transaction if token is None else token.transaction
        cli.answer({"transaction": name, "outcome": outcome.value, "reason": reason}, outcome.value)
        return outcome_code(outcome, decision)


_add_ending(Decision.COMMIT, "Commit a prepared transaction, overriding the application's decision.")
_add_ending(Decision.ABORT, "Abort an open or prepared transaction.")


def _refuse_part(bridge: Bridge, what: Token | str) -> None:
    if isinstance(what, str):  # Kafka's name for a part has no mark
        refused = any(is_part(each) for each in bridge.admin.transactions() if each.transaction == what)
    else:
        refused = is_part(what)
    if refused:
        raise UsageError(f"this transaction is a {PART_OF_SPAN}; ended by hand, it may tear the span")


def _say_what_would_happen(cli: Cli, bridge: Bridge, what: Token | str, decision: Decision) -> ExitCode:
    if isinstance(what, Token):
        name, state = what.transaction, status.in_words(bridge.status(what))
    else:
        name, state = what, bridge.admin.transaction(what).state
    document = {"transaction": name, "state": state, "would": decision.value}
    return cli.would(document, f"would {decision.value} transaction {name}, now {state}")


def _end(bridge: Bridge, what: Token | str, decision: Decision, reason: str) -> Outcome:
    name = what.transaction if isinstance(what, Token) else what
    commit = decision is Decision.COMMIT
    if isinstance(what, Token):
        outcome = bridge.commit(what) if commit else bridge.abort(what)
    else:
        end = bridge.admin.commit if commit else bridge.admin.abort
        outcome = end(what, reason=reason)
    # A warning, so that it is also logged if logging is not set up.
    _log.warning("transaction %s: %s by hand, it is %s; reason: %s", name, decision.value, outcome.value, reason)
    return outcome


@_common.command("repair", command, help="Complete a transaction that the broker ended only in part.")
@click.argument("transaction")
@click.option("--yes", is_flag=True, help="Do it. Stop the transaction's writer first.")
@reason_option
def repair(cli: Cli, transaction: str, yes: bool, reason: str | None) -> ExitCode:
    with cli.look() as bridge:
        if not (yes and reason):
            text = f"would complete the end of transaction {transaction}; its writer must be stopped first"
            return cli.would({"transaction": transaction, "would": "repair"}, text)
        done = bridge.admin.repair(transaction)
    _log.warning("transaction %s: repaired by hand: %s; reason: %s", transaction, done, reason)
    cli.answer({"transaction": transaction, "done": done, "reason": reason}, done)
    return ExitCode.OK
