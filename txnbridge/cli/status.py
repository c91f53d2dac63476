"""The command `txnbridge status`, which shows the status of a token's transaction."""

from __future__ import annotations

import click

from txnbridge import Status, Token, TokenState
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, when

CODES = {
    TokenState.COMMITTED: ExitCode.OK,
    TokenState.PREPARED: ExitCode.FAILED,
    TokenState.ABORTED: ExitCode.ABORTED,
    TokenState.UNKNOWN: ExitCode.UNKNOWN,
}


@_common.command("status")
@click.argument("token")
def command(cli: Cli, token: str) -> ExitCode:
    """Show the status of the transaction that TOKEN names, without changing it.

    Exit code 0: committed; 1: prepared, not ended yet; 5: aborted; 4: unknown.
    """
    parsed = Token.parse(token)
    with cli.look() as bridge:
        status = bridge.status(parsed)
    document = {
        "transaction": parsed.transaction,
        "state": status.state.value,
        "expires_at": status.expires_at,
        "reason": status.reason,
        "permanent": status.permanent,
    }
    cli.answer(document, in_words(status))
    return CODES[status.state]


def in_words(status: Status) -> str:
    """Return a token's status as one line of text."""
    text = status.state.value
    if status.state is TokenState.PREPARED and status.expires_at is not None:
        text += f", aborted at {when(status.expires_at)} if nobody ends it before"
    if status.permanent:
        text += " forever"
    return f"{text} ({status.reason})" if status.reason else text
