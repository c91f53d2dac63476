"""The command `txnbridge redrive`, which sends dead letters back to their original topics."""

from __future__ import annotations

import click

import txnbridge
from txnbridge._process.redrive import DeadLetter, Redrive
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, printable, when


@_common.command("redrive")
@click.argument("topic")
@click.option("--limit", type=click.IntRange(min=1), help="Send back at most this many.")
@click.option("--reason", metavar="TEXT", help="Only those whose reason contains this.")
@click.option("--group", help="Only those of this group, to its retry topic, which no other group reads.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent back; change nothing.")
def command(cli: Cli, topic: str, limit: int | None, reason: str | None, group: str | None, dry_run: bool) -> None:
    """Send the dead letters in TOPIC back to the topics they came from, exactly once.

    Only dead letters that are in TOPIC at the start are sent back. If the command is killed or fails, run it again: it
    continues where it stopped. Every group of the original topic reads the messages again, not only the one that
    failed. With --group they go to that group's retry topic with the shortest delay, and no other group reads them.
    """
    # A mistyped topic name must not create a topic.
    with cli.look() as bridge:
        redrive = Redrive(bridge, topic, reason=reason, limit=limit, group=group)
        if dry_run:
            _show(cli, redrive)
            return
        with cli.progress("sending back", limit) as advance:
            done = redrive.run(advance)
    cli.answer(done._asdict(), f"sent back: {done.sent}" + f", to {redrive.retry_topic}" * bool(redrive.retry_topic))
    if done.left:
        cli.say(f"left, for another reason{' or group' * bool(group)}: {done.left}")
    if done.gone:
        cli.say(f"left, because their topics no longer exist: {done.gone}")
    if done.foreign:
        cli.say(f"left, without the headers that say where they came from: {done.foreign}")


def _show(cli: Cli, redrive: Redrive) -> None:
    found = redrive.preview()
    if cli.json:
        for message, letter in found:
            place = {"partition": message.partition, "position": message.position}
            cli.document({"dead_letter": place, **vars(letter)})
        return
    columns = ["dead letter", "comes from", "group", "attempts", "since", "reason"]
    cli.table(columns, [_as_row(message, letter) for message, letter in found])


def _as_row(message: txnbridge.Message, letter: DeadLetter) -> tuple[str, ...]:
    return (
        _place(message.topic, message.partition, message.position),
        _place(letter.topic, letter.partition, letter.position),
        printable(letter.group),
        str(letter.attempts),
        when(message.timestamp),
        printable(letter.reason),  # the reason may contain data of the message
    )


def _place(topic: str, partition: int, position: tuple[int, ...]) -> str:
    return f"{printable(topic)}[{partition}] {':'.join(map(str, position))}"
