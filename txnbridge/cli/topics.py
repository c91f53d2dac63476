"""The commands `txnbridge topics`, which list, create, delete and grow topics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode

command: _common.Group = _common.Group("topics", help="List, create, delete and grow topics.")


@_common.command("list", command, help="List topics.")
@click.option("--internal", is_flag=True, help="Also list topics that txnbridge created for itself.")
def list_(cli: Cli, internal: bool) -> None:
    with cli.look() as bridge:
        topics = bridge.admin.topics(internal)
    rows = [(t.name, t.partitions, _retention(t.retention_seconds, t.retention_bytes)) for t in topics]
    cli.listing([asdict(topic) for topic in topics], "no topics", ["topic", "partitions", "retention"], rows)


def _retention(seconds: float | None, size: int | None) -> str:
    bounds = [None if seconds is None else f"{seconds:g} s", None if size is None else f"{size} bytes"]
    return ", ".join(bound for bound in bounds if bound) or "forever"


@_common.command("create", command, help="Create topics. An existing topic with as many partitions is not changed.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--partitions", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--retention-seconds", type=click.FloatRange(min=0, min_open=True), help="Older messages may be deleted.")
@click.option(
    "--retention-bytes", type=click.IntRange(min=1), help="Above this size the broker may delete the oldest messages."
)
def create(
    cli: Cli, names: Sequence[str], partitions: int, retention_seconds: float | None, retention_bytes: int | None
) -> None:
    with cli.connect() as bridge:
        for name in names:
            created = bridge.admin.create_topic(
                name, partitions, retention_seconds=retention_seconds, retention_bytes=retention_bytes
            )
            text = f"created {name}" if created else f"{name} is there already"
            cli.answer({"topic": name, "created": created}, text)


@_common.command("delete", command, help="Delete a topic and its messages.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Really do it.")
def delete(cli: Cli, name: str, yes: bool) -> ExitCode:
    with cli.look() as bridge:
        topic = bridge.admin.topic(name)
        if yes:
            bridge.admin.delete_topic(name)
    text = f"would delete {name} with its {topic.partitions} partitions and all messages; do it with --yes"
    cli.answer({"topic": name, "deleted": yes}, f"deleted {name}" if yes else text)
    return ExitCode.OK if yes else ExitCode.USAGE


@_common.command("grow", command, help="Add partitions to a topic. From then on keys are spread over all of them.")
@click.argument("name")
@click.argument("partitions", type=click.IntRange(min=1))
def grow(cli: Cli, name: str, partitions: int) -> None:
    with cli.look() as bridge:
        bridge.admin.grow_topic(name, partitions)
    cli.answer({"topic": name, "partitions": partitions}, f"{name} has {partitions} partitions")
