"""The command `txnbridge log renew`, which begins a decision log anew that has lost records."""

from __future__ import annotations

from contextlib import closing

import click

from txnbridge._decisions.decisions import IncompleteLog
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode
from txnbridge.errors import InvalidState

command: _common.Group = _common.Group("log", help="Renew a decision log that has lost records.")
_AT_MOST = 20  # the largest number of ids, and of positions, that are shown


@_common.command("renew", command)
@click.option("--application", required=True, help="Whose decision log.")
@click.option("--decision-log", help="The log's store, if it is not the broker: as in connect().")
@click.option("--yes", is_flag=True, help="Really do it.")
def renew(cli: Cli, application: str, decision_log: str | None, yes: bool) -> ExitCode:
    """Renew a decision log in which no process can decide any more, because it was trimmed, truncated or deleted.

    All earlier decisions are forgotten: the outcome of an earlier token is unknown for ever, transactional ids have no
    owner, and work that an id without a token protected (a batch of a Spark query) may be done again. Stop all
    processes of the application first: each gets the error `EvidenceLost`, and has to be started again.
    """
    options = {} if decision_log is None else {"decision_log": decision_log}
    with cli.look(application=application, **options) as bridge, closing(bridge.decisions()) as decisions:
        lost = decisions.lost()
        if lost is None:
            text = f"the decision log of {application} has all of its evidence: there is nothing to renew"
            raise InvalidState(text)
        position = decisions.renew() if yes else None
    cli.answer({**_as_json(lost), "renewed_at": position and list(position)}, *_in_words(lost))
    if position is None:
        cli.say("renew the log with --yes, which forgets all of that, once no process of the application runs")
        return ExitCode.USAGE
    cli.say(f"the decision log of {application} was begun anew at {list(position)}")
    return ExitCode.OK


def _as_json(lost: IncompleteLog) -> dict[str, object]:
    return {
        "reason": lost.reason,
        "ids": [[id] if isinstance(id, str) else list(id) for id in lost.ids],
        "positions": [[group, *partition, list(at)] for (group, partition), at in lost.positions.items()],
        "decided": lost.decided,
    }


def _in_words(lost: IncompleteLog) -> list[str]:
    ids = ["/".join(map(str, [id] if isinstance(id, str) else id)) for id in lost.ids]
    groups = [f"{group} at {':'.join(map(str, at))} in {p[0]}[{p[1]}]" for (group, p), at in lost.positions.items()]
    return [
        f"the evidence is gone: {lost.reason}",
        f"decisions about {lost.decided} transactions with tokens are left, and can no longer be reported",
        f"the owners, decisions and done marks of these ids, and of ids that are lost already: {_some(ids)}",
        f"the positions of groups: {_some(groups)}",
    ]


def _some(names: list[str]) -> str:
    more = len(names) - _AT_MOST
    return (", ".join(names[:_AT_MOST]) or "none is left") + (f" and {more} more" if more > 0 else "")
