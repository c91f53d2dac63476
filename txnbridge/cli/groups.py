"""The commands `txnbridge groups`, which show a group's members and lag, and reset its positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import click

from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, when
from txnbridge.cli.read import place
from txnbridge.spi import GroupInfo, Partition

T = TypeVar("T")

command: _common.Group = _common.Group(
    "groups", help="List groups, show their members and lag, and set them back or forward."
)


@_common.command("list", command, help="List groups.")
def list_(cli: Cli) -> None:
    with cli.look() as bridge:
        found = bridge.admin.groups()
    documents = [{"group": name, "members": members} for name, members in found.items()]
    cli.listing(documents, "no groups", ["group", "members"], list(found.items()))


@_common.command("show", command, help="Show a group's members, and its position in each partition.")
@click.argument("group")
def show(cli: Cli, group: str) -> None:
    with cli.look() as bridge:
        found = bridge.admin.group(group)
    if cli.json:
        cli.document(_as_json(found))
        return
    if found.members:
        members = [(m.host, _named(m.partitions), when(m.until)) for m in found.members]
        cli.table(["member", "has", "gone unless heard of by"], members)
    else:
        cli.say("no members")
    cli.say("")
    holder = {partition: member.host for member in found.members for partition in member.partitions}
    positions = {p: ":".join(map(str, at)) for p, at in sorted(found.positions.items())}
    rows = [(_named([p]), at, found.lag[p], holder.get(p, "-")) for p, at in positions.items()]
    cli.table(["partition", "stands at", "lag", "is with"], rows)


@_common.command("reset", command, help="Set the positions of a group without members.")
@click.argument("group")
@click.option("--to", default="earliest", callback=place, help="earliest, latest or milliseconds since 1970.")
@click.option("--topic", "topics", multiple=True, help="Only in this topic; may be given more than once.")
@click.option("--yes", is_flag=True, help="Really do it.")
def reset(cli: Cli, group: str, to: str | int, topics: tuple[str, ...], yes: bool) -> ExitCode:
    with cli.look() as bridge:
        if not yes:
            lag = sum(bridge.admin.group(group).lag.values())
            text = f"would set group {group} to {to} in {', '.join(topics) or 'all its topics'}; its lag is {lag} now"
            return cli.would({"group": group, "lag": lag, "would": "reset"}, text, "--yes")
        reached = bridge.admin.reset_group(group, to, topics or None)
    lines = [f"{_named([p])} goes on at {':'.join(map(str, position))}" for p, position in sorted(reached.items())]
    cli.answer({"group": group, "positions": _by_name(reached)}, *lines)
    return ExitCode.OK


def _as_json(group: GroupInfo) -> dict[str, object]:
    return {
        "group": group.name,
        "members": [{**vars(m), "partitions": [_named([p]) for p in m.partitions]} for m in group.members],
        "positions": _by_name(group.positions),
        "lag": _by_name(group.lag),
    }


def _named(partitions: Iterable[Partition]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions)) or "-"


def _by_name(found: Mapping[Partition, T]) -> dict[str, T]:
    return {_named([partition]): value for partition, value in sorted(found.items())}
