"""The command `txnbridge retries`, which lists messages that wait for a retry."""

from __future__ import annotations

import click

from txnbridge._process.retry_overview import WaitingTopic, waiting_topics
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, dash, when

command: _common.Group = _common.Group("retries", help="List messages that wait for a retry.")


@_common.command("list", command)
@click.option("--group", help="Only those of this group.")
def list_(cli: Cli, group: str | None) -> None:
    """List the retry topics, with the messages that wait there for another attempt of their processor.

    For each topic: how many messages are not due yet, how many are due and not processed yet, and of the message that
    is due first the time, the attempts so far, and the reason of the last failure.
    """
    with cli.look() as bridge:
        found = waiting_topics(bridge, group)
    columns = ["topic", "waiting", "due", "next due", "attempts", "reason"]
    cli.listing([vars(each) for each in found], "no retry topics", columns, [_as_row(each) for each in found])
    if any(each.due is None for each in found):
        cli.say("messages that are due are left out: this broker does not tell which of them are processed")


def _as_row(found: WaitingTopic) -> tuple[object, ...]:
    first = when(found.next_due), dash(found.attempts), dash(found.reason)
    return found.topic, found.waiting, dash(found.due), *first
